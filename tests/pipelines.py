"""Pipelines for the tests of verdicts: one that is simulated, and a real one in one process whose stages only sleep."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from common.channel import LeaseServer
from common.lease_client import LeaseClient
from common.lifecycle import Stop
from common.local_channel import LocalHub
from common.run import RunFolder
from common.status import StatusFile
from common.stopwatch import Stopwatch
from producer.arithmetic import ArithmeticMaker
from producer.decode import DecodePool
from producer.maker import Clip
from producer.serve import Service
from trainer import session
from trainer.verdict import OWN_PARTS, Measured, ProducerLoad, Settings

# -- simulated ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stages:
    """Seconds per batch of what works at the same time; `own`: the parts of the producer's own thread."""

    decode: float
    own: dict[str, float]
    wire: float
    feed: float
    step: float
    window: int = 8
    leases: int = 3

    def paces(self) -> dict[str, float]:
        """Each worker's seconds per batch."""
        return {"decode": self.decode, "own": sum(self.own.values()), "wire": self.wire, "feed": self.feed, "step": self.step}


def simulate(s: Stages, rng: np.random.Generator, jitter: float = 0.1, batches: int = 120, skip: int = 30) -> Measured:
    """Each batch goes through all workers in order; a worker has one batch at a time; leases come as credits allow."""
    names = ("lease", "decoded", "made", "arrived", "fed", "begun", "done")
    t = {n: np.zeros(batches) for n in names}
    waits = {n: np.zeros(batches) for n in ("decode", "lease", "data")}

    def took(mean: float) -> float:
        return mean * float(rng.lognormal(-(jitter**2) / 2, jitter))

    def at(name: str, i: int) -> float:
        return t[name][i] if i >= 0 else 0.0

    for i in range(batches):
        t["lease"][i] = max(at("begun", i - s.window), at("made", i - s.leases))  # credits; leases in one producer's hands
        t["decoded"][i] = max(t["lease"][i], at("decoded", i - 1)) + took(s.decode)
        idle_from, start = at("made", i - 1), max(t["decoded"][i], at("made", i - 1))
        waits["lease"][i] = max(0.0, t["lease"][i] - idle_from)
        waits["decode"][i] = start - idle_from - waits["lease"][i]
        t["made"][i] = start + took(sum(s.own.values()))
        t["arrived"][i] = max(t["made"][i], at("arrived", i - 1)) + took(s.wire)
        t["fed"][i] = max(t["arrived"][i], at("fed", i - 1), at("begun", i - 3)) + took(s.feed)  # two wait, one is in hand
        t["begun"][i] = max(t["fed"][i], at("done", i - 1))
        waits["data"][i] = t["begun"][i] - at("done", i - 1)
        t["done"][i] = t["begun"][i] + took(s.step)
    late = slice(skip, None)
    parts = {**s.own, "decode": 2 * s.decode, "decode_wait": waits["decode"][late].mean(), "lease_wait": waits["lease"][late].mean()}
    waited = waits["data"][late] > 0
    transit = (t["arrived"] - t["made"])[late][waited]
    return Measured(
        batch_s=(t["done"][-1] - t["done"][skip - 1]) / (batches - skip),
        wait_s=waits["data"][late].mean(),
        feed_s=s.feed,
        transit_s=transit.mean() if waited.any() else None,
        trainer_s={"compute": 0.9 * s.step, "optimizer": 0.1 * s.step},
        producers=(ProducerLoad("p", batches - skip, parts, threads=2, clips=8),),
        settings=Settings(leases=s.leases, high_water_mark=s.window),
    )


