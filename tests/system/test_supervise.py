"""The supervisor over real processes: restarts, stopping, adoption, and nobody left behind.

What has to happen in an order waits for what comes first, and every deadline is far off: a busy
machine takes seconds for what takes milliseconds elsewhere. Where a deadline itself is looked at,
the console says which one it was.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from common.launcher.child import ProcessSpec, _header
from common.system import lock, status
from common.system.files import write_atomically
from tests.support import processes

LATER_S = 200.0  # longer than anything takes that still happens


def until(condition, timeout_s: float = LATER_S):
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

    def start(*children: str, backoff_s: float = 0.05, double_s: float = 0.5):
        env = {
            **os.environ,
            "BACKOFF_S": str(backoff_s),
            "DOUBLE_S": str(double_s),
            "ORPHAN_S": "2",
        }
        started.append(processes.start_launcher(tmp_path, *children, env=env))
        return started[-1]

    yield start
    for p in started:
        if p.poll() is None:
            p.kill()
        p.wait()
    for path in tmp_path.glob("*.starts"):
        for pid in map(int, path.read_text().split()):
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                if not gone(pid) and "processes.py" in " ".join(psutil.Process(pid).cmdline()):
                    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def said(tmp_path):
    """What the launcher has said so far."""
    return lambda: (tmp_path / "console.txt").read_text()


@pytest.fixture
def later(tmp_path):
    """Put the launcher's clock ahead by so many seconds."""
    return lambda seconds: write_atomically(tmp_path / "ahead", str(seconds))


@pytest.fixture
def finish(said):
    """Wait for a launcher's end; its exit code and what it said."""
    return lambda p: (p.wait(LATER_S), said())


def test_done_ends_the_program_and_a_producer_that_stays_is_told(launch, finish, tmp_path):
    p = launch("trainer:trainer:until-done", "producer-0:producer:wait:grace=120:leave=0.5")
    until(lambda: working(tmp_path, "trainer") and working(tmp_path, "producer-0"))
    (tmp_path / "done").touch()
    code, out = finish(p)
    assert code == 0
    assert "killed" not in out
    assert status.read(tmp_path, "producer-0").exit_code == 143


def test_c35_killed_producer_is_restarted_with_the_message(launch, finish, tmp_path):
    p = launch("trainer:trainer:wait", "producer-0:producer:wait", backoff_s=1.0)
    first = until(lambda: working(tmp_path, "producer-0"))
    os.kill(first, signal.SIGKILL)
    until(lambda: working(tmp_path, "producer-0") not in (None, first))
    p.send_signal(signal.SIGTERM)
    code, out = finish(p)
    assert code == 143
    assert "producer-0 killed by signal 9; restart 1 of 3 in 1 s" in out
    assert gone(*pids(tmp_path, "producer-0"), *pids(tmp_path, "trainer"))


def test_trainer_without_progress_is_started_four_times(launch, finish, tmp_path):
    code, out = finish(launch("trainer:trainer:die", "producer-0:producer:wait"))
    assert code == 1
    assert len(pids(tmp_path, "trainer")) == 4
    assert "restart 3 of 3" in out
    assert "after 3 restarts without progress" in out
    assert gone(*pids(tmp_path, "producer-0"))


def test_trainer_with_progress_is_restarted_without_limit(launch, finish, tmp_path):
    code, out = finish(launch("trainer:trainer:advance-6"))
    assert (code, len(pids(tmp_path, "trainer"))) == (0, 6)
    assert "restart 2 of" not in out


def test_a_producer_that_makes_batches_is_restarted_without_limit(launch, finish, tmp_path):
    p = launch("trainer:trainer:until-done", "producer-0:producer:make-5")
    until(lambda: len(pids(tmp_path, "producer-0")) == 6)
    (tmp_path / "done").touch()
    code, out = finish(p)
    assert code == 0
    assert "restart 2 of" not in out


