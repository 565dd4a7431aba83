"""The training step: micro-batches add gradients, `apply` makes one optimizer update of them.

Knows no process, socket or file.

`GptStep` is stage 2, as `trainer.step.contract.Step` asks for. One function per bucket and purpose,
each with a fixed signature: for XLA a chain of its programs (`trainer.step.programs`), else one
graph. Nothing here waits for the device: results are scalars that live there until the caller reads
them, and where batch and seed are there already (`trainer.step.upload`), a call copies nothing to
it.
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
from trainer.step.contract import Ranks, Scalars, State, StepOptions
from trainer.step.fp8 import in_fp8
from trainer.step.losses import gpt_losses
from trainer.step.optimizer import AdamW, clip_coefficient, schedule, sum_of_squares
from trainer.step.programs import BucketPrograms, Parts, Shared
from trainer.step.regions import Chain, Program, as_words, word_spec
from trainer.step.scalars import REPORTED, Resident, packed, read, report_of
from trainer.step.scaling import HISTORY, Scaling
from trainer.step.snapshot import hold
from trainer.step.update import UpdatePrograms


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
        # Allocated when a group begins: they are as large as the weights, and groups of one batch
        # need none.
        self._accumulators: list[tf.Variable] = []
        # loss, text_ce, audio_ce of the group so far, each times its micro-batch's scale.
        self._group_losses = tf.Variable(tf.zeros([3]), trainable=False)
        self._ranks: Ranks | None = None
        # With other trainers: the sums of squares from which all take the norm, by part.
        self._squares: tf.Variable | None = None
        self._resident = Resident(self._group_losses.device)
        self.scaling = Scaling([], None)
        self.trace_counts: Counter[str] = Counter()
        self._signatures = [
            _signature(batch_spec("gpt", bucket, dims, options.mel_dtype)) for bucket in buckets
        ]
        seed, scalar, switch = (
            tf.TensorSpec([2], tf.int32),
            tf.TensorSpec([], tf.float32),
            tf.TensorSpec([], tf.bool),
        )
        if options.jit:
            self._signatures = [
                {name: word_spec(spec) for name, spec in s.items()} for s in self._signatures
            ]
            seed = word_spec(seed)
            self._parts, self._shared = Parts(self.model, self.optimizer), Shared()
            self.scaling = Scaling([len(g) for g in self._parts.groups], options.fp8)
            made = (self.model, self.operations, self._parts)
            more = (self._head_losses, self._shared, self.scaling)
            self._programs = [BucketPrograms(*made, s, *more) for s in self._signatures]
        elif options.fp8:
            raise ValueError("products in FP8 need StepOptions.jit")
        micro, update = (
            (self._chained_micro, self._chained_update)
            if options.jit
            else (self._traced_micro, self._traced_update)
        )
        evaluate, apply = (
            (self._chained_evaluate, self._chained_apply)
            if options.jit
            else (self._traced_evaluate, self._traced_apply)
        )
        self._micro = self._trace_each("micro", micro, seed, scalar)
        self._update = self._trace_each("update", update, seed, switch)
        self._evaluate = self._trace_each("evaluate", evaluate)
        self._apply = self._trace("apply", apply, [])
        squares = self._chained_squares if options.jit else self._traced_squares
        self._own_squares = self._trace("squares", squares, [])

    def micro(
        self, bucket: int, batch: Mapping[str, Any], seed: tuple[int, int], scale: float
    ) -> Scalars:
        """See `Step.micro`.

        Returns `loss`, `text_ce`, `audio_ce`, their sums and counts, and `finite` (bool).

        `seed` fixes the dropout. `scale` = 1 / (micro-batches in the group) is the original's mean
        of means. ValueError on a batch of another bucket.
        """
        inputs = self._inputs(bucket, batch)
        self._allocate_group()
        self.programs(bucket, grouped=True, training=True)
        return self._micro[bucket](inputs, self._seed(seed), self._resident(scale, tf.float32))

    def apply(self) -> Scalars:
        """See `Step.apply`.

        Returns `loss`, `text_ce`, `audio_ce` (scaled sums over the group), `grad_norm` (before
        clipping), `learning_rate`, `finite`.
        """
        self._allocate_group()
        if self.options.jit:
            self._updates(grouped=True)
        if self._ranks is not None:
            self._ranks.meet()
            self.scaling.add_up(self._ranks, self._accumulators, self._group_losses)
            self._agree_on_norm(self._ranks)
        return self._apply()

    def share(self, ranks: Ranks) -> None:
        """See `SharedStep.share`: gradients and losses are added up before the update."""
        self._ranks = ranks
        self._allocate_group()
        num_squares = len(self._parts.all) if self.options.jit else 1
        self._squares = tf.Variable(tf.zeros([num_squares]), trainable=False)
        apply = self._chained_apply if self.options.jit else self._traced_apply
        self._apply = self._trace("apply", apply, [])

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
            self._allocate_group()
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
        if not self.options.jit:
            return []
        own = self._programs[bucket].programs(self._sums(grouped), training)
        if not training:
            return [*own, Chain(f"evaluate/{bucket}", self._evaluate[bucket])]
        chain = (
            Chain(f"micro/{bucket}", self._micro[bucket])
            if grouped
            else Chain(f"update/{bucket}", self._update[bucket])
        )
        return [*self._updates(grouped, bucket).programs, *own, chain]

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

    def _agree_on_norm(self, ranks: Ranks) -> None:
        """Take the first trainer's sums of squares.

        All have the same gradients, but a GPU sums their squares in no fixed order: each trainer's
        own sum may differ in its last bits, and by the factor of clipping all weights would.
        """
        own = self._own_squares()
        # Sums are all there is between trainers; x + 0 is x.
        self._squares.assign(own if ranks.rank == 0 else tf.zeros_like(own))
        ranks.add_up([], self._squares)

    # -- one graph ---------------------------------------------------------------------------------

    def _gradients(self, batch, seed, scale=None) -> tuple[Scalars, tf.Tensor, list[tf.Tensor]]:
        """`losses`, the three of them that a group adds up, and the gradient of scale × loss."""
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self.optimizer.parameters)
            out = self.losses(batch, seed)
            scaled = (
                out["loss"] if scale is None else out["loss"] * tf.cast(scale, out["loss"].dtype)
            )
        gradients = tape.gradient(scaled, self.optimizer.parameters)
        return (
            out,
            _summed(out),
            [
                tf.cast(g, p.dtype)
                for g, p in zip(gradients, self.optimizer.parameters, strict=True)
            ],
        )

    def _traced_micro(self, _, batch, seed, scale) -> Scalars:
        out, losses, gradients = self._gradients(batch, seed, scale)
        for accumulator, gradient in zip(self._accumulators, gradients, strict=True):
            accumulator.assign_add(gradient)
        return self._added(out, losses, scale)

    def _added(self, out: Scalars, losses: tf.Tensor, scale: tf.Tensor) -> Scalars:
        self._group_losses.assign_add(losses * scale)
        return {**out, "finite": tf.math.is_finite(out["loss"])}

    def _traced_update(self, _, batch, seed, enabled) -> Scalars:
        _, losses, gradients = self._gradients(batch, seed)
        return self._updated(gradients, losses, enabled)

    def _traced_squares(self) -> tf.Tensor:
        gradients = [tf.convert_to_tensor(a) for a in self._accumulators]
        return sum_of_squares(gradients)[tf.newaxis]

    def _traced_evaluate(self, _, batch) -> Scalars:
        return _counted(self.losses(batch, seed=None))

    def _traced_apply(self) -> Scalars:
        gradients = [tf.convert_to_tensor(a) for a in self._accumulators]
        losses = tf.convert_to_tensor(self._group_losses)
        report = self._updated(gradients, losses, tf.constant(True), self._agreed())
        self._clear()
        return report

    def _agreed(self) -> list[tf.Tensor] | None:
        """The sums of squares that all trainers have agreed on; None: there is one trainer."""
        return None if self._squares is None else tf.unstack(self._squares.read_value())

    def _updated(
        self,
        gradients: list[tf.Tensor],
        losses: tf.Tensor,
        enabled: tf.Tensor,
        squares: list[tf.Tensor] | None = None,
    ) -> Scalars:
        norm = tf.sqrt(sum_of_squares(gradients) if squares is None else squares[0])
        finite = _all_finite(norm, losses)
        if self.options.clip_norm:
            coefficient = clip_coefficient(norm, self.options.clip_norm)
            gradients = [g * coefficient for g in gradients]
        lr = self.optimizer.update(gradients, enabled=finite & enabled)
        return packed(report_of(losses, norm, lr, finite))

    # -- a chain of XLA programs -------------------------------------------------------------------

    def _chained_micro(self, bucket: int, batch, seed, scale) -> Scalars:
        given = (batch, seed, scale, self._accumulators)
        out, _, largest = self._programs[bucket].gradients(*given)
        self.scaling.note(largest)
        return self._added(out, _summed(out), scale)

    def _chained_update(self, bucket: int, batch, seed, enabled) -> Scalars:
        given = (batch, seed, tf.constant(1.0))
        out, gradients, largest = self._programs[bucket].gradients(*given)
        updates = self._updates(grouped=False, bucket=bucket)
        return self._reported(updates(gradients, _summed(out), enabled, largest))

    def _chained_squares(self) -> tf.Tensor:
        return tf.stack(self._updates(grouped=True).squares([]))

    def _chained_evaluate(self, bucket: int, batch) -> Scalars:
        return _counted(self._programs[bucket].evaluate(batch))

    def _chained_apply(self) -> Scalars:
        losses = tf.convert_to_tensor(self._group_losses)
        given = ([], losses, tf.constant(True), self.scaling.seen(), self._agreed())
        report = self._updates(grouped=True)(*given)
        self._group_losses.assign(tf.zeros([3]))
        self.scaling.forget()
        return self._reported(report)

    def _updates(self, grouped: bool, bucket: int = 0) -> UpdatePrograms:
        """`bucket`: any one; the gradients of all have the same dtypes."""

        def make() -> UpdatePrograms:
            given = self._sums(grouped) or self._programs[bucket].gradient_dtypes()
            return UpdatePrograms(
                self._parts,
                self.optimizer,
                self.operations,
                self._decide,
                self.options.clip_norm > 0,
                given,
                self.scaling.specs,
            )

        return self._shared.get(("update", grouped), make)

    def _sums(self, grouped: bool) -> list[tf.Variable] | None:
        if grouped:
            self._allocate_group()
        return self._accumulators if grouped else None

    def _decide(
        self, squares: tf.Tensor, losses: tf.Tensor, enabled: tf.Tensor, *largest: tf.Tensor
    ) -> list[tf.Tensor]:
        norm = tf.sqrt(squares)
        finite = _all_finite(norm, losses) & self.scaling.finite(largest)
        self.scaling.roll(largest, finite & enabled)
        lr, scalars = self.optimizer.begin(finite & enabled)
        factor = (
            clip_coefficient(norm, self.options.clip_norm)
            if self.options.clip_norm
            else tf.ones([])
        )
        report = packed(report_of(losses, norm, lr, finite))
        return [
            finite & enabled,
            tf.concat([scalars[tf.float32], [factor]], 0),
            *(report[name] for name in sorted(report)),
        ]

    def _reported(self, values: list[tf.Tensor]) -> Scalars:
        return dict(zip(REPORTED, values, strict=True))

    # ----------------------------------------------------------------------------------------------

    def _allocate_group(self) -> None:
        if not self._accumulators:
            self._accumulators = [
                tf.Variable(tf.zeros_like(p), trainable=False) for p in self.optimizer.parameters
            ]

    def _clear(self) -> None:
        for accumulator in (*self._accumulators, self._group_losses):
            accumulator.assign(tf.zeros_like(accumulator))
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


def _summed(out: Scalars) -> tf.Tensor:
    """The losses that a group adds up."""
    return tf.cast(tf.stack([out["loss"], out["text_ce"], out["audio_ce"]]), tf.float32)


def _counted(out: Scalars) -> Scalars:
    return {name: out[name] for name in ("text_sum", "text_count", "audio_sum", "audio_count")}


def _all_finite(norm: tf.Tensor, losses: tf.Tensor) -> tf.Tensor:
    return tf.math.is_finite(norm) & tf.reduce_all(tf.math.is_finite(losses))


def _signature(spec: Mapping[str, tuple[np.dtype, tuple[int, ...]]]) -> dict[str, tf.TensorSpec]:
    return {name: tf.TensorSpec(shape, tf.as_dtype(dtype)) for name, (dtype, shape) in spec.items()}
