"""Whatever is killed, frozen, added, removed or replaced: the folded ledger is exactly the plan, and the weights are bit-equal."""

from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from common.run import RunFolder
from tests import chaos
from tests.arithmetic_runs import assert_exact, settings
from tests.chaos import Driver, play, random_schedule
from tests.corpora import make_corpus

AT_SAVE, AT_EVAL = -1.0, -2.0
SCHEDULES: dict[str, list[tuple[float, str]]] = {
    "trainer while it saves": [(AT_SAVE, "trainer"), (AT_SAVE, "trainer")],
    "trainer while it evaluates": [(AT_EVAL, "trainer"), (AT_EVAL, "trainer")],
    "each producer in turn": [(0.5, "producer-0"), (0.4, "producer-1"), (0.4, "producer-0")],
    "both producers at once": [(0.6, "both")],
    "both while evaluating": [(AT_EVAL, "both")],
    "everything but launch.py": [(0.7, "all"), (AT_SAVE, "all")],
    "launch.py": [(0.8, "launcher")],
    "launch.py during a save": [(AT_SAVE, "launcher")],
    "a third producer comes and goes": [(0.3, "add"), (1.2, "producer-0"), (0.3, "remove")],
    "a frozen producer": [(0.4, "stop-producer")],
    "a frozen trainer": [(0.4, "stop-trainer")],
    "replaced under a live launch.py": [(0.5, "replace")],
    "replaced, then killed": [(0.5, "replace"), (1.2, "trainer")],
    **{f"random {seed}": random_schedule(seed, 4) for seed in range(10)},
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """All schedules, four at a time: they mostly sleep."""
    root = tmp_path_factory.mktemp("kills")
    make_corpus(root / "corpus", 41, seconds=lambda i: 0.6 + 0.05 * (i % 9))

    def one(number: int, schedule) -> RunFolder:
        folder = root / f"r{number}"
        # 130 steps x 3 batches x 15 ms: 6 s of training, 26 saves, 54 evaluations, 43 epochs.
        tree = settings(folder / "run", root / "corpus", producers__count=2, producers__lease_ttl_s=8.0, train__max_steps=130)
        driver = Driver.create(folder, tree, step_ms=15, make_ms=5)
        try:
            play(driver, schedule, from_stage=1 if number % 4 == 3 else 2)
            run = RunFolder(folder / "run")
            try:
                assert_exact(run)
            except Exception as e:
                raise AssertionError(driver.story(str(e))) from e
            return run
        finally:
            driver.kill_everything()

    with ThreadPoolExecutor(4) as pool:
        futures: dict[str, Future] = {name: pool.submit(one, i, s) for i, (name, s) in enumerate(SCHEDULES.items())}
        yield futures


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", SCHEDULES)
def test_nothing_lost_nothing_twice(outcomes, name):
    run = outcomes[name].result()
    assert chaos.lock_is_free(run.path)
    assert not list((run.path / "checkpoints").glob("damaged-*"))


def test_the_schedules_did_hurt(outcomes):
    """A suite whose kills all came too late would pass in silence."""
    resumed = {name: chaos.resumes(f.result().path) for name, f in outcomes.items()}
    assert sum(bool(r) for r in resumed.values()) >= 10, resumed
    assert len({step for r in resumed.values() for step in r}) >= 5, resumed
