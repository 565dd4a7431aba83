"""The parent's side: start every process of a program, watch, restart, adopt, stop.

Policy
- the main process (the trainer) ends with 0: done; the others hear it over the wire and have 10 s
to leave; an optional one (the sampler) sees it in the trainer's status and has `leave_s` to
finish its work
- a dead trainer is restarted; 3 deaths without progress (a higher step or saved step in its
  status): exit 1
- a dead producer is restarted 3 times, backing off 1, 2, 4 s; the count is forgotten once it has
  made a batch, or after 10 minutes of work
- exit 2 (bad input) of any child ends the program with 2; exit 3 (hopeless) is not restarted: the
  trainer's ends the program with 1, a producer's only if no other is left
- a trainer that is at work already (from `trainer --replace`, whose launcher outlived the run's)
is adopted instead of started
- exit 4 (replaced) of the trainer: the next holder of its lock is adopted, and restarted here when
  it dies; a program of the trainer alone (no lock to watch) ends with 0
- a trainer alone, or an added producer, that somebody else stopped is not restarted: its program
ends with its code
- followers (the second trainer and on) start and go with their leader: where one has died, it
  leaves or is killed, and all start again; exit 2 or 3 of a follower ends the program
- an optional process is restarted like a producer; if it ends for good, the others go on
- Ctrl-C, SIGTERM, SIGHUP, and SIGUSR1 and SIGUSR2, by which a batch system warns of its time
  limit: SIGTERM to the children, each with its own deadline, then SIGKILL; a second Ctrl-C kills at
  once
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from common.launcher.child import (
    Adopted,
    ProcessSpec,
    Program,
    Running,
    explain,
    reap_strays,
    rotate,
)
from common.system import cgroup, lock, status
from common.system.errors import BAD_INPUT, FAILED, HOPELESS, INTERRUPTED, OK, REPLACED, TERMINATED
from common.system.lifecycle import REPLACE_S

TICK_S = 0.1
BACKOFF_S = 1.0  # doubled at each restart
FORGET_S = 600.0
ROTATE_EVERY_S = 10.0
LOST_S = (
    20.0  # for a leader to notice that its follower has died, and to leave; longer while it saves
)
LEAVES_AFTER_SAVE_S = 3.0  # for a process to report that its save has ended, and to leave
DOUBLE_S = 0.5  # a wrapper that forwards Ctrl-C sends it twice at once


class View(Protocol):
    """How the supervisor reports to a user (`common.launcher.console`)."""

    def say(self, text: str) -> None:
        """Print a line."""

    def tick(self) -> None:
        """Called ten times a second."""

    def stopping(self) -> None:
        """Print few lines from now on."""

    def failure(self, spec: ProcessSpec, offset: int) -> None:
        """A process ended badly: show the end of its log from byte `offset` unless its error was
        shown already.
        """


class Child:
    """One process through its restarts."""

    def __init__(self, spec: ProcessSpec):
        self.spec = spec
        self.process: Running | Adopted | None = None
        self.starts = 0
        self.failures = 0
        self.best = ((0, 0), (0, 0))
        self.started_at = 0.0
        self.restart_at: float | None = None
        self.adopt_until: float | None = None
        self.last: int | None = None  # the last exit code
        self.asked_at: float | None = None
        self.saving_at: float | None = None  # when it was last seen saving at a stop
        self.save_s = spec.save_s  # how long a stop waits for the save
        self.alone_at: float | None = None  # when one of its followers was first seen dead

    @property
    def is_pending(self) -> bool:
        """Running, or about to."""
        return (
            self.process is not None or self.restart_at is not None or self.adopt_until is not None
        )

    def forget(self) -> None:
        """Forget restarts and adoptions."""
        self.restart_at = self.adopt_until = None


class Supervisor:
    """Runs a program.

    Signal handlers are installed while `run` is active; call it from the main thread.
    """

    def __init__(self, program: Program, view: View, clock: Callable[[], float] = time.monotonic):
        self._program = program
        self._view = view
        self._clock = clock
        self._children = [Child(p) for p in program.processes]
        self._signals: list[tuple[signal.Signals, float]] = []
        self._stop_code: int | None = None
        self._interrupted_at: float | None = None
        self._done_at: float | None = None
        self._parent_fd = -1
        self._rotated_at = clock()
        self._oom_kills = cgroup.oom_kills()

    def run(self) -> int:
        """Run until the program ends and every process is gone; return launch.py's exit code."""
        # The write end stays here, never inherited: it closes when this process dies, however it
        # dies.
        self._parent_fd, write_fd = os.pipe()
        try:
            with self._handlers():
                for child in (c for c in self._children if not c.spec.leader):
                    self._start(child)
                while (code := self._step()) is None:
                    self._view.tick()
                    time.sleep(TICK_S)
                self._view.tick()
                return code
        finally:
            self._kill_all()
            os.close(write_fd)
            os.close(self._parent_fd)

    def _step(self) -> int | None:
        self._handle_signals()
        for child in self._children:
            if child.process is not None and (code := child.process.poll()) is not None:
                self._ended(child, code)
        reap_strays({c.process.pid for c in self._children if c.process is not None})
        for child in self._children:
            self._revive(child)
            self._keep_together(child)
        if self._clock() - self._rotated_at > ROTATE_EVERY_S:
            self._rotated_at = self._clock()
            for child in self._children:
                rotate(child.spec.log)
        if self._done_at is not None or self._stop_code is not None:
            self._enforce_deadlines()
            if not any(c.is_pending for c in self._children):
                return OK if self._stop_code is None else self._stop_code
        elif not any(c.is_pending for c in self._children):
            return FAILED
        return None

    # -- signals -----------------------------------------------------------------------------------

    @contextmanager
    def _handlers(self) -> Iterator[None]:
        signals = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup
            signals.remove(signal.SIGHUP)
        before = {
            s: signal.signal(
                s, lambda n, _: self._signals.append((signal.Signals(n), self._clock()))
            )
            for s in signals
        }
        try:
            yield
        finally:
            for s, handler in before.items():
                signal.signal(s, handler)

    def _handle_signals(self) -> None:
        while self._signals:
            sig, at = self._signals.pop(0)
            if sig == signal.SIGINT and self._interrupted_at is not None:
                if at - self._interrupted_at > DOUBLE_S:
                    self._view.say("second Ctrl-C: killing every process now")
                    self._stop_code = INTERRUPTED
                    self._kill_all()
            elif sig == signal.SIGINT:
                self._interrupted_at = at
                self._stop("Ctrl-C", INTERRUPTED)
            else:
                self._stop(sig.name, TERMINATED)

    def _stop(self, reason: str, code: int) -> None:
        """Ask everybody to leave. A later reason does not change the exit code."""
        if self._stop_code is not None or (
            self._done_at is not None and code != INTERRUPTED and code != TERMINATED
        ):
            return
        self._stop_code = OK if self._done_at is not None else code
        self._view.stopping()
        saves = any(c.spec.save_s and c.process for c in self._children)
        self._view.say(
            f"{reason}: stopping"
            + ("; the trainer saves first (Ctrl-C again: at once)" if saves else "")
        )
        for child in self._children:
            child.forget()
            self._ask(child)

    def _ask(self, child: Child) -> None:
        if child.process is not None and child.asked_at is None:
            child.asked_at = self._clock()
            child.process.ask_to_leave()

    def _enforce_deadlines(self) -> None:
        now = self._clock()
        for child in self._children:
            if self._done_at is not None and now - self._done_at > child.spec.leave_s:
                self._ask(child)
            if child.process is None or child.asked_at is None:
                continue
            limit = child.spec.grace_s
            if child.spec.save_s and now - child.asked_at > limit:
                self._look_for_a_save(child, now)
                if child.saving_at is not None and now - child.saving_at < LEAVES_AFTER_SAVE_S:
                    limit = child.save_s
            if now - child.asked_at > limit:
                lost = "; the save that it was writing is lost" if child.saving_at == now else ""
                self._view.say(f"{child.spec.name} did not stop within {limit:.0f} s: killed{lost}")
                child.process.kill()
                child.asked_at = now  # a process inside a system call may take a while to die

    def _look_for_a_save(self, child: Child, now: float) -> None:
        """At a stop, when the time for a process without a save is over: extend it for a save."""
        s = status.read(self._program.run_dir, child.spec.name)
        if s is None or s.pid != child.process.pid or s.phase != status.SAVING:
            return
        child.save_s = max(child.spec.save_s, s.save_grace_s or 0.0)
        if child.saving_at is None:
            self._view.say(f"{child.spec.name} is saving; it has up to {child.save_s:.0f} s")
        child.saving_at = now

    def _kill_all(self) -> None:
        for child in self._children:
            child.forget()
            if child.process is not None:
                child.process.kill()
        deadline = time.monotonic() + 5
        for child in self._children:
            while (
                child.process is not None
                and child.process.poll() is None
                and time.monotonic() < deadline
            ):
                time.sleep(0.01)

    # -- starts and ends ---------------------------------------------------------------------------

    def _start(self, child: Child) -> None:
        """Start the process, or adopt the holder of its lock if there is one already."""
        child.restart_at = None
        if self._adopt(child):
            return
        child.starts += 1
        child.process = Running(child.spec, self._parent_fd, child.starts)
        child.started_at = self._clock()
        child.asked_at = child.alone_at = None
        for follower in self._followers(child):
            self._start(follower)

    def _followers(self, child: Child) -> list[Child]:
        return [c for c in self._children if c.spec.leader == child.spec.name]

    def _keep_together(self, leader: Child) -> None:
        """End the others when one of them dies: see the module's docstring."""
        followers, now = self._followers(leader), self._clock()
        if not followers or self._stop_code is not None or self._done_at is not None:
            return
        lost = any(f.process is None and f.last != OK for f in followers)
        if leader.process is None:
            for follower in (f for f in followers if f.process):
                self._ask(follower)
                if now - follower.asked_at > follower.spec.grace_s:
                    follower.process.kill()
        elif lost and isinstance(leader.process, Running):
            leader.alone_at = leader.alone_at or now
            s = status.read(self._program.run_dir, leader.spec.name)
            saves = s is not None and s.pid == leader.process.pid and s.phase == status.SAVING
            limit = max(leader.spec.save_s, s.save_grace_s or 0.0) if saves else LOST_S
            if now - leader.alone_at > limit:
                self._view.say(f"{leader.spec.name} did not leave within {limit:.0f} s: killed")
                leader.process.kill()
                leader.alone_at = now

    def _adopt(self, child: Child) -> bool:
        by = lock.holder(child.spec.lock) if child.spec.lock is not None else None
        if by is None or by.leaving:
            return False
        child.adopt_until = None
        child.process = Adopted(child.spec, by, self._program.run_dir)
        child.started_at = self._clock()
        child.asked_at = None
        how = "has taken over" if child.starts else "is at work already"
        self._view.say(f"{child.spec.name}: pid {by.pid} {how}; watching it")
        return True

    def _revive(self, child: Child) -> None:
        now = self._clock()
        if child.restart_at is not None and now >= child.restart_at:
            if not any(f.process for f in self._followers(child)):
                self._start(child)
        elif child.adopt_until is not None and not self._adopt(child) and now > child.adopt_until:
            self._view.say(f"{child.spec.name}: nobody took over; starting it again")
            child.adopt_until = None
            self._start(child)

    def _ended(self, child: Child, code: int) -> None:
        process, child.process, child.last = child.process, None, code
        if self._stop_code is not None or self._done_at is not None:
            if (
                child.spec.main
                and code in (FAILED, BAD_INPUT, HOPELESS)
                and self._stop_code is not None
            ):
                self._view.failure(child.spec, process.offset)
                self._stop_code = FAILED
            return
        if child.spec.leader:
            self._follower_ended(child, code, process)
        elif child.spec.main and code == OK:
            self._done_at = self._clock()
        elif child.spec.main and child.spec.lock is None and code in (INTERRUPTED, TERMINATED):
            self._stop(f"{child.spec.name} was asked to stop", code)
        elif code == REPLACED and child.spec.main and child.spec.lock is None:
            self._view.say(
                f"{child.spec.name} saved and gave way to another one, which is not watched from"
                " here"
            )
            self._done_at = self._clock()
            for other in self._children:  # nobody else tells them: the run goes on
                self._ask(other)
        elif child.spec.lock is not None and self._left_to_another(child, code):
            child.adopt_until = self._clock() + REPLACE_S
        elif not child.spec.main and code in (OK, INTERRUPTED, TERMINATED):
            if code != OK or not self._main_is_done():
                self._view.say(
                    f"{child.spec.name} was asked to stop ({explain(code)}); not restarted"
                )
        else:
            self._view.failure(child.spec, process.offset)
            self._failed(child, code, process.pid)

    def _follower_ended(self, child: Child, code: int, process: Running | Adopted) -> None:
        leader = next(c for c in self._children if c.spec.name == child.spec.leader)
        if leader.process is None or code == OK:
            return  # it has left with its leader
        self._view.failure(child.spec, process.offset)
        what = f"{child.spec.name} {explain(code)}{self._for_memory(code)}"
        if code in (BAD_INPUT, HOPELESS):  # a restart would not help
            self._stop(f"{what}; see {child.spec.log}", BAD_INPUT if code == BAD_INPUT else FAILED)
        else:
            self._view.say(f"{what}; {leader.spec.name} leaves, too, and all trainers start again")

    def _main_is_done(self) -> bool:
        """Whether the main process has announced the end; it may take a moment longer to exit."""
        reports = (
            status.read(self._program.run_dir, c.spec.name) for c in self._children if c.spec.main
        )
        return any(s is not None and s.phase in (status.DONE, status.LEFT) for s in reports)

    def _left_to_another(self, child: Child, code: int) -> bool:
        """Replaced, or beaten to the lock by a trainer started elsewhere."""
        if code == REPLACED:
            self._view.say(f"{child.spec.name} saved and gave way to another one")
            return True
        return code == BAD_INPUT and lock.holder(child.spec.lock) is not None

    def _failed(self, child: Child, code: int, pid: int) -> None:
        """Restart the process, give it up, or end the program."""
        what = f"{child.spec.name} {explain(code)}{self._for_memory(code)}"
        if code == BAD_INPUT:
            return self._give_up(child, what, BAD_INPUT)
        if code == HOPELESS:
            return self._give_up(child, f"{what}: a restart would not help", FAILED)
        if self._came_further(child, pid):
            child.failures = 0
        if child.failures >= child.spec.restarts:
            again = (
                f" after {child.failures} restarts"
                + (" without progress" if child.spec.by_steps else "")
                if child.failures
                else ""
            )
            return self._give_up(
                child, what + again, code if code in (INTERRUPTED, TERMINATED) else FAILED
            )
        child.failures += 1
        delay = BACKOFF_S * 2 ** (child.failures - 1)
        child.restart_at = self._clock() + delay
        self._view.say(
            f"{what}; restart {child.failures} of {child.spec.restarts} in {delay:.0f} s"
        )
        return None

    def _for_memory(self, code: int) -> str:
        """Why the kernel killed a process, if it was for memory."""
        before, self._oom_kills = self._oom_kills, cgroup.oom_kills()
        if code != -signal.SIGKILL or self._oom_kills == before:
            return ""
        if (limit := cgroup.memory_limit()) is None:
            return " by the kernel, it seems: the machine ran out of memory"
        return f" by the kernel: this container or job has used up its {limit / 1e6:.0f} MB"

    def _came_further(self, child: Child, pid: int) -> bool:
        s = status.read(self._program.run_dir, child.spec.name)
        if s is not None and s.pid != pid:
            s = None  # it died before its first report
        if not child.spec.by_steps:
            made = s is not None and s.batches > 0
            return made or self._clock() - child.started_at > FORGET_S
        if s is None:
            return False
        best = (max(child.best[0], s.progress[0]), max(child.best[1], s.progress[1]))
        further, child.best = best != child.best, best
        return further

    def _give_up(self, child: Child, what: str, code: int) -> None:
        if child.spec.optional:
            self._view.say(f"{what}; going on without it; see {child.spec.log}")
            return
        others = [
            c
            for c in self._children
            if c is not child and c.spec.role == child.spec.role and c.is_pending
        ]
        if child.spec.main or code == BAD_INPUT or not others:
            self._stop(f"{what}; see {child.spec.log}", code)
        else:
            self._view.say(
                f"{what}; going on with {', '.join(c.spec.name for c in others)}; see"
                f" {child.spec.log}"
            )
