"""Every way a producer can go wrong: killed, frozen, idle, refusing, hostile."""

import itertools
import os
import signal
import threading
import time
import types

import msgpack
import numpy as np
import pytest
import zmq

from common.transport import messages, wire
from common.transport import server as channel_module
from common.transport.server import BatchFailed
from tests.support import channel_fixtures
from tests.support import channels as cb

channel, ipc = channel_fixtures.channel, channel_fixtures.ipc


def test_c35_a_killed_producers_batches_are_made_by_another_at_once(ipc):
    server = ipc.serve(
        cb.train_schedule(), dead_after_s=cb.LATER_S, lease_ttl_s=cb.LATER_S
    )  # its end alone tells
    victim = ipc.process("victim", delay_s=600)
    cb.wait_until(lambda: server.stats()["leased"] == cb.CAPACITY)
    ipc.producer("other")
    cb.wait_until(lambda: server.stats()["buffered"] == cb.WINDOW - cb.CAPACITY)
    victim.kill()
    assert (
        cb.wait_until(lambda: ipc.log.of("peer_lost", peer="victim")) < 15.0
    )  # measured 0.05 s on an idle machine
    assert cb.train(server, 20) == [("train", g) for g in range(20)]
    assert server.stats()["lease_ends"]["lost"] == cb.CAPACITY


@pytest.mark.slow
def test_a_frozen_producers_leases_move_and_it_comes_back_when_it_wakes(ipc):
    server = ipc.serve(cb.train_schedule(), dead_after_s=1.0)
    frozen = ipc.process("frozen", delay_s=0.5)
    cb.wait_until(lambda: server.stats()["leased"] == cb.CAPACITY)
    frozen.send_signal(signal.SIGSTOP)
    ipc.producer("other")
    start = time.monotonic()
    assert cb.train(server, 30) == [("train", g) for g in range(30)]
    assert (
        time.monotonic() - start < 15.0
    )  # measured 1.1 on an idle machine; the leases themselves hold for 30 s
    assert ipc.log.of("peer_frozen", peer="frozen")
    assert not ipc.log.of("strike")
    frozen.send_signal(signal.SIGCONT)
    cb.wait_until(lambda: [p["state"] for p in server.stats()["peers"]] == ["ready", "ready"])
    produced = {p["name"]: p["produced"] for p in server.stats()["peers"]}
    cb.wait_until(
        lambda: (
            cb.train(server, 1)
            and {p["name"]: p["produced"] for p in server.stats()["peers"]}["frozen"]
            > produced["frozen"]
        )
    )


def test_a_live_but_idle_producer_costs_strikes_but_no_livelock(channel):
    server = channel.serve(cb.train_schedule(60), lease_ttl_s=0.8)
    channel.producer("idle", work=lambda client, lease: None)
    channel.producer("good")
    assert len(cb.train(server)) == 60
    assert {e["peer"] for e in channel.log.of("strike")} == {"idle"}


def test_a_lease_may_take_long_while_its_producer_compiles(channel):
    compiled = threading.Event()

    def compile_first(client, lease):
        if lease.g == 0:
            client.set_status("compiling(0)")
            compiled.wait(cb.LATER_S)
            client.set_status("working")
        client.send(lease, cb.make(lease))

    server = channel.serve(cb.train_schedule(10), lease_ttl_s=0.8)
    channel.producer("p", work=compile_first)
    cb.wait_until(lambda: [p["status"] for p in server.stats()["peers"]] == ["compiling(0)"])
    time.sleep(1.7)
    compiled.set()
    assert len(cb.train(server)) == 10
    assert not channel.log.of("strike")


def test_the_deadline_for_data_does_not_run_while_a_producer_compiles(channel):
    compiled = threading.Event()

    def compile_first(client, lease):
        client.set_status("compiling(0)" if lease.g == 0 else "working")
        if lease.g == 0:
            compiled.wait(cb.LATER_S)
        client.send(lease, cb.make(lease))

    server = channel.serve(cb.train_schedule(10))
    channel.producer("p", work=compile_first)
    cb.wait_until(lambda: [p["status"] for p in server.stats()["peers"]] == ["compiling(0)"])
    threading.Timer(2.5, compiled.set).start()
    assert len(cb.train(server, timeout_s=1.2)) == 10


