"""What the channel's tests share: producers with known arithmetic, an event log, and the invariants
checked on it.

Batch (plan, g) holds `numbers` int32 [4] = 3 g + offset of the plan + [0, 1, 2, 3]: loss,
duplication and order show in the values. Run as a script, this is a producer or trainer process:
    python channels.py producer ADDRESS NAME DELAY_S
    python channels.py trainer ADDRESS FOLDER COUNT
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from common.transport.client import Endpoint, Lease, LeaseClient, Refused, Stop, Welcome
from common.transport.lease_records import Rules
from common.transport.local import LocalHub
from common.transport.messages import Notes, Offer
from common.transport.server import LeaseServer

RUN = "00112233445566778899aabbccddeeff"
WINDOW, CAPACITY = 6, 2
OFFER = Offer("gpt", "0" * 32)
OFFSETS = {"train": 0, "eval": 1_000_000}
LATER_S = (
    200.0  # longer than anything takes that still happens, on a machine with other things to do
)


def numbers(plan: str, g: int) -> np.ndarray:
    return (3 * g + OFFSETS[plan] + np.arange(4)).astype(np.int32)


def make(lease: Lease) -> dict[str, np.ndarray]:
    return {"numbers": numbers(lease.plan, lease.g), "filler": np.full(3000, lease.g, np.float32)}


class Producer(threading.Thread):
    """A producer in a thread: answers every lease after `delay_s`, or does with it what `work`
    says.
    """

    def __init__(
        self,
        client: LeaseClient,
        work: Callable[[LeaseClient, Lease], object] | None = None,
        delay_s: float = 0.0,
        features="",
    ):
        super().__init__(daemon=True)
        self.client, self.work, self.delay_s, self.features = (
            client,
            work or self.produce,
            delay_s,
            features,
        )
        self.welcomes: list[Welcome] = []
        self.leases: list[Lease] = []
        self.ended: object = None
        self.leave = threading.Event()
        self.start()

    def run(self) -> None:
        while not self.leave.is_set():
            event = self.client.poll(0.05)
            if isinstance(event, Welcome):
                self.welcomes.append(event)
                self.client.ready(event.gen, self.features)
            elif isinstance(event, Lease):
                self.leases.append(event)
                self.work(self.client, event)
            elif isinstance(event, (Stop, Refused)):
                self.ended = event
                break
        self.client.bye()
        self.client.close()

    def produce(self, client: LeaseClient, lease: Lease) -> None:
        time.sleep(self.delay_s)
        client.send(lease, make(lease), Notes(clips=7))

    def end(self) -> None:
        self.leave.set()
        self.join(LATER_S)
        assert not self.is_alive()


class EventLog:
    """on_event of a server; `check` tests on what was logged: order, once each, the window, the
    accounts, equal digests.
    """

    def __init__(self) -> None:
        self.events: list[dict] = []

    def __call__(self, kind: str, **fields) -> None:
        self.events.append({"kind": kind, **fields})

    def of(self, kind: str, **fields) -> list[dict]:
        return [
            e
            for e in self.events
            if e["kind"] == kind and all(e[k] == v for k, v in fields.items())
        ]

    def check(self, window: int, capacity: int) -> None:
        gens = list(dict.fromkeys(e["gen"] for e in self.events if e["gen"]))
        assert gens == sorted(gens)
        for gen in gens:
            self._check_generation([e for e in self.events if e["gen"] == gen], window, capacity)

    def _check_generation(self, events: list[dict], window: int, capacity: int) -> None:
        released = delivered = 0
        issued, open_by_peer, ends = {}, Counter(), Counter()
        digests: dict[tuple, str] = {}
        for e in events:
            if e["kind"] == "lease":
                assert released <= e["position"] < released + window  # the window
                assert e["lease"] not in issued
                issued[e["lease"]] = e
                open_by_peer[e["peer"]] += 1
                assert open_by_peer[e["peer"]] <= capacity  # the peer's capacity
            elif e["kind"] == "lease_end":
                open_by_peer[issued[e["lease"]]["peer"]] -= 1
                ends[e["outcome"]] += 1
            elif e["kind"] == "data":
                assert (issued[e["lease"]]["plan"], issued[e["lease"]]["g"]) == (e["plan"], e["g"])
                assert (
                    digests.setdefault((e["plan"], e["g"]), e["digest"]) == e["digest"]
                )  # whoever makes it
            elif e["kind"] == "deliver":
                assert e["position"] == delivered  # in order, once
                delivered += 1
            elif e["kind"] == "reject":
                delivered -= 1
            elif e["kind"] == "release":
                assert e["position"] == released < delivered
                released += 1
        assert len(issued) == sum(ends.values()) + sum(
            open_by_peer.values()
        )  # every lease is accounted for


def wait_until(condition: Callable[[], object], timeout_s: float = LATER_S) -> float:
    """Seconds until the condition held."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_s, "the condition did not come true in time"
        time.sleep(0.01)
    return time.monotonic() - start


