"""Several trainers under random kills: nothing lost, nothing twice, and the end of one trainer.

    python -m tests.bench.ranks --schedules 20
    python -m tests.bench.ranks --networks 60

Each schedule kills trainers, producers and launch.py of a run of three trainers and two producers
at random moments (arithmetic in place of the networks); a quarter of them stop a trainer, too, as
a debugger does. Afterwards the ledgers are the plans, and the weights those of a plain loop.

`--networks STEPS`: runs of size tiny (one layer, accumulate 6) with 1, 2 and 3 trainers, each with
1 and 2 producers. Their ledgers are equal in numbers and digests, and with as many trainers the
weights are equal to the bit; how far the losses of different numbers of trainers are apart is told.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from common.run.folder import RunFolder
from tests.support import tiny_runs, together
from tests.support.arithmetic_runs import assert_exact
from tests.support.chaos import Driver, play, resumes
from tests.support.corpora import make_corpus


def run_one(folder: Path, corpus: Path, seed: int, trainers: int) -> tuple[int, int, float]:
    """(events, resumes, seconds) of a schedule. AssertionError: with the run's story."""
    schedule = together.any_schedule(seed, 4)
    tree = together.tree(folder, corpus, trainers, 2, trainers__timeout_s=6.0, dvae__max_steps=4)
    driver = Driver.create(folder, tree, step_ms=2, make_ms=2)
    began = time.monotonic()
    try:
        play(driver, schedule, act=together.hurt_ranks)
        try:
            assert_exact(RunFolder(driver.run))
        except Exception as e:
            raise AssertionError(driver.story(str(e))) from e
    finally:
        driver.kill_everything()
    return len(schedule), len(resumes(driver.run)), time.monotonic() - began


def with_networks(console: Console, folder: Path, corpus: Path, steps: int) -> int:
    """0: all ledgers are equal, and the weights of as many trainers."""
    found: dict[tuple[int, int], list] = {}
    for trainers, producers in itertools.product((1, 2, 3), (1, 2)):
        tree = tiny_runs.tiny_tree(folder / f"{trainers}x{producers}", corpus, producers)
        tree["train"] |= {"accumulate": 6, "max_steps": steps, "save_every": 20, "eval_every": 20}
        tree["trainers"] = {"count": trainers, "timeout_s": 120.0}
        driver = Driver.create(folder / f"{trainers}x{producers}", tree, 0, 0)
        began = time.monotonic()
        try:
            driver.launch()
            driver.finish()
        finally:
            driver.kill_everything()
        result = found[trainers, producers] = tiny_runs.result(RunFolder(driver.run))
        (*_, (lines, tensors)), first = result, found[trainers, 1][-1]
        ids, one = ([line[:4] for line in r[-1][0]] for r in (result, found[1, 1]))
        losses = zip(lines, found[1, 1][-1][0], strict=True)
        apart = max(abs(a[-1] - b[-1]) / abs(b[-1]) for a, b in losses)
        same = ids == one and tensors == first[1]
        console.print(
            f"{trainers} trainers, {producers} producers: {len(lines)} steps, ledger"
            f" {'equal' if ids == one else 'DIFFERS'}, weights of {trainers} trainers"
            f" {'equal' if tensors == first[1] else 'DIFFER'}, losses within {apart:.1e} of one"
            f" trainer's; {time.monotonic() - began:.0f} s"
        )
        if not same:
            return 1
    return 0


def main() -> int:
    """Command line."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--schedules", type=int, default=20)
    p.add_argument("--first-seed", type=int, default=0)
    p.add_argument("--trainers", type=int, default=3)
    p.add_argument("--networks", type=int, metavar="STEPS", help="of the networks, instead")
    args = p.parse_args()
    console, failed = Console(width=110, markup=False), []
    with tempfile.TemporaryDirectory() as folder:
        corpus = make_corpus(Path(folder) / "corpus", 41, seconds=lambda i: 0.6 + 0.05 * (i % 9))
        if args.networks:
            return with_networks(console, Path(folder), corpus, args.networks)
        for seed in range(args.first_seed, args.first_seed + args.schedules):
            try:
                events, resumed, seconds = run_one(
                    Path(folder) / str(seed), corpus, seed, args.trainers
                )
                said = f"{events} events, resumed {resumed} times, {seconds:.0f} s: as planned"
                console.print(f"schedule {seed}: {said}")
            except AssertionError as e:
                failed.append(seed)
                console.print(f"schedule {seed}: FAILED: {e}")
    console.print(
        f"{args.schedules - len(failed)} of {args.schedules} as planned; failed: {failed}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
