"""A run killed at each call that changes its folder, and a disk that is full from each of them on.

    python -m tests.bench.disk_faults kill [--step 1] [--first 1]
    python -m tests.bench.disk_faults full [--step 1] [--first 1]

An arithmetic run is created and trained in one process, forked anew for each point. Then, with
nothing in the way, the same is done again: it must come to the plan and the weights of a plain
loop, bit by bit, from the newest finished checkpoint. `full`: the process must end by an error that
says what to do, or with the run done. --step N: only each Nth point. Needs a C compiler.
Prints the figures as JSON; exit code 1 where something did not hold.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from common.system.errors import RunError, disk_refuses
from tests.support.arithmetic_runs import arithmetic_run, assert_exact
from tests.support.corpora import make_corpus
from tests.support.loop_runs import train

LIBRARY = "DISK_FAULTS"
SOURCE = Path(__file__).resolve().parents[1] / "support" / "disk_faults.c"
SETTINGS = {
    "train__max_steps": 12,
    "train__save_every": 4,
    "train__eval_every": 5,
    "dvae__max_steps": 3,
    "dvae__save_every": 2,
    "train__keep": 2,
}
RAN, SAID, OTHER = 0, 10, 11  # how a forked process ends
POINT_S = 120.0


def preloaded() -> ctypes.CDLL:
    """The library, in this process from its start: begun anew with it where it is not."""
    if LIBRARY not in os.environ:
        folder = tempfile.mkdtemp(prefix="disk-faults-")
        file = str(Path(folder) / "faults.so")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", file, str(SOURCE)], check=True)
        more = {LIBRARY: file, "LD_PRELOAD": file}
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **more})
    library = ctypes.CDLL(os.environ[LIBRARY])
    library.disk_fault_calls.restype = ctypes.c_long
    return library


def live(folder: Path) -> None:
    """A run's life in this process: created or resumed, and trained to its end."""
    train(arithmetic_run(folder, 41, **SETTINGS))


def forked(folder: Path, library: ctypes.CDLL, kill_at: int = 0, full_at: int = 0) -> int:
    """`live` in a process of its own; how it ended. What it said is in FOLDER/said."""
    pid = os.fork()
    if pid:
        return _reap(pid)
    said = open(folder / "said", "w")  # noqa: SIM115 - to the process's end
    os.dup2(said.fileno(), 1)
    os.dup2(said.fileno(), 2)
    code = OTHER
    try:
        run = str(folder / "run").encode()
        library.disk_fault_arm(run, ctypes.c_long(kill_at), ctypes.c_long(full_at))
        live(folder)
        code = RAN
    except RunError as e:
        said.write(f"error: {e}\n")
        code = SAID
    except BaseException as e:  # noqa: BLE001 - a process's edge
        refusal = disk_refuses(e)  # as launch.py and the trainer do at their edge
        code = OTHER if refusal is None else SAID
        said.write(f"error: {refusal}\n" if refusal else f"traceback: {type(e).__name__}: {e}\n")
        logging.exception("at the edge")
    finally:
        said.write(f"calls {library.disk_fault_calls()}\n")
        said.flush()
        os._exit(code)


def _reap(pid: int) -> int:
    deadline = time.monotonic() + POINT_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"not over after {POINT_S} s")


def point(folder: Path, library: ctypes.CDLL, kind: str, call: int) -> tuple[str, str]:
    """(how it ended, what is wrong with that)."""
    armed = {f"{kind}_at": call}
    code = forked(folder, library, **armed)
    said = (folder / "said").read_text(errors="replace").splitlines()
    first = next((line for line in said if line.startswith(("error", "traceback"))), "")
    ending = {RAN: "done", SAID: "said", -signal.SIGKILL: "killed"}.get(code, f"ended {code}")
    wrong = "" if code in (RAN, SAID, -signal.SIGKILL) else first
    again = forked(folder, library)
    if again != RAN:
        return ending, f"{wrong} then: {(folder / 'said').read_text(errors='replace')[-600:]}"
    try:
        assert_exact(arithmetic_run(folder, 41, **SETTINGS))
    except AssertionError as e:
        return ending, f"{wrong} then: {e}"
    return ending, wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=("kill", "full"))
    parser.add_argument("--step", type=int, default=1)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no point after these")
    args = parser.parse_args()
    library, began = preloaded(), time.monotonic()
    endings: Counter[str] = Counter()
    wrong = {}
    with tempfile.TemporaryDirectory(prefix="disk-faults-") as name:
        root = Path(name)
        make_corpus(root / "whole" / "corpus", 41, seconds=lambda i: 0.6 + 0.05 * (i % 9))
        code = forked(root / "whole", library)
        said = (root / "whole" / "said").read_text()
        assert code == RAN, said
        total = int(said.split()[-1])
        for call in range(args.first, total + 1, args.step):
            if time.monotonic() - began > args.seconds:
                break
            folder = root / f"at-{call}"
            folder.mkdir()
            shutil.copytree(root / "whole" / "corpus", folder / "corpus")
            ending, why = point(folder, library, args.kind, call)
            endings[ending] += 1
            if why:
                wrong[call] = why
                sys.stdout.write(f"call {call}: {ending}: {why}\n")
                sys.stdout.flush()
            shutil.rmtree(folder)
    figures = {
        "what": args.kind,
        "calls_of_a_life": total,
        "points": sum(endings.values()),
        "endings": endings,
        "wrong": len(wrong),
        "seconds": round(time.monotonic() - began, 1),
    }
    sys.stdout.write(json.dumps(figures) + "\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
