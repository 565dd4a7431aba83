"""Driving a real run through kills: launch.py and its children as processes, found by what they say
of themselves in RUN/status.

The run stands at a gate until an event took place: none can come too late, however fast the machine
is.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from common.system import status
from common.system.lock import holder, is_alive
from tests.support.gates import LAG, Gate
from tests.support.wall_clock import WALL_CLOCK, set_by
from trainer.history import ledger

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = [sys.executable, str(ROOT / "launch.py")]
SLACK = 6  # so many more steps are trained before an event takes place; every 5th step is saved


@dataclass(frozen=True)
class When:
    """The moment of an event, by what the run has done, so that it falls into the same work on a
    fast machine and on a slow one: once the
    ledger of `stage` has `step` (0: at once), then once the trainer next is in `phase` ("": at
    once), then `seconds` later. Until it took place the run goes no further than LAG + `slack`
    steps after `step`."""

    step: int = 0
    phase: str = ""
    seconds: float = 0.0
    stage: int = 2
    slack: int = SLACK

    @property
    def in_training(self) -> bool:
        """Whether the trainer is at its work then, as opposed to anywhere between its start and the
        run's end.
        """
        return self.step > 0


Schedule = list[tuple[When, str]]


@dataclass
class Driver:
    """One run under test."""

    run: Path
    config: Path
    env: dict[str, str]
    gate: Gate
    launchers: list[subprocess.Popen] = field(default_factory=list)
    extra: list[subprocess.Popen] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @classmethod
    def create(cls, folder: Path, tree: dict, step_ms: float, make_ms: float) -> Driver:
        """Write the config; nothing is started."""
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "config.yaml"
        config.write_text(yaml.safe_dump(tree))
        gate = Gate(folder / "gate")
        env = {
            **os.environ,
            **gate.env,
            WALL_CLOCK: str(folder / "clock"),
            "ARITHMETIC_STEP_MS": str(step_ms),
            "ARITHMETIC_MAKE_MS": str(make_ms),
        }
        return cls(Path(tree["run"]), config, env, gate)

    def say(self, text: str) -> None:
        self.log.append(f"{time.monotonic() - self.began:6.2f} {text}")

    # -- starting and ending -----------------------------------------------------------------------

    def _spawn(self, *args: str) -> subprocess.Popen:
        out = open(self.config.parent / "console.log", "ab")
        # A session of its own: as from another terminal.
        return subprocess.Popen(
            [*LAUNCH, *args],
            env=self.env,
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def launch(self) -> None:
        self.say("launch")
        self.launchers.append(self._spawn("--config", str(self.config)))

    def add_producer(self) -> None:
        self.say("a producer more")
        self.extra.append(self._spawn("producer", "--run", str(self.run)))

    def replace_trainer(self) -> None:
        self.say("trainer --replace")
        self.extra.append(self._spawn("trainer", "--run", str(self.run), "--replace"))

    def excused(self, code: int) -> bool:
        """Whether launch.py may have ended so, and is to be started again."""
        return code == -signal.SIGKILL

    def finish(self, timeout_s: float = 400.0) -> None:
        """Open the gate and wait for the run's end; launch.py started again where it was killed.

        AssertionError with the story if it does
        not end well."""
        self.gate.open()
        deadline = time.monotonic() + timeout_s
        while True:
            code = self.launchers[-1].poll()
            if code is not None and self.excused(code):
                self.launch()
            elif code is not None:
                assert code == 0, self.story(f"launch.py ended with {code}")
                break
            assert time.monotonic() < deadline, self.story(f"not done after {timeout_s} s")
            time.sleep(0.02)
        for p in self.extra:
            try:
                p.wait(280)
            except subprocess.TimeoutExpired:
                raise AssertionError(self.story("an added process did not leave")) from None

    def kill_everything(self) -> None:
        """For the end of a test that failed."""
        for s in status.read_all(self.run):
            if s.alive:
                os.kill(s.pid, signal.SIGKILL)
        for p in (*self.launchers, *self.extra):
            if p.poll() is None:
                p.kill()
                p.wait()

    def story(self, why: str) -> str:
        """What was done to the run, and the ends of its logs."""
        logs = [self.config.parent / "console.log", *sorted((self.run / "logs").glob("*.log"))]
        tails = "\n".join(
            f"--- {p.name}\n" + "\n".join(p.read_text(errors="replace").splitlines()[-25:])
            for p in logs
            if p.exists()
        )
        return f"{why}\n" + "\n".join(self.log) + "\n" + tails

    # -- looking -----------------------------------------------------------------------------------

    def pid(self, name: str) -> int | None:
        s = status.read(self.run, name)
        return s.pid if s is not None and s.alive else None

    def producers(self) -> dict[str, int]:
        return {
            s.name: s.pid for s in status.read_all(self.run) if s.role == "producer" and s.alive
        }

    def step(self) -> int:
        """Steps of stage 2 done, by the trainer's own word."""
        s = status.read(self.run, "trainer")
        return s.step if s is not None and s.stage_name == "gpt" else 0

    def trained(self, stage: int) -> int:
        """The last step that stage 1 or 2 has written into its ledger, whatever was lost and
        resumed since; 0: none yet.
        """
        files = [self.run / "dvae" / "ledger.jsonl", self.run / "ledger.jsonl"]
        return max(
            (line["step"] for line in ledger.read(files[stage - 1]) if "step" in line), default=0
        )

    def wait_for(
        self, condition, what: str, timeout_s: float = 400.0, poll_s: float = 0.005
    ) -> None:
        """AssertionError with the story: not within the time, or the run ended first."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            code = self.launchers[-1].poll()
            if code is not None and self.excused(code):
                self.launch()
            else:
                assert code is None, self.story(f"launch.py ended with {code} before {what}")
            assert time.monotonic() < deadline, self.story(f"waited {timeout_s} s for {what}")
            time.sleep(poll_s)

    def wait_until(self, when: When) -> None:
        """The run stands, or goes on for a few steps at most, until a later moment is waited for or
        the gate is opened.
        """
        if when.step:
            self.gate.limit(when.stage, when.step + LAG)
            self.wait_for(
                lambda: self.trained(when.stage) >= when.step,
                f"step {when.step} of stage {when.stage}",
                poll_s=0.02,
            )
        if when.phase:
            self.gate.hold(when.phase)
        if when.step:
            self.gate.limit(when.stage, when.step + LAG + when.slack)
        if when.phase:
            self.wait_for(lambda: self.gate.holds(when.phase), f"phase {when.phase}")
            self.gate.release(when.phase)
        time.sleep(when.seconds)

    # -- hurting -----------------------------------------------------------------------------------

    def signal(self, name: str, sig: signal.Signals) -> None:
        pid = self.pid(name)
        if pid is None:
            return
        s = status.read(self.run, "trainer")
        self.say(
            f"{sig.name} {name} (pid {pid}; trainer at {s.stage_name} {s.step}, {s.phase})"
            if s
            else f"{sig.name} {name}"
        )
        try:
            os.kill(pid, sig)
        except ProcessLookupError:
            pass

    def kill_launcher(self) -> None:
        self.say("SIGKILL launch.py")
        self.launchers[-1].kill()
        self.launchers[-1].wait()
        children = [s.pid for s in status.read_all(self.run) if s.alive]
        deadline = time.monotonic() + 40  # 10 on a machine that is not busy
        while any(is_alive(pid) for pid in children if pid not in self._pids_of_extra()):
            assert time.monotonic() < deadline, self.story("children outlived launch.py by 40 s")
            time.sleep(0.05)
        self.say("its children are gone")

    def _pids_of_extra(self) -> set[int]:
        import psutil

        found = set()
        for p in self.extra:
            if p.poll() is None:
                found |= {c.pid for c in psutil.Process(p.pid).children(recursive=True)}
        return found

    def set_clock(self, seconds: float) -> None:
        """The clock on the wall, as all processes of the run see it."""
        self.say(f"the clock is set to {seconds:+.0f} s")
        set_by(Path(self.env[WALL_CLOCK]), seconds)

    def stand_still(self, seconds: float, rng: random.Random) -> None:
        """Stop every process, as on a suspended machine; they wake in any order."""
        children = [s.pid for s in status.read_all(self.run) if s.alive]
        pids = {*children, *self._pids_of_extra(), *(p.pid for p in self.launchers + self.extra)}
        self.say(f"suspended for {seconds} s")
        alive = [pid for pid in sorted(pids) if is_alive(pid)]
        for pid in alive:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        for pid in rng.sample(alive, len(alive)):
            os.kill(pid, signal.SIGCONT)
        self.say("awake")

    def freeze(self, name: str, seconds: float) -> None:
        pid = self.pid(name)
        if pid is None:
            return
        self.signal(name, signal.SIGSTOP)
        time.sleep(seconds)
        if is_alive(pid):
            os.kill(pid, signal.SIGCONT)
            self.say(f"SIGCONT {name}")


EVENTS = (
    "trainer",
    "producer-0",
    "producer-1",
    "both",
    "all",
    "launcher",
    "add",
    "remove",
    "stop-trainer",
    "stop-producer",
    "replace",
)


def hurt(driver: Driver, event: str) -> None:
    """One of EVENTS, or `clock SECONDS`."""
    if event in ("trainer", "producer-0", "producer-1"):
        driver.signal(event, signal.SIGKILL)
    elif event == "both":
        driver.signal("producer-0", signal.SIGKILL)
        driver.signal("producer-1", signal.SIGKILL)
    elif event == "all":
        for name in ("trainer", "producer-0", "producer-1"):
            driver.signal(name, signal.SIGKILL)
    elif event == "launcher":
        driver.kill_launcher()
        driver.launch()
    elif event == "add":
        driver.add_producer()
    elif event == "remove":
        running = [p for p in driver.extra if p.poll() is None]
        if running:
            driver.say("SIGTERM an added process")
            running[0].terminate()
    elif event == "stop-trainer":
        driver.freeze("trainer", 5.0)
    elif event == "stop-producer":
        driver.freeze("producer-0", 5.0)
    elif event == "replace":
        driver.replace_trainer()
    elif event.startswith("clock"):
        driver.set_clock(float(event.split()[1]))


def random_schedule(
    seed: int, num_events: int, last_step: int, events: Sequence[str] = EVENTS
) -> Schedule:
    """Two thirds at a step further on and anywhere within it, some of them when the trainer next
    saves or evaluates; a third shortly
    after the event before, which mostly is while something starts."""
    rng = random.Random(seed)
    plan, step = [], 0
    for _ in range(num_events):
        if plan and rng.random() < 1 / 3:
            when = When(seconds=rng.uniform(0.05, 0.9))
        else:
            step += rng.randint(2, last_step // num_events)
            phase = rng.choice(["", "", "saving", "evaluating"])
            when = When(step, phase, rng.uniform(0.0, 0.01 if phase else 0.1))
        added = sum({"add": 1, "remove": -1}.get(event, 0) for _, event in plan)
        plan.append(
            (
                when,
                rng.choice(
                    [e for e in events if not e.startswith("stop") and (added or e != "remove")]
                ),
            )
        )
    return plan


def play(
    driver: Driver,
    schedule: Schedule,
    timeout_s: float = 400.0,
    act: Callable[[Driver, str], None] = hurt,
) -> None:
    """Launch, hurt at each event's moment, finish. `act` makes an event happen."""
    driver.gate.limit(schedule[0][0].stage, schedule[0][0].step)
    driver.launch()
    for when, event in schedule:
        driver.wait_until(when)
        act(driver, event)
    driver.finish(timeout_s)


def resumes(run: Path) -> list[int]:
    """The steps, of either stage, that the run was resumed from."""
    lines = [*ledger.read(run / "dvae" / "ledger.jsonl"), *ledger.read(run / "ledger.jsonl")]
    return [line["resumed_from"] for line in lines if "resumed_from" in line]


def lock_is_free(run: Path) -> bool:
    return holder(run / "lock") is None
