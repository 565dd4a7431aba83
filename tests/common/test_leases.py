"""Who is leased what, and when a lease ends: no sockets, no threads, no sleep."""

import pytest

from common.transport.lease_records import LEASED
from common.transport.messages import Lease, Nack, Ready, Revoke
from tests.support.lease_harness import BUDGET, DEAD, GRACE, TTL, Harness, gs


@pytest.fixture
def bench():
    b = Harness()
    yield b
    b.check_accounts()


def test_leases_go_lowest_first_and_never_beyond_window_or_capacity(bench):
    bench.join("a", capacity=3)
    bench.join("b", capacity=3)
    assert gs(bench.leases()) == [("a", 0), ("b", 1), ("a", 2), ("b", 3)]
    assert gs(bench.leases()) == []
    assert bench.book.in_state(LEASED) == 4


def test_only_peers_that_said_ready_are_leased_to(bench):
    peer = bench.book.heard(b"a")
    assert bench.leases() == []
    bench.book.peer_ready(peer, Ready(1, "a", 1, 2))
    assert gs(bench.leases()) == [("a", 0), ("a", 1)]


@pytest.mark.parametrize(("capacity", "used"), [(1, 1), (4, 4), (10**9, 64)])
def test_capacity_comes_from_the_peer_up_to_a_limit(bench, capacity, used):
    assert bench.join("a", capacity=capacity).capacity == used


def test_delivery_is_in_schedule_order_whatever_the_order_of_arrival(bench):
    bench.join("a", capacity=4)
    leases = [lease for _, lease in bench.leases()]
    for lease in (leases[2], leases[1], leases[3]):
        assert bench.answer("a", lease) == "accepted"
        assert bench.book.take() is None
    bench.answer("a", leases[0])
    assert [bench.book.take()[1].g for _ in range(4)] == [0, 1, 2, 3]
    assert bench.book.take() is None


def test_a_release_is_one_credit(bench):
    bench.join("a", capacity=9)
    for _, lease in bench.leases():
        bench.answer("a", lease)
    assert bench.leases() == []
    for _ in range(3):
        bench.book.take()
    assert bench.leases() == []
    assert bench.book.release() == ("train", 0)
    assert gs(bench.leases()) == [("a", 4)]
    assert [bench.book.release() for _ in range(3)] == [("train", 1), ("train", 2), None]


def test_a_schedule_of_two_plans_is_followed_and_ends():
    b = Harness([("train", 0), ("train", 1), ("eval", 0), ("eval", 1), ("train", 2), ("eval", 0)])
    b.join("a", capacity=2)
    seen = []
    while not b.book.at_end():
        for _, lease in reversed(b.leases()):
            b.answer("a", lease)
        while (taken := b.book.take()) is not None:
            seen.append((taken[0].plan, taken[0].g))
            b.book.release()
    assert seen == [("train", 0), ("train", 1), ("eval", 0), ("eval", 1), ("train", 2), ("eval", 0)]
    assert b.book.exhausted
    b.check_accounts()


def test_an_expired_lease_goes_to_another_peer_and_the_late_copy_is_still_taken(bench):
    bench.join("a", capacity=1)
    [(_, first)] = bench.leases()
    bench.join("b", capacity=1)
    assert gs(bench.leases()) == [("b", 1)]
    bench.pass_time(TTL + 1, "a", "b")
    assert [e["peer"] for e in bench.kinds("strike")] == ["a", "b"]
    bench.now += 1
    again = bench.leases()
    assert gs(again) == [("b", 0), ("a", 1)]
    assert bench.answer("a", first) == "accepted"
    assert bench.book.outbox.pop() == (b"b", Revoke(1, again[0][1].lease))
    assert bench.answer("b", again[0][1]) == "duplicate"
    assert bench.book.take()[0].producer == "a"
    assert bench.book.outcomes == {"expired": 2, "revoked": 1}


def test_strikes_back_off_twice_as_long_each_time_and_good_work_takes_one_off(bench):
    peer = bench.join("a", capacity=1)
    for expected in (0.25, 0.5, 1.0, 2.0):
        [(_, lease)] = bench.leases()
        bench.answer("a", lease, right=False)
        assert peer.backoff_until == pytest.approx(bench.now + expected)
        assert bench.leases() == []
        bench.now = peer.backoff_until
    [(_, lease)] = bench.leases()
    assert bench.answer("a", lease) == "accepted"
    assert peer.backoff == 3
    for _ in range(20):
        bench.now = max(bench.now, peer.backoff_until)
        bench.answer("a", bench.leases()[0][1], right=False)
    assert peer.backoff_until - bench.now == 30.0


