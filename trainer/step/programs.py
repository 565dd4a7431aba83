"""The training step of the GPT as a few XLA programs (see `trainer.step.regions`).

    conditioning │ stem │ blocks 1–3 │ blocks 4–6 │ … │ head       and backwards; then the update,
    part by part (`trainer.step.update`)

Blocks go through the same two programs in groups. The conditioning encoder's programs depend on the
number of rows alone: buckets share them. All functions here are called from within a function that
XLA does not compile; a batch's integers and the seed are words.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from common.xtts.gpt import Gpt
from common.xtts.layers import Tensor
from common.xtts.operations import Operations, use
from trainer.step.contract import Fp8
from trainer.step.fp8 import scaled, scaled_layers
from trainer.step.optimizer import AdamW
from trainer.step.regions import Program, Region, as_computed, as_ints, as_words
from trainer.step.scaling import Scaling

# Each call costs the fusions that it cuts; larger programs take longer to compile.
BLOCKS_PER_PROGRAM = 3
_FIELDS = ("text_targets", "audio_targets", "weights")
_SITES = 3

# (states [B, P, C], text targets, audio targets, row weights) → losses.
Losses = Callable[..., dict[str, tf.Tensor]]


class Parts:
    """The trained tensors of the model in the order of the programs, and the variables
    beside them.
    """

    def __init__(self, model: Gpt, optimizer: AdamW):
        places = {id(t.variable): i for i, t in enumerate(optimizer.tensors)}
        n = BLOCKS_PER_PROGRAM
        self.groups = [model.blocks[i : i + n] for i in range(0, len(model.blocks), n)]
        self.conditioning = _of(model.conditioning_encoder, model.conditioning_perceiver)
        self.stem = _of(
            model.text_embedding, model.mel_embedding, model.text_positions, model.mel_positions
        )
        self.blocks = [_of(*group) for group in self.groups]
        self.head = _of(model.ln_f, model.final_norm, model.text_head, model.mel_head)
        self.all = [self.conditioning, self.stem, *self.blocks, self.head]
        self.places = [[places[id(t.variable)] for t in part] for part in self.all]
        missing = set(range(len(optimizer.tensors))) - {i for part in self.places for i in part}
        if missing:
            raise ValueError(
                f"no program trains {', '.join(optimizer.tensors[i].key for i in sorted(missing))}"
            )


def _of(*blocks) -> list[Tensor]:
    return [t for block in blocks for t in block.tensors() if t.trainable]


def variables_of(tensors: Sequence[Tensor]) -> list[tf.Variable]:
    """The variables behind `tensors`, as programs take them."""
    return [t.variable.value for t in tensors]


class Shared:
    """Programs by key, each traced once, whoever asks first.

    Not while another function is traced: its gradients would not be seen.
    """

    def __init__(self):
        self._made: dict[Any, Any] = {}
        self._lock = threading.RLock()  # training may ask for what another thread is tracing

    def get(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` made for this key."""
        if key in self._made:
            return self._made[key]
        with self._lock:
            if key in self._made:
                return self._made[key]
            if not tf.executing_eagerly():
                raise RuntimeError(
                    "the step's programs are traced before the functions that call them: see"
                    " `GptStep.programs`"
                )
            self._made[key] = make()
            return self._made[key]


