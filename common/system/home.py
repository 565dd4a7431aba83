"""A place for what libraries keep beside a run, where the user has no home folder, or one that
cannot be written: service accounts, containers, a batch system's nodes.

librosa (numba), Keras and Matplotlib write there, and some of them end the process where they
cannot.
"""

from __future__ import annotations

import contextlib
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
        with contextlib.suppress(FileExistsError):  # whatever it is: it is looked at
            folder.mkdir(mode=0o700)
        mode, owner = (found := folder.lstat()).st_mode, found.st_uid
        if stat.S_ISDIR(mode) and owner == os.getuid() and not mode & 0o077:
            return folder
        return Path(tempfile.mkdtemp(prefix=f"xtts-{os.getuid()}-home-"))
    except OSError:
        # Nothing can be written at all, and the libraries say so: not even that folder is there.
        return Path("/nonexistent")
