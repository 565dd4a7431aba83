"""For tests: holds a run where the test wants it, so that an event hits the same work on every
machine.

XTTS_TEST_GATE=FOLDER. What a test may put into FOLDER, and take away again:
    limit        "STAGE STEP": no step after this one begins
    evaluating   the next evaluation does not go on; the same with `saving` and the next
                 checkpoint's snapshot

FOLDER/evaluating.held and FOLDER/saving.held tell the test that the run waits there. A stop is not
delayed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

GATE = "XTTS_TEST_GATE"
_POLL_S = 0.002
_MAX_S = 500.0


def held(step, stage: int, position: int, stopping: Callable[[], bool]):
    """`step` with its gate, if the test has one; `position` is the last trained step of stage
    `stage`.
    """
    folder = os.environ.get(GATE)
    return GatedStep(step, Path(folder), stage, position, stopping) if folder else step


class GatedStep:
    """A `trainer.step.gpt.Step` that waits as the folder says; everything else is the step's
    own.
    """

    def __init__(self, step, folder: Path, stage: int, position: int, stopping: Callable[[], bool]):
        self._step, self._folder, self._stage, self._stopping = step, folder, stage, stopping
        self._next, self._begun = position + 1, False

    def __getattr__(self, name: str):
        return getattr(self._step, name)

    def micro(self, bucket: int, batch: Mapping[str, Any], seed: tuple[int, int], scale: float):
        """See `Step.micro`."""
        self._begin()
        return self._step.micro(bucket, batch, seed, scale)

    def apply(self):
        """See `Step.apply`."""
        self._next, self._begun = self._next + 1, False
        return self._step.apply()

    def update(self, bucket: int, batch: Mapping[str, Any], seed: tuple[int, int]):
        """See `Step.update`."""
        self._begin()
        self._next, self._begun = self._next + 1, False
        return self._step.update(bucket, batch, seed)

    def evaluate(self, bucket: int, batch: Mapping[str, Any]):
        """See `Step.evaluate`."""
        self._stand("evaluating")
        return self._step.evaluate(bucket, batch)

    def snapshot(self) -> dict:
        """See `Step.snapshot`."""
        self._stand("saving")
        return self._step.snapshot()

    def _begin(self) -> None:
        if not self._begun:
            self._wait(
                lambda: (self._stage, self._next) > self._limit(),
                f"step {self._next} of stage {self._stage}: {self._folder}/limit",
            )
        self._begun = True

    def _limit(self) -> tuple[float, float]:
        try:
            stage, step = (self._folder / "limit").read_text().split()
        except FileNotFoundError:
            return float("inf"), 0
        return int(stage), int(step)

    def _stand(self, what: str) -> None:
        file = self._folder / what
        if file.exists():
            file.with_suffix(".held").touch()
            self._wait(file.exists, f"{what}: {file}")

    def _wait(self, closed: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _MAX_S
        while closed() and not self._stopping():
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{GATE} has held {what} for {_MAX_S:.0f} s: its test has forgotten it"
                )
            time.sleep(_POLL_S)
