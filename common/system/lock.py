"""One process at a time: a flock that the kernel releases when its holder dies. The file contains
the holder's name.

The first line of the file is the holder's pid, the second what it is and who supervises it. A
holder whose supervisor is dead is on its way out (`common.system.lifecycle`: gone in 10 s), so a
newcomer waits for it instead of failing.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from common.system.errors import BadInput
from common.system.lifecycle import SUPERVISOR

HELD = "XTTS_LOCK_FD"  # held by the process that became this one
ORPHAN_WAIT_S = 12.0
_RETRY_S = 0.6  # `holder` takes a shared lock for an instant; a failure that short is not a holder


@dataclass(frozen=True)
class Holder:
    """The holder of a lock.

    `create_time` as `identity` gives it; `supervisor` is (pid, create_time), or None for a process
    started by hand.
    """

    pid: int
    create_time: float = 0.0
    what: str = ""
    supervisor: tuple[int, float] | None = None

    @property
    def leaving(self) -> bool:
        """Whether the process is dead or dying, or its supervisor is dead."""
        if not is_alive(self.pid, self.create_time):
            return True
        return self.supervisor is not None and not is_alive(*self.supervisor)

    def __str__(self) -> str:
        since = (
            f" since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(_by_the_clock(self.pid)))}"
            if self.create_time and is_alive(self.pid, self.create_time)
            else ""
        )
        return f"{self.what or 'another process'} (pid {self.pid}{since})"


def is_alive(pid: int, create_time: float = 0.0) -> bool:
    """Whether exactly the process `pid` of `create_time` runs; a reused pid or a zombie does not
    count.
    """
    try:
        p = psutil.Process(pid)
        return p.status() != psutil.STATUS_ZOMBIE and (
            not create_time or abs(_created(p) - create_time) < 0.05
        )
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def identity(pid: int | None = None) -> tuple[int, float]:
    """(pid, create_time) of a process, this one by default. The time counts in seconds from the
    machine's start, where Linux reports it: by the wall clock, every process would seem to be
    another one as soon as somebody sets the clock.
    """
    p = psutil.Process(pid)
    return p.pid, _created(p)


def program_began() -> float:
    """When this process's supervisor started, else when the process did; in `identity`'s time."""
    text = os.environ.get(SUPERVISOR, "")
    return float(text.split(":")[1]) if ":" in text else identity()[1]


def _created(p: psutil.Process) -> float:
    try:
        about = Path(f"/proc/{p.pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):  # it ended before, or while it was read
        if Path("/proc/self/stat").exists():
            raise psutil.NoSuchProcess(p.pid) from None
        return p.create_time()
    # Field 22 of all, the 20th after the name, which may contain spaces and parentheses.
    ticks = int(about[about.rindex(b")") + 2 :].split()[19])
    return ticks / os.sysconf("SC_CLK_TCK")


def _by_the_clock(pid: int) -> float:
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return time.time()


class Lock:
    """A held lock; `release` or the process's end frees it. Children do not inherit it."""

    def __init__(self, path: Path, fd: int):
        self.path = path
        self._fd: int | None = fd

    def release(self, unlink: bool = False) -> None:
        """Free the lock; `unlink` also removes the file (only for a folder that is being removed
        again).
        """
        if self._fd is None:
            return
        if unlink:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        os.close(self._fd)
        self._fd = None

    def keep(self) -> dict[str, str]:
        """The environment that lets this process still hold the lock after exec."""
        os.set_inheritable(self._fd, True)
        return {HELD: str(self._fd)}

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *exc) -> None:
        self.release()


def lock(path: str | os.PathLike, what: str, advice: str = "", clock=time.monotonic) -> Lock:
    """Take the lock `path` for this process, which other processes' messages call `what`.

    Waits up to 12 s for a holder that is leaving.

    Raises:
        BadInput: another process holds it (the message names its pid and command, then `advice`),
        or the folder is read-only.
    """
    path = Path(path)
    start = clock()
    if (kept := _kept(path)) is not None:
        return kept
    while True:
        fd = _try(path)
        if fd is not None:
            try:
                _sign(fd, what)
            except OSError as e:
                os.close(fd)
                raise BadInput(f"cannot write {path}: {e.strerror}; make room on its disk") from e
            return Lock(path, fd)
        by = _read(path)
        if clock() - start > (ORPHAN_WAIT_S if by is not None and by.leaving else _RETRY_S):
            raise BadInput(
                f"{path.parent} is in use by {by or 'another process'}"
                + (f"; {advice}" if advice else "")
            )
        time.sleep(0.05)


def _kept(path: Path) -> Lock | None:
    """The lock on `path`, if the process held it before its exec."""
    text = os.environ.pop(HELD, "")
    if not text:
        return None
    fd = int(text)
    os.set_inheritable(fd, False)
    if os.fstat(fd).st_ino == os.stat(path).st_ino:
        return Lock(path, fd)
    os.close(fd)
    return None


def holder(path: str | os.PathLike) -> Holder | None:
    """The lock's current holder; None: nobody."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read(Path(path)) or Holder(0)
    except OSError as e:
        raise _no_locks(Path(path), e) from e
    finally:
        os.close(fd)
    return None


def wait_free(path: str | os.PathLike, timeout_s: float, clock=time.monotonic) -> Holder | None:
    """Wait until nobody holds the lock; returns the holder if somebody still does after
    `timeout_s`.
    """
    deadline = clock() + timeout_s
    while (by := holder(path)) is not None and clock() < deadline:
        time.sleep(0.1)
    return by


def _try(path: Path) -> int | None:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as e:
        raise BadInput(f"cannot write {path}: {e.strerror}; the run folder must be writable") from e
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if (
            os.fstat(fd).st_ino == os.stat(path).st_ino
        ):  # else the file was unlinked between open and flock
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError as e:
        os.close(fd)
        raise _no_locks(path, e) from e
    os.close(fd)
    return None


def _no_locks(path: Path, error: OSError) -> BadInput:
    return BadInput(
        f"cannot lock {path}: {error.strerror or error}; without locks two trainers could write one"
        " run. Put the run folder on a disk that has locks (a local one; NFS with its lock service;"
        " Lustre mounted with flock)"
    )


def _sign(fd: int, what: str) -> None:
    pid, create_time = identity()
    text = os.environ.get(SUPERVISOR, "")
    boss = [int(text.split(":")[0]), float(text.split(":")[1])] if ":" in text else None
    about = {"create_time": create_time, "what": what, "supervisor": boss}
    body = f"{pid}\n{json.dumps(about)}\n".encode()
    os.ftruncate(fd, 0)
    os.pwrite(fd, body, 0)


def _read(path: Path) -> Holder | None:
    """The name in the file; None while its holder is writing it."""
    try:
        pid, rest = path.read_text().split("\n", 1)
        d = json.loads(rest)
        return Holder(
            int(pid),
            d["create_time"],
            d["what"],
            tuple(d["supervisor"]) if d["supervisor"] else None,
        )
    except (OSError, ValueError, KeyError):
        return None
