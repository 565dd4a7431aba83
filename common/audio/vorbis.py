"""Rate and length of an Ogg Vorbis file without libvorbis, whose opening takes most of a scan.

Nothing is believed that libsndfile has not confirmed: it has opened a file with the same setup
header, and found the same rate and length there as are read here. Whatever is out of the ordinary
(several streams, damaged pages, a beginning that is cut off, blocks not laid out as by libvorbis)
is left to it. Source: Vorbis I specification, sections 4.2, 5.2 and A.2; libsndfile,
src/ogg_vorbis.c.
"""

from __future__ import annotations

import os
import struct
import threading
from typing import NamedTuple

import xxhash

from common.audio import ogg

_HEAD = 1 << 14  # bytes of a large file that are to hold its headers and first sounds
_MOST_SETUPS = 1000  # a corpus has a few
_MOST_COMMENTS = 100
_MOST_FRAMES = 1 << 40
_TWO_MODES = 6 + 2 * 41 + 1  # bits that end a setup header: how many modes, two of them, a mark
_MODE_BITS = (1 << 33) - 1  # of a mode, those before its mapping


class Header(NamedTuple):
    """What a file says of itself; `setup`: a digest of the headers that its decoder is made of."""

    rate: int
    frames: int
    setup: int


class Headers:
    """Headers of Ogg Vorbis files, once libsndfile has confirmed those of one like them; for any
    number of threads.
    """

    def __init__(self):
        self._confirmed: set[int] = set()
        self._lock = threading.Lock()

    def confirm(self, header: Header, rate: int, frames: int) -> None:
        """Note what libsndfile found where `header` was read: files with such a setup are believed
        from now on if it is the same.
        """
        with self._lock:
            if (header.rate, header.frames) == (rate, frames):
                if len(self._confirmed) < _MOST_SETUPS:
                    self._confirmed.add(header.setup)
            else:
                self._confirmed.discard(header.setup)

    def __contains__(self, header: Header) -> bool:
        return header.setup in self._confirmed


def is_named(path: str | os.PathLike) -> bool:
    """Whether a file's name says Ogg, so that trying `header` is worth a look."""
    return os.fspath(path)[-4:].lower() in (".ogg", ".oga")


def header(path: str | os.PathLike, size: int) -> Header | None:
    """The header of a whole file of one ordinary stream; None: anything else, or no file."""
    try:
        with open(path, "rb", buffering=0) as f:
            data = head = f.read(ogg.SMALL if size <= ogg.SMALL else _HEAD)
            base = 0
            if len(head) < size:
                base = max(0, size - ogg.MOST_PAGE)
                f.seek(base)
                data = f.read()
    except OSError:
        return None
    if len(data) + base != size:  # it has changed meanwhile
        return None
    last = _last(data)
    return None if last is None else _header(head, last, whole=base == 0)


def _last(data: bytes) -> ogg.Page | None:
    """The page that ends a file, marked as the last."""
    at = data.rfind(b"OggS\0")
    page = None if at < 0 else ogg.page_at(data, at)
    if page is None or page.end != len(data) or not page.flags & ogg.LAST:
        return None
    return page if page.granule < _MOST_FRAMES and ogg.is_intact(data, at, page.end) else None


def _header(data: bytes, last: ogg.Page, whole: bool) -> Header | None:
    """The header of a file that begins with `data`, or is that (`whole`)."""
    first = _page(data, 0, 0, last.serial)
    if first is None or first.flags != ogg.FIRST or len(first.lacing) != 1 or first.end != 58:
        return None
    head = data[first.body : first.end]
    version, channels, rate, blocks = struct.unpack_from("<IBI12xB", head, 7)
    if not head.startswith(b"\x01vorbis") or version or not (channels and rate and head[29] & 1):
        return None
    packets, page = _packets(data, first, 2)
    if page is None or not _is_comment(packets[0]) or not _is_ordinary(packets[1]):
        return None
    sounds = _page(data, page.end, page.number + 1, last.serial)
    if sounds is None or (whole and not _goes_on(data, sounds.end, last.serial)):
        return None
    duration = _duration(data, sounds, 1 << (blocks & 15), 1 << (blocks >> 4))
    # where the first sounds are the last, too, the granule position cuts their padding off
    begins = sounds.granule == duration or (sounds == last and sounds.granule < duration)
    if not begins or not last.granule:
        return None
    return Header(rate, last.granule, xxhash.xxh3_64_intdigest(head + packets[1]))


def _page(data: bytes, at: int, number: int, serial: bytes) -> ogg.Page | None:
    """The intact page `number` of a stream, if all of it is there."""
    page = ogg.page_at(data, at)
    if page is None or page.end > len(data) or data[at + 4] or page.serial != serial:
        return None
    return page if page.number == number and ogg.is_intact(data, at, page.end) else None


def _packets(data: bytes, before: ogg.Page, count: int) -> tuple[list[bytes], ogg.Page | None]:
    """(packets, the page that ends with the last of them) of exactly the pages that `count` packets
    take; no page where it is otherwise.
    """
    packets, packet, page = [], b"", before
    while len(packets) < count:
        page = _page(data, page.end, page.number + 1, page.serial)
        if page is None or page.flags != (ogg.CONTINUED if packet else 0) or not page.lacing:
            return packets, None
        at = page.body
        for length in page.lacing:
            packet += data[at : at + length]
            at += length
            if length < 255:
                packets.append(packet)
                packet = b""
    return packets, page if len(packets) == count and not packet else None


def _is_comment(packet: bytes) -> bool:
    """Whether libvorbis takes a comment header."""
    if not packet.startswith(b"\x03vorbis"):
        return False
    try:
        (length,) = struct.unpack_from("<I", packet, 7)
        at = 11 + length
        (count,) = struct.unpack_from("<I", packet, at)
        at += 4
        if count > _MOST_COMMENTS:
            return False
        for _ in range(count):
            (length,) = struct.unpack_from("<I", packet, at)
            at += 4 + length
    except struct.error:
        return False
    return at < len(packet) and packet[at] & 1 == 1


def _is_ordinary(setup: bytes) -> bool:
    """Whether a setup header ends with two modes, short blocks and long ones, as libvorbis writes
    it; `_duration` knows blocks of these.
    """
    if not setup.startswith(b"\x05vorbis") or len(setup) < 32:
        return False
    bits = int.from_bytes(setup[-16:], "little")
    bits >>= max(0, bits.bit_length() - _TWO_MODES)
    short, long = bits >> 6 & _MODE_BITS, bits >> 47 & _MODE_BITS
    return bits & 63 == 1 and (short, long) == (0, 1)


def _duration(data: bytes, page: ogg.Page, short: int, long: int) -> int:
    """Samples that the packets which end on a page give; -1 if they are not all sound."""
    if page.flags & ~ogg.LAST:
        return -1
    total, before, at, begins = 0, 0, page.body, True
    for length in page.lacing:
        if begins:
            kind = data[at] & 3 if length else 1
            block = long if kind & 2 else short
        at += length
        begins = length < 255
        if begins:
            if kind & 1:
                return -1
            total += (before + block) >> 2 if before else 0
            before = block
    return total


def _goes_on(data: bytes, at: int, serial: bytes) -> bool:
    """Whether nothing but pages of that stream follows, none of which begins one."""
    while at < len(data):
        page = ogg.page_at(data, at)
        if page is None or page.flags & ogg.FIRST or page.serial != serial:
            return False
        at = page.end
    return at == len(data)