@pytest.mark.parametrize(
    ("behaviour", "code", "words"),
    [
        ("raise-bad", 2, "the input is bad"),
        ("raise-hopeless", 1, "a restart would not help"),
        ("raise-memory", 1, "MemoryError: full"),
    ],
)
def test_what_cannot_get_better_is_not_restarted(launch, finish, tmp_path, behaviour, code, words):
    got, out = finish(launch(f"trainer:trainer:{behaviour}", "producer-0:producer:wait"))
    assert (got, len(pids(tmp_path, "trainer"))) == (code, 1)
    assert words in out
    assert "Traceback" not in out


def test_bad_input_of_a_producer_ends_the_program(launch, finish, tmp_path):
    code, _ = finish(
        launch("trainer:trainer:wait", "producer-0:producer:wait", "producer-1:producer:raise-bad")
    )
    assert code == 2
    assert gone(*pids(tmp_path, "trainer"), *pids(tmp_path, "producer-0"))


def test_hopeless_producer_is_given_up_while_another_works(launch, finish, said, tmp_path):
    p = launch(
        "trainer:trainer:until-done",
        "producer-0:producer:until-done",
        "producer-1:producer:raise-hopeless",
    )
    until(lambda: "a restart would not help; going on with producer-0" in said())
    (tmp_path / "done").touch()
    assert finish(p)[0] == 0


def test_last_producer_hopeless_stops_the_trainer_which_saves(launch, finish, tmp_path):
    code, out = finish(
        launch("trainer:trainer:wait-0.2:save=5", "producer-0:producer:late-raise-hopeless")
    )
    assert code == 1
    assert status.read(tmp_path, "trainer").saved_step == 1


@pytest.mark.parametrize("behaviour", ["raise-bad", "raise-hopeless", "die"])
def test_without_an_optional_process_the_others_go_on(launch, finish, said, tmp_path, behaviour):
    p = launch(
        "trainer:trainer:until-done",
        "producer-0:producer:until-done",
        f"sampler:sampler:{behaviour}:restarts=1:optional=1",
    )
    until(lambda: "going on without it; see" in said())
    until(lambda: working(tmp_path, "trainer") and working(tmp_path, "producer-0"))
    (tmp_path / "done").touch()
    code, out = finish(p)
    assert code == 0
    assert out.count("going on without it; see") == 1
    assert len(pids(tmp_path, "sampler")) == (2 if behaviour == "die" else 1)


def test_an_optional_process_may_end_its_work_after_the_main_one(launch, finish, tmp_path):
    p = launch("trainer:trainer:until-done", "sampler:sampler:until-later:optional=1:leave=90")
    until(lambda: working(tmp_path, "sampler"))
    trainer = until(lambda: working(tmp_path, "trainer"))
    (tmp_path / "done").touch()
    until(lambda: gone(trainer))
    (tmp_path / "later").touch()
    assert finish(p)[0] == 0
    assert status.read(tmp_path, "sampler").exit_code == 0


def test_an_optional_process_is_not_waited_for_longer_than_it_may_take(launch, finish, tmp_path):
    p = launch("trainer:trainer:until-done", "sampler:sampler:wait:optional=1:leave=1")
    until(lambda: working(tmp_path, "sampler") and working(tmp_path, "trainer"))
    (tmp_path / "done").touch()
    assert finish(p)[0] == 0
    assert status.read(tmp_path, "sampler").exit_code == 143


def test_a_replaced_trainer_alone_takes_its_company_along(launch, finish, tmp_path):
    p = launch("trainer:trainer:wait:lock=none", "sampler:sampler:wait:optional=1:leave=600")
    until(lambda: working(tmp_path, "sampler"))
    os.kill(until(lambda: working(tmp_path, "trainer")), signal.SIGUSR1)
    code, out = finish(p)
    assert code == 0
    assert gone(*pids(tmp_path, "sampler"))


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_producer_that_leaves_by_itself_is_not_restarted(launch, finish, said, tmp_path, sig):
    p = launch(
        "trainer:trainer:until-done", "producer-0:producer:wait", "producer-1:producer:until-done"
    )
    os.kill(until(lambda: working(tmp_path, "producer-0")), sig)
    until(lambda: "producer-0 was asked to stop (exited with 143); not restarted" in said())
    (tmp_path / "done").touch()
    assert finish(p)[0] == 0
    assert len(pids(tmp_path, "producer-0")) == 1


