"""How many batches are asked for: a producer and a trainer in simulated time, over the real
accounting of leases.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from common.transport.target import Target
from tests.support.lease_harness import Harness

HANDS = 3  # the feed's queue of two, and one in its own


@dataclass
class Course:
    """What a simulated stretch of training came to."""

    trained: list[int] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)  # seconds without a batch, per batch
    targets: list[int] = field(default_factory=list)  # at each release
    held: list[int] = field(default_factory=list)  # batches on the trainer's host at each release


def simulate(
    take_s: Callable[[int], float],
    window: int,
    start: int | None,
    batches: int,
    step_s: Callable[[int], float] = lambda g: 1.0,
):
    """One producer works on one batch at a time, take_s(g) seconds each; a step takes step_s(g) and
    releases its batch as it begins.
    """
    bench, course = Harness(window=window, start=start), Course()
    bench.join("p", capacity=64)
    now, free_at, done_at = 0.0, 0.0, 0.0
    coming: list = []
    hands: deque[int] = deque()
    while len(course.trained) < batches:
        for _, lease in bench.leases():
            assert (
                lease.position
                < bench.book.released + bench.book.target.value
                <= bench.book.released + window
            )
            free_at = max(free_at, now) + take_s(lease.g)
            heapq.heappush(coming, (free_at, lease.g, lease))
        while len(hands) < HANDS and (taken := bench.book.take()) is not None:
            hands.append(taken[1].g)
        if hands and now >= done_at:
            course.waits.append(now - done_at)
            g = hands.popleft()
            course.trained.append(g)
            bench.book.release()
            course.held.append(len(hands) + bench.book.in_state("ready"))
            course.targets.append(bench.book.target.value)
            done_at = now + step_s(g)
            continue
        now = min([t for t, *_ in coming[:1]] + ([done_at] if hands else []), default=now)
        while coming and coming[0][0] <= now:
            assert bench.answer("p", heapq.heappop(coming)[2]) == "accepted"
    assert course.trained == list(range(batches))
    return course


def test_a_steady_producer_needs_three_batches_and_no_step_waits():
    """One trained next, one copied, one being made; with two, the next step's batch would still be
    asked for when it is due.
    """
    course = simulate(lambda g: 0.6, window=16, start=8, batches=1500)
    assert set(course.waits[1:]) == {0.0}
    assert course.targets[-1] == 3
    assert max(course.held[-200:]) == 2
    assert (
        max(simulate(lambda g: 0.6, window=16, start=None, batches=200).held) == 15
    )  # what it would hold without


def test_a_producer_with_pauses_gets_the_whole_window_and_then_no_step_waits():
    """Every 24th batch takes as long as ten steps, the others half of one: fast enough on average,
    and ten steps need more than 8.
    """
    course = simulate(lambda g: 10.0 if g % 24 == 23 else 0.5, window=16, start=4, batches=1500)
    first = course.targets.index(16)
    assert course.targets[first:] == [16] * len(course.targets[first:])
    assert sum(w > 0 for w in course.waits[:first]) > 1
    assert set(course.waits[first + 24 :]) == {0.0}


def test_the_mark_where_the_whole_window_is_too_little_is_where_it_was_without():
    """A producer that is too slow on average: the same waits as with the whole window from the
    beginning, to the last.
    """
    slow = {"take_s": lambda g: 1.5, "window": 8, "batches": 300}
    assert simulate(start=4, **slow).waits[50:] == simulate(start=None, **slow).waits[50:]


def test_it_shrinks_slowly_and_not_to_where_it_ran_low():
    """16 batches per size without falling under half; after running low at 4: doubled, and 5 is the
    least from then on.
    """
    target = Target(16, 4)
    target.ran_low(released=3)
    assert target.value == 4, "the buffer had no time to fill"
    target.ran_low(released=4)
    assert target.value == 8
    course = []
    for released in range(5, 2000):
        target.released(released, held=target.value - 1)
        course.append(target.value)
    assert [course.count(n) for n in (8, 7, 6)] == [16 * 8 - 1, 16 * 7, 16 * 6]
    assert min(course) == 5


def test_a_buffer_that_falls_under_half_now_and_then_does_not_shrink():
    target = Target(8, 8)
    for released in range(1, 3000):
        target.released(released, held=3 if released % 127 == 0 else 7)
    assert target.value == 8
    for released in range(3000, 3000 + 128):
        target.released(released, held=4)
    assert target.value == 7


@pytest.mark.parametrize(("window", "start"), [(1, 1), (1, 9), (2, 1), (7, 0), (8, None)])
def test_it_is_between_one_and_the_window(window, start):
    target = Target(window, start)
    for released in range(500):
        target.ran_low(released)
        assert 1 <= target.value <= window
    for released in range(500, 9000):
        target.released(released, window)
        assert 1 <= target.value <= window
    assert target.value == (window if start is None else target.value)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_times_the_order_stands_and_shrinking_costs_few_waits(seed):
    """`simulate` asserts the order and the bound; the target falls from any size once at most after
    the trainer ran low there.
    """
    rng = np.random.default_rng(seed)
    window, batches = int(rng.integers(1, 20)), 1200
    take = rng.lognormal(-0.5, float(rng.uniform(0, 1.5)), batches + 64)
    step = rng.lognormal(-0.1, float(rng.uniform(0, 0.8)), batches)
    course = simulate(
        lambda g: take[g], window, int(rng.integers(1, window + 1)), batches, lambda g: step[g]
    )
    grew_from = [a for a, b in zip(course.targets, course.targets[1:], strict=False) if b > a]
    assert grew_from == sorted(set(grew_from)), (
        "never low twice at one size, and later only at larger ones"
    )
