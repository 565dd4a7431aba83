"""A GPU that fails while a run trains: one line, and no restart where none helps."""

import pytest

from common.run.folder import RunFolder
from tests.support.arithmetic_runs import assert_exact, settings
from tests.support.arithmetic_step import FAULT
from tests.support.chaos import Driver
from tests.support.corpora import make_corpus

LOST = "INTERNAL: CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered"
SPOILT = "INTERNAL: CUDA_ERROR_ASSERT: device-side assert triggered"
FULL = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 3221225472 bytes"


@pytest.fixture
def failing(tmp_path):
    """fault → the driver of a run whose trainer meets it in update 12 of stage 2."""
    make_corpus(tmp_path / "corpus", 41, seconds=0.6)
    tree = settings(tmp_path / "run", tmp_path / "corpus", producers__count=1, train__max_steps=20)
    driver = Driver.create(tmp_path, tree, step_ms=0, make_ms=0)
    driver.env[FAULT] = str(tmp_path / "fault")

    def begin(text: str) -> Driver:
        (tmp_path / "fault").write_text(f"12 {text}")
        driver.launch()
        return driver

    yield begin
    driver.kill_everything()


def log_of(driver: Driver) -> str:
    return (driver.run / "logs" / "trainer.log").read_text()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param(LOST, "is lost, after", id="lost"),
        pytest.param(FULL, "out of memory on", id="full", marks=pytest.mark.slow),
    ],
)
def test_what_a_restart_does_not_help_ends_the_run_with_one_line(failing, text, says):
    driver = failing(text)
    assert driver.launchers[-1].wait(100) == 1, driver.story("")
    log = log_of(driver)
    [line] = [line for line in log.splitlines() if says in line]
    assert "goes on from step 10, the newest saved" in line
    assert text.split(": ")[1] in line
    assert "Traceback" not in log
    assert log.count("==== ") == 1, "started again"
    driver.launch()
    driver.finish()
    assert_exact(RunFolder(driver.run))


def test_a_process_that_a_gpu_gave_up_is_started_again(failing):
    driver = failing(SPOILT)
    driver.finish()
    log = log_of(driver)
    assert "has given up this process's work" in log
    assert "Traceback" not in log
    assert log.count("==== ") == 2
    assert_exact(RunFolder(driver.run))
