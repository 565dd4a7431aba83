"""M-AILABS: `de_DE/by_book/<female|male|mix>/<speaker>/<book>/metadata.csv`, each as LJSpeech's,
with `wavs/` beside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from common.system.errors import BadInput
from producer.corpus.readers.columns import Given
from producer.corpus.readers.row import Item
from producer.corpus.readers.table import Table

_LOCALE = re.compile(r"[a-z]{2}_[A-Z]{2}\Z")
_GROUPS = ("female", "male", "mix")


def _by_book(path: Path) -> list[Path]:
    """The `by_book` folders: this one, or one below it."""
    if path.name == "by_book":
        return [path]
    return sorted(
        p for pattern in ("by_book", "*/by_book") for p in path.glob(pattern) if p.is_dir()
    )


def is_mailabs(path: Path) -> bool:
    """True for a language's folder, for its `by_book`, or for a folder of such languages."""
    return path.is_dir() and any(_books(folder) for folder in _by_book(path))


def _books(by_book: Path) -> list[Path]:
    return sorted(p for group in _GROUPS for p in (by_book / group).rglob("metadata.csv"))


def read(path: Path, given: Given | None = None) -> Iterator[Item]:
    """Rows of every book.

    The speaker is the folder below `female` or `male`; in `mix` a book has many, and none is named.

    Raises:
        BadInput: not such a tree, or `given` names a column that a table does not have.
    """
    found = [(folder, book) for folder in _by_book(path) for book in _books(folder)]
    if not found:
        raise BadInput(
            f"{path}: not an M-AILABS tree; expected"
            " by_book/<female|male|mix>/<speaker>/<book>/metadata.csv"
        )
    for folder, book in found:
        group, *below = book.parent.relative_to(folder).parts
        speaker = below[0] if group != "mix" and len(below) > 1 else None
        locale = folder.parent.name
        language = locale[:2] if _LOCALE.match(locale) else None
        yield from Table(book, "mailabs", given).read(speaker, language)
