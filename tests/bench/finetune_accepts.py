"""`launch.py finetune` from 40 unsorted recordings to a folder that Coqui's package loads, killed
twice on the way. Run by hand:

    python tests/bench/finetune_accepts.py --coqui venv/bin/python [--work runs/finetune_accepts]

The recordings are Persian ones of the demo corpus: clips with texts in two folders, a long one with
subtitles, and one with nothing. The weights are random, of XTTS's width with two layers, made by
Coqui's own classes (`coqui_accepts.py`). SIGKILL when the run folder is whole, SIGINT after the
first checkpoint, then to the end; then Coqui runs the code of the folder's README.md. Then the same
from nothing, which ends without a folder for Coqui. Prints what was said; exit 1 if it fails.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DEADLINE_S = 3600


def say(line: str) -> None:
    """A line, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def step(*command: str) -> None:
    """A command that has to end well."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    say("\n".join(f"  {line}" for line in done.stdout.splitlines()[-12:]))
    if done.returncode:
        say(done.stderr[-3000:])
        sys.exit(1)


def until(argv: list[str], work: Path, seen: Path | None, how: int) -> int:
    """Start it; the signal once a file is there (None: to the end). Returns the exit code."""
    began = time.monotonic()
    log = work / "log"
    with open(log, "a") as out:
        child = subprocess.Popen(argv, cwd=work, stdout=out, stderr=out)
    try:
        while seen is not None and not list(seen.parent.glob(seen.name)):
            if child.poll() is not None or time.monotonic() - began > DEADLINE_S:
                say(log.read_text()[-4000:])
                sys.exit(f"it ended (exit {child.poll()}) before {seen} was there")
            time.sleep(0.1)
        if seen is not None:
            os.kill(child.pid, how)
        code = child.wait(DEADLINE_S)
    finally:
        child.kill()
    say(f"  exit {code} after {time.monotonic() - began:.0f} s")
    return code


def whole(work: Path, weights: Path | None, more: list[str]) -> None:
    """Killed, interrupted, finished."""
    name = "voice" if weights else "nothing"
    argv = [
        *(sys.executable, str(ROOT / "launch.py"), "finetune", "rec", "--language", "fa"),
        *("--out", name, *(["--weights", str(weights)] if weights else []), *more),
    ]
    run = work / "runs" / name
    say(f"== {' '.join(argv[2:])}")
    assert until(argv, work, run / "identity.json", signal.SIGKILL) == -signal.SIGKILL
    assert until(argv, work, run / "checkpoints" / "step-*", signal.SIGINT) == 130
    assert until(argv, work, None, 0) == 0, (work / "log").read_text()[-4000:]
    assert (run / "report.html").is_file()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--coqui", required=True, help="the interpreter with Coqui's package")
    parser.add_argument("--work", type=Path, default=Path("runs/finetune_accepts"))
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()
    sys.path.append(str(ROOT))
    from producer.corpus.demo import make_demo_corpus
    from tests.support.unsorted import unsorted

    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    unsorted(make_demo_corpus(work / "demo"), work / "rec", "fa")
    coquis = (args.coqui, "-P", str(HERE / "coqui_accepts.py"), "--work", str(work), "--role")
    if not (work / "published" / "model.pth").is_file():
        say("== Coqui: a folder with random weights")
        step(*coquis, "vocabulary")
        step(*coquis, "make")
    length = [f"train.epochs={args.epochs}", "train.save_every=2", "batching.batch_size=2"]
    whole(work, work / "published", [*length, "samples.count=0"])
    say("== Coqui: the code of the folder's README.md")
    step(*coquis, "readme")
    short = ["train.max_steps=30", "train.save_every=10", "dvae.max_steps=20", "dvae.save_every=10"]
    whole(work, None, [*short, "samples.count=1"])
    assert not (work / "nothing").exists()
    say((work / "log").read_text())
    say("ok")


if __name__ == "__main__":
    main()
