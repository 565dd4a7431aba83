"""Piper: lines `file|speaker|text`, or `file|text` of one speaker, without a header; audio in
`wav/` or `wavs/`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from producer.corpus.readers.columns import Given
from producer.corpus.readers.row import Item, find_metadata
from producer.corpus.readers.table import Table


def is_piper(table: Table) -> bool:
    """Whether rows without a header have a speaker in their second column and the text in the
    third.
    """
    columns = table.columns
    if table.header is not None or columns is None or columns.width != 3:
        return False
    return (columns.audio, columns.speaker, columns.texts[0]) == (0, 1, 2)


def read(path: Path, given: Given | None = None) -> Iterator[Item]:
    """Rows of a Piper folder, or of its metadata file.

    BadInput: there is none, or `given` names a column that it does not have.
    """
    metadata = find_metadata(path)
    table = Table(metadata, "piper", given)
    if table.header is None and table.columns is not None and table.columns.width == 3:
        table = Table(metadata, "piper", {"audio": 1, "speaker": 2, "text": 3, **(given or {})})
    yield from table.read()
