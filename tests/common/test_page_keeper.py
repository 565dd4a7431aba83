"""When a run's page is written: by a process that leaves a line for each of its starts."""

import logging
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.launcher.page import PageKeeper
from common.system.status import StatusFile

DEADLINE_S = 60.0
ROOT = Path(__file__).parents[2]


def writer(run, code=""):
    return (sys.executable, "-c", f"open({str(run / 'pages')!r}, 'a').write('page\\n');{code}")


def wait_for_pages(run, count):
    deadline = time.monotonic() + DEADLINE_S
    while (n := pages(run)) < count:
        assert time.monotonic() < deadline, f"{n} pages of {count}"
        time.sleep(0.02)


def pages(run):
    return len((run / "pages").read_text().split()) if (run / "pages").exists() else 0


def test_after_a_checkpoint_after_samples_and_at_the_end(tmp_path):
    status = StatusFile(tmp_path, "trainer", "trainer")
    with PageKeeper(tmp_path, writer(tmp_path), {}, look_s=0.02, least_s=0.0):
        time.sleep(0.1)
        assert pages(tmp_path) == 0, "nothing new, no page"
        status.update(saved_step=10)
        wait_for_pages(tmp_path, 1)
        (tmp_path / "samples" / "step-00000010").mkdir(parents=True)
        wait_for_pages(tmp_path, 2)
    assert pages(tmp_path) == 3


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
