"""Dropout masks by hash: integer arithmetic alone, the same bits on every device."""

from __future__ import annotations

import tensorflow as tf


def kept(shape: tuple[int, ...], rate: float, seed: tf.Tensor) -> tf.Tensor:
    """A bool mask of a static shape, True with probability 1 - rate: a pure function of `seed`
    int32[2] and the shape.

    Integer arithmetic alone: the same bits on every device and in every compile mode.

    Each element hashes its own index (the mixer `triple32` of Wellons' hash prospector, one key
    before and one between its rounds): XLA computes it where the mask is used and stores nothing,
    while a counter-based generator writes its numbers to memory first.
    """
    size = 1
    for dim in shape:
        size *= dim
    if size >= 2**32:
        raise ValueError(f"dropout mask of {size} elements: the hash distinguishes only 2^32")
    row_len = shape[-1]
    rows = tf.range(size // row_len, dtype=tf.int32)[:, tf.newaxis] * row_len
    # Two short ranges, broadcast: one long one would be folded into a constant of the mask's size.
    x = tf.bitcast(rows + tf.range(row_len, dtype=tf.int32)[tf.newaxis, :], tf.uint32)
    first, second = tf.unstack(tf.bitcast(seed, tf.uint32))
    x = _mix(x + first, 17, 0xED5AD4BB)
    x = _mix(x, 11, 0xAC4C1B51)
    x = _mix(x ^ second, 15, 0x31848BAB)
    x = tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, tf.constant(14, tf.uint32)))
    return tf.reshape(x >= tf.constant(min(round(rate * 2**32), 2**32 - 1), tf.uint32), shape)


def _mix(x: tf.Tensor, shift: int, factor: int) -> tf.Tensor:
    return tf.bitwise.bitwise_xor(
        x, tf.bitwise.right_shift(x, tf.constant(shift, tf.uint32))
    ) * tf.constant(factor, tf.uint32)
