"""VCTK: `txt/<speaker>/<id>.txt` beside `wav48*/<speaker>/<id>[_mic1|_mic2].{flac,wav}`; one text per file."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from common.errors import BadInput
from producer.readers.row import Item, Row, lines, not_utf8

_AUDIO_FOLDERS = ("wav48_silence_trimmed", "wav48", "wav22", "wavs")
# Microphone 1 first: two speakers have no second one.
_ENDINGS = ("_mic1.flac", "_mic2.flac", ".flac", ".wav", "_mic1.wav", "_mic2.wav")


def is_vctk(path: Path) -> bool:
    """True for a folder with `txt/` and one of VCTK's audio folders."""
    return (path / "txt").is_dir() and any((path / a).is_dir() for a in _AUDIO_FOLDERS)


def read(path: Path) -> Iterator[Item]:
    """Rows of a VCTK tree in the order of speaker and file name. BadInput: not such a tree."""
    if not is_vctk(path):
        raise BadInput(f"{path}: not a VCTK tree; expected txt/<speaker>/*.txt and wav48_silence_trimmed/ or wav48/")
    folders = [path / a for a in _AUDIO_FOLDERS if (path / a).is_dir()]
    for speaker in sorted(p for p in (path / "txt").iterdir() if p.is_dir()):
        for transcript in sorted(speaker.glob("*.txt")):
            parts = list(lines(transcript))
            if any(text is None for _, text in parts):
                yield not_utf8(transcript, 1)
                continue
            find = partial(_candidates, folders, speaker.name, transcript.stem)
            text = " ".join(text.strip() for _, text in parts)
            yield Row(str(transcript), 1, transcript.stem, find, text, None, speaker.name)


def _candidates(folders: list[Path], speaker: str, clip: str) -> tuple[str, ...]:
    return tuple(f"{folder}/{speaker}/{clip}{ending}" for folder in folders for ending in _ENDINGS)
