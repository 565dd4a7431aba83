"""Digests of tensors where they lie: equal bits have equal ones, and a copy of the weights to the
host is saved.
"""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

# Odd: multiplying by it loses no bit. Knuth's, 2^32 / the golden ratio, as int32.
_ODD = -1640531527


def checksums(variables: Mapping[str, tf.Variable], jit: bool) -> dict[str, str]:
    """Name → 16 hex digits.

    Two sums over a tensor's 32-bit words, modulo 2^32: of the words, and of each times a number of
    its place. `jit`: by XLA, as integers of other functions live on the host.
    """
    found, sums_of = {}, tf.function(_sums, jit_compile=jit, reduce_retracing=True, autograph=False)
    for name, variable in variables.items():
        sums = sums_of(tf.convert_to_tensor(variable)).numpy()
        found[name] = "".join(f"{int(s) & 0xFFFFFFFF:08x}" for s in sums)
    return found


def _sums(value: tf.Tensor) -> tf.Tensor:
    """int32[2]."""
    flat = tf.reshape(value, [-1])
    words = flat if value.dtype == tf.int32 else tf.bitcast(tf.cast(flat, tf.float32), tf.int32)
    places = tf.range(tf.size(words)) * _ODD | 1
    return tf.stack([tf.reduce_sum(words), tf.reduce_sum(words * places)])
