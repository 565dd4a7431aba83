"""A part of `tests/bench/fuzz_wire.py`: hostile messages through the real ends of the channel, with
nothing around them that catches.
"""

import threading

import pytest

from common.transport.client import LeaseClient
from tests.support import channels as cb
from tests.support.hostile import VALUES, FrameHub, FrameLink, Hostile, until

COUNT = 12_000


@pytest.mark.parametrize("seed", [1])
def test_the_trainers_end_goes_on_and_takes_no_batch_of_a_stranger(seed):
    hub = FrameHub(Hostile(seed, run=cb.RUN, features="ab"), COUNT)
    log = cb.EventLog()
    server = cb.picky_server(hub, log)
    producers = [
        cb.Producer(
            LeaseClient(hub.endpoint, cb.RUN, f"p{i}", cb.CAPACITY, link=hub.link()), features="ab"
        )
        for i in range(2)
    ]
    try:
        seen = []
        while hub.left or len(seen) < 60:
            seen += cb.train(server, 1)
        seen += cb.train(server, 20)
        assert seen == [("train", g) for g in range(len(seen))]
        assert {e["peer"] for e in log.of("data")} <= {"p0", "p1"}
        log.check(cb.WINDOW, 64)
        stats = server.stats()
        assert stats["garbage"] > COUNT / 4
        assert log.of("unknown_lease")
        assert log.of("stale")
        assert len(stats["peers"]) < 10
    finally:
        for p in producers:
            p.end()
        server.close(drain_s=0.0, stop_producers=False)


def test_the_producers_end_goes_on_and_keeps_nothing():
    link = FrameLink(None, b"", Hostile(2, to_trainer=False, run=cb.RUN), COUNT)
    client = LeaseClient(
        lambda: FrameHub(Hostile(0), 0).endpoint(), cb.RUN, "p", cb.CAPACITY, link=link
    )
    taken, stop = [], threading.Event()

    def producer():
        while not stop.is_set():
            event = client.poll(0.01)
            if event is not None and len(taken) < COUNT / 2:  # later, nobody takes what has come
                taken.append(event)
                if type(event).__name__ == "Welcome":
                    client.ready(event.gen)

    thread = threading.Thread(target=producer)
    thread.start()
    try:
        until(lambda: not link.left, cb.LATER_S)
    finally:
        stop.set()
        thread.join(cb.LATER_S)
    assert {type(e).__name__ for e in taken} == {"Welcome", "Lease", "Stop", "Refuse"}
    assert client.counts["garbage"] > COUNT / 4
    assert len(client._queue) <= 2 * cb.CAPACITY
    assert len(client._events) <= 64
    client.close()


def test_hostile_messages_do_not_grow_with_their_number():
    """What they put in place of values is tampered with again, but is nobody else's."""
    before, hostile = repr(VALUES), Hostile(3)
    for _ in range(1000):
        hostile.frames()
    assert repr(VALUES) == before
