"""The channel over real sockets and in one process: order, exactness, bounds, and every way a peer can go wrong."""

import gc
import itertools
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import channel_bench as cb
import msgpack
import numpy as np
import pytest
import zmq

from common import wire
from common.channel import BatchFailed, ChannelError, LeaseServer, NoData, Stopped
from common.lease_client import Endpoint, Lease, LeaseClient, Refused, Stop, Welcome
from common.local_channel import LocalHub

WINDOW, CAPACITY = 6, 2


class Channel:
    """Servers and producers of one test, over one kind of transport; everything is closed at the end, in bounded time."""

    def __init__(self, kind: str, folder: Path):
        self.kind, self.address = kind, f"ipc://{folder}/channel.sock"
        self.log = cb.EventLog()
        self.servers: list[LeaseServer] = []
        self.clients: list[LeaseClient] = []
        self.producers: list[cb.Producer] = []
        self.processes: list[subprocess.Popen] = []

    def serve(self, schedule=None, generation=1, welcome=None, accept=lambda info: None, extra=lambda plan, g: {}, **options):
        if self.kind == "local":
            self.hub = options["link"] = LocalHub()
        options = {"window": WINDOW, "capacity": CAPACITY, "on_event": self.log, **options}
        server = LeaseServer(self.address, cb.RUN, **options)
        self.servers.append(server)
        self.endpoint = Endpoint(server.endpoint)
        if schedule is not None:
            server.open(generation, welcome or {}, schedule, accept, extra)
        return server

    def client(self, name="p0", run=cb.RUN, heartbeat_s=0.2, **options) -> LeaseClient:
        link = self.hub.link() if self.kind == "local" else None
        client = LeaseClient(lambda: self.endpoint, run, name, CAPACITY, heartbeat_s=heartbeat_s, link=link, **options)
        self.clients.append(client)
        return client

    def producer(self, name="p0", work=None, delay_s=0.0, info=None, **options) -> cb.Producer:
        producer = cb.Producer(self.client(name, **options), work, delay_s, info)
        self.producers.append(producer)
        return producer

    def process(self, name: str, delay_s: float = 0.0) -> subprocess.Popen:
        """A producer process."""
        process = subprocess.Popen([sys.executable, str(Path(cb.__file__)), "producer", self.endpoint.address, name, str(delay_s)])
        self.processes.append(process)
        return process

    def close(self) -> None:
        start = time.monotonic()
        for process in self.processes:
            process.kill()
            process.wait(5)
        for producer in self.producers:
            producer.end()
        for client in self.clients:
            client.close()
        for server in self.servers:
            server.close(drain_s=0.0, stop_producers=False)
        assert time.monotonic() - start < 8
        self.log.check(max(s._book.window for s in self.servers), CAPACITY)


def train_schedule(count=None):
    return (("train", g) for g in (itertools.count() if count is None else range(count)))


@pytest.fixture(params=["ipc", "local"])
def channel(request, tmp_path):
    c = Channel(request.param, tmp_path)
    yield c
    c.close()


@pytest.fixture
def ipc(tmp_path):
    c = Channel("ipc", tmp_path)
    yield c
    c.close()


# order and bounds


def test_three_unequal_producers_give_every_batch_once_in_schedule_order(channel):
    schedule = [("train", g) for g in range(40)] + [("eval", g) for g in range(7)] + [("train", g) for g in range(40, 60)]
    server = channel.serve(schedule)
    for i, delay_s in enumerate((0.0, 0.003, 0.02)):
        channel.producer(f"p{i}", delay_s=delay_s)
    assert cb.train(server) == schedule
    assert server.next(1.0) is None
    stats = server.stats()
    assert stats["lease_ends"] == {"accepted": 67}
    assert stats["eagain"] == 0
    assert {p["state"] for p in stats["peers"]} == {"ready"}
    assert all(p["produced"] > 0 for p in stats["peers"])


def test_nothing_beyond_the_window_is_made_when_the_trainer_is_slow(channel):
    server = channel.serve(train_schedule())
    producers = [channel.producer(f"p{i}") for i in range(3)]
    cb.wait_until(lambda: server.ready_count() == WINDOW)
    time.sleep(0.3)
    assert sum(len(p.leases) for p in producers) == WINDOW
    for released in range(1, 4):
        server.next(1.0)
        server.release()
        cb.wait_until(lambda n=released: sum(len(p.leases) for p in producers) == WINDOW + n)
    cb.wait_until(lambda: server.ready_count() == WINDOW)
    assert server.stats()["buffered_bytes"] == WINDOW * (16 + 12000)


