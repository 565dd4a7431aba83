"""Connections that prove no key: few, brief, never in the way of a producer, and little memory.

All over tcp with CURVE.
"""

import errno
import os
import resource
import socket
import struct
import subprocess
import sys
import time

import psutil
import pytest
import zmq

from common.transport import doorkeeper
from common.transport.address import Endpoint
from common.transport.client import LeaseClient, Refused
from common.transport.doorkeeper import Doorkeeper, raise_file_limit
from common.transport.keys import run_keys
from common.transport.links import RouterLink
from common.transport.server import LeaseServer
from tests.support import channel_fixtures
from tests.support import channels as cb

short_folder = channel_fixtures.short_folder
FRAME = 8 << 20  # of the largest array
GREETING = (
    b"\xff" + b"\0" * 8 + b"\x7f" + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + b"\0" + b"\0" * 31
)  # ZMTP 3.1, as a client


@pytest.fixture
def curve(tmp_path):
    """server, the keys of its producers, its port; all strangers' sockets are closed at the end"""
    keys, client = run_keys(tmp_path)
    server = LeaseServer("tcp://127.0.0.1:*", cb.RUN, 4, keys=keys, max_frame_bytes=FRAME)
    server.open(1, cb.OFFER, cb.train_schedule())
    yield server, client, int(server.endpoint.rsplit(":", 1)[1])
    server.close(stop_producers=False)


def stranger(port: int, says: bytes = b"") -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), 5)
    sock.sendall(says)
    return sock


def is_closed(sock: socket.socket) -> bool:
    """Whether the other end has closed it; what it said before is passed over."""
    sock.setblocking(False)
    try:
        while sock.recv(4096):
            pass
        return True
    except BlockingIOError:
        return False
    except OSError:
        return True


def closed(strangers: list[socket.socket]) -> int:
    return sum(is_closed(s) for s in strangers)


def door_of(server: LeaseServer) -> Doorkeeper:
    return server._link._door


def test_a_frame_beyond_the_largest_array_ends_the_connection_before_it_is_read(curve):
    """Four first commands of 250 MB took 1.1 GB, before anybody had proved a key."""
    server, _, port = curve
    before = psutil.Process().memory_info().rss
    sent = []
    for _ in range(4):
        sock = stranger(port, GREETING)
        sock.settimeout(20)
        total = 0
        try:
            sock.sendall(b"\x06" + struct.pack(">Q", 250 << 20))  # a long command frame
            while total < 250 << 20:
                total += sock.send(b"\5" * (1 << 20))
        except OSError:
            pass
        sent.append(total)
        sock.close()
    assert max(sent) < 40 << 20  # what the kernel's buffers take
    assert psutil.Process().memory_info().rss - before < 100 << 20


def test_first_frames_as_large_as_are_allowed_fill_no_more_than_their_bound(curve, monkeypatch):
    server, _, port = curve
    door = door_of(server)
    assert door.max_unproved == (256 << 20) // (FRAME + 64)
    assert Doorkeeper(1, 1 << 30).max_unproved == 4
    assert Doorkeeper(1, 1000).max_unproved == 64
    door.max_unproved = 4
    before, strangers, most = psutil.Process().memory_info().rss, [], 0
    for _ in range(16):  # 128 MB if all of them were let
        sock = stranger(port, GREETING + b"\x06" + struct.pack(">Q", FRAME))
        sock.settimeout(20)
        try:
            for _ in range(7):
                sock.sendall(b"\5" * (1 << 20))
        except OSError:
            pass
        strangers.append(sock)
        cb.wait_until(lambda: door.unproved <= 4)
        most = max(most, psutil.Process().memory_info().rss - before)
    assert most < 80 << 20
    for sock in strangers:
        sock.close()


def test_idle_strangers_are_few_and_a_producer_comes_in_among_them(curve):
    server, keys, port = curve
    door = door_of(server)
    door.max_unproved = 8
    strangers = [stranger(port) for _ in range(60)]
    cb.wait_until(lambda: closed(strangers) >= 52)
    producer = cb.Producer(
        LeaseClient(lambda: Endpoint(server.endpoint, server.public_key), cb.RUN, "p", 2, keys=keys)
    )
    assert cb.train(server, 20) == [("train", g) for g in range(20)]
    strangers += [stranger(port) for _ in range(60)]
    assert cb.train(server, 20) == [("train", g) for g in range(20, 40)]
    cb.wait_until(lambda: closed(strangers) >= 112)
    assert server.stats()["peers"][0]["produced"] >= 40
    assert door.connections - door.unproved == 1
    assert door.turned_away >= 60  # the others by the deadline, should the machine be slow
    producer.end()
    for sock in strangers:
        sock.close()
    cb.wait_until(lambda: door.connections == 0)


