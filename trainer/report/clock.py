"""Measures when the device really finished each step: it goes on computing after a step's call has
returned, and the loop does not wait for it.

`Clock.watch(step)` gives a step that does the same and is timed. The loop has a thread that reads
each update's scalars as soon as it was issued (`Step.read`); the read returns when the update has
ended, and the clock notes that time. For profiles, `sync_from` makes later calls wait for the
device, and keeps the time of each.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from common.system.stopwatch import Stopwatch

_PATIENCE_S = 30.0


@dataclass(frozen=True)
class Tick:
    """One update, in seconds of time.perf_counter: its first call began, its last returned, the
    device had finished.
    """

    began: float
    issued: float
    finished: float


class Clock:
    """Ticks of the updates in order: `watch` a step with it, then `take` one tick per update."""

    def __init__(self):
        self._changed = threading.Condition()
        self._began: float | None = None
        self._running: deque[tuple[float, float]] = deque()  # issued and not yet read
        self._ticks: deque[Tick] = deque()
        self.updates = 0
        self.sync_from: int | None = (
            None  # calls wait for the device from this update on (counted from 0)
        )
        self.samples: dict[
            str, list[float]
        ] = {}  # part → seconds of each update whose calls waited
        self._group = Stopwatch()  # of the update in progress

    @property
    def sync(self) -> bool:
        """Whether calls wait for the device now."""
        return self.sync_from is not None and self.updates >= self.sync_from

    def watch(self, step) -> ClockedStep:
        """`step`, timed."""
        return ClockedStep(step, self)

    def take(self) -> Tick | None:
        """The oldest tick not yet taken; None: its update's scalars have not been read."""
        with self._changed:
            self._changed.wait_for(lambda: self._ticks or not self._running, _PATIENCE_S)
            return self._ticks.popleft() if self._ticks else None

    # for ClockedStep

    def call(self, part: str, function: Callable, *args):
        """One of a group's calls."""
        if self._began is None:
            self._began = time.perf_counter()
        with self._group.part(part):
            result = function(*args)
            if self.sync:
                float(result["loss"])
        return result

    def issued(self) -> None:
        """A group's last call has returned."""
        with self._changed:
            self._running.append((self._began, time.perf_counter()))
        self._began = None
        for part, seconds in self._group.take().items():
            if self.sync:
                self.samples.setdefault(part, []).append(seconds)
        self.updates += 1

    def finished(self) -> None:
        """The oldest update's scalars have arrived."""
        now = time.perf_counter()
        with self._changed:
            if self._running:
                self._ticks.append(Tick(*self._running.popleft(), now))
                self._changed.notify_all()


class ClockedStep:
    """A `trainer.step.contract.Step` whose updates tell a clock; everything else is the
    step's own.
    """

    def __init__(self, step, clock: Clock):
        self._step, self._clock = step, clock

    def __getattr__(self, name: str):
        return getattr(self._step, name)

    def micro(self, bucket: int, batch: Mapping[str, Any], seed: tuple[int, int], scale: float):
        """See `Step.micro`."""
        return self._clock.call("compute", self._step.micro, bucket, batch, seed, scale)

    def apply(self):
        """See `Step.apply`."""
        result = self._clock.call("optimizer", self._step.apply)
        self._clock.issued()
        return result

    def update(self, bucket: int, batch: Mapping[str, Any], seed: tuple[int, int]):
        """See `Step.update`."""
        result = self._clock.call("compute", self._step.update, bucket, batch, seed)
        self._clock.issued()
        return result

    def read(self, scalars: Mapping[str, Any]) -> dict[str, float]:
        """See `Step.read`.

        Of updates alone, in their order; an evaluation's scalars are read through the step itself.
        """
        values = self._step.read(scalars)
        if "grad_norm" in values:
            self._clock.finished()
        return values
