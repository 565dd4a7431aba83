"""Coqui: a `|`- or tab-separated file whose first line names the columns, e.g.

`audio_file|text|speaker_name|language`; no quoting.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from common.system.errors import BadInput
from producer.corpus.readers.columns import Given
from producer.corpus.readers.row import Item, find_metadata, lines
from producer.corpus.readers.table import Table


def read(path: Path, given: Given | None = None) -> Iterator[Item]:
    """Rows of a file with a header, or of the folder it is in.

    A row's id is its audio path as written.

    Raises:
        BadInput: no such file, its first line is not a header, or `given` names a column that it
        does not have.
    """
    metadata = find_metadata(path)
    table = Table(metadata, "coqui", given)
    first = next(lines(metadata), None)
    if table.header is None and first is not None:
        example = "audio_file|text|speaker_name|language"
        raise BadInput(
            f"{metadata}:{first[0]}: no header; the first line must name the columns, like"
            f" {example}"
        )
    yield from table.read()