class BucketPrograms:
    """One bucket's programs, traced when they are asked for.

    Args:
        batch: signature of a batch, in words.
        shared: of all buckets.
        scaling: of the blocks' products in FP8; of nothing where `fp8` is None.
    """

    def __init__(
        self,
        model: Gpt,
        chosen: Operations,
        parts: Parts,
        batch: Mapping[str, tf.TensorSpec],
        losses: Losses,
        shared: Shared,
        scaling: Scaling,
    ):
        self._scaling, self._fp8 = scaling, scaling.fp8
        self.model, self._operations, self._parts, self._batch, self._losses = (
            model,
            chosen,
            parts,
            batch,
            losses,
        )
        self._shared, self._own = shared, Shared()
        rows, num_codes = batch["ids"].shape
        dims = model.dims
        self._latents = tf.TensorSpec(
            [rows, dims.num_latents, dims.width], tf.as_dtype(model.compute_dtype)
        )
        x = chosen.residual_dtype(self._latents)
        self._x = tf.TensorSpec([rows, dims.num_latents + num_codes, dims.width], x)

    # -- calls -------------------------------------------------------------------------------------

    def gradients(
        self,
        batch: Mapping[str, tf.Tensor],
        seed: tf.Tensor,
        scale: tf.Tensor,
        sums: Sequence[tf.Variable] | None = None,
    ) -> tuple[dict[str, tf.Tensor], list[list[tf.Tensor]], list[tf.Tensor]]:
        """(losses, gradients of scale × loss by part, FP8's largest magnitudes by group of blocks).

        With `sums`, one variable per tensor of the optimizer, gradients are added to these instead.
        """
        parts, regions = self._parts, self._training(sums)
        into = (
            [[sums[i] for i in places] for places in parts.places]
            if sums is not None
            else [[]] * len(parts.all)
        )
        (latents,), back = regions.conditioning(
            batch["cond_mel"], variables=variables_of(parts.conditioning)
        )
        backs = [back]
        inputs = (latents, batch["ids"], batch["positions"], seed)
        (x, *seeds), back = regions.stem(*inputs, variables=variables_of(parts.stem))
        backs.append(back)
        scales = self._scales()
        for region, part, of_group, given in zip(
            regions.blocks, parts.blocks, _grouped(seeds, parts.groups), scales, strict=True
        ):
            (x,), back = region(x, *given, *of_group, variables=variables_of(part))
            backs.append(back)
        fields = [batch[name] for name in _FIELDS]
        *values, dx, last = self._unpacked_head(
            regions.head(x, *fields, scale, *variables_of(parts.head), *into[-1]), sums
        )
        found, largest = [last], []
        for back, into_part, given in zip(
            reversed(backs[1:]), reversed(into[1:-1]), reversed([[], *scales]), strict=True
        ):
            dx, *gradients = back(dx, sums=into_part)
            largest = [*gradients[: len(given)], *largest]
            found.append(gradients[len(given) :])
        found.append(backs[0](dx, sums=into[0]) if sums is None else backs[0](dx, sums=into[0])[:0])
        return dict(zip(self._loss_names, values, strict=True)), found[::-1], largest

    def evaluate(self, batch: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """The losses, without dropout."""
        parts, regions = self._parts, self._evaluation()
        (latents,) = regions.conditioning(batch["cond_mel"], *variables_of(parts.conditioning))
        (x,) = regions.stem(latents, batch["ids"], batch["positions"], *variables_of(parts.stem))
        for program, part in zip(regions.blocks, parts.blocks, strict=True):
            (x,) = program(x, *variables_of(part))
        values = regions.head(x, *(batch[name] for name in _FIELDS), *variables_of(parts.head))
        return dict(zip(self._loss_names, values, strict=True))

    def gradient_dtypes(self) -> list[list[tf.DType]]:
        """The dtypes of the gradients that `gradients` returns, by part."""
        regions = self._training(None)
        parts = [regions.conditioning, regions.stem, *regions.blocks]
        return [
            *(region.gradient_dtypes for region in parts),
            regions.head.dtypes[-len(self._parts.head) :],
        ]

    def programs(self, sums: Sequence[tf.Variable] | None, training: bool) -> list[Program]:
        """The programs that `gradients` or `evaluate` calls, the slowest to compile first."""
        regions = self._training(sums) if training else self._evaluation()
        of_blocks = list(dict.fromkeys(regions.blocks))
        if not training:
            return [regions.head, *of_blocks, regions.stem, regions.conditioning]
        return [
            *(p for r in of_blocks for p in r.programs),
            regions.head,
            *regions.conditioning.programs,
            *regions.stem.programs,
        ]

    # -- what they are -----------------------------------------------------------------------------

    def _training(self, sums: Sequence[tf.Variable] | None) -> _Regions:
        def trace() -> _Regions:
            # In force for the gradients too, which regions take outside of their functions.
            with use(self._operations):
                return self._trace_training(sums)

        return self._own.get(("training", sums is not None), trace)

    def _trace_training(self, sums: Sequence[tf.Variable] | None) -> _Regions:
        # What takes longest to compile comes first: it begins meanwhile (`each_program`).
        parts, kind = self._parts, "micro" if sums is not None else "update"
        into = [None if sums is None else [sums[i] for i in places] for places in parts.places]
        mel, ids = self._batch["cond_mel"], self._batch["ids"]
        conditioning = self._shared.get(
            (kind, str(mel)),
            lambda: Region(
                "conditioning",
                self._conditioning,
                [mel],
                variables_of(parts.conditioning),
                sums=into[0],
            ),
        )
        of_group = Shared()

        def blocks(i: int) -> Region:
            group = parts.groups[i]
            given = self._scaling.specs[i : i + 1]
            inputs = [self._x, *given, *[tf.TensorSpec([_SITES, 2], tf.float32)] * len(group)]
            wrt = tuple(range(1 + len(given)))
            kept = {"wrt": wrt, "sums": into[2 + i], "recompute": self.model.recompute}
            return Region(
                f"{len(group)} blocks",
                self._blocks(i, self._fp8),
                inputs,
                variables_of(parts.blocks[i]),
                **kept,
            )

        regions = [
            of_group.get(len(group), lambda i=i: blocks(i)) for i, group in enumerate(parts.groups)
        ]
        targets = [self._batch[name] for name in _FIELDS]
        inputs, weights = (
            [self._x, *targets, tf.TensorSpec([], tf.float32)],
            variables_of(parts.head),
        )
        head = Program(
            "head",
            self._head_and_gradients(into[-1] is not None),
            inputs,
            [*weights, *(into[-1] or ())],
        )
        seed = tf.TensorSpec([2], tf.float32)
        stem = Region(
            "stem",
            self._stem,
            [self._latents, ids, ids, seed],
            variables_of(parts.stem),
            wrt=(0,),
            sums=into[1],
        )
        return _Regions(conditioning, stem, regions, head)

    def _evaluation(self) -> _Regions:
        return self._own.get("evaluation", self._trace_evaluation)

    def _trace_evaluation(self) -> _Regions:
        parts, mel, ids = self._parts, self._batch["cond_mel"], self._batch["ids"]
        conditioning = self._shared.get(
            ("evaluate", str(mel)),
            lambda: Program(
                "conditioning",
                _reading(self._conditioning, 1),
                [mel],
                variables_of(parts.conditioning),
            ),
        )
        without = _reading(lambda *a: self._stem(*a[:3], None, *a[3:]), 3)
        stem = Program("stem", without, [self._latents, ids, ids], variables_of(parts.stem))
        of_group = Shared()

        def blocks(i: int) -> Program:
            group = self._blocks(i, None)  # without FP8, as the weights will be used
            run = _reading(lambda x, *w: group(x, *[None] * len(parts.groups[i]), *w), 1)
            return Program(
                f"{len(parts.groups[i])} blocks", run, [self._x], variables_of(parts.blocks[i])
            )

        programs = [
            of_group.get(len(group), lambda i=i: blocks(i)) for i, group in enumerate(parts.groups)
        ]
        targets = [self._batch[name] for name in _FIELDS]
        run = _reading(lambda *a: list(self._head(*a).values()), 1 + len(targets))
        head = Program("head", run, [self._x, *targets], variables_of(parts.head))
        return _Regions(conditioning, stem, programs, head)

    def _conditioning(self, cond_mel, *weights):
        with use(self._operations), _in_place(self._parts.conditioning, weights):
            return [tf.cast(self.model.style_latents(cond_mel), self._latents.dtype)]

    def _stem(self, latents, ids, positions, seed, *weights):
        with use(self._operations), _in_place(self._parts.stem, weights):
            seed = None if seed is None else as_ints(seed)
            x, seeds = self.model.stem(latents, as_ints(ids), as_ints(positions), seed)
            return [x] if seed is None else [x, *(as_words(tf.stack(s)) for s in seeds)]

    def _scales(self) -> list[list[tf.Tensor]]:
        """By group, what its region takes beside x and the seeds."""
        given = [[tf.convert_to_tensor(s)] for s in self._scaling.scales]
        return given or [[]] * len(self._parts.groups)

    def _blocks(self, i: int, fp8: Fp8 | None):
        group, part = self._parts.groups[i], self._parts.blocks[i]

        def run(x, *args):
            scales, args = (None, args) if fp8 is None else (args[0], args[1:])
            seeds, weights = args[: len(group)], args[len(group) :]
            values = {id(t.variable): w for t, w in zip(part, weights, strict=True)}
            layers = {} if fp8 is None else scaled_layers(group, values, scales, fp8)
            with use(self._operations), _in_place(part, weights), scaled(layers):
                for block, words in zip(group, seeds, strict=True):
                    x = block(
                        x, (None,) * _SITES if words is None else tuple(tf.unstack(as_ints(words)))
                    )
            return [x]

        return run

    def _head(self, x, text_targets, audio_targets, row_weights, *weights):
        with use(self._operations), _in_place(self._parts.head, weights):
            out = self._losses(
                self.model.normed(x), as_ints(text_targets), as_ints(audio_targets), row_weights
            )
            self._loss_names = list(out)
            return out

    def _head_and_gradients(self, adds: bool):
        def run(x, text_targets, audio_targets, row_weights, scale, *variables):
            given = variables[: len(variables) // 2] if adds else variables
            weights = [v.read_value() for v in given]
            watched = [x, *weights]
            with use(self._operations):
                with tf.GradientTape(watch_accessed_variables=False) as tape:
                    tape.watch(watched)
                    out = self._head(x, text_targets, audio_targets, row_weights, *weights)
                    scaled = out["loss"] * tf.cast(scale, out["loss"].dtype)
                dx, *gradients = tape.gradient(scaled, watched)
            gradients = [dx, *map(as_computed, gradients)]
            if adds:
                for total, gradient in zip(variables[len(given) :], gradients[1:], strict=True):
                    total.assign_add(tf.cast(gradient, total.dtype))
            return [*out.values(), *gradients[: 1 if adds else None]]

        return run

    def _unpacked_head(self, results: list[tf.Tensor], sums) -> Iterator:
        n = len(self._loss_names)
        yield from results[: n + 1]
        yield [] if sums is not None else results[n + 1 :]


class _Regions:
    """A bucket's programs for one purpose."""

    def __init__(self, conditioning, stem, blocks: list, head: Program):
        self.conditioning, self.stem, self.blocks, self.head = conditioning, stem, blocks, head


def _in_place(tensors: Sequence[Tensor], weights: Sequence[tf.Tensor]):
    """Inside the block, layers read `weights` in place of their own variables."""
    return keras.StatelessScope([(t.variable, w) for t, w in zip(tensors, weights, strict=True)])


def _reading(function: Callable, num_tensors: int) -> Callable:
    """`function` with values for the variables after its first `num_tensors` arguments."""
    return lambda *args: function(
        *args[:num_tensors], *(v.read_value() for v in args[num_tensors:])
    )


def _grouped(
    seeds: Sequence[tf.Tensor], groups: Sequence[Sequence]
) -> Iterator[Sequence[tf.Tensor]]:
    at = 0
    for group in groups:
        yield seeds[at : at + len(group)]
        at += len(group)
