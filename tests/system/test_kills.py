"""Whatever is killed, frozen, added, removed or replaced: the folded ledger is exactly the plan,
and the weights are bit-equal.
"""

import json
import random
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import yaml

from common.run.folder import RunFolder
from common.system import status
from tests.support import chaos
from tests.support.arithmetic_runs import assert_exact, settings
from tests.support.chaos import Driver, Schedule, When, play, random_schedule
from tests.support.corpora import make_corpus
from tests.support.gates import LAG
from trainer.history import ledger

STEPS = 60
SAVING, EVALUATING = "saving", "evaluating"  # after every 5th and every 7th step
# One of each kind of event, as few runs as may be: what a run costs is its start.
SCHEDULES: dict[str, Schedule] = {
    "trainer in stage 1, while it saves, while it evaluates": [
        (When(5, stage=1), "trainer"),
        (When(11, SAVING, 0.004), "trainer"),
        (When(24, EVALUATING), "trainer"),
    ],
    "each producer in turn, then both at once": [
        (When(4), "producer-0"),
        (When(14), "producer-1"),
        (When(24, EVALUATING), "both"),
    ],
    "launch.py, everything but it, and it again": [
        (When(3, stage=1), "launcher"),
        (When(13), "all"),
        (When(31, SAVING), "launcher"),
    ],
    "a third producer comes and goes, one is frozen, the trainer is frozen": [
        (When(3), "add"),
        (When(seconds=1.5), "producer-0"),
        (When(seconds=0.5), "remove"),
        (When(12), "stop-producer"),
        (When(26), "stop-trainer"),
    ],
    "the clock set back and forward": [
        (When(4), "clock -7200"),
        (When(6), "producer-0"),
        (When(14), "trainer"),
        (When(20), "clock 86400"),
        (When(22), "launcher"),
    ],
    "random 0": random_schedule(0, 4, STEPS - 10),
}
MORE: dict[str, Schedule] = {
    "trainer in stage 1": [(When(2, stage=1), "trainer"), (When(5, stage=1), "trainer")],
    "trainer while it saves": [
        (When(11, SAVING, 0.004), "trainer"),
        (When(23, SAVING, 0.008), "trainer"),
    ],
    "trainer while it evaluates": [
        (When(9, EVALUATING), "trainer"),
        (When(24, EVALUATING), "trainer"),
    ],
    "each producer in turn": [
        (When(4), "producer-0"),
        (When(14), "producer-1"),
        (When(24), "producer-0"),
    ],
    "both producers at once": [(When(9, EVALUATING), "both"), (When(26), "both")],
    "everything but launch.py": [(When(13), "all"), (When(31, SAVING), "all")],
    "launch.py": [
        (When(3, stage=1), "launcher"),
        (When(17), "launcher"),
        (When(31, SAVING), "launcher"),
    ],
    "the clock set back, forward, and back": [
        (When(20), "clock 86400"),
        (When(22), "launcher"),
        (When(30), "clock -86400"),
        (When(32), "trainer"),
    ],
    "replaced under a live launch.py, then killed": [
        (When(8), "replace"),
        (When(seconds=1.5), "trainer"),
    ],
    **{f"random {seed}": random_schedule(seed, 4, STEPS - 10) for seed in (1, 2, 3)},
}


@contextmanager
def played(root, schedules: dict[str, Schedule]) -> Iterator[dict[str, Future]]:
    """The schedules, four at a time: they mostly sleep."""
    make_corpus(root / "corpus", 41, seconds=lambda i: 0.6 + 0.05 * (i % 9))

    def one(number: int, schedule) -> RunFolder:
        folder = root / f"r{number}"
        # 60 steps of 3 batches, 12 saves, 8 evaluations, 20 epochs; every event comes before the
        # end, as the run waits for it.
        tree = settings(
            folder / "run",
            root / "corpus",
            producers__count=2,
            producers__lease_ttl_s=8.0,
            train__max_steps=STEPS,
            dvae__max_steps=30,
        )
        driver = Driver.create(folder, tree, step_ms=5, make_ms=5)
        try:
            play(driver, schedule)
            run = RunFolder(folder / "run")
            try:
                assert_exact(run)
            except Exception as e:
                raise AssertionError(driver.story(str(e))) from e
            return run
        finally:
            driver.kill_everything()

    with ThreadPoolExecutor(4) as pool:
        futures: dict[str, Future] = {
            name: pool.submit(one, i, s) for i, (name, s) in enumerate(schedules.items())
        }
        yield futures


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    with played(tmp_path_factory.mktemp("kills"), SCHEDULES) as futures:
        yield futures


