"""Trainers that meet over tcp, as those of several hosts do: keys, addresses, who is missing."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from common.system.errors import HOPELESS, OK, BadInput, Hopeless
from common.system.lifecycle import Stop
from common.system.status import StatusFile
from common.transport.address import ChannelError, Endpoint
from common.transport.keys import KeyPair, run_keys
from tests.support.far_trainers import free_address
from trainer import joining
from trainer.joining import Joining, host_of, meeting_place
from trainer.lead import Lead
from trainer.ranks.follower import Ended, Far, Follower
from trainer.ranks.leader import Leader
from trainer.ranks.ports import Port, free_addresses
from trainer.ranks.words import RankLost

RUN = "0" * 32
FAR_S = 60.0  # a deadline that is not meant to pass


def never() -> bool:
    return False


def until(condition) -> None:
    deadline = time.monotonic() + FAR_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def run(tmp_path):
    """What a trainer reads of a run of three trainers; `run.end_of` makes ends that are closed."""
    trainers = SimpleNamespace(
        count=3, bind=free_address(), timeout_s=FAR_S, compiling_s=FAR_S, join_s=FAR_S
    )
    made = []

    def leader() -> Leader:
        address, keys = meeting_place(run)
        made.append(Leader(address, RUN, trainers.count, FAR_S, FAR_S, keys))
        Endpoint(address, keys.pair.public).write(run.trainers_file)
        return made[-1]

    def follower(rank: int, keys: KeyPair | None = None, collective: str = "h:1") -> Follower:
        server, client = run_keys(run.path)
        far = Far(server.pair.public, keys or client, f"host-{rank}", collective)
        made.append(Follower(trainers.bind, rank, trainers.count, FAR_S, far))
        return made[-1]

    run = SimpleNamespace(
        path=tmp_path,
        trainers_file=tmp_path / "trainers.json",
        config=SimpleNamespace(trainers=trainers),
        run_id=RUN,
        leader=leader,
        follower=follower,
    )
    yield run
    for end in reversed(made):
        end.close()


def test_each_tells_where_its_collective_server_listens_and_batches_travel(run):
    leader = run.leader()
    followers = [run.follower(r, collective=f"10.0.0.{r}:4{r}") for r in (2, 1)]
    leader.join(never, FAR_S)
    assert leader.addresses() == ["10.0.0.1:41", "10.0.0.2:42"]
    leader.set_up("gpt", leader.addresses())
    for f in followers:
        assert f.wait("set_up", never)["addresses"] == leader.addresses()
    batch = {"ids": np.arange(1 << 20, dtype=np.int32)}
    leader.hand_on(2, "train", 1, batch)
    taken = followers[0].next(FAR_S, never)
    np.testing.assert_array_equal(taken.arrays["ids"], batch["ids"])


def test_the_first_trainers_own_address_is_of_the_interface_at_which_they_meet(run):
    """A follower that has told none, as none of the first one's host does, is given one."""
    lead = Lead.__new__(Lead)
    lead.count, lead._leader = 3, SimpleNamespace(addresses=lambda: ["10.0.0.2:7", ""])
    own, told, given = lead._addresses(host_of("tcp://127.0.0.2:5556"))
    assert told == "10.0.0.2:7"
    assert [a.split(":")[0] for a in (own, given)] == ["127.0.0.2"] * 2
    assert host_of("ipc:///tmp/x") == "127.0.0.1"
    assert len(set(free_addresses(3))) == 3


def test_a_port_is_held_until_it_is_given_up():
    port = Port("127.0.0.1")
    number = int(port.address.split(":")[1])
    with pytest.raises(OSError, match="in use"):
        joining.socket.create_server(("127.0.0.1", number))
    port.give_up()
    joining.socket.create_server(("127.0.0.1", number)).close()


def test_a_key_that_is_not_the_runs_is_refused_in_one_line_on_both_hosts(run, caplog):
    run.leader()
    stranger = run.follower(1, keys=KeyPair.new())
    with pytest.raises(BadInput, match=r"does not know the key in RUN/keys/client.json: all"):
        stranger.wait("set_up", never)
    until(lambda: caplog.records)
    lines = [r.getMessage() for r in caplog.records]
    assert lines == ["127.0.0.1 was not let in: its key is not this run's (RUN/keys)"]


def test_another_program_in_the_first_trainers_place_is_said(run):
    run.leader()
    server, client = run_keys(run.path)
    far = Far(KeyPair.new().public, client, "host", "h:1")
    follower = Follower(run.config.trainers.bind, 1, 3, FAR_S, far)
    try:
        until(lambda: "is no trainer of this run" in follower.trouble)
    finally:
        follower.close()


def test_one_that_never_comes_is_named_and_the_others_hear_of_it(run):
    leader, other, said = run.leader(), run.follower(1), []
    until(lambda: 1 in leader._peers)
    with pytest.raises(Hopeless) as raised:
        leader.join(never, 0.0, said.append)
    assert str(raised.value).startswith(
        "trainer-2 did not come within 0 s: start it on its host with `launch.py trainer --run RUN"
        " --rank 2`, or see RUN/logs/trainer-2.log"
    )
    assert said[-1] == "trainer-2"
    leader.end(str(raised.value), HOPELESS)
    with pytest.raises(Ended, match="trainer-2 did not come") as ended:
        other.wait("set_up", never)
    assert ended.value.code == HOPELESS