@pytest.mark.parametrize(
    ("sig", "code"),
    [
        (signal.SIGINT, 130),
        (signal.SIGTERM, 143),
        (signal.SIGHUP, 143),
        (signal.SIGUSR1, 143),
        (signal.SIGUSR2, 143),
    ],
)
def test_s1_stop_signals_and_warnings_of_a_batch_system(launch, finish, tmp_path, sig, code):
    """Nobody waits for a deadline: the children leave as soon as they are told."""
    p = launch("trainer:trainer:wait-0.5:grace=120:save=120", "producer-0:producer:wait:grace=120")
    until(lambda: working(tmp_path, "trainer") and working(tmp_path, "producer-0"))
    began = time.monotonic()
    p.send_signal(sig)
    got, out = finish(p)
    assert got == code
    assert time.monotonic() - began < 120
    assert "killed" not in out
    assert status.read(tmp_path, "trainer").saved_step == 1
    assert len(out.splitlines()) <= 20
    assert "Traceback" not in out
    assert gone(*pids(tmp_path, "trainer"), *pids(tmp_path, "producer-0"))


@pytest.mark.parametrize(
    "trainer", ["wait-600:grace=600:save=1200", "wait-600+1200:grace=600:save=30"]
)
def test_s7_a_save_gets_the_longer_deadline_and_no_more(
    launch, finish, said, later, tmp_path, trainer
):
    """That of the program, or the one that the trainer tells."""
    p = launch(f"trainer:trainer:{trainer}")
    until(lambda: working(tmp_path, "trainer"))
    p.send_signal(signal.SIGTERM)
    until(lambda: status.read(tmp_path, "trainer").phase == "saving")
    later(900)
    until(lambda: "trainer is saving; it has up to 1200 s" in said())
    assert p.poll() is None
    later(1300)
    code, out = finish(p)
    assert code == 143
    assert "trainer did not stop within 1200 s: killed; the save that it was writing is lost" in out


@pytest.mark.parametrize("behaviour", ["busy", "deaf"])
def test_a_child_that_does_not_leave_is_killed(launch, finish, tmp_path, behaviour):
    p = launch(f"trainer:trainer:{behaviour}:grace=1")
    until(lambda: pids(tmp_path, "trainer"))
    p.send_signal(signal.SIGTERM)
    code, out = finish(p)
    assert code == 143
    assert "trainer did not stop within 1 s: killed" in out
    assert gone(*pids(tmp_path, "trainer"))


def test_second_ctrl_c_kills_at_once_but_a_doubled_one_counts_once(
    launch, finish, said, later, tmp_path
):
    p = launch(
        "trainer:trainer:wait-600:grace=6000:save=6000",
        "producer-0:producer:wait:grace=6000",
        double_s=600,
    )
    until(lambda: working(tmp_path, "trainer"))
    p.send_signal(signal.SIGINT)
    until(lambda: "Ctrl-C: stopping" in said())
    p.send_signal(signal.SIGINT)
    time.sleep(0.5)  # it has been heard, unless the launcher is slower than that
    assert p.poll() is None
    assert "second Ctrl-C" not in said()
    later(700)
    p.send_signal(signal.SIGINT)
    code, out = finish(p)
    assert code == 130
    assert "second Ctrl-C" in out
    assert status.read(tmp_path, "trainer").saved_step == 0
    assert gone(*pids(tmp_path, "trainer"), *pids(tmp_path, "producer-0"))


