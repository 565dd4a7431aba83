"""Finds the recording that a row names: paths as people write them, and as other machines left
them.

First come the places that a name may mean, without looking; then, if none of them is a file, any
file of that name below the corpus. That finds a Windows path's `000.wav`, another machine's
absolute path, `A.WAV` for `a.wav`, `caf%C3%A9.wav`, and a name in the other of Unicode's two forms
of accents.
"""

from __future__ import annotations

import functools
import os
import re
import threading
import time
import unicodedata
from collections.abc import Iterator
from urllib.parse import unquote

# Suffixes that an id without one may have; and those that are one.
COMMON_SUFFIXES = (".wav", ".flac", ".mp3", ".ogg", ".opus")
AUDIO_SUFFIXES = (
    *COMMON_SUFFIXES, ".m4a", ".aac", ".wma", ".webm", ".mp4", ".aiff", ".aif", ".au", ".w64",
    ".caf", ".oga", ".mka", ".amr",
    ".sph", ".wave", ".snd", ".3gp", ".wv",
)  # fmt: skip
AUDIO_FOLDERS = ("wavs", "", "wav", "audio", "clips")
MOST_FILES = 2_000_000  # files listed at most in search of a name
SEARCH_S = 60.0  # and for so long: the folder may be a home, or on a network
_DEEPEST = 8  # folders below the corpus that are searched
_ELSEWHERE = re.compile(r"[A-Za-z]:/|//")  # a drive or a server: nothing on this machine


def has_audio_suffix(name: str) -> bool:
    """True for `x.wav` and `x.WAV`; False for `x` and for ids with a dot in them."""
    return os.path.splitext(name)[1].lower() in AUDIO_SUFFIXES


def _slashed(name: str) -> str:
    name = name.removeprefix("file://") if name.startswith("file:///") else name
    return name.replace("\\", "/")


@functools.lru_cache(maxsize=64)
def _folders(root: str) -> list[str]:
    """The folders of a corpus that may hold its recordings, as what goes before a file's name."""
    found = [os.path.normpath(os.path.join(root, folder, "x")) for folder in AUDIO_FOLDERS]
    return [path[:-1] for path in found]


def audio_candidates(root: os.PathLike | str, name: str) -> tuple[str, ...]:
    """Every path that `name` in a metadata file under `root` may mean, the likeliest first.

    With or without folder, with or without suffix, relative or absolute; another suffix is tried
    last, because corpora are often converted after the metadata was written. Of a path on a Windows
    drive only the file's name counts.
    """
    name = _slashed(name)
    if _ELSEWHERE.match(name):
        name = name.rpartition("/")[2]
    stem, suffix = os.path.splitext(name) if has_audio_suffix(name) else (name, "")
    if os.path.isabs(name):
        bases = [stem]
    elif "/" not in name and stem.strip("."):
        bases = [folder + stem for folder in _folders(os.fspath(root))]
        if suffix:
            bases.insert(0, bases.pop(1))
    else:
        bases = [os.path.normpath(os.path.join(root, folder, stem)) for folder in AUDIO_FOLDERS]
        if suffix or "/" in name:  # a path as written first means one below the root
            bases.insert(0, bases.pop(1))
    suffixes = ([suffix] if suffix else []) + [s for s in COMMON_SUFFIXES if s != suffix]
    if suffix:
        return tuple([b + suffix for b in bases] + [b + s for b in bases for s in suffixes[1:]])
    return tuple(b + s for b in bases for s in suffixes)


