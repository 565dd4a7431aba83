"""One line format for every process's log, so that the console can pick news, warnings and errors
out of it.

    2026-01-31 12:00:00,123 WARNING trainer: the message

A process logs what a user wants to see at once at level NEWS: the console shows it.

Continuation lines (tracebacks, TensorFlow's own lines) do not match and stay in the file.
"""

from __future__ import annotations

import logging
import re
import sys
from dataclasses import dataclass

NEWS = 25  # between INFO and WARNING
logging.addLevelName(NEWS, "NEWS")

_FORMAT = "%(asctime)s %(levelname)s {name}: %(message)s"
_LINE = re.compile(
    r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"
    r" (DEBUG|INFO|NEWS|WARNING|ERROR|CRITICAL) ([^\s:]+): (.*)$"
)


@dataclass(frozen=True)
class LogLine:
    """A parsed line."""

    level: str
    name: str
    message: str

    @property
    def is_alarm(self) -> bool:
        """WARNING or worse."""
        return self.level in ("WARNING", "ERROR", "CRITICAL")

    @property
    def is_news(self) -> bool:
        """Whether to show it at once although it is no cause for worry."""
        return self.level == "NEWS"


def setup(name: str, level: int = logging.INFO) -> None:
    """Send this process's log to stderr (its log file) under `name`.

    Replaces any earlier setup.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT.format(name=name)))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for noisy in ("numba", "matplotlib", "h5py", "absl", "tensorflow"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # Its retracing warning counts all buckets' functions as one; the trainer counts traces itself,
    # function by function.
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    logging.captureWarnings(True)


def parse(line: str) -> LogLine | None:
    """The parts of a line in the format of `setup`; None for any other line."""
    m = _LINE.match(line.rstrip("\r\n"))
    return LogLine(*m.groups()) if m else None
