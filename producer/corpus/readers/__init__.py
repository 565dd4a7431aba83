"""Corpus formats: each reader is a function (path, columns named by the user) → rows, errors and
notices; one dict lists them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from producer.corpus.demo import make_demo_corpus
from producer.corpus.readers import (  # fmt: skip
    common_voice,
    coqui,
    css10,
    csv_table,
    jsonl,
    libritts,
    ljspeech,
    mailabs,
    parquet,
    piper,
    sidecar,
    vctk,
)
from producer.corpus.readers.columns import Given
from producer.corpus.readers.row import (
    METADATA_NAMES,
    Item,
    Notice,
    Row,
    RowError,
    Taken,
    find_metadata,
    usual_metadata,
)
from producer.corpus.readers.splits import parts
from producer.corpus.readers.table import Table

__all__ = [
    "READERS",
    "WITHOUT_COLUMNS",
    "Item",
    "Notice",
    "Row",
    "RowError",
    "Taken",
    "detect",
    "parts_of",
]


def _demo(path: Path, given: None = None) -> Iterator[Item]:
    """The demo corpus, spoken by eSpeak NG into `path` if there is nothing yet."""
    return coqui.read(make_demo_corpus(path))


READERS: dict[str, Callable[[Path, Given | None], Iterator[Item]]] = {
    "ljspeech": ljspeech.read,
    "coqui": coqui.read,
    "csv": csv_table.read,
    "jsonl": jsonl.read,
    "piper": piper.read,
    "css10": css10.read,
    "vctk": vctk.read,
    "libritts": libritts.read,
    "common_voice": common_voice.read,
    "mailabs": mailabs.read,
    "sidecar": sidecar.read,
    "parquet": parquet.read,
    "demo": _demo,
}
WITHOUT_COLUMNS = ("vctk", "libritts", "sidecar", "demo")
_TREES: dict[str, Callable[[Path], bool]] = {
    "vctk": vctk.is_vctk,
    "common_voice": common_voice.is_common_voice,
    "css10": css10.is_css10,
}
_TREES_WITHOUT_METADATA: dict[str, Callable[[Path], bool]] = {
    "mailabs": mailabs.is_mailabs,
    "libritts": libritts.is_libritts,
    "sidecar": sidecar.is_sidecar,
}


def tree_of(path: Path) -> str | None:
    """The format of a folder by the names of its folders and files; None: only its metadata can
    tell.
    """
    if not path.is_dir():
        return None
    trees = dict(_TREES)
    if not parquet.files_in(path) and not any((path / name).is_file() for name in METADATA_NAMES):
        trees |= _TREES_WITHOUT_METADATA
    return next((name for name, is_one in trees.items() if is_one(path)), None)


def detect(path: Path) -> str:
    """The format of the corpus at `path`: a tree by its folders, else a metadata file by its name
    and first lines.

    Raises:
        BadInput: there is nothing that a reader could read.
    """
    tree = tree_of(path)
    if tree is not None:
        return tree
    if path.is_dir() and usual_metadata(path) is None and parquet.files_in(path):
        return "parquet"
    metadata = find_metadata(path)
    if parquet.is_parquet(metadata):
        return "parquet"
    if jsonl.is_jsonl(metadata):
        return "jsonl"
    table = Table(metadata, "")
    if table.dialect.separator in ",;":
        return "csv"
    if table.header is not None:
        return "coqui"
    return "piper" if piper.is_piper(table) else "ljspeech"


def parts_of(
    path: Path, format_name: str, separate: bool
) -> tuple[list[tuple[Path, str, bool]], list[Notice]]:
    """The parts of a source to read: (path, format, whether it is the evaluation set), and notices
    about them (`splits.parts`).

    Raises:
        BadInput: as `detect`.
    """
    tree = tree_of(path) if format_name == "auto" else format_name
    if tree in (*_TREES, *_TREES_WITHOUT_METADATA, "demo"):
        return [(path, tree, False)], []
    found, notices = parts(path, separate)
    return [
        (part, detect(part) if format_name == "auto" else format_name, held) for part, held in found
    ], notices
