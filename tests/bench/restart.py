"""What a SIGKILLed trainer costs: killed at a step of stage 2 under live producers, and everything
until the next one trains.

    python tests/bench/restart.py --data DIR [--size xtts] [--kill-at 50] [--batch-size 16]
        [--json FILE] [key=value …]

Starts launch.py as a user would with two producers and a checkpoint each 20 steps, kills the
trainer and lets the supervisor restart it. Printed: the producers' process ids before and after,
the checkpoint the new trainer took and its first step, from the killing to the first new step, and
from the first lease of the new trainer to its first batch. Exits 1 if a producer was restarted, the
first step is not the checkpoint's + 1, the ledger has a step missing or twice, or the first batch
took more than a second.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from common.system import status  # noqa: E402
from tests.bench.two_gpus import launch_command, parser  # noqa: E402
from trainer.history import ledger  # noqa: E402

START_S = 900.0  # until the step at which the trainer is killed, and from there to the end


def producers(run: Path) -> dict[str, int]:
    """Name → pid of the live ones."""
    return {s.name: s.pid for s in status.read_all(run) if s.role == "producer" and s.alive}


def killed(process: subprocess.Popen, run: Path, step: int) -> tuple[dict[str, int], float]:
    """Wait for `step` of stage 2, kill the trainer.

    Returns (the producers at that time, Unix time).
    """
    deadline = time.monotonic() + START_S
    while True:
        s = status.read(run, "trainer")
        if s is not None and s.stage_name == "gpt" and s.step >= step:
            before = producers(run)
            os.kill(s.pid, signal.SIGKILL)
            return before, time.time()
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(
                f"no step {step} of stage 2: launch.py"
                f" {'ended' if process.poll() is not None else 'is too slow'}"
            )
        time.sleep(0.01)


def report(run: Path, before: dict[str, int], after: dict[str, int], at: float) -> dict:
    """What the run's own files say."""
    lines = ledger.read(run / "ledger.jsonl")
    where = next(i for i, line in enumerate(lines) if "resumed_from" in line)
    steps = ledger.fold(lines)  # raises if one is missing
    events = [json.loads(line) for line in (run / "channel.jsonl").read_text().splitlines()]
    last = max(e["gen"] for e in events if e["time"] > at)
    first = {
        kind: next(e["time"] for e in events if e["gen"] == last and e["kind"] == kind)
        for kind in ("open", "lease", "data")
    }
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = next(r["time"] for r in records if r["time"] > at and "step_ms" in r)
    return {
        "producers_before": before,
        "producers_after": after,
        "resumed_from": lines[where]["resumed_from"],
        "first_step": lines[where + 1]["step"],
        "steps_in_the_ledger": len(steps),
        "killed_to_first_step_s": round(trained - at, 1),
        "killed_to_open_s": round(first["open"] - at, 1),
        "lease_to_first_batch_ms": round(1e3 * (first["data"] - first["lease"]), 1),
    }


def main() -> int:
    """Command line."""
    p = parser(__doc__)
    p.add_argument("--kill-at", type=int, default=50)
    args = p.parse_args()
    run, command = launch_command(
        args, args.kill_at + 30, "--num-producers", "2", "train.save_every=20", "samples.count=0"
    )
    process = subprocess.Popen(command, env={**os.environ, "XTTS_CHANNEL_LOG": "1"})
    try:
        before, at = killed(process, run, args.kill_at)
        after, deadline = before, time.monotonic() + START_S
        while process.poll() is None:
            after = producers(run) or after  # those that lived to the end
            if time.monotonic() > deadline:
                raise SystemExit(
                    f"the run has not ended {START_S:.0f} s after the kill; see {run}/logs"
                )
            time.sleep(0.2)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)
    figures = {
        "command": " ".join(command),
        "exit": process.returncode,
        **report(run, before, after, at),
    }
    console = Console(width=140, markup=False)
    for key, value in figures.items():
        console.print(f"{key}: {value}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))
    held = (
        figures["producers_before"] == figures["producers_after"]
        and figures["first_step"] == figures["resumed_from"] + 1
    )
    return int(
        not (process.returncode == 0 and held and figures["lease_to_first_batch_ms"] <= 1000)
    )


if __name__ == "__main__":
    sys.exit(main())
