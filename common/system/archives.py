"""Reads the list of a zip's members within bounds, whatever an untrusted file claims to contain."""

from __future__ import annotations

import os
import struct
import zipfile
from typing import BinaryIO

MOST_LIST_BYTES = 2 << 20  # a checkpoint of XTTS has 1 500 members in 0.1 MB


class _Bounded:
    """A file from which zipfile reads no more at once than the longest list of members."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, count: int = -1) -> bytes:
        left = os.fstat(self._file.fileno()).st_size - self.tell()
        if (left if count < 0 else count) > MOST_LIST_BYTES:
            raise zipfile.BadZipFile(f"its list of members has more than {MOST_LIST_BYTES} bytes")
        return self._file.read(count)


def members(file: BinaryIO) -> list[zipfile.ZipInfo]:
    """The members that an open file lists; reads none of them.

    Raises:
        zipfile.BadZipFile: no zip, damaged, or a list that is too long.
        NotImplementedError: a version of the format that zipfile does not know.
    """
    try:
        return zipfile.ZipFile(_Bounded(file)).infolist()
    except (zipfile.BadZipFile, NotImplementedError):
        raise
    except (OSError, ValueError, OverflowError, LookupError, struct.error) as e:
        raise zipfile.BadZipFile(f"{type(e).__name__}: {e}") from e