def test_delivered_but_not_trained_batches_count_in_the_window(channel):
    server = channel.serve(train_schedule(), window=2)
    channel.producer()
    for _ in range(2):
        server.next(2.0)
    with pytest.raises(Stopped):  # waits for release(), which another thread may call: no NoData while a step compiles
        server.next(0.1, should_stop=iter([False, False, False, True]).__next__)
    server.release()
    assert server.next(2.0).g == 2


def test_producers_join_and_leave_while_training_goes_on(channel):
    server = channel.serve(train_schedule(60))
    first = channel.producer("first")
    assert len(cb.train(server, 20)) == 20
    second = channel.producer("second")
    cb.wait_until(lambda: len(server.stats()["peers"]) == 2)
    assert len(cb.train(server, 20)) == 20
    first.end()
    cb.wait_until(lambda: [p["name"] for p in server.stats()["peers"]] == ["second"])
    assert cb.train(server)[-1] == ("train", 59)
    assert len(second.leases) > 10
    assert channel.log.of("peer_lost", why="left", peer="first")


def test_the_delivery_says_where_the_batch_comes_from_and_arrays_are_read_only(channel):
    server = channel.serve(train_schedule(1))
    channel.producer("maker")
    d = server.next(5.0)
    assert (d.plan, d.g, d.producer, d.meta, d.position) == ("train", 0, "maker", {"producer": "thread"}, 0)
    assert d.digest == wire.digest(d.arrays)
    if channel.kind == "ipc":
        assert not d.arrays["filler"].flags.writeable


def test_no_array_is_kept_after_release(channel):
    server = channel.serve(train_schedule())
    channel.producer()
    refs = []
    for _ in range(30):
        d = server.next(5.0)
        refs.append(weakref.ref(d.arrays["filler"]))
        del d
        server.release()
    cb.wait_until(lambda: server.ready_count() == WINDOW)
    gc.collect()
    assert [r() is None for r in refs] == [True] * 30


def test_extra_of_the_moment_of_leasing_goes_with_the_lease(channel):
    quarantine: list[int] = []
    server = channel.serve(train_schedule(), extra=lambda plan, g: {"quarantined": list(quarantine)})
    p = channel.producer()
    cb.wait_until(lambda: len(p.leases) == WINDOW)
    quarantine.append(17)
    cb.train(server, 1)
    cb.wait_until(lambda: len(p.leases) == WINDOW + 1)
    assert [lease.extra["quarantined"] for lease in p.leases] == [[]] * WINDOW + [[17]]


def test_a_rejected_batch_comes_again_in_its_place(channel):
    server = channel.serve(train_schedule(10))
    channel.producer()
    seen = []
    while (d := server.next(5.0)) is not None:
        seen.append(d.g)
        if seen.count(d.g) == 1 and d.g in (3, 7):
            server.reject(d, "row set aside")
            continue
        server.release()
    assert seen == [0, 1, 2, 3, 3, 4, 5, 6, 7, 7, 8, 9]
    with pytest.raises(ChannelError, match="without a delivered"):
        server.release()


# failures of peers


def test_a_killed_producers_batches_are_made_by_another_within_a_second(ipc):
    server = ipc.serve(train_schedule())
    victim = ipc.process("victim", delay_s=30)
    cb.wait_until(lambda: server.stats()["leased"] == CAPACITY, 10)
    ipc.producer("other")
    cb.wait_until(lambda: server.stats()["buffered"] == WINDOW - CAPACITY)
    victim.kill()
    assert cb.wait_until(lambda: ipc.log.of("peer_lost", peer="victim")) < 2.0  # measured 0.05 s; the box may be busy
    assert cb.train(server, 20, timeout_s=1.0) == [("train", g) for g in range(20)]
    assert server.stats()["lease_ends"]["lost"] == CAPACITY


