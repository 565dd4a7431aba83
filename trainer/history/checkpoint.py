"""Checkpoints: written aside, fsynced, renamed; verified on load; damaged ones are set aside, never
deleted, never ignored silently.

`CHECKPOINTS/step-00000060/` holds `model.safetensors` (Coqui's key names), `optimizer.safetensors`
and `state.json`, which carries the position, seeds, sizes, identity, quarantine, and the digests of
the other two files and of itself.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.run.beginning import BEST
from common.system.documents import read_json
from common.system.errors import BadInput, RunError
from common.system.files import digest, fsync
from trainer.history.tensor_file import load_file, save_file

log = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{8,})$")
_PARTS = ("model", "optimizer")
# Room for the file system's own needs beside the bytes of a checkpoint.
_SPARE_BYTES = 16 << 20


class SaveFailed(Exception):
    """A checkpoint could not be written; the ones that exist are untouched."""


def name_of(step: int) -> str:
    """The name of a step's checkpoint folder."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step whose checkpoint a folder is, by its name; None for any other folder."""
    match = _NAME.match(path.name)
    return int(match.group(1)) if match else None


@dataclass
class Restored:
    """A verified checkpoint."""

    step: int
    state: dict
    tensors: dict[str, dict[str, np.ndarray]]  # "model", "optimizer" → name → array
    path: Path


def load_folder(folder: Path, step: int) -> Restored:
    """Read and verify the checkpoint of `step` in `folder`, and write nothing there: what a process
    does that does not own the folder. ValueError: what is damaged. RunError: it does not fit into
    memory.
    """
    try:
        state = read_json(folder / "state.json")
        digests = dict(state["digests"])
        own = digests.pop("state")
        if digest({**state, "digests": digests}) != own:
            raise ValueError("state.json does not match its own digest")
        tensors = {
            part: load_file(folder / f"{part}.safetensors", digests[part]) for part in _PARTS
        }
    except (OSError, KeyError, TypeError, ValueError) as e:
        raise ValueError(f"{type(e).__name__}: {e}") from e
    return Restored(step, state, tensors, folder)


Read = Callable[[Path, int], Restored]  # as `load_folder`


class ReadEarly:
    """The newest checkpoint in `folder`, read in a thread from now on: while TensorFlow is
    imported.
    """

    def __init__(self, folder: Path):
        steps = [step for p in folder.glob("step-*") if (step := step_of(p)) is not None]
        self._path = folder / name_of(max(steps)) if steps else None
        self._found: Future[Restored | None] | None = Future()
        self._thread = threading.Thread(
            target=_read_into, args=(self._found, self._path), name="read-checkpoint", daemon=True
        )
        if self._path is not None:
            self._thread.start()

    def load_folder(self, folder: Path, step: int) -> Restored:
        """As `load_folder`. The first call takes what was read already if it asks for that, and
        frees it otherwise: there may be memory for one checkpoint only.
        """
        path, found = self._path, self._found
        self._path = self._found = None
        if folder != path:
            del found
        if path is not None:
            self._thread.join()
        read = found.result() if folder == path and found.done() else None
        return read if read is not None else load_folder(folder, step)


def _read_into(found: Future[Restored | None], path: Path) -> None:
    try:
        found.set_result(load_folder(path, step_of(path)))
    except ValueError as e:  # whoever asks for it gets the error
        found.set_exception(e)
    except RunError:  # whoever asks for it reads it: there may be more memory by then
        found.set_result(None)


def _mb(n: int) -> str:
    return f"{n / 1e6:.0f} MB"


