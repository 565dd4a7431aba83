"""Both ends of the channel in one process on a clock that the test turns, with a channel between
them that drops, duplicates, delays, reorders and corrupts: the same from the same seed, to the last
message.

`LeaseServer` and `LeaseClient` are the real ones. Their threads run one at a time: each stands in
its link's `receive` until it is its turn.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest import mock

import numpy as np
import zmq

from common.transport import client as client_module
from common.transport import leases as leases_module
from common.transport import messages, wire
from common.transport import server as server_module
from common.transport.client import Endpoint, Lease, LeaseClient, Stop, Welcome
from common.transport.lease_records import Rules
from common.transport.links import decoded
from common.transport.server import LeaseServer, StopAsked
from tests.support import channels as cb

TICK_S, DATA_S = 0.05, 300.0
RULES = Rules(lease_ttl_s=1.5, dead_after_s=2.0, compile_grace_s=5.0, compile_budget_s=10.0)
STEP_S, SAVE_EVERY, AHEAD = 0.1, 10, 2
HANG_S = 120.0  # I13: of the test's time without a trained batch
_REAL_S = 20.0


@dataclass(frozen=True)
class Weather:
    """How likely each fault is, per message or per second."""

    drop: float = 0.03
    duplicate: float = 0.05
    delay: float = 0.1  # by up to `late_s`, and so behind what was sent after it
    corrupt: float = 0.03
    late_s: float = 3.0
    kill_trainer: float = 0.05
    kill_producer: float = 0.08
    freeze: float = 0.05


class Turn:
    """Lets a thread run from one `receive` to the next."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._standing, self._go, self._free = False, False, False

    def stand(self) -> None:
        """Of the thread: here until it is its turn."""
        with self._changed:
            self._standing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._go or self._free, _REAL_S)
            self._standing, self._go = False, False

    def give(self, thread: threading.Thread) -> None:
        """Let the thread go on; return when it waits again, or has ended."""
        self.reached(thread)
        with self._changed:
            self._go = True
            self._standing = False
            self._changed.notify_all()
        self.reached(thread)

    def reached(self, thread: threading.Thread) -> None:
        """Returns when the thread stands, or has ended."""
        with self._changed:
            for _ in range(int(_REAL_S / 0.05)):
                if self._changed.wait_for(lambda: self._standing, 0.05) or not thread.is_alive():
                    return
        raise AssertionError(f"{thread.name} did not come back within {_REAL_S} s")

    def free(self) -> None:
        """No turns any more: it ends as it likes."""
        with self._changed:
            self._free = True
            self._changed.notify_all()


class End:
    """A link's common part: what has arrived, as lists of frames."""

    def __init__(self) -> None:
        self.turn, self.inbox, self.closing = Turn(), [], False

    def wake(self) -> None:
        """Turns come anyway; but the last one is when the end has been told to close, not before:
        what it does on its way out would depend on who is quicker.
        """
        if self.closing:
            self.turn.free()


class ServerEnd(End):
    """`server.ServerLink`."""

    def __init__(self, twin: Twin, address: str):
        super().__init__()
        self.twin, self.address, self.public_key, self.bytes_received = twin, address, None, 0
        self.gone = False

    def receive(self, timeout_s: float):
        del timeout_s
        self.turn.stand()
        found, self.inbox = self.inbox, []
        gone, self.gone = self.gone, False
        return [(peer, *_decoded(frames, messages.FROM_PRODUCER)) for peer, frames in found], gone

    def send(self, peer: bytes, run: str, message: messages.Message) -> str:
        if peer not in self.twin.ends:
            return "gone"
        self.twin.carry(peer, None, wire.encode(run, message))
        return "sent"

    def close(self) -> None:
        """Nothing is held."""


class ClientEnd(End):
    """`client.ClientLink`."""

    def __init__(self, twin: Twin, peer: bytes):
        super().__init__()
        self.twin, self.peer = twin, peer
        self.endpoint, self.connected, self.changes = None, False, []

    def connect(self, endpoint: Endpoint | None) -> None:
        self.endpoint, self.connected = endpoint, endpoint is not None and not self.closing
        self.changes.append("connected" if self.connected else "disconnected")

    def receive(self, timeout_s: float):
        del timeout_s
        if not self.changes:
            self.turn.stand()
        found, self.inbox = self.inbox, []
        changes, self.changes = self.changes, []
        return [_decoded(frames, messages.FROM_TRAINER) for _, frames in found], changes

    def send(self, run: str, message: messages.Message) -> bool:
        if self.connected:
            self.twin.carry(None, self.peer, wire.encode(run, message))
        return self.connected

    def close(self, linger_s: float = 0.2) -> None:
        del linger_s
        self.connected = False