def test_one_that_is_lost_is_named_with_its_host_and_waits_for_the_next_group_when_it_is_back(run):
    run.config.trainers.count = 2
    leader, first = run.leader(), run.follower(1)
    leader.join(never, FAR_S)
    leader.set_up("gpt", [])
    first.wait("set_up", never)
    greeted, welcome = [], leader._welcome
    leader._welcome = lambda *a: (greeted.append(1), welcome(*a))
    first.close()
    until(lambda: leader._lost)
    with pytest.raises(RankLost, match=r"trainer-1 \(pid \d+ on host-1\) is gone"):
        leader.check()
    again = run.follower(1)
    until(lambda: len(greeted) >= 3)  # an answer to the first has come by then
    assert not again.ended
    leader.close()
    leader = run.leader()
    leader.join(never, FAR_S)
    leader.set_up("gpt", [])
    again.wait("set_up", never)


# -- on the way to the first trainer ---------------------------------------------------------------


@pytest.fixture
def way(run, monkeypatch):
    monkeypatch.setattr(joining, "RunFolder", lambda folder: run)
    monkeypatch.setattr(joining, "_POLL_S", 0.05)
    return Joining(run.path, 1, StatusFile(run.path, "trainer-1", "follower"), Stop())


def test_a_first_trainer_that_never_comes_is_named(run, way):
    run.config.trainers.join_s = 0.3
    with pytest.raises(Hopeless, match=r"the first trainer \(rank 0\) has shown no sign for 0 s"):
        way.join()


def test_a_first_trainer_that_is_at_work_is_waited_for(run, way, monkeypatch):
    """It trains stage 1 alone: its status changes, and nobody listens yet."""
    later, first = [0.0], StatusFile(run.path, "trainer", "trainer", min_interval_s=0.0)
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + later[0])
    monkeypatch.setattr(joining, "time", clock)
    for step in range(3):  # each time, the limit begins anew
        first.update(step=step)
        way._go_on(run, "nobody listens")
        later[0] += 0.8 * FAR_S
        way._go_on(run, "nobody listens")
    later[0] += 0.3 * FAR_S
    with pytest.raises(Hopeless, match=r"no sign for 60 s \(nobody listens\): is it running"):
        way._go_on(run, "nobody listens")


def test_a_first_trainer_that_is_started_again_at_the_same_place_has_not_moved(run, way):
    """A follower that has joined it stays: going and coming back, it would count as lost."""
    run.config.trainers.count = 2
    leader, looked, found = run.leader(), [], []
    read = Endpoint.read(run.trainers_file)
    go_on = way._go_on
    way._go_on = lambda *args: (looked.append(1), go_on(*args))
    thread = threading.Thread(target=lambda: found.append(way.join()))
    thread.start()
    leader.join(never, FAR_S)
    Endpoint(read.address, read.public_key, pid=7).write(run.trainers_file)
    seen = len(looked)
    until(lambda: len(looked) > seen + 3)
    leader.set_up("gpt", [])
    thread.join(FAR_S)
    try:
        leader.check()
        found[0].wait("set_up", never)
    finally:
        found[0].close()


def test_a_first_trainer_that_has_moved_is_found(run, way, monkeypatch):
    """The file is an earlier run's: nobody listens there, until the next one writes it anew. At
    first, no network leads anywhere.
    """
    towards, asked = joining.number_towards, []

    def no_way_at_first(address: str) -> str:
        asked.append(address)
        if len(asked) < 3:
            raise ChannelError(f"no way leads to {address} (Network is unreachable)")
        return towards(address)

    monkeypatch.setattr(joining, "number_towards", no_way_at_first)
    run.config.trainers.count = 2
    server, _ = run_keys(run.path)
    Endpoint(free_address(), server.pair.public).write(run.trainers_file)
    found = []
    thread = threading.Thread(target=lambda: found.append(way.join()))
    thread.start()
    until(lambda: way._port is not None)
    leader = run.leader()
    leader.join(never, FAR_S)
    (address,) = leader.addresses()
    assert address.startswith("127.0.0.1:")
    leader.set_up("gpt", [address])
    thread.join(FAR_S)
    try:
        assert found[0].wait("set_up", never)["addresses"] == [address]
        joining.socket.create_server(("127.0.0.1", int(address.split(":")[1]))).close()  # given up
        leader.end("all steps are trained", OK)
        with pytest.raises(Ended):
            found[0].wait("begin", never)
    finally:
        found[0].close()


def test_a_place_where_they_cannot_meet_is_refused(run):
    run.config.trainers.bind = "tcp://0.0.0.0:5556"
    with pytest.raises(BadInput, match=r"trainers.bind: tcp://0.0.0.0:5556: names no host"):
        meeting_place(run)
    run.config.trainers.bind = None
    address, keys = meeting_place(run)
    assert address.startswith("ipc://")
    assert keys is None
    assert not Path(run.path / "keys").exists()
