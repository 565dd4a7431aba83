"""The training step: micro-batches add gradients, `apply` makes one optimizer update of them. Knows no process, socket or file.

`Step` is what the trainer's loop needs; `GptStep` is stage 2. One compiled function per bucket and purpose, each with a fixed signature;
nothing here waits for the device: results are scalars that live there until the caller reads them, and where batch and seed are there
already (`trainer.step.upload`), a call copies nothing to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
import tensorflow as tf

from common.data.batch import batch_spec, empty_batch
from common.data.buckets import Bucket
from common.xtts import kernels, weights
from common.xtts.dims import ModelDims
from common.xtts.gpt import Gpt
from common.xtts.kernels import PLAIN, Kernels
from trainer.step.losses import gpt_losses
from trainer.step.optimizer import AdamW, clip_coefficient, global_norm, packed_global_norm, schedule
from trainer.step.scalars import Resident, packed, read
from trainer.step.snapshot import hold

Scalars = dict[str, tf.Tensor]
State = dict[str, dict[str, np.ndarray]]


class Step(Protocol):
    """One stage's arithmetic. A group is any number of `micro` calls followed by one `apply`, or one `update`."""

    trace_counts: Mapping[str, int]  # "micro/<bucket>", "update/<bucket>", …, "apply" -> how often traced: 1, or shapes leak

    def micro(self, bucket: int, batch: Mapping[str, Any], seed: tuple[int, int], scale: float) -> Scalars:
        """Add `scale` × the gradient of this micro-batch's mean loss to the group. Returns at least `loss` (unscaled) and `finite`."""

    def apply(self) -> Scalars:
        """Update from the group and begin the next one. Returns at least `loss` (the scaled sum), `grad_norm`, `learning_rate`, and
        `finite`: where it is false, weights and optimizer state kept every bit, and only the group was dropped.
        """

    def update(self, bucket: int, batch: Mapping[str, Any], seed: tuple[int, int]) -> Scalars:
        """`micro` with scale 1 and `apply`, for groups of one batch."""

    def evaluate(self, bucket: int, batch: Mapping[str, Any]) -> Scalars:
        """Sums and counts of the losses, without dropout, changing nothing."""

    def read(self, scalars: Scalars) -> dict[str, float]:
        """The values of what `apply` or `update` returned. Waits for the device."""

    def state_dict(self) -> State:
        """{"model": …, "optimizer": …}, NumPy copies."""

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """Like `state_dict`, but the values become arrays when NumPy asks for them, and are those of now all the same."""

    def load_state_dict(self, state: State) -> None:
        """Inverse of `state_dict`; drops a group begun. WeightsError, and nothing changes in that part, where it does not fit."""


@dataclass(frozen=True)
class StepOptions:
    """Everything about the update that is not the network. Defaults are XTTS's recipe (coqui-tts, recipes/ljspeech/xtts_v2)."""

    learning_rate: float = 5e-6
    betas: tuple[float, float] = (0.9, 0.96)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    clip_norm: float = 0.0  # 0: no clipping
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: int = 0
    total_steps: int = 0  # where the cosine ends
    final_lr_ratio: float = 0.1  # of learning_rate, at the cosine's end
    text_loss_weight: float = 0.01
    decay_latents: bool = False  # weight decay on the perceiver's latents and gamma, too
    coqui_init: bool = False  # token embeddings born N(0, 1)
    compute_dtype: str = "float32"  # a Keras dtype policy; "mixed_bfloat16" keeps float32 weights
    kernels: Kernels = PLAIN
    dropout: float | None = None  # None: the model's
    attention_dropout: float | None = None  # None: as dropout
    code_dropout: float = 0.0  # share of the audio codes that are hidden from the model as inputs
    recompute: bool = False  # blocks again in the backward pass instead of their activations in memory
    mel_dtype: str = "float32"  # of cond_mel on arrival
    jit: bool = False  # XLA: faster on GPUs, slower than graph mode on CPUs
    init_seed: int | None = 0  # None: zeros, when weights will be loaded anyway


