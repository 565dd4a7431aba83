"""The child's side of a process: when to stop, how much time is left, and which exit code says why.

A role's entry is `run_main(main)`; `main(stop)` returns when the work is done, or soon after `stop`
is set. Import TensorFlow inside `main`, so that signals and the parent's death are noticed while it
loads.

    SIGTERM, SIGINT, SIGHUP   stop; a trainer saves first          exit 143, 130, 143
    SIGUSR1                   another trainer asks for the place    exit 4 after saving
                              of a process that saves nothing: stop exit 143
    SIGUSR2                   a warning of a batch system: stop     exit 143
    the supervisor died       leave without saving, within 10 s     exit 143

A thread, not a Python signal handler, does the noticing: a handler only runs between two byte codes
of the main thread, which may sit in a compilation for a minute.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn

from common.system import home
from common.system.errors import (
    FAILED,
    HOPELESS,
    INTERRUPTED,
    OK,
    REPLACED,
    TERMINATED,
    Replaced,
    RunError,
    Stopped,
    disk_refuses,
    is_out_of_memory,
)

PARENT_FD = "XTTS_PARENT_FD"  # a pipe that ends when the supervisor does
SUPERVISOR = "XTTS_SUPERVISOR"  # "pid:create_time" of the supervisor
# "read,write": the signal pipe of the process that became this one, with unread signals
_SIGNALS = "XTTS_SIGNALS"

# The supervisor kills after 5 s (nothing to save), after 10 s, or, while the status says "saving",
# after the time that it allows for the save (at least 30 s); a child leaves just before.
GRACE_S = 4.5
SAVER_GRACE_S = 9.5
SAVE_S = 29.5
ORPHAN_S = 8.0
REPLACE_S = 58.0

_PR_SET_PDEATHSIG = 1
# The kernel sends it when a thread of the supervisor dies. Unlike SIGUSR2, nobody else sends it.
_PARENT_DIED = signal.SIGRTMAX if sys.platform == "linux" else None
_LEAVES_AFTER_SAVE_S = 2.5
_STOP_SIGNALS = {signal.SIGTERM: TERMINATED, signal.SIGHUP: TERMINATED, signal.SIGINT: INTERRUPTED}
_HEARD = tuple(
    s for s in (*_STOP_SIGNALS, signal.SIGUSR1, signal.SIGUSR2, _PARENT_DIED) if s is not None
)

log = logging.getLogger("lifecycle")


class Stop(threading.Event):
    """Set when the process must leave.

    `cause`: "stop", "replace" (save, then exit 4) or "orphan" (do not save).
    """

    def __init__(self, saves: bool = False):
        super().__init__()
        self.cause = ""
        self.reason = ""
        self.exit_code = TERMINATED
        self._saves = saves
        self.save_s = SAVE_S  # how long a stop waits for a save
        self._saving = 0
        self._saved_at = 0.0
        self._since = 0.0
        self._hooks: list[Callable[[int], None]] = []
        self.parent_fd: int | None = None
        self._parent = 0
        self._signal_fds = (-1, -1)
        self._hearing = threading.Lock()  # held by whoever takes signals from the pipe
        self._at_once = False
        self._leaving = threading.Lock()  # held while `at_once` begins, ends or is acted on

    @property
    def orphaned(self) -> bool:
        """Whether the supervisor is dead: leave without saving."""
        return self.cause == "orphan"

    @property
    def replaced(self) -> bool:
        """Whether another trainer waits for the lock."""
        return self.cause == "replace"

    def request(self, cause: str, reason: str, exit_code: int) -> None:
        """Ask the process to leave; only an orphan's request overrides an earlier one."""
        if self.is_set() and (cause != "orphan" or self.orphaned):
            return
        self.cause, self.reason, self.exit_code = cause, reason, exit_code
        self._since = time.monotonic()
        self.set()

    def error(self) -> RunError:
        """The exception that carries this stop to the process's edge."""
        return (
            Replaced(f"left for another trainer ({self.reason})")
            if self.replaced
            else Stopped(f"stopped by {self.reason or 'request'}")
        )

    def check(self) -> None:
        """Raise `error()` if the stop is set."""
        if self.is_set():
            raise self.error()

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """While inside, the deadline is a save's.

        The caller's status must say "saving", or the supervisor kills the process.
        """
        self._saving += 1
        try:
            yield
        finally:
            self._saving -= 1
            self._saved_at = time.monotonic()

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """While inside, a stop ends the process from another thread, after the hooks: for work that
        cannot be interrupted, before which there is nothing to save or to close, as an import.

        Raises `error()` if the stop is set already.
        """
        with self._leaving:
            self.check()
            self._at_once = True
        try:
            yield
        finally:
            with self._leaving:
                self._at_once = False

    def remaining_s(self) -> float | None:
        """Seconds until the process is forced out; None: no stop yet."""
        if not self.is_set() or not self._since:
            return None
        if self.orphaned:
            limit = ORPHAN_S
        elif self._saving:
            limit = max(REPLACE_S, self.save_s) if self.replaced else self.save_s
        elif self.replaced:
            limit = REPLACE_S
        elif self._saves:
            limit = max(SAVER_GRACE_S, self._saved_at - self._since + _LEAVES_AFTER_SAVE_S)
        else:
            limit = GRACE_S
        return self._since + limit - time.monotonic()

    def at_exit(self, hook: Callable[[int], None]) -> None:
        """Run `hook(exit_code)` at the end, in order; not if the process is killed or forced."""
        self._hooks.append(hook)

    def run_hooks(self, code: int) -> None:
        """Run the hooks given to `at_exit`."""
        while self._hooks:
            self._hooks.pop(0)(code)


