"""CSV: fields separated by commas or semicolons, quoted where they contain one; as Hugging Face's
`audiofolder` and pandas write them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from producer.corpus.readers.columns import Given
from producer.corpus.readers.row import Item, find_metadata
from producer.corpus.readers.table import Table


def read(path: Path, given: Given | None = None) -> Iterator[Item]:
    """Rows of a CSV file, or of the folder it is in.

    BadInput: no such file, or `given` names a column that it does not have.
    """
    yield from Table(find_metadata(path), "csv", given).read()
