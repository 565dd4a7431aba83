"""Hostile traffic for the channel, the same for the same seed: frames that are no messages,
messages that were tampered with, and
proper messages that nobody asked for. And a channel in one process that carries frames, with such
traffic mixed in.
"""

from __future__ import annotations

import copy
import random
import threading
from collections import deque
from collections.abc import Callable

import msgpack
import numpy as np
import xxhash
import zmq

from common.transport import messages, wire
from common.transport.address import Endpoint
from common.transport.links import Received, decoded
from common.transport.messages import Data, Message, Notes, Offer

RUN = "00112233445566778899aabbccddeeff"
LIFE = 40  # messages until a hostile peer leaves and another comes
# What takes the place of a value: of other types, too large, too deep, not finite, half of what was
# meant.
VALUES = [
    *(None, True, False, 0, -1, 1, 2**31, 2**61, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)),
    *(0.0, -1.5, 1e308, float("inf"), float("-inf"), float("nan")),
    *("", "x", "x" * 5000, "\x1b[2J", "two\nlines", "train", "../../x", "é\u202e"),
    *([0, 2**61], [2**61, 0], [0, 2**31, 2**31], [-1, 0], [4, 0], [1] * 9),
    *(
        [],
        [[]],
        [[], 1],
        [1, "x"],
        [[1]],
        [[1, 2], [3, "y"]],
        [["7", 7]],
        [[-1, "x"]],
        list(range(300)),
        [None] * 40,
    ),
    *({}, {"a": 1}, {"a": {"b": {"c": {"d": {}}}}}, {"read": "fast"}, {"read": -1}, {"": 0}),
    *(b"", b"bytes", msgpack.ExtType(4, b"x"), msgpack.Timestamp(1)),
]


def seal(fields: dict) -> dict:
    """Sealed, as a peer does that knows the protocol."""
    return {**fields, "seal": xxhash.xxh3_64_hexdigest(msgpack.packb(fields))}


def nested(depth: int) -> bytes:
    """A header whose field is so deep."""
    head = msgpack.packb({"v": wire.VERSION, "type": "HB", "run": RUN, "gen": 1, "ready": False})
    return bytes([head[0] + 1]) + head[1:] + b"\xa6status" + b"\x91" * depth + b"\x00"


