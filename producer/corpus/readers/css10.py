"""CSS10: `transcript.txt` with lines `folder/file.wav|raw text|normalised text|seconds`, one
speaker per folder.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from producer.corpus.readers.columns import Given, is_number
from producer.corpus.readers.row import Item, find_metadata, lines
from producer.corpus.readers.table import Table

NAME = "transcript.txt"


def is_css10(path: Path) -> bool:
    """True for such a file, or a folder that contains one under its usual name."""
    file = path if path.is_file() else path / NAME
    if not file.is_file():
        return False
    some = [text.split("|") for _, text in itertools.islice(lines(file), 20) if text]
    return bool(some) and all(len(fields) == 4 and is_number(fields[3].strip()) for fields in some)


def read(path: Path, given: Given | None = None) -> Iterator[Item]:
    """Rows of a CSS10 folder, or of its transcript.

    BadInput: there is none, or `given` names a column that it does not have.
    """
    metadata = path / NAME if (path / NAME).is_file() else find_metadata(path)
    yield from Table(metadata, "css10", given).read()
