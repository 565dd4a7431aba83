"""Scalars between the host and the step's device.

A copy in either direction waits for the steps issued before it (`trainer.step.upload`): with one
copy per call, no step could be issued while another runs.
"""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

_PACKED = "packed"


class Resident:
    """Scalars that steps take repeatedly, each copied to the device at its first use."""

    def __init__(self, device: str):
        self._device = device
        self._known: dict[tuple[float, tf.DType], tf.Tensor] = {}

    def __call__(self, value: float, dtype: tf.DType) -> tf.Tensor:
        """`value` as a scalar on the device."""
        if (value, dtype) not in self._known:
            with tf.device(self._device):
                self._known[value, dtype] = tf.identity(tf.constant(value, dtype))
        return self._known[value, dtype]


def packed(scalars: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """The scalars, and all of them in one float32 vector for `read`. Traceable."""
    return {
        **scalars,
        _PACKED: tf.stack([tf.cast(scalars[name], tf.float32) for name in sorted(scalars)]),
    }


def read(scalars: Mapping[str, tf.Tensor]) -> dict[str, float]:
    """The values of what `packed` returned, in one copy."""
    names = sorted(name for name in scalars if name != _PACKED)
    return dict(zip(names, _on_host(scalars[_PACKED]).numpy().tolist(), strict=True))


@tf.function(input_signature=[tf.TensorSpec([None], tf.float32)], autograph=False)
def _on_host(vector: tf.Tensor) -> tf.Tensor:
    """float32[n] in host memory.

    Where a function's tensor changes devices, TensorFlow copies into page-locked memory;
    `Tensor.numpy()` does not. A copy into other memory waits inside the driver until the step has
    ended, and holds up whoever asks whether an earlier copy is there: the ends of several steps
    were noticed together, at the last one's (measured on an H200: of two steps of 24 ms each, 41
    and 50 ms after the call).
    """
    with tf.device("/device:CPU:0"):
        return tf.identity(vector)


def report_of(
    losses: tf.Tensor, norm: tf.Tensor, lr: tf.Tensor, finite: tf.Tensor
) -> dict[str, tf.Tensor]:
    """What an update reports, `losses` being those that a group adds up."""
    scalars = {"loss": losses[0], "text_ce": losses[1], "audio_ce": losses[2]}
    return scalars | {"grad_norm": norm, "learning_rate": lr, "finite": finite}


# What `packed` makes of a report, in order.
REPORTED = ("audio_ce", "finite", "grad_norm", "learning_rate", "loss", "packed", "text_ce")


def summed(out: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """The losses that a group adds up: loss, text_ce, audio_ce, float32 [3]. Traceable."""
    return tf.cast(tf.stack([out["loss"], out["text_ce"], out["audio_ce"]]), tf.float32)


def counted(out: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """What an evaluation adds up."""
    return {name: out[name] for name in ("text_sum", "text_count", "audio_sum", "audio_count")}


def all_finite(norm: tf.Tensor, losses: tf.Tensor) -> tf.Tensor:
    """Whether an update may be made of gradients of this norm. Traceable."""
    return tf.math.is_finite(norm) & tf.reduce_all(tf.math.is_finite(losses))
