"""A stage's history on disk: its files, opened at its newest whole checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.system.errors import BadInput
from trainer.history import ledger
from trainer.history.checkpoint import Checkpoints, Read, Restored, load_folder
from trainer.history.ledger import Ledger
from trainer.history.schedule import Position

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StageFiles:
    """Where a stage keeps its history."""

    ledger: Path
    checkpoints: Path
    quarantine: Path


@dataclass(frozen=True)
class StageHistory:
    """A stage's history, open.

    `facts`, in every checkpoint, say whose history it is: "identity" and "dims".
    """

    files: StageFiles
    facts: dict
    checkpoints: Checkpoints
    ledger: Ledger


def restore(
    files: StageFiles,
    keep: int,
    facts: dict,
    load: Callable[[dict[str, dict[str, np.ndarray]]], None],
    settings: dict[str, str] | None = None,
    read: Read = load_folder,
) -> tuple[StageHistory, Position]:
    """Open a stage's history and load its newest whole checkpoint; a run without one is at step 0.

    Args:
        keep: how many checkpoints stay.
        load: takes the checkpoint's tensors (`Step.load_state_dict`).
        settings: the settings from now on, by dotted name, for the ledger.
        read: how a checkpoint is read.

    Raises:
        BadInput: checkpoints existed and none is whole, or the checkpoint belongs to another run.
    """
    checkpoints = Checkpoints(files.checkpoints, keep, read)
    lines = ledger.read(files.ledger)
    found = checkpoints.load_latest(ledger.last_checkpoint(lines))
    position = Position()
    if found is not None:
        if any(found.state[k] != facts[k] for k in facts):
            raise BadInput(
                f"{found.path} belongs to another run; give this run a folder of its own"
            )
        load(found.tensors)
        position = Position(**found.state["position"])
        log.info("resumed step %d from %s", position.step, found.path.name)
    _check_ledger(files.ledger, lines, found)
    book = Ledger(files.ledger)
    if lines:
        book.resume(position.step, lines)
    for change in book.settings(settings or {}, lines):
        log.info("from step %d on: %s", position.step + 1, change)
    return StageHistory(files, facts, checkpoints, book), position


def check_ended(files: StageFiles) -> None:
    """BadInput: the ledger of a finished stage differs from what its newest checkpoint recorded."""
    if not files.checkpoints.is_dir():
        return
    checkpoints = Checkpoints(files.checkpoints, keep=1)
    for step in reversed(checkpoints.steps()):
        try:
            found = checkpoints.load(step)
        except ValueError as e:
            log.warning("%s is damaged (%s); its stage has ended", checkpoints.path(step), e)
            continue
        _check_ledger(files.ledger, ledger.read(files.ledger), found)
        return


def _check_ledger(path: Path, lines: list[dict], found: Restored | None) -> None:
    """BadInput: the ledger is not the history that the checkpoint's weights have seen."""
    if found is None:
        return
    advice = (
        "; restore the file from a copy, or begin a new run from these weights: run=NEW"
        f" model.weights={found.path}"
    )
    steps = [line for line in ledger.fold(lines) if line["step"] <= found.step]
    if len(steps) != found.step:
        raise BadInput(
            f"{path} tells of {len(steps)} steps, and {found.path.name} was saved after"
            f" {found.step}: it is lost or cut{advice}"
        )
    extent = found.state.get("ledger")  # of checkpoints since they say so
    if extent is not None and ledger.extent(path, extent["bytes"]) != extent:
        raise BadInput(
            f"{path} is damaged: its first {extent['bytes']} bytes are not those that were there"
            f" when {found.path.name} was saved{advice}"
        )
