"""A disk that is full, or cannot be written, while a run is created or resumed: one line, not a
traceback.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from common.system.errors import BadInput

_CODES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)


@contextlib.contextmanager
def needed(folder: Path) -> Iterator[None]:
    """What is written to `folder` inside fits, or BadInput says that it did not."""
    try:
        yield
    except OSError as e:
        if e.errno not in _CODES:
            raise
        raise _refusal(folder, e.strerror or str(e), e.filename) from e
    except SafetensorError as e:  # its text ends in "(os error 28)"
        code = re.search(r"os error (\d+)", str(e))
        if code is None or int(code[1]) not in _CODES:
            raise
        raise _refusal(folder, os.strerror(int(code[1]))) from e
    except sqlite3.OperationalError as e:
        if e.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            raise
        raise _refusal(folder, str(e)) from e


def _refusal(folder: Path, why: str, file: str | None = None) -> BadInput:
    where = f" ({file})" if file else ""
    return BadInput(
        f"cannot write the run folder {folder}: {why}{where}. Make room, or choose another folder"
        " with run=…; then the same command begins again"
    )
