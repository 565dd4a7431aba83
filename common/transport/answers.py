"""The trainer's messages to each producer: answers to its own, and what the accounting of leases
has for it.
"""

from __future__ import annotations

from collections.abc import Callable

from common.transport import lease_records, wire
from common.transport.leases import LeaseBook
from common.transport.links import Received, ServerLink
from common.transport.messages import (
    Bye,
    Data,
    Heartbeat,
    Lease,
    Message,
    Nack,
    Offer,
    Ready,
    Refuse,
    Welcome,
    WireError,
)

MAX_PEERS = 512
WELCOME_S = 1.0  # between two WELCOMEs to one producer


class Answers:
    """Not thread-safe: the caller holds the lock that guards the book.

    offer, accept: the generation's, as in `LeaseServer.open`. last_lost: who left last, and how.
    """

    def __init__(self, book: LeaseBook, link: ServerLink, run: str):
        self._book, self._link, self._run = book, link, run
        self.offer = Offer("")
        self.accept: Callable[[Ready], str | None] = lambda ready: None
        self.last_lost = ""
        self._garbage: dict[bytes, int] = {}

    def flush(self, stopping: bool) -> None:
        """Send the collected messages.

        A peer that cannot be reached loses its leases, which are leased again at once.
        """
        book = self._book
        while book.outbox:
            peer_id, message = book.outbox.popleft()
            if peer_id not in book.peers:
                continue
            sent = self._link.send(peer_id, self._run, message)
            if sent == "gone":
                self._lost(peer_id, "disconnected")
                if not stopping:
                    book.assign()
            elif sent == "full" and book.peers[peer_id].state != "frozen":
                book.counts["eagain"] += 1  # must stay 0: credits bound what is in flight
                if isinstance(message, Lease):
                    self._lost(peer_id, "does not read")

    def _lost(self, peer_id: bytes, why: str) -> None:
        peer = self._book.peers[peer_id]
        if peer.name:
            self.last_lost = f"{peer.label} (pid {peer.pid}) {why} after {peer.produced} batches"
        self._garbage.pop(peer_id, None)
        self._book.peer_lost(peer_id, why)

    def take(self, messages: list[Received], right: list[bool]) -> None:
        """Handle the messages that came, each with whether its digest matches its bytes."""
        for (peer_id, run, message), digest_is_right in zip(messages, right, strict=True):
            self._on_message(peer_id, run, message, digest_is_right)

    def _on_message(
        self, peer_id: bytes, run: str, message: Message | WireError, digest_is_right: bool
    ) -> None:
        book = self._book
        if isinstance(message, WireError):
            self._on_garbage(peer_id, run, message)
            return
        if peer_id not in book.peers and len(book.peers) >= MAX_PEERS:
            self._link.send(
                peer_id,
                run,
                Refuse(book.gen, f"this trainer has {MAX_PEERS} producers, which is the most"),
            )
            return
        peer = book.heard(peer_id)
        if run != self._run:
            self._refuse(
                peer, f"this trainer runs {self._run}, the producer belongs to run {run}", run
            )
        elif peer.state == "refused":
            self._refuse(peer, peer.refused, run)
        elif isinstance(message, Bye):
            self._lost(peer_id, "left")
        elif isinstance(message, Heartbeat):
            peer.gen = message.gen
            book.peer_status(peer, message.status)
            if message.gen != book.gen or message.ready != (peer.state == "ready"):
                self.greet(peer)
        elif message.gen != book.gen:
            book.event("stale", peer=peer.label, type=message.TYPE, of=message.gen)
            self.greet(peer)
        elif isinstance(message, Ready):
            self._on_ready(peer, message, run)
        elif isinstance(message, Data):
            book.on_data(peer, message, digest_is_right)
        elif isinstance(message, Nack):
            book.on_nack(peer, message)

    def _on_ready(self, peer: lease_records.Peer, message: Ready, run: str) -> None:
        reason = self.accept(message)
        if reason is None:
            self._book.peer_ready(peer, message)
        else:
            peer.name, peer.pid = message.name, message.pid
            self._refuse(peer, reason, run)

    def greet(self, peer: lease_records.Peer) -> None:
        """WELCOME, at most once a second per generation: a producer may take a minute to answer
        READY.
        """
        now = self._book.clock()
        if (
            self._book.gen == 0
            or peer.state == "refused"
            or (peer.welcomed_gen == self._book.gen and now - peer.welcomed_at < WELCOME_S)
        ):
            return
        peer.welcomed_gen, peer.welcomed_at = self._book.gen, now
        self._book.outbox.append((peer.id, Welcome(self._book.gen, self.offer)))

    def _refuse(self, peer: lease_records.Peer, reason: str, run: str) -> None:
        self._book.peer_refused(peer, reason)
        self._link.send(
            peer.id, run, Refuse(self._book.gen, reason)
        )  # sent under the producer's own run id, or it would not listen

    def _on_garbage(self, peer_id: bytes, run: str, error: WireError) -> None:
        """Count garbage; report a peer's first in full.

        Tell a producer of another version so.
        """
        seen = self._garbage[peer_id] = self._garbage.get(peer_id, 0) + 1
        peer = self._book.peers.get(peer_id)
        self._book.event(
            "garbage",
            peer=peer.label if peer else peer_id.hex()[-8:],
            error=str(error) if seen == 1 else "again",
        )
        if len(self._garbage) > 1000:
            self._garbage.clear()
        if error.version is not None and error.version != wire.VERSION and run:
            reason = f"{error}; use the same version of this program for both"
            self._link.send(peer_id, run, Refuse(self._book.gen, reason))
