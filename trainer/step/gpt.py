"""The training step: micro-batches add gradients, `apply` makes one optimizer update of them.

Knows no process, socket or file.

`GptStep` is stage 2, as `trainer.step.contract.Step` asks for. One function per bucket and purpose,
each with a fixed signature: for XLA a chain of its programs (`trainer.step.chained`), else one
graph (`trainer.step.one_graph`). Nothing here waits for the device: results are scalars that live
there until the caller reads them, and where batch and seed are there already
(`trainer.step.upload`), a call copies nothing to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from xxhash import xxh3_128_hexdigest

from common.data.batch import batch_spec, empty_batch
from common.data.buckets import Bucket
from common.xtts import weights
from common.xtts.dims import ModelDims
from common.xtts.gpt import Gpt
from common.xtts.operations import PLAIN, Operations, mixed, use
from trainer.step.chained import Chained
from trainer.step.contract import Ranks, Scalars, State, StepOptions
from trainer.step.fp8 import in_fp8
from trainer.step.group import Group
from trainer.step.losses import gpt_losses
from trainer.step.one_graph import OneGraph, gradients
from trainer.step.optimizer import AdamW, schedule
from trainer.step.regions import Chain, Program, as_words, word_spec
from trainer.step.scalars import Resident, read
from trainer.step.scaling import HISTORY, Scaling
from trainer.step.snapshot import hold


class GptStep:
    """Stage 2: the GPT stack on batches of contiguous rows (see `common.xtts.gpt`)."""

    compiles = True

    def __init__(self, dims: ModelDims, options: StepOptions, buckets: Sequence[Bucket]):
        self.dims, self.options, self.buckets = dims, options, tuple(buckets)
        self.operations = _operations(options)
        self.model = Gpt(dims.gpt, options, dtype=options.compute_dtype, seed=options.init_seed)
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
            decay_latents=options.decay_latents,
        )
        self._group = Group(self.optimizer.parameters)
        self._ranks: Ranks | None = None
        self._resident = Resident(self._group.losses.device)
        self.trace_counts: Counter[str] = Counter()
        self._signatures = [
            _signature(batch_spec("gpt", bucket, dims, options.mel_dtype)) for bucket in buckets
        ]
        seed, scalar, switch = (
            tf.TensorSpec([2], tf.int32),
            tf.TensorSpec([], tf.float32),
            tf.TensorSpec([], tf.bool),
        )
        self._chained: Chained | None = None
        if options.jit:
            self._signatures = [
                {name: word_spec(spec) for name, spec in s.items()} for s in self._signatures
            ]
            seed = word_spec(seed)
            made = (self.model, self.optimizer, self.operations, options, self._signatures)
            self._chained = Chained(*made, self._head_losses, self._group)
        elif options.fp8:
            raise ValueError("products in FP8 need StepOptions.jit")
        self._way = self._chained or OneGraph(self.losses, self.optimizer, options, self._group)
        self.scaling = self._chained.scaling if self._chained else Scaling([], None)
        self._micro = self._trace_each("micro", self._way.micro, seed, scalar)
        self._update = self._trace_each("update", self._way.update, seed, switch)
        self._evaluate = self._trace_each("evaluate", self._way.evaluate)
        self._apply = self._trace("apply", self._way.apply, [])
        self._squares = self._trace("squares", self._way.squares, [])

    def micro(
        self, bucket: int, batch: Mapping[str, Any], seed: tuple[int, int], scale: float
    ) -> Scalars:
        """See `Step.micro`.

        Returns `loss`, `text_ce`, `audio_ce`, their sums and counts, and `finite` (bool).

        `seed` fixes the dropout. `scale` = 1 / (micro-batches in the group) is the original's mean
        of means. ValueError on a batch of another bucket.
        """
        inputs = self._inputs(bucket, batch)
        self._group.allocate()
        self.programs(bucket, grouped=True, training=True)
        return self._micro[bucket](inputs, self._seed(seed), self._resident(scale, tf.float32))

    def apply(self) -> Scalars:
        """See `Step.apply`.

        Returns `loss`, `text_ce`, `audio_ce` (scaled sums over the group), `grad_norm` (before
        clipping), `learning_rate`, `finite`.
        """
        self._group.allocate()
        if self._chained:
            self._chained.updates(grouped=True)
        if self._ranks is not None:
            self._ranks.meet()
            self.scaling.add_up(self._ranks, self._group.gradients, self._group.losses)
            self._group.agree_on_norm(self._ranks, self._squares())
        return self._apply()

    def share(self, ranks: Ranks) -> None:
        """See `SharedStep.share`: gradients and losses are added up before the update, and its norm
        is the first trainer's.
        """
        self._ranks = ranks
        self._group.share(self._way.num_squares)
        self._apply = self._trace("apply", self._way.apply, [])

    def time_sum(self) -> tuple[int, float]:
        """See `SharedStep.time_sum`."""
        return self._group.time_sum(self._ranks)

    def digests(self) -> dict[str, str]:
        """See `SharedStep.digests`."""
        found = weights.tensors(self.model).items()
        return {key: xxh3_128_hexdigest(t.variable.numpy().tobytes()) for key, t in found}

    def update(self, bucket: int, batch: Mapping[str, Any], seed: tuple[int, int]) -> Scalars:
        """See `Step.update`: the same numbers as `micro` and `apply`, in one compiled function and
        without accumulators.
        """
        self.programs(bucket, grouped=False, training=True)
        return self._update[bucket](
            self._inputs(bucket, batch), self._seed(seed), self._resident(True, tf.bool)
        )

    def evaluate(self, bucket: int, batch: Mapping[str, Any]) -> Scalars:
        """See `Step.evaluate`. Returns `text_sum`, `text_count`, `audio_sum`, `audio_count`."""
        self.programs(bucket, grouped=False, training=False)
        return self._evaluate[bucket](self._inputs(bucket, batch))

    def dry_run(self, bucket: int, grouped: bool) -> None:
        """Run the training function of a bucket (`micro` if `grouped`, else `update`) on padding
        rows, and change nothing.

        It compiles what training will use and takes the memory that training will take;
        TensorFlow's errors surface unchanged.
        """
        batch = self._inputs(
            bucket, empty_batch("gpt", self.buckets[bucket], self.dims, self.options.mel_dtype)
        )
        self.programs(bucket, grouped, training=True)
        seed = self._seed((0, 0))
        if grouped:
            self._group.allocate()
            out = self._micro[bucket](batch, seed, self._resident(0.0, tf.float32))
            self._clear()
        else:
            out = self._update[bucket](batch, seed, self._resident(False, tf.bool))
            self.read(out)  # the first read takes memory, too
        out["loss"].numpy()  # wait for it

    def dry_evaluate(self, bucket: int) -> None:
        """`dry_run` of `evaluate`."""
        batch = empty_batch("gpt", self.buckets[bucket], self.dims, self.options.mel_dtype)
        self.evaluate(bucket, batch)["audio_sum"].numpy()

    def state_dict(self) -> State:
        """See `Step.state_dict`; the model in Coqui's names, without the prefix `gpt.`."""
        optimizer = self.optimizer.state_dict() | self.scaling.state_dict()
        return {"model": weights.state_dict(self.model), "optimizer": optimizer}

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """See `Step.snapshot`."""
        own = {
            f"model/{key}": (t, t.variable.value) for key, t in weights.tensors(self.model).items()
        }
        for name, slots in self.optimizer.slots():
            own |= {
                f"optimizer/{name}.{t.key}": (t, slot)
                for t, slot in zip(self.optimizer.tensors, slots, strict=True)
            }
        state: dict[str, dict[str, Any]] = {
            "model": {},
            "optimizer": {
                "step": np.asarray(self.optimizer.t.numpy(), np.int64),
                **self.scaling.state_dict(),
            },
        }
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
        # A run may go on in another precision: a history is made anew, or left.
        optimizer = {k: v for k, v in state["optimizer"].items() if k != HISTORY}
        self.optimizer.load_state_dict(optimizer)
        self.scaling.load(state["optimizer"].get(HISTORY))
        self._clear()

    def programs(self, bucket: int, grouped: bool, training: bool) -> list[Program | Chain]:
        """The XLA programs that training or evaluation on a bucket will call, traced now.

        Training calls `micro` and `apply` if `grouped`, else `update`. The slowest to compile come
        first, the function that calls them last. Compiling them ahead saves the first call that
        time. [] without XLA.
        """
        if self._chained is None:
            return []
        own = self._chained.programs(bucket, grouped, training)
        if not training:
            return [*own, Chain(f"evaluate/{bucket}", self._evaluate[bucket])]
        chain = (
            Chain(f"micro/{bucket}", self._micro[bucket])
            if grouped
            else Chain(f"update/{bucket}", self._update[bucket])
        )
        return [*own, chain]

    def losses(self, batch: Mapping[str, tf.Tensor], seed: tf.Tensor | None) -> Scalars:
        """Forward pass and losses of one micro-batch, as in `gpt_losses`; `seed` None: no dropout.

        Traceable.
        """
        model = self.model
        latents = model.style_latents(batch["cond_mel"])
        hidden = model.hidden(latents, batch["ids"], batch["positions"], seed)
        return self._head_losses(
            hidden, batch["text_targets"], batch["audio_targets"], batch["weights"]
        )

    def gradients(
        self, batch: Mapping[str, tf.Tensor], seed: tf.Tensor | None
    ) -> tuple[Scalars, tf.Tensor, list[tf.Tensor]]:
        """`losses` of one micro-batch, those that a group adds up, and the gradients of the first,
        by tensor of the optimizer. Traceable.
        """
        return gradients(lambda: self.losses(batch, seed), self.optimizer.parameters)

    def _head_losses(self, hidden, text_targets, audio_targets, row_weights) -> Scalars:
        model, first = self.model, self.dims.gpt.num_latents
        # Static slices: text can only be in the first positions, so its large head runs on those
        # alone; the audio head's surplus is cheap.
        text_len = text_targets.shape[1]
        return gpt_losses(
            model.text_logits(hidden[:, first : first + text_len]),
            model.audio_logits(hidden[:, first:]),
            text_targets,
            audio_targets,
            row_weights,
            self.options.text_loss_weight,
            num_classes=(self.dims.gpt.num_text_tokens, self.dims.gpt.num_audio_tokens),
        )

    def _trace(self, name: str, function, signature: list):
        def traced(*args):
            self.trace_counts[name] += 1
            with use(self.operations):
                return function(*args)

        once = tf.function(traced, input_signature=signature, autograph=False)
        # TensorFlow takes these for one function that is traced again and again; `trace_counts`
        # knows better.
        once._omit_frequent_tracing_warning = True
        return once

    def _trace_each(self, name: str, function, *more: tf.TensorSpec) -> list:
        def of(bucket: int):
            return lambda *args: function(bucket, *args)

        return [
            self._trace(f"{name}/{bucket}", of(bucket), [spec, *more])
            for bucket, spec in enumerate(self._signatures)
        ]

    def _clear(self) -> None:
        self._group.clear()
        self.scaling.forget()

    def _seed(self, seed: Any) -> tf.Tensor:
        seed = tf.convert_to_tensor(seed, tf.int32)
        return as_words(seed) if self.options.jit else seed

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
            value = tf.convert_to_tensor(batch[name])
            value = as_words(value) if self.options.jit else value
            if value.dtype != spec.dtype or value.shape != spec.shape:
                got, wanted = (f"{x.dtype.name}{x.shape.as_list()}" for x in (value, spec))
                raise ValueError(f"bucket {bucket}: {name} is {got}, the bucket's is {wanted}")
            inputs[name] = value
        return inputs


def _operations(options: StepOptions) -> Operations:
    chosen = type(options.operations or PLAIN)
    # What a recomputed block keeps is its input: in float32 it would take twice the memory that
    # recomputation is there to save.
    kept = mixed(chosen, Operations, "residual_dtype") if options.recompute else chosen
    return (in_fp8(kept) if options.fp8 else kept)(jit=options.jit)


def _signature(spec: Mapping[str, tuple[np.dtype, tuple[int, ...]]]) -> dict[str, tf.TensorSpec]:
    return {name: tf.TensorSpec(shape, tf.as_dtype(dtype)) for name, (dtype, shape) in spec.items()}
