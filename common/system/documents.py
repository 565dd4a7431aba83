"""JSON files that somebody else, or a failing disk, may have written: bounded, and wrong in one way
only.
"""

from __future__ import annotations

import json
import os
import stat
from typing import Any

MOST_BYTES = 64 << 20


def read_json(path: str | os.PathLike, most: int = MOST_BYTES) -> Any:
    """The value in a JSON file.

    Raises:
        OSError: it cannot be read, FileNotFoundError among them.
        ValueError: no plain file, larger than `most` bytes, not UTF-8, not JSON, or nested deeper
        than the parser goes.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO is not waited for
    with os.fdopen(fd, "rb") as file:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise ValueError("it is no plain file")
        if info.st_size > most:
            raise ValueError(f"it has {info.st_size} bytes, at most {most} are allowed")
        return parse_json(file.read(most))


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. ValueError: it is not JSON, or too deep."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
