"""What a scan has found out about recordings so far, kept while it runs: after a kill, the next
scan does not open the same files again.

An append-only file. Each line is a checksum, then a recording's path, size and time of change with
the findings; torn or damaged lines are ignored. Several scans may write to one at a time.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import xxhash

from common.system.counted import counted
from common.system.files import digest
from common.system.home import user_cache
from producer.corpus.headers import AudioFacts, Known

log = logging.getLogger(__name__)

_SUM = 16  # hex digits
_MOST_LINE = 1 << 16
_OLD_S = 30 * 86400.0


class Journal:
    """Facts by file, found again in a later scan.

    Args:
        path: made if missing; None: nothing is kept.
        previous: a second source of known facts, asked after the file.

    A file that cannot be read or written is no reason to fail: the scan then examines again.
    """

    def __init__(self, path: Path | None, previous: Known | None = None):
        self._path, self._previous = path, previous
        self._lock = threading.Lock()
        self._at: dict[int, int] = {}  # digest of path, size and time → where its line begins
        self._file = None if path is None else self._open()
        self._writes = self._file is not None
        if self._file is not None:
            try:
                self._read()
            except OSError as e:
                self._at.clear()
                log.info("%s cannot be read: all is examined again (%s)", path, e.strerror)

    def _open(self) -> int | None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            return os.open(self._path, flags, 0o600)
        except OSError as e:
            log.info("%s: a scan that is stopped starts over (%s)", self._path, e.strerror)
            return None

    def _read(self) -> None:
        at = 0
        with open(self._file, "rb", closefd=False) as lines:
            for line in lines:
                found = _parsed(line)
                if found is not None:
                    self._at[_key(*found[:3])] = at
                at += len(line)
            if at and not line.endswith(b"\n"):
                self._append(b"\n")  # torn: the next entry starts a new line
        if self._at:
            said = "{n} [recording was|recordings were] examined by an earlier scan"
            log.info("%s", counted(len(self._at), said))

    def __len__(self) -> int:
        return len(self._at)

    def file_facts(self, path: str, size: int, mtime_ns: int) -> dict | None:
        """What was found in exactly this file, by an interrupted or earlier scan; None: nothing."""
        at = self._at.get(_key(path, size, mtime_ns))
        if at is not None:
            found = _parsed(self._line(at))
            if found is not None and found[:3] == (path, size, mtime_ns):
                return found[3]
        if self._previous is None:
            return None
        return self._previous.file_facts(path, size, mtime_ns)

    def _line(self, at: int) -> bytes:
        try:
            return os.pread(self._file, _MOST_LINE, at).partition(b"\n")[0]
        except OSError:  # it is examined again, then
            return b""

    def add(self, found: Iterable[AudioFacts | None]) -> None:
        """Keep new facts; known ones are not written again."""
        if not self._writes:
            return
        lines = []
        for f in found:
            if f is not None and f.mtime_ns and not f.known:
                body = json.dumps([f.path, f.size, f.mtime_ns, f.remembered()]).encode()
                lines.append(xxhash.xxh3_64_hexdigest(body).encode() + b" " + body + b"\n")
        self._append(b"".join(line for line in lines if len(line) < _MOST_LINE))

    def _append(self, data: bytes) -> None:
        with self._lock:
            try:
                if data and os.write(self._file, data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as e:
                self._writes = False
                log.info("%s: nothing more is kept for a scan that is stopped (%s)", self._path, e)

    def done(self) -> None:
        """The scan has succeeded: remove the file."""
        if self._path is not None:
            with contextlib.suppress(OSError):  # a later scan finds it, and its content stays true
                self._path.unlink(missing_ok=True)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def place_of(roots: Iterable[str | os.PathLike]) -> Path | None:
    """The journal of a scan of these folders, for a command without a folder of its own: in the
    user's cache; None: there is none.
    """
    if (folder := user_cache()) is None:
        return None
    with contextlib.suppress(OSError):  # journals of corpora that were not scanned again
        for path in folder.glob("scan-*.journal"):
            if path.stat().st_mtime < time.time() - _OLD_S:
                path.unlink(missing_ok=True)
    return folder / f"scan-{digest([str(r) for r in roots])}.journal"


def _key(path: str, size: int, mtime_ns: int) -> int:
    return xxhash.xxh3_64_intdigest(f"{size}:{mtime_ns}:{path}".encode(errors="surrogateescape"))


def _parsed(line: bytes) -> tuple[str, int, int, dict] | None:
    body = line[_SUM + 1 :].rstrip(b"\n")
    if xxhash.xxh3_64_hexdigest(body).encode() != line[:_SUM] or not body:
        return None
    path, size, mtime_ns, facts = json.loads(body)
    return path, size, mtime_ns, facts