class Checkpoints:
    """The checkpoints of one stage.

    Args:
        folder: created if missing. BadInput: it cannot be written to.
        keep: how many of the newest stay; the best one stays too.
        read: how one is read.
    """

    def __init__(self, folder: str | os.PathLike, keep: int, read: Read = load_folder):
        self.folder, self.keep, self._read = Path(folder), keep, read
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe = self.folder / ".tmp-probe"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as e:
            raise BadInput(
                f"checkpoints cannot be written to {self.folder}: {e.strerror}; choose another run="
                " folder"
            ) from e
        for old in self.folder.glob(
            ".tmp-old-*"
        ):  # killed between the two renames of a replacement
            final = self.path(int(old.name.rsplit("-", 1)[1]))
            if not final.exists():
                os.replace(old, final)
        for left in self.folder.glob(".tmp-*"):
            log.info("removing %s, left by an unfinished save", left.name)
            shutil.rmtree(left) if left.is_dir() else left.unlink()

    def steps(self) -> list[int]:
        """Steps of all checkpoints, ascending; only loading shows whether they are whole."""
        return sorted(step for p in self.folder.iterdir() if (step := step_of(p)) is not None)

    def path(self, step: int) -> Path:
        """The folder of one checkpoint."""
        return self.folder / name_of(step)

    # -- save --------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        tensors: dict[str, dict[str, Any]],
        state: dict,
        go_on: Callable[[], bool] = lambda: True,
    ) -> Path:
        """Write checkpoint `step`, then drop surplus ones (the newest `keep` and the best stay).

        Args:
            tensors: "model" and "optimizer", each name → array or something that becomes one (see
                `tensor_file.save_file`); emptied on the way.
            state: JSON-able; `state["best_step"]` names the checkpoint with the lowest evaluation
                loss, or is None.
            go_on: asked before the rename; if it says no, nothing has happened.

        Raises:
            SaveFailed: not enough room, or the file system refused; says how much is needed and
                free.
        """
        needed = sum(a.nbytes for part in tensors.values() for a in part.values()) + _SPARE_BYTES
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise SaveFailed(
                f"checkpoint {step} needs {_mb(needed)}, {self.folder} has {_mb(free)} free; make"
                " room or lower train.keep"
            )
        tmp, final = self.folder / f".tmp-{step:08d}", self.path(step)
        try:
            shutil.rmtree(tmp, ignore_errors=True)
            tmp.mkdir()
            self._write(tmp, step, tensors, state)
            if not go_on():
                raise SaveFailed(f"checkpoint {step} was abandoned")
            if final.exists():  # the same step again, after a resume from an older one
                os.replace(final, self.folder / f".tmp-old-{step:08d}")
            os.replace(tmp, final)
            fsync(self.folder)
            shutil.rmtree(self.folder / f".tmp-old-{step:08d}", ignore_errors=True)
        except OSError as e:
            shutil.rmtree(tmp, ignore_errors=True)
            raise SaveFailed(
                f"checkpoint {step} could not be written to {self.folder}: {e.strerror or e}"
                f" ({_mb(needed)} needed)"
            ) from e
        self._prune(state.get("best_step"))
        return final

    def _write(self, tmp: Path, step: int, tensors: dict, state: dict) -> None:
        digests = {}
        for part in _PARTS:
            file = tmp / f"{part}.safetensors"
            digests[part] = save_file(tensors.get(part, {}), file)
            fsync(file)
        body = {**state, "step": step, "digests": digests}
        body["digests"]["state"] = digest(body)
        file = tmp / "state.json"
        file.write_text(json.dumps(body, indent=1))
        fsync(file)
        fsync(tmp)

    def _prune(self, best: int | None) -> None:
        steps, judged = self.steps(), self._judged_best()
        for step in steps[: -self.keep]:
            if step not in (best, judged):
                shutil.rmtree(self.path(step), ignore_errors=True)

    def _judged_best(self) -> int | None:
        """What the file beside the folder names (trainer/history/judgements.py)."""
        try:
            return read_json(self.folder.parent / BEST)["step"]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    # -- load --------------------------------------------------------------------------------------

    def load(self, step: int) -> Restored:
        """Read and verify one checkpoint. ValueError, RunError: as `load_folder`."""
        return self._read(self.path(step), step)

    def load_latest(self, existed: int | None) -> Restored | None:
        """The newest whole checkpoint; None if the run never had one.

        A damaged one is renamed to `damaged-step-…` and the one before it is used, with a warning.

        Args:
            existed: the newest checkpoint that the ledger speaks of.

        Raises:
            BadInput: there were checkpoints, and none is whole. A run never silently starts over.
            RunError: the newest does not fit into memory.
        """
        newest_damaged = None
        for step in reversed(self.steps()):
            try:
                found = self.load(step)
            except ValueError as e:
                aside = self._aside(step)
                os.replace(self.path(step), aside)
                log.warning(
                    "checkpoint step %d is damaged (%s): set aside as %s", step, e, aside.name
                )
                newest_damaged = newest_damaged or step
                continue
            if newest_damaged:
                log.warning(
                    "step %d damaged, using step %d; the steps between are trained again",
                    newest_damaged,
                    step,
                )
            return found
        if existed is not None or newest_damaged or list(self.folder.glob("damaged-step-*")):
            raise BadInput(
                f"no whole checkpoint in {self.folder}, but there was one (step"
                f" {existed or newest_damaged}); restore it from a copy, or start anew with another"
                " run= folder"
            )
        return None

    def _aside(self, step: int) -> Path:
        """A free name: the same step may be damaged twice."""
        path, again = self.folder / f"damaged-step-{step:08d}", 2
        while path.exists():
            path, again = self.folder / f"damaged-step-{step:08d}-{again}", again + 1
        return path
