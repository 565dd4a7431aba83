"""What each process is doing: RUN/status/<process>.json, which the process replaces atomically and
the supervisor and users read.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common.system.clock import boot, since_boot
from common.system.documents import read_json
from common.system.errors import INTERRUPTED, OK, TERMINATED
from common.system.lock import holder, identity, is_alive

if TYPE_CHECKING:
    from rich.table import Table

SAVING = "saving"  # the phase in which the supervisor waits for `save_grace_s` at a stop
SPEAKING_LAST = "speaking samples"  # at the run's end; the checkpoint `step` is the trainer's own
SUMMING_UP = "the summary"  # what was judged later is not in it
DONE = "done"  # nothing left to do but to report it
LEFT = "left"
ELSEWHERE_S = 120.0  # a trainer of another host that compiles may write nothing for as long

log = logging.getLogger("status")


@dataclass(frozen=True)
class Status:
    """One process's report.

    `step` counts from 1 within `stage` (1, 2, …), the sampler's is a checkpoint's; `eta_s` is the
    time to the stage's `max_steps`."""

    name: str
    role: str
    pid: int = 0
    create_time: float = 0.0
    device: str = ""
    phase: str = "starting"
    stage: int = 0
    stage_name: str = ""
    epoch: int = 0
    step: int = 0
    max_steps: int | None = None
    saved_step: int = 0
    loss: float | None = None
    utterances_per_s: float | None = None
    batches: int = 0  # of a producer: batches made so far
    wait_percent: float | None = None  # share of the step time spent waiting for data
    ready: int | None = None  # batches waiting
    window: int | None = None  # W, the most batches in existence
    target: int | None = None  # how many batches the trainer asks for now
    eta_s: float | None = None
    message: str = ""
    save_grace_s: float | None = None  # how long a stop waits for a save of this trainer
    exit_code: int | None = None
    time: float = 0.0
    clock: float = 0.0  # `time` on the clock that nobody sets, since the machine's start `boot`
    boot: str = ""

    @property
    def age_s(self) -> float:
        """Seconds since this was written, even if the wall clock was set in between; by the wall
        clock if it was written on another machine or before this one restarted."""
        if self.boot == boot():
            return max(0.0, since_boot() - self.clock)
        return max(0.0, time.time() - self.time)

    @property
    def here(self) -> bool:
        """Whether it was written on this machine, since its start."""
        return self.boot in ("", boot())

    @property
    def alive(self) -> bool:
        """Whether the process that wrote this still runs: on another machine, as far as it has
        written lately.
        """
        if self.exit_code is not None or self.pid <= 0:
            return False
        if not self.here:
            return self.age_s < ELSEWHERE_S
        return is_alive(self.pid, self.create_time)

    @property
    def doing(self) -> str:
        """Its phase, or how it ended."""
        if self.alive:
            return self.phase
        ended = {None: "dead", OK: "done", INTERRUPTED: "stopped", TERMINATED: "stopped"}
        return ended.get(self.exit_code, f"exit {self.exit_code}")

    @property
    def buffer(self) -> str:
        """ "3/4 of 8": batches waiting, how many may exist now, and how many at most."""
        now = f"{self.ready or 0}/{self.target or self.window}"
        return now if self.target in (None, self.window) else f"{now} of {self.window}"

    @property
    def progress(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """((stage, step), (stage, saved step)): a larger value of either means that the run made
        progress.
        """
        return (self.stage, self.step), (self.stage, self.saved_step)


class StatusFile:
    """This process's status.

    Thread-safe; a disk that cannot be written is reported once and does not stop the work.
    """

    def __init__(
        self, run_dir: str | os.PathLike, name: str, role: str, min_interval_s: float = 0.5
    ):
        pid, create_time = identity()
        self._path = status_path(run_dir, name)
        self._status = Status(name, role, pid, create_time)
        self._min_interval_s = min_interval_s
        self._written = 0.0
        self._warned = False
        self._lock = threading.Lock()
        self.update(phase="starting")

    @property
    def value(self) -> Status:
        """The last report."""
        return self._status

    def update(self, **changes) -> None:
        """Change fields. Writes at once if phase, stage, message or saved_step change, else at most
        twice a second.

        Raises:
            TypeError: no such field.
        """
        with self._lock:
            new = dataclasses.replace(self._status, **changes)
            urgent = any(
                getattr(new, f) != getattr(self._status, f)
                for f in ("phase", "stage", "message", "saved_step", "save_grace_s", "exit_code")
            )
            self._status = dataclasses.replace(
                new, time=time.time(), clock=since_boot(), boot=boot()
            )
            if urgent or time.monotonic() - self._written >= self._min_interval_s:
                self._write()

    def finish(self, exit_code: int) -> None:
        """Write the last report; give this to `Stop.at_exit`.

        Does not overwrite a successor of the same name that already reports.
        """
        now = read(self._path.parent.parent, self._status.name)
        if now is not None and now.pid != self._status.pid and now.alive:
            return
        self.update(phase=LEFT, exit_code=exit_code)

    def _write(self) -> None:
        tmp = self._path.with_name(f"{self._path.name}.{os.getpid()}.tmp")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            tmp.write_text(json.dumps(dataclasses.asdict(self._status)), encoding="utf-8")
            os.replace(tmp, self._path)
        except OSError as e:
            if not self._warned:
                log.warning(
                    "cannot write %s: %s; `launch.py status` will be stale", self._path, e.strerror
                )
            self._warned = True
        self._written = time.monotonic()


def status_path(run_dir: str | os.PathLike, name: str) -> Path:
    """RUN/status/<name>.json."""
    return Path(run_dir) / "status" / f"{name}.json"


def read(run_dir: str | os.PathLike, name: str) -> Status | None:
    """A process's last report; None: there is none, or it is not readable."""
    try:
        d = read_json(status_path(run_dir, name))
        known = {f.name for f in dataclasses.fields(Status)}
        return Status(**{k: v for k, v in d.items() if k in known})
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def read_all(run_dir: str | os.PathLike) -> list[Status]:
    """The report of every process, the trainer's first."""
    names = sorted(p.stem for p in (Path(run_dir) / "status").glob("*.json"))
    found = [s for s in (read(run_dir, n) for n in names) if s is not None]
    return sorted(found, key=lambda s: (s.role != "trainer", s.name))


def trainer_is_done(run_dir: str | os.PathLike, began: float = 0.0) -> bool:
    """Whether the run's trainer has reported since `began`, on the clock of `lock.identity`, that
    training is complete: an earlier report is another trainer's.
    """
    s = read(run_dir, "trainer")
    if s is None or s.phase != DONE and (s.phase != LEFT or s.exit_code != OK):
        return False
    return began == 0.0 or s.boot == boot() and s.clock >= began


def run_is_over(run_dir: str | os.PathLike) -> bool:
    """Whether the run's trainer has reported the end, and neither another one nor a launcher, which
    may start one, is at work in the run.
    """
    busy = any(holder(Path(run_dir) / name) for name in ("lock", "launch.lock"))
    return not busy and trainer_is_done(run_dir)


def as_json(run_dir: str | os.PathLike) -> dict:
    """The content of `launch.py status --json`: the run folder, the time, and every process's
    report, with whether it is `alive` and what it is `doing`.
    """
    processes = [
        dataclasses.asdict(s) | {"alive": s.alive, "doing": s.doing} for s in read_all(run_dir)
    ]
    return {"run": str(run_dir), "time": time.time(), "processes": processes}


def duration(seconds: float) -> str:
    """Format as h:mm:ss."""
    s = int(max(0.0, seconds))
    return f"{s // 3600}:{s // 60 % 60:02d}:{s % 60:02d}"


def table(run_dir: str | os.PathLike) -> Table:
    """`launch.py status`: one row per process."""
    from rich.table import Table  # slow to load: every process of a run imports this module

    t = Table(title=str(run_dir), box=None, padding=(0, 2, 0, 0))
    for column in (
        "process",
        "pid",
        "device",
        "doing",
        "step",
        "epoch",
        "ETA",
        "loss",
        "utt/s",
        "data wait",
        "buffer",
        "age",
    ):
        t.add_column(column, no_wrap=column != "device", overflow="fold")
    for s in read_all(run_dir):
        steps = (
            f"{s.stage_name} {s.step}" + (f"/{s.max_steps}" if s.max_steps else "")
            if s.role == "trainer"
            else f"{s.batches} batches"
        )
        if s.role == "sampler":  # the checkpoint that it is speaking, or spoke last
            steps = f"step {s.step}" if s.step else ""
        t.add_row(
            s.name,
            str(s.pid),
            s.device or "-",
            s.doing,
            steps.strip(),
            str(s.epoch) if s.role == "trainer" and s.step else "-",
            duration(s.eta_s) if s.eta_s is not None and s.alive else "-",
            _number(s.loss, ".3f"),
            _number(s.utterances_per_s, ".1f"),
            _number(s.wait_percent, ".0f", " %"),
            s.buffer if s.window else "-",
            f"{s.age_s:.0f} s",
        )
    return t


def _number(value: float | None, spec: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{spec}}{unit}"
