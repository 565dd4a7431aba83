"""The channel over real sockets and in one process: order, exactness, bounds, who may take part."""

import gc
import os
import time
import weakref

import msgpack
import numpy as np
import pytest
import zmq

from common.transport import wire
from common.transport.client import Endpoint, Refused
from common.transport.links import DealerLink, RouterLink
from common.transport.messages import Data, Notes, Offer
from common.transport.server import ChannelError, StopAsked
from tests.support import channel_fixtures
from tests.support import channels as cb

channel, ipc = channel_fixtures.channel, channel_fixtures.ipc
short_folder = channel_fixtures.short_folder


def test_three_unequal_producers_give_every_batch_once_in_schedule_order(channel):
    schedule = (
        [("train", g) for g in range(40)]
        + [("eval", g) for g in range(7)]
        + [("train", g) for g in range(40, 60)]
    )
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
    server = channel.serve(cb.train_schedule())
    producers = [channel.producer(f"p{i}") for i in range(3)]
    cb.wait_until(lambda: server.ready_count() == cb.WINDOW)
    time.sleep(0.3)
    assert sum(len(p.leases) for p in producers) == cb.WINDOW
    for released in range(1, 4):
        server.next(cb.LATER_S)
        server.release()
        cb.wait_until(lambda n=released: sum(len(p.leases) for p in producers) == cb.WINDOW + n)
    cb.wait_until(lambda: server.ready_count() == cb.WINDOW)
    assert server.stats()["buffered_bytes"] == cb.WINDOW * (16 + 12000)


def test_c34_what_a_trainer_does_not_read_stays_with_its_producer(short_folder):
    """Both sockets' marks hold: with the sender's alone, 195 of 200 unread messages leave it, as
    the receiver's is libzmq's 1000.
    """
    address = f"ipc://{short_folder}/r.sock"
    router, dealer = RouterLink(address, window=3), DealerLink(high_water_mark=4)
    try:
        dealer.connect(Endpoint(address))
        cb.wait_until(lambda: dealer.receive(0.1) and dealer.connected)
        batch = {"numbers": np.zeros(50_000, np.float32)}
        message, sent, since = (
            Data(1, "train", 0, 1, wire.digest(batch), Notes(), batch),
            0,
            time.monotonic(),
        )
        while time.monotonic() - since < 0.5 and sent < 200:
            if dealer.send(cb.RUN, message):
                sent, since = sent + 1, time.monotonic()
            time.sleep(0.005)
        assert (
            1 <= sent <= 2 * 3 + 4 + 6
        )  # the marks, and what the kernel and one batch of reading hold
    finally:
        dealer.close()
        router.close()


def test_delivered_but_not_trained_batches_count_in_the_window(channel):
    server = channel.serve(cb.train_schedule(), window=2)
    channel.producer()
    for _ in range(2):
        server.next(cb.LATER_S)
    with pytest.raises(
        StopAsked
    ):  # waits for release(), which another thread may call: no NoData while a step compiles
        server.next(0.1, should_stop=iter([False, False, False, True]).__next__)
    server.release()
    assert server.next(cb.LATER_S).g == 2


def test_producers_join_and_leave_while_training_goes_on(channel):
    server = channel.serve(cb.train_schedule(60))
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
    server = channel.serve(cb.train_schedule(1))
    channel.producer("maker")
    d = server.next(cb.LATER_S)
    assert (d.plan, d.g, d.producer, d.notes, d.set_aside, d.position) == (
        "train",
        0,
        "maker",
        Notes(clips=7),
        (),
        0,
    )
    assert d.digest == wire.digest(d.arrays)
    if channel.kind == "ipc":
        assert not d.arrays["filler"].flags.writeable


def test_no_array_is_kept_after_release(channel):
    server = channel.serve(cb.train_schedule())
    channel.producer()
    refs = []
    for _ in range(30):
        d = server.next(cb.LATER_S)
        refs.append(weakref.ref(d.arrays["filler"]))
        del d
        server.release()
    cb.wait_until(lambda: server.ready_count() == cb.WINDOW)
    gc.collect()
    assert [r() is None for r in refs] == [True] * 30


def test_what_is_set_aside_when_a_batch_is_leased_goes_with_the_lease_and_comes_with_the_batch(
    channel,
):
    quarantine: list[int] = []
    server = channel.serve(cb.train_schedule(), set_aside=lambda plan, g: quarantine)
    p = channel.producer()
    cb.wait_until(lambda: len(p.leases) == cb.WINDOW)
    quarantine.append(17)
    cb.train(server, 1)
    cb.wait_until(lambda: len(p.leases) == cb.WINDOW + 1)
    assert [lease.set_aside for lease in p.leases] == [()] * cb.WINDOW + [(17,)]
    cb.train(server, cb.WINDOW - 1)
    assert server.next(cb.LATER_S).set_aside == (17,)


def test_a_rejected_batch_comes_again_in_its_place(channel):
    server = channel.serve(cb.train_schedule(10))
    channel.producer()
    seen = []
    while (d := server.next(cb.LATER_S)) is not None:
        seen.append(d.g)
        if seen.count(d.g) == 1 and d.g in (3, 7):
            server.reject(d, "row set aside")
            continue
        server.release()
    assert seen == [0, 1, 2, 3, 3, 4, 5, 6, 7, 7, 8, 9]
    with pytest.raises(ChannelError, match="without a delivered"):
        server.release()


def test_a_refused_producer_is_told_why_and_logged_once(channel):
    server = channel.serve(
        cb.train_schedule(5),
        accept=lambda ready: (
            None if ready.feature_hash == "right" else "features differ: run prepare again"
        ),
    )
    wrong = channel.producer("wrong", features="old")
    channel.producer("right", features="right")
    assert len(cb.train(server)) == 5
    cb.wait_until(lambda: wrong.ended is not None)
    assert isinstance(wrong.ended, Refused)
    assert wrong.ended.reason == "features differ: run prepare again"
    assert wrong.leases == []
    assert len(channel.log.of("peer_refused")) == 1


def test_a_producer_of_another_run_is_refused(channel):
    channel.serve(cb.train_schedule())
    other = channel.producer("other", run="f" * 32)
    cb.wait_until(lambda: other.ended is not None)
    assert "belongs to run ffff" in other.ended.reason


def test_a_producer_of_another_version_is_refused(ipc):
    ipc.serve(cb.train_schedule())
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.connect(ipc.address)
    dealer.send(msgpack.packb({"v": 99, "type": "HELLO", "run": cb.RUN, "gen": 0}))
    assert dealer.poll(1000 * cb.LATER_S)
    run, message = wire.decode(dealer.recv_multipart())
    context.destroy(linger=0)
    assert isinstance(message, Refused)
    assert f"version 99, this side speaks {wire.VERSION}" in message.reason


def test_ready_carries_who_the_producer_is_and_welcome_what_the_generation_is(channel):
    said = []
    server = channel.serve(cb.train_schedule(1), offer=Offer("gpt", "ab"), accept=said.append)
    p = channel.producer("p7", features="ab")
    cb.train(server)
    assert p.welcomes[0].offer == Offer("gpt", "ab")
    assert (said[0].name, said[0].pid, said[0].capacity, said[0].feature_hash) == (
        "p7",
        os.getpid(),
        2,
        "ab",
    )
    assert [(s["name"], s["pid"]) for s in server.stats()["peers"]] == [("p7", os.getpid())]
