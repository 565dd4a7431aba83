"""Which largest steps this process's card has been seen to hold: a restart begins with the step it
goes on with, and does not try the largest again.

A line per step, in the folder of XLA's findings: for the same network, batch, code, TensorFlow and
card. What has another one, or less memory than the step needed, is tried; so is everything where no
GPU is, and after an end that a restart would not mend.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from common.gpu.memory import this_card
from common.gpu.xla_env import CACHE
from common.system.documents import parse_json
from common.system.errors import HOPELESS
from common.system.files import bytes_digest, digest
from common.system.lifecycle import Stop

if TYPE_CHECKING:
    from trainer.stages import Stage

FILE = "largest_steps.jsonl"
_MOST_BYTES = 1 << 20
_CODE = ("trainer/step", "common/xtts", "common/gpu")

log = logging.getLogger(__name__)


class Tried:
    """The steps tried by this process and those before it.

    Args:
        folder: where they are noted; None: nowhere.
        stop: of the process. Where it ends hopelessly, one of them did not fit after all: all are
            forgotten.
    """

    def __init__(self, folder: Path | None, stop: Stop):
        self._file = None if folder is None else folder / FILE
        stop.at_exit(lambda code: self.forget() if code == HOPELESS else None)

    @classmethod
    def of_process(cls, stop: Stop) -> Tried:
        """Beside what XLA's autotuner found for this process."""
        folder = os.environ.get(CACHE)
        return cls(None if not folder else Path(folder), stop)

    def needed(self, key: str | None) -> int | None:
        """Bytes that the step of this key needed; None: it was not tried."""
        if self._file is None or key is None:
            return None
        try:
            with open(self._file, "rb") as file:
                lines = file.read(_MOST_BYTES).splitlines()
        except OSError:
            return None
        return next((n for line in reversed(lines) if (n := _bytes(line, key)) is not None), None)

    def note(self, key: str | None, num_bytes: int) -> None:
        """The step of this key was tried, and needs so many."""
        if self._file is None or key is None:
            return
        try:
            with open(self._file, "a") as file:
                file.write(json.dumps({"step": key, "bytes": num_bytes}) + "\n")
        except OSError as e:  # the next start tries it again
            log.info("%s cannot be written: %s", self._file, e.strerror)

    def forget(self) -> None:
        """Whatever was noted."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)


def key_of(stage: Stage, largest: int) -> str | None:
    """What the memory of a stage's largest step depends on; None where there is no GPU."""
    card = this_card()
    if card is None:
        return None
    options = dataclasses.asdict(stage.step.options)
    bucket = stage.schedule.train.buckets[largest]
    return digest(
        {
            "operations": type(stage.step.options.operations).__name__,  # they have no fields
            "dims": stage.step.dims.to_dict(),
            "options": {name: str(value) for name, value in options.items()},
            "bucket": dataclasses.asdict(bucket),
            "buckets": len(stage.schedule.train.buckets),
            "grouped": stage.schedule.accumulate > 1,
            "card": card.uuid,
            "code": _code(),
        }
    )


@functools.cache
def _code() -> str:
    root = Path(__file__).resolve().parents[1]
    files = sorted(p for folder in _CODE for p in (root / folder).glob("*.py"))
    return bytes_digest(b"".join(p.read_bytes() for p in files))


def _bytes(line: bytes, key: str) -> int | None:
    try:
        noted = parse_json(line)
    except ValueError:  # a line cut by a kill
        return None
    if not isinstance(noted, dict) or noted.get("step") != key:
        return None
    n = noted.get("bytes")
    return n if isinstance(n, int) and not isinstance(n, bool) and n >= 0 else None
