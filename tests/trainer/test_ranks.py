"""What trainers say to each other: batches, meetings, weights compared, and who is lost."""

from __future__ import annotations

import math
import re
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from common.system.errors import OK, Stopped
from common.system.lifecycle import SUPERVISOR
from common.transport.delivery import StopAsked
from common.transport.messages import WireError
from tests.support import channel_fixtures
from trainer.ranks import leader as leader_module
from trainer.ranks import words
from trainer.ranks.follower import Ended, Follower
from trainer.ranks.leader import Leader
from trainer.ranks.share import Share
from trainer.ranks.words import RankLost, RanksDiffer

short_folder = channel_fixtures.short_folder
RUN = "0" * 32
FAR_S = 60.0  # a deadline that is not meant to pass


def never() -> bool:
    return False


@pytest.fixture
def address(short_folder):
    return f"ipc://{short_folder}/ranks"


@pytest.fixture
def group(address):
    """(leader, followers) of so many trainers, joined and set up."""
    made = []

    def make(count: int, timeout_s: float = FAR_S, compiling_s: float = FAR_S):
        leader = Leader(address, RUN, count, timeout_s, compiling_s)
        made.append(leader)
        followers = [Follower(address, r, count, FAR_S) for r in range(1, count)]
        made.extend(followers)
        leader._timeout_s, wanted_s = FAR_S, leader._timeout_s
        leader.join(never)
        leader.set_up("gpt", ["a", "b"])
        for f in followers:
            assert f.wait("set_up", never)["stage"] == "gpt"
        leader._timeout_s = wanted_s
        return leader, followers

    yield make
    for end in reversed(made):
        end.close()


def until(condition) -> None:
    deadline = time.monotonic() + FAR_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def in_thread(function) -> list:
    """What the function returns, or the error that it raises, once it has ended."""
    out = []

    def run():
        try:
            out.append(function())
        except Exception as e:  # noqa: BLE001 - looked at by the test
            out.append(e)

    threading.Thread(target=run, daemon=True).start()
    return out


def test_every_batch_of_every_step_has_one_rank():
    """Batches 0 to 12 of an epoch in steps of 4, the last of one batch: ranks by hand."""
    train = SimpleNamespace(batches_per_epoch=13)
    share = Share(SimpleNamespace(train=train, accumulate=4), 2)
    epoch = [0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0]
    assert [share.rank_of("train", g) for g in range(26)] == epoch * 2
    assert [share.rank_of("eval", g) for g in range(6)] == [0] * 6


def test_trainers_meet_and_hear_what_each_says_by_rank(group):
    leader, followers = group(3)
    for number in range(3):
        theirs = [in_thread(lambda f=f, n=number: f.meet(b"%d%d" % (f.rank, n))) for f in followers]
        expected = [b"0%d" % number, b"1%d" % number, b"2%d" % number]
        assert leader.meet(b"0%d" % number) == expected
        until(lambda theirs=theirs: all(theirs))
        assert theirs == [[expected]] * 2


def test_batches_come_in_order_and_whole_and_those_used_are_told(group):
    leader, (first, second) = group(3)
    used = []
    leader.on_used = lambda: used.append(1)
    arrays = {
        g: {"ids": np.arange(g, g + 5, dtype=np.int32), "mel": np.full((2, 3), g, np.float16)}
        for g in range(6)
    }
    for g, batch in arrays.items():
        leader.hand_on(1 + g % 2, "train", g, batch)
    for follower, numbers in ((first, (0, 2, 4)), (second, (1, 3, 5))):
        for g in numbers:
            delivery = follower.next(FAR_S, never)
            assert (delivery.plan, delivery.g) == ("train", g)
            for name, value in arrays[g].items():
                np.testing.assert_array_equal(delivery.arrays[name], value)
            follower.release()
    until(lambda: len(used) == 6)


def test_a_trainer_that_does_not_come_is_named(address):
    leader = Leader(address, RUN, 3, 0.3, FAR_S)
    other = Follower(address, 1, 3, FAR_S)
    try:
        with pytest.raises(RankLost, match=r"trainer-2 did not come within 0 s: see RUN/logs"):
            leader.join(never)
    finally:
        other.close()
        leader.close()


def test_a_trainer_that_dies_is_named_wherever_the_first_one_is(group):
    leader, (first, second) = group(3)
    lost = []
    leader.on_lost = lambda: lost.append(1)
    waits = in_thread(leader.meet)
    second.close()
    until(lambda: waits)
    assert isinstance(waits[0], RankLost)
    assert "is gone: see RUN/logs/trainer-2.log" in str(waits[0])
    with pytest.raises(RankLost, match="trainer-2"):
        leader.check()
    assert lost == [1]
    assert not first.ended


def test_a_trainer_that_hangs_is_named_with_what_it_says(group):
    leader, (follower,) = group(2, timeout_s=0.5)
    leader._look_for_silence = lambda now: None
    follower.doing = "training"
    until(lambda: leader._peers[1].doing == "training")
    with pytest.raises(RankLost, match=r"trainer-1 did not come to .* \(it says: training\)"):
        leader.meet()


def test_a_trainer_that_says_nothing_is_named(group):
    leader, (follower,) = group(2, timeout_s=1.5)
    theirs = in_thread(follower.meet)
    leader.meet()
    until(lambda: theirs)
    follower._speak = lambda beat: None  # a process that is stopped: its socket stays
    until(lambda: leader._lost)
    with pytest.raises(RankLost, match=r"trainer-1 \(pid \d+\) has said nothing for \d s"):
        leader.check()