class Hostile:
    """An endless source of frames that a peer might send.

    `to_trainer`: what a producer's end could, else what a trainer's could.
    """

    def __init__(
        self,
        seed: int,
        to_trainer: bool = True,
        run: str = RUN,
        features: str = "",
        max_gen: int = 4,
    ):
        self.random, self.run, self.features, self.max_gen = (
            random.Random(seed),
            run,
            features,
            max_gen,
        )
        self.to_trainer = to_trainer
        self.gen = 1  # of the trainer that is attacked
        self.leaked: deque[tuple[str, int, int]] = deque(
            maxlen=8
        )  # leases of others, should they be known
        arrays = {
            "numbers": np.arange(4, dtype=np.int32),
            "none": np.zeros((0, 3), np.int64),
            "filler": np.zeros(40, np.float32),
        }
        self._arrays, self._digest = arrays, wire.digest(arrays)

    def frames(self) -> list[bytes]:
        """One message, of any kind."""
        make = self.random.choices(
            (self._noise, self._bent, self._tampered, self._shuffled, self._proper),
            weights=(1, 2, 5, 1, 3),
        )[0]
        return make()

    def message(self) -> Message:
        """A proper one, with numbers that are guessed."""
        r = self.random
        gen = self.gen if r.random() < 0.8 else r.randrange(self.max_gen + 1)
        plan, g, lease = (
            r.choice(("train", "eval")),
            r.randrange(60),
            r.choice((r.randrange(1, 200), r.getrandbits(63))),
        )
        if self.leaked and r.random() < 0.5:
            plan, g, lease = r.choice(self.leaked)
        if not self.to_trainer:
            return r.choice(
                (
                    messages.Alive(gen),
                    messages.Welcome(
                        gen, Offer(r.choice(("gpt", "dvae", "")), r.choice((self.features, "00")))
                    ),
                    messages.Lease(
                        gen,
                        plan,
                        g,
                        lease,
                        r.randrange(100),
                        tuple(r.sample(range(50), r.randrange(4))),
                    ),
                    messages.Revoke(gen, lease),
                    messages.Stop(gen, "the run is over"),
                    messages.Refuse(gen, "no"),
                )
            )
        features = self.features if r.random() < 0.5 else "00"
        digest = self._digest if r.random() < 0.8 else "0" * 32
        notes = Notes(
            bad=((g, "gone"),) if r.random() < 0.3 else (),
            spent_ms={"read": 1.0},
            sent=r.random() * 1e10,
        )
        return r.choice(
            (
                messages.Ready(
                    gen,
                    f"hostile-{r.randrange(9)}",
                    r.randrange(99999),
                    r.choice((1, 2, 64, 10**6)),
                    features,
                ),
                Data(gen, plan, g, lease, digest, notes, self._arrays),
                Data(gen, plan, g, lease, digest, notes, self._arrays),
                messages.Nack(gen, plan, g, lease, "no", r.random() < 0.5),
                messages.Heartbeat(
                    gen, r.choice((f"compiling({r.randrange(99)})", "working")), r.random() < 0.5
                ),
                messages.Bye(gen),
            )
        )

    def _proper(self) -> list[bytes]:
        return [bytes(f) for f in wire.encode(self.run, self.message())]

    def _noise(self) -> list[bytes]:
        r = self.random
        return [
            r.randbytes(r.choice((0, 1, 7, 60, 900))) for _ in range(r.choice((0, 1, 1, 2, 5, 40)))
        ]

    def _bent(self) -> list[bytes]:
        """A few bits or bytes of a proper message are others."""
        r, frames = self.random, self._proper()
        raw = bytearray(frames[0])
        for _ in range(r.randrange(1, 4)):
            place = r.randrange(len(raw))
            raw[place] = r.choice(
                (raw[place] ^ (1 << r.randrange(8)), r.randrange(256), 0xC1, 0xDD, 0x91)
            )
        if r.random() < 0.2:
            raw = raw[: r.randrange(len(raw))]
        return (
            [bytes(raw), *frames[1:]]
            if r.random() < 0.95
            else [nested(r.choice((20, 400, 1000, 30000)))]
        )

    def _tampered(self) -> list[bytes]:
        """A field, at any depth, holds something else, is missing or is new; the seal is mostly
        right.
        """
        r, frames = self.random, self._proper()
        header = msgpack.unpackb(frames[0])
        header.pop("seal", None)
        for _ in range(r.choice((1, 1, 2))):
            self._tamper(header)
        try:
            packed = msgpack.packb(seal(header) if r.random() < 0.9 else header)
        except (ValueError, OverflowError, TypeError):
            return frames[::-1]
        if r.random() < 0.2:
            frames = [frames[0], *(r.randbytes(r.randrange(9)) for _ in frames[1:]), b""]
        return [packed, *frames[1:]]

    def _tamper(self, header: dict) -> None:
        r, at = self.random, header
        while True:
            inner = [
                v
                for v in (at.values() if isinstance(at, dict) else at)
                if isinstance(v, (dict, list)) and v
            ]
            if not inner or r.random() < 0.5:
                break
            at = r.choice(inner)
        what, key = r.random(), r.choice(list(at) if isinstance(at, dict) else range(len(at)))
        if what < 0.75:
            alike = [v for v in VALUES if type(v) is type(at[key])]
            at[key] = self._value(alike if alike and r.random() < 0.6 else VALUES)
        elif what < 0.9:
            del at[key]
        elif isinstance(at, dict):
            at[r.choice(("more", "__class__", "arrays", "info"))] = self._value(VALUES)
        else:
            at.extend([at[key]] * r.choice((1, 100)))

    def _value(self, values: list) -> object:
        """One of them, of its own: what is tampered with next would else grow in VALUES."""
        return copy.deepcopy(self.random.choice(values))

    def _shuffled(self) -> list[bytes]:
        """Frames are missing, twice, in another order, or of another message."""
        r, frames = self.random, self._proper()
        frames += self._proper()[1:] if r.random() < 0.5 else []
        r.shuffle(frames)
        return frames[: r.randrange(len(frames) + 1)]


class FrameHub:
    """A `LeaseServer`'s link in one process: its producers' messages as frames, and between them
    hostile ones, `left` in all.

    As a socket does, it tells when a peer has gone, and a message to one that has gone cannot be
    sent.
    """

    def __init__(self, hostile: Hostile, left: int, at_once: int = 32):
        self.address, self.public_key, self.bytes_received = "frames", None, 0
        self.hostile, self.left, self.at_once = hostile, left, at_once
        self._lock = threading.Condition()
        self._inbox: deque = deque()
        self.links: dict[bytes, FrameLink] = {}
        self._peer, self._said, self._gone = b"\0" * 16, 0, False

    def endpoint(self) -> Endpoint:
        return Endpoint(self.address)

    def link(self) -> FrameLink:
        return FrameLink(self, self.hostile.random.randbytes(16))

    def put(self, peer: bytes, frames: list[bytes]) -> None:
        with self._lock:
            self._inbox.append((peer, frames))
            self._lock.notify()

    def receive(self, timeout_s: float) -> tuple[list[Received], bool]:
        with self._lock:
            if not self._inbox and not self.left:
                self._lock.wait(timeout_s)
            found = [self._inbox.popleft() for _ in range(min(len(self._inbox), 32))]
        for _ in range(min(self.at_once, self.left)):
            self.left -= 1
            self._said += 1
            if self._said % LIFE == 1:
                self._peer, self._gone = self.hostile.random.randbytes(16), True
            found.append((self._peer, self.hostile.frames()))
        gone, self._gone = self._gone, False
        return [
            (p, *decoded([zmq.Frame(f) for f in frames], messages.FROM_PRODUCER))
            for p, frames in found
        ], gone

    def send(self, peer: bytes, run: str, message: Message) -> str:
        frames = wire.encode(run, message)
        link = self.links.get(peer)
        if link is not None:
            link.put(frames)
            if isinstance(message, messages.Lease):
                self.hostile.leaked.append((message.plan, message.g, message.lease))
        return "sent" if link is not None or peer == self._peer else "gone"

    def wake(self) -> None:
        with self._lock:
            self._lock.notify()

    def close(self) -> None:
        self.links.clear()