def test_a_frozen_producers_leases_move_and_it_comes_back_when_it_wakes(ipc):
    server = ipc.serve(train_schedule(), dead_after_s=1.0)
    frozen = ipc.process("frozen", delay_s=0.05)
    cb.wait_until(lambda: server.stats()["leased"] == CAPACITY, 10)
    frozen.send_signal(signal.SIGSTOP)
    ipc.producer("other")
    start = time.monotonic()
    assert cb.train(server, 30, timeout_s=3.0) == [("train", g) for g in range(30)]
    assert time.monotonic() - start < 2.5
    assert ipc.log.of("peer_frozen", peer="frozen")
    assert not ipc.log.of("strike")
    frozen.send_signal(signal.SIGCONT)
    cb.wait_until(lambda: [p["state"] for p in server.stats()["peers"]] == ["ready", "ready"])
    produced = {p["name"]: p["produced"] for p in server.stats()["peers"]}
    cb.wait_until(
        lambda: cb.train(server, 1) and {p["name"]: p["produced"] for p in server.stats()["peers"]}["frozen"] > produced["frozen"]
    )


def test_a_live_but_idle_producer_costs_strikes_but_no_livelock(channel):
    server = channel.serve(train_schedule(60), lease_ttl_s=0.2)
    channel.producer("idle", work=lambda client, lease: None)
    channel.producer("good")
    start = time.monotonic()
    assert len(cb.train(server)) == 60
    assert time.monotonic() - start < 8
    assert {e["peer"] for e in channel.log.of("strike")} == {"idle"}


def test_a_lease_may_take_long_while_its_producer_compiles(channel):
    def compile_first(client, lease):
        if lease.g == 0:
            client.set_status("compiling(0)")
            time.sleep(1.0)
            client.set_status("working")
        client.send(lease, cb.make(lease))

    server = channel.serve(train_schedule(10), lease_ttl_s=0.3)
    channel.producer("p", work=compile_first)
    cb.wait_until(lambda: [p["status"] for p in server.stats()["peers"]] == ["compiling(0)"])
    assert len(cb.train(server)) == 10
    assert not channel.log.of("strike")


def test_heartbeats_go_on_while_the_producer_computes(channel):
    def busy(client, lease):
        until = time.monotonic() + (1.5 if lease.g == 0 else 0)
        while time.monotonic() < until:
            sum(range(1000))
        client.send(lease, cb.make(lease))

    server = channel.serve(train_schedule(4), dead_after_s=1.0)
    channel.producer("p", work=busy)
    assert len(cb.train(server)) == 4
    assert not channel.log.of("peer_frozen")


def test_a_trainer_that_stood_still_blames_nobody_and_loses_no_answer(ipc):
    def suspend(plan, g):
        time.sleep(3.0 if g == WINDOW else 0.0)
        return {}

    server = ipc.serve(train_schedule(20), dead_after_s=1.0, extra=suspend)

    def work(client, lease):
        time.sleep(1.5 if lease.g in (1, 2) else 0.0)
        client.send(lease, cb.make(lease))

    p = ipc.producer("p", work=work, heartbeat_s=0.002)  # 750 heartbeats fill all that lies between before batch 1 is sent
    assert len(cb.train(server)) == 20
    assert server.stats()["lease_ends"] == {"accepted": 20}
    assert p.client.counts["sent"] == 20
    assert not ipc.log.of("peer_frozen")


def test_a_late_copy_is_dropped_and_a_different_one_reported(channel):
    def twice(client, lease):
        client.send(lease, cb.make(lease))
        arrays = cb.make(lease)
        arrays["filler"] = arrays["filler"] + (lease.g == 5)
        client.send(lease, arrays)

    server = channel.serve(train_schedule(20))
    channel.producer("p", work=twice)
    assert len(cb.train(server)) == 20
    cb.wait_until(lambda: server.stats()["duplicates"] == 20)
    [mismatch] = channel.log.of("digest_mismatch")
    assert mismatch["g"] == 5
    assert server.stats()["digest_mismatches"] == 1


def test_a_batch_nobody_can_make_is_named_after_those_before_it_were_delivered(channel):
    def refuse_three(client, lease):
        if lease.g == 3:
            client.nack(lease, "clip 17 is gone")
        else:
            client.send(lease, cb.make(lease))

    server = channel.serve(train_schedule())
    for name in ("a", "b"):
        channel.producer(name, work=refuse_three)
    assert cb.train(server, 3) == [("train", 0), ("train", 1), ("train", 2)]
    with pytest.raises(BatchFailed, match="batch train 3 cannot be made: .*clip 17 is gone") as caught:
        server.next(5.0)
    assert (caught.value.plan, caught.value.g) == ("train", 3)