def test_c37_sigkill_of_the_supervisor_leaves_nobody_and_nothing_saved(launch, tmp_path):
    p = launch(
        "trainer:trainer:wait-1:save=30", "producer-0:producer:wait", "producer-1:producer:busy"
    )
    until(
        lambda: (
            working(tmp_path, "trainer")
            and working(tmp_path, "producer-0")
            and pids(tmp_path, "producer-1")
        )
    )
    p.kill()
    everyone = [n for name in ("trainer", "producer-0", "producer-1") for n in pids(tmp_path, name)]
    until(lambda: gone(*everyone))
    assert status.read(tmp_path, "trainer").saved_step == 0
    logs = {
        name: (tmp_path / "logs" / f"{name}.log").read_text()
        for name in ("trainer", "producer-0", "producer-1")
    }
    assert all("the supervisor died" in text for text in logs.values())
    assert "forced out" in logs["producer-1"]


def test_replaced_trainer_is_adopted_and_restarted_when_it_dies(launch, finish, said, tmp_path):
    p = launch("trainer:trainer:wait-0.2:save=5", "producer-0:producer:wait")
    first = until(lambda: working(tmp_path, "trainer"))
    producer = until(lambda: working(tmp_path, "producer-0"))
    os.kill(first, signal.SIGUSR1)
    until(lambda: gone(first))
    other = processes.start_child(tmp_path, "trainer", "wait")
    try:
        until(lambda: working(tmp_path, "trainer") == other.pid)
        until(lambda: f"pid {other.pid} has taken over" in said())
        assert pids(tmp_path, "trainer") == [first, other.pid]
        other.kill()
        other.wait()
        third = until(lambda: working(tmp_path, "trainer"))
        assert third not in (first, other.pid)
        assert working(tmp_path, "producer-0") == producer
    finally:
        other.stdout.close()
    p.send_signal(signal.SIGTERM)
    assert finish(p)[0] == 143


def test_a_trainer_that_is_at_work_already_is_adopted(launch, finish, said, tmp_path):
    """That of `trainer --replace`, whose launcher outlived the run's own."""
    other = processes.start_child(tmp_path, "trainer", "wait-0.2")
    until(lambda: working(tmp_path, "trainer") == other.pid)
    p = launch("trainer:trainer:wait", "producer-0:producer:wait")
    until(lambda: f"trainer: pid {other.pid} is at work already; watching it" in said())
    until(lambda: working(tmp_path, "producer-0"))
    assert pids(tmp_path, "trainer") == [other.pid]
    threading.Thread(target=other.communicate).start()
    p.send_signal(signal.SIGTERM)
    assert finish(p)[0] == 143
    assert other.wait(LATER_S) == 143
    assert status.read(tmp_path, "trainer").saved_step == 1


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_trainer_alone_that_others_stop_has_not_failed(launch, finish, tmp_path, sig):
    """The run's launcher adopted it, and was told to stop."""
    p = launch("trainer:trainer:wait-0.2:lock=none:restarts=0", "sampler:sampler:wait:optional=1")
    until(lambda: working(tmp_path, "sampler"))
    os.kill(until(lambda: working(tmp_path, "trainer")), sig)
    code, out = finish(p)
    assert code == (143 if sig == signal.SIGTERM else 130)
    assert "trainer was asked to stop: stopping" in out
    assert "exited with" not in out
    assert gone(*pids(tmp_path, "sampler"))


def test_adopted_trainer_that_finishes_ends_the_program(launch, finish, said, tmp_path):
    p = launch("trainer:trainer:wait")
    first = until(lambda: working(tmp_path, "trainer"))
    os.kill(first, signal.SIGUSR1)
    until(lambda: gone(first))
    other = processes.start_child(tmp_path, "trainer", "until-done")
    until(lambda: f"pid {other.pid} has taken over" in said())
    (tmp_path / "done").touch()
    other.communicate(timeout=LATER_S)
    assert finish(p)[0] == 0


