"""The producer's end of the channel: leases in, batches out.

A thread owns the DEALER, so that heartbeats go on while TensorFlow computes in the caller's. The
connection re-makes itself: when the trainer is away, poll() returns None for as long as it takes,
and the producer stays warm. Nothing sent is promised to arrive: a batch that is lost (trainer
restarted, lease expired) is leased again by the trainer.

    client = LeaseClient(endpoint, run_id, "producer-0", capacity=2)
    while True:
        event = client.poll(0.5)
        if isinstance(event, Welcome):    client.ready(event.gen, feature_hash, probe)
        elif isinstance(event, Lease):    client.send(event, arrays, notes)   or
        client.nack(event, why)
        elif isinstance(event, (Stop, Refused)):    break
    client.bye(); client.close()
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Protocol

import numpy as np

from common.transport import wire
from common.transport.address import ChannelError, Endpoint
from common.transport.keys import KeyPair
from common.transport.links import DealerLink
from common.transport.messages import (
    MAX_NAME,
    Bye,
    Data,
    Heartbeat,
    Lease,
    Message,
    Nack,
    Notes,
    Ready,
    Revoke,
    Stop,
    Welcome,
    WireError,
    printable,
)
from common.transport.messages import Refuse as Refused

__all__ = ["Endpoint", "Lease", "LeaseClient", "Notes", "Refused", "Stop", "Welcome"]

HEARTBEAT_S = 1.0
LOOK_S = 0.5  # how often the endpoint is read again while there is no connection
POLL_S = 0.2
MAX_EVENTS = 64  # not polled yet; if there are more, the newest
SILENT_S = 5.0  # a connected trainer that says nothing for so long may have a successor elsewhere

log = logging.getLogger(__name__)

Event = Welcome | Lease | Stop | Refused


class ClientLink(Protocol):
    """What LeaseClient needs from a transport (DealerLink, or LocalLink in one process)."""

    endpoint: Endpoint | None
    connected: bool

    def connect(self, endpoint: Endpoint | None) -> None: ...
    def receive(
        self, timeout_s: float
    ) -> tuple[list[tuple[str, Message | WireError]], list[str]]: ...
    def send(self, run: str, message: Message) -> bool: ...
    def wake(self) -> None: ...
    def close(self, linger_s: float = 0.2) -> None: ...


class LeaseClient:
    """One per producer process.

    All methods may be called from any thread and none blocks longer than its timeout.

    endpoint() -> Endpoint, or None while there is no trainer; it is called again whenever there is
    no connection, since a restarted trainer may listen elsewhere. capacity: leases held at once (2
    = one being made, one waiting). keys: needed when the endpoint has a public key. An error of the
    I/O thread (an endpoint that is no address, a missing key) is raised by poll() as ChannelError.
    """

    def __init__(
        self,
        endpoint: Callable[[], Endpoint | None],
        run_id: str,
        name: str,
        capacity: int = 2,
        *,
        keys: KeyPair | None = None,
        heartbeat_s: float = HEARTBEAT_S,
        link: ClientLink | None = None,
    ):
        self._endpoint, self._run, self._name, self._capacity = (
            endpoint,
            wire.check_run_id(run_id),
            printable(name, MAX_NAME),
            capacity,
        )
        self._heartbeat_s = heartbeat_s
        self._changed = threading.Condition()  # guards everything below
        self._gen = 0
        self._ready: Ready | None = None  # what was answered to the WELCOME of self._gen
        self._status = "starting"
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)  # everything but leases
        self._queue: list[Lease] = []  # leases not yet polled, soonest needed first
        self._held: set[int] = set()  # leases of this generation neither answered nor revoked
        self._outbox: deque[Message] = deque()
        self._leaving = False
        self._error: BaseException | None = None
        self.counts: Counter[str] = (
            Counter()
        )  # sent, nacked, dropped_old, dropped_offline, revoked, garbage
        self.last_heard = time.monotonic()  # of the trainer
        self.trouble = "not connected yet"  # why there is no trainer; empty while connected
        self._say_hello = False
        self._link = link or DealerLink(keys=keys, high_water_mark=max(16, 4 * capacity))
        self._thread = threading.Thread(target=self._run_loop, name="lease-client", daemon=True)
        self._thread.start()

    # for the producer

    def poll(self, timeout_s: float) -> Event | None:
        """The next thing to do, None after timeout_s: Refused and Stop before Welcome before
        leases; of these the one needed soonest.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                if self._error is not None:
                    raise ChannelError(f"{self._error}") from self._error
                if self._events:
                    return self._events.popleft()
                if self._queue:
                    return self._queue.pop(0)
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(left)

    def ready(self, gen: int, feature_hash: str = "", probe: str = "") -> None:
        """Answer a Welcome: from now on leases come. Repeated automatically after a reconnect."""
        message = Ready(gen, self._name, os.getpid(), self._capacity, feature_hash, probe)
        wire.encode(self._run, message)  # fail here, not in the thread
        with self._changed:
            if (
                gen != self._gen
            ):  # the trainer has moved on meanwhile: a newer Welcome waits in poll()
                return
            self._ready = message
            self._outbox.append(message)
        self._link.wake()

    def send(self, lease: Lease, arrays: dict[str, np.ndarray], notes: Notes = Notes()) -> bool:  # noqa: B008 - frozen
        """Send a batch; never blocks.

        The arrays must not be written to afterwards: they are read while they are being sent.

        False (and counted) if the generation has moved on. An expired or revoked lease is still
        sent: the first copy wins.
        """
        message = Data(
            lease.gen, lease.plan, lease.g, lease.lease, wire.digest(arrays), notes, arrays
        )
        wire.encode(self._run, message)
        return self._answer(lease, message, "sent")

    def nack(self, lease: Lease, why: str, later: bool = False) -> bool:
        """Report that this batch cannot be made here; `later`: not now, but perhaps later."""
        return self._answer(
            lease, Nack(lease.gen, lease.plan, lease.g, lease.lease, why, later), "nacked"
        )

    def _answer(self, lease: Lease, message: Message, kind: str) -> bool:
        with self._changed:
            if lease.gen != self._gen:
                self.counts["dropped_old"] += 1
                return False
            self._held.discard(lease.lease)
            self.counts[kind] += 1
            self._outbox.append(message)
        self._link.wake()
        return True

    def is_current(self, lease: Lease) -> bool:
        """False once the lease is revoked, answered, or of an old generation: look before starting
        work on it.
        """
        with self._changed:
            return lease.gen == self._gen and lease.lease in self._held

    def set_status(self, text: str) -> None:
        """Report what the producer is doing; sent at once.

        A text that begins with `compiling` keeps its leases alive for up to 120 s.
        """
        with self._changed:
            if text == self._status:
                return
            self._status, self._say_hello = text, True
        self._link.wake()

    @property
    def generation(self) -> int:
        """The generation last welcomed to, 0 before the first."""
        return self._gen

    @property
    def trainer_silent_s(self) -> float:
        """Seconds since the trainer was last heard."""
        return time.monotonic() - self.last_heard

    def bye(self) -> None:
        """Announce that this producer leaves, which frees its leases at once. Call close() next."""
        with self._changed:
            self._queue.clear()
            self._held.clear()
            self._ready = None
            self._outbox.append(Bye(self._gen))
            self._leaving = True
        self._link.wake()

    def close(self) -> None:
        """Send what is waiting if the trainer takes it at once, then close; takes at most about a
        second.
        """
        with self._changed:
            self._leaving = True
            self._changed.notify_all()
        self._link.wake()
        self._thread.join(5.0)
        if self._thread.is_alive():
            raise ChannelError("the channel's thread did not end within 5 s")

    # the thread

    def _run_loop(self) -> None:
        try:
            self._loop()
        except BaseException as error:  # noqa: BLE001 - the thread's edge: poll() raises it in the producer
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            self._link.close()

    def _loop(self) -> None:
        hello_at = look_at = 0.0
        while True:
            now = time.monotonic()
            if now >= look_at and (not self._link.connected or self.trainer_silent_s > SILENT_S):
                look_at = now + LOOK_S
                self._look()
            with self._changed:
                if now >= hello_at or self._say_hello:
                    self._say_hello = False
                    hello_at = now + self._heartbeat_s
                    self._outbox.append(Heartbeat(self._gen, self._status, self._ready is not None))
                outbox, leaving = list(self._outbox), self._leaving
                self._outbox.clear()
            unsent = self._send(outbox)
            with self._changed:
                self._outbox.extendleft(reversed([m for m in unsent if m.gen == self._gen]))
            del (
                outbox,
                unsent,
            )  # or the last batch would stay in memory until the next one is sent
            if leaving:
                return
            timeout_s = min(POLL_S, max(0.0, hello_at - now))
            messages, changes = self._link.receive(timeout_s)
            with self._changed:
                for change in changes:
                    self._on_change(change)
                for run, message in messages:
                    self._on_message(run, message)
                if messages or changes:
                    self._changed.notify_all()

    def _look(self) -> None:
        endpoint = self._endpoint()
        if endpoint != self._link.endpoint:
            self._link.connect(endpoint)

    def _send(self, messages: list[Message]) -> list[Message]:
        """Keep answers while the trainer is there but reads nothing (suspended); drop them without
        a connection.
        """
        unsent = []
        for message in messages:
            if not self._link.send(self._run, message) and isinstance(message, (Data, Nack)):
                if self._link.connected:
                    unsent.append(message)
                else:
                    self.counts["dropped_offline"] += 1
        return unsent

    def _on_change(self, change: str) -> None:
        """A connection was made: say at once who we are.

        A READY on a new connection tells the trainer that earlier leases are void.
        """
        where = self._link.endpoint.address if self._link.endpoint else "?"
        if change == "refused":
            self._events.append(
                Refused(self._gen, f"the trainer at {where} does not accept this producer's key")
            )
        elif change == "misunderstood":
            trouble = (
                f"{where} does not speak to us: another run's trainer (its key differs), or not a"
                " trainer at all"
            )
            if trouble != self.trouble:  # at every attempt, twice a second
                log.warning("%s", trouble)
            self.trouble = trouble
        elif change == "disconnected":
            self.trouble = f"the trainer at {where} went away"
        elif change == "connected":
            self.trouble = ""
            self._say_hello = True
            if self._ready is not None:
                self._drop_leases()
                self._outbox.append(self._ready)

    def _drop_leases(self) -> None:
        self.counts["revoked"] += len(self._held)
        self._queue.clear()
        self._held.clear()

    def _on_message(self, run: str, message: Message | WireError) -> None:
        if isinstance(message, WireError) or run != self._run:
            self.counts["garbage"] += 1
            return
        self.last_heard = time.monotonic()
        if isinstance(message, Refused):
            self._events.append(message)
        elif message.gen < self._gen:
            self.counts["old_generation"] += 1
        elif isinstance(message, Welcome):
            self._on_welcome(message)
        elif isinstance(message, Stop):
            self._drop_leases()
            self._events.append(message)
        elif (
            message.gen > self._gen
        ):  # not welcomed to it yet: our heartbeat shows the trainer that we are behind
            self._say_hello = True
        elif isinstance(message, Lease):
            full = (
                len(self._held) >= 2 * self._capacity
            )  # a trainer leases no more than it was asked for
            if self._ready is not None and not full and message.lease not in self._held:
                self._held.add(message.lease)
                self._queue.append(message)
                self._queue.sort(key=lambda lease: lease.position)
        elif isinstance(message, Revoke):
            self.counts["revoked"] += message.lease in self._held
            self._held.discard(message.lease)
            self._queue = [lease for lease in self._queue if lease.lease != message.lease]

    def _on_welcome(self, message: Welcome) -> None:
        if (
            message.gen == self._gen
        ):  # the trainer does not have our READY (silence, a broken connection)
            if self._ready is not None:
                self._drop_leases()
                self._outbox.append(self._ready)
            return
        self._gen, self._ready = message.gen, None
        self._drop_leases()
        self._events = deque((e for e in self._events if not isinstance(e, Welcome)), MAX_EVENTS)
        self._events.append(message)
