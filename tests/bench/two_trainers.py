"""Two trainers on two GPUs against one: utterances/s, step, the share of the sum, both cards' use.

    python -m tests.bench.two_trainers --data DIR --json two_trainers.json

Rows, each a run of its own as a user starts it, with one producer on the first card:
    shared       one trainer on the producer's card
    apart        one trainer on the second card
    two, N       two trainers, `train.accumulate` N (2 and 8), in float32 and in bfloat16
`sum ms` is what the meeting and the collective take of a step, by the trainer's log. At the end the
last row's run goes on with one trainer. With `--data-gpu cpu --cpu --size tiny` it rehearses.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import pynvml
from rich.console import Console
from rich.table import Table

from common.gpu.choose import TRIAL
from tests.bench.two_gpus import ROOT, parser, speed, watch

SUM = re.compile(r"the sum took ([\d.]+) ms per step")


def rows(cpu: bool) -> dict[str, list[str]]:
    """Row → what it adds to the command."""
    first, both = ("cpu", "cpu") if cpu else ("0", "0,1")
    second = "cpu" if cpu else "1"
    found = {
        "shared, accumulate 2": ["--model-gpu", first, "train.accumulate=2"],
        "shared, accumulate 8": ["--model-gpu", first, "train.accumulate=8"],
        "apart, accumulate 8": ["--model-gpu", second, "train.accumulate=8"],
    }
    for accumulate in (2, 8):
        for dtype in ("float32", "bfloat16"):
            found[f"two, accumulate {accumulate}, {dtype}"] = [
                *("--model-gpu", both, "--num-trainers", "2"),
                *(f"train.accumulate={accumulate}", f"train.reduce_dtype={dtype}"),
            ]
    return found


def command(args: argparse.Namespace, run: Path, steps: int, more: list[str]) -> list[str]:
    """As a user would start it."""
    return [
        *(sys.executable, str(ROOT / "launch.py"), "--config", str(ROOT / "configs/ljspeech.yaml")),
        *(f"data.train={args.data}", f"run={run}", f"model.size={args.size}"),
        *("--max-steps", str(steps), "--batch-size", str(args.batch_size)),
        *("--data-gpu", args.data_gpu, "train.eval_at_epoch_end=false", "samples.count=0"),
        *(f"dvae.max_steps={args.dvae_steps}", *more, *args.settings),
    ]


def sum_ms(log: str) -> float | None:
    """The last that the first trainer said of it."""
    found = SUM.findall(log)
    return float(found[-1]) if found else None


def measure(
    args: argparse.Namespace, run: Path, steps: int, more: list[str], cards: list, after: int = 0
) -> dict:
    """A row's figures: of the steps after `after`, and of what this start says in the log."""
    log = run / "logs" / "trainer.log"
    said = log.stat().st_size if log.exists() else 0
    process = subprocess.Popen(command(args, run, steps, more), env={**os.environ, TRIAL: "1"})
    held, busy = watch(process, run, cards)
    figures = {"command": " ".join(process.args[1:]), "exit": process.returncode, "held_mb": held}
    if process.returncode == 0:
        with open(log, errors="replace") as f:
            f.seek(said)
            figures |= speed(run, after) | {"sum_ms": sum_ms(f.read())}
        figures["busy_percent"] = [round(statistics.mean(b), 1) if b else None for b in busy]
    return figures


def main() -> int:
    """Command line."""
    p = parser(__doc__)
    p.add_argument("--steps", type=int, default=60)
    p.add_argument("--dvae-steps", type=int, default=4)
    p.add_argument("--cpu", action="store_true", help="rehearse on the CPU")
    p.set_defaults(batch_size=32)
    args = p.parse_args()
    cards = []
    if not args.cpu:
        pynvml.nvmlInit()
        cards = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    console, found = Console(width=150, markup=False), {}
    folder = args.run or Path(tempfile.mkdtemp())
    for number, (name, more) in enumerate(rows(args.cpu).items()):
        found[name] = measure(args, folder / str(number), args.steps, more, cards)
        last = folder / str(number)
    alone = ["--model-gpu", "cpu" if args.cpu else "1", "--num-trainers", "1"]
    found["the last one, resumed with one trainer"] = measure(
        args, last, args.steps + 10, [*alone, *more[4:]], cards, after=args.steps
    )
    table = Table("row", "exit", "utterances/s", "ms/step", "sum ms", "cards busy, %")
    for name, f in found.items():
        known = [f.get(k) for k in ("utterances_per_s", "ms_per_step_by_clock", "sum_ms")]
        shown = ["-" if x is None else f"{x:.1f}" for x in known]
        table.add_row(name, str(f["exit"]), *shown, str(f.get("busy_percent", "-")))
    console.print(table)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return 1 if any(f["exit"] for f in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
