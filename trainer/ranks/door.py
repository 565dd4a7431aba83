"""Lets only those in who hold the run's key, where trainers meet over tcp."""

from __future__ import annotations

import logging
import time

import zmq

from common.transport.doorkeeper import HANDSHAKE_S, SAY_S, Doorkeeper
from common.transport.keys import ServerKeys, answer, guard
from common.transport.links import monitored
from trainer.ranks.words import MAX_PAYLOAD

log = logging.getLogger(__name__)


class Door:
    """The door of the first trainer's socket, which is not bound yet. Belongs to the thread that
    reads the socket.
    """

    def __init__(self, context: zmq.Context, router: zmq.Socket, address: str, keys: ServerKeys):
        self._keys, self._router = keys, router
        self._zap = guard(context, router, keys)
        router.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
        router.setsockopt(zmq.IPV6, int("[" in address))
        self._monitor = router.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._keeper = Doorkeeper(int(address.rpartition(":")[2]), MAX_PAYLOAD)
        self._said = -SAY_S
        self.ends = (self._zap, self._monitor)  # to be polled

    def serve(self) -> None:
        """Say who may come in, and close connections that prove no key."""
        answer(self._zap, self._keys, self._refused)
        while self._monitor.poll(0):
            event, descriptor = monitored(self._monitor)
            ended = event == zmq.EVENT_DISCONNECTED
            (self._keeper.closed if ended else self._keeper.accepted)(descriptor)

    def heard(self, frame: zmq.Frame) -> None:
        """Note a message, which its sender could not send without the key."""
        self._keeper.heard(frame.get(zmq.SRCFD))

    def keep_order(self) -> None:
        """Call it once all messages that wait are reported."""
        self._keeper.keep_order()

    def close(self) -> None:
        """Before the context is destroyed."""
        self._router.disable_monitor()
        self._monitor.close(0)

    def _refused(self, address: str) -> None:
        now = time.monotonic()
        if now >= self._said + SAY_S:
            self._said = now
            log.warning("%s was not let in: its key is not this run's (RUN/keys)", address)
