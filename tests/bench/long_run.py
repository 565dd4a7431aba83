"""A long run of real processes, one of them killed every so many steps: memory, open files and
threads of each, over the steps, as a picture and in figures.

    python -m tests.bench.long_run --steps 20000 --producers 3 --kill-every 500 --png flat.png

Arithmetic in place of the networks. The trainer and the producers are killed in turn, the launcher
never; then the folded ledgers and the weights must be the plan's, bit by bit. Prints, for each
process, the median of its first and of its last tenth (of the longest-lived one of that name), as
JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import psutil

from common.run.folder import RunFolder
from tests.support.arithmetic_runs import assert_exact, settings
from tests.support.chaos import Driver
from tests.support.corpora import make_corpus

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

SAMPLE_S = 2.0
WHAT = ("memory MB", "open files", "threads")


@dataclass(frozen=True)
class Sample:
    """One look at one process."""

    step: int
    memory_mb: float
    files: int
    threads: int

    def value(self, what: str) -> float:
        """One of WHAT."""
        return {
            "memory MB": self.memory_mb,
            "open files": self.files,
            "threads": self.threads,
        }[what]


class Watch:
    """Every process of a run, looked at again and again."""

    def __init__(self, driver: Driver, names: list[str]):
        self._driver, self._names = driver, names
        self.samples: dict[tuple[str, int], list[Sample]] = defaultdict(list)

    def look(self, step: int) -> None:
        """A sample of each that lives."""
        pids = {name: self._driver.pid(name) for name in self._names}
        for name, pid in [*pids.items(), ("launch.py", self._driver.launchers[-1].pid)]:
            if pid is None:
                continue
            try:
                p = psutil.Process(pid)
                memory = p.memory_info().rss / 1e6
                found = Sample(step, memory, p.num_fds(), p.num_threads())
            except psutil.Error:  # killed meanwhile
                continue
            self.samples[name, pid].append(found)

    def figures(self) -> dict:
        """Of the process of each name that was seen most: first and last tenth."""
        out = {}
        for name in [*self._names, "launch.py"]:
            lives = [s for (who, _), s in self.samples.items() if who == name]
            longest = max(lives, key=len, default=[])
            tenth = max(1, len(longest) // 10)
            out[name] = {"lives": len(lives), "steps": longest[-1].step - longest[0].step}
            for what in WHAT:
                values = [s.value(what) for s in longest]
                out[name][what] = [
                    round(statistics.median(part), 1) for part in (values[:tenth], values[-tenth:])
                ]
        return out

    def draw(self, png: Path) -> None:
        """One panel per quantity, one line per process."""
        figure, panels = pyplot.subplots(len(WHAT), 1, figsize=(11, 9), sharex=True)
        colours = {name: f"C{i}" for i, name in enumerate([*self._names, "launch.py"])}
        for panel, what in zip(panels, WHAT, strict=True):
            told = set()
            for (name, _), samples in self.samples.items():
                panel.plot(
                    [s.step for s in samples],
                    [s.value(what) for s in samples],
                    color=colours[name],
                    label=None if name in told else name,
                    linewidth=1,
                )
                told.add(name)
            panel.set_ylabel(what)
            panel.set_ylim(bottom=0)
            panel.grid(alpha=0.3)
        panels[0].legend(loc="upper left", ncols=len(colours), fontsize=8)
        panels[-1].set_xlabel("step")
        figure.tight_layout()
        figure.savefig(png, dpi=100)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--producers", type=int, default=3)
    parser.add_argument("--kill-every", type=int, default=500)
    parser.add_argument("--png", type=Path, default=Path("long_run.png"))
    parser.add_argument("--hours", type=float, default=3.0, help="give up after these")
    args = parser.parse_args()
    began, kills = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="long-run-") as name:
        root = Path(name)
        make_corpus(root / "corpus", 41, seconds=lambda i: 0.6 + 0.05 * (i % 9))
        tree = settings(
            root / "run",
            root / "corpus",
            producers__count=args.producers,
            train__max_steps=args.steps,
            train__epochs=args.steps,
            train__accumulate=1,
            train__save_every=50,
            train__eval_every=500,
            train__log_every=500,
        )
        driver = Driver.create(root, tree, step_ms=0, make_ms=0)
        names = ["trainer", *(f"producer-{i}" for i in range(args.producers))]
        victims, watch, due = itertools.cycle(names), Watch(driver, names), args.kill_every
        driver.launch()
        try:
            step = 0
            while driver.launchers[-1].poll() is None:
                step = max(step, driver.step())  # a new trainer begins to count at 0
                watch.look(step)
                if due <= step < args.steps - args.kill_every // 2:
                    driver.signal(next(victims), signal.SIGKILL)
                    kills, due = kills + 1, due + args.kill_every
                if time.monotonic() - began > 3600 * args.hours:
                    sys.stdout.write(driver.story(f"at step {step} after {args.hours} h"))
                    break
                time.sleep(SAMPLE_S)
            code = driver.launchers[-1].poll()
            exact = code == 0
            if exact:
                assert_exact(RunFolder(driver.run))
        finally:
            driver.kill_everything()
        watch.draw(args.png)
    seconds = round(time.monotonic() - began)
    told = {"exit": code, "kills": kills, "seconds": seconds, "processes": watch.figures()}
    sys.stdout.write(json.dumps(told) + "\n")
    return int(not exact)


if __name__ == "__main__":
    sys.exit(main())
