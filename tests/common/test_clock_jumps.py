"""The clock on the wall is set by hours while a run works: who lives, how old a report is, and
whose word counts do not depend on it.
"""

import ast
import os
import time
from pathlib import Path

import psutil._pslinux
import pytest

from common.system import lock, status
from tests.support.arithmetic_runs import arithmetic_run
from tests.support.processes import ROOT

# What people read, what another host compares at its own risk, and a number that only has to be
# larger than a count of starts.
FOR_PEOPLE = {
    "common/run/folder.py",
    "common/system/lock.py",
    "common/system/status.py",
    "producer/corpus/journal.py",
    "producer/serve.py",
    "trainer/__main__.py",
    "trainer/feed.py",
    "trainer/history/judgements.py",
    "trainer/report/board.py",
    "trainer/report/observe.py",
    "trainer/report/tensorboard.py",
}


@pytest.fixture(params=[-7200.0, 7200.0], ids=["back", "forward"])
def set_clock(request, monkeypatch):
    """Sets the clock, and with it what the kernel says of when the machine was started."""
    real, boot = time.time, psutil._pslinux.boot_time

    def change() -> None:
        monkeypatch.setattr(time, "time", lambda: real() + request.param)
        monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: boot() + request.param)

    return change


def test_a_process_is_the_one_that_it_was(tmp_path, set_clock):
    pid, created = lock.identity()
    held = lock.lock(tmp_path / "lock", "trainer")
    file = status.StatusFile(tmp_path, "trainer", "trainer")
    set_clock()
    assert lock.is_alive(pid, created)
    by = lock.holder(tmp_path / "lock")
    assert not by.leaving
    assert " since " in str(by)
    assert file.value.alive
    assert not lock.is_alive(pid, created - 0.5), "another process that had its pid"
    held.release()


def test_a_process_that_ended_is_gone(tmp_path, set_clock):
    set_clock()
    assert not lock.is_alive(os.getpid(), 1.0)
    assert str(lock.Holder(2**22 - 1, 12.0, "trainer")) == f"trainer (pid {2**22 - 1})"


def test_a_report_is_as_old_as_it_is(tmp_path, set_clock):
    status.StatusFile(tmp_path, "trainer", "trainer")
    set_clock()
    age_s = status.read(tmp_path, "trainer").age_s
    assert 0 <= age_s < 60


def test_a_report_of_another_machine_is_read_by_the_wall(tmp_path):
    status.StatusFile(tmp_path, "trainer", "trainer")
    elsewhere = status.Status("trainer", "trainer", boot="x", clock=1e9, time=time.time() - 100)
    assert 100 <= elsewhere.age_s < 160


def test_the_sampler_believes_the_trainer_that_is_done(tmp_path, set_clock):
    """Set back, its word would be of before the run began, and the samples' process would stay."""
    began = lock.identity()[1]
    set_clock()
    status.StatusFile(tmp_path, "trainer", "trainer").update(phase=status.DONE)
    assert status.trainer_is_done(tmp_path, began)


def test_a_generation_is_above_the_last_one(tmp_path, set_clock):
    """Where the file is damaged too: producers that saw a higher one would listen no more."""
    run = arithmetic_run(tmp_path, 12)
    (run.path / "ledger.jsonl").touch()
    first = [run.next_generation()]
    time.sleep(0.01)  # a start takes longer than the millisecond by which they are counted then
    first.append(run.next_generation())
    assert first[1] == first[0] + 1
    set_clock()
    (run.path / "generation").write_text("1 damaged")
    assert run.next_generation() > first[1]
    (run.path / "generation").unlink()
    assert run.next_generation() > first[1]


def test_nothing_waits_by_the_clock_on_the_wall():
    found = set()
    for folder in ("common", "producer", "trainer"):
        for file in Path(ROOT, folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Attribute) and ast.unparse(node) == "time.time":
                    found.add(str(file.relative_to(ROOT)))
    assert found == FOR_PEOPLE
