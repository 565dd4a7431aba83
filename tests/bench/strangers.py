"""What connections that prove no key cost a run on tcp: 1 200 that say nothing and 50 that stop in
the middle of the handshake.

    python tests/bench/strangers.py [--idle 1200] [--half 50] [--seconds 60] [--files 1024]

A run of launch.py whose steps are arithmetic, under the usual limit of open files. Connections that
the trainer closes are opened again, twice a second. Steps per second before, during and after; the
same trainer must come to the end, no step lost, none twice. Prints the figures as JSON; exit code 1
where something did not hold.
"""

from __future__ import annotations

import argparse
import json
import resource
import socket
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from common.run.folder import RunFolder  # noqa: E402
from common.transport.doorkeeper import raise_file_limit  # noqa: E402
from tests.support.arithmetic_runs import assert_exact, settings  # noqa: E402
from tests.support.chaos import Driver  # noqa: E402
from tests.support.corpora import make_corpus  # noqa: E402

GREETING = b"\xff" + b"\0" * 8 + b"\x7f" + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + b"\0" * 32
MB = 1 << 20
CALM_S = 15.0


class Strangers:
    """So many connections, kept up."""

    def __init__(self, port: int, idle: int, half: int):
        self.port = port
        self.says = [b""] * idle + [GREETING[:10], GREETING] * (half // 2)
        self.ends: list[socket.socket | None] = [None] * len(self.says)
        self.opened = 0

    def keep_up(self) -> int:
        """Open those that are closed; how many were still open."""
        closed = [i for i, end in enumerate(self.ends) if end is None or _is_closed(end)]
        for i in closed:
            if self.ends[i] is not None:
                self.ends[i].close()
            self.ends[i] = self._open(self.says[i])
        return len(self.ends) - len(closed)

    def _open(self, says: bytes) -> socket.socket | None:
        try:
            end = socket.create_connection(("127.0.0.1", self.port), 1)
            end.sendall(says)
        except OSError:  # the queue of the port is full: the next time
            return None
        end.setblocking(False)
        self.opened += 1
        return end

    def close(self) -> None:
        for end in self.ends:
            if end is not None:
                end.close()


def _is_closed(end: socket.socket) -> bool:
    try:
        while end.recv(4096):
            pass
        return True
    except BlockingIOError:
        return False
    except OSError:
        return True


def rate(driver: Driver, seconds: float, meanwhile=lambda: None) -> float:
    """Steps per second."""
    since, first = time.monotonic(), driver.step()
    while time.monotonic() - since < seconds:
        meanwhile()
        time.sleep(0.5)
    return (driver.step() - first) / (time.monotonic() - since)


def measure(driver: Driver, run: RunFolder, args: argparse.Namespace, port: int) -> dict:
    pid = driver.pid("trainer")
    trainer, strangers = psutil.Process(pid), Strangers(port, args.idle, args.half)
    descriptors, memory, alive = [], [], []

    def look() -> None:
        alive.append(strangers.keep_up())
        descriptors.append(trainer.num_fds())
        memory.append(trainer.memory_info().rss / MB)

    before, calm_mb = rate(driver, CALM_S), trainer.memory_info().rss / MB
    during = rate(driver, args.seconds, look)
    strangers.close()
    after = rate(driver, CALM_S)
    same = driver.pid("trainer") == pid
    driver.finish(3600.0)
    assert_exact(run)
    starts = sum(
        "listening at" in line
        for line in (run.path / "logs" / "trainer.log").read_text().splitlines()
    )
    return {
        "idle": args.idle,
        "half_open": args.half,
        "seconds": args.seconds,
        "file_limit": args.files,
        "opened": strangers.opened,
        "open_at_most": max(alive),
        "steps_per_s": {
            "before": round(before, 1),
            "during": round(during, 1),
            "after": round(after, 1),
        },
        "descriptors_at_most": max(descriptors),
        "rss_mb": {"before": round(calm_mb, 1), "at_most": round(max(memory), 1)},
        "trainers": starts,
        "exact": True,
        "good": same and starts == 1,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--idle", type=int, default=1200)
    parser.add_argument("--half", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--files", type=int, default=1024)
    args = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with tempfile.TemporaryDirectory(prefix="strangers-") as name:
        folder = Path(name)
        make_corpus(folder / "corpus", 41, seconds=lambda i: 0.6 + 0.05 * (i % 9))
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        # 3 batches of 8 ms a step: at most 40 steps/s.
        steps = int(42 * (2 * CALM_S + args.seconds))
        more = {
            "train__max_steps": steps,
            "train__epochs": 100_000,
            "train__save_every": 200,
            "train__eval_every": 500,
        }
        more["transport__bind"] = f"tcp://127.0.0.1:{port}"
        tree = settings(
            folder / "run", folder / "corpus", producers__count=2, dvae__max_steps=3, **more
        )
        driver = Driver.create(folder, tree, step_ms=8, make_ms=1)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (args.files, hard))
            driver.launch()
            raise_file_limit()
            driver.wait_for(lambda: driver.step() > 20, "the first steps of stage 2")
            figures = measure(driver, RunFolder(folder / "run"), args, port)
        finally:
            driver.kill_everything()
    sys.stdout.write(json.dumps(figures) + "\n")
    return 0 if figures["good"] else 1


if __name__ == "__main__":
    sys.exit(main())