class GptStep:
    """Stage 2: the GPT stack on batches of contiguous rows (see `common.xtts.gpt`)."""

    def __init__(self, dims: ModelDims, options: StepOptions, buckets: Sequence[Bucket]):
        self.dims, self.options, self.buckets = dims, options, tuple(buckets)
        # What a recomputed block keeps is its input: in float32 it would take twice the memory that recomputation is there to save.
        wide = options.kernels.wide_residual and not options.recompute
        self.kernels = replace(options.kernels, jit=options.jit, wide_residual=wide)
        self.model = Gpt(
            dims.gpt,
            dtype=options.compute_dtype,
            seed=options.init_seed,
            parity_init=options.coqui_init,
            rate=options.dropout,
            attention_dropout=options.attention_dropout,
            code_dropout=options.code_dropout,
            recompute=options.recompute,
        )
        self.optimizer = AdamW(
            list(weights.tensors(self.model).values()),
            schedule(options.schedule, options.learning_rate, options.warmup_steps, options.total_steps, options.final_lr_ratio),
            betas=options.betas,
            eps=options.eps,
            weight_decay=options.weight_decay,
            decay_parity=options.decay_latents,
        )
        self._copies: dict[int, tf.Variable] = {}
        if self.kernels.weight_copies:
            matrices = [t.variable for t in self.optimizer.tensors if t.decay == "yes"]
            self._copies = {id(v): tf.Variable(tf.cast(v.value, self.model.compute_dtype)) for v in matrices}
        # Made when a group is begun: groups of one batch need none, and they are as large as the weights.
        self._accumulators: list[tf.Variable] = []
        # loss, text_ce, audio_ce of the group so far, each times its micro-batch's scale.
        self._group_losses = tf.Variable(tf.zeros([3]), trainable=False)
        self._resident = Resident(self._group_losses.device)
        self.trace_counts: Counter[str] = Counter()
        self._signatures = [_signature(batch_spec("gpt", bucket, dims, options.mel_dtype)) for bucket in buckets]
        seed, scalar, switch = tf.TensorSpec([2], tf.int32), tf.TensorSpec([], tf.float32), tf.TensorSpec([], tf.bool)
        self._micro = self._compile_each("micro", self._traced_micro, seed, scalar)
        self._update = self._compile_each("update", self._traced_update, seed, switch)
        self._evaluate = self._compile_each("evaluate", self._traced_evaluate)
        self._apply = self._compile("apply", self._traced_apply, [])

    def micro(self, bucket: int, batch: Mapping[str, Any], seed: tuple[int, int], scale: float) -> Scalars:
        """See `Step.micro`. Returns `loss`, `text_ce`, `audio_ce`, their sums and counts, and `finite` (bool).

        `seed` fixes the dropout. `scale` = 1 / (micro-batches in the group) is the original's mean of means. ValueError on a batch of
        another bucket.
        """
        inputs = self._inputs(bucket, batch)
        self._allocate_group()
        return self._micro[bucket](inputs, tf.convert_to_tensor(seed, tf.int32), self._resident(scale, tf.float32))

    def apply(self) -> Scalars:
        """See `Step.apply`. Returns `loss`, `text_ce`, `audio_ce` (scaled sums over the group), `grad_norm` (before clipping),
        `learning_rate`, `finite`.
        """
        self._allocate_group()
        return self._apply()

    def update(self, bucket: int, batch: Mapping[str, Any], seed: tuple[int, int]) -> Scalars:
        """See `Step.update`: the same numbers as `micro` and `apply`, in one compiled function and without accumulators."""
        return self._update[bucket](self._inputs(bucket, batch), tf.convert_to_tensor(seed, tf.int32), self._resident(True, tf.bool))

    def evaluate(self, bucket: int, batch: Mapping[str, Any]) -> Scalars:
        """See `Step.evaluate`. Returns `text_sum`, `text_count`, `audio_sum`, `audio_count`."""
        return self._evaluate[bucket](self._inputs(bucket, batch))

    def dry_run(self, bucket: int, grouped: bool) -> None:
        """Run the training function of a bucket (`micro` if `grouped`, else `update`) on padding rows, and change nothing.

        It compiles what training will use and takes the memory that training will take; TensorFlow's errors surface unchanged.
        """
        batch = self._inputs(bucket, empty_batch("gpt", self.buckets[bucket], self.dims, self.options.mel_dtype))
        seed = tf.zeros([2], tf.int32)
        if grouped:
            self._allocate_group()
            out = self._micro[bucket](batch, seed, self._resident(0.0, tf.float32))
            self._clear()
        else:
            out = self._update[bucket](batch, seed, self._resident(False, tf.bool))
            self.read(out)  # its first time takes memory, too
        out["loss"].numpy()  # wait for it

    def dry_evaluate(self, bucket: int) -> None:
        """`dry_run` of `evaluate`."""
        batch = empty_batch("gpt", self.buckets[bucket], self.dims, self.options.mel_dtype)
        self.evaluate(bucket, batch)["audio_sum"].numpy()

    def state_dict(self) -> State:
        """See `Step.state_dict`; the model in Coqui's names, without the prefix `gpt.`."""
        return {"model": weights.state_dict(self.model), "optimizer": self.optimizer.state_dict()}

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """See `Step.snapshot`."""
        own = {f"model/{key}": (t, t.variable.value) for key, t in weights.tensors(self.model).items()}
        for name, slots in self.optimizer.slots():
            own |= {f"optimizer/{name}.{t.key}": (t, slot) for t, slot in zip(self.optimizer.tensors, slots, strict=True)}
        state: dict[str, dict[str, Any]] = {"model": {}, "optimizer": {"step": np.asarray(self.optimizer.t.numpy(), np.int64)}}
        for name, value in hold((name, t, variable) for name, (t, variable) in own.items()).items():
            part, _, key = name.partition("/")
            state[part][key] = value
        return state

    def read(self, scalars: Scalars) -> dict[str, float]:
        """See `Step.read`."""
        return read(scalars)

    def load_state_dict(self, state: State) -> None:
        """See `Step.load_state_dict`."""
        weights.load_state_dict(self.model, state["model"])
        self.weights_changed()
        self.optimizer.load_state_dict(state["optimizer"])
        self._clear()

    def weights_changed(self) -> None:
        """To be told where the model's weights were set by other means than this step's."""
        for t in self.optimizer.tensors:
            if id(t.variable) in self._copies:
                self._copies[id(t.variable)].assign(tf.cast(t.variable.value, self.model.compute_dtype))

    def losses(self, batch: Mapping[str, tf.Tensor], seed: tf.Tensor | None) -> Scalars:
        """Forward pass and losses of one micro-batch, as in `gpt_losses`; `seed` None: no dropout. Traceable."""
        model, first = self.model, self.dims.gpt.num_latents
        latents = model.style_latents(batch["cond_mel"])
        hidden = model.hidden(latents, batch["ids"], batch["positions"], seed)
        # Static slices: text can only be in the first positions, so its large head runs on those alone; the audio head's surplus is cheap.
        text_len = batch["text_targets"].shape[1]
        return gpt_losses(
            model.text_logits(hidden[:, first : first + text_len]),
            model.audio_logits(hidden[:, first:]),
            batch["text_targets"],
            batch["audio_targets"],
            batch["weights"],
            self.options.text_loss_weight,
            num_classes=(self.dims.gpt.num_text_tokens, self.dims.gpt.num_audio_tokens),
        )

    def _compile(self, name: str, function, signature: list):
        def traced(*args):
            self.trace_counts[name] += 1
            with kernels.use(self.kernels):
                return function(*args)

        compiled = tf.function(traced, input_signature=signature, jit_compile=self.options.jit, autograph=False)
        # TensorFlow takes these for one function that is traced again and again; `trace_counts` knows better.
        compiled._omit_frequent_tracing_warning = True
        return compiled

    def _compile_each(self, name: str, function, *more: tf.TensorSpec) -> list:
        return [self._compile(f"{name}/{bucket}", function, [spec, *more]) for bucket, spec in enumerate(self._signatures)]

    def _gradients(self, batch, seed, scale=None) -> tuple[Scalars, tf.Tensor, list[tf.Tensor]]:
        """`losses`, the three of them that a group sums up, and the gradient of scale × loss."""
        watched = [self._copies.get(id(t.variable), t.variable.value) for t in self.optimizer.tensors]
        with kernels.use_copies(self._copies):
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(watched)
                out = self.losses(batch, seed)
                scaled = out["loss"] if scale is None else out["loss"] * tf.cast(scale, out["loss"].dtype)
            gradients = tape.gradient(scaled, watched)
        losses = tf.cast(tf.stack([out["loss"], out["text_ce"], out["audio_ce"]]), tf.float32)
        return out, losses, [tf.cast(g, p.dtype) for g, p in zip(gradients, self.optimizer.parameters, strict=True)]

    def _traced_micro(self, batch, seed, scale) -> Scalars:
        out, losses, gradients = self._gradients(batch, seed, scale)
        for accumulator, gradient in zip(self._accumulators, gradients, strict=True):
            accumulator.assign_add(gradient)
        self._group_losses.assign_add(losses * scale)
        return {**out, "finite": tf.math.is_finite(out["loss"])}

    def _traced_update(self, batch, seed, enabled) -> Scalars:
        _, losses, gradients = self._gradients(batch, seed)
        return self._updated(gradients, losses, enabled)

    def _traced_evaluate(self, batch) -> Scalars:
        with kernels.use_copies(self._copies):
            out = self.losses(batch, seed=None)
        return {name: out[name] for name in ("text_sum", "text_count", "audio_sum", "audio_count")}

    def _traced_apply(self) -> Scalars:
        gradients = [tf.convert_to_tensor(a) for a in self._accumulators]
        report = self._updated(gradients, tf.convert_to_tensor(self._group_losses), tf.constant(True))
        self._clear()
        return report

    def _updated(self, gradients: list[tf.Tensor], losses: tf.Tensor, enabled: tf.Tensor) -> Scalars:
        norm = packed_global_norm(gradients) if self.kernels.lean else global_norm(gradients)
        finite = tf.math.is_finite(norm) & tf.reduce_all(tf.math.is_finite(losses))
        if self.options.clip_norm:
            coefficient = clip_coefficient(norm, self.options.clip_norm)
            gradients = [g * coefficient for g in gradients]
        copies = [self._copies.get(id(t.variable)) for t in self.optimizer.tensors]
        lr = self.optimizer.update(gradients, enabled=finite & enabled, copies=copies)
        scalars = {"loss": losses[0], "text_ce": losses[1], "audio_ce": losses[2]}
        scalars |= {"grad_norm": norm, "learning_rate": lr, "finite": finite}
        return packed(scalars)

    def _allocate_group(self) -> None:
        if not self._accumulators:
            self._accumulators = [tf.Variable(tf.zeros_like(p), trainable=False) for p in self.optimizer.parameters]

    def _clear(self) -> None:
        for accumulator in (*self._accumulators, self._group_losses):
            accumulator.assign(tf.zeros_like(accumulator))

    def _inputs(self, bucket: int, batch: Mapping[str, Any]) -> dict[str, tf.Tensor]:
        """The bucket's fields of `batch` as tensors; ValueError where a field is missing or of another shape or dtype."""
        inputs = {}
        for name, spec in self._signatures[bucket].items():
            if name not in batch:
                raise ValueError(f"bucket {bucket}: the batch has no field {name}; it has {', '.join(sorted(batch))}")
            value = tf.convert_to_tensor(batch[name])
            if value.dtype != spec.dtype or value.shape != spec.shape:
                got, wanted = (f"{x.dtype.name}{x.shape.as_list()}" for x in (value, spec))
                raise ValueError(f"bucket {bucket}: {name} is {got}, the bucket's is {wanted}")
            inputs[name] = value
        return inputs


def _signature(spec: Mapping[str, tuple[np.dtype, tuple[int, ...]]]) -> dict[str, tf.TensorSpec]:
    return {name: tf.TensorSpec(shape, tf.as_dtype(dtype)) for name, (dtype, shape) in spec.items()}
