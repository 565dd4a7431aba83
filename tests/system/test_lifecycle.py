"""A child's exit codes, deadlines and parent watch; locks and who holds them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from common.launcher import child
from common.launcher.child import ProcessSpec
from common.launcher.console import LogTail
from common.system import lifecycle, lock, logs, status
from common.system.errors import BadInput, Hopeless, Replaced, Stopped
from common.system.lifecycle import GRACE_S, ORPHAN_S, SAVE_S, SAVER_GRACE_S, Stop
from tests.support import processes

LATER_S = 200.0  # longer than anything takes that still happens


def start(run, name, behaviour):
    return processes.start_child(run, name, behaviour)


def wait_for(run, name, pid, phase="training"):
    deadline = time.monotonic() + LATER_S
    while (s := status.read(run, name)) is None or s.pid != pid or s.phase != phase:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("behaviour", "code", "line"),
    [
        ("exit-0", 0, ""),
        ("exit-7", 7, ""),
        ("raise-bad", 2, "ERROR w: the input is bad"),
        ("raise-hopeless", 3, "ERROR w: no way"),
        ("raise-memory", 3, "ERROR w: MemoryError: full"),
        ("raise-bug", 1, "ERROR w: ValueError: a bug"),
    ],
)
def test_exit_codes(tmp_path, behaviour, code, line):
    p = start(tmp_path, "w", behaviour)
    out, _ = p.communicate(timeout=LATER_S)
    assert p.returncode == code
    assert line in out
    assert ("Traceback" in out) == (behaviour in ("raise-bug", "raise-memory"))
    assert status.read(tmp_path, "w").exit_code == code


@pytest.mark.parametrize(
    ("sig", "code"),
    [
        (signal.SIGTERM, 143),
        (signal.SIGHUP, 143),
        (signal.SIGINT, 130),
        (signal.SIGUSR1, 4),
        (signal.SIGUSR2, 143),
    ],
)
def test_signals(tmp_path, sig, code):
    p = start(tmp_path, "trainer", "wait-0.1")
    wait_for(tmp_path, "trainer", p.pid)
    p.send_signal(sig)
    p.communicate(timeout=LATER_S)
    assert p.returncode == code
    assert status.read(tmp_path, "trainer").saved_step == 1


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2])
@pytest.mark.parametrize("where", ["process", "thread"])
def test_a_signal_while_a_process_begins_anew_is_heard_by_what_it_becomes(tmp_path, sig, where):
    """Sent to the process, any thread takes it; sent to the thread that becomes the new process, it
    waits there.
    """
    p = start(tmp_path, "w", f"anew-{where}-{int(sig)}")
    out, _ = p.communicate(timeout=LATER_S)
    assert p.returncode == (130 if sig == signal.SIGINT else 143), out
    assert sig.name in out
    assert len((tmp_path / "w.starts").read_text().split()) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal is Linux's")
def test_the_signal_of_the_parents_death_counts_where_the_parent_is_another():
    stop = Stop(saves=True)
    stop._parent = os.getppid()
    lifecycle._on_signal(stop, lifecycle._PARENT_DIED)
    assert not stop.is_set()
    stop._parent = -1
    lifecycle._on_signal(stop, lifecycle._PARENT_DIED)
    assert stop.orphaned


_STARTS_AND_STAYS = """
import os, subprocess, sys, threading
read, write = os.pipe()
env = {**os.environ, "XTTS_PARENT_FD": str(read)}
start = lambda: subprocess.Popen(sys.argv[1:], pass_fds=[read], env=env)
t = threading.Thread(target=start)
t.start()
t.join()
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal is Linux's")
def test_a_thread_of_the_parent_that_ends_is_no_reason_to_leave(tmp_path):
    """The kernel sends its signal for the thread that started the child; the process lives on, and
    between the deaths of a killed parent's threads it seems to.
    """
    child_of = [sys.executable, processes.__file__, "child", str(tmp_path), "trainer", "wait-0.1"]
    parent = subprocess.Popen(
        [sys.executable, "-c", _STARTS_AND_STAYS, *child_of],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + LATER_S
    while (s := status.read(tmp_path, "trainer")) is None or s.phase != "training":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(s.pid, lifecycle._PARENT_DIED)  # as for a thread that ended
    time.sleep(0.5)
    assert status.read(tmp_path, "trainer").phase == "training"
    parent.kill()  # the pipe's other end, and the process
    out, _ = parent.communicate(timeout=LATER_S)
    assert "the supervisor died; leaving without saving" in out
    assert status.read(tmp_path, "trainer").saved_step == 0


def test_a_log_that_is_too_long_begins_anew_under_its_writers(tmp_path, monkeypatch):
    monkeypatch.setattr(child, "LOG_BYTES", 100)
    path = tmp_path / "w.log"
    tail = LogTail(path)
    with open(path, "ab", buffering=0) as writer:
        writer.write(b"x" * 90 + b"\n")
        child.rotate(path)
        assert not path.with_name("w.log.1").exists()
        writer.write(b"second line\n")
        assert tail.lines()[-1] == "second line"
        child.rotate(path)
        writer.write(b"third line\n")
    assert path.read_bytes() == b"third line\n"
    assert path.with_name("w.log.1").read_bytes().endswith(b"x\nsecond line\n")
    assert tail.lines() == ["third line"]
    child.rotate(tmp_path / "none.log")
    path.with_name("w.log.1.new").write_bytes(b"half a copy of a launcher that was killed")
    child.rotate(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["w.log", "w.log.1"]


def test_a_busy_child_is_forced_out_with_its_stacks(tmp_path):
    grace_s = 1.0
    p = processes.start_child(tmp_path, "w", "busy", env={**os.environ, "GRACE_S": str(grace_s)})
    wait_for(tmp_path, "w", p.pid, "starting")
    began = time.monotonic()
    p.send_signal(signal.SIGTERM)
    out, _ = p.communicate(timeout=LATER_S)
    assert p.returncode == 143
    assert grace_s < time.monotonic() - began
    assert GRACE_S < ProcessSpec.grace_s, (
        "before the supervisor kills it, or there would be no stacks"
    )
    assert "forced out" in out
    assert "_busy" in out


@pytest.mark.parametrize(("sig", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 4)])
def test_an_import_is_not_waited_for(tmp_path, sig, code):
    p = start(tmp_path, "trainer", "import")
    wait_for(tmp_path, "trainer", p.pid)
    p.send_signal(sig)
    out, _ = p.communicate(timeout=LATER_S)
    assert p.returncode == code
    assert re.search(rf"INFO trainer: .*{sig.name}", out)
    assert "forced out" not in out
    assert status.read(tmp_path, "trainer").exit_code == code


def test_what_would_be_left_at_once_is_not_begun_after_a_stop():
    stop = Stop()
    with stop.at_once():
        pass
    stop.request("stop", "SIGTERM", 143)
    lifecycle._leave_at_once(stop)  # would end this process inside
    with pytest.raises(Stopped), stop.at_once():
        raise AssertionError("begun")


def test_deadlines_follow_the_cause(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(lifecycle, "time", SimpleNamespace(monotonic=lambda: now))
    clocked = Stop(saves=True)
    assert clocked.remaining_s() is None
    clocked.request("stop", "SIGTERM", 143)
    assert clocked.remaining_s() == SAVER_GRACE_S
    with clocked.saving():
        assert clocked.remaining_s() == SAVE_S
    now += 3
    assert clocked.remaining_s() == SAVER_GRACE_S - 3
    clocked.save_s = 120.0
    with clocked.saving():
        now += 87
        assert clocked.remaining_s() == 30.0
    assert clocked.remaining_s() > 0, "what follows a save is not forced out at once"
    now += 30
    assert clocked.remaining_s() < 0
    clocked._since = now
    clocked.request("orphan", "death", 143)
    assert clocked.remaining_s() == ORPHAN_S
    clocked.request("stop", "SIGINT", 130)
    assert (clocked.cause, clocked.exit_code) == ("orphan", 143)


def test_check_raises_what_the_stop_means():
    stop = Stop()
    stop.check()
    stop.request("replace", "SIGUSR1", 4)
    with pytest.raises(Replaced):
        stop.check()
    other = Stop()
    other.request("stop", "SIGTERM", 143)
    with pytest.raises(Stopped, match="SIGTERM"):
        other.check()
    assert Hopeless("x").exit_code == 3


def test_log_lines_parse_back_and_others_do_not():
    line = logs.parse("2026-01-31 12:00:00,123 WARNING producer-0: low: disk\n")
    assert (line.level, line.name, line.message) == ("WARNING", "producer-0", "low: disk")
    assert line.is_alarm
    assert logs.parse("W0000 00:00:1 cuda_executor.cc:1] no NUMA") is None
    assert logs.parse('  File "x.py", line 3, in f') is None


def test_lock_names_its_holder_and_frees_itself_on_sigkill(tmp_path):
    p = start(tmp_path, "trainer", "wait")
    wait_for(tmp_path, "trainer", p.pid)
    path = tmp_path / "lock"
    with pytest.raises(BadInput, match=rf"in use by trainer \(pid {p.pid} since .*; do that"):
        lock.lock(path, "other", "do that")
    assert lock.holder(path).pid == p.pid
    p.kill()
    p.communicate()
    assert lock.holder(path) is None
    with lock.lock(path, "other"):
        assert lock.holder(path).what == "other"
        assert path.read_text().splitlines()[0] == str(os.getpid())
    assert lock.holder(path) is None


def test_lock_waits_for_a_holder_whose_supervisor_is_dead(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", "pass"])
    who = (dead.pid, lock.identity(dead.pid)[1])
    dead.wait()
    env = {**os.environ, "XTTS_SUPERVISOR": "{}:{}".format(*who)}
    p = processes.start_child(tmp_path, "trainer", "wait", env=env)
    wait_for(tmp_path, "trainer", p.pid)
    assert lock.holder(tmp_path / "lock").leaving
    looks = 0

    def clock():
        """Half a second later at each look; the holder dies at the tenth."""
        nonlocal looks
        looks += 1
        if looks == 10:
            p.kill()
        return 0.5 * looks

    with lock.lock(tmp_path / "lock", "next", clock=clock):
        assert looks >= 10
    p.communicate()


def test_lock_is_not_inherited_by_started_processes(tmp_path):
    held = lock.lock(tmp_path / "lock", "parent")
    p = subprocess.Popen(["sleep", "600"])
    held.release()
    assert lock.holder(tmp_path / "lock") is None
    p.kill()
    p.wait()


def test_status_is_throttled_but_phases_are_not(tmp_path):
    s = status.StatusFile(tmp_path, "p", "producer", min_interval_s=60)
    s.update(step=5)
    assert status.read(tmp_path, "p").step == 0
    s.update(phase="training")
    assert status.read(tmp_path, "p").step == 5
    assert status.read(tmp_path, "p").alive
    with pytest.raises(TypeError):
        s.update(stepp=1)
    s.finish(3)
    assert not status.read(tmp_path, "p").alive
    assert [x.name for x in status.read_all(tmp_path)] == ["p"]
    assert not list((tmp_path / "status").glob("*.tmp"))
