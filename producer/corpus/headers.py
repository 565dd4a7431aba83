"""What a scan knows of one audio file: its header, and on request its samples' level. Remembered by path, size and mtime."""

from __future__ import annotations

import os
import stat
import struct
from dataclasses import dataclass
from typing import BinaryIO

from common.data.manifest import Manifest
from producer.batches.decode import CLOSED, DecodeError, check_levels, num_output_samples, open_audio

MAX_DEEP_S = 120  # longer files are beyond every limit: their samples are not worth the memory
_WAV_FORMATS = ("WAV", "WAVEX", "RF64")  # as libsndfile names them
_ENDLESS = 0x7FF00000  # sizes from here to 2**32 - 1 are what ffmpeg, SoX, eSpeak and arecord leave when they write into a pipe
_MAX_CHUNKS = 100  # before the data; files have two or three


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


def _check_complete(path: str, size: int) -> None:
    """Compare the size of the data that a WAV file's header announces with what a file of `size` bytes can hold.

    libsndfile takes what is there, so the part of a recording that an interrupted copy left would go with the text of the whole.

    Raises:
        DecodeError: the file ends early by a frame (of a compressed format: a block) or more.
    """
    try:
        with open(path, "rb", buffering=0) as f:
            announced, start, block = _data_chunk(f)
    except OSError as e:
        raise DecodeError(path, f"{CLOSED} ({e.strerror})", CLOSED) from e
    held = size - start
    if announced - held >= block and announced not in (size, size - 8):  # some writers count the header, too
        lost = f"the header announces {announced} bytes of audio, the file has {held}"
        raise DecodeError(path, f"ends early: {lost}; copy it again", "ends early")


def _data_chunk(f: BinaryIO) -> tuple[int, int, int]:
    """(bytes that the header announces, where they start, bytes a frame or block) of a RIFF file; 0 bytes if it does not say."""
    order = ">" if f.read(12).startswith(b"RIFX") else "<"
    block, long_size, at = 1, 0, 12
    for _ in range(_MAX_CHUNKS):
        f.seek(at)
        head = f.read(24)  # they hold what is wanted of each chunk
        if len(head) < 8:
            break
        head = head.ljust(24, b"\0")
        name, size = struct.unpack_from(order + "4sI", head)
        at += 8
        if name == b"data":
            if size == 0xFFFFFFFF:
                size = long_size
            elif size >= _ENDLESS:
                size = 0
            return size, at, block
        if name == b"fmt ":
            block = max(1, *struct.unpack_from(order + "H", head, 20))
        elif name == b"ds64":  # of RF64, whose own sizes are all 0xFFFFFFFF
            (long_size,) = struct.unpack_from("<Q", head, 16)
        at += size + size % 2
    return 0, at, block


def _examine(path: str, size: int, mtime_ns: int, deep: bool) -> AudioFacts:
    facts = {"path": path, "size": size, "mtime_ns": mtime_ns, "deep": deep}
    if size == 0:
        return AudioFacts(**facts, error="empty file", kind="empty file")
    try:
        with open_audio(path) as f:
            facts |= {"rate": f.samplerate, "frames": f.frames}
            if f.format in _WAV_FORMATS:
                _check_complete(path, size)
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