def test_hostile_traffic_changes_nothing(ipc):
    server = ipc.serve(train_schedule(150), generation=7)
    ipc.producer("good", delay_s=0.002)
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.connect(ipc.address)
    arrays = {"numbers": np.zeros(4, np.int32)}
    right = wire.digest(arrays)
    bad = [
        [b""],
        [b"", b"", b""],
        [b"\x80\x04\x95pickle"],
        [os.urandom(300), os.urandom(5000)],
        [msgpack.packb([])],
        [b"x"] * 60,
        wire.encode(cb.RUN, wire.Data(6, "train", 5, 1, right, {}, arrays)),  # an old generation
        wire.encode(cb.RUN, wire.Data(7, "train", 5, 99999, right, {}, arrays)),  # a lease nobody has
        *(wire.encode(cb.RUN, wire.Data(7, "train", g, g + 1, "0" * 32, {}, arrays)) for g in range(4)),  # a digest that is wrong
        wire.encode(cb.RUN, wire.Nack(7, "train", 0, 1, "not mine")),
        wire.encode(cb.RUN, wire.Heartbeat(9, "from the future", True)),
        wire.encode(cb.RUN, wire.Lease(7, "train", 0, 1, 0, 1.0)),  # what only a trainer sends
        wire.encode(cb.RUN, wire.Stop(7, "stop")),
    ]
    seen = []
    for frames in itertools.islice(itertools.cycle(bad), 150):
        dealer.send_multipart(frames)
        seen += cb.train(server, 1)
    context.destroy(linger=0)
    assert seen == [("train", g) for g in range(150)]
    stats = server.stats()
    assert stats["garbage"] >= 30
    assert stats["stale"] >= 5
    assert not ipc.log.of("strike", peer="good")
    assert len(ipc.log.of("garbage")) == stats["garbage"]


def test_a_frame_over_the_limit_closes_that_connection_only(ipc):
    server = ipc.serve(train_schedule(20), max_frame_bytes=100_000)

    def too_big_once(client, lease):
        big = {"numbers": np.zeros(100_000, np.int32)}
        client.send(lease, big if lease.g == 2 and len(p.leases) < 8 else cb.make(lease))

    p = ipc.producer("p", work=too_big_once)
    assert len(cb.train(server)) == 20


# who may take part


def test_a_refused_producer_is_told_why_and_logged_once(channel):
    server = channel.serve(
        train_schedule(5), accept=lambda info: None if info.get("feature_hash") == "right" else "features differ: run prepare again"
    )
    wrong = channel.producer("wrong", info={"feature_hash": "old"})
    channel.producer("right", info={"feature_hash": "right"})
    assert len(cb.train(server)) == 5
    cb.wait_until(lambda: wrong.ended is not None)
    assert isinstance(wrong.ended, Refused)
    assert wrong.ended.reason == "features differ: run prepare again"
    assert wrong.leases == []
    assert len(channel.log.of("peer_refused")) == 1


def test_a_producer_of_another_run_is_refused(channel):
    channel.serve(train_schedule())
    other = channel.producer("other", run="f" * 32)
    cb.wait_until(lambda: other.ended is not None)
    assert "belongs to run ffff" in other.ended.reason


def test_a_producer_of_another_version_is_refused(ipc):
    ipc.serve(train_schedule())
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.connect(ipc.address)
    dealer.send(msgpack.packb({"v": 99, "type": "HELLO", "run": cb.RUN, "gen": 0}))
    assert dealer.poll(3000)
    run, message = wire.decode(dealer.recv_multipart())
    context.destroy(linger=0)
    assert isinstance(message, Refused)
    assert "version 99, this side speaks 1" in message.reason


def test_ready_carries_who_the_producer_is_and_welcome_what_the_generation_is(channel):
    infos = []
    server = channel.serve(train_schedule(1), welcome={"stage": "gpt"}, accept=infos.append)
    p = channel.producer("p7", info={"device": "GPU-1"})
    cb.train(server)
    assert p.welcomes[0].info == {"stage": "gpt"}
    assert {k: infos[0][k] for k in ("name", "pid", "capacity", "device")} == {
        "name": "p7",
        "pid": os.getpid(),
        "capacity": 2,
        "device": "GPU-1",
    }
    assert [(s["name"], s["pid"]) for s in server.stats()["peers"]] == [("p7", os.getpid())]


