"""The state of a step as it is at one moment, held while training goes on, for a checkpoint that is written meanwhile.

A variable's value is a reference to its buffer. While somebody holds it, TensorFlow writes an update into new memory instead of in place:
holding costs nothing at first, and one copy of the state on the device until it is let go. Where that does not fit, the values are
copied to the host at once, and the step waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import numpy as np
import tensorflow as tf

from common.device import cuda_identity
from common.gpu import CONTEXT_MB, list_gpus
from common.xtts.layers import Tensor
from common.xtts.weights import to_torch

log = logging.getLogger(__name__)

_GPU = "GPU:0"
_SPARE = 1.1  # room for fragmentation, as a factor on the state's size


class HeldTensor:
    """A value in its variable's layout that becomes an array in torch's when NumPy asks for it."""

    def __init__(self, tensor: Tensor, value: tf.Tensor | np.ndarray):
        self._tensor, self._value = tensor, value
        self.shape, self.dtype = tensor.torch_shape, np.dtype(value.dtype if isinstance(value, np.ndarray) else value.dtype.as_numpy_dtype)
        self.nbytes = self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        value = self._value if isinstance(self._value, np.ndarray) else self._value.numpy()
        return to_torch(self._tensor, value)


def hold(tensors: Iterable[tuple[str, Tensor, tf.Variable]]) -> dict[str, HeldTensor]:
    """Name → value of now, for (name, what it is of, variable)."""
    tensors = list(tensors)
    num_bytes = sum(v.dtype.size * v.shape.num_elements() for _, _, v in tensors)
    values = [tf.convert_to_tensor(v) for _, _, v in tensors]
    if not ROOM.for_bytes(num_bytes):
        log.info("no room on the device to hold %.1f GB while they are saved: copied to the host, training waits", num_bytes / 1e9)
        values = [v.numpy() for v in values]
    return {name: HeldTensor(t, value) for (name, t, _), value in zip(tensors, values, strict=True)}


class Room:
    """Whether this process's GPU can hold a state beside what the steps need. Always so on the CPU."""

    def __init__(self):
        self._held = 0  # bytes of the state that may have been held, and thus counted, since the peak was last taken

    def forget(self) -> None:
        """What was needed so far says nothing of the steps to come: while it compiles, XLA tries kernels with all memory there is."""
        if tf.config.list_logical_devices("GPU"):
            tf.config.experimental.reset_memory_stats(_GPU)
        self._held = 0

    def for_bytes(self, num_bytes: int) -> bool:
        """Whether so much can be held now, by what the steps since the last asking needed at most."""
        gpus = tf.config.list_physical_devices("GPU")
        if not tf.config.list_logical_devices("GPU"):
            return True
        configured = tf.config.get_logical_device_configuration(gpus[0])
        limit_mb = configured[0].memory_limit if configured and configured[0].memory_limit else _card_mb() - CONTEXT_MB
        needed = tf.config.experimental.get_memory_info(_GPU)["peak"] - self._held
        self.forget()
        fits = needed + _SPARE * num_bytes < limit_mb * 2**20
        self._held = num_bytes if fits else 0
        return fits


ROOM = Room()


def _card_mb() -> int:
    bare = cuda_identity()
    return next((g.memory_mb for g in list_gpus().gpus if bare and g.uuid.endswith(bare)), 0)
