"""The zip that a PyTorch checkpoint is: its records, all checked before one is read; or what the
file is instead.
"""

from __future__ import annotations

import os
import stat
import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from common.system import archives

_MOST_VERSION = 45  # zip64
_FLAGS = 0x080E  # how well it is packed, sizes behind the data, names in UTF-8
_UNIX = 3


class PthError(ValueError):
    """A checkpoint file that cannot be read; the message names the file, what is wrong and what to
    do.
    """


def damaged(path: Path, what: str) -> PthError:
    """The error for a file that is not as it was written."""
    return PthError(f"{path} is damaged or cut off: {what}; get the file again")


@dataclass(frozen=True)
class Record:
    """Where the bytes of a record lie, and their checksum as it was written."""

    name: str
    begin: int
    size: int
    crc: int


def records_of(path: Path, file: BinaryIO) -> tuple[dict[str, Record], str]:
    """(records by their name below the folder that all are in, that folder).

    PthError: no zip, or one that PyTorch does not write: packed, encrypted, with names that lead
    elsewhere, twice the same, or records that overlap.
    """
    infos = _infos(path, file)
    pickles = [i.filename for i in infos if i.filename.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise PthError(
            f"{path} is a zip, but no PyTorch checkpoint: it holds {len(pickles)} records"
            " named data.pkl, expected one"
        )
    root = pickles[0][: -len("data.pkl")]
    seen, found, end = set(), {}, 0
    for info in sorted(infos, key=lambda i: i.header_offset):
        why = _why_strange(info, seen)
        if why:
            raise PthError(
                f"{path} refused: {info.filename[:200]!r} {why}, which PyTorch does not do; use the"
                " original file"
            )
        seen.add(info.filename)
        record = _record(path, file, info)
        if info.header_offset < end:
            raise damaged(path, f"{info.filename!r} lies over another record")
        end = record.begin + record.size
        if info.filename.startswith(root):
            found[info.filename[len(root) :]] = record
    if end > os.fstat(file.fileno()).st_size:
        raise damaged(path, "its last record ends behind the end of the file")
    return found, root


def contents(path: Path, file: BinaryIO, record: Record, most: int) -> bytes:
    """A record's bytes. PthError: more than `most`, or not as they were written."""
    if record.size > most:
        raise PthError(
            f"{path} refused: {record.name!r} has {record.size} bytes, at most {most} are read"
        )
    file.seek(record.begin)
    data = file.read(record.size)
    if len(data) < record.size:
        raise damaged(path, f"{record.name!r} ends early")
    if zlib.crc32(data) != record.crc:
        raise damaged(
            path,
            f"the checksum of {record.name!r} differs (unless it was written with PyTorch's"
            " set_crc32_options(False): save it again without)",
        )
    return data


def _infos(path: Path, file: BinaryIO) -> list[zipfile.ZipInfo]:
    try:
        return archives.members(file)
    except NotImplementedError as e:
        raise PthError(f"{path} refused: {e}, which PyTorch does not write") from e
    except zipfile.BadZipFile as e:
        raise _what_else(path, file, e) from e


def _what_else(path: Path, file: BinaryIO, error: Exception) -> PthError:
    file.seek(0)
    head = file.read(512)
    if not head:
        return PthError(f"{path} is empty; get the file again")
    if head[:2] == b"PK":
        size = os.fstat(file.fileno()).st_size
        return PthError(
            f"{path} is cut off or damaged: {size} bytes without a readable zip directory"
            f" ({error}); get the file again"
        )
    if head.startswith(b"version https://git-lfs"):
        return PthError(
            f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull`, or download it"
        )
    if head[:1] == b"\x80" or head[257:262] == b"ustar":
        return PthError(
            f"{path} is in PyTorch's old format (no zip), whose loading would run code from the"
            " file. With PyTorch 1.6 or newer, save it again: torch.save(torch.load(old,"
            " weights_only=True), new)"
        )
    return PthError(f"{path} is not a PyTorch checkpoint (it begins with {head[:16]!r})")


def _why_strange(info: zipfile.ZipInfo, seen: set[str]) -> str:
    """What is wrong with a record's entry in the list; "": nothing."""
    name, kind = info.filename, stat.S_IFMT(info.external_attr >> 16)
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
        return "is compressed or encrypted"
    if info.compress_size != info.file_size:
        return f"has {info.compress_size} bytes for {info.file_size}"
    if info.flag_bits & ~_FLAGS:
        return f"has the flags {info.flag_bits:#06x}"
    if info.extract_version > _MOST_VERSION:
        return f"is of the zip version {info.extract_version / 10}"
    if name != info.orig_filename or "\\" in name or name.startswith("/") or name[1:2] == ":":
        return "is no name within the file"
    if not {".", "..", ""}.isdisjoint(name.split("/")):
        return "leads out of its folder"
    if name in seen:
        return "is there twice"
    if info.create_system == _UNIX and kind not in (0, stat.S_IFREG):
        return "is not a plain file"
    return ""


def _record(path: Path, file: BinaryIO, info: zipfile.ZipInfo) -> Record:
    """By its own header, whose length need not be that of the list's entry."""
    at, name = info.header_offset, info.filename
    header = b""
    if 0 <= at < os.fstat(file.fileno()).st_size:
        file.seek(at)
        header = file.read(30)
    if len(header) < 30 or header[:4] != b"PK\x03\x04":
        raise damaged(path, f"{name!r} has no header at byte {at}")
    flags, method = struct.unpack("<HH", header[6:10])
    name_len, extra_len = struct.unpack("<HH", header[26:])
    own = file.read(name_len).decode("utf-8" if info.flag_bits & 0x800 else "cp437", "replace")
    if own != name or method != info.compress_type or (flags ^ info.flag_bits) & 1:
        raise damaged(path, f"{name!r} has another name or kind in its own header")
    return Record(name, at + 30 + name_len + extra_len, info.file_size, info.CRC)