@pytest.fixture(scope="module")
def more_outcomes(tmp_path_factory):
    with played(tmp_path_factory.mktemp("more"), MORE) as futures:
        yield futures


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SCHEDULES)
def test_nothing_lost_nothing_twice(outcomes, name):
    assert_clean(outcomes[name].result())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", MORE)
def test_nothing_lost_nothing_twice_in_more_schedules(more_outcomes, name):
    assert_clean(more_outcomes[name].result())


def assert_clean(run: RunFolder) -> None:
    assert chaos.lock_is_free(run.path)
    assert not list((run.path / "checkpoints").glob("damaged-*"))


ENDS_A_TRAINER = ("trainer", "all", "launcher")


def test_the_schedules_did_hurt(outcomes):
    """A suite whose kills all came too late would pass in silence: every trainer that was killed at
    a step had a successor that resumed.
    """
    assert_hurt(SCHEDULES, outcomes)


@pytest.mark.slow
def test_more_schedules_did_hurt(more_outcomes):
    assert_hurt(MORE, more_outcomes)


def assert_hurt(schedules: dict[str, Schedule], outcomes: dict[str, Future]) -> None:
    resumed = {name: chaos.resumes(f.result().path) for name, f in outcomes.items()}
    for name, schedule in schedules.items():
        if any(event in ENDS_A_TRAINER and when.in_training for when, event in schedule):
            assert resumed[name], f"{name}: killed in training, and nobody resumed"
    assert len({step for steps in resumed.values() for step in steps}) >= 5, resumed


@pytest.fixture(scope="module")
def killed_at_50(tmp_path_factory):
    """A trainer killed at step 50 of stage 2 under two producers, with every lease logged."""
    root = tmp_path_factory.mktemp("at50")
    make_corpus(root / "corpus", 41, seconds=0.6)
    driver = Driver.create(
        root,
        settings(root / "run", root / "corpus", producers__count=2, train__max_steps=100),
        step_ms=5,
        make_ms=5,
    )
    driver.env["XTTS_CHANNEL_LOG"] = "1"
    driver.gate.limit(2, 50 + LAG)
    driver.launch()
    try:
        driver.wait_for(lambda: driver.trained(2) >= 50, "step 50")
        before = driver.producers()
        driver.signal("trainer", signal.SIGKILL)
        driver.finish()
    finally:
        driver.kill_everything()
    return driver, before


def test_a_killed_trainer_costs_the_producers_nothing(killed_at_50):
    driver, before = killed_at_50
    assert {s.name: s.pid for s in status.read_all(driver.run) if s.role == "producer"} == before, (
        driver.story("producers were restarted")
    )
    lines = ledger.read(driver.run / "ledger.jsonl")
    at = next(i for i, line in enumerate(lines) if "resumed_from" in line)
    assert lines[at + 1]["step"] == lines[at]["resumed_from"] + 1
    assert 45 <= lines[at]["resumed_from"] < 100
    assert_exact(RunFolder(driver.run))


def test_the_first_batch_comes_within_a_second_of_its_lease(killed_at_50):
    """Of a machine that keeps nobody waiting: on this one, as much later as the slowest batch
    before the kill.
    """
    driver, _ = killed_at_50
    events = [json.loads(line) for line in (driver.run / "channel.jsonl").read_text().splitlines()]
    last = max(e["gen"] for e in events)
    first = {
        kind: next(e["time"] for e in events if e["gen"] == last and e["kind"] == kind)
        for kind in ("open", "lease", "data")
    }
    at = {
        kind: {e["lease"]: e["time"] for e in events if e["gen"] < last and e["kind"] == kind}
        for kind in ("lease", "data")
    }
    slowest = max(at["data"][n] - at["lease"][n] for n in at["data"])
    assert first["data"] - first["lease"] <= 1.0 + slowest
    assert first["open"] <= first["lease"] <= first["data"]


