"""Where a producer's time goes, told in its log."""

from __future__ import annotations

import time
from collections import Counter

from producer.batches.maker import Made


class Meter:
    """Where the time goes, as a line in the log every `every_s` seconds."""

    def __init__(self, every_s: float):
        self._every_s = every_s
        self.total = self.bad = 0
        self._start()

    def _start(self) -> None:
        self._since, self._made, self._spent = time.monotonic(), 0, Counter()

    def spend(self, part: str, seconds: float) -> None:
        """Add to a part: one of the batch's, or `blocked` or `idle`."""
        self._spent[part] += seconds

    def batch(self, made: Made) -> None:
        """A batch has left."""
        self._made += 1
        self.total += 1
        self.bad += len(made.bad)
        self._spent.update(made.spent_s)

    def line(self, now: float) -> str | None:
        """The line, when it is due; counting then begins again."""
        elapsed = now - self._since
        if elapsed < self._every_s:
            return None
        waits = {name: self._spent.pop(name, 0.0) for name in ("blocked", "idle")}
        parts = ", ".join(
            f"{name} {1000 * s / max(1, self._made):.1f}" for name, s in self._spent.items()
        )
        text = (
            f"made {self._made / elapsed:.2f}/s ({self.total} batches so far, {self.bad} bad clips)"
        )
        text += f"; ms per batch: {parts}" if parts else ""
        text += "".join(f"; {name} {100 * s / elapsed:.0f} %" for name, s in waits.items())
        self._start()
        return text
