"""Measures where time goes, by named parts of the work.

The parts: read, decode, resample, mel, codes, pack, serialise (producer); transfer, compute,
optimizer, checkpoint, logging (trainer).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Adds up seconds by part. Not thread-safe: give each thread its own."""

    def __init__(self):
        self.spent_s: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time inside as `name`; nested parts count twice."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds measured elsewhere."""
        self.spent_s[name] = self.spent_s.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """The seconds counted since the last call."""
        spent, self.spent_s = self.spent_s, {}
        return spent
