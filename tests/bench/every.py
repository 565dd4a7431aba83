"""Every figure of docs/measured.md that needs GPUs, in one command: the benchmarks one after
another, on as many cards as there are
(CUDA_VISIBLE_DEVICES chooses among them).

    python -m tests.bench.every --data DIR --out OUT [--seconds 560] [--only check,step]
        [--cards 2] [--tiny]

Benchmarks of one card run on the cards side by side, those of two wait for both. Each has a limit
and is ended when that is over; OUT holds per benchmark its printed output (NAME.txt) and its
figures (NAME.json). One that OUT has whole (NAME.done) is not run again, so that the same command,
given again, goes on. DIR: a corpus; 32 clips are enough. --tiny: the smallest size and few steps,
to rehearse on a machine without GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.bench.owned import dies_with_me

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Piece:
    """One benchmark."""

    name: str
    cards: int
    seconds: float  # at most
    command: list[str]
    process: subprocess.Popen | None = None
    on: list[int] = field(default_factory=list)
    began: float = 0.0
    took: float = 0.0
    state: str = "waits"


def pieces(args: argparse.Namespace, cards: int) -> list[Piece]:
    """All benchmarks, the most important ones first; `cards`: how many GPUs there are."""
    size, out, python = ("tiny" if args.tiny else "xtts"), args.out, sys.executable

    def few(n, m):
        return str(m if args.tiny else n)

    def step(name: str, seconds: float, rows: str, *more: str) -> Piece:
        steps = ["--size", size, "--steps", few(30, 5)]
        return Piece(
            name,
            1,
            seconds,
            [
                python,
                "-m",
                "tests.bench.step",
                "--rows",
                rows,
                *steps,
                "--json",
                f"{out}/{name}.json",
                *more,
            ],
        )

    learn = [python, "-m", "tests.bench.precision", "--data", args.data]
    pipeline = [
        python,
        "tests/bench/pipeline.py",
        "--size",
        size,
        "--steps",
        few(300, 20),
        "--batch-size",
        few(32, 4),
    ]
    pipeline += ["--make", few(1500, 24)]
    # Kernels one by one: a CUDA graph is written anew when a buffer lies elsewhere than before,
    # which it never does in `step`.
    launches = [
        "bash",
        "-c",
        'XLA_FLAGS="$XLA_FLAGS --xla_gpu_enable_command_buffer=" exec "$0" "$@"',
    ]
    two = (
        ["--data-gpu", "cpu", "--model-gpu", "cpu"]
        if cards == 0
        else ["--data-gpu", "0", "--model-gpu", str(min(1, cards - 1))]
    )
    real = ["--data", args.data, "--size", size, "--batch-size", few(16, 4), *two]
    plain = "torch|bf16 fused|bf16 plain|tf32 plain|fp32 plain"
    variants = (
        "ours|ours, cublaslt outside graphs|ours, cublaslt outside graphs, weight copies|ours,"
        " cublaslt|ours, narrow residual"
    )
    levers = (
        "ours|ours, joint qkv|ours, not lean|ours, stateless dropout|ours, attention dropout|ours,"
        " embedding by matmul|ours, no dropout|ours, 408 positions|ours, 416 positions|ours, 448"
        " positions"
    )
    flags = (
        "ours|ours, triton gemm|ours, no command buffers|ours, latency hiding|ours, triton"
        " fusions|ours, triton fusions of several outputs|ours, wide loads|ours, autotune level 2"
    )
    caches = "ours, cold cache|ours, warm cache|ours, warm autotuning"

    def capped(batch, gb):
        return ["--batch", few(batch, 2), "--memory-gb", str(gb)]

    small = [
        "--size",
        "tiny" if args.tiny else "small",
        "--steps",
        few(800, 30),
        "--learning-rate",
        "8e-4",
        "--ways",
        "bf16,tf32",
    ]
    return [
        Piece("pipeline", 2, 700,
            [*pipeline, "--rows", "ours,shared,cached", "--json", f"{out}/pipeline.json"]),
        Piece("pipeline_launches", 2, 500,
            [*launches, *pipeline, "--rows", "ours", "--json", f"{out}/launches.json"]),
        step("ours", 300, "ours|gemm ceiling", "--batch", few(32, 4), "--profile",
            f"{out}/kernels"),
        step("variants", 500, variants, "--batch", few(32, 4)),
        Piece("check", 1, 200,
            [python, "-m", "tests.bench.step", "--check", "--size", size, "--layers", few(30, 2)]),
        Piece("check_gpus", 2, 200, [python, "launch.py", "check", *two]),
        Piece("two_gpus", 2, 400,
            [python, "tests/bench/two_gpus.py", *real, "--steps", few(200, 20), "--json",
                f"{out}/two_gpus.json"]),
        Piece("restart", 2, 500,
            [python, "tests/bench/restart.py", *real, "--json", f"{out}/restart.json"]),
        step("saving", 240, "ours, saving", "--batch", few(32, 4)),
        step("baselines", 1000, f"ours|{plain}", "--batch", few(32, 4)),
        *([step("coqui", 300, "coqui fp32|coqui tf32|coqui bf16", "--batch", "32", "--coqui",
            args.coqui)] if args.coqui else []),
        step("batches", 500, "ours", "--batch", few(16, 2) if args.tiny else "8,16,24,48"),
        step("card_24gb", 300, "ours, recompute", *capped(112, 22.5)),
        step("card_24gb_kept", 300, "ours", *capped(32, 22.5)),
        step("card_16gb", 300, "ours, recompute", *capped(64, 14.5)),
        step("card_12gb", 300, "ours, recompute", *capped(32, 10.5)),
        Piece("learn_xtts", 1, 420,
            [*learn, "--size", size, "--steps", few(300, 25), "--json", f"{out}/learn_xtts.json"]),
        Piece("learn_small", 1, 280,
            [*learn, *small, "--batch-size", "8", "--json", f"{out}/learn_small.json"]),
        step("caches", 500, caches, "--batch", few(32, 4)),
        step("levers", 700, levers, "--batch", few(32, 4), "--layers", few(4, 2)),
        step("flags", 700, flags, "--batch", few(32, 4), "--layers", few(4, 2)),
        Piece("features", 1, 120,
            [python, "tests/bench/features.py", "--size", size, "--json", f"{out}/features.json"]),
    ]  # fmt: skip


def start(piece: Piece, out: Path, real: list[str], left: float) -> None:
    """Run a piece on its cards."""
    from common.gpu.choose import Device
    from common.gpu.xla_env import xla_env

    visible = ",".join(real[i] for i in piece.on) if real else "-1"
    env = {
        **os.environ,
        **(xla_env(os.environ, Device("gpu")) if real else {}),
        "CUDA_VISIBLE_DEVICES": visible,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    piece.seconds = min(piece.seconds, left)
    command = [
        *piece.command,
        *(
            ["--max-seconds", f"{piece.seconds - 5:.0f}"]
            if "--rows" in piece.command and "-m" in piece.command
            else []
        ),
    ]
    with (out / f"{piece.name}.txt").open("a") as log:
        piece.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=dies_with_me(),
        )
    piece.began, piece.state = time.monotonic(), "runs"


def poll(piece: Piece, out: Path) -> None:
    """Notice a piece's end, or end it."""
    piece.took = time.monotonic() - piece.began
    code = piece.process.poll()
    if code is None and piece.took > piece.seconds:
        os.killpg(piece.process.pid, signal.SIGKILL)
        piece.process.wait()
        piece.state = "out of time"
    elif code is not None:
        piece.state = "done" if code == 0 else f"exit {code}"
        if code == 0:
            (out / f"{piece.name}.done").write_text(f"{piece.took:.0f} s\n")