class FrameLink:
    """A `LeaseClient`'s link to a `FrameHub`; `hostile` adds so many messages of it to
    each call's.
    """

    def __init__(
        self, hub: FrameHub | None, peer: bytes, hostile: Hostile | None = None, left: int = 0
    ):
        self.endpoint, self.connected = None, False
        self._hub, self._peer, self._hostile, self.left = hub, peer, hostile, left
        self._lock = threading.Condition()
        self._inbox: deque = deque()
        self._changes: list[str] = []

    def put(self, frames: list[bytes]) -> None:
        with self._lock:
            self._inbox.append([bytes(f) for f in frames])
            self._lock.notify()

    def connect(self, endpoint: Endpoint | None) -> None:
        self.endpoint, self.connected = endpoint, endpoint is not None
        if endpoint is not None and self._hub is not None:
            self._hub.links[self._peer] = self
        self._changes.append("connected" if endpoint is not None else "disconnected")

    def receive(self, timeout_s: float):
        with self._lock:
            if not self._inbox and not self._changes and not self.left:
                self._lock.wait(timeout_s)
            found = [self._inbox.popleft() for _ in range(min(len(self._inbox), 32))]
        changes, self._changes = self._changes, []
        for _ in range(min(32, self.left)):
            self.left -= 1
            found.append(self._hostile.frames())
        return [
            decoded([zmq.Frame(f) for f in frames], messages.FROM_TRAINER) for frames in found
        ], changes

    def send(self, run: str, message: Message) -> bool:
        frames = [bytes(f) for f in wire.encode(run, message)]
        if self.connected and self._hub is not None:
            self._hub.put(self._peer, frames)
        return self.connected

    def wake(self) -> None:
        with self._lock:
            self._lock.notify()

    def close(self, linger_s: float = 0.2) -> None:
        self.connected = False


class Forger:
    """A connection of its own that has said READY, as any producer does.

    What it is leased it does not answer; it guesses leases.
    """

    def __init__(self, address: str, run: str, seed: int = 5):
        self.run, self.random, self.tried = run, random.Random(seed), 0
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.linger = 0
        self._dealer.connect(address)
        self._own: set[int] = set()
        arrays = {"numbers": np.full(4, -1, np.int32), "filler": np.full(3000, -1, np.float32)}
        self._forged = (wire.digest(arrays), Notes(), arrays)

    def join(self) -> None:
        self.say(messages.Heartbeat(0))
        self.say(messages.Ready(1, "forger", 1, 1))

    def say(self, message: Message) -> None:
        self._dealer.send_multipart(wire.encode(self.run, message))

    def guess(self, count: int, position: int, leaked: list[tuple[str, int, int]]) -> None:
        """Send `count` batches for leases of others: of `leaked`, of small numbers, and of any
        numbers, for batches about `position`.
        """
        r = self.random
        while count:
            g = position + r.randrange(6)
            known = (
                r.choice(leaked)
                if leaked and r.random() < 0.5
                else ("train", g, r.choice((g + 1, r.getrandbits(63))))
            )
            while self._dealer.poll(0):
                message = wire.decode(self._dealer.recv_multipart())[1]
                self._own |= {message.lease} if isinstance(message, messages.Lease) else set()
            if known[2] not in self._own:
                self.say(Data(1, *known, *self._forged))
                count, self.tried = count - 1, self.tried + 1

    def close(self) -> None:
        self._context.destroy(linger=0)


def until(condition: Callable[[], object], timeout_s: float) -> None:
    """AssertionError after `timeout_s`."""
    pause, slices = threading.Event(), int(timeout_s / 0.01)
    for _ in range(slices):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError(f"the condition did not come true within {timeout_s} s")
