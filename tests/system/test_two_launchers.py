"""Several launchers of one run at once, at its creation: one wins, the others say who."""

import time

from common.run.folder import RunFolder
from tests.support.arithmetic_runs import assert_exact, settings
from tests.support.chaos import Driver
from tests.support.corpora import make_corpus

LATER_S = 200.0  # longer than anything takes that still happens


def until(condition, driver: Driver) -> None:
    deadline = time.monotonic() + LATER_S
    while not condition():
        assert time.monotonic() < deadline, driver.story("waited in vain")
        time.sleep(0.02)


def test_one_launcher_wins_and_the_others_name_it(tmp_path):
    make_corpus(tmp_path / "corpus", 12, seconds=0.6)
    tree = settings(tmp_path / "run", tmp_path / "corpus", producers__count=1, train__max_steps=8)
    driver = Driver.create(tmp_path, tree, step_ms=0, make_ms=0)
    driver.gate.limit(2, 2)  # the winner stands until the others were answered
    try:
        for _ in range(3):
            driver.launch()
        until(lambda: sum(p.poll() is None for p in driver.launchers) <= 1, driver)
        [winner] = [p for p in driver.launchers if p.poll() is None]
        driver.launchers.append(winner)
        losers = [p for p in driver.launchers if p is not winner]
        assert [p.returncode for p in losers] == [2, 2], driver.story("")
        said = (tmp_path / "console.log").read_text()
        assert said.count(f"in use by launch.py (pid {winner.pid} ") == 2, said
        assert "Traceback" not in said
        driver.finish()
    finally:
        driver.kill_everything()
    assert_exact(RunFolder(driver.run))
