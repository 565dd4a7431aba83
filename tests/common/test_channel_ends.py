"""Generations, restarts of the trainer, and the end of a run."""

import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from common.transport import wire
from common.transport.client import Endpoint, Lease, LeaseClient, Stop, Welcome
from common.transport.messages import Offer
from common.transport.server import ChannelError, NoData, StopAsked
from tests.support import channel_fixtures
from tests.support import channels as cb

channel, ipc = channel_fixtures.channel, channel_fixtures.ipc
short_folder = channel_fixtures.short_folder
# What takes 0.1 to 0.5 s on an idle machine; far from LATER_S, which it would take if nothing but
# the deadline ended the wait.
SOON_S = 15.0


def test_a_second_generation_on_the_same_socket_begins_afresh(channel):
    server = channel.serve(cb.train_schedule(), offer=Offer("dvae"))
    kept: list[Lease] = []

    def keep_the_first(client, lease):
        if lease.gen == 1 and lease.g >= 3:
            kept.append(lease)
        else:
            client.send(lease, cb.make(lease))

    p = channel.producer("p", work=keep_the_first)
    assert cb.train(server, 3) == [("train", 0), ("train", 1), ("train", 2)]
    cb.wait_until(lambda: len(kept) == cb.CAPACITY)
    server.open(2, Offer("gpt"), [("eval", 0), ("train", 0)])
    assert cb.train(server) == [("eval", 0), ("train", 0)]
    assert [w.offer.stage for w in p.welcomes] == ["dvae", "gpt"]
    assert not p.client.is_current(kept[0])
    assert not p.client.send(kept[0], cb.make(kept[0]))
    assert p.client.counts["dropped_old"] == 1
    with pytest.raises(ChannelError, match="generation 2 is not above 2"):
        server.open(2, cb.OFFER, [])


def test_a_restarted_trainer_gets_its_producers_back_within_a_second(ipc):
    server = ipc.serve(cb.train_schedule())
    producers = [ipc.producer(f"p{i}", delay_s=0.005) for i in range(2)]
    assert len(cb.train(server, 20)) == 20
    server.close(drain_s=0.0, stop_producers=False)
    time.sleep(0.7)
    assert all(p.is_alive() for p in producers)
    again = ipc.serve((("train", g) for g in range(15, 60)), generation=2)
    start = time.monotonic()
    assert again.next(cb.LATER_S).g == 15
    assert time.monotonic() - start < SOON_S
    again.release()
    assert cb.train(again) == [("train", g) for g in range(16, 60)]
    cb.wait_until(lambda: [p["state"] for p in again.stats()["peers"]] == ["ready", "ready"])
    assert again.stats()["digest_mismatches"] == again.stats()["garbage"] == 0


def test_a_killed_trainer_process_leaves_its_producers_waiting_warm(ipc):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from tests.support import channels as cb\n"
        "from common.transport.server import LeaseServer\n"
        "server = LeaseServer(sys.argv[2], cb.RUN, 6)\n"
        "server.open(1, cb.OFFER, (('train', g) for g in range(10**6)))\n"
        "cb.train(server, 10**6, timeout_s=90)\n"
    )
    root = str(Path(cb.__file__).parents[2])
    ipc.endpoint = Endpoint(ipc.address)
    trainer = subprocess.Popen([sys.executable, "-c", code, root, ipc.address])
    p = ipc.producer("p", delay_s=0.002)
    cb.wait_until(lambda: len(p.leases) > 20)
    trainer.kill()
    trainer.wait()
    cb.wait_until(lambda: "went away" in p.client.trouble)
    server = ipc.serve(cb.train_schedule(30), generation=2)
    start = time.monotonic()
    assert cb.train(server, 1) == [("train", 0)]
    assert time.monotonic() - start < SOON_S
    assert cb.train(server) == [("train", g) for g in range(1, 30)]


def test_producers_follow_the_trainer_to_another_address(ipc, short_folder):
    ipc.endpoint = None
    p = ipc.producer("p")
    time.sleep(0.2)
    assert p.client.poll(0) is None
    for generation in (1, 2):
        ipc.address = f"ipc://{short_folder}/{generation}.sock"
        server = ipc.serve(cb.train_schedule(5), generation=generation)
        assert len(cb.train(server)) == 5
        server.close(stop_producers=False)
    assert p.client.generation == 2


