"""The chaos machine: everything that can happen to a run of real processes, in an order that a seed
decides, with the longest gap without a step after each event, and what the channel's log must say.

Beside the kills of `chaos`: SIGTERM to any process, a frozen process, a slow producer, a full disk
(a small file system of its own, where the machine lets a test mount one), damaged files, and an
impostor among the producers.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from common.run.folder import RunFolder
from common.system import status
from common.system.lock import is_alive
from tests.support import channels
from tests.support.chaos import SLACK, Driver, Schedule, hurt, random_schedule
from tests.support.gates import LAG
from tests.support.impostor import Impostor
from trainer import stages
from trainer.history.checkpoint import Checkpoints

DISK_MB = 96  # a checkpoint of the arithmetic asks for 17 MB of room
TTL_S = 3.0  # of a lease, by the run's settings
KILLS = ("trainer", "producer-0", "producer-1", "both", "all", "launcher", "add", "remove")
FAULTS = (
    *("term-trainer", "term-producer", "term-launcher", "freeze-trainer", "freeze-producer"),
    *("slow-producer", "damage", "impostor", "replace", "clock", "suspend"),
)
FULL = "fill-disk"
FREEZE_S, DISK_S, SUSPEND_S = 5.5, 20.0, 8.0  # longer than a lease, or than a silence may last
NOTICED_S, RESTART_S, LEAVE_S = 2.0, 4.0, 30.0  # a death is seen; a restart waits; a stop saves


@dataclass
class Gap:
    """How long after an event no step was trained, and how long that may take."""

    kind: str
    seconds: float
    bound_s: float


@dataclass
class Machine(Driver):
    """A run under test, on a file system of its own if `disk` says so."""

    disk: Path | None = None
    seed: int = 0
    gaps: list[Gap] = field(default_factory=list)
    forgers: list[Impostor] = field(default_factory=list)
    start_s: float = 0.0  # to the first step of a stage, here and now
    ends_excused: set[int] = field(default_factory=set)
    ousted: int | None = None  # the trainer that gives way to an added one

    # -- the whole ---------------------------------------------------------------------------------

    def play(self, schedule: Schedule, timeout_s: float = 400.0) -> None:
        """Launch, hurt at each event's moment, finish."""
        self.gate.limit(schedule[0][0].stage, schedule[0][0].step + LAG)
        self._start()
        together: list[tuple[str, float, float]] = []
        for i, (when, event) in enumerate(schedule):
            if when.step:  # gaps were measured over steps of which the schedule knows nothing
                when = replace(when, step=max(when.step, self.trained(when.stage) + 1))
            self.wait_until(when)
            together.append((event, time.monotonic(), self.bound_s(event)))
            self.hurt(event, random.Random(f"{self.seed}/{i}"))
            if i + 1 == len(schedule) or schedule[i + 1][0].step:
                self._measure(together)
                together = []
        for forger in self.forgers:
            forger.end()
        self.finish(timeout_s)

    def _start(self) -> None:
        """Launch, and see how long a start takes: of launch.py, or of stage 2, which compiles
        larger programs.
        """
        began = time.monotonic()
        self.launch()
        self.wait_for(lambda: self.lines() > 0, "the first step")
        first = time.monotonic() - began
        self.wait_for(lambda: self.trained(2) > 0, "the first step of stage 2")
        written = (self.run / "dvae" / "ledger.jsonl").stat().st_mtime  # nobody sets it so far
        self.start_s = max(first, time.time() - written)

    def hurt(self, event: str, rng: random.Random) -> None:
        """One event of KILLS, FAULTS or FULL."""
        act = getattr(self, event.replace("-", "_"), None)
        if act is None:
            hurt(self, event)
        else:
            act(rng)

    def excused(self, code: int) -> bool:
        """Also what a stop, or a disk that was full, ends it with."""
        if code in self.ends_excused:
            self.say(f"launch.py ended with {code}, as it may")
            return True
        return super().excused(code)

    def close(self) -> None:
        """Nothing of it is left."""
        for forger in self.forgers:
            forger.end()
        self.kill_everything()
        if self.disk is not None:
            subprocess.run(["umount", "-l", str(self.disk)], check=False)

    # -- gaps --------------------------------------------------------------------------------------

    def lines(self) -> int:
        """Steps trained so far, of both stages, those that were trained again included."""
        files = (self.run / "dvae" / "ledger.jsonl", self.run / "ledger.jsonl")
        return sum(file.read_bytes().count(b'{"step":') if file.exists() else 0 for file in files)

    def bound_s(self, event: str) -> float:
        """How long an event may keep the run from training, from what was promised (design, 4) and
        what a start takes here; the last producer's death is the death of all. A trainer added
        before may take over at any moment since.
        """
        start = self.start_s + RESTART_S
        trainer = status.read(self.run, "trainer")
        taken_over = self.ousted is None or (trainer is not None and trainer.pid != self.ousted)
        handover = 0.0 if taken_over else LEAVE_S + start
        producers = [s for s in status.read_all(self.run) if s.role == "producer"]
        lone = sum(s.alive and s.batches > 0 for s in producers) < 2
        bound = {
            **dict.fromkeys(("both", "all", "trainer"), 2 * start),
            "damage": 2 * start,
            "launcher": 10 + 2 * start,
            "term-launcher": LEAVE_S + 2 * start,
            **dict.fromkeys(("term-trainer", "replace"), LEAVE_S + start),
            "freeze-trainer": FREEZE_S + NOTICED_S,
            "impostor": 2 * TTL_S + NOTICED_S,
            "clock": NOTICED_S,
            "suspend": SUSPEND_S + NOTICED_S,
            FULL: DISK_S + 2 * start,
        }.get(event, 2 * start if lone else 5 + NOTICED_S)
        return bound + handover

    def _measure(self, together: list[tuple[str, float, float]]) -> None:
        """Wait for steps after the events and note the longest time without one."""
        (_, since, bound_s) = together[0]
        kind = together[0][0] if len(together) == 1 else "several at once"
        bound_s = bound_s if len(together) == 1 else sum(b for _, _, b in together)
        known = self.lines()  # before the gate's limit, which has to leave room for four more
        for stage in (1, 2):
            last = self.trained(stage)
            if stage == 2 or not (self.run / "ledger.jsonl").exists():
                # a ledger on a full disk lags behind the run
                room = 4 * SLACK if any(e == FULL for e, _, _ in together) else SLACK
                self.gate.limit(stage, last + LAG + room)
        wanted, last, longest = known + 4, since, 0.0
        while known < wanted:
            self.wait_for(lambda n=known: self.lines() > n or self.over(), f"a step after {kind}")
            if self.over():
                break
            now = time.monotonic()
            known, longest, last = self.lines(), max(longest, now - last), now
        self.gaps.append(Gap(kind, longest, bound_s))
        self.say(f"longest gap {longest:.2f} s of {bound_s:.1f} after {kind}")

    def over(self) -> bool:
        """Whether the run has come to its end."""
        return self.launchers[-1].poll() == 0

    # -- events ------------------------------------------------------------------------------------

    def term_trainer(self, rng: random.Random) -> None:
        del rng
        self.ends_excused.add(143)
        self.signal("trainer", signal.SIGTERM)

    def term_producer(self, rng: random.Random) -> None:
        self.signal(rng.choice(("producer-0", "producer-1")), signal.SIGTERM)

    def term_launcher(self, rng: random.Random) -> None:
        del rng
        self.say("SIGTERM launch.py")
        self.launchers[-1].terminate()
        code = self.launchers[-1].wait(120)
        # -15: at the very end of a run that was ending already, its handlers are gone
        assert code in (143, 0, -signal.SIGTERM), self.story(
            f"launch.py, told to stop, ended with {code}"
        )
        if code:
            self.launch()

    def replace(self, rng: random.Random) -> None:
        del rng
        self.ousted = self.pid("trainer")
        self.replace_trainer()

    def freeze_trainer(self, rng: random.Random) -> None:
        del rng
        self.freeze("trainer", FREEZE_S)

    def freeze_producer(self, rng: random.Random) -> None:
        self.freeze(rng.choice(("producer-0", "producer-1")), FREEZE_S)

    def clock(self, rng: random.Random) -> None:
        """Set by up to two days, either way, as seen by every process of the run."""
        self.set_clock(rng.choice((-1, 1)) * rng.choice((60, 3600, 2 * 86400)))

    def suspend(self, rng: random.Random) -> None:
        self.stand_still(SUSPEND_S, rng)

    def slow_producer(self, rng: random.Random) -> None:
        """A tenth of its speed for two seconds."""
        pid = self.pid(rng.choice(("producer-0", "producer-1")))
        self.say(f"slow: pid {pid}")
        for _ in range(10):
            if pid is None or not is_alive(pid):
                return
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.18)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.02)

    def impostor(self, rng: random.Random) -> None:
        self.say("an impostor joins")
        self.forgers.append(Impostor(RunFolder(self.run), rng.getrandbits(32)))

    def damage(self, rng: random.Random) -> None:
        """A file has changed, and whoever reads it starts over."""
        what = rng.choice(("checkpoint", "checkpoint", "endpoint", "status"))
        if what == "checkpoint":
            self._damage_newest(rng)
            self.signal("trainer", signal.SIGKILL)
            return
        file = self.run / ("endpoint.json" if what == "endpoint" else "status/producer-0.json")
        self.say(f"damage {file.name}")
        if file.exists():
            file.write_bytes(rng.choice((b"", b"{", b"\xff" * 40, b"[]", b'{"address": 7}')))
        victim = rng.choice(("trainer", "producer-1"))
        self.signal(victim, signal.SIGKILL)

    def _damage_newest(self, rng: random.Random) -> None:
        """Flip a bit of the newest checkpoint, if there is one before it."""
        folder = stages.files_of(RunFolder(self.run), "gpt").checkpoints
        steps = Checkpoints.steps(_Look(folder)) if folder.is_dir() else []
        if len(steps) < 2:
            self.say("no two checkpoints yet")
            return
        names = ("model.safetensors", "optimizer.safetensors", "state.json")
        file = folder / f"step-{steps[-1]:08d}" / rng.choice(names)
        try:
            data = bytearray(file.read_bytes())
            place = rng.randrange(len(data))
            data[place] ^= 1 << rng.randrange(8)
            file.write_bytes(data)
        except OSError as e:  # the run pruned it meanwhile
            self.say(f"not damaged: {e}")
            return
        self.say(f"damage {file.parent.name}/{file.name} at byte {place}")

    def fill_disk(self, rng: random.Random) -> None:
        """No byte of room until the run says so, or ends; then it is launched again."""
        del rng
        if self.disk is None:
            self.say("no file system to fill")
            return
        self.ends_excused |= {1, 2, 3}
        said, ballast = self._complaints(), self.disk / "ballast"
        self.say("fill the disk")
        with open(ballast, "wb", buffering=0) as out:
            try:
                while out.write(bytes(1 << 16)):
                    pass
            except OSError as e:
                self.say(f"full: {e.strerror}")
        self.gate.limit(2, self.trained(2) + LAG + 3 * SLACK)
        deadline = time.monotonic() + DISK_S
        while self._complaints() == said and self.launchers[-1].poll() is None:
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        ballast.unlink()
        self.say(f"room again; it complained {self._complaints() - said} times")

    def _complaints(self) -> int:
        text = (self.config.parent / "console.log").read_text(errors="replace")
        return text.count("No space left") + text.count("make room")


