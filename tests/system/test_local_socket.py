"""The local socket of a run: at any path, over what lies there already, and gone at the end."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from common.launcher import ownership
from common.system.errors import BadInput, RunError, Stopped
from common.system.lifecycle import Stop
from common.transport.address import ChannelError, Endpoint, ipc_address
from common.transport.keys import run_keys
from common.transport.links import RouterLink
from producer.__main__ import client_keys, expected
from tests.support import channel_fixtures
from tests.support.arithmetic_runs import arithmetic_run
from trainer.__main__ import _bind

short_folder = channel_fixtures.short_folder


def test_keys_that_never_come_are_waited_for_with_an_end(tmp_path):
    run = arithmetic_run(tmp_path, 12, transport__bind="tcp://127.0.0.1:5599")
    with pytest.raises(RunError, match=r"keys/client\.json is not there after 0\.1 s.*start the"):
        client_keys(run, None, Stop(), wait_s=0.1)
    stop = Stop()
    stop.request("stop", "test", 143)
    with pytest.raises(Stopped):
        client_keys(run, None, stop)
    (run.path / "keys").mkdir()
    (run.path / "keys" / "client.json").symlink_to("/nowhere")
    with pytest.raises(BadInput, match="a symbolic link lies there"):
        client_keys(run, None, Stop())


def test_where_a_trainer_should_listen_follows_from_the_settings(tmp_path):
    for i, (bind, address) in enumerate(
        [
            ("ipc", None),
            ("ipc:///tmp/x.sock", "ipc:///tmp/x.sock"),
            ("tcp://0.0.0.0:5599", "tcp://127.0.0.1:5599"),
            ("tcp://127.0.0.1:*", ""),
        ]
    ):
        run = arithmetic_run(tmp_path / str(i), 12, transport__bind=bind)
        keys = run_keys(run.path)[0] if bind.startswith("tcp") else None
        public = keys and keys.pair.public
        wanted = None if address == "" else Endpoint(address or ipc_address(run.path), public)
        assert expected(run) == wanted, bind


def left_behind(path: Path) -> None:
    """The socket of a process that was killed."""
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(str(path))


def test_s4_s13_a_path_of_ones_own_needs_no_keys_and_is_gone_at_the_end(short_folder, tmp_path):
    path = short_folder / "x.sock"
    address = f"ipc://{path}"
    ownership.check_bind(address)
    run = arithmetic_run(tmp_path, 12, transport__bind=address)
    server = _bind(run, Stop())
    try:
        assert server.endpoint == address
        assert server.public_key is None
        assert client_keys(run, None, Stop()) is None
        with pytest.raises(BadInput, match="a trainer of this run is alive"):
            ownership.check_bind(address)
    finally:
        server.close(drain_s=0.0)
    assert not path.exists()


@pytest.mark.parametrize("kind", ["file", "folder", "fifo", "link"])
def test_s3_what_is_no_socket_is_not_destroyed(short_folder, kind):
    path, target = short_folder / "f", short_folder / "target"
    target.write_text("precious")
    make = {
        "file": lambda: path.write_text("precious"),
        "folder": path.mkdir,
        "fifo": lambda: os.mkfifo(path),
        "link": lambda: path.symlink_to(target),
    }
    make[kind]()
    before = os.lstat(path)
    with pytest.raises(BadInput, match="transport.bind: .*exists and is no socket"):
        ownership.check_bind(f"ipc://{path}")
    with pytest.raises(ChannelError, match="exists and is no socket"):
        RouterLink(f"ipc://{path}", window=4)
    assert (os.lstat(path).st_ino, os.lstat(path).st_mode) == (before.st_ino, before.st_mode)
    assert target.read_text() == "precious"


def test_s3_a_socket_of_nobody_is_taken_over_and_that_of_another_stays(short_folder):
    path = short_folder / "x.sock"
    left_behind(path)
    ownership.check_bind(f"ipc://{path}")
    link = RouterLink(f"ipc://{path}", window=4)
    path.unlink()
    left_behind(path)  # another's by now
    link.close()
    assert stat.S_ISSOCK(os.lstat(path).st_mode)


def test_s3_a_folder_that_is_not_there_is_named(short_folder):
    with pytest.raises(ChannelError, match=r"ipc://.*/none/x.sock: cannot listen there"):
        RouterLink(f"ipc://{short_folder}/none/x.sock", window=4)
