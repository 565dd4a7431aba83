"""What the accounting of leases keeps: schedule items, leases, peers.

The rules are in common/transport/leases.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from common.transport.messages import Data

FREE, LEASED, READY, DELIVERED, FAILED = "free", "leased", "ready", "delivered", "failed"


@dataclass(frozen=True)
class Rules:
    """When a lease or a producer is given up, and with how many batches a generation begins.

    lease_ttl_s: for a batch; dead_after_s: of silence, then a producer counts as frozen;
    compile_grace_s: for which a `compiling` status stops a lease's clock; compile_budget_s: for
    which all of a producer's do in one generation; max_nacks: refusals by which a batch fails;
    start: how many batches may exist at first, at most the window; from there the number adapts
    (see target.py); None: always the window.
    """

    lease_ttl_s: float = 30.0
    dead_after_s: float = 5.0
    compile_grace_s: float = 120.0
    compile_budget_s: float = 600.0
    max_nacks: int = 3
    start: int | None = None


@dataclass
class Item:
    """One entry of the schedule, from the moment it comes into the window until it is released."""

    position: int
    plan: str
    g: int
    state: str = FREE
    lease: int | None = None
    data: Data | None = None
    set_aside: tuple[int, ...] = ()  # what `data` was made without
    producer: str = ""
    maker: bytes = b""
    failed_by: bytes | None = None
    nacks: list[tuple[bytes, str]] = field(default_factory=list)
    postponed: str = ""  # who could not make it just then, the last time, and why
    expired: int = 0
    lost: int = 0


@dataclass
class LeaseRecord:
    """One credit. outcome: None while outstanding, then accepted, expired, revoked, lost, nacked,
    postponed or bad.
    """

    id: int
    item: Item
    peer: bytes
    issued: float
    deadline: float
    set_aside: tuple[int, ...]  # the batch is to be made without these clips
    rejected: bool = False  # its answer was taken and sent back
    outcome: str | None = None


@dataclass
class Peer:
    """A producer as the trainer sees it. state: joining (no READY in this generation), ready,
    frozen (silent too long), refused.
    """

    id: bytes
    last_heard: float
    name: str = ""
    state: str = "joining"
    pid: int = 0
    capacity: int = 1
    leases: dict[int, LeaseRecord] = field(default_factory=dict)
    status: str = ""
    busy_since: float | None = None  # start of the current `compiling…` status
    compiled_s: float = 0.0  # of the generation's budget
    backoff: int = 0  # k of the strike rule; valid data takes one off
    backoff_until: float = 0.0
    strikes: int = 0  # ever
    produced: int = 0
    refused: str = ""
    gen: int = 0  # what it was last welcomed to, by any trainer
    welcomed_gen: int = 0
    welcomed_at: float = -1e9

    @property
    def label(self) -> str:
        return self.name or self.id.hex()[-8:]

    def compiling_until(self, rules: Rules) -> float:
        """Until when it is believed to be compiling; -inf: it does not say so."""
        if self.busy_since is None:
            return -math.inf
        left_s = max(0.0, rules.compile_budget_s - self.compiled_s)
        return self.busy_since + min(rules.compile_grace_s, left_s)

    def says(self, status: str, now: float, rules: Rules) -> None:
        """A heartbeat's text.

        While it begins with `compiling`, the clock of the peer's leases stands still: for
        `compile_grace_s` with each text, and for `compile_budget_s` with all of them in a
        generation.
        """
        if status == self.status:
            return
        if self.busy_since is not None:
            until = min(now, self.compiling_until(rules))
            for record in self.leases.values():
                record.deadline += max(0.0, until - max(self.busy_since, record.issued))
            self.compiled_s += until - self.busy_since
        self.status, self.busy_since = status, now if status.startswith("compiling") else None


def choose(item: Item, able: list[Peer], peers: Iterable[Peer], now: float) -> Peer | None:
    """Who gets an item, of the peers with credit left: clean ones first, then the one with the
    fewest leases for its capacity; who failed it only where nobody else can take it.
    """
    others = any(
        p.id != item.failed_by and p.state == "ready" and now >= p.backoff_until for p in peers
    )
    fit = [p for p in able if p.id != item.failed_by or not others]
    return min(fit, key=lambda p: (p.backoff, len(p.leases) / p.capacity, p.id), default=None)