# generations and restarts


def test_a_second_generation_on_the_same_socket_begins_afresh(channel):
    server = channel.serve(train_schedule(), welcome={"stage": "dvae"})
    kept: list[Lease] = []

    def keep_the_first(client, lease):
        if lease.gen == 1 and lease.g >= 3:
            kept.append(lease)
        else:
            client.send(lease, cb.make(lease))

    p = channel.producer("p", work=keep_the_first)
    assert cb.train(server, 3) == [("train", 0), ("train", 1), ("train", 2)]
    cb.wait_until(lambda: len(kept) == CAPACITY)
    server.open(2, {"stage": "gpt"}, [("eval", 0), ("train", 0)])
    assert cb.train(server) == [("eval", 0), ("train", 0)]
    assert [w.info["stage"] for w in p.welcomes] == ["dvae", "gpt"]
    assert not p.client.is_current(kept[0])
    assert not p.client.send(kept[0], cb.make(kept[0]))
    assert p.client.counts["dropped_old"] == 1
    with pytest.raises(ChannelError, match="generation 2 is not above 2"):
        server.open(2, {}, [])


def test_a_restarted_trainer_gets_its_producers_back_within_a_second(ipc):
    server = ipc.serve(train_schedule())
    producers = [ipc.producer(f"p{i}", delay_s=0.005) for i in range(2)]
    assert len(cb.train(server, 20)) == 20
    server.close(drain_s=0.0, stop_producers=False)
    time.sleep(0.7)
    assert all(p.is_alive() for p in producers)
    again = ipc.serve((("train", g) for g in range(15, 60)), generation=2)
    start = time.monotonic()
    assert again.next(2.0).g == 15
    assert time.monotonic() - start < 2.0  # measured 0.1 to 0.5 s; the box may be busy
    again.release()
    assert cb.train(again) == [("train", g) for g in range(16, 60)]
    cb.wait_until(lambda: [p["state"] for p in again.stats()["peers"]] == ["ready", "ready"])
    assert again.stats()["digest_mismatches"] == again.stats()["garbage"] == 0


def test_a_killed_trainer_process_leaves_its_producers_waiting_warm(ipc):
    code = (
        "import sys; sys.path[:0] = sys.argv[1:3]\n"
        "import channel_bench as cb\n"
        "from common.channel import LeaseServer\n"
        "server = LeaseServer(sys.argv[3], cb.RUN, 6)\n"
        "server.open(1, {}, (('train', g) for g in range(10**6)))\n"
        "cb.train(server, 10**6, timeout_s=30)\n"
    )
    folders = [str(Path(cb.__file__).parent), str(Path(cb.__file__).parents[1])]
    ipc.endpoint = Endpoint(ipc.address)
    trainer = subprocess.Popen([sys.executable, "-c", code, *folders, ipc.address])
    p = ipc.producer("p", delay_s=0.002)
    cb.wait_until(lambda: len(p.leases) > 20, 10)
    trainer.kill()
    trainer.wait()
    cb.wait_until(lambda: "went away" in p.client.trouble)
    server = ipc.serve(train_schedule(30), generation=2)
    start = time.monotonic()
    assert cb.train(server, 1, timeout_s=2.0) == [("train", 0)]
    assert time.monotonic() - start < 2.0  # measured 0.1 to 0.5 s; the box may be busy
    assert cb.train(server) == [("train", g) for g in range(1, 30)]


def test_producers_follow_the_trainer_to_another_address(ipc, tmp_path):
    ipc.endpoint = None
    p = ipc.producer("p")
    time.sleep(0.2)
    assert p.client.poll(0) is None
    for generation in (1, 2):
        ipc.address = f"ipc://{tmp_path}/{generation}.sock"
        server = ipc.serve(train_schedule(5), generation=generation)
        assert len(cb.train(server, timeout_s=3.0)) == 5
        server.close(stop_producers=False)
    assert p.client.generation == 2


