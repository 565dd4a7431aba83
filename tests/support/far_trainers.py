"""Runs whose trainers are started by a command each, as on several hosts, and meet over tcp."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path

from tests.support import together
from tests.support.chaos import Driver


def free_address() -> str:
    """tcp://127.0.0.1:PORT, free when it was looked."""
    with socket.create_server(("127.0.0.1", 0)) as s:
        return f"tcp://127.0.0.1:{s.getsockname()[1]}"


def driver(folder: Path, corpus: Path, trainers: int, **more) -> Driver:
    """Of a run whose first trainer listens at a free port."""
    given = {"trainers__bind": free_address(), "trainers__join_s": 300.0, **more}
    tree = together.tree(folder, corpus, trainers, 1, dvae__max_steps=4, **given)
    return Driver.create(folder, tree, step_ms=2, make_ms=2)


def add(driver: Driver, *args: str, **env: str) -> subprocess.Popen:
    """`launch.py trainer --run RUN …`, as on another host."""
    driver.say(f"trainer {' '.join(args)}")
    driver.env.update(env)
    driver.extra.append(driver._spawn("trainer", "--run", str(driver.run), *args))
    for name in env:
        del driver.env[name]
    return driver.extra[-1]


def end(driver: Driver) -> None:
    """Of all of its processes."""
    driver.kill_everything()
    for p in driver.extra:
        if p.poll() is None:
            os.killpg(p.pid, signal.SIGKILL)