def test_traffic_of_an_older_trainer_is_ignored(ipc):
    server = ipc.serve(cb.train_schedule(5), generation=9)
    p = ipc.producer("p")
    assert len(cb.train(server)) == 5
    server.close(stop_producers=False)
    old = ipc.serve(cb.train_schedule(5), generation=3, on_event=cb.EventLog())

    def why_no_data() -> str:
        with pytest.raises(NoData) as e:
            old.next(0.2)
        return str(e.value)

    cb.wait_until(
        lambda: re.search(r"serves a later trainer \(generation 9, this one is 3", why_no_data())
    )
    cb.wait_until(lambda: p.client.counts["old_generation"] > 0)
    assert len(p.leases) == 5


def test_close_stops_producers_and_waits_for_their_bye(channel):
    server = channel.serve(cb.train_schedule(3))
    producers = [channel.producer(f"p{i}") for i in range(2)]
    cb.train(server)
    start = time.monotonic()
    server.close(drain_s=cb.LATER_S)
    assert time.monotonic() - start < SOON_S
    for p in producers:
        p.join(cb.LATER_S)
        assert p.ended == Stop(1, "the run is over")
    with pytest.raises(ChannelError, match="closed"):
        server.next(1.0)


def test_close_does_not_wait_longer_than_it_was_told(channel):
    server = channel.serve(cb.train_schedule())
    heard = threading.Event()
    deaf = channel.producer("deaf", work=lambda client, lease: heard.wait(cb.LATER_S))
    cb.wait_until(lambda: server.stats()["leased"] == cb.CAPACITY)
    start = time.monotonic()
    server.close(drain_s=0.3)
    assert 0.25 < time.monotonic() - start
    assert deaf.is_alive()
    assert not heard.is_set(), "it returned although nobody had said BYE"
    heard.set()


def test_c38_no_data_names_the_cause(ipc):
    server = ipc.serve(cb.train_schedule())
    with pytest.raises(
        NoData,
        match=(
            r"no data for 0 s, 0 producers connected at ipc://.*; none has ever connected; waiting"
            r" for batch train 0"
        ),
    ):
        server.next(0.3)
    victim = ipc.process("victim", delay_s=30)
    cb.wait_until(lambda: server.stats()["leased"] == cb.CAPACITY)
    with pytest.raises(
        NoData,
        match=(
            r"1 producer connected .*; victim ready, heard \d s ago, 2 leases, starting; waiting"
            r" for batch train 0 \(leased\)"
        ),
    ):
        server.next(0.3)
    victim.kill()
    cb.wait_until(lambda: not server.stats()["peers"])
    with pytest.raises(
        NoData,
        match=(
            r"0 producers connected .*; last: victim \(pid \d+\) disconnected after 0 batches;"
            r" .*lost with its producer 1 times"
        ),
    ):
        server.next(0.3)


def test_waiting_ends_soon_after_should_stop(channel):
    server = channel.serve(cb.train_schedule())
    start = time.monotonic()
    with pytest.raises(StopAsked):
        server.next(cb.LATER_S, should_stop=lambda: time.monotonic() - start > 0.3)
    assert time.monotonic() - start < SOON_S


def test_errors_of_the_trainers_own_callbacks_come_out_of_next(channel):
    def broken():
        yield "train", 0
        raise RuntimeError("the plan is broken")

    server = channel.serve(broken())
    channel.producer()
    with pytest.raises(ChannelError, match="RuntimeError: the plan is broken"):
        server.next(cb.LATER_S)
    with pytest.raises(ChannelError, match="the plan is broken"):
        server.ready_count()


def test_mistakes_in_messages_show_where_they_are_made(channel):
    server = channel.serve()
    with pytest.raises(wire.WireError, match="stage: .* string"):
        server.open(1, Offer(np.float32(1)), [])
    client = channel.client()
    with pytest.raises(wire.WireError):
        client.ready(0, probe=b"bytes")
    with pytest.raises(wire.WireError, match="float64"):
        client.send(Lease(1, "train", 0, 1, 0), {"a": np.zeros(3)})
    with pytest.raises(wire.WireError, match="run id"):
        LeaseClient(lambda: None, "my run", "p")


def test_leases_are_polled_in_the_order_they_are_needed_and_can_be_revoked(channel):
    server = channel.serve(cb.train_schedule(), lease_ttl_s=2.0)
    client = channel.client()
    cb.wait_until(lambda: isinstance(client.poll(0.1), Welcome))
    client.ready(1)
    cb.wait_until(lambda: server.stats()["leased"] == 2)
    lease = client.poll(cb.LATER_S)
    assert (lease.plan, lease.g, lease.position) == ("train", 0, 0)
    assert client.is_current(lease)
    cb.wait_until(lambda: not client.is_current(lease))
    assert channel.log.of("lease_end", outcome="expired")
