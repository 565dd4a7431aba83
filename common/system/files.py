"""Writes files that survive a power cut, and computes digests of their contents."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from pathlib import Path
from typing import BinaryIO

import xxhash

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
)


def why_irregular(mode: int) -> str:
    """What a path is if not a plain file, by its mode; "" for a file."""
    if stat.S_ISREG(mode):
        return ""
    what = next((name for test, name in _KINDS if test(mode)), "a device")
    return f"not a file: {what} lies there"


def open_plain(path: str | os.PathLike, *, follow: bool = True) -> BinaryIO:
    """Open a plain file for reading.

    It never waits: a named pipe has no end, and a device may have none either.

    Args:
        follow: whether to follow a symbolic link.

    Raises:
        OSError: it cannot be opened, or is not a plain file; `strerror` says what it is.
    """
    try:
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        fd = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
    except OSError as e:
        if e.errno == errno.ELOOP and not follow:
            why = "a symbolic link lies there; put the file itself there"
            raise OSError(e.errno, why, os.fspath(path)) from None
        if e.errno == errno.ENXIO:  # of a socket
            raise OSError(e.errno, why_irregular(stat.S_IFSOCK), os.fspath(path)) from None
        raise
    why = why_irregular(os.fstat(fd).st_mode)
    if why:
        os.close(fd)
        raise OSError(errno.EINVAL, why, os.fspath(path))
    return os.fdopen(fd, "rb")


def open_private(path: str | os.PathLike) -> BinaryIO:
    """Open a new file for writing that only its owner may read.

    Replaces what a killed process left under the name; never writes through a link that somebody
    else put there. OSError: it cannot be created.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    os.fchmod(fd, 0o600)
    return os.fdopen(fd, "wb")


def digest(value) -> str:
    """xxh3-128 of a JSON-able value, in canonical form."""
    return xxhash.xxh3_128(
        json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def bytes_digest(data: bytes) -> str:
    """xxh3-128 of bytes."""
    return xxhash.xxh3_128(data).hexdigest()


def file_digest(path: str | os.PathLike) -> str:
    """xxh3-128 of a file's bytes."""
    h = xxhash.xxh3_128()
    with open(path, "rb") as f:
        while chunk := f.read(1 << 22):
            h.update(chunk)
    return h.hexdigest()


def write_atomically(path: Path, data: str | bytes) -> None:
    """Write a temporary file, fsync, rename, fsync the folder: a reader sees the old file or the
    new one, even after a power cut.
    """
    tmp = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(tmp, "wb") as f:
            f.write(data.encode() if isinstance(data, str) else data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)
    except BaseException:
        tmp.unlink(missing_ok=True)
        raise
    fsync(path.parent)


def fsync_tree(folder: Path) -> None:
    """Make everything below a folder durable before returning."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if not path.is_symlink():
            fsync(path)
    fsync(folder)


def fsync(path: str | os.PathLike) -> None:
    """Make writes to the file, or renames within the folder, durable before returning."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