def run_main(main: Callable[[Stop], int | None], *, saves: bool = False) -> NoReturn:
    """Run a role and end the process with the exit code for its outcome (`common.system.errors`).

    Ends by `os._exit`: TensorFlow's and CUDA's destructors have hung and crashed at exit, and a
    role has closed everything it must close when `main` returns. `saves`: the role has something to
    save, so it gets the longer deadlines.
    """
    home.settle(os.environ)
    faulthandler.enable()
    faulthandler.register(
        signal.SIGQUIT, all_threads=True
    )  # kill -QUIT: every thread's stack into the log
    stop = Stop(saves)
    watch(stop)
    _end(stop, _outcome(main, stop))


def _end(stop: Stop, code: int) -> NoReturn:
    stop.run_hooks(code)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _outcome(main: Callable[[Stop], int | None], stop: Stop) -> int:
    try:
        code = main(stop)
        return (
            code if code is not None else (stop.exit_code if stop.is_set() and stop.cause else OK)
        )
    except Replaced as e:
        log.info("%s", e)
        return REPLACED
    except Stopped as e:
        log.info("%s", e)
        return stop.exit_code
    except RunError as e:
        log.error("%s", e)
        return e.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else (OK if e.code is None else FAILED)
    except Exception as e:  # noqa: BLE001 - the process's edge
        refusal = disk_refuses(e)
        if refusal is not None:
            log.error("%s", refusal)
            return refusal.exit_code
        log.error("%s: %s", type(e).__name__, e, exc_info=True)
        return HOPELESS if _is_hopeless(e) else FAILED


def _is_hopeless(e: Exception) -> bool:
    """Whether a restart would end the same way: out of memory, or a folder is not writable."""
    if isinstance(e, OSError):
        return e.errno in (errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)
    return is_out_of_memory(e)


def watch(stop: Stop) -> None:
    """Start the thread that turns signals and the supervisor's death into `stop`.

    Call from the main thread.
    """
    read_fd, write_fd = stop._signal_fds = _signal_pipe()
    os.set_blocking(write_fd, False)
    hear()
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    stop._parent = os.getppid()
    parent_fd = stop.parent_fd = _parent_fd()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)  # `hold_signals` holds them back
    threading.Thread(
        target=_watch, args=(stop, read_fd, parent_fd), name="lifecycle", daemon=True
    ).start()


def hear() -> None:
    """Take over signals, also from a library that has taken them (TensorFlow's collectives do).
    Call from the main thread.
    """
    for sig in _HEARD:
        signal.signal(
            sig, lambda *_: None
        )  # the wakeup fd only reports signals that have a Python handler


