"""Files that survive a power cut, and digests of what is in them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import xxhash


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
    """Write aside, fsync, rename, fsync the folder: a reader sees the old file or the new one, also
    after a power cut.
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
    """Everything below a folder is on disk when this returns."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if not path.is_symlink():
            fsync(path)
    fsync(folder)


def fsync(path: str | os.PathLike) -> None:
    """What was written to the file, or renamed within the folder, is on disk when this returns."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
