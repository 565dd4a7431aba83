"""One readable console for a whole run: a progress bar on a terminal, a plain line every few
seconds elsewhere, and the news, warnings and errors out of every process's log.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import psutil
from rich.console import Console as RichConsole
from rich.live import Live
from rich.progress import ProgressBar
from rich.table import Table
from rich.text import Text

from common.launcher.child import ProcessSpec, Program
from common.system import logs, status
from common.system.status import Status, duration

PLAIN_EVERY_S = 5.0
PLAIN_AGAIN_S = 10.0  # when nothing has changed but the time
PLAIN_ALONE_AGAIN_S = 60.0  # of an added producer, which may be idle for hours
QUIET_S = 10.0  # without a step for so long, the last rate and the time left mean nothing
DRAW_EVERY_S = 0.5
BAR_WIDTH, LEAST_BAR = 24, 6
READ_EVERY_S = 0.3
LINES_AT_STOP = 16  # with the program's own lines ≤ 20
ALARMS_PER_INTERVAL = 8  # and as many seconds


class LogTail:
    """New whole lines of a growing file."""

    def __init__(self, path: Path):
        self.path = path
        self.offset = path.stat().st_size if path.exists() else 0
        self._rest = b""

    def lines(self) -> list[str]:
        """What was appended since the last call; at most 1 MB of it, the newest."""
        try:
            size = self.path.stat().st_size
            if size == self.offset:
                return []
            if size < self.offset:  # replaced
                self.offset, self._rest = 0, b""
            self.offset = max(self.offset, size - (1 << 20))
            with open(self.path, "rb") as f:
                f.seek(self.offset)
                data = self._rest + f.read(1 << 20)
                self.offset = f.tell()
        except OSError:
            return []
        *whole, self._rest = data.split(b"\n")
        return [line.decode("utf-8", "replace") for line in whole]


class Console:
    """Implements `common.launcher.supervise.View`.

    Use as a context manager: it restores the terminal at the end.

    Args:
        out: where to print; a terminal gets the bar.
    """

    def __init__(
        self,
        program: Program,
        out: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._run_dir = program.run_dir
        self._clock = clock
        out = out or sys.stdout
        self._rich = RichConsole(file=out, highlight=False, markup=False, soft_wrap=True)
        self._live = (
            Live(console=self._rich, auto_refresh=False, transient=True)
            if self._rich.is_terminal
            else None
        )
        self._tails = {p.name: LogTail(p.log) for p in program.processes}
        self._roles = {p.name: p.role for p in program.processes}
        self._alarmed: set[str] = set()  # processes whose error was shown since their last start
        self._recent: deque[tuple[float, str]] = deque()
        self._left_out = 0
        self._budget: int | None = None
        self._read_at = self._draw_at = self._began = clock()
        self._said, self._said_at = "", self._began
        self._broken = False

    def __enter__(self) -> Console:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exc) -> None:
        if self._live is not None:
            self._guard(self._live.stop)

    def say(self, text: str) -> None:
        """Print a line of the launcher's own."""
        self._print(f"{time.strftime('%H:%M:%S')} {text}")

    def tick(self) -> None:
        """Read the logs and redraw, when it is time."""
        now = self._clock()
        if now - self._read_at >= READ_EVERY_S:
            self._read_at = now
            self._show_alarms(now)
        every = DRAW_EVERY_S if self._live else PLAIN_EVERY_S
        if now - self._draw_at >= every and self._budget is None:
            self._draw_at = now
            if self._live is not None:
                self._guard(lambda: self._live.update(self._bar(), refresh=True))
            else:
                self._say_progress(now)

    def _say_progress(self, now: float) -> None:
        statuses = self._statuses()
        timeless = progress_line(statuses, 0.0)
        again = PLAIN_AGAIN_S if "trainer" in self._roles.values() else PLAIN_ALONE_AGAIN_S
        if timeless != self._said or now - self._said_at >= again:
            self._said, self._said_at = timeless, now
            self.say(progress_line(statuses, now - self._began))

    def stopping(self) -> None:
        """Print at most one screen from here on: the rest is in the logs."""
        self._show_alarms(self._clock())
        self._budget = LINES_AT_STOP
        if self._live is not None:
            self._guard(self._live.stop)
            self._live = None

    def failure(self, spec: ProcessSpec, offset: int) -> None:
        """Report a process that failed. If it printed no error itself, show the end of its log."""
        self._show_alarms(self._clock())
        if spec.name in self._alarmed:
            self._alarmed.discard(spec.name)
            return
        try:
            with open(spec.log, "rb") as f:
                size = os.fstat(f.fileno()).st_size
                f.seek(max(offset if offset <= size else 0, size - 4096))
                lines = [
                    line
                    for line in f.read().decode("utf-8", "replace").splitlines()
                    if line.strip()
                ]
        except OSError:
            return
        for line in lines[-4:]:
            self._print(f"  {spec.name} | {line[:200]}")

    # -- alarms ------------------------------------------------------------------------------------

    def _show_alarms(self, now: float) -> None:
        while self._recent and now - self._recent[0][0] > ALARMS_PER_INTERVAL:
            self._recent.popleft()
        if self._left_out and len(self._recent) < ALARMS_PER_INTERVAL:
            self._print(f"         … {self._left_out} more warnings, in {self._run_dir / 'logs'}")
            self._left_out = 0
        for name, tail in self._tails.items():
            for line in map(logs.parse, tail.lines()):
                if line is not None and line.is_news:
                    self.say(f"{line.name}: {line.message}")
                if line is None or not line.is_alarm:
                    continue
                if line.level != "WARNING":
                    self._alarmed.add(name)
                self._alarm(now, line)

    def _alarm(self, now: float, line: logs.LogLine) -> None:
        text = f"{line.level} {line.name}: {line.message}"
        repeated = any(text == seen for _, seen in self._recent)
        if repeated or (len(self._recent) >= ALARMS_PER_INTERVAL and line.level == "WARNING"):
            self._left_out += 1
            return
        self._recent.append((now, text))
        self._print(
            f"{time.strftime('%H:%M:%S')} {text}", "yellow" if line.level == "WARNING" else "red"
        )

    # -- progress ----------------------------------------------------------------------------------

    def _statuses(self) -> list[Status]:
        found = (status.read(self._run_dir, name) for name in self._tails)
        return [s for s in found if s is not None and s.alive]

    def _bar(self) -> Table:
        statuses = self._statuses()
        trainer = next((s for s in statuses if s.role == "trainer"), None)
        text = progress_line(statuses, self._clock() - self._began)
        row = [Text(text, no_wrap=True, overflow="ellipsis")]
        # One line, however narrow the terminal is: the bar gives way first.
        width = min(BAR_WIDTH, self._rich.width - len(text) - 2)
        if trainer is not None and trainer.max_steps and width >= LEAST_BAR:
            row.insert(0, ProgressBar(total=trainer.max_steps, completed=trainer.step, width=width))
        grid = Table.grid(padding=(0, 1))
        grid.add_row(*row)
        return grid

    # -- output ------------------------------------------------------------------------------------

    def _print(self, text: str, style: str | None = None) -> None:
        if self._budget is not None:
            if self._budget <= 0:
                return
            self._budget -= 1
        self._guard(lambda: self._rich.print(Text(text), style=style))

    def _guard(self, write: Callable[[], None]) -> None:
        """A terminal that was closed must not keep a run from stopping well."""
        if self._broken:
            return
        try:
            write()
            self._rich.file.flush()
        except (OSError, ValueError):
            self._broken = True


