"""Steps that several trainers make: whatever their number, the ledger is the plan and the weights
those of one trainer.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml

from common.run.folder import RunFolder
from tests.support import tiny_runs, together
from tests.support.arithmetic_runs import assert_exact
from tests.support.chaos import Driver, Schedule, When, play, resumes
from tests.support.corpora import make_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(
        tmp_path_factory.mktemp("together") / "corpus", 41, seconds=lambda i: 0.6 + 0.05 * (i % 9)
    )


@pytest.mark.parametrize(
    ("trainers", "producers"), [pytest.param(2, 1, marks=pytest.mark.slow), (3, 2)]
)
def test_the_ledger_is_the_plan_and_the_weights_are_those_of_one_trainer(
    tmp_path, corpus, trainers, producers
):
    assert_exact(together.trained(tmp_path, corpus, trainers, producers))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_goes_on_with_another_number_of_trainers(tmp_path, corpus):
    """Begun with two, it goes on with one, then with three; the launcher is killed each time."""
    tree = together.tree(tmp_path, corpus, 2, 1, dvae__max_steps=4)
    driver = Driver.create(tmp_path, tree, step_ms=2, make_ms=2)

    def go_on_with(driver: Driver, count: str) -> None:
        driver.kill_launcher()
        tree["trainers"]["count"] = int(count)
        driver.config.write_text(yaml.safe_dump(tree))
        driver.launch()

    try:
        play(driver, [(When(9), "1"), (When(26), "3")], act=go_on_with)
        assert_exact(RunFolder(driver.run))
    finally:
        driver.kill_everything()
    said = (tmp_path / "console.log").read_text()
    assert "trainers.count: 2 → 1" in said
    assert "trainers.count: 1 → 3" in said
    assert len(resumes(driver.run)) >= 2


SCHEDULES: dict[str, Schedule] = {
    "followers at a step, then all": [(When(9), "trainer-1"), (When(26), "trainers")],
    "a follower in an evaluation, the first in a save": [
        (When(9, "evaluating"), "trainer-2"),
        (When(26, "saving", 0.004), "trainer"),
    ],
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, corpus):
    """All schedules at once: they mostly sleep."""
    root = tmp_path_factory.mktemp("killed")

    def one(number: int, schedule: Schedule) -> RunFolder:
        folder = root / f"r{number}"
        tree = together.tree(folder, corpus, 3, 2, dvae__max_steps=4)
        driver = Driver.create(folder, tree, step_ms=2, make_ms=2)
        try:
            play(driver, schedule, act=together.hurt_ranks)
            try:
                assert_exact(RunFolder(driver.run))
            except Exception as e:
                raise AssertionError(driver.story(str(e))) from e
            return RunFolder(driver.run)
        finally:
            driver.kill_everything()

    with ThreadPoolExecutor(len(SCHEDULES)) as pool:
        yield {n: pool.submit(one, i, s) for i, (n, s) in enumerate(SCHEDULES.items())}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SCHEDULES)
def test_whoever_is_killed_nothing_is_lost_and_nothing_comes_twice(outcomes, name):
    run = outcomes[name].result()
    assert len(resumes(run.path)) >= 2, "a kill came too late"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_trainers_of_networks_are_one_to_the_bit(tmp_path, corpus):
    """A step of two batches: a + b has no order. Gradients travel over tf.distribute's rings."""
    results = []
    for trainers in (1, 2):
        folder = tmp_path / f"n{trainers}"
        tree = tiny_runs.tiny_tree(folder, corpus) | {
            "trainers": {"count": trainers, "timeout_s": 120.0}
        }
        driver = Driver.create(folder, tree, 0, 0)
        try:
            driver.launch()
            driver.finish()
        finally:
            driver.kill_everything()
        results.append(tiny_runs.result(RunFolder(driver.run)))
    tiny_runs.assert_equal(results[1], results[0])
