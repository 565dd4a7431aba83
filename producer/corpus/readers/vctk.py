"""VCTK: `txt/<speaker>/<id>.txt` beside `wav48*/<speaker>/<id>[_mic1|_mic2].{flac,wav}`; one text
per file.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from common.system.counted import counted
from common.system.errors import BadInput
from producer.corpus.readers.paths import FixedPlace
from producer.corpus.readers.row import Item, Notice, Row, Taken, text_of

_AUDIO_FOLDERS = ("wav48_silence_trimmed", "wav48", "wav22", "wavs")
# Microphone 1 first: two speakers have no second one.
_ENDINGS = ("_mic1.flac", "_mic2.flac", ".flac", ".wav", "_mic1.wav", "_mic2.wav")


def is_vctk(path: Path) -> bool:
    """True for a folder with `txt/` and one of VCTK's audio folders."""
    return (path / "txt").is_dir() and any((path / a).is_dir() for a in _AUDIO_FOLDERS)


def read(path: Path, given: None = None) -> Iterator[Item]:
    """Rows of a VCTK tree in the order of speaker and file name. BadInput: not such a tree."""
    if not is_vctk(path):
        raise BadInput(
            f"{path}: not a VCTK tree; expected txt/<speaker>/*.txt and wav48_silence_trimmed/ or"
            " wav48/"
        )
    folders = [path / a for a in _AUDIO_FOLDERS if (path / a).is_dir()]
    texts = defaultdict(set)
    yield Taken(
        str(path),
        "read as vctk: the text of each clip from txt/, audio from"
        f" {', '.join(f.name for f in folders)}",
    )
    for speaker in sorted(p for p in (path / "txt").iterdir() if p.is_dir()):
        for transcript in sorted(speaker.glob("*.txt")):
            texts[speaker.name].add(transcript.stem)
            text = text_of(transcript)
            if not isinstance(text, str):
                yield text
                continue
            place = FixedPlace(*_candidates(folders, speaker.name, transcript.stem))
            yield Row(str(transcript), 1, transcript.stem, place, text, None, speaker.name)
    without = _without_text(folders, texts)
    if without:
        (speaker, _), *others = without.most_common()
        yield Notice(
            str(path),
            f"{counted(without.total(), '{n} [recording|recordings]')} of {speaker}"
            f"{' and others' if others else ''}{counted(without.total(), ' [has|have]')} no text",
        )


def _without_text(folders: list[Path], texts: Mapping[str, set[str]]) -> Counter[str]:
    """Speaker → recordings that are not in `texts`; one from two microphones counts once.

    Lists the folders, opens no file.
    """
    count = Counter()
    for speaker in sorted({name for folder in folders for name in _names(folder)}):
        found = {_clip(name) for folder in folders for name in _names(folder / speaker)}
        count[speaker] = len(found - texts.get(speaker, set()) - {""})
    return +count


def _names(folder: Path) -> list[str]:
    """The names in a folder; none if it is not a folder, or may not be listed."""
    with contextlib.suppress(OSError):
        return os.listdir(folder)
    return []


def _clip(name: str) -> str:
    """The clip that a file records; empty for other files, and for those that macOS leaves on
    foreign disks (._p225_001.wav).
    """
    stem, _, suffix = name.rpartition(".")
    if suffix not in ("flac", "wav") or stem.startswith("."):
        return ""
    return stem.removesuffix("_mic1").removesuffix("_mic2")


def _candidates(folders: list[Path], speaker: str, clip: str) -> tuple[str, ...]:
    return tuple(f"{folder}/{speaker}/{clip}{ending}" for folder in folders for ending in _ENDINGS)
