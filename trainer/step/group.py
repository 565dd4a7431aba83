"""What the micro-batches of a group have added up to: gradients, losses; and the norm on which
several trainers agree.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import tensorflow as tf

from trainer.step.contract import Ranks

TIMED_SUMS = 4  # the first connects the trainers' devices, the second is traced anew


class Group:
    """Sums over a group of micro-batches.

    Args:
        parameters: one gradient is added up for each, once `allocate` has been called: the sums
            are as large as the weights, and groups of one batch need none.
    """

    def __init__(self, parameters: Sequence[tf.Variable]):
        self._parameters = parameters
        self.gradients: list[tf.Variable] = []
        # loss, text_ce, audio_ce of the group so far, each times its micro-batch's scale.
        self.losses = tf.Variable(tf.zeros([3]), trainable=False)
        self._squares: tf.Variable | None = None

    def allocate(self) -> None:
        """Make room for the gradients; called more than once, it does nothing."""
        if not self.gradients:
            self.gradients = [
                tf.Variable(tf.zeros_like(p), trainable=False) for p in self._parameters
            ]

    def clear(self) -> None:
        """Begin a new group."""
        for total in (*self.gradients, self.losses):
            total.assign(tf.zeros_like(total))

    # -- with other trainers -----------------------------------------------------------------------

    def share(self, num_squares: int) -> None:
        """From now on, trainers agree on so many sums of squares before each update."""
        self.allocate()
        self._squares = tf.Variable(tf.zeros([num_squares]), trainable=False)

    def agree_on_norm(self, ranks: Ranks, own: tf.Tensor) -> None:
        """Take the first trainer's sums of squares.

        All have the same gradients, but a GPU sums their squares in no fixed order: each trainer's
        own sum may differ in its last bits, and by the factor of clipping all weights would.
        """
        # Sums are all there is between trainers; x + 0 is x.
        self._squares.assign(own if ranks.rank == 0 else tf.zeros_like(own))
        ranks.add_up([], self._squares)

    def time_sum(self, ranks: Ranks) -> tuple[int, float]:
        """See `SharedStep.time_sum`; sums of zeros change nothing."""
        took_s = []
        for _ in range(TIMED_SUMS):
            began = time.perf_counter()
            ranks.add_up(self.gradients, self.losses)
            self.losses.numpy()  # wait for it
            took_s.append(time.perf_counter() - began)
        return sum(g.shape.num_elements() for g in self.gradients), min(took_s)

    def agreed(self) -> list[tf.Tensor] | None:
        """The sums of squares that all trainers have agreed on; None: there is one trainer."""
        return None if self._squares is None else tf.unstack(self._squares.read_value())
