"""The two ends of the wire: ROUTER (trainer, binds) and DEALER (producer, connects).

Sockets and frames, no protocol.

Each link is used by one thread only, except `wake`. Both have a context of their own, so that
closing one is bounded and touches nobody else. High-water marks only back up the lease window:
alone they would bound memory per peer, and lose what they hold when the peer dies.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import uuid
from collections.abc import Mapping
from typing import Protocol

import zmq

from common.transport import wire
from common.transport.address import (
    ChannelError,
    Endpoint,
    check_address,
    check_ipc_free,
    connectable,
    explain_bind,
)
from common.transport.doorkeeper import HANDSHAKE_S, Doorkeeper
from common.transport.keys import KeyPair, ServerKeys, answer, guard
from common.transport.messages import FROM_PRODUCER, FROM_TRAINER, Data, Message, WireError

CURVE_BYTES = 64  # bytes that CURVE adds to a frame: a name, a number, a signature
RECEIVE_AT_ONCE = 64  # messages per call, so that timers are checked in between
EVENTS_AT_ONCE = 1024  # of connections, likewise
# For half-open links between hosts. ZMTP heartbeats under back-pressure lose data: safe here only
# because credits keep pipes from filling.
TCP_HEARTBEAT_S, TCP_TIMEOUT_S = 5, 30

CHANGES = {
    zmq.EVENT_HANDSHAKE_SUCCEEDED: "connected",
    zmq.EVENT_DISCONNECTED: "disconnected",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "refused",  # our key is not on the trainer's allow-list
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: (
        "misunderstood"
    ),  # another server key, or none, or no ZeroMQ at all
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "misunderstood",
}

Received = tuple[bytes, str, "Message | WireError"]


class ServerLink(Protocol):
    """What the trainer's end needs from a transport (RouterLink, or LocalHub in one process)."""

    address: str
    public_key: str | None
    bytes_received: int

    def receive(self, timeout_s: float) -> tuple[list[Received], bool]: ...
    def send(self, peer: bytes, run: str, message: Message) -> str: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...


