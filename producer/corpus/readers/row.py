"""What every reader yields, and the rules they share: how lines are read and where a clip may lie."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from common.system.errors import BadInput

AUDIO_SUFFIXES = (".wav", ".flac", ".mp3", ".ogg", ".opus")
AUDIO_FOLDERS = ("wavs", "", "audio", "clips")
METADATA_NAMES = ("metadata.csv", "metadata.tsv", "metadata.txt", "metadata_train.csv", "train.csv", "train.tsv")


@dataclass(frozen=True)
class Row:
    """One line of a corpus."""

    file: str
    line: int
    id: str
    find: Callable[[], tuple[str, ...]]  # not the paths themselves: 20 strings a row are gigabytes in a large corpus
    text: str
    language: str | None = None  # as written there; None where the corpus names none
    speaker: str | None = None

    @property
    def candidates(self) -> tuple[str, ...]:
        """The paths where its audio may lie, the likeliest first; none has been looked at."""
        return self.find()


@dataclass(frozen=True)
class RowError:
    """A line that cannot be an utterance. `kind` is the short form that is counted."""

    file: str
    line: int
    id: str
    reason: str
    kind: str


@dataclass(frozen=True)
class Notice:
    """A warning about a whole file."""

    file: str
    message: str


Item = Row | RowError | Notice


def find_metadata(path: Path) -> Path:
    """The metadata file of a corpus given as that file or as its folder. BadInput: there is none."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise BadInput(f"{path}: no such file or folder; give a corpus folder or its metadata file (data.train=DIR)")
    for name in METADATA_NAMES:
        if (path / name).is_file():
            return path / name
    raise BadInput(f"{path}: no corpus found there; looked for {', '.join(METADATA_NAMES)} and for a VCTK tree (txt/<speaker>/)")


def lines(path: Path) -> Iterator[tuple[int, str | None]]:
    """(line number from 1, text without its line end) of a UTF-8 or UTF-16 file, blank lines left out.

    A byte-order mark is removed, CRLF and LF both end a line, and nothing else does (U+2028 or U+0085 inside a text stays).
    The text is None where the bytes are not UTF-8.
    """
    with open(path, "rb") as f:
        head = f.read(2)
        f.seek(0)
        if head in (b"\xff\xfe", b"\xfe\xff"):
            rows = f.read().decode("utf-16").encode().split(b"\n")
        else:
            rows = f
        for number, raw in enumerate(rows, 1):
            if number == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            raw = raw.rstrip(b"\r\n")
            if not raw.strip():
                continue
            try:
                yield number, raw.decode()
            except UnicodeDecodeError:
                yield number, None


def not_utf8(file: Path, line: int) -> RowError:
    """The error for a line whose bytes are no UTF-8."""
    return RowError(str(file), line, "", "not UTF-8; save the metadata file as UTF-8", "not UTF-8")


def has_audio_suffix(name: str) -> bool:
    """True for `x.wav` and `x.WAV`; False for `x` and for ids with a dot in them."""
    return os.path.splitext(name)[1].lower() in AUDIO_SUFFIXES


def audio_candidates(root: Path, name: str) -> tuple[str, ...]:
    """Every path that `name` in a metadata file under `root` may mean, the likeliest first.

    With or without folder, with or without suffix, relative or absolute; another suffix is tried last, as corpora are often
    converted after the metadata was written.
    """
    name = name.replace("\\", "/")
    stem, suffix = os.path.splitext(name) if has_audio_suffix(name) else (name, "")
    if os.path.isabs(name):
        bases = [stem]
    else:
        bases = [os.path.normpath(os.path.join(root, folder, stem)) for folder in AUDIO_FOLDERS]
        if suffix or "/" in name:  # a path as written is a path below the root first
            bases.insert(0, bases.pop(1))
    suffixes = ([suffix] if suffix else []) + [s for s in AUDIO_SUFFIXES if s != suffix]
    if suffix:
        return tuple([b + suffix for b in bases] + [b + s for b in bases for s in suffixes[1:]])
    return tuple(b + s for b in bases for s in suffixes)
