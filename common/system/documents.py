"""Reads JSON files that somebody else, or a failing disk, may have written: within bounds, and with
one kind of error.
"""

from __future__ import annotations

import json
import os
from typing import Any, BinaryIO

from common.system.files import open_plain

# The worst case is empty lists: 16 MiB of text become 350 MiB.
MOST_BYTES = 16 << 20


def read_json(path: str | os.PathLike, most: int = MOST_BYTES) -> Any:
    """The value in a JSON file of at most `most` bytes.

    Raises:
        OSError: it cannot be read (FileNotFoundError included), or is not a plain file.
        ValueError: larger than `most` bytes, not UTF-8, not JSON, or nested too deeply.
    """
    with open_plain(path) as file:
        return read_open(file, most)


def read_open(file: BinaryIO, most: int) -> Any:
    """`read_json` of an open file."""
    size = os.fstat(file.fileno()).st_size
    if size > most:
        raise ValueError(f"it has {size} bytes, at most {most} are allowed")
    return parse_json(file.read(most))


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. ValueError: it is not JSON, or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
