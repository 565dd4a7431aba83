"""LJSpeech: `metadata.csv` with lines `id|raw text|normalised text` or `id|text`; audio in `wavs/`,
or in a folder like it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from producer.corpus.readers.columns import Given
from producer.corpus.readers.row import Item, find_metadata
from producer.corpus.readers.table import Table


def read(path: Path, given: Given | None = None) -> Iterator[Item]:
    """Rows of an LJSpeech folder, or of its metadata file.

    The text is the last column. A last column with bare numbers beside one of words (durations that
    some tool appended) is not the text, nor is one of few values beside one of sentences: that is
    the speaker. If the first line names the columns, the names decide.

    Raises:
        BadInput: there is no metadata file, or `given` names a column that it does not have.
    """
    yield from Table(find_metadata(path), "ljspeech", given).read()
