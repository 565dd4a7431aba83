"""A folder of recordings with a text for each: `x.wav` and `x.txt` or `x.lab`, side by side or in
folders of their own (`wav/`, `txt/`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from common.system.errors import BadInput
from producer.corpus.readers.paths import SEARCH_S, FixedPlace, has_audio_suffix, walk
from producer.corpus.readers.row import Item, Notice, Row, RowError, Taken, text_of, without_text

_ENDINGS = (".txt", ".lab")
_DEEPEST = 5
_ABOUT = re.compile(
    r"(readme|licen[cs]e|copying|changelog|metadata|transcripts?|info|speakers?([-_]info)?|notes?)\Z",
    re.I,
)
_TIMES = re.compile(r"[0-9.]+\s+[0-9.]+\s+\S")
# Folders that separate recordings from texts; any other folder's name is a speaker's.
_PARTS = {
    "wav",
    "wavs",
    "audio",
    "clips",
    "flac",
    "mp3",
    "txt",
    "text",
    "texts",
    "lab",
    "labels",
    "transcript",
    "transcripts",
}


@dataclass
class _Tree:
    """Clip (its path below the corpus, without suffix) → (recording, text); and files without a
    counterpart.
    """

    pairs: dict[str, tuple[str, str]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    audio: dict[str, str] = field(default_factory=dict)


def _tree(path: Path, most_s: float = float("inf")) -> _Tree:
    """The clips of a folder in the order of their names.

    If a text exists as .txt and as .lab, .txt counts.
    """
    tree = _Tree()
    for folder, files in walk(path, _DEEPEST, most_s):
        for name in reversed(
            files
        ):  # of several recordings with one name, the alphabetically first stays
            stem, ending = os.path.splitext(os.path.join(folder, name))
            clip = Path(os.path.relpath(stem, path)).as_posix()
            if has_audio_suffix(name):
                tree.audio[clip] = os.path.join(folder, name)
            elif ending.lower() in _ENDINGS and (
                clip not in tree.texts or ending.lower() == ".txt"
            ):
                tree.texts[clip] = os.path.join(folder, name)
    for clip in sorted(tree.texts.keys() & tree.audio.keys()):
        tree.pairs[clip] = (tree.audio.pop(clip), tree.texts.pop(clip))
    recordings: dict[str, list[str]] = {}
    for clip in tree.audio:
        recordings.setdefault(_plain(clip), []).append(clip)
    for clip in sorted(tree.texts):
        found = recordings.get(_plain(clip), [])
        if len(found) == 1 and found[0] in tree.audio:
            tree.pairs[_plain(clip)] = (tree.audio.pop(found[0]), tree.texts.pop(clip))
    return tree


def _plain(clip: str) -> str:
    """A clip's path without folders that separate recordings from texts."""
    *folders, name = clip.split("/")
    return "/".join([f for f in folders if f.lower() not in _PARTS] + [name])


def is_sidecar(path: Path) -> bool:
    """True for a folder in which a recording and a text have the same name."""
    return path.is_dir() and bool(_tree(path, SEARCH_S).pairs)


def with_text(path: Path) -> set[Path]:
    """The recordings of a folder that have a text."""
    return {Path(audio) for audio, _ in _tree(path).pairs.values()}


def read(path: Path, given: None = None) -> Iterator[Item]:
    """Rows in the order of their names; the first sub-folder is the speaker.

    BadInput: no recording has a text.
    """
    tree = _tree(path)
    if not tree.pairs:
        raise BadInput(
            f"{path}: no recording there has a text of the same name (x.wav and x.txt or x.lab)"
        )
    yield Taken(
        str(path), "read as sidecar: the text of each recording from the .txt or .lab of its name"
    )
    for clip, (audio, text_file) in tree.pairs.items():
        text = text_of(Path(text_file), clip)
        if isinstance(text, str) and _TIMES.match(text):
            text = RowError(
                text_file,
                1,
                clip,
                "times of sounds, not a text (an HTK or aligner label file)",
                "not a text",
            )
        if not isinstance(text, str):
            yield text
            continue
        speaker = _plain(clip).rpartition("/")[0].split("/")[0] or None
        yield Row(text_file, 1, clip, FixedPlace(audio), text, None, speaker)
    for clip in sorted(tree.texts):
        if not _ABOUT.match(clip.rpartition("/")[2]):
            reason = "no such audio file; no recording has the name of this text"
            yield RowError(tree.texts[clip], 1, clip, reason, "audio file missing")
    if tree.audio:
        first = tree.audio[min(tree.audio)]
        yield Notice(str(path), without_text(len(tree.audio), first))
