"""Pipelines for the tests of verdicts: one that is simulated, and a real one in one process whose
stages only sleep.
"""

from __future__ import annotations

import heapq
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from common.run.folder import RunFolder
from common.system.lifecycle import Stop
from common.system.status import StatusFile
from common.system.stopwatch import Stopwatch
from common.transport.client import LeaseClient
from common.transport.local import LocalHub
from common.transport.server import LeaseServer
from producer.batches.decode import DecodePool
from producer.batches.maker import Clip, Work
from producer.serve import Service
from tests.support.arithmetic_maker import ArithmeticMaker
from trainer import session
from trainer.report.verdict import DEVICE_PARTS, HOST_PARTS, Measured, ProducerLoad, Settings

# -- simulated -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stages:
    """Seconds per batch of what works at the same time; `own`: the parts of the producer's own
    thread and of its device.
    """

    decode: float
    own: dict[str, float]
    wire: float
    feed: float
    step: float
    window: int = 8
    leases: int = 3

    def paces(self) -> dict[str, float]:
        """Each worker's seconds per batch."""
        host, device = (sum(self.own.get(p, 0.0) for p in of) for of in (HOST_PARTS, DEVICE_PARTS))
        return {
            "decode": self.decode,
            "host": host,
            "device": device,
            "wire": self.wire,
            "feed": self.feed,
            "step": self.step,
        }


class Simulation:
    """Each batch goes through all workers in order; a worker has one batch at a time; leases come
    as credits allow.

    The producer's own thread packs while fewer than two batches are on the device, else sends what
    the device is done with.
    """

    DONE = {
        "decode": "decoded",
        "pack": "packed",
        "device": "computed",
        "send": "sent",
        "wire": "arrived",
        "feed": "fed",
        "step": "done",
    }

    def __init__(self, s: Stages, rng: np.random.Generator, jitter: float, batches: int):
        self.s, self.rng, self.jitter, self.batches = s, rng, jitter, batches
        self.n = dict.fromkeys(("leased", "begun", *self.DONE.values()), 0)
        self.t = {what: np.zeros(batches) for what in ("sent", "arrived", "begun", "done")}
        self.data_waits = np.zeros(batches)
        self.host_waits = {
            what: np.zeros(batches) for what in ("decode_wait", "device_wait", "lease_wait")
        }
        self._idle: tuple[float, str] | None = (
            None  # the producer's own thread: since when, and why
        )
        self._busy: set[str] = set()
        self._events: list[tuple[float, int, str]] = []  # (when, running number, what ends)
        self._started, now = 0, 0.0
        while self.n["done"] < batches:
            self._start_all(now)
            now, _, ended = heapq.heappop(self._events)
            self._busy.discard(ended)
            what = self.DONE[ended]
            if what in self.t:
                self.t[what][self.n[what]] = now
            self.n[what] += 1

    def _start(self, what: str, now: float, mean: float) -> None:
        self._busy.add(what)
        self._started += 1
        seconds = mean * float(self.rng.lognormal(-(self.jitter**2) / 2, self.jitter))
        heapq.heappush(self._events, (now + seconds, self._started, what))

    def _start_all(self, now: float) -> None:
        n, s, free = self.n, self.s, lambda *what: not self._busy & set(what)
        while (
            n["leased"] < self.batches
            and n["leased"] - n["begun"] < s.window
            and n["leased"] - n["sent"] < s.leases
        ):
            n["leased"] += 1
        if free("decode") and n["decoded"] < n["leased"]:
            self._start("decode", now, s.decode)
        if free("pack", "send"):
            self._host(now)
        if free("device") and n["computed"] < n["packed"]:
            self._start("device", now, s.paces()["device"])
        if free("wire") and n["arrived"] < n["sent"]:
            self._start("wire", now, s.wire)
        if (
            free("feed") and n["fed"] < n["arrived"] and n["fed"] - n["begun"] <= 2
        ):  # two wait, one is in hand
            self._start("feed", now, s.feed)
        if free("step") and n["begun"] < n["fed"]:
            i = n["begun"]
            self.t["begun"][i] = now
            self.data_waits[i] = now - (self.t["done"][i - 1] if i else 0.0)
            n["begun"] += 1
            self._start("step", now, s.step)

    def _host(self, now: float) -> None:
        n, own = self.n, self.s.own
        if n["packed"] < n["decoded"] and n["packed"] - n["sent"] < 2:
            task, seconds = "pack", own["read"] + own["pack"]
        elif n["sent"] < n["computed"]:
            task, seconds = "send", own["serialise"]
        else:
            on_device = "device_wait" if n["sent"] < n["packed"] else "decode_wait"
            self._idle = self._idle or (
                now,
                "lease_wait" if n["leased"] == n["sent"] else on_device,
            )
            return
        if self._idle is not None:
            since, why = self._idle
            self.host_waits[why][min(n["sent"], self.batches - 1)] += now - since
            self._idle = None
        self._start(task, now, seconds)


