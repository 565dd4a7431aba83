"""Whether an audio file holds all that its headers announce, and nothing behind it; without
decoding.

libsndfile reads what is there: the beginning that an interrupted copy left as a shorter recording,
and only the first of two files joined into one. Either would be paired with the text of the whole.
Each container is one function (file, size, container) → a fault, or None; they are in one dict,
under the names that libsndfile gives the formats.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from typing import BinaryIO

from common.audio import flac, mp3, ogg
from common.audio.errors import CLOSED, CUT, JOINED, DecodeError

_ENDLESS = (
    0x7FF00000  # sizes from here to 2**32 - 1 are what programs leave when they write into a pipe
)
_MAX_CHUNKS = 100  # before the data; files have two or three
_FAR = 1 << 62  # beyond the end of every file: nothing is read there
DOUBT = "doubt"  # the kind of what is no fault for certain
Fault = tuple[str, str]  # (reason, kind)


def check_whole(path: str | os.PathLike, size: int, container: str, thorough: bool = False) -> str:
    """Compare what a file announces with the `size` bytes that it has.

    Args:
        thorough: read the whole file if nothing less shows whether another recording is joined to
            it.

    Returns:
        A doubt that is no reason to refuse the file, in words, or "".

    Raises:
        DecodeError: it ends early, or another recording is joined to it.
    """
    check = _CHECKS.get(container)
    if check is None:
        return ""
    try:
        with open(path, "rb", buffering=0) as f:
            fault = check(f, size)
            if thorough and fault is None and container == "FLAC" and flac.is_joined(f):
                fault = _joined("several FLAC streams")
    except OSError as e:
        raise DecodeError(path, f"{CLOSED} ({e.strerror})", CLOSED) from e
    except struct.error:  # an incomplete header is left to the decoder to refuse
        return ""
    if fault is None:
        return ""
    reason, kind = fault
    if kind == DOUBT:
        return reason
    raise DecodeError(path, reason, kind)


def container_of(path: str | os.PathLike) -> str:
    """The container that a file's first bytes name, as libsndfile calls it; "" if they name none
    that is known here.
    """
    try:
        with open(path, "rb", buffering=0) as f:
            head = f.read(16)
    except OSError:
        return ""
    return container_of_bytes(head)


def container_of_bytes(head: bytes) -> str:
    """`container_of`, of bytes."""
    for magic, name in _MAGIC.items():
        if head.startswith(magic):
            return name
    return "MP4" if head[4:8] == b"ftyp" else ""


def _short(announced: int, held: int) -> Fault:
    lost = f"the header announces {announced} bytes of audio, the file has {held}"
    return f"{CUT}: {lost}; copy it again", CUT


def _joined(what: str) -> Fault:
    return (
        (
            f"{what} are joined in this file, and the first alone would be read; split it, or"
            " convert it anew"
        ),
        JOINED,
    )


# -- RIFF and its kin ------------------------------------------------------------------------------


def _wav(f: BinaryIO, size: int) -> Fault | None:
    announced, start, block = _data_chunk(f)
    held = size - start
    if (
        announced and announced - held >= block and announced not in (size, size - 8)
    ):  # some writers count the header, too
        return _short(announced, held)
    end = start + announced + announced % 2
    if announced and end + 12 <= size:
        f.seek(end)
        if f.read(4) in (b"RIFF", b"RIFX", b"RF64"):
            return _joined("two WAV files")
    return None


def _data_chunk(f: BinaryIO) -> tuple[int, int, int]:
    """(bytes that the header announces, where they start, bytes a frame or block) of a RIFF file; 0
    bytes if it does not say.
    """
    order = ">" if f.read(12).startswith(b"RIFX") else "<"
    block, long_size, at = 1, 0, 12
    for _ in range(_MAX_CHUNKS):
        f.seek(min(at, _FAR))
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


def _aiff(f: BinaryIO, size: int) -> Fault | None:
    at = 12
    for _ in range(_MAX_CHUNKS):
        f.seek(min(at, size))
        name, length = struct.unpack(">4sI", f.read(8))
        if name == b"SSND":
            announced, held = length - 8, size - at - 16
            if 0 < announced < _ENDLESS:
                if announced > held:
                    return _short(announced, held)
                f.seek(at + 8 + length + length % 2)
                if f.read(4) == b"FORM":
                    return _joined("two AIFF files")
            return None
        at += 8 + length + length % 2
    return None


def _au(f: BinaryIO, size: int) -> Fault | None:
    order = ">" if f.read(4) == b".snd" else "<"
    start, announced = struct.unpack(order + "II", f.read(8))
    if announced >= _ENDLESS or announced == 0:
        return None
    if announced > size - start:
        return _short(announced, size - start)
    f.seek(start + announced)
    return _joined("two AU files") if f.read(4) in (b".snd", b"dns.") else None


def _w64(f: BinaryIO, size: int) -> Fault | None:
    at = 40
    for _ in range(_MAX_CHUNKS):
        f.seek(min(at, size))
        name, length = struct.unpack("<16sQ", f.read(24))
        if name.startswith(b"data"):
            announced, held = length - 24, size - at - 24
            if 0 < announced < 1 << 60:
                if announced > held:
                    return _short(announced, held)
                f.seek(at + (length + 7) // 8 * 8)
                if f.read(4) == b"riff":
                    return _joined("two W64 files")
            return None
        at += max(24, (length + 7) // 8 * 8)
    return None


def _caf(f: BinaryIO, size: int) -> Fault | None:
    at = 8
    for _ in range(_MAX_CHUNKS):
        f.seek(min(at, size))
        name, length = struct.unpack(">4sq", f.read(12))
        if name == b"data":
            held = size - at - 12
            if length > held:
                return _short(length - 4, held - 4)
            f.seek(at + 12 + max(0, length))
            return _joined("two CAF files") if length > 0 and f.read(4) == b"caff" else None
        at += 12 + max(0, length)
    return None


def _nist(f: BinaryIO, size: int) -> Fault | None:
    head = f.read(1024)
    start = head.split(b"\n")[1].strip() if head.count(b"\n") > 1 else b""
    fields = dict(
        line.split(None, 2)[::2] for line in head.split(b"\n")[2:] if len(line.split(None, 2)) == 3
    )
    if b"shorten" in fields.get(b"sample_coding", b""):
        return None
    names = (b"sample_count", b"channel_count", b"sample_n_bytes")
    numbers = [start, *(fields.get(n, b"") for n in names)]
    if not all(n.isdigit() and len(n) < 16 for n in numbers):
        return None
    start, count, channels, width = map(int, numbers)
    announced = count * channels * width
    if announced > size - start:
        return _short(announced, max(0, size - start))
    f.seek(start + announced)
    return _joined("two NIST files") if f.read(7) == b"NIST_1A" else None


# -- formats of packets ----------------------------------------------------------------------------


def _ogg(f: BinaryIO, size: int) -> Fault | None:
    found = ogg.ends(f, size)
    if found.incomplete:
        return f"{CUT}: the last Ogg page is incomplete; copy it again", CUT
    if found.joined:
        return _joined("several Ogg streams")
    return ("no page marks the end of the Ogg stream", DOUBT) if found.unmarked else None


def _mp3(f: BinaryIO, size: int) -> Fault | None:
    found = mp3.look(f, size)
    if found.cut:
        return f"{CUT}: {found.cut}; copy it again", CUT
    return _joined("two MP3 files") if found.joined else None


def _flac(f: BinaryIO, size: int) -> Fault | None:
    found = flac.look(f, size)
    if found is None or not found.cut:
        return None
    if flac.is_joined(f):
        return _joined("several FLAC streams")
    return f"{CUT}: {found.cut}; copy it again", CUT


def _mp4(f: BinaryIO, size: int) -> Fault | None:
    at = 0
    for _ in range(10 * _MAX_CHUNKS):
        if at + 8 > size:
            break
        f.seek(at)
        head = f.read(16).ljust(16, b"\0")
        length, name = struct.unpack_from(">I4s", head)
        if length == 1:
            (length,) = struct.unpack_from(">Q", head, 8)
        if length == 0:  # to the end
            return None
        if name == b"ftyp" and at:
            return _joined("two M4A files")
        if length < 8:
            return None
        if at + length > size:
            return _short(length, size - at)
        at += length
    return None


def _webm(f: BinaryIO, size: int) -> Fault | None:
    """Check a segment that follows an EBML header and says how long it is, unless all its bits are
    ones.
    """
    head, at = f.read(256), 4
    length, width = _ebml_number(head, at)
    at += width + (length or 0)
    if head[at : at + 4] != b"\x18\x53\x80\x67":
        return None
    length, width = _ebml_number(head, at + 4)
    start = at + 4 + width
    return _short(length, size - start) if length is not None and length > size - start else None


def _ebml_number(data: bytes, at: int) -> tuple[int | None, int]:
    """(value, bytes it takes); the value that is all ones is None: unknown."""
    first = data[at] if at < len(data) else 0
    width = 9 - first.bit_length() if first else 1
    value = int.from_bytes(data[at : at + width], "big") & ((1 << 7 * width) - 1)
    return (None if value == (1 << 7 * width) - 1 else value), width


def _asf(f: BinaryIO, size: int) -> Fault | None:
    """Check the size in the file properties."""
    head = f.read(8192)
    at = head.find(b"\xa1\xdc\xab\x8c\x47\xa9\xcf\x11\x8e\xe4\x00\xc0\x0c\x20\x53\x65")
    if at < 0 or len(head) < at + 48:
        return None
    (announced,) = struct.unpack_from("<Q", head, at + 40)
    return _short(announced, size) if announced > size else None


_CHECKS: dict[str, Callable[[BinaryIO, int], Fault | None]] = {
    "WAV": _wav, "WAVEX": _wav, "RF64": _wav, "AIFF": _aiff, "AU": _au, "W64": _w64, "CAF": _caf,
    "NIST": _nist,
    "OGG": _ogg, "MP3": _mp3, "FLAC": _flac, "MP4": _mp4, "WEBM": _webm, "ASF": _asf,
}  # fmt: skip
_MAGIC = {
    b"RIFF": "WAV", b"RIFX": "WAV", b"RF64": "RF64", b"FORM": "AIFF", b".snd": "AU", b"dns.": "AU",
    b"riff": "W64",
    b"caff": "CAF", b"NIST_1A": "NIST", b"OggS": "OGG", b"fLaC": "FLAC",
    b"\x1a\x45\xdf\xa3": "WEBM",
    b"\x30\x26\xb2\x75": "ASF",
}  # fmt: skip
