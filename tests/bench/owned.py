"""Processes that do not outlive the benchmark that started them: what stays on a GPU spoils the
next figures.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def dies_with_me() -> Callable[[], None]:
    """`preexec_fn` of a child that the kernel SIGKILLs when this process dies, however it dies;
    does nothing elsewhere than on Linux.

    Call it, and start the child, in the main thread: the kernel means the thread's death.
    """
    owner, libc = os.getpid(), ctypes.CDLL(None) if sys.platform == "linux" else None

    def in_child() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            if os.getppid() != owner:  # it died before the kernel was told
                os._exit(1)

    return in_child
