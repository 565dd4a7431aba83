"""A trainer slower than its producers: the window holds and memory stays flat.

    python tests/bench/slow_trainer.py [--seconds 120] [--step-ms 1000] [--producers 3]
        [--batch-mb 2] [--json FILE]

Starts the real launcher on arithmetic batches of a chosen size, samples the resident memory of
every process, and reads the lease log. Prints one table and exits 1 if leased − trained reached the
window, a process's memory varied by more than ± 10 % in the second half, or the trainer holds more
than the window's worth of batches.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import yaml
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from common.system import status  # noqa: E402
from tests.support.arithmetic import ROW_BYTES  # noqa: E402
from tests.support.arithmetic_runs import settings  # noqa: E402
from tests.support.corpora import make_corpus  # noqa: E402

ROWS = 32


def lead(events: list[dict]) -> int:
    """The largest (leased − trained) in the lease log, counted in places of the schedule, so that
    evaluations count too.
    """
    most = released = 0
    for e in events:
        if e["kind"] == "open":
            released = 0
        elif e["kind"] == "release":
            released = e["position"] + 1
        elif e["kind"] == "lease":
            most = max(most, e["position"] + 1 - released)
    return most


def watch(run: Path, seconds: float) -> dict[str, list[tuple[float, float]]]:
    """(time, resident MB) of each process, by name, five times a second, from when the trainer
    begins stage 2: what it holds then is
    itself, all modules loaded, and at most the batches of the first tenths of a second.
    """
    samples: dict[str, list[tuple[float, float]]] = {}
    deadline = time.monotonic() + 60
    while (s := status.read(run, "trainer")) is None or s.stage_name != "gpt":
        if time.monotonic() > deadline:
            raise SystemExit(
                f"the trainer has not begun stage 2 after 60 s; see {run}/logs/trainer.log"
            )
        time.sleep(0.01)
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        for s in status.read_all(run):
            if s.alive:
                try:
                    rss = psutil.Process(s.pid).memory_info().rss / 1e6
                except psutil.NoSuchProcess:
                    continue
                samples.setdefault(s.name, []).append((time.monotonic() - began, rss))
        time.sleep(0.2)
    return samples


def measure(folder: Path, seconds: float, step_ms: float, producers: int, batch_mb: float) -> dict:
    """Run, sample, stop; returns the figures."""
    make_corpus(folder / "corpus", 41, seconds=0.6)
    tree = settings(
        folder / "run",
        folder / "corpus",
        producers__count=producers,
        batching__batch_size=ROWS,
        dvae__max_steps=1,
    )
    tree["train"].update(
        {
            "max_steps": 100000,
            "accumulate": 1,
            "save_every": 20,
            "eval_every": 0,
            "eval_at_epoch_end": False,
        }
    )
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    env = {
        **os.environ,
        "ARITHMETIC_STEP_MS": str(step_ms),
        "XTTS_CHANNEL_LOG": "1",
        ROW_BYTES: str(int(batch_mb * 1e6 / ROWS)),
    }
    launch = subprocess.Popen(
        [sys.executable, str(ROOT / "launch.py"), "--config", str(folder / "config.yaml")],
        env=env,
        stdout=subprocess.DEVNULL,
    )
    try:
        samples = watch(folder / "run", seconds)
        trained = status.read(folder / "run", "trainer")
    finally:
        launch.terminate()
        launch.wait(40)
    events = [
        json.loads(line) for line in (folder / "run" / "channel.jsonl").read_text().splitlines()
    ]
    window = yaml.safe_load((folder / "run" / "config.yaml").read_text())["transport"][
        "high_water_mark"
    ]
    processes = {}
    for name, points in samples.items():
        late = [mb for t, mb in points if t >= seconds / 2]
        processes[name] = {
            "first_mb": points[0][1],
            "late_min_mb": min(late),
            "late_max_mb": max(late),
        }
    return {
        "seconds": seconds,
        "step_ms": step_ms,
        "producers": producers,
        "batch_mb": batch_mb,
        "window": window,
        "steps": trained.step,
        "largest_lead": lead(events),
        "processes": processes,
    }


def main() -> int:
    """Command line."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--seconds", type=float, default=120)
    p.add_argument("--step-ms", type=float, default=1000)
    p.add_argument("--producers", type=int, default=3)
    p.add_argument("--batch-mb", type=float, default=2.0)
    p.add_argument("--json", type=Path)
    args = p.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), args.seconds, args.step_ms, args.producers, args.batch_mb)
    table = Table("process", "MB at the start", "second half: least", "most", "spread")
    good = figures["largest_lead"] <= figures["window"]
    for name, m in figures["processes"].items():
        spread = (m["late_max_mb"] - m["late_min_mb"]) / (
            m["late_max_mb"] + m["late_min_mb"]
        )  # about their middle
        good &= spread <= 0.10
        table.add_row(
            name,
            f"{m['first_mb']:.0f}",
            f"{m['late_min_mb']:.0f}",
            f"{m['late_max_mb']:.0f}",
            f"± {100 * spread:.1f} %",
        )
    trainer = figures["processes"]["trainer"]
    allowed = trainer["first_mb"] + (figures["window"] + 2) * figures["batch_mb"]
    good &= trainer["late_max_mb"] <= allowed
    console = Console()
    console.print(table)
    console.print(
        f"{figures['steps']} steps; leased − trained at most {figures['largest_lead']}, window"
        f" {figures['window']}; trainer at most {trainer['late_max_mb']:.0f} MB, allowed"
        f" {allowed:.0f} MB"
    )
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
