"""A real run on two GPUs, watched from outside: which process holds memory on which card, and how
fast it is.

    python tests/bench/two_gpus.py --data DIR [--size xtts] [--steps 200] [--batch-size 16]
        [--json FILE] [key=value …]

Starts launch.py as a user would, asks NVML twice a second for every compute process and the cards'
utilisation, and prints per process the memory it held on each card, then ms/step, utterances/s and
data-wait % from the run's own metrics. Exits 1 if the run failed or a process held memory on a card
that is not its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pynvml
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from common.system import status  # noqa: E402


def holdings(cards: list) -> dict[int, dict[int, float]]:
    """pid → card → MB, now."""
    found: dict[int, dict[int, float]] = {}
    for i, card in enumerate(cards):
        for p in pynvml.nvmlDeviceGetComputeRunningProcesses(card):
            found.setdefault(p.pid, {})[i] = (p.usedGpuMemory or 0) / 2**20
    return found


def watch(process: subprocess.Popen, run: Path, cards: list) -> tuple[dict, list[list[float]]]:
    """({name: {card: most MB}}, utilisation samples per card taken while the trainer trains) until
    the process ends.
    """
    most: dict[str, dict[int, float]] = {}
    busy: list[list[float]] = [[] for _ in cards]
    while process.poll() is None:
        names = {s.pid: s.name for s in status.read_all(run)}
        for pid, per_card in holdings(cards).items():
            for card, mb in per_card.items():
                entry = most.setdefault(names.get(pid, f"pid {pid}"), {})
                entry[card] = max(entry.get(card, 0.0), mb)
        trainer = status.read(run, "trainer")
        if trainer is not None and trainer.phase == "training" and trainer.stage_name == "gpt":
            for i, card in enumerate(cards):
                busy[i].append(pynvml.nvmlDeviceGetUtilizationRates(card).gpu)
        time.sleep(0.5)
    return most, busy


def speed(run: Path, after: int = 0) -> dict:
    """Figures of the second half of stage 2's steps after `after`, from metrics.jsonl."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in records if "step_ms" in r and r["step"] > after]
    late = steps[len(steps) // 2 :]
    span_s = late[-1]["time"] - late[0]["time"]
    return {
        "steps": len(steps),
        "first_loss": steps[0]["loss"],
        "last_loss": steps[-1]["loss"],
        "ms_per_step_median": statistics.median(r["step_ms"] for r in late),
        "ms_per_step_by_clock": 1e3 * span_s / (len(late) - 1),
        "utterances_per_s": sum(r["rows"] for r in late[1:]) / span_s,
        "data_wait_percent": (
            100 * sum(r["wait_ms"] for r in late) / sum(r["step_ms"] for r in late)
        ),
    }


def parser(doc: str) -> argparse.ArgumentParser:
    """The arguments that `launch_command` takes."""
    p = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--data", required=True)
    p.add_argument("--size", default="xtts")
    p.add_argument("--batch-size", type=int, default=16)
    p.add_argument("--data-gpu", default="0")
    p.add_argument("--model-gpu", default="1")
    p.add_argument("--run", type=Path)
    p.add_argument("--json", type=Path)
    p.add_argument("settings", nargs="*")
    return p


def launch_command(args: argparse.Namespace, steps: int, *more: str) -> tuple[Path, list[str]]:
    """(run folder, command) of a run of so many steps as a user would start it."""
    run = args.run or Path(tempfile.mkdtemp()) / "run"
    command = [
        sys.executable,
        str(ROOT / "launch.py"),
        "--config",
        str(ROOT / "configs/ljspeech.yaml"),
        f"data.train={args.data}",
    ]
    command += [
        f"run={run}",
        f"model.size={args.size}",
        "--max-steps",
        str(steps),
        "--batch-size",
        str(args.batch_size),
    ]
    # Of few clips an epoch is over in a moment: the evaluations after each would be what is timed.
    command += [
        "--data-gpu",
        args.data_gpu,
        "--model-gpu",
        args.model_gpu,
        "train.eval_at_epoch_end=false",
        *more,
        *args.settings,
    ]
    return run, command


def main() -> int:
    """Command line."""
    p = parser(__doc__)
    p.add_argument("--steps", type=int, default=200)
    args = p.parse_args()
    run, command = launch_command(args, args.steps)
    pynvml.nvmlInit()
    cards = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    before = [pynvml.nvmlDeviceGetMemoryInfo(c).used / 2**20 for c in cards]
    process = subprocess.Popen(command)
    most, busy = watch(process, run, cards)
    console = Console(width=140, markup=False)
    table = Table("process", "own device", *[f"MB on GPU {i}" for i in range(len(cards))])
    own = {s.name: s.device for s in status.read_all(run)}
    for name, per_card in sorted(most.items()):
        table.add_row(
            name,
            own.get(name, "?"),
            *[f"{per_card[i]:.0f}" if i in per_card else "none" for i in range(len(cards))],
        )
    console.print(table)
    strangers = [name for name, per_card in most.items() if len(per_card) != 1]
    figures = {
        "command": " ".join(command),
        "exit": process.returncode,
        "held_mb": most,
        "mb_before": before,
    }
    figures["names"] = [str(pynvml.nvmlDeviceGetName(c)) for c in cards]
    if process.returncode == 0:
        figures |= speed(run)
        figures["utilisation_percent"] = [round(statistics.mean(b), 1) if b else None for b in busy]
    for key, value in figures.items():
        console.print(f"{key}: {value}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))
    return 1 if process.returncode or strangers or not most else 0


if __name__ == "__main__":
    sys.exit(main())
