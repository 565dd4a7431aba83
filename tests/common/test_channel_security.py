"""Who gets in, and where the trainer listens: keys, allow-lists, sockets' folders, ports."""

import json
import os
import socket
import stat
import subprocess
import sys

import pytest

from common.transport import address
from common.transport.address import ChannelError, Endpoint, check_address, ipc_address
from common.transport.client import LeaseClient, Refused
from common.transport.keys import KeyFileError, KeyPair, ServerKeys, run_keys, zap_reply
from common.transport.server import LeaseServer, NoData
from tests.support import channel_fixtures
from tests.support import channels as cb

short_folder = channel_fixtures.short_folder


@pytest.fixture
def closing():
    """Things to close at the end of the test, last first."""
    ends = []
    yield ends
    for end in reversed(ends):
        end()


@pytest.fixture
def curve(tmp_path, closing):
    """(server on a tcp port with CURVE, the run's client pair)"""
    keys, client = run_keys(tmp_path)
    server = LeaseServer("tcp://127.0.0.1:*", cb.RUN, 4, keys=keys)
    closing.append(lambda: server.close(stop_producers=False))
    server.open(1, cb.OFFER, (("train", g) for g in range(20)))
    return server, client


def connect(closing, endpoint: Endpoint, keys: KeyPair | None, name="p") -> LeaseClient:
    client = LeaseClient(lambda: endpoint, cb.RUN, name, 2, keys=keys)
    closing.append(client.close)
    return client


def test_a_producer_with_the_runs_key_works_over_tcp(curve, closing):
    server, keys = curve
    producer = cb.Producer(connect(closing, Endpoint(server.endpoint, server.public_key), keys))
    assert cb.train(server) == [("train", g) for g in range(20)]
    producer.end()


def test_a_producer_with_another_key_is_refused(curve, closing):
    server, _ = curve
    client = connect(closing, Endpoint(server.endpoint, server.public_key), KeyPair.new())
    event = client.poll(cb.LATER_S)
    assert isinstance(event, Refused)
    assert "does not accept this producer's key" in event.reason
    assert server.stats()["peers"] == []


def test_a_producer_that_expects_another_trainer_gets_nowhere_and_says_why(curve, closing, caplog):
    server, keys = curve
    client = connect(closing, Endpoint(server.endpoint, KeyPair.new().public), keys)
    cb.wait_until(lambda: "does not speak to us" in client.trouble)
    assert client.poll(1.0) is None
    assert server.stats()["peers"] == []
    assert [r.levelname for r in caplog.records if "does not speak to us" in r.message] == [
        "WARNING"
    ]  # once, though it tries again


TOLD_S = 5  # so soon a peer without the run's keys knows that it waits for nothing


def test_a_peer_without_curve_gets_nowhere_and_is_told(curve):
    """A socket that asks for no keys, as a program of someone else's has it."""
    server, _ = curve
    code = (
        "import sys, zmq, msgpack\n"
        "s = zmq.Context().socket(zmq.DEALER); s.linger = 0\n"
        "told = s.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)\n"
        "s.connect(sys.argv[1])\n"
        "s.send(msgpack.packb({'v': 1, 'type': 'HB', 'run': sys.argv[2],"
        " 'gen': 0, 'status': '', 'ready': False}))\n"
        "sys.exit(int(not told.poll(1000 * int(sys.argv[3])) or s.poll(0)))\n"
    )
    argv = [sys.executable, "-c", code, server.endpoint, cb.RUN, str(TOLD_S)]
    assert subprocess.run(argv, timeout=cb.LATER_S).returncode == 0
    assert server.stats()["peers"] == []
    with pytest.raises(NoData):
        server.next(0.1)