def test_heartbeats_go_on_while_the_producer_computes(channel):
    def busy(client, lease):
        until = time.monotonic() + (3.0 if lease.g == 0 else 0)
        while time.monotonic() < until:
            sum(range(1000))
        client.send(lease, cb.make(lease))

    server = channel.serve(cb.train_schedule(4), dead_after_s=2.0)
    channel.producer("p", work=busy)
    assert len(cb.train(server)) == 4
    assert not channel.log.of("peer_frozen")


def test_a_trainer_that_stood_still_blames_nobody_and_loses_no_answer(ipc):
    def suspend(plan, g):
        time.sleep(3.0 if g == cb.WINDOW else 0.0)
        return ()

    server = ipc.serve(cb.train_schedule(20), dead_after_s=2.0, set_aside=suspend)

    def work(client, lease):
        time.sleep(1.5 if lease.g in (1, 2) else 0.0)
        client.send(lease, cb.make(lease))

    p = ipc.producer(
        "p", work=work, heartbeat_s=0.002
    )  # 750 heartbeats fill all that lies between before batch 1 is sent
    assert len(cb.train(server)) == 20
    assert server.stats()["lease_ends"] == {"accepted": 20}
    assert p.client.counts["sent"] == 20
    assert not ipc.log.of("peer_frozen")


def test_a_standstill_of_this_process_counts_against_no_deadline(ipc, monkeypatch):
    """A minute goes by between two looks, in the middle of a wait of at most 20 s."""
    stood_s = [0.0]
    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + stood_s[0])
    monkeypatch.setattr(channel_module, "time", clock)

    def work(client, lease):
        time.sleep(0.3)
        if lease.g == 3:
            stood_s[0] = 60.0
            time.sleep(0.7)
        client.send(lease, cb.make(lease))

    server = ipc.serve(cb.train_schedule(6))
    ipc.producer("p", work=work)
    for g in range(6):
        assert server.next(20.0).g == g
        server.release()


def test_a_late_copy_is_dropped_and_a_different_one_reported(channel):
    def twice(client, lease):
        client.send(lease, cb.make(lease))
        arrays = cb.make(lease)
        arrays["filler"] = arrays["filler"] + (lease.g == 5)
        client.send(lease, arrays)

    server = channel.serve(cb.train_schedule(20))
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

    server = channel.serve(cb.train_schedule())
    for name in ("a", "b"):
        channel.producer(name, work=refuse_three)
    assert cb.train(server, 3) == [("train", 0), ("train", 1), ("train", 2)]
    with pytest.raises(
        BatchFailed, match="batch train 3 cannot be made: .*clip 17 is gone"
    ) as caught:
        server.next(cb.LATER_S)
    assert (caught.value.plan, caught.value.g) == ("train", 3)


def test_hostile_traffic_changes_nothing(ipc):
    server = ipc.serve(cb.train_schedule(150), generation=7)
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
        wire.encode(
            cb.RUN, messages.Data(6, "train", 5, 1, right, messages.Notes(), arrays)
        ),  # an old generation
        wire.encode(
            cb.RUN, messages.Data(7, "train", 5, 99999, right, messages.Notes(), arrays)
        ),  # a lease nobody has
        *(
            wire.encode(
                cb.RUN, messages.Data(7, "train", g, g + 1, "0" * 32, messages.Notes(), arrays)
            )
            for g in range(4)
        ),  # a digest that is wrong
        wire.encode(cb.RUN, messages.Nack(7, "train", 0, 1, "not mine")),
        wire.encode(cb.RUN, messages.Heartbeat(9, "from the future", True)),
        wire.encode(cb.RUN, messages.Lease(7, "train", 0, 1, 0)),  # what only a trainer sends
        wire.encode(cb.RUN, messages.Stop(7, "stop")),
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
    server = ipc.serve(cb.train_schedule(20), max_frame_bytes=100_000)

    def too_big_once(client, lease):
        big = {"numbers": np.zeros(100_000, np.int32)}
        client.send(lease, big if lease.g == 2 and len(p.leases) < 8 else cb.make(lease))

    p = ipc.producer("p", work=too_big_once)
    assert len(cb.train(server)) == 20