def _decoded(frames: list[bytes], known) -> tuple:
    return decoded([zmq.Frame(f) for f in frames], known)


@dataclass
class Maker:
    """A producer: a client, and the batches that it is making."""

    client: LeaseClient
    end: ClientEnd
    make_s: float
    idle: bool = False  # answers no lease, and sends others' batches under numbers it guesses
    work: list[tuple[float, Lease]] = field(default_factory=list)
    frozen_until: float = 0.0


class Twin:
    """A trainer, its producers, and the weather between them; `play` to the end of `count` batches.

    idle: producers, of three, that answer no lease. early_cursor: a bug; the checkpoint holds what
    was fetched.
    """

    def __init__(
        self,
        seed: int,
        count: int = 60,
        weather: Weather = Weather(),  # noqa: B008 - frozen
        idle: int = 1,
        early_cursor: bool = False,
    ):
        self.idle = idle
        self.random, self.weather, self.count = random.Random(seed), weather, count
        self.now, self.early_cursor = 1000.0, early_cursor
        self.log = cb.EventLog()
        self.ends: dict[bytes, ClientEnd] = {}
        self.makers: list[Maker] = []
        self.counts = dict.fromkeys(
            ("sent", "drop", "duplicate", "delay", "corrupt", "trainer", "producer", "freeze"), 0
        )
        self._air: list[tuple[float, int, bytes | None, bytes | None, list[bytes]]] = []
        self._numbers = itertools.count()
        self.generation, self.trained_at, self.longest_gap_s = 0, self.now, 0.0
        self.checkpoint = {"next_g": 0, "state": ""}
        self.lineage: list[int] = []

    # -- the channel -------------------------------------------------------------------------------

    def carry(self, to: bytes | None, sender: bytes | None, frames: list) -> None:
        """A message into the air; `to` None: the trainer."""
        frames, w, r = [bytes(f) for f in frames], self.weather, self.random
        self.counts["sent"] += 1
        if r.random() < w.drop:
            self.counts["drop"] += 1
            return
        copies = 1
        if r.random() < w.duplicate:
            self.counts["duplicate"] += 1
            copies = 2
        for _ in range(copies):
            late = 0.0
            if r.random() < w.delay:
                self.counts["delay"] += 1
                late = r.uniform(0, w.late_s)
            sent = frames
            if r.random() < w.corrupt:
                self.counts["corrupt"] += 1
                sent = _bent(frames, r)
            heapq.heappush(self._air, (self.now + late, next(self._numbers), to, sender, sent))

    def _land(self) -> None:
        while self._air and self._air[0][0] <= self.now:
            _, _, to, sender, frames = heapq.heappop(self._air)
            end = self.server_end if to is None else self.ends.get(to)
            if end is not None:
                end.inbox.append((sender, frames))

    # -- the ends ----------------------------------------------------------------------------------

    def _start_trainer(self) -> None:
        self.generation += 1
        self.server_end = ServerEnd(self, f"twin-{self.generation}")
        self.server = LeaseServer(
            "",
            cb.RUN,
            cb.WINDOW,
            rules=RULES,
            link=self.server_end,
            on_event=self.log,
        )
        first = self.checkpoint["next_g"]
        self.state = self.checkpoint["state"]
        self.lineage = self.lineage[:first]
        self.fetched, self.busy_until = [], 0.0
        plan = (("train", g) for g in range(first, self.count))
        self.server_end.turn.reached(self.server._thread)
        self.server.open(self.generation, cb.OFFER, plan)

    def _stop_trainer(self) -> None:
        self.server_end.closing = True
        self.server.close(drain_s=0.0, stop_producers=False)

    def _join(self, idle: bool = False) -> None:
        number = next(self._numbers)
        end = ClientEnd(self, b"peer-%06d" % number)
        self.ends[end.peer] = end
        client = LeaseClient(
            lambda: Endpoint(f"twin-{self.generation}"), cb.RUN, f"p{number}", cb.CAPACITY, link=end
        )
        end.turn.reached(client._thread)  # its first messages draw from the same numbers as we do
        self.makers.append(Maker(client, end, self.random.choice((0.05, 0.1, 0.4)), idle))

    def _leave(self, maker: Maker) -> None:
        """SIGKILL: it says nothing."""
        self.makers.remove(maker)
        del self.ends[maker.end.peer]
        self.server_end.gone = True
        maker.end.connected, maker.end.closing = False, True
        maker.client.close()

    # -- a tick ------------------------------------------------------------------------------------

    def play(self) -> None:
        """To the end. AssertionError: a batch is not what it should be, or none comes."""
        draw = random.Random(self.random.random())
        clock = SimpleNamespace(monotonic=lambda: self.now)
        with (
            mock.patch.object(client_module, "time", clock),
            mock.patch.object(server_module, "time", clock),
            mock.patch.object(client_module, "os", SimpleNamespace(getpid=lambda: 1)),
            mock.patch.object(leases_module, "secrets", SimpleNamespace(randbits=draw.getrandbits)),
        ):
            self._start_trainer()
            for i in range(3):
                self._join(idle=i < self.idle)
            try:
                while self.checkpoint["next_g"] < self.count:
                    self._tick()
            finally:
                for maker in list(self.makers):
                    self._leave(maker)
                self._stop_trainer()
        self._check()

    def _tick(self) -> None:
        self.now += TICK_S
        self._disturb()
        self._land()
        self.server_end.turn.give(self.server._thread)
        for maker in self.makers:
            if self.now >= maker.frozen_until:
                maker.end.turn.give(maker.client._thread)
                self._produce(maker)
        self._train()
        gap = self.now - self.trained_at
        self.longest_gap_s = max(self.longest_gap_s, gap)
        assert gap < HANG_S, f"I13: no batch was trained for {gap:.0f} s"

    def _disturb(self) -> None:
        w, r = self.weather, self.random
        if r.random() < w.kill_trainer * TICK_S:
            self.counts["trainer"] += 1
            self._stop_trainer()
            self._start_trainer()
        proper = [m for m in self.makers if not m.idle]
        if r.random() < w.kill_producer * TICK_S:
            self.counts["producer"] += 1
            self._leave(r.choice(proper))
            self._join()
        elif r.random() < w.freeze * TICK_S:
            self.counts["freeze"] += 1
            r.choice(proper).frozen_until = self.now + r.uniform(0.5, 4.0)

    def _produce(self, maker: Maker) -> None:
        while (event := maker.client.poll(0.0)) is not None:
            if isinstance(event, Welcome):
                maker.work.clear()
                maker.client.ready(event.gen)
            elif isinstance(event, Lease):
                maker.work.append((self.now + maker.make_s, event))
            elif isinstance(event, Stop):
                maker.work.clear()
        due = [w for w in maker.work if w[0] <= self.now]
        maker.work = [w for w in maker.work if w[0] > self.now]
        for _, lease in due:
            if maker.idle:
                self._forge(maker, lease)
            else:
                maker.client.send(lease, cb.make(lease))

    def _forge(self, maker: Maker, lease: Lease) -> None:
        g = lease.g + self.random.choice((-1, 1, 2))
        arrays = {k: np.zeros_like(v) for k, v in cb.make(lease).items()}
        number = self.random.choice((g + 1, self.random.getrandbits(63)))
        forged = messages.Data(
            lease.gen, "train", max(g, 0), number, wire.digest(arrays), messages.Notes(), arrays
        )
        self.carry(None, maker.end.peer, wire.encode(cb.RUN, forged))

    # -- the trainer -------------------------------------------------------------------------------

    def _train(self) -> None:
        while len(self.fetched) < AHEAD:
            try:
                delivery = self.server.next(DATA_S, should_stop=lambda: True)
            except StopAsked:
                break
            if delivery is None:
                break
            self.fetched.append(delivery)
        if not self.fetched or self.now < self.busy_until:
            return
        self.busy_until = self.now + STEP_S
        delivery = self.fetched.pop(0)
        right = cb.numbers("train", delivery.g)
        assert np.array_equal(delivery.arrays["numbers"], right), f"batch {delivery.g} is forged"
        self.state = cb.chain(self.state, delivery.digest)
        self.lineage.append(delivery.g)
        self.server.release()
        self.trained_at = self.now
        done = len(self.lineage)
        if done % SAVE_EVERY == 0 or done == self.count:
            next_g = done + (len(self.fetched) if self.early_cursor else 0)
            self.checkpoint = {"next_g": min(next_g, self.count), "state": self.state}

    def _check(self) -> None:
        state = ""
        for g in range(self.count):
            state = cb.chain(state, wire.digest(cb.make(Lease(1, "train", g, 0, 0))))
        assert self.lineage == list(range(self.count)), "I2: lost, twice, or out of order"
        assert self.checkpoint == {"next_g": self.count, "state": state}, "I11: another state"
        self.log.check(cb.WINDOW, cb.CAPACITY)
        assert not self.log.of("digest_mismatch"), "I3: one batch, two contents"


def _bent(frames: list[bytes], r: random.Random) -> list[bytes]:
    """A bit of one frame is another, or the frame is cut."""
    at = r.randrange(len(frames))
    data = bytearray(frames[at])
    if data and r.random() < 0.8:
        place = r.randrange(len(data))
        data[place] ^= 1 << r.randrange(8)
    else:
        data = data[: len(data) // 2]
    return [*frames[:at], bytes(data), *frames[at + 1 :]]
