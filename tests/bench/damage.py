"""The damage matrix: each file of an interrupted run folder × each damage × each way to go on, and
what became of it, as a table: "same weights + refused".

    python -m tests.bench.damage [--flips 20] [--stage 2]
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

from tests.support.damaged_runs import MODES, damages, fate, make_case


def main() -> int:
    """The exit code: 1 where a run came to other weights, or an error was no refusal."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--flips", type=int, default=20)
    p.add_argument("--stage", type=int, choices=(1, 2), default=2, help="where the run stops")
    args = p.parse_args()
    logging.disable(logging.CRITICAL)
    began, wrong = time.monotonic(), []
    table: dict[str, Counter] = defaultdict(Counter)
    with tempfile.TemporaryDirectory() as folder:
        case = make_case(Path(folder), updates=3 if args.stage == 1 else 9)
        for name in case.files():
            for what, hurt in damages(case, name, args.flips):
                for mode in MODES:
                    case.restore()
                    hurt()
                    try:
                        same = fate(case, mode) == "same weights"
                    except Exception as e:  # noqa: BLE001 - what is looked for
                        wrong.append(f"{name}, {what}, {mode}: {type(e).__name__}: {e}")
                        continue
                    table[re.sub(r"step-\d+", "step-N", name)][mode, same] += 1
    lines = [f"| file | {' | '.join(MODES)} |", f"|---|{'---|' * len(MODES)}"]
    for name, counts in table.items():
        cells = [f"{counts[m, True]} + {counts[m, False]}" for m in MODES]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    total = sum(sum(c.values()) for c in table.values()) + len(wrong)
    lines.append(f"{total} tries, {len(wrong)} wrong, {time.monotonic() - began:.0f} s")
    sys.stdout.write("\n".join([*lines, *wrong]) + "\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
