"""The ledger: one line per step, in order, append-only; folded, it is the history that the weights
have seen.

A line may lag behind the device, but lines up to step N are on disk before checkpoint N is renamed.
`{"resumed_from": N}` says that the steps after N were lost with a crash and are trained again;
folding drops the earlier lines of those steps. A torn last line is what a SIGKILL leaves, and is
dropped. `{"checkpoint": N}` is written after checkpoint N exists.
`{"settings": {"a.b": "value"}}` are those that hold from there on: all of them first, then what a
resume changed.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import xxhash

from common.system.documents import parse_json
from common.system.errors import BadInput
from common.system.files import bytes_digest

_NUMBERS = ("step", "resumed_from", "checkpoint")


def extent(path: str | os.PathLike, num_bytes: int) -> dict:
    """{"bytes": n, "digest": xxh3-128 of them}: the first `num_bytes` of a ledger."""
    with open(path, "rb") as file:
        data = file.read(num_bytes)
    return {"bytes": len(data), "digest": bytes_digest(data)}


def combine(digests: list[str]) -> str:
    """The digest of a step: xxh3-128 over its batches' digests, in order."""
    h = xxhash.xxh3_128()
    for d in digests:
        h.update(bytes.fromhex(d))
    return h.hexdigest()


def read(path: str | os.PathLike) -> list[dict]:
    """All whole lines. BadInput: a line that is not the last does not parse."""
    path = Path(path)
    if not path.exists():
        return []
    raw = path.read_bytes().split(b"\n")
    raw.pop()  # what follows the last newline: empty, or torn
    lines = []
    for i, text in enumerate(raw):
        try:
            lines.append(_line(text))
        except ValueError as e:
            raise BadInput(
                f"{path}:{i + 1}: not a ledger line ({e}); restore the file from a copy, or move it"
                " away and start a new run"
            ) from e
    return lines


def _line(text: bytes) -> dict:
    """ValueError: no line of a ledger."""
    line = parse_json(text)
    if not isinstance(line, dict):
        raise ValueError("no object")
    for key in _NUMBERS:
        if key in line and not (type(line[key]) is int and line[key] >= 0):
            raise ValueError(f"{key} is no number of a step")
    return line


def fold(lines: list[dict]) -> list[dict]:
    """The steps that stand, ascending: what the current weights were trained on.

    Raises:
        BadInput: the steps are not 1, 2, 3, …: something was lost or trained twice.
    """
    steps: list[dict] = []
    for line in lines:
        if "resumed_from" in line:
            while steps and steps[-1]["step"] > line["resumed_from"]:
                steps.pop()
        elif "step" in line:
            steps.append(line)
    for i, line in enumerate(steps):
        if line["step"] != i + 1:
            raise BadInput(f"the ledger breaks at step {line['step']} where {i + 1} was expected")
    return steps


def lost_steps(lines: list[dict], step: int) -> dict[int, dict]:
    """The lines of the steps after `step` that were trained since the last resume, by number: a
    resume at `step` loses them.
    """
    lost: dict[int, dict] = {}
    for line in lines:
        if "resumed_from" in line:
            lost.clear()
        elif line.get("step", 0) > step:
            lost[line["step"]] = line
    return lost


def last_checkpoint(lines: list[dict]) -> int | None:
    """The newest step of which the ledger says that a checkpoint existed."""
    saved = [line["checkpoint"] for line in lines if "checkpoint" in line]
    return saved[-1] if saved else None


class Ledger:
    """Appends to a run's ledger. One writer: the holder of RUN/lock.

    on_difference(line, line before): a step that a resume had lost was trained again, on other
    bytes.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self._cut_torn_line()
        self._fd: int | None = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._length = os.fstat(self._fd).st_size
        self._hash = xxhash.xxh3_128(self.path.read_bytes())
        self._unwritten: list[bytes] = []
        self._lost: dict[int, dict] = {}
        self.on_difference: Callable[[dict, dict], None] = lambda line, before: None

    def _cut_torn_line(self) -> None:
        if not self.path.exists():
            return
        data = self.path.read_bytes()
        keep = data.rfind(b"\n") + 1
        if keep < len(data):
            os.truncate(self.path, keep)

    def resume(self, step: int, lines: list[dict] = ()) -> None:
        """Say that training goes on after `step`; what later ones of `lines` (the ledger so far)
        say is void, but compared with.
        """
        self._lost = lost_steps(lines, step)
        self._append({"resumed_from": step})
        self.flush()

    def settings(self, now: dict[str, str], lines: list[dict]) -> list[str]:
        """Note the settings that hold from here on; returns what of them is not as `lines`, the
        ledger so far, say: "a.b: 3 → 4".
        """
        known: dict[str, str] = {}
        for line in lines:
            known |= line.get("settings", {})
        changed = {k: v for k, v in now.items() if known.get(k) != v}
        if changed:
            self._append({"settings": changed})
        return [f"{k}: {known.get(k, 'unset')} → {v}" for k, v in changed.items()] if known else []

    def append(self, line: dict) -> None:
        """One step's line. Durable after the next `flush`."""
        self._append(line)
        before = self._lost.pop(line.get("step"), None)
        if before is not None and before.get("digest") != line.get("digest"):
            self.on_difference(line, before)

    def checkpoint(self, step: int) -> None:
        """Say that checkpoint `step` is on disk."""
        self._append({"checkpoint": step})
        self.flush()

    def _append(self, line: dict) -> None:
        self._unwritten.append(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        with contextlib.suppress(
            OSError
        ):  # a full disk: kept, and written with the next line or `flush`, which says so
            self._write_out()

    def _write_out(self) -> None:
        data = b"".join(self._unwritten)
        try:
            done = 0
            while done < len(data):
                done += os.write(self._fd, data[done:])
        except OSError:
            os.ftruncate(self._fd, self._length)  # no half line in the middle of the file
            raise
        self._length += len(data)
        self._hash.update(data)
        self._unwritten.clear()

    def flush(self) -> None:
        """Everything appended is on disk when this returns.

        OSError: it is not; it is kept for the next try.
        """
        self._write_out()
        os.fsync(self._fd)

    @property
    def extent(self) -> dict:
        """How far the file goes, and its digest, as the function of this name tells."""
        return {"bytes": self._length, "digest": self._hash.hexdigest()}

    def close(self) -> None:
        """Flush and close."""
        if self._fd is not None:
            try:
                self.flush()
            finally:
                os.close(self._fd)
                self._fd = None
