"""The state of a step as it is at one moment, held while training goes on, for a checkpoint that is
written meanwhile.

A variable's value is a reference to its buffer. While somebody holds it, TensorFlow writes an
update into new memory instead of in place: holding costs nothing at first, and one copy of the
state on the device until it is let go. What does not fit is copied to the host at once, and the
step waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import numpy as np
import tensorflow as tf

from common.gpu.choose import DRIVER_MB
from common.gpu.memory import Account, this_card
from common.xtts.layers import Tensor
from common.xtts.weights import to_torch

log = logging.getLogger(__name__)

_GPU = "GPU:0"
_SPARE = 1.1  # room for fragmentation, as a factor on the state's size


class HeldTensor:
    """A value in its variable's layout that becomes an array in torch's when NumPy asks for it."""

    def __init__(self, tensor: Tensor, value: tf.Tensor):
        self._tensor, self._value = tensor, value
        self.shape, self.dtype = tensor.torch_shape, np.dtype(value.dtype.as_numpy_dtype)
        self.nbytes = self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return to_torch(self._tensor, self._value.numpy())


def hold(tensors: Iterable[tuple[str, Tensor, tf.Variable]]) -> dict[str, HeldTensor]:
    """Name → value of now, for (name, what it is of, variable)."""
    values = [(name, tensor, tf.convert_to_tensor(v)) for name, tensor, v in tensors]
    num_bytes = sum(_size(v) for _, _, v in values)
    left, held = ROOM.take(num_bytes), {}
    if left < num_bytes:
        sizes = (left / 1e9, num_bytes / 1e9)
        log.info(
            "the device has room for %.1f of %.1f GB during a save; training waits while the rest"
            " is copied to the host",
            *sizes,
        )
    for name, tensor, value in values:
        if _size(value) <= left:
            left -= _size(value)
        # as a tensor: a NumPy array would be a second copy, for which training would wait, too
        else:
            with tf.device("/device:CPU:0"):
                value = tf.identity(value)  # noqa: PLW2901
        held[name] = HeldTensor(tensor, value)
    return held


def _size(value: tf.Tensor) -> int:
    return value.dtype.size * value.shape.num_elements()


class Room:
    """How much of a state this process's GPU can hold beside what the steps need.

    All of it on the CPU.
    """

    def __init__(self):
        self._needed = 0  # bytes, by the largest step as it was measured
        self._held = (
            0  # bytes that may have been held, and thus counted, since the peak was last taken
        )

    def measure(self, largest_step: Callable[[], object]) -> int:
        """Run a stage's largest step, compiled before, to see what it needs, in bytes: another one
        may not come for many saves. What was needed so far is forgotten: while it compiles, XLA
        tries kernels with all memory there is. 0 without a GPU.
        """
        if tf.config.list_logical_devices("GPU"):
            self._forget_peak()
            largest_step()
            self._needed = self._peak()
        return self._needed

    def remember(self, num_bytes: int | None) -> bool:
        """Take what the largest step needed when it was measured before; False where that is not
        known, or the card has less for it now.
        """
        account = self.account()
        if account is None or num_bytes is None:
            return False
        if account.available_mb() * 2**20 < num_bytes * _SPARE:
            return False
        self._needed = num_bytes
        self._forget_peak()
        return True

    def account(self) -> Account | None:
        """The card's memory as the largest step left it; None without a GPU."""
        card = this_card()
        if card is None or not tf.config.list_logical_devices("GPU"):
            return None
        state = tf.config.experimental.get_memory_info(_GPU)["current"]
        return Account(card.memory_mb, card.free_mb, _limit_mb(), self._needed >> 20, state >> 20)

    def take(self, num_bytes: int) -> int:
        """How many of so many bytes can be held now, by what the largest step needs, or those since
        the last asking needed at most.
        """
        if not tf.config.list_logical_devices("GPU"):
            return num_bytes
        limit_mb = _limit_mb() or _card_mb() - DRIVER_MB
        # The peak may have come when what was held had been let go: then this is too little, and
        # the largest step's own need stands.
        needed = max(self._needed, self._peak() - self._held)
        self._forget_peak()
        self._held = min(num_bytes, max(0, int((limit_mb * 2**20 - needed) / _SPARE)))
        return self._held

    def _peak(self) -> int:
        return tf.config.experimental.get_memory_info(_GPU)["peak"]

    def _forget_peak(self) -> None:
        tf.config.experimental.reset_memory_stats(_GPU)
        self._held = 0


ROOM = Room()


def _limit_mb() -> int | None:
    """TensorFlow's hard limit; None: its memory grows."""
    configured = tf.config.get_logical_device_configuration(
        tf.config.list_physical_devices("GPU")[0]
    )
    return int(configured[0].memory_limit) if configured and configured[0].memory_limit else None


def _card_mb() -> int:
    card = this_card()
    return card.memory_mb if card else 0
