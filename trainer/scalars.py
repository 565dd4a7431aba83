"""Scalars between the host and the step's device: a copy in either direction waits for the steps that were issued before it
(`trainer.upload`), so that one at each call would let no step be issued under another.
"""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

_PACKED = "packed"


class Resident:
    """Scalars that steps take again and again, each copied to the device when it is first asked for."""

    def __init__(self, device: str):
        self._device = device
        self._known: dict[tuple[float, tf.DType], tf.Tensor] = {}

    def __call__(self, value: float, dtype: tf.DType) -> tf.Tensor:
        """`value` as a scalar that lives on the device."""
        if (value, dtype) not in self._known:
            with tf.device(self._device):
                self._known[value, dtype] = tf.identity(tf.constant(value, dtype))
        return self._known[value, dtype]


def packed(scalars: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """The scalars, and all of them in one float32 vector for `read`. Traceable."""
    return {**scalars, _PACKED: tf.stack([tf.cast(scalars[name], tf.float32) for name in sorted(scalars)])}


def read(scalars: Mapping[str, tf.Tensor]) -> dict[str, float]:
    """The values of what `packed` returned, in one copy."""
    names = sorted(name for name in scalars if name != _PACKED)
    return dict(zip(names, scalars[_PACKED].numpy().tolist(), strict=True))