def hold_signals() -> None:
    """Block stop signals before exec until the new program's `run_main` listens, so that they do
    not end it in the middle of its imports.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)


def begin_anew(stop: Stop, argv: list[str], env: Mapping[str, str]) -> NoReturn:
    """Become a fresh process: same pid, same supervisor, same log, but none of the old memory, nor
    any on a GPU.

    `argv`: the arguments for `sys.executable`; `env` is added to the environment. Closes whatever
    is not inheritable, including locks (see `Lock.keep`). Call from the main thread, with nothing
    left to save; raises the stop's error.
    """
    with stop._hearing:  # the watching thread reads no signals from here on: they stay in the pipe
        stop.check()
        if stop.parent_fd is not None:
            os.set_inheritable(stop.parent_fd, True)
            os.environ[PARENT_FD] = str(stop.parent_fd)
        for fd in stop._signal_fds:
            os.set_inheritable(fd, True)
        os.environ[_SIGNALS] = "{},{}".format(*stop._signal_fds)
        os.environ.update(env)
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # While other threads live, they write signals into the pipe; once they are gone, a signal
        # waits until the new process listens. Lost is one that a thread takes in the microseconds
        # before exec ends it; the supervisor then kills, as any process that does not leave.
        hold_signals()
        os.execv(sys.executable, [sys.executable, *argv])


def _signal_pipe() -> tuple[int, int]:
    """(read end, write end), with the signals that the process did not read before its exec."""
    text = os.environ.pop(_SIGNALS, "")
    if not text:
        return os.pipe()
    read_fd, write_fd = map(int, text.split(","))
    for fd in (read_fd, write_fd):
        os.set_inheritable(fd, False)
    return read_fd, write_fd


def _parent_fd() -> int | None:
    """The supervisor's pipe. Also asks the kernel for a signal when the supervisor dies, since a
    leaked pipe end would hide the first sign.
    """
    text = os.environ.pop(PARENT_FD, "")
    if not text:
        return None
    fd = int(text)
    os.set_inheritable(fd, False)
    if _PARENT_DIED is not None:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(_PARENT_DIED), 0, 0, 0)
    return fd


def _watch(stop: Stop, signal_fd: int, parent_fd: int | None) -> None:
    fds = [signal_fd] + ([parent_fd] if parent_fd is not None else [])
    while True:
        remaining = stop.remaining_s()
        if remaining is not None and remaining <= 0:
            _force(stop)
        # 0.25 s, not all of the rest: the deadline moves when a save begins or ends.
        ready, _, _ = select.select(
            fds, [], [], None if remaining is None else min(remaining, 0.25)
        )
        if parent_fd in ready:
            fds.remove(parent_fd)
            _orphan(stop)
        if signal_fd in ready:
            with stop._hearing:
                for number in os.read(signal_fd, 64):
                    _on_signal(stop, signal.Signals(number))
        if remaining is None and stop.is_set():
            threading.Thread(target=_leave_at_once, args=(stop,), name="leave", daemon=True).start()


def _leave_at_once(stop: Stop) -> None:
    """End the process if the main thread is inside `Stop.at_once`."""
    with stop._leaving:  # the main thread waits for the end, if its work ends first
        if stop._at_once:
            log.info("%s", stop.error())
            _end(stop, stop.exit_code)


def _on_signal(stop: Stop, sig: signal.Signals) -> None:
    if sig == signal.SIGUSR1 and stop._saves:
        stop.request("replace", "SIGUSR1", REPLACED)
    elif sig == _PARENT_DIED:
        # The kernel sends it for each of the parent's threads: only the last means its death.
        if os.getppid() != stop._parent:
            _orphan(stop)
    elif sig in (signal.SIGUSR1, signal.SIGUSR2):
        stop.request("stop", sig.name, TERMINATED)
    elif sig in _STOP_SIGNALS:
        if sig == signal.SIGINT and stop.is_set() and time.monotonic() - stop._since > 0.5:
            os._exit(INTERRUPTED)  # a second Ctrl-C
        stop.request("stop", sig.name, _STOP_SIGNALS[sig])


def _orphan(stop: Stop) -> None:
    if not stop.orphaned:
        log.warning("the supervisor died; leaving without saving")
    stop.request("orphan", "the supervisor's death", TERMINATED)


def _force(stop: Stop) -> NoReturn:
    log.warning(
        "did not stop in time after %s (%s): forced out; stacks follow",
        stop.reason,
        "the save that was being written is lost; train.save_grace_s bounds the wait for it"
        if stop._saving
        else "compiling, or waiting for a device?",
    )
    with contextlib.suppress(OSError, ValueError):
        faulthandler.dump_traceback(all_threads=True)
        sys.stderr.flush()
    os._exit(FAILED if stop.replaced else stop.exit_code)