def slowed(base: Stages, cause: str, factor: float, rng: np.random.Generator) -> tuple[Stages, str]:
    """`base` with one stage `factor` times as slow as the slowest of the others, and the part that must be named."""
    paces = base.paces()
    worker = {"decode": "decode", "transport": "wire", "transfer": "feed", "trainer": "step"}.get(cause, "own")
    target = factor * max(v for k, v in paces.items() if k != worker)
    if worker != "own":
        return replace(base, **{worker: target}), {"decode": "decode", "trainer": "compute"}.get(cause, "")
    part = {"features": str(rng.choice(["codes", "mel"])), "read": "read", "serialise": str(rng.choice(["pack", "serialise"]))}[cause]
    others = {k: v for k, v in base.own.items() if k != part}
    scale = 0.45 * target / sum(others.values())  # the part named is the larger half
    own = {k: v * scale for k, v in others.items()}
    return replace(base, own={**own, part: target - sum(own.values())}), part


def random_stages(rng: np.random.Generator) -> Stages:
    """A balanced pipeline: everything within 20 %."""
    u = lambda: float(rng.uniform(0.040, 0.048))  # noqa: E731
    shares = rng.dirichlet(np.full(5, 4.0))
    own = dict(zip([p for p in OWN_PARTS if p != "make"], (shares * u()).tolist(), strict=True))
    return Stages(u(), own, u() * float(rng.uniform(0.1, 1)), u() * float(rng.uniform(0.1, 1)), u(), window=int(rng.choice([8, 12, 16])))


# -- real, asleep ------------------------------------------------------------------------------------------------------------------


class SleepingMaker(ArithmeticMaker):
    """Arithmetic batches with clips that are really decoded and parts that only XTTS_TEST_SLOW gives a length."""

    def clips(self, planned):
        """Every row's recording."""
        rows = np.flatnonzero(planned.utterances >= 0)
        return [Clip(int(r), u) for r, u in zip(rows, self._run.manifest.utterances(planned.utterances[rows]), strict=True)]

    def make(self, planned, clips, decoded):
        """Arithmetic; the parts sleep."""
        watch = Stopwatch()
        for part in ("codes", "mel", "pack"):
            with watch.part(part):
                pass
        made = super().make(planned, [], [])
        made.spent_s = watch.take()
        return made


class SlowWire:
    """A producer's link whose messages with a batch take `seconds` each."""

    def __init__(self, link, seconds: float):
        self._link, self._seconds, self._busy = link, seconds, threading.Event()

    def __getattr__(self, name):
        return getattr(self._link, name)

    def send(self, run, message):
        """As the link does, later."""
        if type(message).__name__ == "Data" and self._seconds:
            self._busy.wait(self._seconds)
        return self._link.send(run, message)


@contextmanager
def sleeping_pipeline(run: RunFolder, wire_s: float = 0.0, threads: int = 2, leases: int = 3):
    """A lease server with one producer in a thread."""
    hub = LocalHub()
    server = LeaseServer("", run.run_id, run.config.transport.high_water_mark, link=hub)
    client = LeaseClient(hub.endpoint, run.run_id, "producer-0", capacity=leases, link=SlowWire(hub.link(), wire_s))
    done, pool = threading.Event(), DecodePool(threads, 1000)
    service = Service(client, lambda stage: SleepingMaker(run, stage), pool, done.is_set)
    thread = threading.Thread(target=service.run, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        done.set()
        thread.join(90)
        server.close(drain_s=0.0, stop_producers=False)
        client.close()
        pool.close()


def train_asleep(run: RunFolder, slow: dict[str, float], wire_s: float = 0.0) -> None:
    """Train the run's stages with parts that take `slow` ms longer."""
    os.environ["XTTS_TEST_SLOW"] = ",".join(f"{part}:{ms:.3f}ms" for part, ms in slow.items())
    try:
        with sleeping_pipeline(run, wire_s) as server:
            for name in run.stages:
                if not (name == "dvae" and run.dvae_weights.is_file()):
                    session.train_stage(run, name, server, StatusFile(run.path, "trainer", "trainer"), Stop())
    finally:
        del os.environ["XTTS_TEST_SLOW"]
