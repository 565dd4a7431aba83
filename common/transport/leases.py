"""Who makes which batch: the trainer's accounting of leases.

Pure: no sockets, no threads, the clock is an argument.

A schedule is an iterator of (plan, g). Its item i is the i-th batch the trainer will consume; at
most W items (the window) exist between the oldest one not yet released and the newest one leased.
States of an item:

    FREE -> LEASED(peer, deadline) -> READY (data held) -> DELIVERED (in schedule order) -> released

and back to FREE from LEASED when the lease expires, is refused (NACK), or its peer is lost; from
DELIVERED when the trainer rejects it.

Rules: item i is leased only while i < released + target, which is at most W (see target.py); at
most `capacity` leases per peer; the lowest free item first; an expired lease, a NACK or a bad
digest is a strike: the peer backs off 0.25 * 2^k s (at most 30), peers without strikes go first,
and the item does not go back to the peer that just failed it while another can take it; only READY
makes a peer leasable. A lease is answered by the peer that it went to, after its READY, and by
nobody else; its number cannot be guessed. The first valid data for an item wins, from any lease
issued for it in this generation; later copies are dropped and their digests compared.
"""

from __future__ import annotations

import secrets
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from common.transport.digests import Digests
from common.transport.lease_records import (
    DELIVERED,
    FAILED,
    FREE,
    LEASED,
    READY,
    Item,
    LeaseRecord,
    Peer,
    Rules,
    choose,
)
from common.transport.messages import Data, Lease, Message, Nack, Ready, Revoke
from common.transport.target import IN_HAND, Target

BACKOFF_S, MAX_BACKOFF_S = 0.25, 30.0
LATER_S = 1.0  # before a peer that could not make a batch just then is asked again
MAX_CAPACITY = 64
REMEMBERED = 4096  # closed leases kept for late copies
LEASE_BITS = 63  # of a lease's number, at random: who was not told it cannot name it


