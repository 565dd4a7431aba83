"""When a run's page is written: by a process that leaves a line for each of its starts."""

import logging
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.launcher import page
from common.launcher.page import PageKeeper
from common.system.status import StatusFile

DEADLINE_S = 60.0
ROOT = Path(__file__).parents[2]


def writer(run, code=""):
    return (sys.executable, "-c", f"open({str(run / 'pages')!r}, 'a').write('page\\n');{code}")


def wait_until(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_for_pages(run, count):
    wait_until(lambda: pages(run) >= count)


def pages(run):
    return len((run / "pages").read_text().split()) if (run / "pages").exists() else 0


def test_after_a_checkpoint_after_samples_and_at_the_end(tmp_path):
    status = StatusFile(tmp_path, "trainer", "trainer")
    with PageKeeper(tmp_path, writer(tmp_path), {}, 0.02, least_s=0.0, share=1.0):
        time.sleep(0.1)
        assert pages(tmp_path) == 0, "nothing new, no page"
        status.update(saved_step=10)
        wait_for_pages(tmp_path, 1)
        (tmp_path / "samples" / "step-00000010").mkdir(parents=True)
        wait_for_pages(tmp_path, 2)
    assert pages(tmp_path) == 3


def test_a_short_run_has_one_page_its_last(tmp_path):
    status, looks = StatusFile(tmp_path, "trainer", "trainer"), []
    keeper = PageKeeper(tmp_path, writer(tmp_path), {}, 0.001, least_s=3600.0)
    mark = keeper._mark
    keeper._mark = lambda: looks.append(1) or mark()
    with keeper:
        for step in (10, 20, 30):
            seen = len(looks)
            status.update(saved_step=step)
            wait_until(lambda seen=seen: len(looks) >= seen + 3)
        assert pages(tmp_path) == 0
    assert pages(tmp_path) == 1


def test_pages_that_take_long_are_few(tmp_path, monkeypatch):
    """One took a minute: the next comes after twenty. Time is what the test says it is."""
    clock, begun = [1000.0], []
    monkeypatch.setattr(page, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    keeper = PageKeeper(tmp_path, writer(tmp_path), {}, 0.001)

    def write():
        begun.append(clock[0])
        clock[0] += 60.0

    keeper._write = write
    steps = iter(range(1, 100_000))

    def mark():
        clock[0] += 5.0  # from look to look
        return (next(steps),)

    keeper._mark = mark
    with keeper:
        wait_until(lambda: len(begun) >= 3)
    assert begun[0] - 1005.0 == page.LEAST_S
    assert [b - a - 60.0 for a, b in zip(begun, begun[1:3], strict=False)] == [1200.0, 1200.0]


def test_at_the_end_also_when_the_run_fails(tmp_path):
    with pytest.raises(KeyboardInterrupt), PageKeeper(tmp_path, writer(tmp_path), {}):
        raise KeyboardInterrupt
    assert pages(tmp_path) == 1


def test_a_page_that_cannot_be_written_is_one_warning(tmp_path, caplog):
    code = "import sys; sys.stderr.write('much\\nno space left'); sys.exit(2)"
    with caplog.at_level(logging.WARNING), PageKeeper(tmp_path, writer(tmp_path, code), {}) as k:
        k._write()
    assert pages(tmp_path) == 2
    assert [r.message for r in caplog.records] == ["report.html was not written: no space left"]


def test_a_writer_that_is_killed_is_a_warning(tmp_path, caplog):
    code = "import os; os.kill(os.getpid(), 9)"
    with PageKeeper(tmp_path, writer(tmp_path, code), {}):
        pass
    assert "report.html was not written: exit status -9" in caplog.text


def test_a_writer_that_hangs_ends_without_its_launcher(tmp_path):
    """A page that is never written: the system ends the process."""
    code = """
import sys, time
from trainer.page import __main__ as page
page.report.write = lambda run: time.sleep(600)
sys.exit(page.main())"""
    argv = (sys.executable, "-c", code, "--run", str(tmp_path), "--deadline", "1")
    found = subprocess.run(argv, cwd=ROOT, timeout=DEADLINE_S, check=False)
    assert found.returncode == -signal.SIGALRM


def test_a_writer_that_is_not_there_is_a_warning(tmp_path, caplog):
    with PageKeeper(tmp_path, ("/no/such/program",), {}):
        pass
    assert "report.html was not written" in caplog.text
