"""The supervisor over real processes: restarts, stopping, adoption, and nobody left behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from common import lock, status
from common.process import ProcessSpec, _header
from tests import processes

pytestmark = pytest.mark.timeout(60)


def until(condition, timeout_s: float = 10.0):
    """The condition's first true value; fails after the timeout."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)
    return value


def working(run: Path, name: str) -> int | None:
    """The pid of a child that is past its start."""
    s = status.read(run, name)
    return s.pid if s is not None and s.alive and s.phase != "starting" else None


def pids(run: Path, name: str) -> list[int]:
    """Every pid the child has had."""
    path = run / f"{name}.starts"
    return [int(x) for x in path.read_text().split()] if path.exists() else []


def gone(*numbers: int) -> bool:
    """No process of these pids runs; zombies of an init that does not reap do not count."""
    return not any(lock.is_alive(n) for n in numbers)


@pytest.fixture
def launch(tmp_path):
    """Start launchers; whatever they leave behind is killed at the end."""
    started = []

    def start(*children: str, backoff_s: float = 0.2):
        env = {**os.environ, "BACKOFF_S": str(backoff_s)}
        started.append(processes.start_launcher(tmp_path, *children, env=env))
        return started[-1]

    yield start
    for p in started:
        if p.poll() is None:
            p.kill()
        p.stdout.close()
        p.wait()
    for path in tmp_path.glob("*.starts"):
        for pid in map(int, path.read_text().split()):
            if not gone(pid) and "processes.py" in " ".join(psutil.Process(pid).cmdline()):
                os.kill(pid, signal.SIGKILL)


def finish(p, timeout_s: float = 20.0) -> tuple[int, str]:
    out, _ = p.communicate(timeout=timeout_s)
    return p.returncode, out


def test_done_ends_the_program_and_a_producer_that_stays_is_told(launch, tmp_path, monkeypatch):
    code, out = finish(launch("trainer:trainer:exit-0-1", "producer-0:producer:exit-0-1.5"))
    assert code == 0
    assert "killed" not in out


def test_killed_producer_is_restarted_with_the_message(launch, tmp_path):
    p = launch("trainer:trainer:wait", "producer-0:producer:wait", backoff_s=1.0)
    first = until(lambda: working(tmp_path, "producer-0"))
    os.kill(first, signal.SIGKILL)
    until(lambda: working(tmp_path, "producer-0") not in (None, first))
    p.send_signal(signal.SIGTERM)
    code, out = finish(p)
    assert code == 143
    assert "producer-0 killed by signal 9; restart 1 of 3 in 1 s" in out
    assert gone(*pids(tmp_path, "producer-0"), *pids(tmp_path, "trainer"))


def test_trainer_without_progress_is_started_four_times(launch, tmp_path):
    code, out = finish(launch("trainer:trainer:die", "producer-0:producer:wait"), 30)
    assert code == 1
    assert len(pids(tmp_path, "trainer")) == 4
    assert "restart 3 of 3" in out
    assert "after 3 restarts without progress" in out
    assert gone(*pids(tmp_path, "producer-0"))


def test_trainer_with_progress_is_restarted_without_limit(launch, tmp_path):
    code, out = finish(launch("trainer:trainer:advance-6"), 30)
    assert (code, len(pids(tmp_path, "trainer"))) == (0, 6)
    assert "restart 2 of" not in out


@pytest.mark.parametrize(
    ("behaviour", "code", "words"),
    [("raise-bad", 2, "the input is bad"), ("raise-hopeless", 1, "a restart would not help"), ("raise-memory", 1, "MemoryError: full")],
)
def test_what_cannot_get_better_is_not_restarted(launch, tmp_path, behaviour, code, words):
    got, out = finish(launch(f"trainer:trainer:{behaviour}", "producer-0:producer:wait"))
    assert (got, len(pids(tmp_path, "trainer"))) == (code, 1)
    assert words in out
    assert "Traceback" not in out


def test_bad_input_of_a_producer_ends_the_program(launch, tmp_path):
    code, _ = finish(launch("trainer:trainer:wait", "producer-0:producer:wait", "producer-1:producer:raise-bad"))
    assert code == 2
    assert gone(*pids(tmp_path, "trainer"), *pids(tmp_path, "producer-0"))


def test_hopeless_producer_is_given_up_while_another_works(launch, tmp_path):
    p = launch("trainer:trainer:exit-0-2", "producer-0:producer:exit-0-2", "producer-1:producer:raise-hopeless")
    code, out = finish(p)
    assert code == 0
    assert "going on with producer-0" in out


def test_last_producer_hopeless_stops_the_trainer_which_saves(launch, tmp_path):
    code, out = finish(launch("trainer:trainer:wait-0.2:save=5", "producer-0:producer:raise-hopeless"))
    assert code == 1
    assert status.read(tmp_path, "trainer").saved_step == 1


def test_a_producer_that_leaves_by_itself_is_not_restarted(launch, tmp_path):
    p = launch("trainer:trainer:exit-0-3", "producer-0:producer:wait", "producer-1:producer:exit-0-3")
    os.kill(until(lambda: working(tmp_path, "producer-0")), signal.SIGTERM)
    code, out = finish(p)
    assert (code, len(pids(tmp_path, "producer-0"))) == (0, 1)
    assert "producer-0 was told to leave (exited with 143); not restarted" in out


@pytest.mark.parametrize(("sig", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)])
def test_stop_signals(launch, tmp_path, sig, code):
    p = launch("trainer:trainer:wait-0.5:save=5", "producer-0:producer:wait")
    until(lambda: working(tmp_path, "trainer") and working(tmp_path, "producer-0"))
    began = time.monotonic()
    p.send_signal(sig)
    got, out = finish(p)
    assert got == code
    assert time.monotonic() - began < 5
    assert status.read(tmp_path, "trainer").saved_step == 1
    assert len(out.splitlines()) <= 20
    assert "Traceback" not in out
    assert gone(*pids(tmp_path, "trainer"), *pids(tmp_path, "producer-0"))


