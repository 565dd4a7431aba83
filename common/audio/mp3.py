"""MPEG audio without decoding: how many samples a file without a length header holds, and whether a
file is cut or joined.

libsndfile (mpg123) takes the length from the Xing, Info or VBRI header in the first frame. Without
one it guesses from the first frame's bit rate and reads no further: only a quarter of a recording
of variable rate may be left. `with_length` gives such a file the header that it lacks. Source: ISO
11172-3, 2.4.1; the Xing header as LAME's VbrTag.c writes it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import BinaryIO

MAX_BYTES = 1 << 27  # of a file without a length header that is walked through
_KBITS = {
    (1, 1): (0, 32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448),
    (1, 2): (0, 32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (1, 3): (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (2, 1): (0, 32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (2, 2): (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
    (2, 3): (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_RATES = {
    3: (44100, 48000, 32000),
    2: (22050, 24000, 16000),
    0: (11025, 12000, 8000),
}  # by version bits
_TOLERANCE = 4096  # bytes that writers of length headers are wrong by: a frame or two, and tags
_HEAD = 4096


@dataclass(frozen=True)
class Frame:
    """A frame header: bytes to the next one, samples, and where a Xing header would lie in it."""

    length: int
    samples: int
    side: int


@dataclass(frozen=True)
class Look:
    """`frames`, `start`: for a file without a length header; 0 with one.

    `cut`: why it ends early, or "".
    """

    frames: int = 0
    start: int = 0
    cut: str = ""
    joined: bool = False


def frame_at(data: bytes, at: int) -> Frame | None:
    """The frame that begins there; None if none does."""
    if len(data) < at + 4 or data[at] != 0xFF or data[at + 1] & 0xE0 != 0xE0:
        return None
    version, layer = data[at + 1] >> 3 & 3, 4 - (data[at + 1] >> 1 & 3)
    rate_bits, kbit_bits = data[at + 2] >> 2 & 3, data[at + 2] >> 4
    if version == 1 or layer == 4 or rate_bits == 3 or kbit_bits in (0, 15):
        return None
    rate = _RATES[version][rate_bits]
    kbits = _KBITS[1 if version == 3 else 2, layer][kbit_bits]
    padding = data[at + 2] >> 1 & 1
    if layer == 1:
        return Frame((12000 * kbits // rate + padding) * 4, 384, 4)
    samples = 576 if layer == 3 and version != 3 else 1152
    mono = data[at + 3] >> 6 == 3
    side = (17 if mono else 32) if version == 3 else (9 if mono else 17)
    return Frame(samples // 8 * 1000 * kbits // rate + padding, samples, 4 + side)


def _first_frame(f: BinaryIO, size: int) -> tuple[int, bytes]:
    """(where the first frame begins, the bytes from there on), after ID3v2 tags and anything else
    that is no frame.
    """
    at = 0
    for _ in range(8):
        f.seek(at)
        head = f.read(_HEAD)
        if head[:3] != b"ID3" or len(head) < 10:
            break
        at += 10 + sum((b & 127) << s for b, s in zip(head[6:10], (21, 14, 7, 0), strict=True))
    for skipped in range(min(len(head), 2048)):
        found = frame_at(head, skipped)
        if found is None:
            continue
        f.seek(at + skipped)
        head = f.read(_HEAD)
        if (
            found.length >= len(head)
            or frame_at(head, found.length)
            or at + skipped + found.length >= size
        ):
            return at + skipped, head
        f.seek(at)
        head = f.read(_HEAD)
    return -1, b""


def look(f: BinaryIO, size: int) -> Look:
    """What a file says of its length, against its `size`."""
    start, head = _first_frame(f, size)
    if start < 0:
        return Look()
    first = frame_at(head, 0)
    mark, length = head[first.side : first.side + 4], 0
    if mark in (b"Xing", b"Info") and len(head) >= first.side + 16:
        flags, _, length = struct.unpack_from(">III", head, first.side + 4)
        if not flags & 1:  # without the one number that matters
            return _walk(f, start + first.length, size)
        length = length if flags & 2 else 0
    elif head[36:40] == b"VBRI" and len(head) >= 50:
        length = struct.unpack_from(">I", head, 46)[0]
    else:
        return _walk(f, start, size)
    return _compare(f, start, length, size, first.length)


def _compare(f: BinaryIO, start: int, announced: int, size: int, frame: int) -> Look:
    """`announced`: bytes from `start` on by the length header, 0 if it does not say; `frame`: bytes
    of the first frame.
    """
    held = size - start
    if announced == 0:
        return Look()
    if announced - held >= _TOLERANCE or (
        announced - held > 0 and announced < 8 * _TOLERANCE and 10 * held < 9 * announced
    ):
        return Look(cut=f"the header announces {announced} bytes of audio, the file has {held}")
    if held - announced <= 3 * frame:  # some writers leave out a frame
        return Look()
    f.seek(start + announced)
    behind = f.read(_HEAD)
    second = frame_at(behind, 0)
    return Look(
        joined=behind[:3] == b"ID3"
        or (second is not None and frame_at(behind, second.length) is not None)
    )


def _walk(f: BinaryIO, start: int, size: int) -> Look:
    """Count the frames of a file without a length header."""
    f.seek(start)
    data = f.read(min(MAX_BYTES, size - start))
    at = count = 0
    while (frame := frame_at(data, at)) is not None:
        if at + frame.length > len(data):
            return Look(count, start, "its last frame is incomplete")
        at += frame.length
        count += 1
    rest = data[at:]
    if rest[:3] == b"ID3":
        return Look(count, start, joined=True)
    torn = 0 < len(rest) < 4 and rest[:1] == b"\xff"
    return Look(count, start, "its last frame is incomplete" if torn else "")


def with_length(f: BinaryIO, size: int) -> bytes | None:
    """The bytes of a file without a length header, with such a header put before them; None if it
    has one, or is too large.
    """
    found = look(f, size)
    if not found.frames or size > MAX_BYTES:
        return None
    f.seek(found.start)
    data = f.read()
    first = frame_at(data, 0)
    # The header's frame: like the first, at a bit rate with room for it, without a checksum.
    for bits in range(1, 15):
        head = bytes([data[0], data[1] | 1, data[2] & 0x0D | bits << 4, data[3]])
        room = frame_at(head, 0)
        if room is not None and room.length >= first.side + 120:
            fields = struct.pack(">4sIII", b"Xing", 3, found.frames, room.length + len(data))
            return (head + bytes(first.side - 4) + fields).ljust(room.length, b"\0") + data
    return None
