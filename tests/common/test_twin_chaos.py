"""A channel that drops, duplicates, delays, reorders and corrupts, under kills: what is trained is
the plan, and bugs that are planted are caught.

A failure names its seed; `python -m tests.bench.chaos --size twin --schedules 1 --seed N` plays it
again, to the last message.
"""

from unittest import mock

import pytest

from tests.support.planted import patches
from tests.support.twin import Twin, Weather

CALM = Weather(*[0.0] * 8)
STORM = Weather(0.15, 0.2, 0.3, 0.15, 3.0, 0.1, 0.15, 0.1)


def played(seed: int, **options) -> Twin:
    twin = Twin(seed, **options)
    try:
        twin.play()
    except AssertionError as e:
        raise AssertionError(f"seed {seed}: {e}") from e
    return twin


@pytest.mark.parametrize("first", [0, 8, 16])
def test_whatever_the_channel_does_the_plan_is_trained(first):
    twins = [played(seed) for seed in range(first, first + 8)]
    for fault in ("drop", "duplicate", "delay", "corrupt", "trainer", "producer", "freeze"):
        assert sum(t.counts[fault] for t in twins), f"no {fault} in eight schedules"


def test_one_message_in_six_lost_and_one_in_six_damaged():
    twins = [played(seed, weather=STORM) for seed in range(2)]
    kinds = {e["kind"] for t in twins for e in t.log.events}
    assert {"garbage", "bad_digest", "duplicate", "unknown_lease", "stale", "strike"} <= kinds


def test_a_seed_is_played_again_to_the_last_message():
    first, again = played(5), played(5)
    assert first.log.events == again.log.events
    assert first.counts == again.counts


@pytest.mark.parametrize("idle", [1, 2])
def test_producers_that_answer_nothing_cost_a_lease_and_no_livelock(idle):
    twin = played(1, weather=CALM, idle=idle)
    assert twin.longest_gap_s < 5.0  # two leases of 1.5 s, one after the other, and a batch
    assert twin.log.of("strike")


CAUGHT = {"arrival": "I2", "no-strikes": "I13", "anyone": "is forged"}


@pytest.mark.parametrize("name", CAUGHT)
def test_planted_bugs_are_caught(name, monkeypatch):
    for owner, attribute, other in patches(name):
        monkeypatch.setattr(owner, attribute, other)
    weather = CALM if name == "no-strikes" else Weather()
    with pytest.raises(AssertionError, match=CAUGHT[name]):
        _ = [played(seed, weather=weather) for seed in range(8)]


def test_a_checkpoint_of_what_was_fetched_is_caught():
    with pytest.raises(AssertionError, match="I2|I11"):
        _ = [played(seed, early_cursor=True) for seed in range(8)]


def test_turns_do_not_hide_a_thread_that_died(monkeypatch):
    """An error in an end is the trainer's, not a silent end of its turns."""
    boom = mock.Mock(side_effect=RuntimeError("boom"))
    monkeypatch.setattr("common.transport.leases.LeaseBook.assign", boom)
    with pytest.raises(Exception, match="boom"):
        played(1)
