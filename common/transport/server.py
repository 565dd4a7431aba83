"""The trainer's end of the channel: leases out, batches in.

Delivery contract of LeaseServer.next(): batches come in the order of the schedule, each exactly
once, whatever the number of producers, their speed, crashes and restarts. At most `window` batches
exist anywhere between the schedule and release(). What a crash of the trainer loses is what was not
released: the next generation leases it again. The rules are in common/transport/leases.py.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from common.transport import lease_records, server_status, wire
from common.transport.address import ChannelError
from common.transport.answers import Answers
from common.transport.delivery import BatchFailed, Delivery, Difference, NoData, StopAsked
from common.transport.keys import ServerKeys
from common.transport.lease_records import Rules
from common.transport.leases import LeaseBook
from common.transport.links import RECEIVE_AT_ONCE, RouterLink, ServerLink
from common.transport.messages import (
    Alive,
    Data,
    Offer,
    Ready,
    Stop,
    Welcome,
)

HEARTBEAT_S = 1.0
POLL_S = 0.2  # how often next() looks at should_stop
TICK_S, FINE_S = 0.1, 0.02  # resolution of expiry and back-off; of asking again and draining
# of next(), whatever the cause: a first step may compile for minutes before its release()
MAX_WAIT_S = 900.0
STALL_S = 2.0  # this process stood still for longer than that: nobody else is to blame
ASK_AGAIN_S = (
    0.0,
    0.03,
    0.1,
    0.3,
)  # after a disconnect: ask again, as the pipe goes a little later than the event comes


def _ignore(kind: str, **fields: Any) -> None:
    """on_event of a server whose owner does not listen."""


def _standstill(last: float, now: float) -> float:
    """Seconds between two looks for which this process was stopped or suspended: they count against
    no deadline.
    """
    return now - last if now - last > POLL_S + STALL_S else 0.0


class LeaseServer:
    """Owns the ROUTER in one thread; open, next, release, reject, stats and close may be called
    from any other.

    bind: ipc:///path (see address.ipc_address) or tcp://host:port with `keys`. max_frame_bytes: of
    the largest array that a batch has. on_event(kind, gen=…, t=…, **fields) gets every lease,
    lease_end, data, deliver, release, strike, peer and error event, in order, under the server's
    lock: it must be quick and must not call the server.
    Raises ChannelError when the address cannot be had.
    """

    clock = staticmethod(time.monotonic)  # of the leases

    def __init__(
        self,
        bind: str,
        run_id: str,
        window: int,
        *,
        rules: Rules = Rules(),  # noqa: B008 - frozen
        keys: ServerKeys | None = None,
        max_frame_bytes: int = wire.MAX_FRAME_BYTES,
        on_event: Callable[..., None] = _ignore,
        link: ServerLink | None = None,
    ):
        if window < 1:
            raise ChannelError(f"window {window}: at least one batch must be allowed")
        self._run = wire.check_run_id(run_id)
        self._changed = threading.Condition()  # guards the book
        self._book = LeaseBook(window, rules=rules, clock=self.clock, on_event=on_event)
        self._stopping, self._closing_until = False, None
        self._error: BaseException | None = None
        self._questions: deque[float] = deque()
        self._link = link or RouterLink(
            bind, window=window, max_frame_bytes=max_frame_bytes, keys=keys
        )
        self._answers = Answers(self._book, self._link, self._run)
        self.endpoint, self.public_key = self._link.address, self._link.public_key
        self._thread = threading.Thread(target=self._run_loop, name="lease-server", daemon=True)
        self._thread.start()

    # for the trainer

    def open(
        self,
        generation: int,
        offer: Offer,
        schedule: Iterable[tuple[str, int]],
        accept: Callable[[Ready], str | None] = lambda ready: None,
        set_aside: Callable[[str, int], Sequence[int]] = lambda plan, g: (),
    ) -> None:
        """Begin a generation: leases, data and credits of the one before are dropped; every
        producer is welcomed anew.

        schedule: (plan, g) in exactly the order of consumption, finite or endless. accept(ready) ->
        None, or the reason to refuse. set_aside(plan, g): clips that the batch is made without,
        asked when it is leased. All three run in the server's thread: quick, and no calls back.
        """
        wire.encode(
            self._run, Welcome(generation, offer)
        )  # a mistake shows here, not in the thread
        with self._changed:
            if generation <= self._book.gen:
                raise ChannelError(
                    f"generation {generation} is not above {self._book.gen}: producers would"
                    " ignore it"
                )
            self._answers.offer, self._answers.accept = offer, accept
            self._book.open(generation, schedule, set_aside)
            for peer in self._book.peers.values():
                self._answers.greet(peer)
            self._changed.notify_all()
        self._link.wake()

    def next(
        self, timeout_s: float = 30.0, should_stop: Callable[[], bool] = lambda: False
    ) -> Delivery | None:
        """The next batch of the schedule, None at its end.

        Raises NoData when the batch has not come after timeout_s (names the cause), BatchFailed
        when every producer refuses it, StopAsked within 0.2 s of should_stop(). One thread at a
        time.
        """
        start = since = last = time.monotonic()
        with self._changed:
            while True:
                self._check_alive()
                before, taken = self._book.target.value, self._book.take()
                if self._book.target.value > before:
                    self._link.wake()  # more may be leased now
                if taken is not None:
                    item, data = taken
                    wait_s = time.monotonic() - start
                    return Delivery(
                        item.plan,
                        item.g,
                        data.arrays,
                        data.notes,
                        item.set_aside,
                        item.producer,
                        data.digest,
                        wait_s,
                        item.position,
                    )
                self._raise_if_failed()
                if self._book.gen and self._book.at_end():
                    return None
                if should_stop():
                    raise StopAsked("told to stop while waiting for a batch")
                now = time.monotonic()
                still = _standstill(last, now)
                start, since, last = start + still, since + still, now
                if now < start + MAX_WAIT_S and (
                    self._book.all_delivered() or self._book.compiling()
                ):
                    # the deadline does not run while it is release() that is awaited, or a
                    # compilation
                    since = now
                left = since + timeout_s - now
                if left <= 0:
                    raise self._no_data(timeout_s)
                self._changed.wait(min(left, POLL_S))

    def release(self) -> None:
        """The oldest delivered batch has been trained (or evaluated): one credit."""
        with self._changed:
            if self._book.release() is None:
                raise ChannelError("release() without a delivered batch")
        self._link.wake()

    def reject(self, delivery: Delivery, reason: str, strike: bool = False) -> None:
        """Have a batch made and delivered again.

        Only the newest delivery can be rejected: order would be lost otherwise.
        """
        with self._changed:
            if not self._book.reject(delivery.position, reason, strike):
                raise ChannelError(
                    f"batch {delivery.plan} {delivery.g} is not the newest delivered one: reject it"
                    " before the next next()"
                )
        self._link.wake()

    def ready_count(self) -> int:
        """Batches waiting here now."""
        with self._changed:
            self._check_alive()
            return self._book.in_state(lease_records.READY)

    def differing(self) -> list[Difference]:
        """Batches of this generation that were made twice with different bytes, since the last
        call.
        """
        with self._changed:
            return self._book.digests.take_differing()

    def target(self) -> int:
        """How many batches may exist now."""
        with self._changed:
            return self._book.target.value

    def _raise_if_failed(self) -> None:
        item = self._book.head()
        if item is not None and item.state == lease_records.FAILED:
            raise BatchFailed(
                item.plan, item.g, "; ".join(dict.fromkeys(why for _, why in item.nacks))
            )

    def wait_ready(
        self,
        wanted: int,
        timeout_s: float,
        should_stop: Callable[[], bool] = lambda: False,
        tell: Callable[[int, int], None] = lambda ready, producers: None,
    ) -> None:
        """Return when `wanted` batches wait here, or the schedule has no more.

        Errors and deadline as of next().

        tell(batches, producers that make some) is called about five times a second.
        """
        start = since = last = time.monotonic()
        while True:
            with self._changed:
                self._check_alive()
                self._raise_if_failed()
                ready, at_end = self._book.in_state(lease_records.READY), self._book.exhausted
                producers = sum(p.state == "ready" for p in self._book.peers.values())
                busy, idle = self._book.compiling(), not self._book.in_state(lease_records.LEASED)
            tell(ready, producers)
            if ready >= wanted or (at_end and idle):
                return
            if should_stop():
                raise StopAsked("told to stop while waiting for batches")
            now = time.monotonic()
            still = _standstill(last, now)
            start, since, last = start + still, since + still, now
            if busy and now < start + MAX_WAIT_S:
                since = now
            if now > since + timeout_s:
                raise self._no_data(timeout_s)
            with self._changed:
                self._changed.wait(POLL_S)

    def _no_data(self, waited_s: float) -> NoData:
        with self._changed:
            return NoData(
                server_status.why_no_data(
                    self._book, self.endpoint, waited_s, self._answers.last_lost
                ),
                len(self._book.peers),
            )

    def stats(self) -> dict[str, Any]:
        """See channel_status.stats; with `bytes` received."""
        with self._changed:
            return {**server_status.stats(self._book), "bytes": self._link.bytes_received}

    def close(self, drain_s: float = 2.0, stop_producers: bool = True) -> None:
        """End.

        With stop_producers, STOP goes out and drain_s is waited for their BYE; without, they stay
        warm for the next trainer.
        """
        with self._changed:
            if not self._stopping and stop_producers and self._error is None:
                for peer_id in self._book.peers:
                    self._book.outbox.append((peer_id, Stop(self._book.gen, "the run is over")))
            else:
                drain_s = 0.0
            self._stopping, self._closing_until = True, time.monotonic() + drain_s
            self._changed.notify_all()
        self._link.wake()
        self._thread.join(drain_s + 5.0)
        if self._thread.is_alive():
            raise ChannelError(f"the channel's thread did not end within {drain_s + 5.0:.0f} s")

    # the thread

    def _run_loop(self) -> None:
        try:
            self._loop()
        except BaseException as error:  # noqa: BLE001 - the thread's edge: next() raises it in the trainer
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            self._link.close()

    def _loop(self) -> None:
        heartbeat_at, last = 0.0, time.monotonic()
        timeout_s = TICK_S
        while True:
            messages, disconnected = self._link.receive(timeout_s)
            right = [
                isinstance(m, Data) and wire.digest(m.arrays) == m.digest for _, _, m in messages
            ]  # outside the lock
            now = time.monotonic()
            with self._changed:
                if now - last > STALL_S:
                    self._book.stalled(now - last)
                last = now
                self._answers.take(messages, right)
                if (
                    len(messages) < RECEIVE_AT_ONCE
                ):  # all that peers have said is read: only now may one be called silent
                    self._book.tick()
                if disconnected:
                    self._questions.extend(now + delay for delay in ASK_AGAIN_S)
                if now >= heartbeat_at or self._due_question(now):
                    heartbeat_at = now + HEARTBEAT_S
                    self._heartbeat()
                if not self._stopping:
                    self._book.assign()
                self._answers.flush(self._stopping)
                self._changed.notify_all()
                if self._stopping and (
                    not self._waiting_for() or time.monotonic() >= self._closing_until
                ):
                    return
            del messages  # else the last batch would stay in memory until the next one comes
            timeout_s = FINE_S if self._stopping or self._questions else TICK_S

    def _waiting_for(self) -> list[str]:
        """Producers that have been told to stop and can still say BYE."""
        return [
            peer.label for peer in self._book.peers.values() if peer.state in ("joining", "ready")
        ]

    def _due_question(self, now: float) -> bool:
        due = False
        while self._questions and min(self._questions) <= now:
            self._questions.remove(min(self._questions))
            due = True
        return due

    def _heartbeat(self) -> None:
        """Sent to every peer; with ROUTER_MANDATORY it is also how a killed one is found."""
        for peer in self._book.peers.values():
            self._book.outbox.append((peer.id, Alive(self._book.gen)))

    def _check_alive(self) -> None:
        if self._error is not None:
            raise ChannelError(
                f"the channel's thread ended: {type(self._error).__name__}: {self._error}"
            ) from self._error
        if self._stopping:
            raise ChannelError("the channel is closed")