def test_traffic_of_an_older_trainer_is_ignored(ipc):
    server = ipc.serve(train_schedule(5), generation=9)
    p = ipc.producer("p")
    assert len(cb.train(server)) == 5
    server.close(stop_producers=False)
    old = ipc.serve(train_schedule(5), generation=3, on_event=cb.EventLog())
    with pytest.raises(NoData, match=r"serves a later trainer \(generation 9, this one is 3"):
        old.next(1.5)
    assert len(p.leases) == 5
    assert p.client.counts["old_generation"] > 0


# ends


def test_close_stops_producers_and_waits_for_their_bye(channel):
    server = channel.serve(train_schedule(3))
    producers = [channel.producer(f"p{i}") for i in range(2)]
    cb.train(server)
    start = time.monotonic()
    server.close(drain_s=5.0)
    assert time.monotonic() - start < 2.0  # measured 0.1 to 0.5 s; the box may be busy
    for p in producers:
        p.join(2)
        assert p.ended == Stop(1, "the run is over")
    with pytest.raises(ChannelError, match="closed"):
        server.next(1.0)


def test_close_does_not_wait_longer_than_it_was_told(channel):
    server = channel.serve(train_schedule())
    channel.producer("deaf", work=lambda client, lease: time.sleep(1.5))
    cb.wait_until(lambda: server.stats()["leased"] == CAPACITY)
    start = time.monotonic()
    server.close(drain_s=0.3)
    assert 0.25 < time.monotonic() - start < 1.0


def test_no_data_names_the_cause(ipc):
    server = ipc.serve(train_schedule())
    with pytest.raises(
        NoData, match=r"no data for 0 s, 0 producers connected at ipc://.*; none has ever connected; waiting for batch train 0"
    ):
        server.next(0.3)
    victim = ipc.process("victim", delay_s=30)
    cb.wait_until(lambda: server.stats()["leased"] == CAPACITY, 10)
    with pytest.raises(
        NoData, match=r"1 producer connected .*; victim ready, heard \d s ago, 2 leases, starting; waiting for batch train 0 \(leased\)"
    ):
        server.next(0.3)
    victim.kill()
    cb.wait_until(lambda: not server.stats()["peers"])
    with pytest.raises(
        NoData, match=r"0 producers connected .*; last: victim \(pid \d+\) disconnected after 0 batches; .*lost with its producer 1 times"
    ):
        server.next(0.3)


def test_waiting_ends_soon_after_should_stop(channel):
    server = channel.serve(train_schedule())
    start = time.monotonic()
    with pytest.raises(Stopped):
        server.next(30.0, should_stop=lambda: time.monotonic() - start > 0.3)
    assert time.monotonic() - start < 0.7


def test_errors_of_the_trainers_own_callbacks_come_out_of_next(channel):
    def broken():
        yield "train", 0
        raise RuntimeError("the plan is broken")

    server = channel.serve(broken())
    channel.producer()
    with pytest.raises(ChannelError, match="RuntimeError: the plan is broken"):
        server.next(5.0)
    with pytest.raises(ChannelError, match="the plan is broken"):
        server.ready_count()


def test_mistakes_in_messages_show_where_they_are_made(channel):
    server = channel.serve()
    with pytest.raises(wire.WireError, match="float32"):
        server.open(1, {"loss": np.float32(1)}, [])
    client = channel.client()
    with pytest.raises(wire.WireError):
        client.ready(0, {"probe": b"bytes"})
    with pytest.raises(wire.WireError, match="float64"):
        client.send(Lease(1, "train", 0, 1, 0, 1.0), {"a": np.zeros(3)})
    with pytest.raises(wire.WireError, match="run id"):
        LeaseClient(lambda: None, "my run", "p")


def test_leases_are_polled_in_the_order_they_are_needed_and_can_be_revoked(channel):
    server = channel.serve(train_schedule(), lease_ttl_s=0.4)
    client = channel.client()
    cb.wait_until(lambda: isinstance(client.poll(0.1), Welcome))
    client.ready(1, {})
    cb.wait_until(lambda: server.stats()["leased"] == 2)
    lease = client.poll(1.0)
    assert (lease.plan, lease.g, lease.position) == ("train", 0, 0)
    assert client.is_current(lease)
    cb.wait_until(lambda: not client.is_current(lease))
    assert channel.log.of("lease_end", outcome="expired")
