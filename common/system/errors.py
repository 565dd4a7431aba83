"""Exit codes, and the errors that carry them to a process's edge."""

from __future__ import annotations

import errno

OK = 0
FAILED = 1  # while running
BAD_INPUT = 2  # found before any GPU was opened
HOPELESS = (
    3  # out of memory, read-only folder, ten non-finite steps: a restart would end the same way
)
REPLACED = 4  # a trainer that saved and left because another one takes its place
INTERRUPTED = 130
TERMINATED = 143


class RunError(Exception):
    """A failure with an exit code and a message for the user: what, where, what to do."""

    exit_code = FAILED


class BadInput(RunError):
    """Input or settings cannot work; nothing was started and nothing was lost."""

    exit_code = BAD_INPUT


class Hopeless(RunError):
    """A failure that a retry cannot mend."""

    exit_code = HOPELESS


class Replaced(RunError):
    """Another trainer asked for this run; this one saved and leaves."""

    exit_code = REPLACED


class Stopped(RunError):
    """SIGTERM, SIGINT or the parent's death asked the process to leave."""

    exit_code = TERMINATED


def is_out_of_memory(e: BaseException) -> bool:
    """Whether an error of Python, TensorFlow, XLA or CUDA says that memory ran out, on the host or
    a GPU.
    """
    if isinstance(e, MemoryError) or type(e).__name__ == "ResourceExhaustedError":
        return True
    return "RESOURCE_EXHAUSTED" in str(e) or "out of memory" in str(e).lower()


# From SQLite and safetensors, whose errors carry no errno.
_REFUSALS = (
    *("No space left on device", "Disk quota exceeded", "database or disk is full"),
    "unable to open database file",
)


def disk_refuses(e: BaseException) -> Hopeless | None:
    """The message for an error caused by a full disk or a used-up quota; None: it is another
    error.
    """
    full = isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT)
    if not full and not any(text in str(e) for text in _REFUSALS):
        return None
    return Hopeless(
        f"the disk takes nothing more ({e}): make room, or raise the quota; then the same command"
        " goes on from there"
    )
