"""FLAC without decoding: the length of a stream whose header does not say it, and whether its last
frames are there.

A program that writes FLAC into a pipe cannot go back to note the length. The last frame's header
holds its place in the stream. Source: RFC 9639, sections 8.2 and 9.1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import BinaryIO

MAX_BYTES = 1 << 27  # of a file without a length that is read into memory
_TAIL = 1 << 16  # bytes that hold the last frame where the header does not say how large frames get
_MOST_TAIL = 1 << 20
_SYNC = re.compile(rb"\xff[\xf8\xf9]")
_AGAIN = re.compile(rb"fLaC[\0\x80]\0\0\x22")
_BLOCKS = {
    1: 192,
    **{n: 576 << (n - 2) for n in range(2, 6)},
    **{n: 256 << (n - 8) for n in range(8, 16)},
}


@dataclass(frozen=True)
class Look:
    """`total`: samples per channel, 0 if unknown; `announced`: the header's figure, 0 if it has
    none.
    """

    total: int
    announced: int
    cut: str = ""


def _table(polynomial: int, bits: int) -> tuple[int, ...]:
    top, mask, table = 1 << (bits - 1), (1 << bits) - 1, []
    for value in range(256):
        value <<= bits - 8
        for _ in range(8):
            value = (value << 1 ^ polynomial if value & top else value << 1) & mask
        table.append(value)
    return tuple(table)


_CRC8, _CRC16 = _table(0x07, 8), _table(0x8005, 16)


def _crc8(data: bytes) -> int:
    crc = 0
    for byte in data:
        crc = _CRC8[crc ^ byte]
    return crc


def _crc16(data: bytes) -> int:
    crc = 0
    for byte in data:
        crc = (crc << 8 & 0xFFFF) ^ _CRC16[crc >> 8 ^ byte]
    return crc


def _frame(data: bytes, at: int, block: int) -> tuple[int, int] | None:
    """(first sample, samples) of the frame whose header is at `at`; None: none is.

    `block`: of a stream of equal blocks.
    """
    head = data[at : at + 16]
    if (
        len(head) < 6
        or head[1] & 0xFE != 0xF8
        or head[3] & 1
        or head[2] >> 4 == 0
        or head[2] & 15 == 15
    ):
        return None
    first = head[4]
    extra = 0 if first < 0x80 else 7 - (first ^ 0xFF).bit_length()
    number, end = first & (0x7F if extra == 0 else (1 << max(0, 6 - extra)) - 1), 5 + extra
    if first >= 0x80 and not 1 <= extra <= 6:
        return None
    for byte in head[5:end]:
        if byte & 0xC0 != 0x80:
            return None
        number = number << 6 | byte & 0x3F
    size_code, rate_code = head[2] >> 4, head[2] & 15
    wide = {6: 1, 7: 2}.get(size_code, 0)
    samples = int.from_bytes(head[end : end + wide], "big") + 1 if wide else _BLOCKS[size_code]
    end += wide + {12: 1, 13: 2, 14: 2}.get(rate_code, 0)
    if len(head) <= end or _crc8(head[:end]) != head[end]:
        return None
    return (number if head[1] & 1 else number * block), samples


def look(f: BinaryIO, size: int) -> Look | None:
    """What the header and the last frame say; None: no FLAC header.

    A cut inside the last frame is left to the decoder, unless the header gives no length.
    """
    f.seek(0)
    head = f.read(42)
    if len(head) < 42 or head[:4] != b"fLaC" or head[4] & 127:
        return None
    block, largest = int.from_bytes(head[8:10], "big"), int.from_bytes(head[15:18], "big")
    announced = int.from_bytes(head[18:26], "big") & ((1 << 36) - 1)
    f.seek(max(42, size - min(_MOST_TAIL, largest + 256 if largest else _TAIL)))
    tail = f.read()
    if tail[-128:-125] == b"TAG":
        tail = tail[:-128]
    seen = False
    for at in reversed([m.start() for m in _SYNC.finditer(tail)]):
        found = _frame(tail, at, block)
        if found is None:
            continue
        seen, (start, samples) = True, found
        if announced and start < announced <= start + samples:
            return Look(announced, announced)
        if not announced and _crc16(tail[at:]) == 0:
            return Look(start + samples, 0)
    if announced:
        cut = (
            f"the header announces {announced} samples, and the last of them are not there"
            if seen or largest
            else ""
        )
        return Look(announced, announced, cut)
    return Look(0, 0, "its last frame is incomplete" if seen else "")


def is_joined(f: BinaryIO) -> bool:
    """Whether another stream follows the first.

    Reads the whole file, or its first 128 MiB.
    """
    f.seek(42)
    rest = b""
    while f.tell() < MAX_BYTES and (block := f.read(1 << 20)):
        if _AGAIN.search(rest + block):
            return True
        rest = block[-8:]
    return False


def with_length(f: BinaryIO, size: int) -> bytes | None:
    """The bytes of a file whose header gives no length, with the length filled in; None if it has
    one, or if nothing tells the length.
    """
    found = look(f, size)
    if found is None or found.announced or not found.total or size > MAX_BYTES:
        return None
    f.seek(0)
    data = bytearray(f.read())
    fixed = int.from_bytes(data[18:26], "big") | found.total
    data[18:26] = fixed.to_bytes(8, "big")
    return bytes(data)