def simulate(
    s: Stages, rng: np.random.Generator, jitter: float = 0.1, batches: int = 120, skip: int = 30
) -> Measured:
    """What the trainer would measure of such a pipeline."""
    run, late = Simulation(s, rng, jitter, batches), slice(skip, None)
    parts = {
        **s.own,
        "decode": 2 * s.decode,
        **{what: waits[late].mean() for what, waits in run.host_waits.items()},
    }
    waited = run.data_waits[late] > 0
    transit = (run.t["arrived"] - run.t["sent"])[late][waited]
    return Measured(
        batch_s=(run.t["done"][-1] - run.t["done"][skip - 1]) / (batches - skip),
        wait_s=run.data_waits[late].mean(),
        feed_s=s.feed,
        transit_s=transit.mean() if waited.any() else None,
        trainer_s={"compute": 0.9 * s.step, "optimizer": 0.1 * s.step},
        producers=(ProducerLoad("p", batches - skip, parts, threads=2, clips=8),),
        settings=Settings(leases=s.leases, high_water_mark=s.window),
    )


def slowed(base: Stages, cause: str, factor: float, rng: np.random.Generator) -> tuple[Stages, str]:
    """`base` with one stage `factor` times as slow as the slowest of the others, and the part that
    must be named.
    """
    parts = {"features": ("codes", "mel"), "read": ("read",), "serialise": ("pack", "serialise")}
    part = str(rng.choice(parts[cause])) if cause in parts else ""
    worker = {
        "decode": "decode",
        "transport": "wire",
        "transfer": "feed",
        "trainer": "step",
        "features": "device",
    }.get(cause, "host")
    target = factor * max(v for k, v in base.paces().items() if k != worker)
    if not part:
        return replace(base, **{worker: target}), {"decode": "decode", "trainer": "compute"}.get(
            cause, ""
        )
    others = {
        k: v for k, v in base.own.items() if k != part and (k in HOST_PARTS) == (part in HOST_PARTS)
    }
    scale = 0.45 * target / sum(others.values())  # the part named is the larger half
    others = {k: v * scale for k, v in others.items()}
    return replace(base, own={**base.own, **others, part: target - sum(others.values())}), part


def random_stages(rng: np.random.Generator) -> Stages:
    """A balanced pipeline: everything within 20 %."""

    def u():
        return float(rng.uniform(0.040, 0.048))

    host, device = rng.dirichlet(np.full(3, 4.0)) * u(), rng.dirichlet(np.full(2, 4.0)) * u()
    own = dict(zip(HOST_PARTS, host.tolist(), strict=True)) | dict(
        zip(("codes", "mel"), device.tolist(), strict=True)
    )
    return Stages(
        u(),
        own,
        u() * float(rng.uniform(0.1, 1)),
        u() * float(rng.uniform(0.1, 1)),
        u(),
        window=int(rng.choice([8, 12, 16])),
    )


# -- real, asleep ----------------------------------------------------------------------------------


class SleepingMaker(ArithmeticMaker):
    """Arithmetic batches with clips that are really decoded and parts that only `slow` gives a
    length.
    """

    def clips(self, planned):
        """Every row's recording."""
        rows = np.flatnonzero(planned.utterances >= 0)
        return [
            Clip(int(r), u)
            for r, u in zip(
                rows, self._run.manifest.utterances(planned.utterances[rows]), strict=True
            )
        ]

    def begin(self, planned, clips, decoded):
        """Arithmetic; the parts sleep, each in the thread of the real one."""
        watch = Stopwatch()

        def asleep(*parts):
            for part in parts:
                with watch.part(part):
                    pass

        def finish(_):
            made = self.make(planned, [], [])
            made.spent_s = watch.take()
            return made

        asleep("pack")
        return Work(lambda: asleep("codes", "mel"), finish)


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
    client = LeaseClient(
        hub.endpoint, run.run_id, "producer-0", capacity=leases, link=SlowWire(hub.link(), wire_s)
    )
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


@contextmanager
def slow_parts(slow: dict[str, float]):
    """Every part of the work that a stopwatch measures takes `slow` ms longer."""
    part = Stopwatch.part

    @contextmanager
    def slowed(self, name: str):
        with part(self, name):
            start = time.perf_counter()
            yield
            hold(slow.get(name, 0.0) / 1e3, name, time.perf_counter() - start)

    Stopwatch.part = slowed
    try:
        yield
    finally:
        Stopwatch.part = part


def hold(seconds: float, part: str, spent_s: float) -> None:
    """Make a part that took `spent_s` so much longer."""
    del part, spent_s
    if seconds:
        time.sleep(seconds)


def train_asleep(run: RunFolder, slow: dict[str, float], wire_s: float = 0.0) -> None:
    """Train the run's stages with parts that take `slow` ms longer."""
    with slow_parts(slow), sleeping_pipeline(run, wire_s) as server:
        for name in run.stages:
            if not (name == "dvae" and run.dvae_weights.is_file()):
                session.train_stage(
                    run, name, server, StatusFile(run.path, "trainer", "trainer"), Stop()
                )
