"""How long a run takes to its first step of stage 2: begun, resumed, begun again on the same
settings, and after its trainer is SIGKILLed.

    python -m tests.bench.start --data DIR --runs FOLDER [--rows begun,resumed,again]
        [--seconds 12] [--json FILE] [-- LAUNCH'S ARGUMENTS]

Starts launch.py as a user would. Each row is printed when it is there: seconds from the start of
launch.py, or from the killing, to the time at which the ledger's next step had ended. What
launch.py says goes to FOLDER/<row>.log. Exit 1 if a row could not be measured.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from common.system import status  # noqa: E402
from tests.bench.owned import dies_with_me  # noqa: E402


def steps(run: Path) -> list[dict]:
    """The finished steps of stage 2, as metrics.jsonl has them."""
    found = []
    path = run / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except ValueError:  # a torn last line
            continue
        if "step_ms" in record:
            found.append(record)
    return found


def wait_for_step(run: Path, process: subprocess.Popen, after: float, limit_s: float) -> float:
    """The time at which the first step after the time `after` had ended."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        new = [r["time"] for r in steps(run) if r["time"] > after]
        if new:
            return new[0]
        if process.poll() is not None:
            raise SystemExit(f"launch.py ended with {process.returncode} before a step")
        time.sleep(0.1)
    raise SystemExit(f"no step within {limit_s:.0f} s")


def measure(name: str, run: Path, args: argparse.Namespace, kill: bool) -> dict:
    """Start, train for a while, kill the trainer if `kill`, train again, and end by Ctrl-C."""
    began = time.time()
    command = [sys.executable, "launch.py", *args.launch, f"data.train={args.data}", f"run={run}"]
    with open(args.runs / f"{name}.log", "wb") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, preexec_fn=dies_with_me()
        )
    row = {"row": name}
    try:
        first = wait_for_step(run, process, began, args.limit)
        row["start_to_step_s"] = round(first - began, 1)
        time.sleep(args.seconds)
        if kill:
            os.kill(status.read(run, "trainer").pid, signal.SIGKILL)
            killed = time.time()
            row["kill_to_step_s"] = round(
                wait_for_step(run, process, killed + 0.5, args.limit) - killed, 1
            )
            time.sleep(2)
        row["steps"] = len(steps(run))
        row["step_ms"] = [r["step_ms"] for r in steps(run)][-8:]
    finally:
        asked = time.time()
        process.send_signal(signal.SIGINT)
        try:
            row["exit"] = process.wait(90)
        except subprocess.TimeoutExpired:
            process.kill()
            row["exit"] = "killed after 90 s"
        row["stop_s"] = round(time.time() - asked, 1)
    return row


def main() -> int:
    """Command line."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--data", type=Path, required=True)
    p.add_argument("--runs", type=Path, required=True)
    p.add_argument(
        "--rows",
        default="begun,resumed,again",
        help="of begun, killed, resumed, again (a second run)",
    )
    p.add_argument("--seconds", type=float, default=12.0, help="of training in each row")
    p.add_argument("--limit", type=float, default=540.0)
    p.add_argument("--json", type=Path)
    mine, launch = (
        (sys.argv[1 : sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1 :])
        if "--" in sys.argv
        else (sys.argv[1:], [])
    )
    args = p.parse_args(mine)
    args.launch = launch
    args.runs.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in args.rows.split(","):
        run = args.runs / ("second" if name == "again" else "first")
        rows.append(measure(name, run, args, kill=name in ("killed", "begun")))
        print(json.dumps(rows[-1]), flush=True)  # noqa: T201
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