class _Look:
    """A folder of checkpoints, only looked at."""

    def __init__(self, folder: Path):
        self.folder = folder


def schedule(seed: int, events: int, last_step: int, can_fill: bool) -> Schedule:
    """A random one of everything that there is."""
    kinds = (*KILLS, *FAULTS, *((FULL, FULL) if can_fill else ()))
    return random_schedule(seed, events, last_step, kinds)


def mount(folder: Path) -> Path | None:
    """A file system of `DISK_MB` at `folder`; None: this machine does not let us have one."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "chaos", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        return None
    return folder if done.returncode == 0 else None


def check_channel(run: RunFolder, file: Path) -> int:
    """I1 to I7 and I13 on what its trainers told to `file` (`channels.EventLog.check`), for each of
    them; how many events there are. AssertionError: what does not hold.
    """
    log = channels.EventLog()
    for line in file.read_text(errors="replace").splitlines():
        try:
            log.events.append(json.loads(line))
        except ValueError:  # a trainer was killed while it wrote this line
            continue
    log.check(run.config.transport.high_water_mark, 64)
    mismatches = log.of("digest_mismatch") + log.of("batch_failed")
    assert not mismatches, mismatches[:3]
    issued: dict[tuple, float] = {}
    for e in log.events:
        if e["kind"] == "lease":
            issued[e["gen"], e["lease"]] = e["t"]
        elif e["kind"] == "lease_end":
            held = e["t"] - issued.get((e["gen"], e["lease"]), e["t"])
            assert held < 16 * TTL_S + FREEZE_S + 60, f"I13: a lease was held for {held:.0f} s"
    return len(log.events)


def check_cursors(run: RunFolder) -> None:
    """I8: in every checkpoint, the position belongs to its step."""
    from trainer.history.schedule import schedule_of

    for stage in run.stages:
        plan = schedule_of(run, stage)
        saved = Checkpoints(stages.files_of(run, stage).checkpoints, 99)
        for step in saved.steps():
            position = saved.load(step).state["position"]
            due = plan.step(step)
            got = (position["step"], position["next_g"])
            assert got == (step, due.first_g + due.count), f"I8: {stage} {step}: {got}"
