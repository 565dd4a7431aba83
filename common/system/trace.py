"""Spans of a process's work, written down while `launch.py profile --trace` runs.

A span is a line of RUN/trace/<process>.jsonl: the thread or device that it is drawn under (`row`),
its name, when it began and ended, and what it was about. Times are seconds of time.perf_counter,
which on Linux is one clock for all processes of a machine (CLOCK_MONOTONIC), and that of
time.monotonic. Without XTTS_TRACE in the environment nothing is written, and a span costs one look
at a variable. A user's own does nothing: launch.py removes it, and `profile` sets it for the steps
that it takes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from common.system.lifecycle import Stop

ASKED = "XTTS_TRACE"
FOLDER = "trace"
_BUFFER = 1 << 20

_lock = threading.Lock()
_file: TextIO | None = None

log = logging.getLogger(__name__)


def one_clock() -> bool:
    """Whether the times of several processes can be compared on this system."""
    clocks = [time.get_clock_info(name).implementation for name in ("perf_counter", "monotonic")]
    return all(clock == "clock_gettime(CLOCK_MONOTONIC)" for clock in clocks)


def begin(run: Path, process: str, stop: Stop) -> None:
    """From now on until `stop`'s last hooks this process's spans are written down, where the
    environment asks for it.
    """
    global _file
    if not os.environ.get(ASKED):
        return
    stop.at_exit(lambda code: end())
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    _file = open(folder / f"{process}.jsonl", "a", buffering=_BUFFER, encoding="utf-8")


def span(row: str, name: str, began: float, ended: float, **about: Any) -> None:
    """Something was done from `began` to `ended`; of the two the same: it happened then."""
    if _file is None:
        return
    line = {"row": row, "name": name, "from": began, "to": ended, **about}
    with _lock:
        if _file is not None:
            try:
                _file.write(json.dumps(line, default=str) + "\n")
            except OSError as e:
                _give_up(e)


def end() -> None:
    """What is still in memory goes to the file."""
    global _file
    with _lock:
        if _file is not None:
            try:
                _file.close()
            except OSError as e:
                _give_up(e)
            _file = None


def _give_up(error: OSError) -> None:
    """On a full disk the trace ends early; the work that it tells of goes on."""
    global _file
    log.warning("the trace ends here: %s: %s", _file.name, error.strerror)
    with contextlib.suppress(OSError):  # it tries again to write what it holds
        _file.close()
    _file = None
