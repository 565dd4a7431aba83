"""Random schedules of faults on runs of real processes: nothing lost, nothing twice, no hang, bits
equal; and how long no step was trained after each kind of fault.

    python -m tests.bench.chaos --schedules 200 [--size arithmetic|tiny|twin] [--seed 1]
        [--events 6] [--jobs 2] [--seconds S] [--augment]
        [--plant arrival|fetched|no-strikes|anyone]

Sizes: arithmetic in place of the networks; the networks, tiny; twin: both ends of the channel in
one process, and a channel that drops, duplicates, delays, reorders and corrupts. --augment: the
networks, tiny, recordings augmented in both stages.

Schedule i is that of seed SEED + i: `--schedules 1 --seed N` plays one again. A failure prints its
seed and the story of the run. --plant: with a bug in the product, which has to be caught: exit code
0 if it is, at the first schedule that fails. Prints a table and, last, the figures as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from common.run.folder import RunFolder
from tests.support import chaos_machine
from tests.support.arithmetic_runs import assert_exact, settings
from tests.support.chaos import Driver
from tests.support.chaos_machine import Gap, Machine
from tests.support.corpora import make_corpus
from tests.support.planted import PLANT, PLANTS
from tests.support.tiny_runs import assert_equal, result, tiny_tree
from tests.support.twin import HANG_S, Twin

STEPS = {"arithmetic": 160, "tiny": 44, "twin": 60}
EVENTS_BY = {"arithmetic": 60, "tiny": 12}  # the last event is due by that step, and what gaps took
EVENTS = {"arithmetic": 6, "tiny": 3, "twin": 0}
AUGMENT = {"share": 0.7, "of": "clip"}


@dataclass
class Played:
    """One schedule's end; `error`: what did not hold."""

    seed: int
    events: list[str]
    gaps: list[Gap]
    seconds: float
    error: str = ""
    late: str = ""  # the story of a run that stood still for longer than its bound


class Stand:
    """What all schedules share: a corpus, and for the networks what an undisturbed run came to."""

    def __init__(self, root: Path, args: argparse.Namespace):
        self.root, self.args = root, args
        self.corpus = make_corpus(
            root / "corpus",
            14 if args.size == "tiny" else 41,
            seconds=lambda i: 0.6 + 0.05 * (i % 9),
            freq=lambda i: 200 + 40 * i,
        )
        self.want = self._undisturbed() if args.size == "tiny" else None

    def tree(self, folder: Path) -> dict:
        """The settings of a run in `folder`."""
        if self.args.size == "tiny":
            tree = tiny_tree(folder, self.corpus, num_producers=2)
            tree["train"]["max_steps"] = STEPS["tiny"]
            tree["producers"]["lease_ttl_s"] = chaos_machine.TTL_S
            tree["augment"] = AUGMENT if self.args.augment else {}
            return tree
        return settings(
            folder / "run",
            self.corpus,
            producers__count=2,
            producers__lease_ttl_s=chaos_machine.TTL_S,
            train__max_steps=STEPS["arithmetic"],
            dvae__max_steps=10,
        )

    def play_twin(self, seed: int) -> Played:
        """One schedule on the clock that the twin turns; gaps are in its seconds."""
        twin, began, error = Twin(seed, STEPS["twin"]), time.monotonic(), ""
        try:
            twin.play()
        except AssertionError as e:
            error = f"{e} {twin.counts}"
        faults = [k for k, n in twin.counts.items() if k != "sent" for _ in range(n)]
        gaps = [Gap("any", twin.longest_gap_s, HANG_S)]
        return Played(seed, faults, gaps, time.monotonic() - began, error)

    def play(self, seed: int) -> Played:
        """One schedule, from the launch to what the run's folder says."""
        if self.args.size == "twin":
            return self.play_twin(seed)
        folder = self.root / f"seed-{seed}"
        # The networks' start needs more room than the small file system has.
        disk = chaos_machine.mount(folder / "disk") if self.args.size == "arithmetic" else None
        plan = chaos_machine.schedule(
            seed, self.args.events, EVENTS_BY[self.args.size], disk is not None
        )
        if self.args.size == "tiny":
            plan = [(w, e) for w, e in plan if e != "impostor"]  # it speaks arithmetic
        base = Driver.create(folder, self.tree(disk or folder), step_ms=5, make_ms=5)
        machine = Machine(base.run, base.config, base.env, base.gate, disk=disk, seed=seed)
        machine.env["XTTS_CHANNEL_LOG"] = str(folder / "channel.jsonl")  # not on the full disk
        if self.args.plant:
            machine.env[PLANT] = self.args.plant
        began, error, story = time.monotonic(), "", ""
        try:
            machine.play(plan)
            self.judge(RunFolder(machine.run), folder / "channel.jsonl")
            late = [g for g in machine.gaps if g.seconds > g.bound_s]
            if late:
                story = f"no step for {late[0].seconds:.1f} s of {late[0].bound_s:.1f}"
                error = story if self.args.plant else ""
                story = machine.story(story)
        except Exception as e:  # noqa: BLE001 - a schedule's edge: told with its seed, and the next one goes on
            error = str(e) if "--- " in str(e) else machine.story(f"{type(e).__name__}: {e}")
        finally:
            machine.close()
        seconds = time.monotonic() - began
        return Played(seed, [e for _, e in plan], machine.gaps, seconds, error, story)

    def judge(self, run: RunFolder, told: Path) -> None:
        """AssertionError: something was lost, twice, or other."""
        if self.want is None:
            assert_exact(run)
        else:
            assert_equal(result(run), self.want)
        chaos_machine.check_cursors(run)
        chaos_machine.check_channel(run, told)

    def _undisturbed(self):
        folder = self.root / "undisturbed"
        driver = Driver.create(folder, self.tree(folder), 0, 0)
        driver.launch()
        try:
            driver.finish()
        finally:
            driver.kill_everything()
        return result(RunFolder(driver.run))


