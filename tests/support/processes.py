"""Real processes for the tests of supervision: children that behave in named ways, and a launcher
over them.

python processes.py launch RUN CHILD…    CHILD = name:role:behaviour[:option=value…]
python processes.py child RUN NAME BEHAVIOUR

The launcher's clock is ahead by the seconds in RUN/ahead, so that a deadline passes when a test
says so. ORPHAN_S and GRACE_S in the environment take the place of the children's own.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from common.launcher import child as children_  # noqa: E402
from common.launcher import supervise  # noqa: E402
from common.launcher.child import ProcessSpec, Program  # noqa: E402
from common.launcher.console import Console  # noqa: E402
from common.launcher.supervise import Supervisor  # noqa: E402
from common.system import lifecycle, lock, logs
from common.system import status as statuses  # noqa: E402
from common.system.errors import BadInput, Hopeless, RunError  # noqa: E402
from common.system.lifecycle import Stop, run_main  # noqa: E402
from common.system.status import StatusFile  # noqa: E402


def start_launcher(run: Path, *children: str, **options) -> subprocess.Popen:
    """A launcher over `children` in a session of its own; its output goes to RUN/console.txt."""
    argv = [sys.executable, __file__, "launch", str(run), *children]
    hangup = signal.signal(
        signal.SIGHUP, signal.SIG_DFL
    )  # under nohup it is ignored, by whatever is started too
    try:
        with open(run / "console.txt", "wb") as out:
            return subprocess.Popen(
                argv, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, **options
            )
    finally:
        signal.signal(signal.SIGHUP, hangup)


def start_child(run: Path, name: str, behaviour: str, **options) -> subprocess.Popen:
    """A child without a supervisor."""
    argv = [sys.executable, __file__, "child", str(run), name, behaviour]
    return subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )


def _launch(run: Path, children: list[str]) -> int:
    specs = []
    for text in children:
        name, role, behaviour, *options = text.split(":")
        given = dict(o.split("=") for o in options)
        specs.append(
            ProcessSpec(
                name=name,
                role=role,
                argv=(sys.executable, __file__, "child", str(run), name, behaviour),
                log=run / "logs" / f"{name}.log",
                main=role == "trainer",
                by_steps=role == "trainer",
                restarts=int(given.get("restarts", 3)),
                grace_s=float(given.get("grace", 5)),
                save_s=float(given.get("save", 0)),
                leave_s=float(given.get("leave", 10)),
                optional="optional" in given,
                lock=run / "lock" if role == "trainer" and "lock" not in given else None,
                leader=given.get("leader", ""),
            )
        )
    program = Program(run, tuple(specs))
    supervise.BACKOFF_S, supervise.DOUBLE_S = (
        float(os.environ["BACKOFF_S"]),
        float(os.environ["DOUBLE_S"]),
    )
    children_.LOG_BYTES = int(os.environ.get("LOG_BYTES", children_.LOG_BYTES))
    try:
        with Console(program) as view:
            return Supervisor(program, view, lambda: time.monotonic() + _ahead_s(run)).run()
    except RunError as e:
        sys.stdout.write(f"error: {e}\n")
        return e.exit_code


def _ahead_s(run: Path) -> float:
    file = run / "ahead"
    return float(file.read_text()) if file.exists() else 0.0


def _child(run: Path, name: str, behaviour: str) -> None:
    logs.setup(name)
    for limit in ("ORPHAN_S", "GRACE_S"):
        setattr(lifecycle, limit, float(os.environ.get(limit, getattr(lifecycle, limit))))
    run_main(lambda stop: _behave(stop, run, name, behaviour), saves=name == "trainer")


def _behave(stop: Stop, run: Path, name: str, behaviour: str) -> int | None:
    held = lock.lock(run / "lock", name) if name == "trainer" else None
    status = StatusFile(
        run, name, "trainer" if name == "trainer" else "producer", min_interval_s=0.0
    )
    stop.at_exit(status.finish)
    (run / f"{name}.starts").open("a").write(f"{os.getpid()}\n")
    kind, _, value = behaviour.partition("-")
    code = _KINDS[kind](stop, status, value)
    if held is not None:
        held.release()
    return code


def _wait(stop: Stop, status: StatusFile, value: str) -> None:
    """Work until told to leave; then take `value` seconds to save, of which "+S" may be taken."""
    value, _, grace = value.partition("+")
    status.update(phase="training", step=1, save_grace_s=float(grace) if grace else None)
    stop.wait()
    if value and not stop.orphaned:
        status.update(phase="saving")
        with stop.saving():
            time.sleep(float(value))
        status.update(phase="training", saved_step=1)
    stop.check()


def _exit(stop: Stop, status: StatusFile, value: str) -> int:
    code, _, after = value.partition("-")
    time.sleep(float(after or 0))
    return int(code)


def _until(stop: Stop, status: StatusFile, value: str) -> int:
    """Work until the test has put the file RUN/`value` there; then all is done."""
    status.update(phase="training", step=1)
    while not (status._path.parent.parent / value).exists():
        stop.check()
        time.sleep(0.02)
    return 0


def _raise(stop: Stop, status: StatusFile, value: str) -> None:
    raise {
        "bad": BadInput("the input is bad"),
        "hopeless": Hopeless("no way"),
        "bug": ValueError("a bug"),
        "memory": MemoryError("full"),
    }[value]


def _late(stop: Stop, status: StatusFile, value: str) -> int | None:
    """Another behaviour, `value`, once the trainer trains."""
    run = status._path.parent.parent
    while (s := statuses.read(run, "trainer")) is None or s.phase != "training":
        stop.check()
        time.sleep(0.02)
    kind, _, rest = value.partition("-")
    return _KINDS[kind](stop, status, rest)


def _die(stop: Stop, status: StatusFile, value: str) -> None:
    """Killed by a signal before any step."""
    time.sleep(float(value or 0))
    os.kill(os.getpid(), signal.SIGKILL)


def _advance(stop: Stop, status: StatusFile, value: str) -> int | None:
    """One step further at each start, then killed; done at step `value`."""
    old = sum(1 for _ in open(status._path.parent.parent / "trainer.starts"))
    status.update(phase="training", stage=1, step=old)
    if old >= int(value):
        return 0
    os.kill(os.getpid(), signal.SIGKILL)
    return None


def _make(stop: Stop, status: StatusFile, value: str) -> None:
    """Makes a batch and is killed, `value` times; then works on."""
    starts = sum(1 for _ in open(status._path.parent.parent / f"{status.value.name}.starts"))
    status.update(phase="working", batches=1)
    if starts <= int(value):
        os.kill(os.getpid(), signal.SIGKILL)
    _wait(stop, status, "")


def _anew(stop: Stop, status: StatusFile, value: str) -> None:
    """Begins anew; the signal `value` arrives at the last moment. Then works until told to
    leave.
    """
    if "ANEW" in os.environ:
        return _wait(stop, status, "")
    where, number = value.split("-")
    execv = os.execv

    def late(*args) -> None:
        if where == "process":
            os.kill(os.getpid(), int(number))
            # Some thread has taken it, and would lose it if it were ended before it writes it down.
            assert select.select([stop._signal_fds[0]], [], [], 60)[0]
        else:
            signal.pthread_kill(threading.get_ident(), int(number))
        execv(*args)

    os.execv = late
    lifecycle.begin_anew(stop, sys.argv, {"ANEW": "1"})


def _deaf(stop: Stop, status: StatusFile, value: str) -> None:
    """Does not hear SIGTERM: the interpreter is stopped by itself."""
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)


def _busy(stop: Stop, status: StatusFile, value: str) -> None:
    """Never looks at the stop."""
    time.sleep(600)


def _import(stop: Stop, status: StatusFile, value: str) -> None:
    """Imports something for ever."""
    with stop.at_once():
        pass
    with stop.at_once():
        status.update(phase="training")
        time.sleep(600)


def _family(stop: Stop, status: StatusFile, value: str) -> None:
    """Has a grandchild, and does not look at the stop."""
    p = subprocess.Popen(["sleep", "600"])
    (status._path.parent.parent / "grandchild").write_text(str(p.pid))
    time.sleep(600)


_KINDS = {
    "wait": _wait, "exit": _exit, "raise": _raise, "die": _die, "advance": _advance, "deaf": _deaf,
    "busy": _busy, "family": _family, "import": _import,
    "late": _late, "until": _until, "make": _make, "anew": _anew,
}  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1] == "launch":
        sys.exit(_launch(Path(sys.argv[2]), sys.argv[3:]))
    _child(Path(sys.argv[2]), *sys.argv[3:])
