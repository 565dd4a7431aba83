"""How fast a stage runs and what holds it up, from what the feed, the clock and the producers' own
timings say, over the last steps.

The feed reports each batch as it is taken (`fed`), the observer each step in order (`step`). Steps
during which something was compiled, saved or evaluated, and the first ones, are left out.
"""

from __future__ import annotations

import math
import os
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from common.system import trace
from common.transport.messages import Notes
from trainer.report.clock import Clock, Tick
from trainer.report.gpu_use import GpuUse, Use
from trainer.report.verdict import Measured, ProducerLoad, Settings, Verdict, verdict

RECENT_STEPS = 50
# the loop runs two steps behind the device, the feed two batches ahead of it: until then ends are
# noticed in pairs
WARM_UP_STEPS = 5
ENOUGH = 10  # steps, before anything is said of them
NEARLY_IDLE = 30.0  # per cent
MAX_WAIT, MAX_VARIATION = 0.01, 0.30  # more than that of the time, of the mean: one warning
MAX_WAIT_ON_CPUS = 0.50  # where producers and trainer share the cores, some waiting is healthy


@dataclass(frozen=True)
class FedRecord:
    """A batch taken by the step.

    `asked`, `got`: time.perf_counter around the loop's wait for it; `feed_s`: check and transfer.

    `notes`: the producer's notes on making it; `transit_s`: from there to the feed, None if it had
    to wait here.
    """

    bucket: int
    rows: int
    producer: str
    asked: float
    got: float
    feed_s: float
    transit_s: float | None
    notes: Notes = field(default_factory=Notes)


@dataclass(frozen=True)
class StepRecord:
    """A step: `total_s` from the one before on the device's clock, `wait_s` of it without data,
    `busy_s` of it computing.
    """

    total_s: float
    wait_s: float
    busy_s: float
    batches: tuple[FedRecord, ...]
    number: int = 0  # of the stage's steps in this process, from 0
    # its batches were made while training went on; before, producers wait for leases for other
    # reasons
    settled: bool = True
    # something else happened since the step before: it is timed, but tells nothing about speed
    interrupted: bool = False

    @property
    def buckets(self) -> tuple[int, ...]:
        """Its batches' shapes."""
        return tuple(sorted(b.bucket for b in self.batches))


@dataclass(frozen=True)
class Speed:
    """The figures of the last steps."""

    steps: int
    measured: Measured
    verdict: Verdict
    step_s: float
    utterances_per_s: float
    produced_per_s: float
    per_bucket: Mapping[
        tuple[int, ...], tuple[int, float, float]
    ]  # steps, mean, standard deviation of the busy seconds
    cpu_s: float  # of the producers, per utterance
    gpus: tuple[Use, ...] = ()

    @property
    def variation(self) -> float | None:
        """The largest std/mean of a shape's steps.

        Of shapes with too few steps each, as steps of several batches mostly are: that of all
        their steps, each divided by its shape's mean. None: of no shape are there two."""
        enough = [std / mean for n, mean, std in self.per_bucket.values() if n >= ENOUGH and mean]
        few = [
            (n, (std / mean) ** 2)
            for n, mean, std in self.per_bucket.values()
            if 2 <= n < ENOUGH and mean
        ]
        count = sum(n for n, _ in few)
        if count >= ENOUGH:  # a mean of n takes one of n degrees of freedom
            enough.append(math.sqrt(sum(n * square for n, square in few) / (count - len(few))))
        return max(enough, default=None)

    def line(self, queue: str) -> str:
        """For the log; `queue`: "3/8", batches that wait and how many may exist."""
        spread = "" if self.variation is None else f" (±{100 * self.variation:.0f}%)"
        text = f"wait_data={100 * self.measured.wait:.1f}% step={1e3 * self.step_s:.1f}ms{spread}"
        text += (
            f" utterances/s={self.utterances_per_s:.1f} produced/s={self.produced_per_s:.2f}"
            f" queue={queue}"
        )
        v = self.verdict
        text += f" bottleneck={v.cause}" + (f" ({v.part})" if v.part else "")
        return "; ".join([text, *map(str, self.gpus)])

    def record(self) -> dict:
        """For metrics.jsonl and TensorBoard: flat names, plain numbers, milliseconds."""
        m = self.measured
        flat = {
            "steps": self.steps,
            "step_ms": 1e3 * self.step_s,
            "steps_per_s": 1 / self.step_s if self.step_s else 0.0,
            "utterances_per_s": self.utterances_per_s,
            "wait_percent": 100 * m.wait,
            **({} if self.variation is None else {"variation_percent": 100 * self.variation}),
            "produced_per_s": self.produced_per_s,
            "producers_could_make_per_s": m.made_per_s,
            "ceiling_per_s": m.ceiling,
            "feed_ms": 1e3 * m.feed_s,
            "producer_cpu_ms_per_utterance": 1e3 * self.cpu_s,
        }
        if m.transit_s is not None:
            flat["transit_ms"] = 1e3 * m.transit_s
        for key, (n, mean, std) in self.per_bucket.items():
            name = "bucket_" + "+".join(map(str, key))
            flat |= {f"{name}_steps": n, f"{name}_mean_ms": 1e3 * mean, f"{name}_std_ms": 1e3 * std}
        for p in m.producers:
            flat |= {f"{p.name}_{part}_ms": 1e3 * s for part, s in p.parts_s.items()}
        for use in self.gpus:
            flat |= {
                f"gpu{use.index}_percent": use.percent,
                f"gpu{use.index}_memory_mb": use.memory_mb,
            }
        return {k: round(v, 3) for k, v in flat.items()}


