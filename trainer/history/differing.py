"""Batches that were made twice, with different bytes: by two producers, or around a restart.

A batch is a function of its number, so this must not happen. Where bits must be equal
(`deterministic`), the run ends, since nobody knows which bytes are right; elsewhere such batches
are counted.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from common.system.errors import Hopeless

FILE = "differing.jsonl"  # in the stage's folder, a line per batch

log = logging.getLogger(__name__)


class BytesDiffer(Hopeless):
    """A batch of a deterministic run has two versions; nothing more is saved."""


class Differing:
    """Keeps a stage's list of such batches, each once.

    Args:
        folder: the folder of the stage.
        deterministic: whether the run ends with the first one.
    """

    def __init__(self, folder: Path, deterministic: bool):
        self._path, self._deterministic = folder / FILE, deterministic
        self._known = {(entry["plan"], entry["g"]) for entry in read(folder)}

    def look(self, server) -> None:
        """Record what the channel has found. BytesDiffer: there was something, and the run is
        deterministic.
        """
        for d in server.differing():
            entry = {"plan": d.plan, "g": d.g, "makers": d.makers, "digests": d.digests}
            self._found(f"batch {d.plan} {d.g}", entry)

    def trained_again(self, line: dict, before: dict) -> None:
        """Record a step that was lost in a crash and trained again on other bytes.

        Takes its two ledger lines. BytesDiffer as in `look`.
        """
        first, last = line["g"], line["g"] + line["count"] - 1
        batches = f"one of the batches train {first} to {last}"
        if first == last:
            batches = f"batch train {first}"
        entry = {
            "plan": "train",
            "g": first,
            "makers": [
                " and ".join(sorted(set(of.get("producers", ["?"])))) for of in (before, line)
            ],
            "digests": [before["digest"], line["digest"]],
            "step": line["step"],
        }
        self._found(f"{batches} (step {line['step']}, before the restart and after it)", entry)

    def _found(self, what: str, entry: dict) -> None:
        first, second = entry["makers"]
        makers = f"by {first} and by {second}" if first != second else f"both times by {first}"
        text = f"{what} was made twice, with different bytes, {makers}"
        if (entry["plan"], entry["g"]) not in self._known:
            self._known.add((entry["plan"], entry["g"]))
            log.warning("%s", text)
            self._write(entry)
        if self._deterministic:
            raise BytesDiffer(
                f"{text}: this run is deterministic, and nobody knows which bytes are right."
                " Nothing was saved since the last checkpoint, from which the same command goes"
                " on; use producers of one kind of device, and look for recordings that have"
                " changed"
            )

    def _write(self, entry: dict) -> None:
        try:
            with open(self._path, "a") as f:
                f.write(json.dumps(entry) + "\n")
        except OSError as e:  # it was logged; training does not end over its list
            log.error("%s: %s", self._path, e.strerror or e)


def read(folder: Path) -> list[dict]:
    """The batches of a stage that differ, without a torn last line."""
    path, found = folder / FILE, []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            entry = json.loads(text)
        except ValueError:
            continue
        if isinstance(entry, dict) and {"plan", "g"} <= entry.keys():
            found.append(entry)
    return found