@pytest.mark.parametrize(
    ("knows_the_trainer", "has_keys", "why"),
    [
        (True, False, "needs the run's client key"),
        (False, False, "tcp needs the run's keys"),
        (False, True, "tcp needs the run's keys"),
    ],
)
def test_a_producer_without_a_key_is_told(curve, closing, knows_the_trainer, has_keys, why):
    server, pair = curve
    endpoint = Endpoint(server.endpoint, server.public_key if knows_the_trainer else None)
    client = connect(closing, endpoint, pair if has_keys else None)
    with pytest.raises(ChannelError, match=why):
        client.poll(TOLD_S)  # None after so long
    assert server.stats()["peers"] == []


def test_the_allow_list_answers_by_key():
    pair = KeyPair.new()
    raw = __import__("zmq.utils.z85", fromlist=["z85"]).decode(pair.public.encode())
    request = [b"1.0", b"7", b"xtts", b"10.0.0.1", b"", b"CURVE", raw]
    assert zap_reply(request, frozenset([pair.public])) == [
        b"1.0",
        b"7",
        b"200",
        b"OK",
        pair.public.encode(),
        b"",
    ]
    for wrong in (
        request[:6],
        [*request[:5], b"NULL"],
        [*request[:5], b"PLAIN", b"a", b"b"],
        [*request[:6], b"x" * 31],
        [*request[:6], b"y" * 32],
    ):
        assert zap_reply(wrong, frozenset([pair.public]))[2] == b"400"
    assert zap_reply(request, frozenset())[2] == b"400"


def test_key_files_are_private_stable_and_checked(tmp_path):
    keys, client = run_keys(tmp_path)
    again, client_again = run_keys(tmp_path)
    assert (keys, client) == (again, client_again)
    assert keys.allowed == {client.public}
    assert client.secret not in repr(keys) + repr(client)
    path = tmp_path / "keys" / "server.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert os.listdir(path.parent) == ["client.json", "server.json"] or sorted(
        os.listdir(path.parent)
    ) == ["client.json", "server.json"]
    path.chmod(0o644)
    with pytest.raises(KeyFileError, match="others can read the secret key .mode 0644.; chmod 600"):
        KeyPair.load(path)
    path.chmod(0o600)
    for text, message in (
        ("{}", "not a key file"),
        ("[1]", "not a key file"),
        ('{"public": "short", "secret": "short"}', "not a key file"),
        (json.dumps({"public": client.public, "secret": keys.pair.secret}), "does not belong"),
    ):
        path.write_text(text)
        with pytest.raises(KeyFileError, match=message):
            KeyPair.load(path)
    with pytest.raises(KeyFileError, match="cannot read"):
        KeyPair.load(tmp_path / "none.json")


# addresses


@pytest.mark.parametrize("port", ["0", "65536", "99999", "-1", "99999999999999999999"])
def test_c32_ports_outside_the_range_are_refused_before_zmq_sees_them(port):
    with pytest.raises(ChannelError, match="outside 1..65535"):
        LeaseServer(
            f"tcp://127.0.0.1:{port}", cb.RUN, 4, keys=ServerKeys(KeyPair.new(), frozenset())
        )


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "tcp://",
        "tcp://host",
        "tcp://host:port",
        "udp://127.0.0.1:5555",
        "ipc://@name",
        "ipc://relative",
        "ipc://*",
        "inproc://x",
        "5555",
    ],
)
def test_other_addresses_are_refused(bad):
    with pytest.raises(ChannelError, match="expected"):
        check_address(bad, curve=True)


@pytest.mark.parametrize(
    "good",
    [
        "tcp://127.0.0.1:5555",
        "tcp://*:1",
        "tcp://[::1]:65535",
        "tcp://host.example:5555",
        "ipc:///tmp/x.sock",
    ],
)
def test_proper_addresses_pass(good):
    assert check_address(good, curve=True) == good


def test_an_address_of_every_interface_is_written_down_as_one_to_connect_to():
    server = LeaseServer("tcp://*:*", cb.RUN, 4, keys=ServerKeys(KeyPair.new(), frozenset()))
    server.close()
    assert server.endpoint.startswith("tcp://127.0.0.1:")
    assert address.connectable("tcp://[::]:5555") == "tcp://[::1]:5555"
    assert address.connectable("tcp://10.0.0.1:5555") == "tcp://10.0.0.1:5555"


