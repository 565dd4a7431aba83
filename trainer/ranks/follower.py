"""A follower's end of the link to the first trainer: batches, meetings, and the end of the work.

A thread owns the socket and answers for this process while the trainer computes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import zmq

from common.system.errors import BadInput, RunError, Stopped
from common.transport import wire
from common.transport.delivery import Delivery, StopAsked
from common.transport.keys import KeyPair
from common.transport.links import CHANGES, Wake, monitored
from common.transport.messages import Data, Notes, WireError
from trainer.ranks.leader import PATIENCE, STALL_S, TICK_S
from trainer.ranks.words import FROM_LEADER, RankLost, Word, decode, encode, family

log = logging.getLogger(__name__)

BEAT_S = 0.5
_POLL_S = 0.1


class Ended(RunError):
    """The first trainer has ended this one's work, and leaves with `code`."""

    def __init__(self, why: str, code: int):
        super().__init__(why)
        self.code = code


@dataclass(frozen=True)
class Far:
    """What a follower needs that meets the first trainer over tcp: that one's public key, its own
    keys, this host's name, and where its collective server will listen (host:port).
    """

    first_key: str
    keys: KeyPair
    host: str
    collective: str


class Follower:
    """Rank `rank`'s end, connected to `address`.

    Args:
        count: trainers in all.
        timeout_s: how long the first trainer may be silent.
        far: where `address` is of tcp.

    `digests(step)` is called in a thread of its own, and gives name → digest of the weights after a
    step; `on_lost` is called once, when the first trainer is lost.
    """

    def __init__(
        self,
        address: str,
        rank: int,
        count: int,
        timeout_s: float,
        far: Far | None = None,
    ):
        self.rank, self.count, self._timeout_s = rank, count, timeout_s
        of = ("", far.host, far.collective) if far else (family(), "", "")
        of = dict(zip(("family", "host", "address"), of, strict=True))
        self._me = {"rank": rank, "count": count, "pid": os.getpid(), **of}
        self._address, self.trouble = address, ""  # what keeps it from connecting, in words
        self.digests: Callable[[int], Mapping[str, str]] = lambda step: {}
        self.on_lost: Callable[[], object] = lambda: None
        self._changed = threading.Condition()
        self._words: dict[str, Word] = {}  # the newest of each kind
        self._batches: deque[Delivery] = deque()
        self._outbox: deque[bytes] = deque()
        self._session, self._heard_at, self._number = "", 0.0, 0
        self._ended: RunError | None = None
        self.doing, self._closing = "", False
        self._asked: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._wake, self._context = Wake(), zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.linger = 500
        self._dealer.setsockopt(zmq.ROUTING_ID, b"\x01" + uuid.uuid4().bytes)
        # Not IMMEDIATE: at a disconnect, libzmq would drop what has arrived and was not read yet.
        self._dealer.setsockopt(zmq.RCVHWM, 0)
        self._dealer.setsockopt(zmq.RECONNECT_IVL, 50)
        self._dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        if far is not None:
            self._dealer.setsockopt(zmq.IPV6, int("[" in address))
            self._dealer.curve_serverkey = far.first_key.encode()
            self._dealer.curve_publickey = far.keys.public.encode()
            self._dealer.curve_secretkey = far.keys.secret.encode()
        self._monitor = self._dealer.get_monitor_socket(sum(CHANGES))
        self._dealer.connect(address)
        self._threads = [
            threading.Thread(target=self._run_thread, name="ranks", daemon=True),
            threading.Thread(target=self._answer, name="digests", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # -- for the trainer ---------------------------------------------------------------------------

    def wait(self, kind: str, stopping: Callable[[], bool]) -> Word:
        """Wait for the first trainer's word `kind`. Raises like `check`, and Stopped."""
        with self._changed:
            self.await_word(kind, stopping)
            return self._words.pop(kind)

    def await_word(self, kind: str, stopping: Callable[[], bool]) -> None:
        """Until the word `kind` is there for `wait`. Raises like it, and what `stopping` does."""
        with self._changed:
            while kind not in self._words:
                self._raise_if_ended()
                if stopping():
                    raise Stopped("stop was asked for")
                self._changed.wait(_POLL_S)

    def meet(
        self, payload: bytes = b"", stopping: Callable[[], bool] = lambda: False
    ) -> list[bytes]:
        """See `Ranks.meet`. Raises like `check`, and Stopped."""
        self._number += 1
        self._tell("meet", number=self._number, payload=payload)
        go = self.wait("go", stopping)
        if go["number"] != self._number:
            raise RankLost(f"meeting {go['number']} began where {self._number} was due")
        return go["payloads"]

    def check(self) -> None:
        """Raise Ended if the first trainer ends this one, RankLost if it is lost."""
        with self._changed:
            self._raise_if_ended()

    @property
    def ended(self) -> bool:
        """Whether `check` raises."""
        return self._ended is not None

    def close(self) -> None:
        """Close, within bounded time."""
        self._closing = True
        self._asked.put(None)
        self._wake.set()
        self._threads[0].join(5.0)

    # -- as the feed's server ----------------------------------------------------------------------

    def next(self, timeout_s: float, should_stop: Callable[[], bool]) -> Delivery | None:
        """The next batch passed on. The first trainer announces when no more will come."""
        del timeout_s  # the first trainer's own deadline holds
        with self._changed:
            while not self._batches:
                if should_stop() or self._ended is not None:
                    raise StopAsked("told to stop while waiting for a batch")
                self._changed.wait(_POLL_S)
            return self._batches.popleft()

    def release(self) -> None:
        """Report that the oldest batch is used."""
        self._tell("used", g=0)

    def reject(self, delivery: Delivery, reason: str, strike: bool = False) -> None:
        """Raise RankLost: the first trainer has already checked the batch against its spec."""
        raise RankLost(f"batch {delivery.g} came damaged from the first trainer: {reason}")

    def ready_count(self) -> int:
        """Batches waiting here."""
        return len(self._batches)

    def target(self) -> int:
        """As many as come."""
        return len(self._batches)

    # -- the threads -------------------------------------------------------------------------------

    def _raise_if_ended(self) -> None:
        if self._ended is not None:
            raise self._ended

    def _tell(self, kind: str, **fields) -> None:
        with self._changed:
            self._outbox.append(encode(kind, self._session, **fields))
        self._wake.set()

    def _end(self, error: RunError) -> None:
        with self._changed:
            first, self._ended = self._ended is None, self._ended or error
            self._changed.notify_all()
        if first and isinstance(error, RankLost) and not self._closing:
            self.on_lost()

    def _answer(self) -> None:
        """Answer requests for the weights' digests."""
        while (step := self._asked.get()) is not None:
            try:
                lines = "\n".join(f"{k} {v}" for k, v in self.digests(step).items())
            except RunError as e:
                self._end(e)
                return
            except Exception as e:  # noqa: BLE001 - the edge of a thread: the trainer raises it
                self._end(RankLost(f"the weights cannot be read: {type(e).__name__}: {e}"))
                return
            self._tell("digests", step=step, payload=lines.encode())

    def _run_thread(self) -> None:
        try:
            self._loop()
        except Exception as e:  # noqa: BLE001 - the edge of a thread: whoever waits raises it
            self._end(RankLost(f"the thread between trainers ended: {type(e).__name__}: {e}"))
        finally:
            self._dealer.disable_monitor()
            self._monitor.close(0)
            self._context.destroy(linger=500)
            self._wake.close()

    def _loop(self) -> None:
        poller = zmq.Poller()
        for end in (self._dealer, self._monitor, self._wake.fileno()):
            poller.register(end, zmq.POLLIN)
        beat_at, last = 0.0, time.monotonic()
        while not self._closing:
            ready = dict(poller.poll(TICK_S * 1000))
            if self._wake.fileno() in ready:
                self._wake.clear()
            now = time.monotonic()
            if now - last > STALL_S:
                self._heard_at += now - last
            last = now
            self._hear_all(now)
            while self._monitor.poll(0):
                self._follow_connection(CHANGES[monitored(self._monitor)[0]], now)
            self._speak(now >= beat_at)
            beat_at = now + BEAT_S if now >= beat_at else beat_at
            limit_s = self._timeout_s if self._number > 1 else PATIENCE * self._timeout_s
            if self._session and now - self._heard_at > limit_s:
                silent_s = now - self._heard_at
                self._end(RankLost(f"the first trainer has said nothing for {silent_s:.0f} s"))

    def _follow_connection(self, change: str, now: float) -> None:
        if change == "disconnected":
            self._hear_all(now)  # its last word came before it was gone
            if self._session:
                self._end(RankLost("the first trainer is gone: see RUN/logs/trainer.log"))
        elif change == "refused" and not self._session:
            self._end(
                BadInput(
                    f"the first trainer at {self._address} does not know the key in"
                    " RUN/keys/client.json: all trainers need one and the same run folder, on a"
                    " file system that the hosts share"
                )
            )
        elif change == "misunderstood":
            self.trouble = f"what listens at {self._address} is no trainer of this run"
        else:
            self.trouble = ""

    def _hear_all(self, now: float) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                self._heard(self._dealer.recv_multipart(zmq.NOBLOCK, copy=False), now)

    def _speak(self, beat: bool) -> None:
        with self._changed:
            waiting = list(self._outbox)
            self._outbox.clear()
        if beat and self._session:
            waiting.append(encode("beat", self._session, doing=self.doing))
        elif beat:
            waiting.append(encode("hello", "", **self._me))
        for word in waiting:
            with contextlib.suppress(zmq.Again):  # nobody is there
                self._dealer.send(word, zmq.NOBLOCK)

    def _heard(self, frames: list[zmq.Frame], now: float) -> None:
        try:
            word = decode(frames[0].buffer, FROM_LEADER)
        except WireError as e:
            log.warning("not understood: %s", e)
            return
        if word.kind == "set_up" and not self._session:
            self._session = word.session
        if word.kind == "refused" and not self._session:
            self._end(RankLost(f"refused by the first trainer: {word['why']}"))
        if word.kind == "end" and not self._session:  # it ends while it waits for another one
            self._session = word.session
        if word.session != self._session:
            return
        self._heard_at = now
        if word.kind == "batch":
            self._take(word, frames[1:])
        elif word.kind == "ask":
            self._asked.put(word["step"])
        elif word.kind == "end":
            self._end(Ended(word["why"], word["code"]))
        elif word.kind != "beat":
            with self._changed:
                self._words[word.kind] = word
                self._changed.notify_all()

    def _take(self, word: Word, frames: list[zmq.Frame]) -> None:
        _, data = wire.decode([frame.buffer for frame in frames], {Data.TYPE: Data})
        if wire.digest(data.arrays) != data.digest:
            self._end(RankLost(f"batch {word['g']} was damaged on its way from the first trainer"))
            return
        batch = Delivery(
            data.plan, data.g, data.arrays, Notes(), (), "trainer", data.digest, 0.0, data.g
        )
        with self._changed:
            self._batches.append(batch)
            self._changed.notify_all()
