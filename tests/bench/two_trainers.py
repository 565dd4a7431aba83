"""Two trainers on two GPUs against one: utterances/s, step, the share of the sum, both cards' use.

    python -m tests.bench.two_trainers --data DIR --json two_trainers.json

One producer, on the first card. For each `train.accumulate` (2 and 8) one run, which every row goes
on with, as a user would who stops it and starts it on other cards:
    shared       one trainer on the producer's card
    two, DTYPE   two trainers; gradients travel in float32, or in bfloat16
and for the last `train.accumulate`
    apart        one trainer on the second card
    apart again  one trainer goes on where two have ended
Figures are of the second half of a row's steps; `sum ms` is what the sum takes by itself, measured
before the row's first step, and its share of a step; `with waiting` is what the first trainer's
step waits for the sum, and for its own device before it, by the log. Before each checkpoint the
trainers compare digests of their weights, and a row ends with one. Exits 1 if a row fails, a
process holds memory on a card that is not its own, or the ledger has a step missing or twice. With
`--data-gpu cpu --cpu --size tiny` it rehearses.
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
import time
from pathlib import Path

import pynvml
from rich.console import Console
from rich.table import Table

from common.gpu.choose import TRIAL
from tests.bench.owned import dies_with_me
from tests.bench.two_gpus import ROOT, parser, speed, watch
from trainer.history import ledger
from trainer.sum_cost import SumCost

SUM = re.compile(r"the sum took ([\d.]+) ms per step")


def rows(cpu: bool, alone: bool) -> dict[str, list[str]]:
    """Row → what it adds to the command. `alone`: with those of one trainer on the second card."""
    first, second, both = ("cpu",) * 3 if cpu else ("0", "1", "0,1")
    two = ["--model-gpu", both, "--num-trainers", "2"]
    found = {"shared": ["--model-gpu", first]}
    found |= {"apart": ["--model-gpu", second]} if alone else {}
    found["two, float32"] = [*two, "train.reduce_dtype=float32"]
    found["two, bfloat16"] = [*two, "train.reduce_dtype=bfloat16"]
    return found | ({"apart again": ["--model-gpu", second]} if alone else {})


def command(args: argparse.Namespace, run: Path, steps: int, more: list[str]) -> list[str]:
    """As a user would start it."""
    return [
        *(sys.executable, str(ROOT / "launch.py"), "--config", str(ROOT / "configs/ljspeech.yaml")),
        *(f"data.train={args.data}", f"run={run}", f"model.size={args.size}"),
        *("--max-steps", str(steps), "--batch-size", str(args.batch_size)),
        *("--data-gpu", args.data_gpu, "train.eval_at_epoch_end=false", "samples.count=0"),
        *("train.eval_every=1000000", "train.keep=1", f"dvae.max_steps={args.dvae_steps}"),
        *(*more, *args.settings),
    ]


def measure(
    args: argparse.Namespace, run: Path, steps: tuple[int, int], more: list[str], cards: list
) -> dict:
    """A row's figures: of the steps after the first of `steps` to the second, and of what this
    start says in the log.
    """
    log = run / "logs" / "trainer.log"
    said = log.stat().st_size if log.exists() else 0
    began = time.monotonic()
    words = command(args, run, steps[1], more)
    env = {**os.environ, TRIAL: "1"}
    process = subprocess.Popen(words, env=env, preexec_fn=dies_with_me())
    held, busy = watch(process, run, cards)
    figures = {
        "command": " ".join(words[1:]),
        "exit": process.returncode,
        "took_s": round(time.monotonic() - began, 1),
        "held_mb": held,
        "strangers": [name for name, per_card in held.items() if len(per_card) != 1],
    }
    if process.returncode == 0:
        with open(log, errors="replace") as f:
            f.seek(said)
            sums = SUM.findall(f.read())
        ledger.fold(ledger.read(run / "ledger.jsonl"))  # raises if a step is missing or twice
        figures |= speed(run, steps[0]) | {"waited_ms": float(sums[-1]) if sums else None}
        if sums and (cost := SumCost.read(run)) is not None:
            figures["sum_ms"] = 1e3 * cost.seconds
            figures["sum_gb_per_s"] = cost.num_bytes / 1e9 / cost.seconds
            figures["sum_percent"] = 100 * figures["sum_ms"] / figures["ms_per_step_by_clock"]
        figures["busy_percent"] = [round(statistics.mean(b), 1) if b else None for b in busy]
    return figures


def shown(found: dict[str, dict]) -> Table:
    """The rows, each beside its own run's `shared`."""
    columns = ("row", "exit", "utterances/s", "x shared", "ms/step", "sum ms", "% of a step")
    table = Table(*columns, "with waiting", "cards busy, %")
    for name, f in found.items():
        base = found.get(name.split(":")[0] + ": shared", {}).get("utterances_per_s")
        mine = f.get("utterances_per_s")
        known = [mine, mine / base if mine and base else None]
        known += [f.get("ms_per_step_by_clock"), f.get("sum_ms"), f.get("sum_percent")]
        known.append(f.get("waited_ms"))
        cells = ["-" if x is None else f"{x:.2f}" for x in known]
        table.add_row(name, str(f["exit"]), *cells, str(f.get("busy_percent", "-")))
    return table


def main() -> int:
    """Command line."""
    p = parser(__doc__)
    p.add_argument("--steps", type=int, default=40, help="of eight batches; of two, thrice as many")
    p.add_argument("--dvae-steps", type=int, default=4)
    p.add_argument("--accumulate", default="2,8")
    p.add_argument("--rows", help="separated by |; default: all")
    p.add_argument("--cpu", action="store_true", help="rehearse on the CPU")
    p.set_defaults(batch_size=32)
    args = p.parse_args()
    cards = []
    if not args.cpu:
        pynvml.nvmlInit()
        cards = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    console, found = Console(width=150, markup=False), {}
    folder = args.run or Path(tempfile.mkdtemp())
    counts = [int(n) for n in args.accumulate.split(",")]
    for accumulate in counts:
        run, steps, done = folder / str(accumulate), args.steps * (3 if accumulate < 8 else 1), 0
        for name, more in rows(args.cpu, alone=accumulate == counts[-1]).items():
            if args.rows and name not in args.rows.split("|"):
                continue
            row = f"accumulate {accumulate}: {name}"
            settings = [*more, f"train.accumulate={accumulate}"]
            found[row] = measure(args, run, (done, done + steps), settings, cards)
            if args.json:
                args.json.write_text(json.dumps(found, indent=1))
            if found[row]["exit"]:
                break
            done += steps
    console.print(shown(found))
    return int(any(f["exit"] or f["strangers"] for f in found.values()))


if __name__ == "__main__":
    sys.exit(main())
