"""Corpus formats: each reader is a function path → rows, errors and notices, and they are all in one dict."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from producer.corpus.demo import make_demo_corpus
from producer.corpus.readers import coqui, ljspeech, vctk
from producer.corpus.readers.row import Item, Notice, Row, RowError, find_metadata, lines

__all__ = ["READERS", "Item", "Notice", "Row", "RowError", "detect"]


def _demo(path: Path) -> Iterator[Item]:
    """The demo corpus, spoken by eSpeak NG into `path` if there is nothing yet."""
    return coqui.read(make_demo_corpus(path))


READERS: dict[str, Callable[[Path], Iterator[Item]]] = {
    "ljspeech": ljspeech.read,
    "coqui": coqui.read,
    "vctk": vctk.read,
    "demo": _demo,
}


def detect(path: Path) -> str:
    """The format of the corpus at `path`: a VCTK tree, a metadata file with a header (coqui), or one without (ljspeech).

    Raises:
        BadInput: nothing there that a reader could read.
    """
    if path.is_dir() and vctk.is_vctk(path):
        return "vctk"
    _, first = next(lines(find_metadata(path)), (1, ""))
    return "coqui" if coqui.parse_header(first or "") else "ljspeech"
