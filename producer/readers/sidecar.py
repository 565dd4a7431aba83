"""A folder of recordings with a text beside each: `x.wav` and `x.txt` or `x.lab`, in any depth of folders."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from common.errors import BadInput
from producer.readers.paths import FixedPlace, has_audio_suffix
from producer.readers.row import Item, Notice, Row, RowError, Taken, text_of

_ENDINGS = (".txt", ".lab")
_DEEPEST = 5
_ABOUT = re.compile(r"(readme|licen[cs]e|copying|changelog|metadata|transcripts?|info|speakers?([-_]info)?|note[s]?)\Z", re.I)
_TIMES = re.compile(r"[0-9.]+\s+[0-9.]+\s+\S")


def is_sidecar(path: Path) -> bool:
    """True for a folder in which a recording and a text of the same name lie side by side."""
    return path.is_dir() and any(pairs for _, pairs, _, _ in _folders(path))


def _folders(path: Path) -> Iterator[tuple[str, dict[str, tuple[str, str]], list[str], list[str]]]:
    """(folder, clip → its recording and text, texts without a recording, recordings without a text)."""
    base = str(path).rstrip(os.sep).count(os.sep)
    for folder, folders, files in os.walk(path):
        folders.sort()
        if folder.count(os.sep) - base >= _DEEPEST:
            folders.clear()
        audio, texts = {}, {}
        for name in sorted(files, reverse=True):  # of several the first in the alphabet stays, .txt before .lab as named above
            stem, ending = os.path.splitext(name)
            if name.startswith("."):
                continue
            if has_audio_suffix(name):
                audio[stem] = name
            elif ending.lower() in _ENDINGS and (stem not in texts or ending.lower() == ".txt"):
                texts[stem] = name
        pairs = {stem: (audio[stem], texts[stem]) for stem in sorted(audio.keys() & texts.keys())}
        yield folder, pairs, sorted(texts[s] for s in texts.keys() - audio.keys()), sorted(audio[s] for s in audio.keys() - texts.keys())


def read(path: Path, given: None = None) -> Iterator[Item]:
    """Rows in the order of folder and name; in sub-folders the speaker is the first folder's name. BadInput: no such pair."""
    if not is_sidecar(path):
        raise BadInput(f"{path}: no recording there has a text of the same name beside it (x.wav and x.txt or x.lab)")
    yield Taken(str(path), "read as sidecar: the text of each recording from the .txt or .lab of its name")
    unread, first = 0, ""
    for folder, pairs, lone, silent in _folders(path):
        parts = Path(folder).relative_to(path).parts
        for clip, (audio, text_name) in pairs.items():
            file, name = Path(folder, text_name), "/".join((*parts, clip))
            text = text_of(file, name)
            if isinstance(text, str) and _TIMES.match(text):
                text = RowError(str(file), 1, name, "times of sounds, not a text (an HTK or aligner label file)", "not a text")
            if not isinstance(text, str):
                yield text
                continue
            yield Row(str(file), 1, name, FixedPlace(os.path.join(folder, audio)), text, None, parts[0] if parts else None)
        for name in lone:
            stem = os.path.splitext(name)[0]
            if not _ABOUT.match(stem):
                reason = "no such audio file; no recording of that name lies beside it"
                yield RowError(os.path.join(folder, name), 1, "/".join((*parts, stem)), reason, "audio file missing")
        unread += len(silent)
        first = first or next((os.path.join(folder, f) for f in silent), "")
    if unread:
        yield Notice(str(path), f"{unread} recordings have no text beside them (first {first})")