def test_one_that_compiles_is_waited_for(group):
    leader, (follower,) = group(2)
    follower.doing = "compiling bucket 2"
    until(lambda: leader._peers[1].doing.startswith("compiling"))
    leader._parted = math.inf  # whoever does not compile is late when it is looked for first
    looks = []
    waits = in_thread(lambda: leader.meet(b"", lambda: bool(looks.append(1))))
    until(lambda: waits or len(looks) >= 3)
    assert not waits
    theirs = in_thread(follower.meet)
    until(lambda: waits and theirs)
    assert waits == theirs == [[b"", b""]]


@pytest.mark.parametrize("first", [True, False])
def test_one_that_says_the_same_for_too_long_is_not_waited_for(group, monkeypatch, first):
    """Its thread still answers: nothing but its own words tells that it hangs."""
    later, looked = [0.0], []
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + later[0])
    monkeypatch.setattr(leader_module, "time", clock)
    leader, (follower,) = group(2, compiling_s=1200.0)

    def says(what: str) -> None:
        follower.doing = what
        until(lambda: leader._peers[1].doing == what)

    def stopping() -> bool:
        looked.append(1)
        return False

    says("compiling program 1 of 9")
    if first:
        waits = in_thread(lambda: leader.wait_ready(stopping, lambda who: None))
    else:
        waits = in_thread(lambda: leader.meet(b"", stopping))
    for number in (1, 2, 3):  # it gets on: each time, the limit begins anew
        says(f"compiling program {number} of 9")
        seen = len(looked)
        until(lambda seen=seen: len(looked) > seen + 2)
        later[0] += 0.6 * 1200
        until(lambda seen=seen: len(looked) > seen + 4 or waits)
        assert not waits
    later[0] += 1200
    until(lambda: waits)
    assert isinstance(waits[0], RankLost)
    said = r"trainer-1 did not come to .* within \d{4} s \(it says: compiling program 3 of 9\)"
    said += "; trainers.compiling_s allows more"
    assert re.fullmatch(said, str(waits[0]))


def test_a_stop_ends_a_meeting(group):
    leader, _ = group(2)
    with pytest.raises(Stopped):
        leader.meet(b"", lambda: True)


def test_weights_that_differ_are_named_and_equal_ones_pass(group):
    leader, (first, second) = group(3)
    first.digests = second.digests = lambda step: {"a.weight": f"{step}", "b.bias": "0f"}
    leader.agree(7, {"a.weight": "7", "b.bias": "0f"})
    second.digests = lambda step: {"a.weight": f"{step}", "b.bias": "0e"}
    with pytest.raises(RanksDiffer, match=r"after step 8, 1 of 2 tensors of trainer-2 .*: b.bias;"):
        leader.agree(8, {"a.weight": "8", "b.bias": "0f"})


def test_where_one_is_lost_nothing_is_compared_and_that_is_said(group, caplog):
    leader, (follower,) = group(2)
    follower.close()
    until(lambda: leader._lost)
    leader.agree(7, {"a": "1"})
    assert "step 7 are saved without being compared: trainer-1" in caplog.text


def test_the_first_trainer_ends_the_others(group):
    leader, (follower,) = group(2)
    waits, feeds = in_thread(follower.meet), in_thread(lambda: follower.next(FAR_S, never))
    leader.end("all steps are trained", OK)
    until(lambda: waits and feeds)
    assert isinstance(waits[0], Ended)
    assert waits[0].code == OK
    assert isinstance(feeds[0], StopAsked)


def test_the_last_word_is_heard_though_the_first_trainer_is_gone_when_it_is_read(group):
    leader, (follower,) = group(2)
    held, stands = threading.Event(), threading.Event()
    speak = follower._speak

    def stand(beat: bool) -> None:
        stands.set()
        held.wait(FAR_S)
        speak(beat)

    follower._speak = stand
    assert stands.wait(FAR_S)
    leader.end("all steps are trained", OK)
    leader.close()
    time.sleep(0.3)  # for the end of the connection to arrive; sooner, the test would say nothing
    held.set()
    with pytest.raises(Ended):
        follower.wait("go", never)


def test_a_follower_sees_that_the_first_trainer_is_gone(group):
    leader, (follower,) = group(2)
    waits = in_thread(follower.meet)
    leader.close()
    until(lambda: waits)
    assert isinstance(waits[0], RankLost)
    assert "the first trainer is gone" in str(waits[0])


def test_a_second_process_of_a_rank_is_refused_and_another_launchers_ignored(
    group, address, monkeypatch
):
    leader, (first,) = group(2)
    calls, welcome = [], leader._welcome

    def counted(peer, word, now):
        calls.append(word["family"])
        welcome(peer, word, now)

    monkeypatch.setattr(leader, "_welcome", counted)
    monkeypatch.setenv(SUPERVISOR, "1:2.0")
    stranger = Follower(address, 1, 2, FAR_S)
    try:
        until(lambda: calls.count("1:2.0") >= 3)  # an answer to the first has come by then
        assert not stranger.ended
    finally:
        stranger.close()
    monkeypatch.delenv(SUPERVISOR)
    twice = Follower(address, 1, 2, FAR_S)
    try:
        with pytest.raises(RankLost, match="there are 2 trainers, and trainer-1 is none of those"):
            twice.wait("set_up", never)
    finally:
        twice.close()
    assert not first.ended
    leader.check()


@pytest.mark.parametrize(
    "frame",
    [
        b"", b"\xc1", b"\x93\x01\x02\x03",
        words.encode("go", "s", number=1),
        words.encode("go", "s", number="1", payloads=[]),
        words.encode("fly", "s"),
    ],
)  # fmt: skip
def test_what_is_no_word_is_refused(frame):
    with pytest.raises(WireError):
        words.decode(frame, words.FROM_LEADER)
