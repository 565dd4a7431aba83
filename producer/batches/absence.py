"""Tell bad clips from a place that is away for a while.

Such a place is a disk that is not mounted, a server that does not answer, a process out of file
handles. Bad clips are set aside for the rest of the run; clips in a place that is away must not be.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence

from common.audio.errors import CLOSED, NO_FFMPEG, DecodeError

_NEIGHBOURS = 64  # how many files of a folder are tried before it counts as unreadable


def why_away(
    errors: Sequence[DecodeError], roots: Iterable[str] = (), good: Iterable[str] = ()
) -> str | None:
    """What to wait for, in words; None if the files themselves are at fault.

    A folder in which nothing can be read any more is away, unless recordings in other folders of
    the same root can be: then it was deleted.

    Args:
        errors: those of the clips of one batch that did not decode.
        roots: the corpus' folders.
        good: recordings from several folders that were read recently.
    """
    if not errors:
        return None
    roots = list(roots)
    for root in roots:
        if not os.path.isdir(root):
            return f"the data folder {root} is not there"
    for e in errors:
        if e.kind == NO_FFMPEG:  # the scan's machine had it
            return f"{e.path}: {e.reason}"
    failed, folders = {e.path for e in errors}, set()
    for e in errors:
        why = _why_closed(e.path)
        if why is None:
            if e.kind == CLOSED:
                return f"{e.path} could not be opened, and now it can be"
            continue
        folder = os.path.dirname(e.path)
        if (
            folder not in folders
            and not _something_reads(folder, failed)
            and not _others_read(folder, roots, good)
        ):
            return f"nothing in the folder {folder} can be read ({e.path}: {why})"
        folders.add(folder)
    return None


def _why_closed(path: str) -> str | None:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a named pipe waits for a writer
            return None
        with open(path, "rb") as f:
            f.read(1)
    except OSError as e:
        return e.strerror or str(e)
    return None


def _others_read(folder: str, roots: list[str], good: Iterable[str]) -> bool:
    """Whether one of `good` that lies elsewhere below the folder's root can be read."""
    root = max((r for r in roots if _below(folder, r)), key=len, default="")
    others = (path for path in good if os.path.dirname(path) != folder and _below(path, root))
    return any(_why_closed(path) is None for path in others)


def _below(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip(os.sep) + os.sep)


def _something_reads(folder: str, failed: set[str]) -> bool:
    """Whether a file of the folder other than those in `failed` can be read."""
    tried = 0
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.path in failed or not entry.is_file():
                    continue
                if _why_closed(entry.path) is None:
                    return True
                tried += 1
                if tried == _NEIGHBOURS:
                    return False
    except OSError:
        return False
    return False
