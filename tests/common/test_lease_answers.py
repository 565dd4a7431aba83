"""What becomes of answers to leases: copies, wrong digests, refusals, rejections, new
generations.
"""

import pytest

from common.transport.lease_records import DELIVERED, FREE, LEASED, READY
from common.transport.messages import Lease, Nack
from tests.support.lease_harness import Harness, gs


@pytest.fixture
def bench():
    b = Harness()
    yield b
    b.check_accounts()


def test_ready_again_voids_the_leases_before(bench):
    bench.join("a", capacity=2)
    old = bench.leases()
    bench.join("a", capacity=2)
    assert (
        bench.leases() == []
    )  # a strike: else one that says nothing but READY would hold the same batches for ever
    bench.now += 1
    new = bench.leases()
    assert gs(new) == gs(old) == [("a", 0), ("a", 1)]
    assert (
        bench.answer("a", old[0][1]) == "accepted"
    )  # the first copy wins, whichever lease it is for
    assert bench.answer("a", new[0][1]) == "duplicate"


def test_copies_that_differ_are_reported(bench):
    bench.join("a", capacity=1)
    [(_, lease)] = bench.leases()
    bench.answer("a", lease)
    assert bench.answer("a", lease) == "duplicate"
    assert bench.kinds("digest_mismatch") == []
    assert bench.answer("a", lease, value=99) == "duplicate"
    [mismatch] = bench.kinds("digest_mismatch")
    assert (mismatch["plan"], mismatch["g"], mismatch["peers"]) == ("train", 0, ("a", "a"))


def test_copies_after_the_release_are_compared_too_but_not_across_other_extras():
    b = Harness([("eval", 0), ("eval", 0), ("eval", 0)], set_aside=lambda plan, g: b.set_aside)
    for set_aside, value, mismatches in (([], 1, 0), ([], 2, 1), ([5], 3, 1)):
        b.set_aside = set_aside
        b.book.window = 1
        b.join("a", capacity=1)
        [(_, lease)] = b.leases()
        b.answer("a", lease, value=value)
        b.book.take()
        b.book.release()
        assert len(b.kinds("digest_mismatch")) == mismatches


def test_wrong_digest_is_a_strike_and_unknown_leases_are_ignored(bench):
    peer = bench.join("a", capacity=1)
    [(_, lease)] = bench.leases()
    for wrong in (
        Lease(1, "train", 0, 999, 0),
        Lease(1, "train", 1, lease.lease, 0),
        Lease(1, "eval", 0, lease.lease, 0),
    ):
        assert bench.answer("a", wrong) == "unknown"
    assert peer.strikes == 0
    assert bench.answer("a", lease, right=False) == "bad"
    assert peer.strikes == 1
    assert bench.book.in_state(READY) == 0
    assert bench.answer("a", lease) == "accepted"


def test_nacks_that_match_no_lease_of_the_peer_are_ignored(bench):
    bench.join("a", capacity=1)
    b = bench.join("b", capacity=1)
    [(_, lease), _] = bench.leases()
    bench.book.on_nack(b, Nack(1, "train", 0, lease.lease, "not mine"))
    bench.book.on_nack(b, Nack(1, "train", 0, 999, "nobody's"))
    assert bench.kinds("strike") == []
    assert bench.book.in_state(LEASED) == 2


def test_a_rejected_delivery_is_made_and_delivered_again(bench):
    bench.join("a", capacity=4)
    old = [lease for _, lease in bench.leases()]
    for lease in old:
        bench.answer("a", lease)
    bench.book.take()
    item, _ = bench.book.take()
    assert not bench.book.reject(0, "too late", strike=False)
    assert bench.book.reject(item.position, "row set aside", strike=False)
    assert not bench.book.reject(item.position, "twice", strike=False)
    assert bench.book.take() is None
    assert (
        bench.answer("a", old[1]) == "duplicate"
    )  # a copy of what was rejected is not the new one
    [(_, lease)] = bench.leases()
    assert lease.g == 1
    assert bench.answer("a", lease, value=7) == "accepted"
    assert bench.kinds("digest_mismatch", "strike") == []
    assert [bench.book.take()[1].g for _ in range(3)] == [1, 2, 3]
    assert bench.book.in_state(DELIVERED) == 4


def test_a_rejection_for_bad_arrays_strikes_the_maker(bench):
    bench.join("a", capacity=1)
    bench.join("b", capacity=1)
    for name, lease in bench.leases():
        bench.answer(name, lease)
    item, _ = bench.book.take()
    bench.book.reject(item.position, "shape", strike=True)
    assert [e["peer"] for e in bench.kinds("strike")] == [item.producer] == ["a"]
    assert ("b", 0) in gs(bench.leases())


def test_a_new_generation_drops_everything_of_the_old_one(bench):
    bench.join("a", capacity=2)
    [(_, first), (_, second)] = bench.leases()
    bench.answer("a", first)
    assert bench.book.nbytes() == 4
    bench.book.open(2, [("eval", 5)], lambda plan, g: ())
    assert bench.book.nbytes() == 0
    assert bench.leases() == []  # READY in this generation is what counts
    assert bench.answer("a", second) == "unknown"
    bench.join("a")
    [(_, lease)] = bench.leases()
    assert (lease.gen, lease.plan, lease.g, lease.position) == (2, "eval", 5, 0)
    assert lease.lease != second.lease


def test_nothing_is_held_after_delivery_and_books_stay_small(bench):
    bench.join("a", capacity=4)
    for _ in range(3000):
        for _, lease in bench.leases():
            bench.answer("a", lease)
        while bench.book.take() is not None:
            bench.book.release()
    assert bench.book.released == 12000
    assert bench.book.nbytes() == 0
    assert bench.book.in_state(FREE, LEASED, READY, DELIVERED) == 0
    assert len(bench.book._records) <= 4096
    assert len(bench.book.digests) <= 4096


def test_what_is_set_aside_is_asked_for_when_the_lease_is_sent():
    asked = []
    b = Harness(set_aside=lambda plan, g: asked.append((plan, g)) or [len(asked)])
    assert asked == []
    b.join("a", capacity=2)
    assert [lease.set_aside for _, lease in b.leases()] == [(1,), (2,)]
    assert asked == [("train", 0), ("train", 1)]