def test_tcp_without_keys_is_refused():
    with pytest.raises(ChannelError, match="keys"):
        LeaseServer("tcp://127.0.0.1:*", cb.RUN, 4)


def test_c32_a_port_in_use_names_its_owner_and_is_free_at_once_after_the_owner_is_gone(closing):
    keys = ServerKeys(KeyPair.new(), frozenset())
    code = (
        "import socket\ns = socket.socket(); s.bind(('127.0.0.1', 0));"
        " s.listen()\nprint(s.getsockname()[1], flush=True); input()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    closing.append(holder.communicate)
    port = int(holder.stdout.readline())
    with pytest.raises(ChannelError, match=rf"tcp port {port} used by pid {holder.pid} \(.*python"):
        LeaseServer(f"tcp://127.0.0.1:{port}", cb.RUN, 4, keys=keys)
    holder.kill()
    holder.wait()
    LeaseServer(f"tcp://127.0.0.1:{port}", cb.RUN, 4, keys=keys).close()


def test_an_address_of_another_host_is_named():
    with pytest.raises(ChannelError, match=r"not an address of this host \(it has .*127.0.0.1"):
        LeaseServer(
            "tcp://203.0.113.7:5555", cb.RUN, 4, keys=ServerKeys(KeyPair.new(), frozenset())
        )


def test_a_live_trainers_local_socket_is_not_taken_over_but_a_dead_ones_is(short_folder, closing):
    where = f"ipc://{short_folder}/s.sock"
    first = LeaseServer(where, cb.RUN, 4)
    first.open(1, cb.OFFER, (("train", g) for g in range(3)))
    with pytest.raises(ChannelError, match="is used by .*a trainer of this run is alive"):
        LeaseServer(where, cb.RUN, 4)
    producer = cb.Producer(connect(closing, Endpoint(where), None))
    assert len(cb.train(first)) == 3
    producer.end()
    first.close()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(f"{short_folder}/dead.sock")
    LeaseServer(f"ipc://{short_folder}/dead.sock", cb.RUN, 4).close()


def test_the_local_address_is_short_private_and_the_same_for_every_spelling_of_the_run(
    tmp_path, monkeypatch, short_folder
):
    monkeypatch.setattr(address.tempfile, "gettempdir", lambda: str(short_folder))
    run = tmp_path / ("deep" * 30) / "run"
    run.mkdir(parents=True)
    (tmp_path / "link").symlink_to(run)
    found = ipc_address(run)
    assert found == ipc_address(tmp_path / "link") == ipc_address(run / ".." / "run")
    assert found != ipc_address(tmp_path)
    folder = os.path.dirname(found[len("ipc://") :])
    assert os.path.dirname(folder) == str(short_folder)
    assert len(found) - len("ipc://") <= 107
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    os.chmod(folder, 0o755)
    with pytest.raises(ChannelError, match="mode 0700"):
        ipc_address(run)
    os.rmdir(folder)
    os.symlink(run, folder)
    with pytest.raises(ChannelError, match="mode 0700"):
        ipc_address(run)


def test_a_long_temporary_folder_falls_back_to_tmp(tmp_path, monkeypatch):
    monkeypatch.setattr(address.tempfile, "gettempdir", lambda: str(tmp_path / ("x" * 100)))
    assert ipc_address(tmp_path).startswith(f"ipc:///tmp/xtts-{os.getuid()}/")


def test_the_endpoint_file_makes_the_round_trip(tmp_path):
    path = tmp_path / "endpoint.json"
    assert Endpoint.read(path) is None
    Endpoint("ipc:///tmp/x", None, 17).write(path)
    assert Endpoint.read(path) == Endpoint("ipc:///tmp/x", None, 17)
    assert os.listdir(tmp_path) == ["endpoint.json"]
    path.write_text("[]")
    with pytest.raises(ChannelError, match="not an endpoint file"):
        Endpoint.read(path)
