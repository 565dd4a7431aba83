"""Commands that are told to stop: they say so, and it is no error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

import launch
from tests.support import page_runs, processes

page_run = page_runs.page_run
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