class Watch:
    """Collects; one per stage.

    `fed` is called by the loop's thread through the feed, everything else by the observer.
    """

    def __init__(
        self,
        settings: Settings,
        clock: Clock | None = None,
        gpu_use: GpuUse | None = None,
        *,
        recent: int = RECENT_STEPS,
        warm_up: int = WARM_UP_STEPS,
    ):
        self.settings, self.clock, self._gpu_use = settings, clock, gpu_use
        self.logged_s: deque[float] = deque(maxlen=recent)  # what telling of each step took
        self.saved_s: list[float] = []  # what each checkpoint took
        self._fed: dict[int, FedRecord] = {}  # train batches by number
        self.steps: deque[StepRecord] = deque(maxlen=recent)
        self._last = -math.inf  # when the step before had finished
        self._interrupted = True
        self._left_out, self._number = warm_up, 0
        self._unsettled = settings.high_water_mark
        self._said: set[tuple[str, str]] = set()
        self._gpus: tuple[Use, ...] = ()

    def fed(self, g: int, record: FedRecord) -> None:
        """Note that the loop has taken train batch `g`."""
        self._fed[g] = record

    def interrupted(self) -> None:
        """Note that something other than training happens now: the step around it tells nothing
        about speed.
        """
        self._interrupted = True
        self._left_out = max(self._left_out, 1)
        self._unsettled = self.settings.high_water_mark

    def beside_compiling(self) -> None:
        """Note that programs are compiled for other steps than the one that is made now: neither it
        nor those that are still on the device tell anything about speed.
        """
        self.interrupted()
        self._left_out = max(self._left_out, WARM_UP_STEPS)

    def step(self, first_g: int, count: int) -> StepRecord | None:
        """Note that the next step has finished; return its record, or None."""
        batches = tuple(
            b for g in range(first_g, first_g + count) if (b := self._fed.pop(g, None)) is not None
        )
        tick = self.clock.take() if self.clock is not None else None
        if tick is None or len(batches) != count:
            return None
        record = _record(
            self._last, tick, batches, self._interrupted, self._number, self._unsettled <= 0
        )
        if record is not None:
            _trace(self._last, tick, batches, self._interrupted, (first_g, count))
        self._number += 1
        self._unsettled -= count
        self._last, self._interrupted = tick.finished, False
        if self._left_out:
            self._left_out -= 1
            if self._gpu_use is not None:
                self._gpu_use.take()  # cards that compile, save or evaluate
        elif record is not None and not record.interrupted:
            self.steps.append(record)
        return record

    def speed(self, steps: Sequence[StepRecord] | None = None) -> Speed | None:
        """The figures of the last steps (or of those given); None if there are too few."""
        steps = self.steps if steps is None else steps
        if len(steps) < ENOUGH:
            return None
        batches = [b for s in steps for b in s.batches]
        settled = [b for s in steps for b in s.batches if s.settled]
        total = sum(s.total_s for s in steps)
        measured = Measured(
            batch_s=total / len(batches),
            wait_s=sum(s.wait_s for s in steps) / len(batches),
            feed_s=statistics.fmean(b.feed_s for b in batches),
            transit_s=_mean([b.transit_s for b in batches if b.transit_s is not None]),
            trainer_s=_trainer_parts(self.clock, len(batches) / len(steps)),
            producers=tuple(_loads(settled if len(settled) >= ENOUGH else batches)),
            settings=self.settings,
        )
        per_bucket: dict[tuple[int, ...], list[float]] = {}
        for s in steps:
            per_bucket.setdefault(s.buckets, []).append(s.busy_s)
        rows = sum(b.rows for b in batches)
        return Speed(
            steps=len(steps),
            measured=measured,
            verdict=verdict(measured),
            step_s=total / len(steps),
            utterances_per_s=rows / total,
            produced_per_s=sum(
                len([b for b in batches if b.producer == p.name]) for p in measured.producers
            )
            / total,
            per_bucket={
                k: (len(v), statistics.fmean(v), statistics.pstdev(v))
                for k, v in sorted(per_bucket.items())
            },
            cpu_s=sum(b.notes.cpu_ms for b in batches) / 1e3 / max(1, rows),
            gpus=self._gpus,
        )

    def look(self) -> None:
        """Note the cards' use since the last call; in a profile, during the steps that run freely,
        not during those that wait.
        """
        profiled = self.clock is not None and self.clock.sync_from is not None
        if self._gpu_use is not None and not (profiled and self.clock.sync):
            self._gpus = tuple(self._gpu_use.take(keep=profiled)) or self._gpus

    def warnings(self, speed: Speed) -> list[str]:
        """Warnings worth a line, each cause once."""
        found = []
        v = speed.verdict
        on_cpus = not speed.gpus and self.settings.producers_on == "cpu"
        most = MAX_WAIT_ON_CPUS if on_cpus else MAX_WAIT
        if speed.measured.wait > most and v.cause != "trainer":  # which is as it should be
            found.append((("wait", v.cause), v.sentence))
        # On CPUs steps always vary: with other programs, and with the run's own producers.
        uneven = (speed.variation or 0.0) > MAX_VARIATION
        if uneven and not on_cpus:
            text = (
                f"steps of one shape vary by {100 * speed.variation:.0f} % of their mean:"
                f" {self._why_uneven(speed)}"
            )
            found.append((("variation", ""), text))
        fresh = [(key, text) for key, text in found if key not in self._said]
        self._said |= {key for key, _ in fresh}
        return [text for _, text in fresh]

    def _why_uneven(self, speed: Speed) -> str:
        shared = [u for u in speed.gpus if {"trainer", "producer"} <= set(u.roles)]
        if shared:
            return (
                f"trainer and producer share GPU {shared[0].index}; give the producers another one"
                " (--data-gpu), or fewer leases"
            )
        load = os.getloadavg()[0]
        if load > self.settings.cores:
            busy = (
                f"{load:.0f} threads, of this run and other programs, compete for"
                f" {self.settings.cores} cores"
            )
            return (
                f"{busy}; end the others, or set producers.decode_threads or producers.count lower"
            )
        return "something else uses the device; look at `nvidia-smi` and `top`"

    def close(self) -> None:
        """End the thread."""
        if self._gpu_use is not None:
            self._gpu_use.close()


