"""What an error of TensorFlow, XLA or CUDA means for its device: it ran out of memory, is lost, or
has aborted this process's work; in one line, with what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from common.system.errors import Hopeless, RunError, is_out_of_memory

# The card, or the way to it, is gone: a new process does not get it back.
LOST = (
    *("CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC", "CUDA_ERROR_NVLINK_UNCORRECTABLE"),
    *("CUDA_ERROR_NO_DEVICE", "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA_ERROR_HARDWARE_STACK_ERROR"),
    *("GPU is lost", "fallen off the bus", "CUDA_ERROR_SYSTEM_NOT_READY"),
)
# The process's context on the card is broken: only a new process can compute there.
SPOILT = (
    *("CUDA_ERROR_ASSERT", "device-side assert", "CUDA_ERROR_ILLEGAL_", "illegal memory access"),
    *("CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure", "CUDA_ERROR_LAUNCH_TIMEOUT"),
    *("CUDA_ERROR_MISALIGNED_ADDRESS", "CUDA_ERROR_CONTEXT_IS_DESTROYED", "CUDA_ERROR_UNKNOWN"),
)
LOOK = (
    "`dmesg | grep -i xid` says why (Xid 79: it fell off the bus; 48, 63, 64, 94, 95: its memory)"
)
_LINE = 200


def told(error: BaseException, device: str, at: str, saved: str = "") -> RunError | None:
    """Message for an error, and whether a restart helps; None: the error is not about the device.

    Args:
        device: in words, with its UUID.
        at: what the process was doing, "at step 7 of gpt".
        saved: what remains, as a sentence.
    """
    if (line := _line_with(error, LOST)) is not None:
        return Hopeless(
            f"{device} is lost, {at}: {line}. {LOOK}. Reset it (`nvidia-smi --gpu-reset`), or"
            f" choose another card with --model-gpu or --data-gpu{saved}"
        )
    if (line := _line_with(error, SPOILT)) is not None:
        return RunError(
            f"{device} has given up this process's work, {at}: {line}. {LOOK}; a new process can"
            f" use it again{saved}"
        )
    if is_out_of_memory(error):
        line = str(error).strip().splitlines()[0][:_LINE] if str(error).strip() else ""
        return Hopeless(
            f"out of memory on {device}, {at}{': ' if line else ''}{line}. The largest step fitted"
            " before step 1, so another process has taken memory since (`nvidia-smi` lists it; on"
            " the host, `free -h`): end that, or set train.recompute=true; a smaller batch_size"
            f" needs a run of its own{saved}"
        )
    return None


def is_of_device(error: BaseException) -> bool:
    """Whether `told` has something to say of it."""
    return told(error, "", "") is not None


@contextmanager
def in_words(device: Callable[[], str], at: Callable[[], str], saved=lambda: "") -> Iterator[None]:
    """Turn errors of the device into `told`'s message, without a traceback; pass others on."""
    try:
        yield
    except RunError:
        raise
    except Exception as e:
        error = told(e, device() or "the device", at(), saved())
        if error is None:
            raise
        raise error from e


def _line_with(error: BaseException, words: tuple[str, ...]) -> str | None:
    for line in str(error).splitlines():
        found = [line.find(word) for word in words if word in line]
        if found:
            begin = max(0, min(found) - _LINE // 2)
            return line[begin : begin + _LINE].strip()
    return None
