"""The real loop with its producers in one process.

A test file takes the fixture with

    stop_at = loop_runs.stop_at
"""

import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.run.folder import RunFolder
from common.system.lifecycle import Stop
from common.system.status import StatusFile
from common.transport.client import LeaseClient
from common.transport.lease_records import Rules
from common.transport.local import LocalHub
from common.transport.server import LeaseServer
from producer.serve import Service
from tests.support.arithmetic_maker import ArithmeticMaker
from tests.support.arithmetic_step import ArithmeticStep
from trainer import session, stages
from trainer.history.checkpoint import Checkpoints


@contextmanager
def channel(run: RunFolder, num_producers: int = 2, make=ArithmeticMaker, start: int | None = None):
    """A lease server with producers in threads."""
    hub = LocalHub()
    server = LeaseServer(
        "", run.run_id, run.config.transport.high_water_mark, link=hub, rules=Rules(start=start)
    )
    done = threading.Event()
    threads, clients = [], []
    for i in range(num_producers):
        client = LeaseClient(hub.endpoint, run.run_id, f"producer-{i}", capacity=2, link=hub.link())
        service = Service(client, lambda stage: make(run, stage), None, done.is_set)
        threads.append(threading.Thread(target=service.run, daemon=True))
        clients.append(client)
        threads[-1].start()
    try:
        yield server
    finally:
        done.set()
        for t in threads:
            t.join(90)
        server.close(drain_s=0.0, stop_producers=False)
        for c in clients:
            c.close()


def train(
    run: RunFolder,
    stop: Stop | None = None,
    num_producers: int = 2,
    make=ArithmeticMaker,
    start: int | None = None,
) -> None:
    status = StatusFile(run.path, "trainer", "trainer")
    with channel(run, num_producers, make, start) as server:
        for name in run.stages:
            if not (name == "dvae" and run.dvae_weights.is_file()):
                session.train_stage(run, name, server, status, stop or Stop())


@pytest.fixture
def stop_at(monkeypatch):
    """Ask for a stop while a given update (counted over all calls) is computed, and not before
    the checkpoint `saved` is on disk: it is written while training goes on.
    """

    def arm(stop: Stop, update: int, cause: str = "stop", saved: Path | None = None):
        count = 0
        apply = ArithmeticStep.apply

        def counting(self):
            nonlocal count
            count += 1
            if count == update:
                deadline = time.monotonic() + 60
                while saved is not None and not saved.exists():
                    assert time.monotonic() < deadline, f"{saved} was not written within 60 s"
                    time.sleep(0.01)
                stop.request(cause, "test", 143)
            return apply(self)

        monkeypatch.setattr(ArithmeticStep, "apply", counting)

    return arm


def newest(run, stage="gpt"):
    """State of the newest checkpoint."""
    return Checkpoints(stages.files_of(run, stage).checkpoints, 9).load_latest(None).state
