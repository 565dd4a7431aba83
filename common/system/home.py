"""A place for what libraries keep beside a run, where the user has no home folder, or one that
cannot be written: service accounts, containers, a batch system's nodes.

librosa (numba), Keras and Matplotlib write there, and some of them end the process where they
cannot.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

_FOLDERS = ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "MPLCONFIGDIR", "NUMBA_CACHE_DIR", "KERAS_HOME")


def settle(environ: MutableMapping[str, str]) -> None:
    """Name a folder of our own in `environ`, for this process's libraries and its children's, where
    there is no home. What is named there already stays.
    """
    if _is_home(os.path.expanduser("~")):
        return
    folder = _own_folder()
    for name in _FOLDERS:
        environ.setdefault(name, str(folder / name.lower()))


def _is_home(path: str) -> bool:
    return os.path.isabs(path) and os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)


def _own_folder() -> Path:
    """The same one for all processes of a user; another's, or one that others may write, is not
    taken: what lies there is loaded as code.
    """
    folder = Path(tempfile.gettempdir(), f"xtts-{os.getuid()}-home")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return folder  # nothing can be written at all: the libraries say so
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
        return folder
    return Path(tempfile.mkdtemp(prefix=f"xtts-{os.getuid()}-home-"))
