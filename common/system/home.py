"""A place for the libraries' own files if the user has no home folder, or a read-only one: service
accounts, containers, a batch system's nodes.

librosa (numba), Keras and Matplotlib write there, and some end the process if they cannot.
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
    """If there is no home, set a folder of our own in `environ`, for the libraries of this process
    and its children. What is set already stays.
    """
    if _is_home(os.path.expanduser("~")):
        return
    folder = _own_folder()
    for name in _FOLDERS:
        environ.setdefault(name, str(folder / name.lower()))


def user_cache() -> Path | None:
    """Folder of what this user's later commands may use again, of any run; it may not be there yet.
    None: there is no place for one.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(caches) / "xtts-trainer" if os.path.isabs(caches) else None


def _is_home(path: str) -> bool:
    return os.path.isabs(path) and os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)


def _own_folder() -> Path:
    """One folder for all processes of a user. Refuses one that belongs to somebody else or that
    others may write: its files are loaded as code.
    """
    folder = Path(tempfile.gettempdir(), f"xtts-{os.getuid()}-home")
    try:
        with contextlib.suppress(FileExistsError):  # whatever it is, it is checked below
            folder.mkdir(mode=0o700)
        mode, owner = (found := folder.lstat()).st_mode, found.st_uid
        if stat.S_ISDIR(mode) and owner == os.getuid() and not mode & 0o077:
            return folder
        return Path(tempfile.mkdtemp(prefix=f"xtts-{os.getuid()}-home-"))
    except OSError:
        # Nothing can be written, not even that folder; the libraries report it.
        return Path("/nonexistent")
