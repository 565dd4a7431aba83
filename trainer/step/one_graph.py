"""A step's functions as one graph each, for TensorFlow without XLA."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from trainer.step.contract import Scalars, StepOptions
from trainer.step.group import Group
from trainer.step.optimizer import AdamW, clip_coefficient, sum_of_squares
from trainer.step.scalars import all_finite, counted, packed, report_of, summed


class OneGraph:
    """Traceable functions of stage 2's step.

    Args:
        losses: (batch, seed) → what `gpt_losses` returns.
        optimizer: of all trained tensors.
        group: in which gradients and losses are added up.
    """

    num_squares = 1

    def __init__(
        self,
        losses: Callable[..., Scalars],
        optimizer: AdamW,
        options: StepOptions,
        group: Group,
    ):
        self._losses, self._optimizer, self._options = losses, optimizer, options
        self._group = group

    def micro(self, _, batch, seed, scale) -> Scalars:
        """Add a micro-batch's gradients and losses to the group's."""
        out, losses, gradients = self._gradients(batch, seed, scale)
        for total, gradient in zip(self._group.gradients, gradients, strict=True):
            total.assign_add(gradient)
        self._group.losses.assign_add(losses * scale)
        return {**out, "finite": tf.math.is_finite(out["loss"])}

    def update(self, _, batch, seed, enabled) -> Scalars:
        """The update of a group of one batch."""
        _, losses, gradients = self._gradients(batch, seed)
        return self._updated(gradients, losses, enabled)

    def squares(self) -> tf.Tensor:
        """The sum of squares of the group's gradients, [1]."""
        gradients = [tf.convert_to_tensor(g) for g in self._group.gradients]
        return sum_of_squares(gradients)[tf.newaxis]

    def evaluate(self, _, batch) -> Scalars:
        """Sums and counts of a batch's losses, without dropout."""
        return counted(self._losses(batch, seed=None))

    def apply(self) -> Scalars:
        """The update of a group, which begins anew."""
        gradients = [tf.convert_to_tensor(g) for g in self._group.gradients]
        losses, agreed = tf.convert_to_tensor(self._group.losses), self._group.agreed()
        report = self._updated(gradients, losses, tf.constant(True), agreed)
        self._group.clear()
        return report

    def _gradients(self, batch, seed, scale=None) -> tuple[Scalars, tf.Tensor, list[tf.Tensor]]:
        return gradients(lambda: self._losses(batch, seed), self._optimizer.parameters, scale)

    def _updated(
        self,
        gradients: list[tf.Tensor],
        losses: tf.Tensor,
        enabled: tf.Tensor,
        squares: list[tf.Tensor] | None = None,
    ) -> Scalars:
        norm = tf.sqrt(sum_of_squares(gradients) if squares is None else squares[0])
        finite = all_finite(norm, losses)
        if self._options.clip_norm:
            coefficient = clip_coefficient(norm, self._options.clip_norm)
            gradients = [g * coefficient for g in gradients]
        lr = self._optimizer.update(gradients, enabled=finite & enabled)
        return packed(report_of(losses, norm, lr, finite))


def gradients(
    losses: Callable[[], Scalars], parameters: Sequence[tf.Variable], scale: tf.Tensor | None = None
) -> tuple[Scalars, tf.Tensor, list[tf.Tensor]]:
    """Losses, the three of them that a group adds up, and the gradients of scale × loss. Traceable.

    Args:
        losses: of a batch.
        scale: None: 1.
    """
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(parameters)
        out = losses()
        loss = out["loss"]
        scaled = loss if scale is None else loss * tf.cast(scale, loss.dtype)
    found = tape.gradient(scaled, parameters)
    return out, summed(out), [tf.cast(g, p.dtype) for g, p in zip(found, parameters, strict=True)]
