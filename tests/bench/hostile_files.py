"""Files made to harm, and good ones with bytes changed: each is read, or refused by type, within
5 s of the processor and 500 MB.

    python -m tests.bench.hostile_files [--mutated 10000] [--seed 1] [--every 1] [--only pth,audio]

Prints a table by who reads the files, and each file that was not; exit code 1 where there is one.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import random
import sys
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

from common.run import bundle
from common.transport.keys import run_keys
from tests.support import hostile_checkpoints, hostile_documents
from tests.support.arithmetic_runs import arithmetic_run
from tests.support.hostile_files import READERS, Fate, attempts
from tests.support.mutated_files import good, mutated

_BATCH = 100
ENDS = {
    "safetensors": ".safetensors",
    "pth": ".pth",
    "audio": ".wav",
    "metadata.jsonl": ".jsonl",
    "segments.json": ".json",
}


class Table:
    """What became of the files."""

    def __init__(self):
        self.counts: dict[str, Counter] = defaultdict(Counter)
        self.worst: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self.bad: list[str] = []

    def add(self, reader: str, name: str, fate: Fate) -> None:
        what = "read" if fate.what == "read" else "refused" if fate.good else "bad"
        self.counts[reader][what] += 1
        worst = self.worst[reader]
        worst[:] = max(worst[0], fate.seconds), max(worst[1], fate.mb)
        if not fate.good:
            self.bad.append(
                f"{reader}, {name}: {fate.what} ({fate.seconds:.1f} s, {fate.mb:.0f} MB)"
            )

    def lines(self) -> Iterable[str]:
        yield "| read as | files | refused by type | read | most s | most MB |"
        yield "|---|---|---|---|---|---|"
        for reader, c in self.counts.items():
            seconds, mb = self.worst[reader]
            yield (
                f"| {reader} | {sum(c.values())} | {c['refused']} | {c['read']} | {seconds:.1f} |"
                f" {mb:.0f} |"
            )
        total = sum(sum(c.values()) for c in self.counts.values())
        yield f"{total} files, {len(self.bad)} not refused as they should be"
        yield from self.bad


def hostile(folder: Path, whole: Path, only: set[str], every: int, table: Table) -> None:
    found = itertools.chain(
        hostile_checkpoints.all_of_them(), hostile_documents.all_of_them(whole, only)
    )
    wanted = [h for h in found if h.reader in only]
    for i, h in enumerate(wanted[::every]):
        end = ".jsonl.gz" if "packed" in h.name else ENDS.get(h.reader, "")
        path = folder / f"h{i}{end}"
        h.make(path)
        table.add(h.reader, h.name, attempts(h.reader, [path])[0])
        if path.is_file() and not path.is_symlink():
            path.unlink()


def changed(folder: Path, whole: Path, only: set[str], count: int, seed: int, table: Table) -> None:
    """`count` files, as many of each kind."""
    files, rng = good(folder, whole), random.Random(seed)
    kinds = [k for k in files if k in only]
    for n, reader in enumerate(kinds):
        left = count // len(kinds) + (n < count % len(kinds))
        while left > 0:
            size = min(_BATCH, left)
            batch = [mutated(rng.choice(files[reader]), rng) for _ in range(size)]
            paths = [folder / f"m{i}{ENDS.get(reader, '')}" for i in range(size)]
            for path, data in zip(paths, batch, strict=True):
                with os.fdopen(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600), "wb") as f:
                    f.write(data)
            for i, fate in enumerate(attempts(reader, paths)):
                table.add(reader, f"seed {seed}, {left - i} left", fate)
            for path in paths:
                path.unlink()
            left -= size


def main() -> int:
    """The exit code."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--mutated", type=int, default=10_000)
    p.add_argument("--every", type=int, default=1, help="of the files made to harm")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--only", default=",".join(READERS))
    args = p.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    only = set(args.only.split(","))
    with tempfile.TemporaryDirectory(prefix="hostile-") as name:
        folder = Path(name)
        run = arithmetic_run(folder / "run", 12, transport__bind="tcp://0.0.0.0:5555")
        run_keys(run.path)
        bundle.write(run, folder / "whole.bundle")
        made, more = Table(), Table()
        hostile(folder, folder / "whole.bundle", only, args.every, made)
        sys.stdout.write("\n".join(["made to harm", "", *made.lines(), "", ""]))
        sys.stdout.flush()
        changed(folder, folder / "whole.bundle", only, args.mutated, args.seed, more)
        sys.stdout.write("\n".join(["bytes changed", "", *more.lines(), ""]))
    return bool(made.bad or more.bad)


if __name__ == "__main__":
    sys.exit(main())
