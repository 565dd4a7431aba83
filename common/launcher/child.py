"""Child processes of the supervisor: how one is described, started, watched and killed, and how
one started elsewhere is adopted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from common.system import status
from common.system.errors import BadInput, RunError
from common.system.lifecycle import PARENT_FD, SUPERVISOR
from common.system.lock import Holder, identity, is_alive

LEAVE_S = 10.0
LOG_BYTES = 64 << 20  # a longer log starts over; its old content stays in LOG.1


@dataclass(frozen=True)
class ProcessSpec:
    """One process of a program.

    `env` is added to the launcher's own; a value of None removes a variable.
    """

    name: str
    role: str
    argv: tuple[str, ...]
    log: Path
    env: Mapping[str, str | None] = field(default_factory=dict)
    device: str = ""  # in words, for the start-up lines
    main: bool = False  # when it exits with 0, the program is done
    restarts: int = 3
    # whether progress, which clears its failures, is a higher step in its status; else it is a
    # batch or ten minutes of work
    by_steps: bool = False
    grace_s: float = 5.0  # between SIGTERM and SIGKILL
    # instead of grace_s while its status says "saving"; longer if the status asks for longer
    save_s: float = 0.0
    leave_s: float = LEAVE_S  # to leave once the main process is done
    optional: bool = False  # the program goes on without it, and only reports its failures
    lock: Path | None = None  # held by this process; another holder is adopted
    # The process that this one starts and ends with: neither goes on without the other.
    leader: str = ""


@dataclass(frozen=True)
class Program:
    """Every process of a run, in the order they start."""

    run_dir: Path
    processes: tuple[ProcessSpec, ...]

    def describe(self) -> list[str]:
        """One line per process: name, device, command."""
        return [f"{p.name:<12} {p.device or '-':<60} {' '.join(p.argv)}" for p in self.processes]


class Running:
    """A child started by exec in a session of its own, so that a terminal's Ctrl-C reaches the
    supervisor alone.
    """

    def __init__(self, spec: ProcessSpec, parent_fd: int, attempt: int):
        self.spec = spec
        env = {
            **os.environ,
            **spec.env,
            PARENT_FD: str(parent_fd),
            SUPERVISOR: "{}:{}".format(*identity()),
        }
        env = {k: v for k, v in env.items() if v is not None}
        try:
            spec.log.parent.mkdir(parents=True, exist_ok=True)
            with open(spec.log, "ab") as out:
                out.write(_header(spec, attempt).encode())
                out.flush()
                self.offset = out.tell()  # where this start's lines begin
                # Not from another thread than the main one: PR_SET_PDEATHSIG means the thread's
                # death.
                self._popen = subprocess.Popen(
                    spec.argv, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                    env=env,
                    pass_fds=(parent_fd,), start_new_session=True,
                )  # fmt: skip
        except OSError as e:
            where = f"cannot start {spec.name}: {e.strerror} ({e.filename or spec.log})"
            if attempt == 1 and e.errno in (errno.EACCES, errno.EROFS):
                raise BadInput(f"{where}; the run folder must be writable") from e
            raise RunError(where) from e
        self.pid = self._popen.pid

    def poll(self) -> int | None:
        """Exit code; −n: killed by signal n; None: running."""
        return self._popen.poll()

    def ask_to_leave(self) -> None:
        """Send SIGTERM, and SIGCONT because a stopped process takes no other signal but SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            self._popen.send_signal(signal.SIGTERM)
            self._popen.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Send SIGKILL to the process and everything it started."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)


class Adopted:
    """A process that something else started, watched by pid and creation time; its exit code comes
    from its status file.
    """

    offset = 0

    def __init__(self, spec: ProcessSpec, by: Holder, run_dir: Path):
        self.spec = spec
        self.pid = by.pid
        self._create_time = by.create_time
        self._run_dir = run_dir

    def poll(self) -> int | None:
        """As `Running.poll`; −9 when the process left no exit code behind."""
        if is_alive(self.pid, self._create_time):
            return None
        s = status.read(self._run_dir, self.spec.name)
        return (
            s.exit_code
            if s is not None and s.pid == self.pid and s.exit_code is not None
            else -int(signal.SIGKILL)
        )

    def ask_to_leave(self) -> None:
        """SIGTERM and SIGCONT."""
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL."""
        self._signal(signal.SIGKILL)

    def _signal(self, sig: signal.Signals) -> None:
        if is_alive(self.pid, self._create_time):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, sig)


def rotate(log: Path) -> None:
    """Move a log that is too long to LOG.1 and start it over while processes append to it.

    What they write between the last read and the cut, some microseconds, is lost.
    """
    aside = log.with_name(f"{log.name}.1")
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{aside}.new")  # of a launcher that was killed while copying
        if log.stat().st_size <= LOG_BYTES:
            return
        with open(log, "rb") as old, open(f"{aside}.new", "wb") as new:
            while chunk := old.read(1 << 20):
                new.write(chunk)
            os.truncate(log, 0)
        os.replace(f"{aside}.new", aside)
    except OSError:  # no room for a copy: the log stays as it is
        with contextlib.suppress(OSError):
            os.unlink(f"{aside}.new")


def reap_strays(own: set[int]) -> None:
    """Reap processes that the kernel gave to the launcher: what its children started and left
    behind, where the launcher is a container's first process. Leaves those in `own` to their
    owners, who wait for them.
    """
    with contextlib.suppress(ChildProcessError):
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None and ended.si_pid not in own:
            os.waitpid(ended.si_pid, os.WNOHANG)


def _header(spec: ProcessSpec, attempt: int) -> str:
    shown = {
        name: spec.env[name]
        for name in ("CUDA_VISIBLE_DEVICES", "XLA_FLAGS")
        if spec.env.get(name) is not None
    }
    env = "".join(f" {name}={shlex.quote(value)}" for name, value in shown.items())
    return (
        f"==== {time.strftime('%Y-%m-%d %H:%M:%S')} start {attempt} of {spec.name}:{env}"
        f" {' '.join(spec.argv)}\n"
    )


def explain(code: int) -> str:
    """An exit in words: "killed by signal 9", "exited with 2"."""
    return f"killed by signal {-code}" if code < 0 else f"exited with {code}"