def test_the_window_holds(killed_at_50):
    """Leased − trained never exceeds the window, evaluations included."""
    driver, _ = killed_at_50
    window = RunFolder(driver.run).config.transport.high_water_mark
    ahead = released = 0
    for line in (driver.run / "channel.jsonl").read_text().splitlines():
        e = json.loads(line)
        if e["kind"] == "open":
            released = 0
        elif e["kind"] == "release":
            released = e["position"] + 1
        elif e["kind"] == "lease":
            ahead = max(ahead, e["position"] + 1 - released)
    assert 2 <= ahead <= window


@pytest.mark.slow
def test_a_suspended_machine_condemns_nobody(tmp_path):
    """Every process stands still for longer than any deadline that runs then: of a lease, of a
    silence, of the wait for data. All go on, the same ones, with the leases that they had.
    """
    make_corpus(tmp_path / "corpus", 41, seconds=0.6)
    tree = settings(
        tmp_path / "run",
        tmp_path / "corpus",
        producers__count=2,
        producers__lease_ttl_s=3.0,
        transport__data_timeout_s=6.0,
        train__max_steps=30,
    )
    driver = Driver.create(tmp_path, tree, step_ms=5, make_ms=300)  # leases are out at any time
    driver.env["XTTS_CHANNEL_LOG"] = str(tmp_path / "channel.jsonl")
    driver.gate.limit(2, 6 + LAG)
    driver.launch()
    try:
        driver.wait_for(lambda: driver.trained(2) >= 6, "step 6")
        before = {s.name: s.pid for s in status.read_all(driver.run)}
        driver.gate.open()
        driver.stand_still(8.0, random.Random(1))
        driver.finish()
    finally:
        driver.kill_everything()
    assert {s.name: s.pid for s in status.read_all(driver.run)} == before, driver.story("others")
    events = [json.loads(line) for line in (tmp_path / "channel.jsonl").read_text().splitlines()]
    assert not [e for e in events if e["kind"] in ("strike", "peer_frozen")], driver.story("blamed")
    outcomes = {e["outcome"] for e in events if e["kind"] == "lease_end"}
    assert outcomes <= {"accepted", "revoked"}, driver.story(f"{outcomes}")
    assert_exact(RunFolder(driver.run))


def test_a_trainer_that_is_replaced_or_killed_then_leaves_the_producers_alone(tmp_path):
    make_corpus(tmp_path / "corpus", 41, seconds=0.6)
    tree = settings(
        tmp_path / "run", tmp_path / "corpus", producers__count=2, train__max_steps=100_000
    )  # not over before it is replaced
    driver = Driver.create(tmp_path, tree, step_ms=15, make_ms=5)
    driver.launch()
    try:
        driver.wait_for(lambda: driver.step() >= 5, "step 5")
        before, trainer = driver.producers(), driver.pid("trainer")
        driver.replace_trainer()
        driver.wait_for(lambda: driver.pid("trainer") not in (None, trainer), "the new trainer")
        console = driver.config.parent / "console.log"
        driver.wait_for(
            lambda: "has taken over; watching it" in console.read_text(errors="replace"),
            "its adoption",
        )
        driver.wait_for(lambda: driver.step() > 0, "its first step")
        taken_over = driver.step()
        driver.wait_for(lambda: driver.step() >= taken_over + 5, "its steps")
        adopted = driver.pid("trainer")
        driver.signal("trainer", signal.SIGKILL)
        driver.wait_for(lambda: driver.pid("trainer") not in (None, adopted), "its successor")
        driver.wait_for(lambda: driver.step() > taken_over + 5, "the successor's steps")
        assert driver.producers() == before, driver.story("producers were restarted")
        driver.launchers[-1].terminate()
        assert driver.launchers[-1].wait(280) == 143, driver.story("launch.py was told to stop")
        driver.config.write_text(
            yaml.safe_dump({**tree, "train": {**tree["train"], "max_steps": driver.step() + 5}})
        )
        driver.launch()
        driver.finish()
    finally:
        driver.kill_everything()
    assert_exact(RunFolder(driver.run))