def test_a_live_but_idle_peer_does_not_hold_up_the_others(bench):
    """Without strikes, and leases for READY peers only, the idle peer was leased the same batch for
    ever.
    """
    bench.join("idle", capacity=2)
    bench.join("good", capacity=2)
    start, trained = bench.now, 0
    while trained < 200:
        for name, lease in bench.leases():
            if name == "good":
                bench.answer(name, lease)
        while bench.book.take() is not None:
            bench.book.release()
            trained += 1
        bench.pass_time(1, "idle", "good")
        assert bench.now - start < 600
    assert all(e["peer"] == "idle" for e in bench.kinds("strike"))


def test_a_batch_is_not_given_back_to_the_peer_that_failed_it_while_another_is_there(bench):
    bench.join("a", capacity=1)
    [(_, lease)] = bench.leases()
    bench.join("b", capacity=1)
    bench.leases()
    bench.book.on_nack(bench.book.heard(b"a"), Nack(1, "train", 0, lease.lease, "no"))
    bench.now += 1  # its back-off is over, b is busy
    [(name, second)] = bench.leases()
    assert (name, second.g) == ("a", 2)
    bench.book.peer_lost(b"b", "killed")
    bench.answer("a", Lease(1, "train", 2, second.lease, 2))
    assert gs(bench.leases()) == [("a", 0)]


def test_a_batch_that_every_peer_refuses_fails(bench):
    for name in "ab":
        bench.join(name, capacity=1)
    nacked = []
    for _ in range(20):
        for name, lease in bench.leases():
            if lease.g == 0:
                nacked.append(name)
                bench.book.on_nack(
                    bench.book.heard(name.encode()),
                    Nack(1, "train", 0, lease.lease, "file is gone"),
                )
        bench.pass_time(1, "a", "b")
    assert nacked == ["a", "b", "a"]
    assert bench.book.head().state == "failed"
    assert [(e["plan"], e["g"], e["why"]) for e in bench.kinds("batch_failed")] == [
        ("train", 0, "file is gone")
    ]


def test_a_silent_peer_is_counted_dead_and_must_say_ready_again(bench):
    bench.join("a")
    bench.join("b")
    bench.leases()
    bench.pass_time(DEAD + 1, "b")
    assert bench.book.peers[b"a"].state == "frozen"
    assert bench.book.outcomes == {"lost": 2}
    assert bench.kinds("strike") == []
    assert gs(bench.leases()) == []  # b is full
    bench.book.heard(b"a")
    assert bench.leases() == []
    bench.join("a")
    assert gs(bench.leases()) == [("a", 0), ("a", 2)]


def test_a_peer_that_is_still_starting_is_never_counted_dead(bench):
    bench.book.heard(b"a")
    bench.pass_time(60)
    assert bench.book.peers[b"a"].state == "joining"


def test_compiling_keeps_leases_for_two_minutes_and_no_longer(bench):
    peer = bench.join("a")
    bench.leases()
    bench.book.peer_status(peer, "compiling(3)")
    bench.pass_time(GRACE, "a")
    assert bench.book.outcomes == {}
    bench.pass_time(2, "a")
    assert bench.book.outcomes == {"expired": 2}
    assert len(bench.kinds("strike")) == 1


def test_the_lease_time_stands_still_while_compiling(bench):
    peer = bench.join("a", capacity=1)
    [(_, lease)] = bench.leases()
    bench.book.peer_status(peer, "compiling(3)")
    bench.pass_time(60, "a")
    bench.book.peer_status(peer, "working")
    bench.pass_time(TTL - 1, "a")
    assert bench.book.outcomes == {}
    assert bench.answer("a", lease) == "accepted"


def test_leases_that_wait_behind_another_one_do_not_expire_while_the_peer_gets_on(bench):
    bench.join("slow", capacity=4)
    for _, lease in bench.leases():
        bench.pass_time(TTL - 2, "slow")  # four batches one after the other take 3.2 lease times
        assert bench.answer("slow", lease) == "accepted"
    assert bench.kinds("strike") == []


def test_a_batch_that_takes_longer_than_its_lease_is_given_more_time(bench):
    bench.join("slow", capacity=1)
    bench.leases()
    for ttl_s in (TTL, 2 * TTL, 4 * TTL):
        bench.pass_time(ttl_s, "slow")
        assert len(bench.book.peers[b"slow"].leases) == 1
        bench.pass_time(3, "slow")
        [(_, lease)] = bench.leases()
        assert lease.g == 0


