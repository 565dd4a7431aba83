"""A step's functions as chains of XLA's programs, which buckets and blocks share.

Traced like a graph's functions, but not compiled themselves: `trainer.step.programs` and
`trainer.step.update` have what they call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from common.xtts.gpt import Gpt
from common.xtts.operations import Operations
from trainer.step.contract import Scalars, StepOptions
from trainer.step.group import Group
from trainer.step.optimizer import AdamW, clip_coefficient
from trainer.step.programs import BucketPrograms, Parts, Shared
from trainer.step.regions import Program
from trainer.step.scalars import REPORTED, all_finite, counted, packed, report_of, summed
from trainer.step.scaling import Scaling
from trainer.step.update import UpdatePrograms


class Chained:
    """Traceable functions of stage 2's step. The same numbers as `OneGraph`'s, but for rounding.

    Args:
        signatures: of the batches, by bucket.
        head_losses: as `BucketPrograms` takes them.
        group: in which gradients and losses are added up.
    """

    def __init__(
        self,
        model: Gpt,
        optimizer: AdamW,
        operations: Operations,
        options: StepOptions,
        signatures: Sequence[Mapping[str, tf.TensorSpec]],
        head_losses: Callable[..., Scalars],
        group: Group,
    ):
        self._optimizer, self._operations, self._options = optimizer, operations, options
        self._group = group
        self._parts, self._shared = Parts(model, optimizer), Shared()
        self.scaling = Scaling([len(g) for g in self._parts.groups], options.fp8)
        made = (model, operations, self._parts)
        more = (head_losses, self._shared, self.scaling)
        self._programs = [BucketPrograms(*made, s, *more) for s in signatures]

    @property
    def num_squares(self) -> int:
        """How many sums `squares` gives."""
        return len(self._parts.all)

    def micro(self, bucket: int, batch, seed, scale) -> Scalars:
        """Add a micro-batch's gradients and losses to the group's."""
        given = (batch, seed, scale, self._group.gradients)
        out, _, largest = self._programs[bucket].gradients(*given)
        self.scaling.note(largest)
        self._group.losses.assign_add(summed(out) * scale)
        return {**out, "finite": tf.math.is_finite(out["loss"])}

    def update(self, bucket: int, batch, seed, enabled) -> Scalars:
        """The update of a group of one batch."""
        given = (batch, seed, tf.constant(1.0))
        out, gradients, largest = self._programs[bucket].gradients(*given)
        updates = self.updates(grouped=False, bucket=bucket)
        return _reported(updates(gradients, summed(out), enabled, largest))

    def squares(self) -> tf.Tensor:
        """The sums of squares of the group's gradients, by part: [num_squares]."""
        return tf.stack(self.updates(grouped=True).squares([]))

    def evaluate(self, bucket: int, batch) -> Scalars:
        """Sums and counts of a batch's losses, without dropout."""
        return counted(self._programs[bucket].evaluate(batch))

    def apply(self) -> Scalars:
        """The update of a group, which begins anew."""
        losses = tf.convert_to_tensor(self._group.losses)
        given = ([], losses, tf.constant(True), self.scaling.seen(), self._group.agreed())
        report = self.updates(grouped=True)(*given)
        self._group.losses.assign(tf.zeros([3]))
        self.scaling.forget()
        return _reported(report)

    def programs(self, bucket: int, grouped: bool, training: bool) -> list[Program]:
        """Those that training or evaluation on a bucket calls, the slowest to compile first."""
        own = self._programs[bucket].programs(self._sums(grouped), training)
        return [*self.updates(grouped, bucket).programs, *own] if training else own

    def updates(self, grouped: bool, bucket: int = 0) -> UpdatePrograms:
        """`bucket`: any one; the gradients of all have the same dtypes."""

        def make() -> UpdatePrograms:
            given = self._sums(grouped) or self._programs[bucket].gradient_dtypes()
            return UpdatePrograms(
                self._parts,
                self._optimizer,
                self._operations,
                self._decide,
                self._options.clip_norm > 0,
                given,
                self.scaling.specs,
            )

        return self._shared.get(("update", grouped), make)

    def _sums(self, grouped: bool) -> list[tf.Variable] | None:
        if not grouped:
            return None
        self._group.allocate()
        return self._group.gradients

    def _decide(
        self, squares: tf.Tensor, losses: tf.Tensor, enabled: tf.Tensor, *largest: tf.Tensor
    ) -> list[tf.Tensor]:
        norm = tf.sqrt(squares)
        finite = all_finite(norm, losses) & self.scaling.finite(largest)
        self.scaling.roll(largest, finite & enabled)
        lr, scalars = self._optimizer.begin(finite & enabled)
        factor = (
            clip_coefficient(norm, self._options.clip_norm)
            if self._options.clip_norm
            else tf.ones([])
        )
        report = packed(report_of(losses, norm, lr, finite))
        return [
            finite & enabled,
            tf.concat([scalars[tf.float32], [factor]], 0),
            *(report[name] for name in sorted(report)),
        ]


def _reported(values: list[tf.Tensor]) -> Scalars:
    return dict(zip(REPORTED, values, strict=True))