def report(played: list[Played], size: str) -> dict:
    """The table, and the same as figures."""
    by_kind: dict[str, list[Gap]] = defaultdict(list)
    for p in played:
        for gap in p.gaps:
            by_kind[gap.kind].append(gap)
    table = Table("fault", "times", "median s", "longest s", "its bound s", "over")
    figures = {}
    for kind, gaps in sorted(by_kind.items()):
        worst, over = max(gaps, key=lambda g: g.seconds), sum(g.seconds > g.bound_s for g in gaps)
        row = {
            "times": len(gaps),
            "median_s": round(statistics.median(g.seconds for g in gaps), 2),
            "longest_s": round(worst.seconds, 2),
            "bound_s": round(worst.bound_s, 1),
            "over": over,
        }
        figures[kind] = row
        table.add_row(kind, *(str(v) for v in row.values()))
    Console(width=100).print(table)
    return {
        "size": size,
        "schedules": len(played),
        "events": sum(len(p.events) for p in played),
        "by_kind": dict(Counter(e for p in played for e in p.events)),
        "failed_seeds": [p.seed for p in played if p.error],
        "seconds_each": round(statistics.mean(p.seconds for p in played), 1),
        "gaps": figures,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedules", type=int, default=10)
    parser.add_argument("--size", choices=tuple(STEPS), default="arithmetic")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--events", type=int)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no schedule after these")
    parser.add_argument("--augment", action="store_true")
    parser.add_argument("--plant", choices=tuple(PLANTS))
    args = parser.parse_args()
    args.events = args.events or EVENTS[args.size]
    if args.augment and args.size != "tiny":
        parser.error("--augment: only the networks hear recordings (--size tiny)")
    if args.size == "twin":
        if args.plant:
            parser.error("bugs in the twin are planted by tests/common/test_twin_chaos.py")
        args.jobs = 1  # it patches the clock
    played, began = [], time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="chaos-") as name,
        ThreadPoolExecutor(args.jobs) as pool,
    ):
        stand = Stand(Path(name), args)

        def one(seed: int) -> Played | None:
            caught = args.plant and any(p.error for p in played)
            late = time.monotonic() - began > args.seconds
            return None if caught or late else stand.play(seed)

        seeds = range(args.seed, args.seed + args.schedules)
        for future in as_completed([pool.submit(one, seed) for seed in seeds]):
            done = future.result()
            if done is None:
                continue
            played.append(done)
            told = done.error or "\n".join(filter(None, ("exact", done.late)))
            sys.stdout.write(f"seed {done.seed}: {told} ({done.seconds:.0f} s)\n")
            sys.stdout.flush()
    figures = report(played, args.size)
    sys.stdout.write(json.dumps(figures) + "\n")
    failed = bool(figures["failed_seeds"])
    return int(not failed if args.plant else failed)


if __name__ == "__main__":
    sys.exit(main())
