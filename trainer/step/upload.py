"""Copy batches to the device while a step computes there.

TensorFlow lets each copy to a GPU begin only when everything issued to that GPU before has ended
(its allocator may still hand the memory to that work), and blocks the thread that copies. Field by
field, each copy would wait for another step. So a batch travels as one buffer, copied by the feed's
thread, and is cut up on the device; and the feed lets a step be issued only once the copy of the
batch after it has been (`trainer.feed`): that copy then waits for the step before and runs under
this one.

The buffer is one that TensorFlow allocated: those it stages through page-locked memory
(GPUUtil::CopyCPUTensorToGPU). A tensor made from a NumPy array goes to the driver as it is, and the
driver may wait inside the call until the copy can begin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

Spec = Mapping[str, tuple[np.dtype, tuple[int, ...]]]
_ALIGN, _PAGE = 16, 4096


class Upload:
    """Moves batches in two steps:

    `to_host` copies once out of the frames, `to_device` puts that where the step wants it.

    Args:
        device: the step's, as "/device:GPU:0"; None: TensorFlow's CPU, where `to_host` does
            everything.
    """

    def __init__(self, device: str | None):
        self.device = device
        self.waits_for_steps = device is not None
        self._cutters: dict[tuple, Callable] = {}
        self._gathered: dict[tuple, np.ndarray] = {}

    def to_host(self, arrays: Mapping[str, np.ndarray], seed: tuple[int, int]) -> Any:
        """The batch in TensorFlow's own host memory; the arrays may be dropped."""
        if self.device is None:
            return {k: tf.convert_to_tensor(v) for k, v in arrays.items()}, seed
        fields = {**arrays, "seed": np.asarray(seed, np.int32)}
        layout = Layout.of(fields)
        if layout.key not in self._gathered:
            self._gathered[layout.key] = _aligned(layout.num_words)
        buffer = self._gathered[layout.key]
        for name, array in fields.items():
            at, _, _ = layout.places[name]
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            buffer.view(np.uint8)[4 * at : 4 * at + len(flat)] = flat
        with tf.device("/device:CPU:0"):
            return layout, tf.raw_ops.DeepCopy(x=buffer)

    def to_device(
        self, on_host: Any, issuing: Callable[[], None]
    ) -> tuple[dict[str, tf.Tensor], Any]:
        """({field: tensor}, seed) on the device; calls `issuing` when it issues the copy."""
        if self.device is None:
            issuing()
            return on_host
        layout, buffer = on_host
        if layout.key not in self._cutters:
            self._cutters[layout.key] = layout.cutter()
        with tf.device(self.device):
            issuing()
            fields = self._cutters[layout.key](tf.identity(buffer))
        return {k: v for k, v in fields.items() if k != "seed"}, fields["seed"]


def _aligned(num_words: int) -> np.ndarray:
    """Zeros float32[num_words] at an address that TensorFlow takes without a copy of its own."""
    raw = np.zeros(4 * num_words + _PAGE, np.uint8)
    first = -raw.ctypes.data % _PAGE
    return raw[first : first + 4 * num_words].view(np.float32)


@dataclass(frozen=True)
class Layout:
    """Where each field lies in a buffer of float32 words: name → (first word, dtype, shape).

    Floats, as int32 would stay on the host.
    """

    places: dict[str, tuple[int, np.dtype, tuple[int, ...]]]
    num_words: int

    @classmethod
    def of(cls, fields: Mapping[str, np.ndarray]) -> Layout:
        """One after the other, each aligned."""
        places, at = {}, 0
        for name, array in fields.items():
            places[name] = (at, array.dtype, array.shape)
            at += -(-array.nbytes // _ALIGN) * _ALIGN // 4
        return cls(places, at)

    @property
    def key(self) -> tuple:
        """Equal for equal layouts."""
        return tuple(
            (name, at, dtype.name, shape) for name, (at, dtype, shape) in self.places.items()
        )

    def cutter(self) -> Callable[[tf.Tensor], dict[str, tf.Tensor]]:
        """The compiled inverse: float32[num_words] → {field: tensor}."""

        def cut(buffer):
            return {name: self._field(buffer, *place) for name, place in self.places.items()}

        signature = [tf.TensorSpec([self.num_words], tf.float32)]
        return tf.function(
            cut, input_signature=signature, jit_compile=True, autograph=False
        ).get_concrete_function()

    @staticmethod
    def _field(buffer: tf.Tensor, at: int, dtype: np.dtype, shape: tuple[int, ...]) -> tf.Tensor:
        num_bytes = dtype.itemsize * math.prod(shape)
        words = buffer[at : at + -(-num_bytes // 4)]
        per_word = 4 // dtype.itemsize  # fields of 2- and 4-byte numbers alone
        values = tf.bitcast(words, tf.as_dtype(dtype))
        if per_word > 1:
            values = tf.reshape(values, [-1])[: math.prod(shape)]
        return tf.reshape(values, shape)