def progress_line(statuses: list[Status], elapsed_s: float) -> str:
    """Where a run stands, in one line: the trainer's numbers, or before there are any, what each
    process is doing.
    """
    trainer = next((s for s in statuses if s.role == "trainer"), None)
    if trainer is None or trainer.step == 0 and trainer.phase != "training":
        doing = ", ".join(f"{s.name} {_doing(s)}" for s in statuses) or "starting processes"
        return f"{doing} ({elapsed_s:.0f} s)"
    parts = [
        f"{trainer.stage_name} {trainer.step}"
        + (f"/{trainer.max_steps}" if trainer.max_steps else "")
    ]
    still_s = trainer.age_s if trainer.time else 0.0
    if trainer.phase == "training" and still_s > QUIET_S:  # its rates are from before
        return "  ".join([*parts, f"no step for {still_s:.0f} s", *_stopped(statuses)])
    if trainer.phase != "training":
        parts.append(_doing(trainer))
    if trainer.loss is not None:
        parts.append(f"loss {trainer.loss:.4f}")
    if trainer.utterances_per_s is not None:
        parts.append(f"{trainer.utterances_per_s:.1f} utt/s")
    if trainer.wait_percent is not None:
        parts.append(f"data wait {trainer.wait_percent:.0f} %")
    if trainer.window:
        parts.append(f"buffer {trainer.buffer}")
    if trainer.eta_s is not None:
        parts.append(f"ETA {duration(trainer.eta_s)}")
    return "  ".join(p for p in parts if p)


def _stopped(statuses: list[Status]) -> list[str]:
    """One line for each process that a signal has stopped."""
    found = []
    for s in statuses:
        try:
            if psutil.Process(s.pid).status() == psutil.STATUS_STOPPED:
                found.append(f"{s.name} is stopped (kill -CONT {s.pid} lets it go on)")
        except psutil.Error:  # it has ended since
            continue
    return found


def _doing(s: Status) -> str:
    """The phase, with its details."""
    if s.role == "producer" and s.phase == "idle":
        return "waits for a trainer"
    if not s.message or s.message.startswith(s.phase):
        return s.message or s.phase
    return f"{s.phase}: {s.message}"
