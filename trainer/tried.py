"""What this process's card has been seen to do: a restart begins with the step it goes on with, and
tries neither the largest step again nor the fused attention.

A line per trial, for the same network, batch, code, TensorFlow, driver, flags and card, in the
user's cache: another run on the same settings need not try them either. What has another one, or
less memory than the step needed, is tried; so is everything where no GPU is, and after an end that
a restart would not mend.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from common.gpu.device import cudnn_version
from common.gpu.listing import list_gpus
from common.gpu.memory import this_card
from common.gpu.xla_env import CACHE, flags_in_force, tensorflow_version
from common.system.documents import parse_json
from common.system.errors import HOPELESS
from common.system.files import bytes_digest, digest, write_atomically
from common.system.home import user_cache
from common.system.lifecycle import Stop

if TYPE_CHECKING:
    from trainer.history.schedule import Schedule
    from trainer.step.contract import Step

FILE = "tried.jsonl"
_MOST_BYTES = 1 << 20
_CODE = ("trainer/step", "common/xtts", "common/gpu")
# Options of a step that its memory does not depend on, and that a resumed run may have others of.
_NO_MEMORY = ("init_seed", "learning_rate", "warmup_steps", "total_steps", "final_lr_ratio")

log = logging.getLogger(__name__)


class Tried:
    """What was tried by this process and those before it.

    Args:
        folder: where it is noted; None: nowhere.
    """

    def __init__(self, folder: Path | None):
        self._file = None if folder is None else folder / FILE

    @classmethod
    def of_process(cls) -> Tried:
        """Of all of the user's runs; where there is no place for that, beside what XLA's autotuner
        found for this process. Nowhere if XLA may keep nothing.
        """
        folder = os.environ.get(CACHE)
        return cls(None if not folder else user_cache() or Path(folder))

    def forget_if_hopeless(self, stop: Stop) -> None:
        """Where the process of `stop` ends hopelessly, something did not do after all."""
        stop.at_exit(lambda code: self.forget() if code == HOPELESS else None)

    def attention(self, why_not: Callable[[], str | None]) -> str | None:
        """What `why_not` says of the fused attention, which is asked unless it had nothing to say
        before.
        """
        key = _key("attention", {})
        if self.needed(key) is not None:
            return None
        reason = why_not()
        if reason is None:
            self.note(key, 0)
        return reason

    def needed(self, key: str | None) -> int | None:
        """Bytes that the trial of this key needed; None: it was not made."""
        if self._file is None or key is None:
            return None
        try:
            lines = self._newest()
        except OSError:
            return None
        return next((n for line in reversed(lines) if (n := _bytes(line, key)) is not None), None)

    def note(self, key: str | None, num_bytes: int) -> None:
        """The trial of this key was made, and needed so many."""
        if self._file is None or key is None:
            return
        line = json.dumps({"tried": key, "bytes": num_bytes}) + "\n"
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            if self._file.exists() and self._file.stat().st_size > _MOST_BYTES:
                lines = self._newest()
                write_atomically(self._file, b"\n".join([*lines[len(lines) // 2 :], b""]))
            with open(self._file, "a") as file:  # at once: other runs may append, too
                file.write(line)
        except OSError as e:  # the next start tries it again
            log.info("%s cannot be written: %s", self._file, e.strerror)

    def forget(self) -> None:
        """Whatever was noted."""
        if self._file is not None:
            try:
                self._file.unlink(missing_ok=True)
            except OSError as e:  # at a process's end: it keeps its exit code
                log.warning("%s cannot be removed: %s", self._file, e.strerror)

    def _newest(self) -> list[bytes]:
        with open(self._file, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _MOST_BYTES))
            return file.read(_MOST_BYTES).splitlines()


def key_of(step: Step, schedule: Schedule, largest: int) -> str | None:
    """What the memory of a stage's largest step depends on; None where there is no GPU."""
    options = dataclasses.asdict(step.options)
    bucket = schedule.train.buckets[largest]
    return _key(
        "step",
        {
            "operations": type(step.options.operations).__name__,  # it has no other fields
            "dims": step.dims.to_dict(),
            "options": {name: str(x) for name, x in options.items() if name not in _NO_MEMORY},
            "bucket": dataclasses.asdict(bucket),
            "buckets": len(schedule.train.buckets),
            "grouped": schedule.accumulate > 1,
        },
    )


def _key(what: str, facts: dict) -> str | None:
    card = this_card()
    if card is None:
        return None
    of_card = {"card": card.uuid, "driver": list_gpus().driver, "cudnn": cudnn_version()}
    of_xla = {"tensorflow": tensorflow_version(), "flags": flags_in_force(os.environ)}
    return digest({"what": what, **facts, **of_card, **of_xla, "code": _code()})


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
    if not isinstance(noted, dict) or noted.get("tried") != key:
        return None
    n = noted.get("bytes")
    return n if isinstance(n, int) and not isinstance(n, bool) and n >= 0 else None