def test_a_save_gets_the_longer_deadline_and_no_more(launch, tmp_path):
    p = launch("trainer:trainer:wait-30:grace=0.5:save=2")
    until(lambda: working(tmp_path, "trainer"))
    began = time.monotonic()
    p.send_signal(signal.SIGTERM)
    code, out = finish(p)
    assert code == 143
    assert 1.9 < time.monotonic() - began < 4
    assert "trainer did not leave within 2 s: killed" in out


@pytest.mark.parametrize("behaviour", ["busy", "deaf"])
def test_a_child_that_does_not_leave_is_killed(launch, tmp_path, behaviour):
    p = launch(f"trainer:trainer:{behaviour}:grace=1")
    until(lambda: pids(tmp_path, "trainer"))
    p.send_signal(signal.SIGTERM)
    code, _ = finish(p, 8)
    assert code == 143
    assert gone(*pids(tmp_path, "trainer"))


def test_second_ctrl_c_kills_at_once_but_a_doubled_one_counts_once(launch, tmp_path):
    p = launch("trainer:trainer:wait-20:save=30", "producer-0:producer:wait")
    until(lambda: working(tmp_path, "trainer"))
    p.send_signal(signal.SIGINT)
    time.sleep(0.2)
    p.send_signal(signal.SIGINT)
    time.sleep(0.6)
    assert p.poll() is None
    p.send_signal(signal.SIGINT)
    began = time.monotonic()
    code, out = finish(p)
    assert code == 130
    assert time.monotonic() - began < 1.5
    assert "second Ctrl-C" in out
    assert gone(*pids(tmp_path, "trainer"), *pids(tmp_path, "producer-0"))


def test_sigkill_of_the_supervisor_leaves_nobody_and_nothing_saved(launch, tmp_path):
    p = launch("trainer:trainer:wait-1:save=30", "producer-0:producer:wait", "producer-1:producer:busy")
    until(lambda: working(tmp_path, "trainer") and working(tmp_path, "producer-0") and pids(tmp_path, "producer-1"))
    p.kill()
    everyone = [n for name in ("trainer", "producer-0", "producer-1") for n in pids(tmp_path, name)]
    until(lambda: gone(*everyone[:2]), 2)
    until(lambda: gone(*everyone), 10)
    assert status.read(tmp_path, "trainer").saved_step == 0
    assert "the supervisor died" in (tmp_path / "logs" / "trainer.log").read_text()


def test_replaced_trainer_is_adopted_and_restarted_when_it_dies(launch, tmp_path):
    p = launch("trainer:trainer:wait-0.2:save=5", "producer-0:producer:wait")
    first = until(lambda: working(tmp_path, "trainer"))
    producer = until(lambda: working(tmp_path, "producer-0"))
    os.kill(first, signal.SIGUSR1)
    until(lambda: gone(first))
    other = processes.start_child(tmp_path, "trainer", "wait")
    try:
        until(lambda: working(tmp_path, "trainer") == other.pid)
        time.sleep(1.0)
        assert pids(tmp_path, "trainer") == [first, other.pid]
        other.kill()
        other.wait()
        third = until(lambda: working(tmp_path, "trainer"), 10)
        assert third not in (first, other.pid)
        assert working(tmp_path, "producer-0") == producer
    finally:
        other.stdout.close()
    p.send_signal(signal.SIGTERM)
    code, out = finish(p)
    assert code == 143
    assert f"pid {other.pid} has taken over" in out


def test_adopted_trainer_that_finishes_ends_the_program(launch, tmp_path):
    p = launch("trainer:trainer:wait")
    first = until(lambda: working(tmp_path, "trainer"))
    os.kill(first, signal.SIGUSR1)
    until(lambda: gone(first))
    other = processes.start_child(tmp_path, "trainer", "exit-0-2")
    other.communicate(timeout=10)
    assert finish(p)[0] == 0


def test_grandchildren_go_with_a_killed_child(launch, tmp_path):
    p = launch("trainer:trainer:family:grace=5")
    grandchild = int(until(lambda: (tmp_path / "grandchild").exists() and (tmp_path / "grandchild").read_text()))
    p.send_signal(signal.SIGINT)
    time.sleep(0.7)
    finish(p)
    until(lambda: gone(grandchild), 5)


def test_a_log_begins_with_what_the_process_got(tmp_path):
    spec = ProcessSpec("p", "producer", ("true",), tmp_path / "p.log", env={"CUDA_VISIBLE_DEVICES": "GPU-1", "XLA_FLAGS": "--a=1 --b=2"})
    bare = ProcessSpec("q", "producer", ("true",), tmp_path / "q.log", env={"XLA_FLAGS": None})
    first, second = (_header(s, 3).split(" ", 3)[3] for s in (spec, bare))
    assert first == "start 3 of p: CUDA_VISIBLE_DEVICES=GPU-1 XLA_FLAGS='--a=1 --b=2' true\n"
    assert second == "start 3 of q: true\n"


def test_console_shows_errors_not_tracebacks_and_the_log_has_both(launch, tmp_path):
    code, out = finish(launch("trainer:trainer:raise-bug:restarts=0"))
    assert code == 1
    assert "ERROR trainer: ValueError: a bug" in out
    assert "Traceback" not in out
    log = (tmp_path / "logs" / "trainer.log").read_text()
    assert "Traceback" in log
    assert log.startswith("==== ")
