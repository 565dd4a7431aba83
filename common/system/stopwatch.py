"""Where time goes, by named parts of the work; and, for tests, parts that are slowed on purpose.

XTTS_TEST_SLOW="decode:2.0,transfer:15ms": `decode` takes twice as long each time it is measured, `transfer` 15 ms longer. The parts:
read, decode, resample, mel, codes, pack, serialise (producer); transfer, compute, optimizer, checkpoint, logging (trainer).
"""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

SLOW = "XTTS_TEST_SLOW"
_ENTRY = re.compile(r"(\w+):(\d+(?:\.\d+)?)(ms)?")


@functools.lru_cache(maxsize=8)
def _delays(text: str) -> dict[str, tuple[float, float]]:
    """part → (factor, seconds). ValueError: not in the form of the module's docstring."""
    delays = {}
    for entry in filter(None, text.split(",")):
        match = _ENTRY.fullmatch(entry.strip())
        if match is None:
            raise ValueError(f"{SLOW}: '{entry}' is not part:factor or part:N ms, as in decode:2.0,transfer:15ms")
        part, number, unit = match.groups()
        delays[part] = (1.0, float(number) / 1e3) if unit else (float(number), 0.0)
    return delays


def hold(part: str, spent_s: float) -> None:
    """Make a part that took `spent_s` as slow as the test wants it; at once where it wants nothing."""
    text = os.environ.get(SLOW)
    if text and part in (delays := _delays(text)):
        factor, seconds = delays[part]
        time.sleep(max(0.0, (factor - 1) * spent_s) + seconds)


class Stopwatch:
    """Adds up seconds by part. Not for several threads at once: each has its own."""

    def __init__(self):
        self.spent_s: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what happens inside as `name`; parts may lie inside each other, and count twice then."""
        start = time.perf_counter()
        try:
            yield
        finally:
            hold(name, time.perf_counter() - start)
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """Count seconds measured elsewhere."""
        self.spent_s[name] = self.spent_s.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """What has been counted since the last call."""
        spent, self.spent_s = self.spent_s, {}
        return spent