def run(chosen: list[Piece], args: argparse.Namespace, cards: int, real: list[str]) -> None:
    """All of them, as cards become free, until the time is over."""
    began, free = time.monotonic(), list(range(cards))
    while any(p.state in ("waits", "runs") for p in chosen):
        left = args.seconds - (time.monotonic() - began)
        for p in chosen:
            if p.state == "waits" and left < 45:
                p.state = "not begun"
            elif p.state == "waits" and p.cards <= len(free):
                p.on, free = free[: p.cards], free[p.cards :]
                start(p, args.out, real, left)
            elif p.state == "waits" and p.cards > 1:
                break  # it is next: what comes after it must not take the cards that it waits for
        time.sleep(0.5)
        for p in chosen:
            if p.state == "runs":
                poll(p, args.out)
                free += p.on if p.state != "runs" else []


def main() -> int:
    """Command line."""
    q = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    q.add_argument("--data", required=True)
    q.add_argument("--out", type=Path, required=True)
    q.add_argument("--seconds", type=float, default=86400)
    q.add_argument("--only", help="names, separated by commas, in the order in which they run")
    q.add_argument("--coqui", metavar="PYTHON", help="one that has coqui-tts, for its rows")
    q.add_argument("--cards", type=int, help="use so many of them")
    q.add_argument("--tiny", action="store_true")
    args = q.parse_args()
    from common.gpu.listing import list_gpus

    args.out = args.out.resolve()
    args.data = str(Path(args.data).resolve())
    args.out.mkdir(parents=True, exist_ok=True)
    real = [g.uuid for g in list_gpus().gpus]
    if real and os.environ.get("CUDA_VISIBLE_DEVICES"):
        real = [entry.strip() for entry in os.environ["CUDA_VISIBLE_DEVICES"].split(",")]
    if not real and not args.tiny:
        q.error("no GPU here; --tiny rehearses without one")
    cards = min(args.cards or max(1, len(real)), max(1, len(real)))
    every = {p.name: p for p in pieces(args, min(cards, len(real)))}
    names = args.only.split(",") if args.only else list(every)
    if unknown := [n for n in names if n not in every]:
        q.error(f"no benchmark {', '.join(unknown)}; there are: {', '.join(every)}")
    chosen = [every[n] for n in names if not (args.out / f"{n}.done").exists()]
    for p in chosen:
        if real and p.cards > cards:
            p.state = "needs two cards"
        p.cards = min(p.cards, cards)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through `finally`, as Ctrl-C goes
    try:
        run(chosen, args, cards, real)
    finally:
        for p in chosen:
            if p.process is not None and p.process.poll() is None:
                os.killpg(p.process.pid, signal.SIGKILL)
    table = Table("benchmark", "cards", "seconds", "how it ended", "last line")
    for p in chosen:
        text = args.out / f"{p.name}.txt"
        lines = text.read_text().strip().splitlines() if text.exists() else []
        table.add_row(
            p.name,
            ",".join(map(str, p.on)),
            f"{p.took:.0f}",
            p.state,
            lines[-1][:90] if lines else "",
        )
    Console(width=None if sys.stdout.isatty() else 160, markup=False).print(table)
    (args.out / "every.json").write_text(
        json.dumps(
            {p.name: {"state": p.state, "seconds": round(p.took, 1)} for p in chosen}, indent=1
        )
    )
    return int(any(p.state != "done" for p in chosen))


if __name__ == "__main__":
    sys.exit(main())