def test_who_does_not_prove_a_key_has_seconds_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr("common.transport.links.HANDSHAKE_S", 0.5)
    keys, _ = run_keys(tmp_path)
    link = RouterLink("tcp://127.0.0.1:*", window=2, keys=keys)
    port = int(link.address.rsplit(":", 1)[1])
    strangers = [
        stranger(port, says) for says in (b"", GREETING[:10], GREETING, b"GET / HTTP/1.1\r\n\r\n")
    ]
    deadline = time.monotonic() + 30
    while closed(strangers) < 4:
        assert time.monotonic() < deadline
        link.receive(0.05)
    assert link._door.connections == 0
    link.close()
    assert doorkeeper.HANDSHAKE_S <= 10


def test_a_door_keeps_the_oldest_out_and_leaves_what_is_not_its_own():
    door = Doorkeeper(4242, 1 << 20)
    door.max_unproved = 2
    read, write = os.pipe()  # descriptors that are no sockets; one of another port
    other = socket.create_server(("127.0.0.1", 0))
    for d in (read, other.fileno(), 901, 902):
        door.accepted(d)
    door.heard(901)
    door.heard(77)
    door.keep_order()
    assert (door.connections, door.unproved, door.turned_away) == (
        3,
        2,
        1,
    )  # `read`, the oldest, has gone
    door.accepted(903)
    door.keep_order()
    assert door.turned_away == 2
    assert os.fstat(read)
    os.write(write, b"x")
    socket.create_connection(other.getsockname(), 5).close()  # it still listens
    door.closed(901)
    assert door.connections == door.unproved == 2
    for end in (read, write):
        os.close(end)
    other.close()


def test_the_limit_of_open_files_is_raised_as_far_as_it_goes():
    code = (
        "import resource, sys\nfrom common.transport.doorkeeper import"
        " raise_file_limit\nresource.setrlimit(resource.RLIMIT_NOFILE, (64,"
        " int(sys.argv[1])))\nsys.exit(raise_file_limit(512) - int(sys.argv[2]) or"
        " resource.getrlimit(resource.RLIMIT_NOFILE)[0] - int(sys.argv[2]))\n"
    )
    for hard, expected in (("4096", "512"), ("128", "128"), ("64", "64")):
        assert subprocess.run([sys.executable, "-c", code, hard, expected]).returncode == 0
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert raise_file_limit(soft - 1) == soft  # never lowered


def test_the_sockets_descriptor_tells_whose_message_it_is(tmp_path):
    """What the door relies on of libzmq: the monitor's descriptor of a connection is that of its
    messages.
    """
    keys, pair = run_keys(tmp_path)
    link = RouterLink("tcp://127.0.0.1:*", window=2, keys=keys)
    context = zmq.Context()
    dealers = []
    for _ in range(2):
        dealer = context.socket(zmq.DEALER)
        dealer.linger, dealer.curve_serverkey = 0, keys.pair.public.encode()
        dealer.curve_publickey, dealer.curve_secretkey = pair.public.encode(), pair.secret.encode()
        dealer.connect(link.address)
        dealers.append(dealer)
    deadline = time.monotonic() + 30
    while link._door.connections < 2:
        assert time.monotonic() < deadline
        link.receive(0.05)
    assert link._door.unproved == 2
    dealers[1].send(b"anything")
    while link._door.unproved == 2:
        assert time.monotonic() < deadline
        link.receive(0.05)
    assert link._door.unproved == 1
    context.destroy(linger=0)
    while link._door.connections:
        assert time.monotonic() < deadline
        link.receive(0.05)
    link.close()


def test_too_many_open_files_are_no_full_disk():
    from common.system.lifecycle import _is_hopeless

    assert not _is_hopeless(OSError(errno.EMFILE, "Too many open files"))
    assert _is_hopeless(OSError(errno.ENOSPC, "No space left on device"))


def test_more_producers_than_there_can_be_are_told_so(short_folder, monkeypatch):
    monkeypatch.setattr("common.transport.answers.MAX_PEERS", 1)
    server = LeaseServer(f"ipc://{short_folder}/s", cb.RUN, 4)
    server.open(1, cb.OFFER, cb.train_schedule(5))
    first = cb.Producer(LeaseClient(lambda: Endpoint(server.endpoint), cb.RUN, "p0"))
    cb.wait_until(lambda: server.stats()["peers"])
    second = LeaseClient(lambda: Endpoint(server.endpoint), cb.RUN, "p1")
    refusal = second.poll(cb.LATER_S)
    assert isinstance(refusal, Refused)
    assert "this trainer has 1 producers, which is the most" in refusal.reason
    assert len(cb.train(server)) == 5
    second.close()
    first.end()
    server.close(stop_producers=False)
