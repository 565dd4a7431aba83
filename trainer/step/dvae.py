"""Stage 1: training the DVAE. `DvaeStep` keeps the protocol `trainer.step.contract.Step`.

Encoder and decoder learn by gradient (reconstruction + commitment, straight-through past the
quantiser), the codebook by moving averages of the encoder outputs that chose each code. Codes that
fall out of use restart from encoder outputs of the group, drawn by the micro-batch's seed; the
first update restarts all of them, so the codebook begins from data. `micro` only adds to
accumulators: every weight, moment and average changes in `apply`, so a skipped group changes no
bit of them.

The reconstruction is judged against predicting the batch's mean mel; the codebook by its
perplexity, exp of the entropy of code use. Network, decay 0.99 and eps 1e-5 are coqui-tts's
(TTS/tts/layers/xtts/dvae.py). It has no training code, so losses and restarts are ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from common.data.batch import batch_spec
from common.data.buckets import Bucket
from common.xtts import weights
from common.xtts.dims import ModelDims
from common.xtts.dvae import EMA_DECAY, CodebookUse, Dvae, codes_of_frames
from common.xtts.operations import Operations, use
from trainer.step.contract import Scalars, State, StepOptions
from trainer.step.optimizer import AdamW, clip_coefficient, global_norm, schedule
from trainer.step.scalars import Resident, packed, read

COMMITMENT = 0.25  # weight of |z - sg(e)|²
DEAD_BELOW = 0.1  # of the mean use; a code used less restarts
_GROUP = ("loss", "recon", "commitment", "baseline")


@dataclass(frozen=True)
class Job:
    """Something to compile ahead, as `trainer.step.regions.Program`."""

    name: str
    compile: Callable[[], None]


class DvaeStep:
    """Stage 1 on batches of mel crops: mel [B, F, M] normalised, num_frames int32[B], weights
    float32[B]; F a multiple of 4.
    """

    compiles = True

    def __init__(
        self, dims: ModelDims, options: StepOptions, buckets: Sequence[Bucket], tunes: bool = False
    ):
        """tunes: the weights are those of a trained DVAE.

        Its codes keep their meaning: averages are long from the first update on, and a
        code that a corpus of few voices does not use stays where it is instead of restarting
        elsewhere.
        """
        self.dims, self.options, self.tunes = dims, options, tunes
        for i, bucket in enumerate(buckets):
            if bucket.row_len % 4:
                raise ValueError(
                    f"bucket {i}: crops of {bucket.row_len} frames do not divide into codes of 4"
                    " frames; change crop_frames"
                )
        on_gpu = bool(tf.config.list_logical_devices("GPU"))
        self._operations = Operations(products=options.jit and on_gpu)  # as the producers'
        self.model = Dvae(dims.dvae, dtype=options.compute_dtype)
        if options.init_seed is not None:
            self.model.initialise(options.init_seed)
        self.optimizer = AdamW(
            list(weights.tensors(self.model).values()),
            schedule(
                options.schedule,
                options.learning_rate,
                options.warmup_steps,
                options.total_steps,
                options.final_lr_ratio,
            ),
            betas=options.betas,
            eps=options.eps,
            weight_decay=options.weight_decay,
        )
        self._accumulators = [_zeros(p.shape) for p in self.optimizer.parameters]
        self._group_losses = _zeros([len(_GROUP)])
        self._resident = Resident(self._group_losses.device)
        codebook = (dims.dvae.codebook_dim, dims.dvae.num_codes)
        self._use = CodebookUse(_zeros(codebook[1:]), _zeros(codebook), _zeros(codebook))
        self.trace_counts: Counter[str] = Counter()
        self._signatures = [
            {
                name: tf.TensorSpec(shape, tf.as_dtype(dtype))
                for name, (dtype, shape) in batch_spec("dvae", b, dims, options.mel_dtype).items()
            }
            for b in buckets
        ]
        self._micro = [self._compile_micro(i) for i in range(len(buckets))]
        self._evaluate = [self._compile_evaluate(i) for i in range(len(buckets))]
        switch = [tf.TensorSpec([], tf.bool)]
        self._apply = tf.function(
            self._traced_apply, input_signature=switch, jit_compile=options.jit, autograph=False
        )

    def micro(
        self, bucket: int, batch: Mapping[str, Any], seed: tuple[int, int], scale: float
    ) -> Scalars:
        """See `Step.micro`.

        Returns `loss`, `recon`, `commitment`, `baseline`, `perplexity` of this batch, and `finite`.

        `seed` fixes the restart candidates. ValueError on a batch of another bucket.
        """
        inputs = self._inputs(bucket, batch)
        return self._micro[bucket](
            inputs, tf.convert_to_tensor(seed, tf.int32), self._resident(scale, tf.float32)
        )

    def apply(self) -> Scalars:
        """See `Step.apply`.

        Returns `loss`, `recon`, `commitment`, `baseline` (scaled sums over the group), `perplexity`
        (of the group's codes), `codebook_perplexity` (of the moving averages), `restarted` (codes),
        `grad_norm`, `learning_rate`, `finite`.
        """
        return self._apply(self._resident(True, tf.bool))

    def update(self, bucket: int, batch: Mapping[str, Any], seed: tuple[int, int]) -> Scalars:
        """See `Step.update`."""
        self.micro(bucket, batch, seed, 1.0)
        return self.apply()

    def read(self, scalars: Scalars) -> dict[str, float]:
        """See `Step.read`."""
        return read(scalars)

    def evaluate(self, bucket: int, batch: Mapping[str, Any]) -> Scalars:
        """See `Step.evaluate`.

        Returns `_sum` and `_count` of `recon`, `baseline`, `commitment` and `perplexity`; the last,
        of each batch on its own, is weighted by its codes.
        """
        return self._evaluate[bucket](self._inputs(bucket, batch))

    def dry_run(self, bucket: int, grouped: bool = True) -> None:
        """Run training's functions on rows of padding, which count nothing, and change nothing; see
        `GptStep.dry_run`.
        """
        del grouped
        self._dry_micro(bucket)
        self._dry_apply()

    def dry_evaluate(self, bucket: int) -> None:
        """`dry_run` of `evaluate`."""
        self.evaluate(bucket, self._padding(bucket))["recon_sum"].numpy()

    def programs(self, bucket: int, grouped: bool, training: bool) -> list[Job]:
        """See `GptStep.programs`."""
        del grouped
        if not self.options.jit:
            return []
        if not training:
            return [Job("evaluation", lambda: self.dry_evaluate(bucket))]
        return [Job("training", lambda: self._dry_micro(bucket)), Job("update", self._dry_apply)]

    def _dry_micro(self, bucket: int) -> None:
        self.micro(bucket, self._padding(bucket), (0, 0), 0.0)["loss"].numpy()

    def _dry_apply(self) -> None:
        self.read(self._apply(self._resident(False, tf.bool)))

    def _padding(self, bucket: int) -> dict[str, Any]:
        return {
            name: tf.zeros(spec.shape, spec.dtype)
            for name, spec in self._signatures[bucket].items()
        }

    def state_dict(self) -> State:
        """See `Step.state_dict`; the model in the names of Coqui's dvae.pth, with the codebook's
        averages.
        """
        return {"model": weights.state_dict(self.model), "optimizer": self.optimizer.state_dict()}

    def snapshot(self) -> State:
        """See `Step.snapshot`; copied at once, being small."""
        return self.state_dict()

    def load_state_dict(self, state: State) -> None:
        """See `Step.load_state_dict`."""
        weights.load_state_dict(self.model, state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._clear()

    def losses(self, batch: Mapping[str, tf.Tensor]) -> tuple[Scalars, dict[str, tf.Tensor]]:
        """Forward pass: loss scalars with their sums and counts, and the quantiser's `z`, `codes`,
        `valid`. Traceable.
        """
        mel, row_weights = tf.cast(batch["mel"], tf.float32), batch["weights"]
        frame_mask = _mask(batch["num_frames"], mel.shape[1]) * row_weights[:, None]
        code_mask = (
            _mask(codes_of_frames(batch["num_frames"]), mel.shape[1] // 4) * row_weights[:, None]
        )
        with use(self._operations):
            z = tf.cast(self.model.encode(mel), tf.float32)
            codes = self.model.nearest(z)
            vectors = self.model.embed(codes)
            decoded = self.model.decode_vectors(z + tf.stop_gradient(vectors - z))
        decoded = tf.cast(decoded, tf.float32)
        frames, num_codes = tf.reduce_sum(frame_mask), tf.reduce_sum(code_mask)
        mean_mel = tf.math.divide_no_nan(
            tf.reduce_sum(mel * frame_mask[:, :, None], [0, 1]), frames
        )
        out = {
            "recon_sum": _masked_sum(tf.square(decoded - mel), frame_mask),
            "recon_count": frames,
            "baseline_sum": _masked_sum(tf.square(mean_mel - mel), frame_mask),
            "baseline_count": frames,
            "commitment_sum": _masked_sum(tf.square(z - tf.stop_gradient(vectors)), code_mask),
            "commitment_count": num_codes,
        }
        for name in ("recon", "baseline", "commitment"):
            out[name] = tf.math.divide_no_nan(out[f"{name}_sum"], out[f"{name}_count"])
        out["loss"] = out["recon"] + COMMITMENT * out["commitment"]
        return out, {"z": tf.stop_gradient(z), "codes": codes, "valid": code_mask > 0}

    def _compile_micro(self, bucket: int):
        def micro(batch, seed, scale):
            self.trace_counts[f"micro/{bucket}"] += 1
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(self.optimizer.parameters)
                out, quantised = self.losses(batch)
                scaled = out["loss"] * scale
            for accumulator, gradient in zip(
                self._accumulators, tape.gradient(scaled, self.optimizer.parameters), strict=True
            ):
                accumulator.assign_add(gradient)
            self._group_losses.assign_add(tf.stack([out[name] for name in _GROUP]) * scale)
            use = self.model.codebook.use(**quantised, seed=seed)
            self._use.counts.assign_add(use.counts)
            self._use.sums.assign_add(use.sums)
            # The group's last batch that has a valid position provides the candidates.
            self._use.candidates.assign(
                tf.where(tf.reduce_sum(use.counts) > 0, use.candidates, self._use.candidates)
            )
            reported = {name: out[name] for name in _GROUP}
            return {
                **reported,
                "perplexity": perplexity(use.counts),
                "finite": tf.math.is_finite(out["loss"]),
            }

        signature = [
            self._signatures[bucket],
            tf.TensorSpec([2], tf.int32),
            tf.TensorSpec([], tf.float32),
        ]
        return tf.function(
            micro, input_signature=signature, jit_compile=self.options.jit, autograph=False
        )

    def _compile_evaluate(self, bucket: int):
        def evaluate(batch):
            self.trace_counts[f"evaluate/{bucket}"] += 1
            out, quantised = self.losses(batch)
            use = self.model.codebook.use(**quantised, seed=tf.zeros([2], tf.int32))
            sums = {name: value for name, value in out.items() if name.endswith(("_sum", "_count"))}
            num_codes = out["commitment_count"]
            return {
                **sums,
                "perplexity_sum": perplexity(use.counts) * num_codes,
                "perplexity_count": num_codes,
            }

        return tf.function(
            evaluate,
            input_signature=[self._signatures[bucket]],
            jit_compile=self.options.jit,
            autograph=False,
        )

    def _traced_apply(self, enabled: tf.Tensor) -> Scalars:
        self.trace_counts["apply"] += 1
        gradients = [tf.convert_to_tensor(a) for a in self._accumulators]
        norm, losses = global_norm(gradients), tf.convert_to_tensor(self._group_losses)
        finite = tf.math.is_finite(norm) & tf.reduce_all(tf.math.is_finite(losses))
        if self.options.clip_norm:
            coefficient = clip_coefficient(norm, self.options.clip_norm)
            gradients = [g * coefficient for g in gradients]
        lr = self.optimizer.update(gradients, enabled=finite & enabled)
        use = CodebookUse(*(tf.convert_to_tensor(v) for v in self._use))
        codebook = self.model.codebook
        # A young encoder moves fast: an average over 100 updates would lag behind it, so the window
        # grows with the run.
        t = tf.cast(self.optimizer.t, tf.float32)
        decay = EMA_DECAY if self.tunes else tf.minimum(EMA_DECAY, t / (t + 9.0))
        new, dead = codebook.updated(use, decay, DEAD_BELOW, keep_unused=self.tunes)
        for key, value in new.items():
            variable = getattr(codebook, key).value
            variable.assign(tf.where(finite & enabled, value, variable))
        report = {
            "perplexity": perplexity(use.counts),
            # Without codes that have just restarted: at step 1 that is nearly all of them, evenly.
            "codebook_perplexity": perplexity(tf.where(dead, 0.0, codebook.cluster_size)),
            "restarted": tf.where(finite, tf.reduce_sum(tf.cast(dead, tf.int32)), 0),
        }
        self._clear()
        group = {name: losses[i] for i, name in enumerate(_GROUP)}
        return packed({**group, **report, "grad_norm": norm, "learning_rate": lr, "finite": finite})

    def _clear(self) -> None:
        for accumulator in (*self._accumulators, self._group_losses, *self._use):
            accumulator.assign(tf.zeros_like(accumulator))

    def _inputs(self, bucket: int, batch: Mapping[str, Any]) -> dict[str, tf.Tensor]:
        """The bucket's fields of `batch` as tensors; ValueError where a field is missing or of
        another shape or dtype.
        """
        inputs = {}
        for name, spec in self._signatures[bucket].items():
            if name not in batch:
                raise ValueError(
                    f"bucket {bucket}: the batch has no field {name}; it has"
                    f" {', '.join(sorted(batch))}"
                )
            inputs[name] = tf.convert_to_tensor(batch[name])
            if not spec.is_compatible_with(inputs[name]):
                raise ValueError(
                    f"bucket {bucket}: {name} is {inputs[name].dtype.name}{inputs[name].shape}, not"
                    f" {spec.dtype.name}{spec.shape}"
                )
        return inputs


def perplexity(counts: tf.Tensor) -> tf.Tensor:
    """exp of the entropy of code use: counts float32 [K] >= 0 -> scalar in [1, K]; 1 without any
    count.
    """
    p = tf.math.divide_no_nan(counts, tf.reduce_sum(counts))
    return tf.exp(-tf.reduce_sum(tf.math.xlogy(p, p)))


def _mask(lengths: tf.Tensor, size: int) -> tf.Tensor:
    """1.0 where position < length: int32 [B] -> float32 [B, size]."""
    return tf.cast(tf.range(size)[None, :] < lengths[:, None], tf.float32)


def _masked_sum(values: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    """Sum over [B, T] of the mean over channels: values [B, T, C], mask [B, T]."""
    return tf.reduce_sum(tf.reduce_mean(values, -1) * mask)


def _zeros(shape) -> tf.Variable:
    return tf.Variable(tf.zeros(shape), trainable=False)
