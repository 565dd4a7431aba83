"""Reads a run's figures as they come: new whole lines of each stage's metrics.jsonl, from where an
earlier process stopped.

The files are the queue between training and whoever forwards its curves: the trainer does not know
the readers and waits for nothing, and what a service misses while it is away is read later.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from common.system.files import write_atomically

log = logging.getLogger(__name__)

MOST_BYTES = 1 << 20  # bytes of a file at a time
_PLACE = ("time", "step", "epoch")
_SPEED = ("step_ms", "wait_ms", "ready", "target", "rows", "bytes")


@dataclass(frozen=True)
class Record:
    """The figures of one step of a stage, by name: `train/loss`, `eval/audio`,
    `speed/step_ms`.
    """

    stage: str
    step: int
    time_s: float
    values: Mapping[str, float]


class Follower:
    """Reads on from a position that outlives the process.

    Args:
        files: stage → its metrics.jsonl, which need not exist yet.
        memory: where to keep the position, and what a service needs to continue its run.
    """

    def __init__(self, files: Mapping[str, Path], memory: Path):
        self._files, self._memory = files, memory
        try:
            kept = json.loads(memory.read_text(encoding="utf-8"))
            self._offsets = {str(k): int(v) for k, v in kept["offsets"].items()}
            self.known = kept["known"]
        except FileNotFoundError:
            self._offsets, self.known = {}, {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            log.warning("%s is damaged (%s): everything is sent again", memory, e)
            self._offsets, self.known = {}, {}
        self._next = dict(self._offsets)

    def read(self) -> list[Record]:
        """A bounded part of what came since the last `sent`, in order."""
        found = []
        self._next = dict(self._offsets)
        for stage, path in self._files.items():
            try:
                with open(path, "rb") as f:
                    found += self._records(stage, f)
            except FileNotFoundError:
                continue
        return found

    def _records(self, stage: str, file: BinaryIO) -> list[Record]:
        """The next records of a stage. Skips a part without any, or without a whole line."""
        at = self._offsets.get(stage, 0)
        if file.seek(0, 2) < at:
            at = 0  # the file was started over
        while True:
            file.seek(at)
            data = file.read(MOST_BYTES)
            full = len(data) == MOST_BYTES
            whole = data[: data.rfind(b"\n") + 1] or (data if full else b"")
            at += len(whole)
            self._next[stage] = at
            found = [r for line in whole.splitlines() if (r := record_of(stage, line))]
            if found or not full:
                return found

    def sent(self) -> None:
        """Mark what `read` gave as sent: no process reads it again."""
        if self._next != self._offsets:
            self._offsets = dict(self._next)
            self.keep()

    def keep(self) -> None:
        """Save the position and the memory."""
        self._memory.parent.mkdir(exist_ok=True)
        write_atomically(
            self._memory, json.dumps({"offsets": self._offsets, "known": self.known}) + "\n"
        )


def record_of(stage: str, line: bytes) -> Record | None:
    """A line of metrics.jsonl; None: it has no figures of a step, or is damaged."""
    try:
        found = json.loads(line)
        step, time_s = int(found["step"]), float(found["time"])
    except (ValueError, KeyError, TypeError):
        return None
    values = {}
    for key, value in found.items():
        if key == "speed" and isinstance(value, dict):
            values |= {f"speed/{k}": v for k, v in value.items()}
        elif key.startswith("eval_"):
            values[f"eval/{key.removeprefix('eval_')}"] = value
        elif key not in _PLACE:
            values[f"{'speed' if key in _SPEED else 'train'}/{key}"] = value
    numbers = {
        k: float(v)
        for k, v in values.items()
        if isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v)
    }
    return Record(stage, step, time_s, numbers) if numbers else None
