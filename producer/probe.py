"""What a scan knows of one audio file: its header, and on request its samples' level. Remembered by path, size and mtime."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass

from common.manifest import Manifest
from producer.decode import DecodeError, check_levels, num_output_samples, open_audio

MAX_DEEP_S = 120  # longer files are beyond every limit: their samples are not worth the memory


@dataclass(frozen=True)
class AudioFacts:
    """A file's header, or why it cannot be used. `peak` is None where the samples have not been read."""

    path: str
    size: int
    mtime_ns: int
    rate: int = 0
    frames: int = 0
    error: str = ""
    kind: str = ""
    peak: float | None = None
    clipped: float = 0.0
    deep: bool = False  # the samples were asked for

    @property
    def num_samples(self) -> int:
        """Length at 22 050 Hz."""
        return num_output_samples(self.frames, self.rate)

    def remembered(self) -> dict:
        """The values to store under path, size and mtime; defaults are left out."""
        found = ((name, getattr(self, name)) for name in _REMEMBERED)
        return {name: value for name, value in found if value}


_REMEMBERED = ("rate", "frames", "error", "kind", "peak", "clipped", "deep")


def _examine(path: str, size: int, mtime_ns: int, deep: bool) -> AudioFacts:
    facts = {"path": path, "size": size, "mtime_ns": mtime_ns, "deep": deep}
    if size == 0:
        return AudioFacts(**facts, error="empty file", kind="empty file")
    try:
        with open_audio(path) as f:
            facts |= {"rate": f.samplerate, "frames": f.frames}
        if deep and facts["frames"] <= MAX_DEEP_S * facts["rate"]:
            level = check_levels(path)
            facts |= {"peak": level.peak, "clipped": level.clipped}
    except DecodeError as e:
        return AudioFacts(**facts, error=e.reason, kind=e.kind)
    return AudioFacts(**facts)


def probe(candidates: tuple[str, ...], deep: bool, previous: Manifest | None = None) -> AudioFacts | None:
    """Facts of the first candidate that exists; None if none does. A file that `previous` knows unchanged is not opened."""
    for path in candidates:
        try:
            found = os.stat(path)
        except (OSError, ValueError):  # ValueError: a null byte in the name
            continue
        if not stat.S_ISREG(found.st_mode):
            continue
        known = None if previous is None else previous.file_facts(path, found.st_size, found.st_mtime_ns)
        if known is not None and (known.get("deep") or not deep):
            return AudioFacts(path, found.st_size, found.st_mtime_ns, **known)
        return _examine(path, found.st_size, found.st_mtime_ns, deep)
    return None
