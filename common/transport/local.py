"""The channel inside one process: the same LeaseServer and LeaseClient over queues, for tests and
runs without sockets.

    hub = LocalHub()
    server = LeaseServer("", run_id, window, link=hub)
    client = LeaseClient(hub.endpoint, run_id, "producer-0", link=hub.link())

Messages are handed over as objects: arrays are shared, nothing is encoded. Everything else
(threads, leases, heartbeats) is the real thing.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque

from common.transport.address import Endpoint
from common.transport.links import Received
from common.transport.messages import Data, Message


class _Mailbox:
    """A queue that one thread waits on and any thread fills."""

    def __init__(self) -> None:
        self._items: deque = deque()
        self._condition = threading.Condition()
        self._woken = False

    def put(self, item: object) -> None:
        with self._condition:
            self._items.append(item)
            self._condition.notify()

    def wake(self) -> None:
        with self._condition:
            self._woken = True
            self._condition.notify()

    def take_all(self, timeout_s: float) -> list:
        deadline = time.monotonic() + timeout_s
        with self._condition:
            while not self._items and not self._woken:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._condition.wait(left)
            self._woken = False
            items = list(self._items)
            self._items.clear()
            return items


class LocalHub:
    """ServerLink: where LocalLinks meet."""

    def __init__(self) -> None:
        self.address, self.public_key = "local", None
        self.bytes_received = 0
        self._inbox = _Mailbox()
        self._peers: dict[bytes, LocalLink] = {}
        self._numbers = itertools.count(1)
        self._disconnected = False

    def endpoint(self) -> Endpoint:
        return Endpoint(self.address)

    def link(self) -> LocalLink:
        """A new producer's end."""
        return LocalLink(self, b"local-%d" % next(self._numbers))

    def receive(self, timeout_s: float) -> tuple[list[Received], bool]:
        messages = self._inbox.take_all(timeout_s)
        disconnected, self._disconnected = self._disconnected, False
        for _, _, message in messages:
            if isinstance(message, Data):
                self.bytes_received += sum(array.nbytes for array in message.arrays.values())
        return messages, disconnected

    def send(self, peer: bytes, run: str, message: Message) -> str:
        link = self._peers.get(peer)
        if link is None:
            return "gone"
        link.inbox.put((run, message))
        return "sent"

    def wake(self) -> None:
        self._inbox.wake()

    def close(self) -> None:
        for link in list(self._peers.values()):
            link.cut()

    def attach(self, peer: bytes, link: LocalLink) -> None:
        self._peers[peer] = link

    def detach(self, peer: bytes) -> None:
        if self._peers.pop(peer, None) is not None:
            self._disconnected = True
            self._inbox.wake()

    def deliver(self, peer: bytes, run: str, message: Message) -> None:
        self._inbox.put((peer, run, message))


class LocalLink:
    """ClientLink of one producer.

    `cut()` breaks the connection as a crash would; a live client then connects again.
    """

    def __init__(self, hub: LocalHub, peer: bytes):
        self.endpoint: Endpoint | None = None
        self.connected = False
        self.inbox = _Mailbox()
        self._hub, self._peer = hub, peer
        self._changes: deque[str] = deque()

    def connect(self, endpoint: Endpoint | None) -> None:
        self.endpoint = endpoint
        if endpoint is not None:
            self._hub.attach(self._peer, self)
            self.connected = True
            self._changes.append("connected")

    def cut(self) -> None:
        self._hub.detach(self._peer)
        self.connected, self.endpoint = False, None
        self._changes.append("disconnected")
        self.inbox.wake()

    def receive(self, timeout_s: float) -> tuple[list[tuple[str, Message]], list[str]]:
        messages = self.inbox.take_all(0.0 if self._changes else timeout_s)
        changes = []
        while self._changes:
            changes.append(self._changes.popleft())
        return messages, changes

    def send(self, run: str, message: Message) -> bool:
        if self.connected:
            self._hub.deliver(self._peer, run, message)
        return self.connected

    def wake(self) -> None:
        self.inbox.wake()

    def close(self, linger_s: float = 0.2) -> None:
        self._hub.detach(self._peer)
        self.connected = False