class Wake:
    """Lets other threads end a poll."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def set(self) -> None:
        with contextlib.suppress(
            BlockingIOError, OSError
        ):  # full: a wake-up is pending anyway; closed: nobody waits
            self._writer.send(b"x")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


def _common_options(sock: zmq.Socket, address: str) -> None:
    sock.linger = 0  # leases make unsent messages worthless; the default would hang at exit
    if address.startswith("tcp://"):
        sock.setsockopt(zmq.HEARTBEAT_IVL, TCP_HEARTBEAT_S * 1000)
        sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, TCP_TIMEOUT_S * 1000)
        sock.setsockopt(zmq.HEARTBEAT_TTL, TCP_TIMEOUT_S * 1000)
        sock.setsockopt(zmq.IPV6, int("[" in address))


def decoded(
    frames: list[zmq.Frame], kinds: Mapping[str, type[Message]]
) -> tuple[str, Message | WireError]:
    """(run, message) from a socket's frames; for anything that is no message, the error that says
    why.
    """
    try:
        return wire.decode([frame.buffer for frame in frames], kinds)
    except WireError as error:
        return error.run or "", error.with_traceback(
            None
        )  # a traceback would keep the frames alive


class RouterLink:
    """Trainer side. The constructor raises ChannelError if it cannot listen at the address."""

    def __init__(
        self,
        bind: str,
        *,
        window: int,
        max_frame_bytes: int = wire.MAX_FRAME_BYTES,
        keys: ServerKeys | None = None,
    ):
        check_address(bind, keys is not None)
        self._keys = keys
        self.bytes_received = 0
        self._wake = Wake()
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._zap: zmq.Socket | None = None
        self._monitor: zmq.Socket | None = None
        self._door: Doorkeeper | None = None
        self._socket_file: tuple[str, int] | None = None  # path and inode of what was bound
        try:
            self._open(bind, window, max_frame_bytes)
        except BaseException:
            self.close()
            raise
        for end in (self._router, self._monitor, self._zap, self._wake.fileno()):
            if end is not None:
                self._poller.register(end, zmq.POLLIN)

    def _open(self, bind: str, window: int, max_frame_bytes: int) -> None:
        router = self._router = self._context.socket(zmq.ROUTER)
        _common_options(router, bind)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        router.setsockopt(zmq.RCVHWM, 2 * window)
        router.setsockopt(zmq.SNDHWM, 100)
        max_frame_bytes = max(max_frame_bytes, wire.MAX_HEADER_BYTES) + CURVE_BYTES
        router.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
        router.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
        if self._keys is not None:
            self._zap = guard(self._context, router, self._keys)
        self._monitor = router.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        if bind.startswith("ipc://"):
            check_ipc_free(bind)
        try:
            router.bind(bind)
        except zmq.ZMQError as error:
            raise ChannelError(explain_bind(bind, error.errno, str(error))) from None
        self.address = connectable(router.last_endpoint.rstrip(b"\0").decode())
        if bind.startswith("ipc://"):
            path = bind.removeprefix("ipc://")
            self._socket_file = path, os.lstat(path).st_ino
        self.public_key = self._keys.pair.public if self._keys else None
        if bind.startswith("tcp://"):
            self._door = Doorkeeper(int(self.address.rsplit(":", 1)[1]), max_frame_bytes)

    def receive(self, timeout_s: float) -> tuple[list[Received], bool]:
        """Up to 64 messages as (peer id, run, message or WireError), and whether a peer
        disconnected; waits at most timeout_s.
        """
        ready = dict(self._poller.poll(max(0, int(timeout_s * 1000))))
        if self._wake.fileno() in ready:
            self._wake.clear()
        if self._zap in ready:
            answer(self._zap, self._keys)
        changed = self._monitor in ready
        disconnected = self._follow_connections() if changed else False
        messages: list[Received] = []
        if self._router in ready:
            with contextlib.suppress(zmq.Again):
                while len(messages) < RECEIVE_AT_ONCE:
                    peer, *frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
                    self.bytes_received += sum(len(frame) for frame in frames)
                    if self._door is not None:
                        self._door.heard(peer.get(zmq.SRCFD))
                    messages.append((peer.bytes, *decoded(frames, FROM_PRODUCER)))
        if self._door is not None and changed:
            self._door.keep_order()
        return messages, disconnected

    def _follow_connections(self) -> bool:
        """Read the monitor; whether a connection has ended."""
        disconnected = False
        for _ in range(EVENTS_AT_ONCE):
            if not self._monitor.poll(0):
                break
            event, descriptor = monitored(self._monitor)
            ended = event == zmq.EVENT_DISCONNECTED
            disconnected = disconnected or ended
            if self._door is not None:
                (self._door.closed if ended else self._door.accepted)(descriptor)
        return disconnected

    def send(self, peer: bytes, run: str, message: Message) -> str:
        """`sent`, `gone` (no such connection any more) or `full` (it does not read)."""
        try:
            self._router.send_multipart([peer, *wire.encode(run, message)], zmq.NOBLOCK)
        except zmq.Again:
            return "full"
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return "gone"
        return "sent"

    def wake(self) -> None:
        self._wake.set()

    def close(self) -> None:
        """Close everything; bounded, as nothing lingers."""
        if self._monitor is not None:
            self._router.disable_monitor()
            self._monitor.close(0)
        self._context.destroy(linger=0)
        self._wake.close()
        if self._socket_file is not None:
            path, inode = self._socket_file
            with contextlib.suppress(OSError):  # gone already, or another's by now
                if os.lstat(path).st_ino == inode:
                    os.unlink(path)


class DealerLink:
    """Producer side: one connection, re-made by ZeroMQ when it breaks (within 50 to 500 ms) and by
    `connect` when the address changes.
    """

    def __init__(self, *, keys: KeyPair | None = None, high_water_mark: int = 64):
        self.endpoint: Endpoint | None = None
        self.connected = False
        self._id = (
            uuid.uuid4().bytes
        )  # unique per process: two peers with one id would take each other's place
        self._keys, self._hwm = keys, high_water_mark
        self._wake = Wake()
        self._context = zmq.Context()
        self._dealer: zmq.Socket | None = None
        self._monitor: zmq.Socket | None = None

    def connect(self, endpoint: Endpoint | None) -> None:
        """Leave the present connection and make a new one.

        Raises ChannelError if the address is not one.
        """
        self._disconnect(0)
        self.endpoint = endpoint
        if endpoint is None:
            return
        check_address(endpoint.address, endpoint.public_key is not None)
        if endpoint.public_key is not None and self._keys is None:
            raise ChannelError(
                f"{endpoint.address} needs the run's client key (RUN/keys/client.json, or a"
                " bundle): none was given"
            )
        dealer = self._context.socket(zmq.DEALER)
        _common_options(dealer, endpoint.address)
        dealer.setsockopt(zmq.ROUTING_ID, b"\x01" + self._id)  # the first byte must not be 0
        dealer.setsockopt(zmq.IMMEDIATE, 1)  # nothing queues for a trainer that is not there
        dealer.setsockopt(zmq.SNDHWM, self._hwm)
        dealer.setsockopt(zmq.RCVHWM, 1000)  # leases and heartbeats: small, bounded by credits
        dealer.setsockopt(zmq.RECONNECT_IVL, 50)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        dealer.setsockopt(zmq.MAXMSGSIZE, wire.MAX_HEADER_BYTES)
        if endpoint.public_key is not None:
            dealer.curve_serverkey = endpoint.public_key.encode()
            dealer.curve_publickey = self._keys.public.encode()
            dealer.curve_secretkey = self._keys.secret.encode()
        self._dealer, self._monitor = dealer, dealer.get_monitor_socket(sum(CHANGES))
        dealer.connect(endpoint.address)

    def receive(self, timeout_s: float) -> tuple[list[tuple[str, Message | WireError]], list[str]]:
        """(run, message or WireError) pairs, and what happened to the connection (see CHANGES);
        waits at most timeout_s.
        """
        poller = zmq.Poller()
        for end in (self._dealer, self._monitor, self._wake.fileno()):
            if end is not None:
                poller.register(end, zmq.POLLIN)
        ready = dict(poller.poll(max(0, int(timeout_s * 1000))))
        if self._wake.fileno() in ready:
            self._wake.clear()
        changes = []
        while self._monitor in ready and self._monitor.poll(0):
            event, _ = monitored(self._monitor)
            was_connected, self.connected = self.connected, event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            unfinished = (
                event == zmq.EVENT_DISCONNECTED and not was_connected
            )  # libzmq may report no more of a failed handshake than this
            changes.append("misunderstood" if unfinished else CHANGES[event])
        messages: list = []
        if self._dealer in ready:
            with contextlib.suppress(zmq.Again):
                while len(messages) < RECEIVE_AT_ONCE:
                    messages.append(
                        decoded(self._dealer.recv_multipart(zmq.NOBLOCK, copy=False), FROM_TRAINER)
                    )
        return messages, changes

    def send(self, run: str, message: Message) -> bool:
        """False if there is no connection, or it takes no more."""
        if self._dealer is None:
            return False
        try:
            self._dealer.send_multipart(
                wire.encode(run, message), zmq.NOBLOCK, copy=not isinstance(message, Data)
            )
        except zmq.Again:
            return False
        return True

    def wake(self) -> None:
        self._wake.set()

    def _disconnect(self, linger_ms: int) -> None:
        if self._dealer is not None:
            # does not close our end of it, and an open one would hang term()
            self._dealer.disable_monitor()
            self._monitor.close(0)
            self._dealer.close(linger_ms)
            self._dealer = self._monitor = None
        self.connected = False

    def close(self, linger_s: float = 0.2) -> None:
        """Close; a message just sent (BYE) has linger_s to get out."""
        self._disconnect(int(linger_s * 1000))
        self._context.term()  # bounded by the linger of its only socket
        self._wake.close()


def monitored(monitor: zmq.Socket) -> tuple[int, int]:
    """(event, value) of the next message from a socket's monitor. zmq.Again: there is none.

    `zmq.utils.monitor` would read it as well, but loads asyncio and ssl: a fifth of what a producer
    loads.
    """
    what, _ = monitor.recv_multipart(zmq.NOBLOCK)
    return struct.unpack("=Hi", what)  # as zmq_socket_monitor(3) lays it out
