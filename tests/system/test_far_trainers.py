"""Trainers that are started by a command each, as on several hosts, and meet over tcp."""

from __future__ import annotations

import signal

import pytest

from common.run.folder import RunFolder
from tests.support import far_trainers
from tests.support.arithmetic_runs import assert_exact
from tests.support.chaos import When, play, resumes
from tests.support.corpora import make_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(
        tmp_path_factory.mktemp("far") / "corpus", 41, seconds=lambda i: 0.6 + 0.05 * (i % 9)
    )


@pytest.mark.timeout(300)
def test_two_commands_make_one_run_whichever_trainer_is_killed(tmp_path, corpus):
    """The second command comes first, and waits for the run. Both trainers are killed, one after
    the other: each is started again by its own command, and both commands end with the run.
    """
    driver = far_trainers.driver(tmp_path, corpus, 2)
    try:
        far_trainers.add(driver, "--rank", "1")
        play(
            driver,
            [(When(9), "trainer-1"), (When(26), "trainer")],
            act=lambda driver, name: driver.signal(name, signal.SIGKILL),
        )
        assert_exact(RunFolder(driver.run))
        assert [p.returncode for p in driver.extra] == [0]
        assert len(resumes(driver.run)) >= 2, driver.story("a kill came too late")
    finally:
        far_trainers.end(driver)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_command_for_all_tasks_of_slurm(tmp_path, corpus):
    driver = far_trainers.driver(tmp_path, corpus, 3)
    try:
        for rank in (2, 0, 1):
            slurm = {"SLURM_PROCID": str(rank), "SLURM_NTASKS": "3"}
            far_trainers.add(driver, "--slurm", "--config", str(driver.config), **slurm)
        codes = [p.wait(280) for p in driver.extra]
        assert codes == [0, 0, 0], driver.story("a task failed")
        assert_exact(RunFolder(driver.run))
    finally:
        far_trainers.end(driver)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_stop_on_the_first_host_ends_all_and_the_same_commands_go_on(tmp_path, corpus):
    driver = far_trainers.driver(tmp_path, corpus, 2)
    try:
        driver.gate.limit(2, 12)
        driver.launch()
        far_trainers.add(driver, "--rank", "1")
        driver.wait_for(lambda: driver.trained(2) >= 8, "step 8")
        driver.launchers[-1].send_signal(signal.SIGINT)
        assert driver.launchers[-1].wait(120) == 130
        assert driver.extra.pop().wait(120) in (130, 143)
        driver.launch()
        far_trainers.add(driver, "--rank", "1")
        driver.finish()
        assert_exact(RunFolder(driver.run))
        assert len(resumes(driver.run)) == 1
    finally:
        far_trainers.end(driver)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_trainer_that_nobody_starts_is_named_and_the_run_ends(tmp_path, corpus):
    driver = far_trainers.driver(tmp_path, corpus, 3, trainers__join_s=20.0)
    try:
        driver.launch()
        far_trainers.add(driver, "--rank", "2")
        codes = [p.wait(200) for p in (*driver.launchers, *driver.extra)]
    finally:
        far_trainers.end(driver)
    said = (tmp_path / "console.log").read_text()
    assert codes == [1, 1], said
    assert "trainer-1 did not come within 20 s: start it on its host" in said
    assert "Traceback" not in said
