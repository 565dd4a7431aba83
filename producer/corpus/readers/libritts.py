"""LibriTTS and LibriTTS-R: `<speaker>/<chapter>/<clip>.wav` beside `<clip>.normalized.txt`, in any
depth of folders.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from common.system.errors import BadInput
from producer.corpus.readers.paths import SEARCH_S, FixedPlace, walk
from producer.corpus.readers.row import Item, Notice, Row, Taken, text_of, without_text

_ENDING = ".normalized.txt"
_SUFFIXES = (".wav", ".flac", ".mp3", ".opus")
_DEEPEST = 5


def is_libritts(path: Path) -> bool:
    """True for a folder with a `*.normalized.txt` at most four folders down."""
    return path.is_dir() and next(_texts(path, SEARCH_S), None) is not None


def _texts(path: Path, most_s: float = float("inf")) -> Iterator[tuple[str, list[str], list[str]]]:
    """(folder, its clips with a text, all its files) for each folder with such texts, in the order
    of their names.
    """
    for folder, files in walk(path, _DEEPEST, most_s):
        clips = [f.removesuffix(_ENDING) for f in files if f.endswith(_ENDING)]
        if clips:
            yield folder, clips, files


def read(path: Path, given: None = None) -> Iterator[Item]:
    """Rows in the order of folder and name; the speaker is the first part of a clip's name.

    BadInput: not such a tree.
    """
    found, silent, first = False, 0, ""
    for folder, clips, files in _texts(path):
        if not found:
            yield Taken(
                str(path),
                f"read as libritts: the text of each clip from <clip>{_ENDING}, the speaker from"
                " its name",
            )
        found = True
        for clip in clips:
            file = Path(folder, clip + _ENDING)
            text = text_of(file)
            if not isinstance(text, str):
                yield text
                continue
            place = FixedPlace(*(os.path.join(folder, clip + suffix) for suffix in _SUFFIXES))
            yield Row(str(file), 1, clip, place, text, None, clip.split("_")[0])
        alone = sorted(
            f for f in files if f.endswith(_SUFFIXES) and os.path.splitext(f)[0] not in set(clips)
        )
        silent += len(alone)
        first = first or next((os.path.join(folder, f) for f in alone), "")
    if not found:
        raise BadInput(
            f"{path}: not a LibriTTS tree; expected <speaker>/<chapter>/*{_ENDING} beside the"
            " recordings"
        )
    if silent:
        yield Notice(str(path), without_text(silent, first))
