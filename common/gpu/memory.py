"""How much of a card TensorFlow may take: the driver's own share is measured on this card and left
free.

The driver's part of a process is its context, made before TensorFlow starts and so measured
exactly, and what comes later: libraries' kernels and workspaces, compiled programs, CUDA graphs
(`LATER_MB`, the most that was seen; see docs/memory.md).
"""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass

from common.gpu.choose import DRIVER_MB
from common.gpu.listing import Gpu, list_gpus

log = logging.getLogger(__name__)

MEMORY = "GPU memory: "  # the account's first words in the log
LATER_MB = 700
# A trainer alone on a card with less than this free takes all of it at once, except for the
# driver's part. On a larger card its memory grows as needed: the rest stays free for others.
TIGHT_MB = 32_000
LEAST_FREE_MB = 150
_LEAST_MB = 1024


@dataclass(frozen=True)
class Context:
    """This process's CUDA context on its one device: memory taken, and memory free, in MB."""

    took_mb: int
    free_mb: int


def open_context() -> Context | None:
    """Create the context that TensorFlow will use; None if the driver or NVML does not report its
    memory.
    """
    before = this_card()
    if before is None or not before.free_mb:
        return None
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if (
        cuda.cuInit(0)
        or cuda.cuDeviceGet(ctypes.byref(device), 0)
        or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    ):
        return None
    after = this_card()
    return None if after is None else Context(max(0, before.free_mb - after.free_mb), after.free_mb)


def limit_mb(given_mb: int | None, context: Context | None, whole_card: bool) -> int | None:
    """TensorFlow's hard limit; None: it grows as needed.

    Args:
        given_mb: the launcher's limit, which leaves DRIVER_MB for this process's driver part.
        whole_card: nothing else of this run uses the card.
    """
    if context is None:
        return given_mb
    if given_mb is not None:
        return max(_LEAST_MB, given_mb - max(0, context.took_mb + LATER_MB - DRIVER_MB))
    if whole_card and context.free_mb < TIGHT_MB:
        return max(_LEAST_MB, context.free_mb - LATER_MB)
    return None


def this_card() -> Gpu | None:
    """The card of this process's CUDA device 0, as NVML sees it now."""
    bare = cuda_identity()
    return next((g for g in list_gpus().gpus if bare and g.uuid.endswith(bare)), None)


def cuda_identity() -> str:
    """UUID of this process's CUDA device 0, from the driver itself; "" if it cannot be
    asked.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    raw, device = (ctypes.c_ubyte * 16)(), ctypes.c_int()
    ask = getattr(cuda, "cuDeviceGetUuid_v2", None) or cuda.cuDeviceGetUuid
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0) or ask(raw, device):
        return ""
    h = bytes(raw).hex()
    return f"{h[:8]}-{h[8:12]}-{h[12:16]}-{h[16:20]}-{h[20:]}"


@dataclass(frozen=True)
class Account:
    """A card's memory after a stage's largest step, in MB.

    `limit_mb` None: TensorFlow's memory grows.
    """

    card_mb: int
    free_mb: int
    limit_mb: int | None
    step_mb: int  # TensorFlow memory that the largest step needs
    state_mb: int  # the part of it in use between steps

    def available_mb(self) -> int:
        """What a step may use: TensorFlow's part, or what it holds between steps plus what the card
        has free, minus the driver's part.
        """
        if self.limit_mb is not None:
            return self.limit_mb
        return self.free_mb + max(self.step_mb, self.state_mb) - LATER_MB

    def rows(self, rows: int) -> int:
        """How many rows of the largest step's length would fit."""
        available = self.available_mb()
        per_row = max(1.0, (self.step_mb - self.state_mb) / rows)
        return max(0, int((available - self.state_mb) * 0.97 / per_row))

    def __str__(self) -> str:
        part = (
            f"at most {self.limit_mb / 1e3:.1f} GB"
            if self.limit_mb is not None
            else "grows as needed"
        )
        return (
            f"{MEMORY}the largest step needs {self.step_mb / 1e3:.1f} GB, {self.state_mb / 1e3:.1f}"
            f" of it between steps; TensorFlow's part {part}; {self.free_mb / 1e3:.1f} of"
            f" {self.card_mb / 1e3:.1f} GB free"
        )
