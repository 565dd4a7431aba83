"""Checkpoints written while training goes on: a snapshot is held, a thread writes it to disk, and
the loop learns how that ended.

At most one save is in flight. Nothing here knows what a state is made of.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from trainer.history.checkpoint import Checkpoints, SaveFailed

_ABANDONED_S = 1.0


@dataclass(frozen=True)
class Outcome:
    """How a save ended.

    `pause_s`: how long the loop waited; `seconds`: until the checkpoint was on disk; `error`: None
    if it is there.
    """

    step: int
    pause_s: float
    seconds: float
    error: SaveFailed | None


class Saver:
    """Writes checkpoints of one stage in the background.

    Args:
        saving: a context that the thread enters around each save, so that a stop waits for it.
    """

    def __init__(self, checkpoints: Checkpoints, saving: Callable[[], AbstractContextManager]):
        self._checkpoints, self._saving = checkpoints, saving
        self._thread: threading.Thread | None = None
        self._ended: Outcome | BaseException | None = None
        self._abandoned = threading.Event()

    @property
    def busy(self) -> bool:
        """Whether a save was begun whose outcome has not been taken."""
        return self._thread is not None

    def begin(self, step: int, snapshot: Callable[[], dict], state: dict) -> None:
        """Take the snapshot now and write it in the background.

        The previous outcome must have been taken.

        Args:
            snapshot: returns the "model" and "optimizer" arrays of this moment (see
                `Step.snapshot`).
            state: as in `Checkpoints.save`.
        """
        if self.busy:
            raise RuntimeError("a save is in flight; take its outcome first")
        began = time.perf_counter()
        tensors = snapshot()
        pause_s = time.perf_counter() - began
        self._thread = threading.Thread(
            target=self._run, args=(step, tensors, state, began, pause_s), name="saver", daemon=True
        )
        self._thread.start()

    def take(self, timeout_s: float) -> Outcome | None:
        """The outcome of the save in flight, once; None if there is none, or it has not ended
        within `timeout_s`.
        """
        if self._thread is None:
            return None
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return None
        ended, self._thread, self._ended = self._ended, None, None
        if isinstance(ended, BaseException):
            raise ended
        return ended

    def abandon(self) -> None:
        """Abandon the save: what has not been renamed yet never will be."""
        self._abandoned.set()
        if self._thread is not None:
            self._thread.join(_ABANDONED_S)

    def _run(self, step: int, tensors: dict, state: dict, began: float, pause_s: float) -> None:
        error = None
        try:
            with self._saving():
                self._checkpoints.save(
                    step, tensors, state, go_on=lambda: not self._abandoned.is_set()
                )
        except SaveFailed as e:
            error = e
        except BaseException as e:  # noqa: BLE001 - the edge of a thread: `take` raises it
            self._ended = e
            return
        self._ended = Outcome(step, pause_s, time.perf_counter() - began, error)
