"""Keeps what libmpg123 writes to standard error off a command's terminal.

Its notes ("Skipped 300 bytes in input") name no file, and tear a progress bar. Lost sound is found
otherwise, with the file's name: `containers.check_whole`, `reading.read`.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_inside = 0  # how many blocks of `dropped` run
_usual: int | None = None  # C's stream outside of them


@contextmanager
def dropped() -> Iterator[None]:
    """What C libraries write to `stderr` inside goes nowhere; Python's own output is not affected.

    For any number of threads. Without the GNU C library, whose `stderr` is a variable that may be
    set (its manual, section 12.2), nothing happens.
    """
    global _inside, _usual
    stream, null = _streams()
    with _lock:
        _inside += 1
        if null and _inside == 1:
            _usual, stream.value = stream.value, null
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if null and not _inside:
                stream.value = _usual


@functools.cache
def _streams() -> tuple[ctypes.c_void_p, int | None]:
    """(C's variable `stderr`, a stream to nowhere); None for the latter where there is none."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return ctypes.c_void_p(), None
    libc.fopen.restype = ctypes.c_void_p
    return ctypes.c_void_p.in_dll(libc, "stderr"), libc.fopen(b"/dev/null", b"we")
