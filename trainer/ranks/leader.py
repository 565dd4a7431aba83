"""The first trainer's end: hands batches on to the others, meets them before each update, compares
their weights, and says which of them is lost.

A thread owns the socket. Delivery: batches reach a follower in the order in which they were handed
on; one that is lost is not sent again, as the group then starts again from a checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import zmq

from common.system.errors import Hopeless, Stopped
from common.transport import wire
from common.transport.address import ChannelError, check_ipc_free
from common.transport.keys import ServerKeys
from common.transport.links import Wake
from common.transport.messages import Data, Notes, WireError
from trainer.ranks.door import Door
from trainer.ranks.words import (
    FROM_FOLLOWER,
    MAX_PAYLOAD,
    RankLost,
    RanksDiffer,
    Word,
    decode,
    encode,
    family,
)

log = logging.getLogger(__name__)

BEAT_S = 0.25  # ROUTER_MANDATORY tells of a dead peer when something is sent to it
TICK_S = 0.1
STALL_S = 2.0  # this process stood still for longer: nobody else is to blame
PATIENCE = 4.0  # a follower may take so many times as long for its part of a step as the leader
COMPILING = "compiling"  # a follower that says so is not late, as long as what it says changes


@dataclass
class _Peer:
    """A follower that has joined."""

    id: bytes
    who: str
    heard: float
    address: str  # of its collective server; "": the first trainer chooses
    doing: str = ""


class Leader:
    """Rank 0's end, bound at `address`.

    Args:
        count: trainers in all.
        timeout_s: how long one may say nothing, or be late for a meeting.
        compiling_s: how long one that compiles, or gets ready, may say the same.
        keys: of the run, where `address` is of tcp: then each trainer has a launcher of its own.

    `on_used` is called, in the thread, for each batch that a follower has used; `on_lost` once,
    when one is lost.
    """

    rank = 0

    def __init__(
        self,
        address: str,
        run_id: str,
        count: int,
        timeout_s: float,
        compiling_s: float,
        keys: ServerKeys | None = None,
    ):
        self.count, self._run, self._timeout_s = count, run_id, timeout_s
        self._far = keys is not None
        self._compiling_s = compiling_s
        self.on_used: Callable[[], object] = lambda: None
        self.on_lost: Callable[[], object] = lambda: None
        self._session, self._family = uuid.uuid4().hex, "" if self._far else family()
        self._changed = threading.Condition()
        self._peers: dict[int, _Peer] = {}
        self._outbox: deque[tuple[int, list]] = deque()
        self._said: dict[tuple[str, int], dict[int, bytes]] = {}  # (kind, number) → rank → payload
        self._number, self._parted = 0, time.monotonic()
        self._begun = False  # the first meeting is over
        self._lost: str | None = None
        self._closing = False
        self._wake, self._context = Wake(), zmq.Context()
        self._door: Door | None = None
        self._router = self._bind(address, keys)
        self._thread = threading.Thread(target=self._run_thread, name="ranks", daemon=True)
        self._thread.start()

    # -- for the trainer ---------------------------------------------------------------------------

    def join(
        self,
        stopping: Callable[[], bool],
        join_s: float | None = None,
        tell: Callable[[str], None] = lambda missing: None,
    ) -> None:
        """Until every follower has connected; `tell` is given who is missing.

        Raises:
            RankLost: one has not come in time.
            Hopeless: one that is to be started elsewhere has not come within `join_s`.
            Stopped.
        """
        within_s = self._timeout_s if join_s is None else join_s
        deadline = time.monotonic() + within_s
        with self._changed:
            while missing := self._missing(self._peers):
                self._go_on(stopping)
                tell(_names(missing))
                if time.monotonic() > deadline:
                    late = f"{_names(missing)} did not come within {within_s:.0f} s:"
                    log_file = f"RUN/logs/trainer-{missing[0]}.log"
                    if join_s is None:
                        raise RankLost(f"{late} see {log_file}; all trainers start again")
                    raise Hopeless(
                        f"{late} start it on its host with `launch.py trainer --run RUN --rank"
                        f" {missing[0]}`, or see {log_file}; trainers.join_s allows more"
                    )
                self._changed.wait(TICK_S)

    def addresses(self) -> list[str]:
        """Of the followers' collective servers, by rank, as they have told them."""
        return [self._peers[rank].address for rank in range(1, self.count)]

    def set_up(self, stage: str, addresses: list[str]) -> None:
        """Followers may load what computes now; `addresses` are those of the collectives."""
        self._tell("set_up", stage=stage, addresses=addresses)

    def begin(self, step: int) -> None:
        """Followers load the checkpoint of `step` (0: the first weights)."""
        self._tell("begin", step=step)

    def hand_on(self, rank: int, plan: str, g: int, arrays: Mapping[str, np.ndarray]) -> None:
        """A batch for a follower; the arrays must not change any more."""
        data = Data(0, plan, g, 0, wire.digest(arrays), Notes(), dict(arrays))
        self._put(rank, [encode("batch", self._session, g=g), *wire.encode(self._run, data)])

    def check(self) -> None:
        """RankLost: a trainer is lost."""
        with self._changed:
            self._raise_if_lost()

    def wait_ready(self, stopping: Callable[[], bool], tell: Callable[[str], None]) -> None:
        """The first meeting, for which followers compile and load as long as they say that they
        do; `tell` is given who is waited for.
        """
        self._meet(b"", stopping, tell)

    def meet(
        self, payload: bytes = b"", stopping: Callable[[], bool] = lambda: False
    ) -> list[bytes]:
        """See `Ranks.meet`. RankLost: a follower is lost, or late."""
        return self._meet(payload, stopping, None)

    def agree(self, step: int, own: Mapping[str, str]) -> None:
        """Every follower's weights after `step` have the digests `own` (name → digest).

        Where a follower is lost, or is leaving, that is said and nothing is compared.

        Raises:
            RanksDiffer: names the trainer and the first tensors.
        """
        try:
            with self._changed:
                self._raise_if_lost()
            with self._changed:  # late ones of an earlier save
                self._said = {k: v for k, v in self._said.items() if k[0] != "digests"}
            self._tell("ask", step=step)
            what = f"say what its weights of step {step} are"
            theirs = self._answers(("digests", step), what, lambda: False)
        except RankLost as e:
            log.warning("the weights of step %d are saved without being compared: %s", step, e)
            return
        for rank, payload in sorted(theirs.items()):
            found = dict(line.split(" ") for line in payload.decode().splitlines())
            differ = sorted(k for k in {*own, *found} if own.get(k) != found.get(k))
            if differ:
                raise RanksDiffer(
                    f"after step {step}, {len(differ)} of {len(own)} tensors of trainer-{rank}"
                    f" differ from the first trainer's: {', '.join(differ[:5])}; nothing is saved,"
                    " and all trainers start again from the newest checkpoint. If it happens"
                    " again, test the memory of both cards"
                )

    def end(self, why: str, code: int) -> None:
        """Followers leave, as the first trainer does, whose exit code will be `code`."""
        self._tell("end", why=why, code=code)

    def close(self) -> None:
        """Send what waits, and close; bounded."""
        with self._changed:
            self._closing = True
        self._wake.set()
        self._thread.join(5.0)

    # -- waiting -----------------------------------------------------------------------------------

    def _meet(
        self,
        payload: bytes,
        stopping: Callable[[], bool],
        tell: Callable[[str], None] | None,
    ) -> list[bytes]:
        self._number += 1
        what = "come to the end of the step"
        said = self._answers(("meet", self._number), what, stopping, tell)
        said[0] = payload
        payloads = [said[rank] for rank in range(self.count)]
        self._tell("go", number=self._number, payloads=payloads)
        self._parted, self._begun = time.monotonic(), True
        return payloads

    def _answers(
        self,
        what: tuple[str, int],
        in_words: str,
        stopping: Callable[[], bool],
        tell: Callable[[str], None] | None = None,
    ) -> dict[int, bytes]:
        """What every follower says to `what`. A follower may take longer for its part of a step
        than the leader took, but not much; one that gets ready (`tell`), or compiles, may take as
        long as it needs, as long as what it says changes.
        """
        began = said_at = time.monotonic()
        allowed_s = self._timeout_s + PATIENCE * (began - self._parted)
        said: list[str] = []
        with self._changed:
            while missing := self._missing(self._said.get(what, {})):
                self._go_on(stopping)
                now = time.monotonic()
                doing = [self._peers[r].doing for r in missing]
                if tell is not None:
                    tell(", ".join(f"trainer-{r}: {self._peers[r].doing}" for r in missing))
                if doing != said:
                    said, said_at = doing, now
                if tell is not None or any(x.startswith(COMPILING) for x in doing):
                    began, late_s, limit_s = now, now - said_at, self._compiling_s
                else:
                    late_s, limit_s = now - began, allowed_s
                if late_s > limit_s:
                    more = "; trainers.compiling_s allows more" if began == now else ""
                    raise RankLost(
                        f"{_names(missing)} did not {in_words} within {late_s:.0f} s (it says:"
                        f" {doing[0] or 'nothing'}){more}"
                    )
                self._changed.wait(TICK_S)
            return self._said.pop(what, {})

    def _missing(self, there: Mapping[int, object]) -> list[int]:
        return [rank for rank in range(1, self.count) if rank not in there]

    def _go_on(self, stopping: Callable[[], bool]) -> None:
        if stopping():
            raise Stopped("stop was asked for")
        self._raise_if_lost()

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            raise RankLost(self._lost)

    def _tell(self, kind: str, **fields) -> None:
        for rank in range(1, self.count):
            self._put(rank, [encode(kind, self._session, **fields)])

    def _put(self, rank: int, frames: list) -> None:
        with self._changed:
            self._outbox.append((rank, frames))
        self._wake.set()

    # -- the thread --------------------------------------------------------------------------------

    def _bind(self, address: str, keys: ServerKeys | None) -> zmq.Socket:
        try:
            if not self._far:
                check_ipc_free(address)
            router = self._context.socket(zmq.ROUTER)
            router.linger = 0
            router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            router.setsockopt(zmq.SNDHWM, 0)  # the window of batches bounds what may wait here
            router.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD + wire.MAX_HEADER_BYTES)
            if keys is not None:
                self._door = Door(self._context, router, address, keys)
            router.bind(address)
        except (zmq.ZMQError, ChannelError) as e:
            if self._door is not None:
                self._door.close()
            self._context.destroy(linger=0)
            self._wake.close()
            raise ChannelError(f"trainers cannot meet at {address}: {e}") from None
        return router

    def _run_thread(self) -> None:
        try:
            self._loop()
        except Exception as e:  # noqa: BLE001 - the edge of a thread: whoever waits raises it
            self._lose(f"the thread between trainers ended: {type(e).__name__}: {e}")
        finally:
            if self._door is not None:
                self._door.close()
            self._context.destroy(linger=2000 if self._far else 200)
            self._wake.close()

    def _loop(self) -> None:
        poller = zmq.Poller()
        door = self._door
        for end in (self._router, self._wake.fileno(), *(door.ends if door else ())):
            poller.register(end, zmq.POLLIN)
        beat_at, last = 0.0, time.monotonic()
        while True:
            if self._wake.fileno() in dict(poller.poll(TICK_S * 1000)):
                self._wake.clear()
            now = time.monotonic()
            if now - last > STALL_S:
                for peer in self._peers.values():
                    peer.heard += now - last
            last = now
            if door is not None:
                door.serve()
            self._hear_all(now)
            if door is not None:
                door.keep_order()
            with self._changed:
                waiting, closing = list(self._outbox), self._closing
                self._outbox.clear()
            for rank, frames in waiting:
                self._send(rank, frames)
            if closing:
                return
            if now >= beat_at:
                beat_at = now + BEAT_S
                for rank in list(self._peers):
                    self._send(rank, [encode("beat", self._session)])
                self._look_for_silence(now)

    def _hear_all(self, now: float) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                peer, *frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
                if self._door is not None:
                    self._door.heard(peer)
                self._heard(peer.bytes, *(frame.bytes for frame in frames), now=now)

    def _heard(self, peer: bytes, *frames: bytes, now: float) -> None:
        try:
            word = decode(frames[0], FROM_FOLLOWER)
        except (WireError, IndexError) as e:
            log.warning("not understood: %s", e)
            return
        if word.kind == "hello":
            return self._welcome(peer, word, now)
        rank = next((r for r, p in self._peers.items() if p.id == peer), None)
        if word.session != self._session or rank is None:
            return None  # of an earlier group
        self._peers[rank].heard = now
        if word.kind == "beat":
            self._peers[rank].doing = word["doing"]
        elif word.kind == "used":
            self.on_used()
        else:
            number = word["number"] if word.kind == "meet" else word["step"]
            with self._changed:
                self._said.setdefault((word.kind, number), {})[rank] = word["payload"]
                self._changed.notify_all()
        return None

    def _welcome(self, peer: bytes, word: Word, now: float) -> None:
        rank = word["rank"]
        if word["family"] != self._family:
            return  # it waits for the trainer of its own launcher
        known = self._peers.get(rank)
        if known is not None and known.id == peer:
            known.heard = now
        elif known is not None and self._far:
            pass  # one that was lost is back before this trainer has left: it waits for the next
        elif not 0 < rank < self.count or word["count"] != self.count or known is not None:
            why = f"there are {self.count} trainers, and trainer-{rank} is none of those missing"
            with contextlib.suppress(zmq.ZMQError):
                self._router.send_multipart([peer, encode("refused", self._session, why=why)])
        else:
            on = f" on {word['host']}" if word["host"] else ""
            who = f"trainer-{rank} (pid {word['pid']}{on})"
            with self._changed:
                self._peers[rank] = _Peer(peer, who, now, word["address"])
                self._changed.notify_all()
            log.info("%s has joined", who)

    def _send(self, rank: int, frames: list) -> None:
        peer = self._peers.get(rank)
        if peer is None:
            return
        try:
            self._router.send_multipart([peer.id, *frames], zmq.NOBLOCK, copy=len(frames) == 1)
        except zmq.ZMQError as e:
            if e.errno != zmq.EHOSTUNREACH:
                raise
            self._lose(f"{peer.who} is gone: see RUN/logs/trainer-{rank}.log")

    def _look_for_silence(self, now: float) -> None:
        # Importing and tracing keep a process from its threads at times.
        limit_s = self._timeout_s if self._begun else PATIENCE * self._timeout_s
        for peer in self._peers.values():
            if now - peer.heard > limit_s:
                self._lose(
                    f"{peer.who} has said nothing for {now - peer.heard:.0f} s: it is stopped, or"
                    " hangs" + (", or the network between the hosts is down" if self._far else "")
                )

    def _lose(self, why: str) -> None:
        with self._changed:
            first, self._lost = self._lost is None, self._lost or why
            self._changed.notify_all()
        if first and not self._closing:
            self.on_lost()


def _names(ranks: list[int]) -> str:
    return ", ".join(f"trainer-{rank}" for rank in ranks)