def _key(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


class Locator:
    """The recordings below a corpus' folder by name.

    It lists the folder once, the first time that a name is nowhere else.
    """

    def __init__(self, root: os.PathLike | str):
        self.root = os.fspath(root)
        self._lock = threading.Lock()
        self._files: dict[str, list[str]] | None = None
        self.complete = True  # false if there are more files than were listed

    def search(self, written: str) -> list[str]:
        """Paths of the recordings with the file name of `written`; of several, those that share
        most of its folders. If several remain, nothing tells them apart.
        """
        files = self._index()
        for name in dict.fromkeys((_slashed(written), unquote(_slashed(written)))):
            *folders, base = [_key(p) for p in name.split("/")]
            found = files.get(base, [])
            if not found and base:
                stem = os.path.splitext(base)[0] if has_audio_suffix(base) else base
                found = files.get(stem + "/", [])
            if found:
                return self._nearest(found, folders)
        return []

    def _nearest(self, found: list[str], folders: list[str]) -> list[str]:
        shared = []
        for path in found:
            own = [_key(p) for p in os.path.relpath(path, self.root).split("/")[:-1]]
            count = 0
            for a, b in zip(reversed(own), reversed(folders), strict=False):
                if a != b:
                    break
                count += 1
            shared.append(count)
        return [path for path, count in zip(found, shared, strict=True) if count == max(shared)]

    def _index(self) -> dict[str, list[str]]:
        """Recordings by their whole name, and by their name without suffix followed by a
        slash.
        """
        with self._lock:
            if self._files is None:
                self._files = {}
                for path in sorted(self._recordings()):
                    base = _key(os.path.basename(path))
                    for key in (base, os.path.splitext(base)[0] + "/"):
                        self._files.setdefault(key, []).append(path)
            return self._files

    def _recordings(self) -> Iterator[str]:
        seen, count, deadline = set(), 0, time.monotonic() + SEARCH_S
        folders = [(self.root, 0)]
        while folders:
            if count > MOST_FILES or time.monotonic() > deadline:
                self.complete = False
                return
            folder, depth = folders.pop()
            try:
                found = os.stat(folder)
                entries = list(os.scandir(folder))
            except OSError:  # a folder that may not be read is empty for us
                continue
            if (found.st_dev, found.st_ino) in seen:
                continue
            seen.add((found.st_dev, found.st_ino))
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if has_audio_suffix(entry.name):
                    if entry.is_file():
                        count += 1
                        yield entry.path
                elif depth < _DEEPEST and entry.is_dir():
                    folders.append((entry.path, depth + 1))


def walk(
    path: os.PathLike | str, deepest: int, most_s: float = float("inf")
) -> Iterator[tuple[str, list[str]]]:
    """(folder, its files in the order of their names) for a folder and those below it, down to
    `deepest`, for at most `most_s` seconds.
    """
    base, deadline = os.fspath(path).rstrip(os.sep).count(os.sep), time.monotonic() + most_s
    for folder, folders, files in os.walk(path):
        folders.sort()
        if folder.count(os.sep) - base >= deepest:
            folders.clear()
        yield folder, sorted(f for f in files if not f.startswith("."))
        if time.monotonic() > deadline:
            return


class Place:
    """Where a named recording may be."""

    __slots__ = ("_locator", "name")

    def __init__(self, locator: Locator, name: str):
        self._locator, self.name = locator, name

    def candidates(self) -> tuple[str, ...]:
        """The paths that the name may mean, the likeliest first; unchecked."""
        return audio_candidates(self._locator.root, self.name)

    @property
    def moved(self) -> bool:
        """Whether the name is another machine's path, of which only the last part counts."""
        return bool(_ELSEWHERE.match(_slashed(self.name)))

    def elsewhere(self) -> list[str]:
        """Recordings of that name somewhere below the corpus."""
        return self._locator.search(self.name)

    def nowhere(self) -> str:
        """What to add to the message if there is none."""
        if self._locator.complete:
            return f"; nothing below {self._locator.root} has that name"
        return (
            f"; not among the recordings below {self._locator.root} that were listed within"
            f" {SEARCH_S:.0f} s either"
        )


class FixedPlace:
    """The paths where a reader knows a recording to be."""

    __slots__ = ("_paths",)
    moved = False

    def __init__(self, *paths: str):
        self._paths = paths

    def candidates(self) -> tuple[str, ...]:
        """The paths, the likeliest first."""
        return self._paths

    def elsewhere(self) -> list[str]:
        """Nowhere."""
        return []

    def nowhere(self) -> str:
        """Nothing to add."""
        return ""