class LeaseBook:
    """The accounting.

    Not thread-safe: the caller holds a lock. What must be sent collects in `outbox` as (peer id,
    message).
    """

    def __init__(
        self,
        window: int,
        *,
        rules: Rules,
        clock: Callable[[], float],
        on_event: Callable[..., None],
    ):
        self.window, self.rules = window, rules
        self.clock, self._on_event = clock, on_event
        self.gen = 0
        self.peers: dict[bytes, Peer] = {}
        self.outbox: deque[tuple[bytes, Message]] = deque()
        self.counts: Counter[str] = Counter()  # events by kind
        self.outcomes: Counter[str] = Counter()  # closed leases by outcome
        self._reset(iter(()), lambda plan, g: ())

    def _reset(
        self, schedule: Iterator[tuple[str, int]], set_aside: Callable[[str, int], Sequence[int]]
    ) -> None:
        self._schedule, self._set_aside = schedule, set_aside
        self.exhausted = False
        self.released = 0  # items trained, = position of the oldest unreleased one
        self.next_position = 0  # the next one to deliver
        self.target = Target(self.window, self.rules.start)
        self._items: dict[int, Item] = {}
        self._records: OrderedDict[int, LeaseRecord] = OrderedDict()
        self.digests = Digests()

    def event(self, kind: str, **fields: Any) -> None:
        self.counts[kind] += 1
        self._on_event(kind, gen=self.gen, t=self.clock(), **fields)

    # generation

    def open(
        self,
        gen: int,
        schedule: Iterable[tuple[str, int]],
        set_aside: Callable[[str, int], Sequence[int]],
    ) -> None:
        """Begin generation `gen` > the current one: leases and data of the old one are dropped,
        every peer must say READY again.
        """
        for peer in self.peers.values():
            for record in list(peer.leases.values()):
                self._close(record, "revoked")
            peer.state = "refused" if peer.state == "refused" else "joining"
            peer.compiled_s = 0.0
        self.outbox.clear()
        self.gen = gen
        self._reset(iter(schedule), set_aside)
        self.event("open")

    # peers

    def heard(self, peer_id: bytes) -> Peer:
        """The peer, entered on its first message; every message counts as a sign of life."""
        peer = self.peers.get(peer_id)
        if peer is None:
            peer = self.peers[peer_id] = Peer(peer_id, self.clock())
        peer.last_heard = self.clock()
        return peer

    def peer_ready(self, peer: Peer, ready: Ready) -> None:
        """READY: leasable from now on.

        Whatever was leased to it before is free again: it says that it holds nothing.
        """
        held = bool(peer.leases)
        self._free_all(peer, "lost", "said READY again")
        peer.name, peer.pid, peer.state = ready.name, ready.pid, "ready"
        peer.capacity = min(ready.capacity, MAX_CAPACITY)
        self.event("peer_ready", peer=peer.label, pid=peer.pid, capacity=peer.capacity)
        if held:  # else one that says nothing but READY would hold the same batches for ever
            self._strike(peer, "gave its leases back")

    def peer_refused(self, peer: Peer, reason: str) -> None:
        self._free_all(peer, "lost", "refused")
        if peer.refused != reason:  # told once, however often it asks again
            self.event("peer_refused", peer=peer.label, reason=reason)
        peer.state, peer.refused = "refused", reason

    def peer_lost(self, peer_id: bytes, why: str) -> None:
        """The peer is gone (connection closed, or BYE): forget it."""
        peer = self.peers.pop(peer_id, None)
        if peer is not None:
            self._free_all(peer, "lost", why)
            fields = {"state": peer.state, "produced": peer.produced, "status": peer.status}
            self.event("peer_lost", peer=peer.label, why=why, **fields)

    def peer_status(self, peer: Peer, status: str) -> None:
        """Heartbeat text; see `Peer.says`."""
        peer.says(status, self.clock(), self.rules)

    def stalled(self, seconds: float) -> None:
        """This process itself stood still (SIGSTOP, a suspended machine): that time counts against
        nobody.
        """
        for peer in self.peers.values():
            peer.last_heard += seconds
            if peer.busy_since is not None:
                peer.busy_since += seconds
            for record in peer.leases.values():
                record.deadline += seconds

    def tick(self) -> None:
        """Expire leases and count silent peers as frozen.

        A peer that never said READY is never counted dead.
        """
        now = self.clock()
        for peer in list(self.peers.values()):
            if peer.state == "ready" and now - peer.last_heard > self.rules.dead_after_s:
                peer.state = "frozen"
                self.event(
                    "peer_frozen",
                    peer=peer.label,
                    silent_s=now - peer.last_heard,
                    leases=len(peer.leases),
                )
                self._free_all(peer, "lost", "silent")
            if now <= peer.compiling_until(self.rules):
                continue
            late = [record for record in peer.leases.values() if now > record.deadline]
            for record in late:
                record.item.expired += 1
                self.outbox.append((peer.id, Revoke(self.gen, record.id)))
                self._fail(record, "expired", "")
            if late:
                self._strike(peer, "expired")

    # leases

    def assign(self) -> None:
        """Lease what the rules allow now; LEASE messages go into the outbox."""
        self._fill_window()
        now = self.clock()
        able = [
            p
            for p in self.peers.values()
            if p.state == "ready" and len(p.leases) < p.capacity and now >= p.backoff_until
        ]
        for position in range(self.next_position, self.released + self.target.value):
            if not able:
                return
            item = self._items.get(position)
            if item is None:
                return
            if item.state != FREE:
                continue
            peer = choose(item, able, self.peers.values(), now)
            if peer is not None:
                self._lease(item, peer, now)
                able = [p for p in able if len(p.leases) < p.capacity]

    def _fill_window(self) -> None:
        while not self.exhausted and len(self._items) < self.window:
            entry = next(self._schedule, None)
            self.exhausted = entry is None
            if entry is not None:
                position = self.released + len(self._items)
                self._items[position] = Item(position, entry[0], int(entry[1]))

    def _lease(self, item: Item, peer: Peer, now: float) -> None:
        set_aside, number = tuple(self._set_aside(item.plan, item.g)), secrets.randbits(LEASE_BITS)
        # A batch that nobody makes in time gets more of it, or would never be made.
        ttl_s = self.rules.lease_ttl_s * 2 ** min(item.expired, 4)
        record = LeaseRecord(number, item, peer.id, now, now + ttl_s, set_aside)
        item.state, item.lease = LEASED, record.id
        peer.leases[record.id] = self._records[record.id] = record
        records = self._records
        while len(records) > REMEMBERED and next(iter(records.values())).outcome is not None:
            records.popitem(last=False)
        fields = {"plan": item.plan, "g": item.g, "lease": record.id, "peer": peer.label}
        self.event("lease", **fields, position=item.position)
        self.outbox.append(
            (peer.id, Lease(self.gen, item.plan, item.g, record.id, item.position, set_aside))
        )

    def _close(self, record: LeaseRecord, outcome: str, why: str = "") -> None:
        record.outcome = outcome
        self.outcomes[outcome] += 1
        peer = self.peers.get(record.peer)
        if peer is not None:
            peer.leases.pop(record.id, None)
        if record.item.lease == record.id:
            record.item.lease = None
            if record.item.state == LEASED:
                record.item.state = FREE
        fields = {
            "plan": record.item.plan,
            "g": record.item.g,
            "lease": record.id,
            "peer": peer.label if peer else record.peer.hex()[-8:],
        }
        self.event("lease_end", outcome=outcome, why=why, **fields)

    def _fail(self, record: LeaseRecord, outcome: str, why: str) -> None:
        record.item.failed_by = record.peer
        self._close(record, outcome, why)

    def _free_all(self, peer: Peer, outcome: str, why: str) -> None:
        for record in list(peer.leases.values()):
            record.item.lost += 1
            if peer.id not in self.peers:  # _close cannot find a peer that is already forgotten
                peer.leases.pop(record.id)
            self._close(record, outcome, why)

    def _strike(self, peer: Peer, why: str) -> None:
        wait_s = min(MAX_BACKOFF_S, BACKOFF_S * 2 ** min(peer.backoff, 10))
        peer.strikes, peer.backoff = peer.strikes + 1, peer.backoff + 1
        peer.backoff_until = self.clock() + wait_s
        self.event("strike", peer=peer.label, why=why, strikes=peer.strikes, backoff_s=wait_s)

    # answers

    def _answered(self, peer: Peer, answer: Data | Nack) -> LeaseRecord | None:
        """The lease that a peer answers, if it went to this peer, for this batch, and the peer has
        said READY since.
        """
        record = self._records.get(answer.lease)
        if record is None or record.peer != peer.id or peer.state not in ("ready", "frozen"):
            return None
        return record if (record.item.plan, record.item.g) == (answer.plan, answer.g) else None

    def on_data(self, peer: Peer, data: Data, digest_is_right: bool) -> str:
        """DATA of the current generation.

        Returns what became of it: accepted, duplicate, bad or unknown.
        """
        record = self._answered(peer, data)
        fields = {
            "plan": data.plan,
            "g": data.g,
            "lease": data.lease,
            "peer": peer.label,
            "digest": data.digest,
        }
        if record is None:
            self.event("unknown_lease", **fields)
            return "unknown"
        if not digest_is_right:
            self.event("bad_digest", **fields)
            if record.outcome is None:
                self._fail(record, "bad", "digest does not match the bytes")
                self._strike(peer, "bad digest")
            return "bad"
        item = record.item
        self._compare(record, data.digest, peer.label)
        if item.state not in (FREE, LEASED, FAILED) or self._items.get(item.position) is not item:
            self.event("duplicate", **fields)
            if record.outcome is None:
                self._close(record, "revoked", "another copy came first")
            return "duplicate"
        self.event("data", late=record.outcome is not None, position=item.position, **fields)
        self._accept(item, record, data, peer)
        return "accepted"

    def _accept(self, item: Item, record: LeaseRecord, data: Data, peer: Peer) -> None:
        if item.lease is not None and item.lease != record.id:  # leased to another meanwhile
            other = self._records[item.lease]
            self.outbox.append((other.peer, Revoke(self.gen, other.id)))
            self._close(other, "revoked", "another copy came first")
        if record.outcome is None:
            self._close(record, "accepted")
            peer.backoff = max(0, peer.backoff - 1)
            # The peer gets on: leases it takes up after this one start to count now.
            for behind in peer.leases.values():
                if behind.item.position > item.position:
                    behind.deadline = max(behind.deadline, self.clock() + self.rules.lease_ttl_s)
        item.state, item.data, item.set_aside = READY, data, record.set_aside
        item.producer, item.maker = peer.label, peer.id
        peer.produced += 1

    def _compare(self, record: LeaseRecord, digest: str, label: str) -> None:
        if record.rejected:
            return
        plan, g = record.item.plan, record.item.g
        found = self.digests.compare(plan, g, record.set_aside, digest, label)
        if found is not None:
            self.event("digest_mismatch", plan=plan, g=g, digests=found.digests, peers=found.makers)

    def on_nack(self, peer: Peer, nack: Nack) -> None:
        record = self._answered(peer, nack)
        if record is None or record.outcome is not None:
            return
        item = record.item
        # no fault of the batch's, nor of its maker's: others are asked first, and it again after a
        # while
        if nack.later:
            item.postponed = f"{peer.label}: {nack.why}"
            self._fail(record, "postponed", nack.why)
            peer.backoff_until = max(peer.backoff_until, self.clock() + LATER_S)
            return
        item.nacks.append((peer.id, f"{peer.label}: {nack.why}"))
        self._fail(record, "nacked", nack.why)
        self._strike(peer, "nack")
        able = {p.id for p in self.peers.values() if p.state == "ready"}
        refusing = {peer_id for peer_id, _ in item.nacks}
        if len(item.nacks) >= self.rules.max_nacks and able <= refusing:
            item.state = FAILED
            self.event("batch_failed", plan=item.plan, g=item.g, why=nack.why)

    # delivery

    def head(self) -> Item | None:
        """The item to deliver next, None if the schedule has not got that far (or has ended, see
        `at_end`).
        """
        return self._items.get(self.next_position)

    def at_end(self) -> bool:
        return self.exhausted and self.next_position not in self._items

    def take(self) -> tuple[Item, Data] | None:
        """The next item in schedule order if its data is here; its arrays belong to the caller from
        now on.
        """
        item = self.head()
        if item is None or item.state != READY or item.data is None:
            if item is not None and self.in_state(DELIVERED) < IN_HAND:
                self.target.ran_low(self.released)
            return None
        data, item.data, item.state = item.data, None, DELIVERED
        self.next_position += 1
        fields = {"plan": item.plan, "g": item.g, "digest": data.digest}
        self.event("deliver", **fields, position=item.position, peer=item.producer)
        return item, data

    def release(self) -> tuple[str, int] | None:
        """The oldest delivered item has been trained: one credit.

        Returns its (plan, g); None if nothing is delivered.
        """
        item = self._items.get(self.released)
        if item is None or item.state != DELIVERED:
            return None
        del self._items[self.released]
        self.released += 1
        self.target.released(self.released, self.in_state(READY, DELIVERED))
        self.event("release", plan=item.plan, g=item.g, position=item.position)
        return item.plan, item.g

    def all_delivered(self) -> bool:
        """Whether all that may exist is with the trainer: nothing can come before it releases a
        batch.
        """
        return self.in_state(DELIVERED) >= min(self.window, self.target.value)

    def reject(self, position: int, reason: str, strike: bool) -> bool:
        """Have the newest delivered item made again. False if `position` is not that item."""
        item = self._items.get(position)
        if item is None or item.state != DELIVERED or position != self.next_position - 1:
            return False
        item.state, self.next_position = FREE, position
        self.digests.forget(item.plan, item.g)
        # A late copy of what was rejected must not be taken for the new one.
        for record in self._records.values():
            if record.item is item:
                record.item = Item(position, item.plan, item.g, state=DELIVERED)
                record.rejected = True
        self.event(
            "reject", plan=item.plan, g=item.g, reason=reason, peer=item.producer, strike=strike
        )
        maker = self.peers.get(item.maker)
        if strike and maker is not None:
            item.failed_by = maker.id
            self._strike(maker, f"rejected: {reason}")
        return True

    def compiling(self) -> bool:
        """Whether a producer that holds leases is compiling: what is awaited may come late."""
        now = self.clock()
        return any(
            peer.leases and now <= peer.compiling_until(self.rules) for peer in self.peers.values()
        )

    def in_state(self, *states: str) -> int:
        return sum(item.state in states for item in self._items.values())

    def nbytes(self) -> int:
        """Bytes of the arrays held for delivery."""
        return sum(
            a.nbytes
            for item in self._items.values()
            if item.data
            for a in item.data.arrays.values()
        )
