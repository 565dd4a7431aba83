"""A book of leases with a clock that the test turns, and what it sent and said."""

from __future__ import annotations

import itertools

import numpy as np

from common.transport import wire
from common.transport.lease_records import Rules
from common.transport.leases import LeaseBook
from common.transport.messages import Data, Lease, Notes, Ready

WINDOW, TTL, DEAD, GRACE, BUDGET = 4, 10.0, 5.0, 120.0, 300.0


class Harness:
    """A book, its clock, and what it sent and said."""

    def __init__(self, schedule=None, window=WINDOW, set_aside=lambda plan, g: (), start=None):
        self.now = 1000.0
        self.events: list[dict] = []
        self.book = LeaseBook(
            window,
            rules=Rules(
                lease_ttl_s=TTL,
                dead_after_s=DEAD,
                compile_grace_s=GRACE,
                compile_budget_s=BUDGET,
                start=start,
            ),
            clock=lambda: self.now,
            on_event=lambda kind, **fields: self.events.append({"kind": kind, **fields}),
        )
        self.book.open(
            1,
            schedule if schedule is not None else (("train", g) for g in itertools.count()),
            set_aside,
        )

    def join(self, name: str, capacity: int = 2):
        peer = self.book.heard(name.encode())
        self.book.peer_ready(peer, Ready(1, name, 1, capacity))
        return peer

    def leases(self) -> list[tuple[str, Lease]]:
        """New LEASE messages as (peer name, lease)."""
        self.book.assign()
        sent = [(peer.decode(), m) for peer, m in self.book.outbox if isinstance(m, Lease)]
        self.book.outbox.clear()
        return sent

    def answer(self, name: str, lease: Lease, value: int | None = None, right: bool = True) -> str:
        arrays = {"a": np.array([lease.g if value is None else value], np.int32)}
        data = Data(
            lease.gen, lease.plan, lease.g, lease.lease, wire.digest(arrays), Notes(), arrays
        )
        return self.book.on_data(self.book.heard(name.encode()), data, right)

    def kinds(self, *kinds: str) -> list[dict]:
        return [e for e in self.events if e["kind"] in kinds]

    def pass_time(self, seconds: float, *alive: str) -> None:
        """Time passes in steps of 1 s; the peers named send heartbeats."""
        for _ in range(int(seconds)):
            self.now += 1
            for name in alive:
                self.book.heard(name.encode())
            self.book.tick()

    def check_accounts(self) -> None:
        """Every lease is accounted for once."""
        outstanding = sum(len(p.leases) for p in self.book.peers.values())
        assert self.book.counts["lease"] == sum(self.book.outcomes.values()) + outstanding


def gs(leases) -> list[tuple[str, int]]:
    return [(name, lease.g) for name, lease in leases]
