"""Pages of an Ogg file, and whether it holds all of them and nothing behind; without decoding.

Source: RFC 3533, section 6.
"""

from __future__ import annotations

import zlib
from typing import BinaryIO, NamedTuple

MOST_PAGE = 27 + 255 + 255 * 255  # bytes
SMALL = 1 << 18  # up to so many bytes a file is looked through
CONTINUED, FIRST, LAST = 1, 2, 4  # flags of a page
_MIRRORED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


class Page(NamedTuple):
    """A page: `lacing` are the sizes of its segments, `body` and `end` places in the data."""

    flags: int
    granule: int  # what its last packet ends at, 2**64 - 1 if none ends
    serial: bytes
    number: int
    lacing: bytes
    body: int
    end: int


def page_at(data: bytes, at: int) -> Page | None:
    """The page that begins there, which may end behind the data; None: none does."""
    body = at + 27 + (data[at + 26] if len(data) >= at + 27 else 255)
    if data[at : at + 4] != b"OggS" or len(data) < body:
        return None
    lacing = data[at + 27 : body]
    granule = int.from_bytes(data[at + 6 : at + 14], "little")
    number = int.from_bytes(data[at + 18 : at + 22], "little")
    serial = data[at + 14 : at + 18]
    return Page(data[at + 5], granule, serial, number, lacing, body, body + sum(lacing))


def is_intact(data: bytes, at: int, end: int) -> bool:
    """Whether a page's bytes give its checksum: CRC-32 as zlib has it, of mirrored bits."""
    mirrored = (data[at : at + 22] + bytes(4) + data[at + 26 : end]).translate(_MIRRORED)
    crc = zlib.crc32(mirrored, 0xFFFFFFFF) ^ 0xFFFFFFFF
    return crc.to_bytes(4, "little").translate(_MIRRORED)[::-1] == data[at + 22 : at + 26]


class Ends(NamedTuple):
    """How a file ends: `incomplete`, `joined` to another, or `unmarked` as its end."""

    incomplete: bool = False
    joined: bool = False
    unmarked: bool = False


def ends(f: BinaryIO, size: int) -> Ends:
    """How a file of `size` bytes ends, by its last page; small ones are looked through."""
    first = f.read(SMALL if size <= SMALL else 4096)
    tail, base = first, 0
    if len(first) < size:
        base = max(0, size - MOST_PAGE - 4096)
        f.seek(base)
        tail = f.read()
    at = tail.rfind(b"OggS\0")
    if at < 0:
        return Ends()
    page = page_at(tail, at)
    if page is None or base + page.end > size:
        return Ends(incomplete=True)
    if page.serial not in _beginnings(first) or (len(first) == size and _begins_again(first)):
        return Ends(joined=True)
    if page.flags & LAST:
        return Ends()
    return Ends(incomplete=base + page.end < size, unmarked=base + page.end == size)


def _beginnings(head: bytes) -> set[bytes]:
    """Serial numbers of the streams that the first pages begin."""
    at, found = 0, set()
    while (page := page_at(head, at)) is not None and page.flags & FIRST:
        found.add(page.serial)
        at = page.end
    return found


def _begins_again(data: bytes) -> bool:
    """Whether a stream begins after a page that is not the first of one."""
    at, going = 0, False
    while (page := page_at(data, at)) is not None:
        if page.flags & FIRST and going:
            return True
        going = going or not page.flags & FIRST
        at = page.end
    return False