def train(
    server, count: int | None = None, timeout_s: float = LATER_S, step_s: float = 0.0
) -> list[tuple[str, int]]:
    """Consume `count` batches (None: to the end of the schedule), checking their content; returns
    (plan, g) in order.
    """
    seen = []
    while count is None or len(seen) < count:
        delivery = server.next(timeout_s)
        if delivery is None:
            break
        np.testing.assert_array_equal(
            delivery.arrays["numbers"], numbers(delivery.plan, delivery.g)
        )
        seen.append((delivery.plan, delivery.g))
        time.sleep(step_s)
        server.release()
    return seen


class Channel:
    """Servers and producers of one test, over one kind of transport; everything is closed at the
    end.
    """

    def __init__(self, kind: str, folder: Path):
        self.kind, self.address = kind, f"ipc://{folder}/channel.sock"
        self.log = EventLog()
        self.servers: list[LeaseServer] = []
        self.clients: list[LeaseClient] = []
        self.producers: list[Producer] = []
        self.processes: list[subprocess.Popen] = []

    def serve(
        self,
        schedule=None,
        generation=1,
        offer=OFFER,
        accept=lambda ready: None,
        set_aside=lambda plan, g: (),
        **options,
    ):
        if self.kind == "local":
            self.hub = options["link"] = LocalHub()
        rules = Rules(
            **{name: options.pop(name) for name in Rules.__dataclass_fields__ if name in options}
        )
        options = {"window": WINDOW, "rules": rules, "on_event": self.log, **options}
        server = LeaseServer(self.address, RUN, **options)
        self.servers.append(server)
        self.endpoint = Endpoint(server.endpoint)
        if schedule is not None:
            server.open(generation, offer, schedule, accept, set_aside)
        return server

    def client(self, name="p0", run=RUN, heartbeat_s=0.2, **options) -> LeaseClient:
        link = self.hub.link() if self.kind == "local" else None
        client = LeaseClient(
            lambda: self.endpoint,
            run,
            name,
            CAPACITY,
            heartbeat_s=heartbeat_s,
            link=link,
            **options,
        )
        self.clients.append(client)
        return client

    def producer(self, name="p0", work=None, delay_s=0.0, features="", **options) -> Producer:
        producer = Producer(self.client(name, **options), work, delay_s, features)
        self.producers.append(producer)
        return producer

    def process(self, name: str, delay_s: float = 0.0) -> subprocess.Popen:
        """A producer process."""
        process = subprocess.Popen(
            [sys.executable, __file__, "producer", self.endpoint.address, name, str(delay_s)]
        )
        self.processes.append(process)
        return process

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(LATER_S)
        for producer in self.producers:
            producer.end()
        for client in self.clients:
            client.close()
        for server in self.servers:
            server.close(drain_s=0.0, stop_producers=False)
        self.log.check(max((s._book.window for s in self.servers), default=0), CAPACITY)


def train_schedule(count=None):
    return (("train", g) for g in (itertools.count() if count is None else range(count)))


def chain(state: str, digest: str) -> str:
    """The model's stand-in: its state after training a batch."""
    return xxhash.xxh3_128_hexdigest((state + digest).encode())


def replace(path: Path, text: str) -> None:
    """Write whole or not at all: the process may be killed at any moment."""
    path.with_suffix(".aside").write_text(text)
    os.replace(path.with_suffix(".aside"), path)


def run_trainer(address: str, folder: Path, count: int) -> None:
    """Trains `count` batches with a checkpoint every 50, going on from the last one; the lineage of
    every batch is written down. Waits
    before batches beyond the number in FOLDER/limit."""
    generation = int((folder / "generation").read_text()) + 1
    replace(folder / "generation", str(generation))
    checkpoint = json.loads((folder / "checkpoint").read_text())
    events = open(folder / f"events-{generation:03d}.jsonl", "w", buffering=1)

    def on_event(kind: str, **fields) -> None:
        events.write(json.dumps({"kind": kind, **fields}) + "\n")

    server = LeaseServer(
        address, RUN, 8, rules=Rules(dead_after_s=1.0, lease_ttl_s=2.0), on_event=on_event
    )
    server.open(generation, OFFER, (("train", g) for g in range(checkpoint["next_g"], count)))
    while (delivery := server.next(30.0)) is not None:
        np.testing.assert_array_equal(delivery.arrays["numbers"], numbers("train", delivery.g))
        wait_until(lambda g=delivery.g: g <= int((folder / "limit").read_text()))
        checkpoint = {
            "next_g": delivery.g + 1,
            "state": chain(checkpoint["state"], delivery.digest),
        }
        server.release()
        if delivery.g % 50 == 49 or delivery.g == count - 1:
            replace(folder / "checkpoint", json.dumps(checkpoint))
    server.close(drain_s=2.0)


if __name__ == "__main__":
    role, address, *rest = sys.argv[1:]
    if role == "trainer":
        run_trainer(address, Path(rest[0]), int(rest[1]))
    else:
        Producer(
            LeaseClient(lambda: Endpoint(address), RUN, rest[0], heartbeat_s=0.2),
            delay_s=float(rest[1]),
        ).join()


def picky_server(link, on_event) -> LeaseServer:
    """A server behind `link` with the schedule open to producers whose features are "ab"."""
    server = LeaseServer(
        "", RUN, WINDOW, link=link, rules=Rules(lease_ttl_s=1.0), on_event=on_event
    )
    server.open(
        1,
        OFFER,
        train_schedule(),
        lambda ready: None if ready.feature_hash == "ab" else "other features",
    )
    return server
