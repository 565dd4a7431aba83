"""Commands that are told to stop: they say so, and it is no error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import yaml

import launch
from common.system import status
from tests.support import page_runs, processes
from tests.support.corpora import make_corpus
from tests.support.tiny_runs import tiny_tree
from trainer.page.facts import stands, warnings

page_run = page_runs.page_run
LATER_S = 200.0  # longer than anything takes that still happens
HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture
def handlers():
    """What `launch.main` sets is set back."""
    before = {sig: signal.getsignal(sig) for sig in HEARD}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
    yield
    for sig, handler in before.items():
        signal.signal(sig, handler)


@pytest.mark.parametrize(
    ("sig", "code", "said"),
    [
        (signal.SIGINT, 130, "interrupted\n"),
        (signal.SIGTERM, 143, "stopped by SIGTERM\n"),
        (signal.SIGHUP, 143, "stopped by SIGHUP\n"),
        (signal.SIGUSR1, 143, "stopped by SIGUSR1\n"),
    ],
)
def test_a_stop_that_was_asked_for_is_no_error(monkeypatch, capsys, handlers, sig, code, said):
    def run(args):
        """What a command says of itself."""
        os.kill(os.getpid(), sig)
        raise AssertionError("not stopped")

    monkeypatch.setitem(launch.COMMANDS, "status", replace(launch.COMMANDS["status"], run=run))
    assert launch.main(["status"]) == code
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_serve_ends_in_order_when_it_is_told_to(page_run, sig):
    command = ("serve", "--run", str(page_run), "--port", "0")
    p = subprocess.Popen(
        [sys.executable, str(processes.ROOT / "launch.py"), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert p.stdout.readline().startswith("http://127.0.0.1:")
        p.send_signal(sig)
        said, errors = p.communicate(timeout=60)
    finally:
        p.kill()
    assert (p.returncode, said, errors) == (0, "ended; the run goes on\n", "")


def test_a_stop_while_tensorflow_is_imported_waits_for_nothing_and_warns_of_nothing(tmp_path):
    corpus = make_corpus(tmp_path / "corpus", 12, seconds=lambda i: 1.0 + i / 100)
    run = tmp_path / "run"
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tiny_tree(tmp_path, corpus)))
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow/__init__.py").write_text(
        "import os, pathlib, time\n"
        f"pathlib.Path({str(tmp_path)!r}, f'importing-{{os.getpid()}}').touch()\n"
        "time.sleep(600)\n"
    )
    with open(tmp_path / "console.txt", "w") as out:
        p = subprocess.Popen(
            [sys.executable, processes.ROOT / "launch.py", "--config", tmp_path / "run.yaml"],
            env={**os.environ, "PYTHONPATH": f"{tmp_path}:{processes.ROOT}"},
            stdout=out,
            stderr=out,
        )
    try:
        deadline = time.monotonic() + LATER_S
        while len(list(tmp_path.glob("importing-*"))) < 2:
            assert time.monotonic() < deadline
            assert p.poll() is None, (tmp_path / "console.txt").read_text()
            time.sleep(0.02)
        p.terminate()
        assert p.wait(LATER_S) == 143
    finally:
        p.kill()
    said = (tmp_path / "console.txt").read_text()
    assert said.endswith(
        f"stopped while starting; the same command goes on; to look at: {run / 'report.html'}\n"
    )
    for role in ("trainer", "producer-0"):
        log = (run / "logs" / f"{role}.log").read_text()
        assert f"INFO {role}: stopped by SIGTERM" in log
        assert "Traceback" not in log
    assert warnings(run) == []
    assert stands(run) == "stopped while starting"
    left = {s.name: s.exit_code for s in status.read_all(run)}
    assert left == {"trainer": 143, "producer-0": 143}
