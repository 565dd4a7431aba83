"""The damage matrix: each file of an interrupted run folder × each damage × each way to go on, and
what became of it, as a table: "same weights + refused". Then its keys and a bundle of it.

    python -m tests.bench.damage [--flips 20] [--stage 2] [--part 1/4]
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

from tests.support.damaged_runs import BUNDLE, KEYS, MODES, Case, damages, fate, make_case


class Matrix:
    """What became of the tries."""

    def __init__(self, case: Case, flips: int):
        self.case, self.flips = case, flips
        self.table: dict[str, Counter] = defaultdict(Counter)
        self.wrong: list[str] = []

    def add(self, name: str, modes: dict) -> None:
        """Each damage of a file, in each of the ways."""
        for what, hurt in damages(self.case, name, self.flips):
            for mode in modes:
                self.case.restore()
                hurt()
                try:
                    same = fate(self.case, mode, modes) == "same weights"
                except Exception as e:  # noqa: BLE001 - what is looked for
                    self.wrong.append(f"{name}, {what}, {mode}: {type(e).__name__}: {e}")
                    continue
                self.table[re.sub(r"step-\d+", "step-N", name)][mode, same] += 1

    @property
    def total(self) -> int:
        """How many tries."""
        return sum(sum(c.values()) for c in self.table.values()) + len(self.wrong)


def _ways(name: str) -> dict:
    own = "keys" if name.startswith("keys/") else "bundle" if name == BUNDLE else None
    return MODES if own is None else {own: KEYS[own]}


def main() -> int:
    """The exit code: 1 where a run came to other weights, or an error was no refusal."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--flips", type=int, default=20)
    p.add_argument("--stage", type=int, choices=(1, 2), default=2, help="where the run stops")
    p.add_argument("--part", default="1/1", help="of the files, to share the work")
    args = p.parse_args()
    part, parts = map(int, args.part.split("/"))
    logging.disable(logging.CRITICAL)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        case = make_case(Path(folder), updates=3 if args.stage == 1 else 9)
        matrix = Matrix(case, args.flips)
        for name in case.files()[part - 1 :: parts]:
            matrix.add(name, _ways(name))
            sys.stderr.write(f"{time.monotonic() - began:.0f} s, {matrix.total} tries, {name}\n")
    modes = {**MODES, **KEYS}
    lines = [f"| file | {' | '.join(modes)} |", f"|---|{'---|' * len(modes)}"]
    for name, counts in matrix.table.items():
        cells = [f"{counts[m, True]} + {counts[m, False]}" for m in modes]
        lines.append(f"| `{name}` | {' | '.join(cells)} |".replace("0 + 0", "-"))
    took = time.monotonic() - began
    lines.append(f"{matrix.total} tries, {len(matrix.wrong)} wrong, {took:.0f} s")
    sys.stdout.write("\n".join([*lines, *matrix.wrong]) + "\n")
    return bool(matrix.wrong)


if __name__ == "__main__":
    sys.exit(main())
