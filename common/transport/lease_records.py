"""What the accounting of leases keeps: schedule items, leases, peers. The rules are in common/transport/leases.py."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.transport import wire

FREE, LEASED, READY, DELIVERED, FAILED = "free", "leased", "ready", "delivered", "failed"


@dataclass
class Item:
    """One entry of the schedule, from the moment it comes into the window until it is released."""

    position: int
    plan: str
    g: int
    state: str = FREE
    lease: int | None = None
    data: wire.Data | None = None
    producer: str = ""
    maker: bytes = b""
    failed_by: bytes | None = None
    nacks: list[tuple[bytes, str]] = field(default_factory=list)
    postponed: str = ""  # who could not make it just then, the last time, and why
    expired: int = 0
    lost: int = 0


@dataclass
class LeaseRecord:
    """One credit. outcome: None while outstanding, then accepted, expired, revoked, lost, nacked, postponed or bad."""

    id: int
    item: Item
    peer: bytes
    issued: float
    deadline: float
    content: bytes | None  # what the bytes may depend on besides (plan, g): the packed `extra`; None once rejected
    outcome: str | None = None


@dataclass
class Peer:
    """A producer as the trainer sees it. state: joining (no READY in this generation), ready, frozen (silent too long), refused."""

    id: bytes
    last_heard: float
    name: str = ""
    state: str = "joining"
    info: dict = field(default_factory=dict)
    capacity: int = 1
    leases: dict[int, LeaseRecord] = field(default_factory=dict)
    status: str = ""
    busy_since: float | None = None  # start of the current `compiling…` status
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

    def compiling(self, now: float, grace_s: float) -> bool:
        """Busy with what may take longer than a lease, and not for longer than that is believed."""
        return self.busy_since is not None and now - self.busy_since <= grace_s
