"""Two trainers on two hosts, which are network namespaces with one file system: networks on the
CPU, and a cable that is pulled.

    python -m tests.bench.far_trainers [--away 30]

Needs root and `ip` (iproute2). The two make 12 steps of `tiny` networks, whose end must equal that
of one trainer to the bit: gradients travel between the hosts. Then, with arithmetic, the cable is
pulled in the middle of the run for longer than `trainers.timeout_s`: both trainers must name the
other, start again, and bring the run to its end, exact. Prints the figures as JSON; exit code 1
where something did not hold.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common.run.folder import RunFolder
from tests.bench.two_hosts import HERE, NET, THERE, down, ip, on, up
from tests.support import tiny_runs, together
from tests.support.arithmetic_runs import assert_exact
from tests.support.chaos import LAUNCH, Driver, resumes
from tests.support.corpora import make_corpus
from tests.support.gates import LAG

AT = f"tcp://{NET}.1:5712"
PULLED_AT = 20  # the step after which the cable is pulled
TIMEOUT_S = 8.0


class Hosts(Driver):
    """launch.py on one host, `launch.py trainer` on the other."""

    host = HERE

    def _spawn(self, *args: str) -> subprocess.Popen:
        out = open(self.config.parent / f"console-{self.host}.log", "ab")  # noqa: SIM115 - the child's
        return subprocess.Popen(
            on(self.host, *LAUNCH, *args),
            env=self.env,
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def add_trainer(self) -> None:
        """Rank 1, on the other host."""
        self.host = THERE
        self.extra.append(self._spawn("trainer", "--run", str(self.run), "--rank", "1"))
        self.host = HERE


def networks(root: Path, corpus: Path) -> dict:
    """One trainer, then two: seconds of each, and whether they come to the same bits."""
    results, seconds = [], []
    for trainers in ({"count": 1}, {"count": 2, "bind": AT, "timeout_s": 120.0}):
        folder = root / f"n{trainers['count']}"
        tree = tiny_runs.tiny_tree(folder, corpus) | {"trainers": trainers}
        driver, began = Hosts.create(folder, tree, 0, 0), time.monotonic()
        try:
            driver.launch()
            if trainers["count"] > 1:
                driver.add_trainer()
            driver.finish()
        finally:
            driver.kill_everything()
        seconds.append(round(time.monotonic() - began, 1))
        results.append(tiny_runs.result(RunFolder(driver.run)))
    tiny_runs.assert_equal(results[1], results[0])
    told = json.loads((driver.run / "sum.json").read_text())
    return {"seconds": seconds, "sum": told, "equal_to_the_bit": True}


def cable_pulled(root: Path, corpus: Path, away_s: float) -> dict:
    """The run's end after the cable was away, and what the first trainer said of it."""
    more = {"trainers__bind": AT, "trainers__timeout_s": TIMEOUT_S, "trainers__join_s": 120.0}
    tree = together.tree(root / "away", corpus, 2, 1, dvae__max_steps=4, **more)
    driver = Hosts.create(root / "away", tree, step_ms=2, make_ms=2)
    try:
        driver.gate.limit(2, PULLED_AT + LAG)
        driver.launch()
        driver.add_trainer()
        driver.wait_for(lambda: driver.trained(2) >= PULLED_AT, f"step {PULLED_AT}")
        ip("-n", THERE, "link", "set", "xtts1", "down")
        driver.gate.open()
        time.sleep(away_s)
        ip("-n", THERE, "link", "set", "xtts1", "up")
        began = time.monotonic()
        driver.wait_for(lambda: driver.trained(2) > PULLED_AT + LAG + 1, "a step afterwards")
        again_s = round(time.monotonic() - began, 1)
        driver.finish()
        assert_exact(RunFolder(driver.run))
    finally:
        driver.kill_everything()
    logs = [(driver.run / "logs" / f"{n}.log").read_text() for n in ("trainer", "trainer-1")]
    said = [[x for x in text.splitlines() if "has said nothing" in x] for text in logs]
    return {
        "away_s": away_s,
        "next_step_after_s": again_s,
        "said": [lines[:1] for lines in said],
        "resumes": resumes(driver.run),
        "exact": True,
        "named": all(said),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--away", type=float, default=30.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="far-trainers-") as name:
        root, corpus = Path(name), Path(name) / "corpus"
        make_corpus(corpus, 41, seconds=lambda i: 0.6 + 0.05 * (i % 9))
        up()
        try:
            figures = {"networks": networks(root, corpus)}
            sys.stdout.write(f"{figures}\n")
            sys.stdout.flush()
            figures["cable"] = cable_pulled(root, corpus, args.away)
        finally:
            down()
    sys.stdout.write(json.dumps(figures) + "\n")
    return int(not figures["cable"]["named"])


if __name__ == "__main__":
    sys.exit(main())