def test_c37_grandchildren_go_with_a_killed_child(launch, finish, tmp_path):
    p = launch("trainer:trainer:family:grace=1")
    grandchild = int(
        until(lambda: (tmp_path / "grandchild").exists() and (tmp_path / "grandchild").read_text())
    )
    p.send_signal(signal.SIGINT)
    assert "trainer did not stop within 1 s: killed" in finish(p)[1]
    until(lambda: gone(grandchild))


def test_a_log_begins_with_what_the_process_got(tmp_path):
    spec = ProcessSpec(
        "p",
        "producer",
        ("true",),
        tmp_path / "p.log",
        env={"CUDA_VISIBLE_DEVICES": "GPU-1", "XLA_FLAGS": "--a=1 --b=2"},
    )
    bare = ProcessSpec("q", "producer", ("true",), tmp_path / "q.log", env={"XLA_FLAGS": None})
    first, second = (_header(s, 3).split(" ", 3)[3] for s in (spec, bare))
    assert first == "start 3 of p: CUDA_VISIBLE_DEVICES=GPU-1 XLA_FLAGS='--a=1 --b=2' true\n"
    assert second == "start 3 of q: true\n"


def test_console_shows_errors_not_tracebacks_and_the_log_has_both(launch, finish, tmp_path):
    code, out = finish(launch("trainer:trainer:raise-bug:restarts=0"))
    assert code == 1
    assert "ERROR trainer: ValueError: a bug" in out
    assert "Traceback" not in out
    log = (tmp_path / "logs" / "trainer.log").read_text()
    assert "Traceback" in log
    assert log.startswith("==== ")


GROUP = ("trainer:trainer:wait", "trainer-1:follower:wait:leader=trainer")


def both(run: Path) -> tuple[int, int] | None:
    """The pids of a trainer and its follower, once both work."""
    found = working(run, "trainer"), working(run, "trainer-1")
    return found if None not in found else None


def test_a_follower_goes_with_its_trainer_and_both_start_again(launch, finish, tmp_path):
    p = launch(*GROUP)
    first = until(lambda: both(tmp_path))
    os.kill(first[0], signal.SIGKILL)
    second = until(lambda: (b := both(tmp_path)) and not set(b) & set(first) and b)
    p.send_signal(signal.SIGTERM)
    assert finish(p)[0] == 143
    assert gone(*first, *second)
    assert [len(pids(tmp_path, name)) for name in ("trainer", "trainer-1")] == [2, 2]


def test_a_trainer_that_does_not_see_its_follower_die_is_killed(
    launch, finish, said, later, tmp_path
):
    p = launch(*GROUP)
    first = until(lambda: both(tmp_path))
    os.kill(first[1], signal.SIGKILL)
    until(lambda: "trainer-1 killed by signal 9; trainer leaves, too" in said())
    assert not gone(first[0])
    later(30)
    until(lambda: (b := both(tmp_path)) and not set(b) & set(first))
    p.send_signal(signal.SIGTERM)
    code, out = finish(p)
    assert code == 143
    assert "trainer did not leave within 20 s: killed" in out
    assert [len(pids(tmp_path, name)) for name in ("trainer", "trainer-1")] == [2, 2]


def test_a_follower_that_cannot_go_on_ends_the_program(launch, finish, tmp_path):
    code, out = finish(launch(GROUP[0], "trainer-1:follower:late-raise-hopeless:leader=trainer"))
    assert code == 1
    assert "trainer-1 exited with 3; see " in out
    assert gone(*pids(tmp_path, "trainer"))


def test_a_follower_that_is_done_ends_nothing(launch, finish, said, later, tmp_path):
    p = launch("trainer:trainer:until-done", "trainer-1:follower:exit-0:leader=trainer")
    until(lambda: (s := status.read(tmp_path, "trainer-1")) is not None and s.exit_code == 0)
    later(60)
    until(lambda: working(tmp_path, "trainer"))
    (tmp_path / "done").touch()
    assert finish(p)[0] == 0
    assert len(pids(tmp_path, "trainer")) == len(pids(tmp_path, "trainer-1")) == 1
