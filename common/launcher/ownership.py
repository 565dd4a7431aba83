"""Who may do what with a run folder: one launcher (RUN/launch.lock), one trainer (RUN/lock), and a
name for each added producer.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from common.run.bundle import refuse_unpacked
from common.run.settings import Config
from common.system import lock, status
from common.system.errors import BadInput, RunError
from common.system.lock import Lock
from common.transport.address import (
    ChannelError,
    check_address,
    check_ipc_free,
    explain_bind,
    numeric,
)

REPLACE_WAIT_S = 60.0
STOP_WAIT_S = 45.0


@contextlib.contextmanager
def own_run(run_dir: Path) -> Iterator[lock.Holder | None]:
    """Be the run's launcher while inside. Yields the trainer that is already at work there under
    another launcher, or None.

    A folder made for a run that could not be created is removed again.

    Raises:
        BadInput: another launcher works there (the message names it), or the folder was made from
        a bundle.
    """
    refuse_unpacked(run_dir)
    stop_it = (
        f"stop it with `python launch.py stop --run {run_dir}`, or give this run a folder of its"
        " own with run=…"
    )
    _make_folder(run_dir)
    held = lock.lock(run_dir / "launch.lock", "launch.py", stop_it)
    try:
        yield _not_leaving(run_dir)
    finally:
        is_run = (run_dir / "identity.json").exists()
        held.release(unlink=not is_run)
        if not is_run:
            with contextlib.suppress(OSError):  # not empty: it was the user's
                run_dir.rmdir()


@contextlib.contextmanager
def preparing(run_dir: Path) -> Iterator[None]:
    """Hold the right to create the run or change its settings: one process at a time.

    Raises:
        BadInput: another command holds it; the message names that command.
    """
    _make_folder(run_dir)
    advice = "it is creating or resuming this run; wait for it, or give this run another folder"
    held = lock.lock(run_dir / "prepare.lock", "launch.py", advice)
    try:
        yield
    finally:
        held.release(unlink=True)


def _make_folder(run_dir: Path) -> None:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise BadInput(
            f"cannot create the run folder {run_dir}: {e.strerror}; choose another with run=…"
        ) from e


def make_room(run_dir: Path, replace: bool, tell: Callable[[str], None]) -> None:
    """Free RUN/lock before a trainer starts on its own: nobody holds it when this returns.

    Args:
        replace: ask a running trainer to save and leave.

    Raises:
        BadInput: a trainer runs and `replace` is False.
        RunError: it did not leave within 60 s plus the time of its save.
    """
    by = _not_leaving(run_dir)
    if by is None:
        return
    if not replace:
        raise BadInput(f"{run_dir} is in use by {by}; add --replace to let it save and take over")
    # The lock's holder has its signal handlers installed: it took the lock after that.
    tell(f"asking {by} to save and leave")
    try:
        os.kill(by.pid, signal.SIGUSR1)
    except ProcessLookupError:
        pass
    except PermissionError as e:
        raise BadInput(f"{by} belongs to another user") from e
    wait_s = _with_its_save(run_dir, REPLACE_WAIT_S)
    if (still := lock.wait_free(run_dir / "lock", wait_s)) is not None:
        raise RunError(
            f"{still} has not stopped after {wait_s:.0f} s and is still the run's trainer;"
            " nothing was started"
        )


def stop_run(run_dir: Path, tell: Callable[[str], None]) -> None:
    """Ask the run's launcher, else its trainer, to leave, and wait until it has.

    Raises:
        BadInput: nothing runs there on this machine.
        RunError: it did not leave within 45 s plus the time of its save.
    """
    by = lock.holder(run_dir / "launch.lock") or lock.holder(run_dir / "lock")
    if by is None or not by.pid or not lock.is_alive(by.pid, by.create_time):
        raise BadInput(f"nothing runs in {run_dir} on this machine; --run names the run folder")
    tell(f"asking {by} to stop")
    os.kill(by.pid, signal.SIGTERM)
    wait_s = _with_its_save(run_dir, STOP_WAIT_S)
    deadline = time.monotonic() + wait_s
    while lock.is_alive(by.pid, by.create_time):
        if time.monotonic() > deadline:
            raise RunError(f"{by} has not stopped after {wait_s:.0f} s; see {run_dir / 'logs'}")
        time.sleep(0.1)
    tell("it has stopped")


def _with_its_save(run_dir: Path, least_s: float) -> float:
    """Seconds to wait for a run that was asked to leave; includes the save that it announces."""
    s = status.read(run_dir, "trainer")
    return max(least_s, s.save_grace_s + 15.0) if s is not None and s.save_grace_s else least_s


def _not_leaving(run_dir: Path) -> lock.Holder | None:
    """The holder of RUN/lock, unless it leaves within 12 s because its supervisor is dead."""
    by = lock.holder(run_dir / "lock")
    return (
        lock.wait_free(run_dir / "lock", lock.ORPHAN_WAIT_S)
        if by is not None and by.leaving
        else by
    )


def check_binds(config: Config) -> None:
    """Check that the trainer can listen at `transport.bind` and `trainers.bind`.

    BadInput: as of `check_bind`.
    """
    check_bind(config.transport.bind)
    if config.trainers.bind is not None and config.trainers.count > 1:
        try:
            address = numeric(config.trainers.bind)
        except ChannelError as e:
            raise BadInput(f"trainers.bind: {e}") from e
        check_bind(address, "trainers.bind")


def check_bind(address: str, setting: str = "transport.bind") -> None:
    """Check that the trainer can listen at the address, before it loads TensorFlow.

    Raises:
        BadInput: not an address, an address of another host, or a port in use (the message names
            the process).
    """
    if address == "ipc":
        return
    try:
        check_address(address, curve=True)
        if address.startswith("ipc://"):
            check_ipc_free(address)
    except ChannelError as e:
        raise BadInput(f"{setting}: {e}") from e
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or port == "*":
        return
    try:
        family, kind, _, _, where = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM
        )[0]
    except socket.gaierror:  # ZeroMQ also takes the name of a network interface
        return
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as ZeroMQ does
        try:
            probe.bind(where)
            probe.listen(1)
        except OSError as e:
            raise BadInput(
                f"{setting}: {explain_bind(address, e.errno or 0, e.strerror or str(e))}"
            ) from e


def extra_name(run_dir: Path, prefix: str = "producer-extra") -> tuple[str, int, Lock]:
    """(name, number, lock that keeps it) for one more producer: PREFIX-0, …

    Raises:
        BadInput: the folder cannot be written.
    """
    (run_dir / "status").mkdir(exist_ok=True)
    number = 0
    while True:
        path = run_dir / "status" / f"{prefix}-{number}.lock"
        if lock.holder(path) is None:
            with contextlib.suppress(BadInput):
                return path.stem, number, lock.lock(path, path.stem)
        if not os.access(path.parent, os.W_OK):
            raise BadInput(f"{path.parent} cannot be written")
        number += 1