def spare(gpus: Sequence[Use]) -> str:
    """What an idle producers' card could be used for; "" if there is none."""
    idle = [u for u in gpus if u.roles == ("producer",) and u.percent < NEARLY_IDLE]
    if not idle:
        return ""
    u = idle[0]
    room = (
        f"{(u.total_mb - u.memory_mb) / 1024:.0f} GB are free for samples, an evaluation or a"
        " second trainer"
    )
    return f"GPU {u.index} is {u.percent:.0f} % busy making batches: {room}"


def _record(
    last: float,
    tick: Tick,
    batches: tuple[FedRecord, ...],
    interrupted: bool,
    number: int,
    settled: bool,
) -> StepRecord | None:
    """The step on the device's clock: it waits for data only once the step before has finished.

    After an interruption it counts from
    when its first batch was asked for, if the device was not at the step before for longer."""
    began = min(b.asked for b in batches)
    if interrupted:
        last = max(last, began)
    total = tick.finished - last
    wait = sum(max(0.0, b.got - max(b.asked, last)) for b in batches)
    # From the first call on, or from when the step before was done, without what later
    # micro-batches were waited for.
    later = sum(max(0.0, b.got - max(b.asked, tick.began, last)) for b in batches)
    busy = tick.finished - max(last, tick.began) - later
    if tick.finished < began:
        return None
    return StepRecord(
        total, min(wait, total), max(0.0, busy), batches, number, settled, interrupted
    )


def _trace(
    last: float,
    tick: Tick,
    batches: tuple[FedRecord, ...],
    interrupted: bool,
    group: tuple[int, int],
) -> None:
    """The step as the device sees it, and the calls that the loop made for it."""
    about = {"g": group[0], "count": group[1]}
    if interrupted:
        last = max(last, min(b.asked for b in batches))
    trace.span("device", "step", last, tick.finished, **about)
    trace.span("device", "compute", max(last, tick.began), tick.finished, **about)
    for b in batches:
        since = max(b.asked, last)
        if b.got > since:
            trace.span("device", "wait", since, b.got, **about)
    trace.span("loop", "issue", tick.began, tick.issued, **about)


def _trainer_parts(clock: Clock | None, per_step: float) -> dict[str, float]:
    """Seconds per batch of the step's parts, known only where the clock made calls wait."""
    if clock is None or not clock.samples:
        return {}
    return {part: statistics.fmean(seconds) / per_step for part, seconds in clock.samples.items()}


def _mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _loads(batches: list[FedRecord]) -> list[ProducerLoad]:
    """Each producer's mean timings, by name."""
    by_name: dict[str, list[FedRecord]] = {}
    for b in batches:
        if b.notes.spent_ms:
            by_name.setdefault(b.producer, []).append(b)
    loads = []
    for name, of in sorted(by_name.items()):
        parts: dict[str, float] = {}
        for b in of:
            for part, ms in b.notes.spent_ms.items():
                parts[part] = parts.get(part, 0.0) + ms / 1e3 / len(of)
        clips = statistics.fmean(b.notes.clips for b in of)
        cached = sum(b.notes.cached for b in of) / max(1, sum(b.rows for b in of))
        loads.append(ProducerLoad(name, len(of), parts, of[-1].notes.threads, clips, cached))
    return loads
