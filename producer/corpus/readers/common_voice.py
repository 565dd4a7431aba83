"""Common Voice: a language of a release (`validated.tsv` and `clips/`), or a release with a folder
for each language.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from common.system.errors import BadInput
from common.xtts.text.clean import UnknownLanguage, normalize_language
from producer.corpus.readers.columns import Given
from producer.corpus.readers.row import Item, Notice
from producer.corpus.readers.table import Table

NAME = "validated.tsv"
_PARTS = ("train.tsv", "dev.tsv", "test.tsv")  # chosen from the validated clips, and no other clips
_UNUSED = ("invalidated.tsv", "other.tsv")


def _folders(path: Path) -> list[Path]:
    if (path / NAME).is_file():
        return [path]
    return sorted(p.parent for p in path.glob(f"*/{NAME}"))


def is_common_voice(path: Path) -> bool:
    """True for a folder with `validated.tsv` in it, or in its sub-folders."""
    return path.is_dir() and bool(_folders(path))


def read(path: Path, given: Given | None = None) -> Iterator[Item]:
    """Rows of the validated clips.

    A row's language is its locale, else its folder's name, where that is a language.

    Raises:
        BadInput: no `validated.tsv` there, or `given` names a column that it does not have.
    """
    folders = [path.parent] if path.is_file() else _folders(path)
    if not folders:
        raise BadInput(
            f"{path}: not a Common Voice folder; expected {NAME} and clips/ in it, or in a folder"
            " for each language"
        )
    for folder in folders:
        metadata = path if path.is_file() else folder / NAME
        yield from Table(metadata, "common_voice", given).read(language=_language(folder))
        for name in _UNUSED:
            if (folder / name).is_file():
                yield Notice(
                    str(folder / name),
                    f"not read: {NAME} holds the clips that listeners have approved",
                )


def _language(folder: Path) -> str | None:
    try:
        normalize_language(folder.name)
    except UnknownLanguage:
        return None
    return folder.name
