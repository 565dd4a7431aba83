"""The scales of products in FP8: delayed scaling, as in NVIDIA's Transformer Engine.

Each product of each block has three tensors: x, the weight and the gradient. A tensor's scale in an
update comes from the largest magnitude that the last 16 updates saw of it: so it is known before
the tensor is, and no pass over it is made twice. The history of magnitudes is the only state; it is
in the checkpoint, and scales are a function of it. A magnitude that outgrows its history saturates
once; one that was an accident is forgotten after 16 updates.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from common.xtts.weights import WeightsError
from trainer.step.contract import PRODUCTS, Fp8, Ranks

log = logging.getLogger(__name__)

HISTORY = "amax_history"  # its name in the optimizer's state
UPDATES = 16
_TENSORS = 3  # x, weight, gradient

# The largest numbers of e4m3 and e5m2 are 1.75 · 2^8 and 1.75 · 2^15.
_TOP_EXPONENTS = (8, 8, 15)
_TOP_MANTISSA = 0x600000  # the bits of 1.75
# What is assumed before anything was seen. Of the gradient, what a mean over some thousand
# positions leaves of single ones, in the middle of e5m2's 32 binades.
_FIRST = (16.0, 1.0, 0.25)


def scales_of(largest: tf.Tensor) -> tf.Tensor:
    """Scales for magnitudes [..., 3], both float32: the largest powers of two with which they fit
    into the formats of x, weight and gradient. 0: nothing was seen.
    """
    largest = tf.where(largest > 0, largest, tf.constant(_FIRST))
    bits = tf.bitcast(largest, tf.int32)  # a logarithm would be inexact just where it matters
    exponent, mantissa = tf.bitwise.right_shift(bits, 23) - 127, bits & 0x7FFFFF
    exponents = tf.constant(_TOP_EXPONENTS) - exponent - tf.cast(mantissa > _TOP_MANTISSA, tf.int32)
    exponents = tf.clip_by_value(exponents, -100, 100)  # its inverse is a number, too
    return tf.bitcast(tf.bitwise.left_shift(exponents + 127, 23), tf.float32)


class Scaling:
    """History and scales of the blocks, whose programs run them in groups; without groups, of
    nothing.

    Args:
        groups: how many blocks each group has.
        fp8: their products; None: none, and no groups.
    """

    def __init__(self, groups: Sequence[int], fp8: Fp8 | None):
        groups = [] if fp8 is None else groups
        self.fp8, self._groups = fp8, list(groups)
        shape = [UPDATES, sum(groups), len(PRODUCTS), _TENSORS]
        self._history = tf.Variable(tf.zeros(shape), trainable=False, name=HISTORY)
        # by group, [blocks, products, tensors]
        self.scales = [tf.Variable(tf.zeros([n, *shape[2:]]), trainable=False) for n in groups]
        # the largest magnitudes of the group of batches so far
        self._seen = [tf.Variable(tf.zeros([n, *shape[2:]]), trainable=False) for n in groups]
        self._sent: tf.Variable | None = None
        self._refresh()

    @property
    def specs(self) -> list[tf.TensorSpec]:
        """Signatures of the magnitudes, by group."""
        return [tf.TensorSpec(s.shape, s.dtype) for s in self.scales]

    # -- within a step, traced ---------------------------------------------------------------------

    def note(self, largest: Sequence[tf.Tensor]) -> None:
        """Add a batch's largest magnitudes, by group, to those seen."""
        for seen, of_batch in zip(self._seen, largest, strict=True):
            seen.assign(tf.maximum(seen, of_batch))

    def seen(self) -> list[tf.Tensor]:
        """The largest magnitudes of the batches since `forget`."""
        return [tf.convert_to_tensor(s) for s in self._seen]

    def forget(self) -> None:
        """Begin a new group of batches."""
        for seen in self._seen:
            seen.assign(tf.zeros_like(seen))

    def finite(self, largest: Sequence[tf.Tensor]) -> tf.Tensor:
        """Whether all magnitudes are: a saturated infinity would go unnoticed."""
        return tf.reduce_all([tf.reduce_all(tf.math.is_finite(x)) for x in largest] or [True])

    def roll(self, largest: Sequence[tf.Tensor], allowed: tf.Tensor) -> None:
        """The history takes in an update's magnitudes and lets go of the oldest, and the scales
        follow; where not `allowed`, all stay.
        """
        if not self._groups:
            return
        newest = tf.concat(list(largest), 0)[tf.newaxis]
        rolled = tf.concat([newest, self._history[:-1]], 0)
        history = tf.where(allowed, rolled, self._history)
        self._history.assign(history)
        self._assign(history)

    # -- between steps -----------------------------------------------------------------------------

    def add_up(self, ranks: Ranks, gradients: Sequence[tf.Variable], losses: tf.Variable) -> None:
        """`Ranks.add_up`, after which all trainers have seen what any has."""
        if not self._groups:
            ranks.add_up(gradients, losses)
            return
        # Sums are all there is: each trainer has a place of its own in what is added up.
        own = tf.concat([tf.reshape(s, [-1]) for s in self._seen], 0)
        places = tf.one_hot(ranks.rank, ranks.count)[:, tf.newaxis] * own
        flat = tf.concat([tf.convert_to_tensor(losses), tf.reshape(places, [-1])], 0)
        if self._sent is None:
            self._sent = tf.Variable(flat, trainable=False)
        self._sent.assign(flat)
        ranks.add_up(gradients, self._sent)
        num_losses = losses.shape[0]
        losses.assign(self._sent[:num_losses])
        largest = tf.reduce_max(tf.reshape(self._sent[num_losses:], [ranks.count, -1]), 0)
        parts = tf.split(largest, [s.shape.num_elements() for s in self._seen])
        for seen, part in zip(self._seen, parts, strict=True):
            seen.assign(tf.reshape(part, seen.shape))

    def state_dict(self) -> dict[str, np.ndarray]:
        """The history, [updates, blocks, products, tensors], the newest first; {} without blocks
        in FP8.
        """
        return {HISTORY: self._history.numpy()} if self._groups else {}

    def load(self, history: np.ndarray | None) -> None:
        """Inverse of `state_dict`; None: nothing was seen yet. WeightsError: another shape."""
        if not self._groups:
            return
        if history is None:
            log.info(
                "the checkpoint has no history for FP8: the first update goes by assumed scales"
            )
        shape = tuple(self._history.shape)
        history = np.zeros(shape, np.float32) if history is None else np.asarray(history)
        if history.shape != shape:
            raise WeightsError(f"optimizer: {HISTORY} is {history.shape}, the model's is {shape}")
        self._history.assign(history)
        self._refresh()

    def _refresh(self) -> None:
        with tf.device("/device:CPU:0"):  # what it computes is exact anywhere
            self._assign(tf.constant(self._history.numpy()))

    def _assign(self, history: tf.Tensor) -> None:
        if self._groups:
            parts = tf.split(scales_of(tf.reduce_max(history, 0)), self._groups)
            for scales, part in zip(self.scales, parts, strict=True):
                scales.assign(part)