def test_a_lease_that_is_passed_over_expires_even_if_later_ones_are_answered(bench):
    bench.join("a", capacity=4)
    first, *others = [lease for _, lease in bench.leases()]
    for lease in others:
        bench.pass_time(4, "a")
        bench.answer("a", lease)
    assert bench.book.outcomes["expired"] == 1
    assert bench.kinds("lease_end")[-1]["outcome"] in ("accepted", "expired")
    assert first.g == 0


def test_standing_still_ourselves_is_nobodys_fault(bench):
    bench.join("a")
    bench.leases()
    bench.now += 60
    bench.book.stalled(60)
    bench.book.tick()
    assert bench.book.peers[b"a"].state == "ready"
    assert bench.book.outcomes == {}


def test_nor_is_it_a_compilations_that_went_on_meanwhile(bench):
    bench.join("a")
    bench.leases()
    bench.book.peer_status(bench.book.peers[b"a"], "compiling(bucket 1)")
    bench.now += 9999
    bench.book.stalled(9999)
    bench.now += TTL + 1
    bench.book.heard(b"a")
    bench.book.tick()
    assert bench.book.outcomes == {}
    bench.book.peer_status(bench.book.peers[b"a"], "working")
    assert bench.book.peers[b"a"].compiled_s == pytest.approx(TTL + 1)


def test_a_lost_peers_batches_are_leased_again_at_once(bench):
    bench.join("a")
    bench.join("b", capacity=4)
    bench.leases()
    bench.book.peer_lost(b"a", "disconnected")
    assert gs(bench.leases()) == [("b", 0), ("b", 3)]
    assert b"a" not in bench.book.peers


def test_a_producer_that_compiles_something_new_for_ever_runs_out_of_time(bench):
    """Each text had two minutes of its own: with ever new ones a producer kept its
    leases for ever.
    """
    peer = bench.join("a", capacity=1)
    bench.leases()
    start = bench.now
    for n in range(1000):
        bench.book.peer_status(peer, f"compiling({n})")
        bench.pass_time(10, "a")
        if bench.kinds("strike"):
            break
    assert BUDGET <= bench.now - start <= BUDGET + TTL + 20
    assert bench.book.outcomes == {"expired": 1}


def test_texts_that_only_touch_on_compiling_win_no_time(bench):
    peer = bench.join("a", capacity=1)
    bench.leases()
    for n in range(int(TTL) + 2):
        bench.book.peer_status(peer, f"compiling({n})")
        bench.book.peer_status(peer, f"working({n})")
        bench.pass_time(1, "a")
    assert bench.book.outcomes == {"expired": 1}


def test_the_time_for_compiling_is_given_anew_with_each_stage(bench):
    peer = bench.join("a", capacity=1)
    for stage in (1, 2, 3):
        bench.leases()
        for n in range(int(BUDGET / GRACE) + 1):
            bench.book.peer_status(peer, f"compiling({stage}, {n})")
            bench.pass_time(GRACE - 20, "a")
        assert not bench.kinds("strike"), stage
        bench.book.peer_status(peer, "working")
        bench.book.open(stage + 1, (("train", g) for g in range(9)), lambda plan, g: ())
        bench.join("a", capacity=1)


def test_a_lease_taken_up_during_a_compilation_gains_only_what_is_left_of_it(bench):
    peer = bench.join("a", capacity=1)
    bench.book.peer_status(peer, "compiling(0)")
    bench.pass_time(50, "a")
    bench.leases()
    bench.pass_time(5, "a")
    bench.book.peer_status(peer, "working")
    bench.pass_time(TTL - 1, "a")
    assert bench.book.outcomes == {}
    bench.pass_time(2, "a")
    assert bench.book.outcomes == {"expired": 1}


def test_one_that_says_nothing_but_ready_does_not_hold_up_the_others(bench):
    """Its leases were free again with each READY, and at once its own."""
    bench.join("a-ready", capacity=4)
    bench.join("good", capacity=4)
    trained = 0
    for _ in range(3000):
        bench.now += 0.01
        bench.join("a-ready", capacity=4)
        for name, lease in bench.leases():
            if name == "good":
                bench.answer(name, lease)
        while bench.book.take() is not None:
            bench.book.release()
            trained += 1
    assert trained > 200
    assert {e["peer"] for e in bench.kinds("strike")} == {"a-ready"}


def test_lease_numbers_cannot_be_guessed():
    numbers = set()
    for _ in range(50):
        b = Harness()
        b.join("a", capacity=4)
        numbers |= {lease.lease for _, lease in b.leases()}
    assert len(numbers) == 200
    assert max(numbers).bit_length() > 60
    bits = [sum(n >> i & 1 for n in numbers) for i in range(60)]
    assert all(50 < count < 150 for count in bits)  # 7 standard deviations
