"""A plan of ten million utterances: how long opening it takes and a batch of it, and in how much
memory.

    python tests/bench/plan.py [--utterances 10000000] [--batches 2000] [--json FILE]

The plan is written once and read in processes of their own, as a producer reads it: opened, then
asked for batches of numbers that are drawn over ten epochs. The page cache is warm.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from common.data.buckets import make_buckets
from common.data.plan import Plan, PlanRows, write_plan

KINDS = {  # sampling, conditioning clips of others
    "epoch": ("epoch", False),
    "balanced": ("balanced", False),
    "epoch, prompts of the speaker": ("epoch", True),
}
LANGUAGES, SPEAKERS = 17, 10000


def write(folder: Path, n: int, batch_size: int) -> dict[str, float]:
    """Write a plan of each kind; the seconds that each took."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(10, 200, n).astype(np.int32)
    codes = rng.integers(20, 250, n).astype(np.int32)
    buckets, of = make_buckets(
        tokens,
        codes,
        num_buckets=8,
        batch_size=batch_size,
        positions_per_batch=None,
        num_latents=32,
    )
    language = rng.integers(0, LANGUAGES, n).astype(np.int16)
    speaker = rng.integers(0, SPEAKERS, n).astype(np.int32)
    ids, took = np.arange(n), {}
    for number, (kind, (sampling, prompts)) in enumerate(KINDS.items()):
        start = time.perf_counter()
        rows = PlanRows(ids, of, language, speaker, (ids, speaker) if prompts else None)
        write_plan(folder / str(number), "train", rows, seed=1, sampling=sampling, buckets=buckets)
        took[kind] = time.perf_counter() - start
    return took


def measure(folder: Path, batches: int) -> dict[str, float]:
    """Of a plan in this process: milliseconds, and MiB that it added to what is resident."""
    import psutil

    me = psutil.Process()
    before = me.memory_info()
    start = time.perf_counter()
    plan = Plan.open(folder, "train")
    opened = time.perf_counter() - start
    numbers = np.random.default_rng(1).integers(0, 10 * plan.batches_per_epoch, batches)
    times = []
    for g in numbers:
        start = time.perf_counter()
        plan.batch(int(g))
        times.append(time.perf_counter() - start)
    after = me.memory_info()
    shared = (after.shared - before.shared) / 2**20
    return {
        "open_ms": opened * 1e3,
        "first_ms": times[0] * 1e3,
        "median_ms": float(np.median(times)) * 1e3,
        "p99_ms": float(np.quantile(times, 0.99)) * 1e3,
        "own_mib": (after.rss - before.rss) / 2**20 - shared,
        "mapped_mib": shared,
    }


def main() -> int:
    """Command line."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--utterances", type=int, default=10_000_000)
    p.add_argument("--batches", type=int, default=2000)
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--json", type=Path)
    p.add_argument("--measure", type=Path, help=argparse.SUPPRESS)  # the child's side
    args = p.parse_args()
    if args.measure:
        sys.stdout.write(json.dumps(measure(args.measure, args.batches)))
        return 0
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        took = write(folder, args.utterances, args.batch_size)
        for number, kind in enumerate(KINDS):
            child = [sys.executable, __file__, "--batches", str(args.batches)]
            done = subprocess.run(
                [*child, "--measure", str(folder / str(number))],
                capture_output=True,
                text=True,
                check=True,
                timeout=600,
            )
            row = found[kind] = {"write_s": took[kind], **json.loads(done.stdout)}
            sys.stdout.write(
                f"{kind}: written in {row['write_s']:.1f} s, opened in {row['open_ms']:.1f} ms,"
                f" batch {row['median_ms']:.2f} ms (median; p99 {row['p99_ms']:.2f}, first"
                f" {row['first_ms']:.1f}), memory {row['own_mib']:.0f} MiB of its own,"
                f" {row['mapped_mib']:.0f} MiB mapped\n"
            )
            sys.stdout.flush()
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
