"""Everything that two cards can tell, as one document: trainers side by side, the pipeline at real
lengths, a restart, and whose memory is where.

    python -m tests.bench.two_cards --data DIR --json FILE [--parts trainers,lengths,restart,check]
        [--size xtts] [--batch-size 32] [--work FOLDER]

trainers   tests.bench.two_trainers: one card shared, one of its own, two trainers
lengths    tests.bench.pipeline: eight buckets of LJSpeech's lengths, one producer, one trainer,
           against the step fed from memory
restart    tests.bench.restart: eight buckets, two producers, the trainer killed
check      `launch.py check` on both cards and with the cards swapped; a run with them swapped, and
           one with CUDA_VISIBLE_DEVICES as UUIDs (tests.bench.two_gpus, size small)

FILE is written after each part, and keeps the parts that an earlier call wrote. Exits 1 if a part
failed. With `--cpu --size tiny` it rehearses: all but the runs on swapped cards.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.bench.owned import dies_with_me

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("trainers", "lengths", "restart", "check")
LEAVE_S = 30.0  # for a part that is told to end


def bench(name: str, *words: str) -> list[str]:
    """The command of another program of this folder."""
    return [sys.executable, "-m", f"tests.bench.{name}", *words]


def parts(args: argparse.Namespace) -> Iterator[tuple[str, str, list[str], dict[str, str]]]:
    """(part, what of it, command, environment); commands take --json, but for `launch.py`."""
    data, model = ("cpu", "cpu") if args.cpu else ("0", "1")
    common = ["--data", str(args.data), "--batch-size", str(args.batch_size)]
    sized = [*common, "--size", args.size]
    cards = ["--data-gpu", data, "--model-gpu", model]
    trainers = [*sized, "--data-gpu", data, "--run", str(args.work / "two")]
    trainers += ["--cpu"] if args.cpu else []
    trainers += ["--steps", str(args.steps), "--accumulate", args.accumulate]
    yield "trainers", "rows", bench("two_trainers", *trainers, *args.settings), {}
    lengths = ["--make", str(args.clips), "--size", args.size, "--steps", str(args.steps * 8)]
    lengths += ["--batch-size", str(args.batch_size), "--buckets", "8", "--rows", "ours"]
    yield "lengths", "ours", bench("pipeline", *lengths), {}
    restart = [*sized, *cards, "--run", str(args.work / "restart"), "dvae.max_steps=4"]
    yield "restart", "killed", bench("restart", *restart), {}
    check = [sys.executable, "launch.py", "check"]
    yield "check", "both", [*check, *cards], {}
    if not args.cpu:
        swapped = ["--data-gpu", model, "--model-gpu", data]
        yield "check", "swapped", [*check, *swapped], {}
        small = [*common, "--size", "small", "--steps", "60", "dvae.max_steps=4", "samples.count=0"]
        yield "check", "a run, swapped", bench("two_gpus", *small[:-2], *swapped, *small[-2:]), {}
        mask = {"CUDA_VISIBLE_DEVICES": ",".join(reversed(uuids()))}
        yield "check", "a run, UUIDs", bench("two_gpus", *small[:-2], *cards, *small[-2:]), mask


def uuids() -> list[str]:
    """Of all cards, in their order."""
    import pynvml

    pynvml.nvmlInit()
    found = range(pynvml.nvmlDeviceGetCount())
    return [str(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(i))) for i in found]


def run(words: list[str], env: dict[str, str], limit_s: float) -> dict:
    """What a command says: its exit code, its time, its document, else the end of its output."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "document.json"
        whole = words if "launch.py" in words else [*words, "--json", str(file)]
        said_to = Path(folder) / "said.txt"  # a pipe would be held open by what a part started
        with open(said_to, "wb") as out:
            process = subprocess.Popen(
                whole,
                cwd=ROOT,
                env={**os.environ, **env},
                stdout=out,
                stderr=subprocess.STDOUT,
                preexec_fn=dies_with_me(),
            )
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                process.terminate()
                try:
                    process.wait(LEAVE_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        said = said_to.read_text(errors="replace")
        found = {"command": " ".join(words[1:]), "exit": process.returncode}
        found |= {"took_s": round(time.monotonic() - began, 1), "said": said[-6000:]}
        if env:
            found["environment"] = env
        if file.exists():
            found["document"] = json.loads(file.read_text())
    return found


def main() -> int:
    """Command line."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--data", type=Path, required=True)
    p.add_argument("--json", type=Path, required=True)
    p.add_argument("--parts", default=",".join(PARTS))
    p.add_argument("--size", default="xtts")
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--steps", type=int, default=40, help="of eight batches each")
    p.add_argument("--accumulate", default="2,8", help="of the part `trainers`")
    p.add_argument("--clips", type=int, default=1500, help="of the part `lengths`")
    p.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "two_cards")
    p.add_argument("--limit", type=float, default=580.0, help="seconds that a command may take")
    p.add_argument("--cpu", action="store_true", help="rehearse on the CPU")
    p.add_argument("settings", nargs="*", metavar="key=value", help="of the part `trainers`")
    args = p.parse_args()
    wanted = args.parts.split(",")
    if unknown := set(wanted) - set(PARTS):
        p.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    document = json.loads(args.json.read_text()) if args.json.exists() else {}
    failed = False
    for part, what, words, env in parts(args):
        if part not in wanted:
            continue
        found = run(words, env, args.limit)
        document.setdefault(part, {})[what] = found
        args.json.write_text(json.dumps(document, indent=1))
        failed = failed or found["exit"] != 0
        sys.stdout.write(
            f"{part}, {what}: exit {found['exit']}, {found['took_s']} s\n{found['said'][-1500:]}\n"
        )
        sys.stdout.flush()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
