"""The zip that a PyTorch checkpoint is: opened, or what the file is instead."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import BinaryIO


class PthError(ValueError):
    """A checkpoint file that cannot be read; the message names the file, what is wrong and what to
    do.
    """


def open_zip(path: Path, file: BinaryIO) -> zipfile.ZipFile:
    """The archive in `file`; PthError says what else the file is."""
    try:
        return zipfile.ZipFile(file)
    except zipfile.BadZipFile as e:
        file.seek(0)
        head = file.read(512)
        if not head:
            raise PthError(f"{path} is empty; get the file again") from e
        if head[:2] == b"PK":
            size = os.fstat(file.fileno()).st_size
            raise PthError(
                f"{path} is cut off or damaged: {size} bytes without a readable zip directory; get"
                " the file again"
            ) from e
        if head.startswith(b"version https://git-lfs"):
            raise PthError(
                f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull`, or"
                " download it"
            ) from e
        if head[:1] == b"\x80" or head[257:262] == b"ustar":
            raise PthError(
                f"{path} is in PyTorch's old format (no zip), whose loading would run code from the"
                " file. With PyTorch 1.6 or newer, save it again: torch.save(torch.load(old,"
                " weights_only=True), new)"
            ) from e
        raise PthError(f"{path} is not a PyTorch checkpoint (it begins with {head[:16]!r})") from e


def contents(archive: zipfile.ZipFile, name: str) -> bytes:
    try:
        return archive.read(name)
    except (zipfile.BadZipFile, EOFError) as e:
        raise PthError(f"{archive.filename} is damaged: {e}; get the file again") from e
