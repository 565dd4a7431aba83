"""A stage's checkpoints while it trains: when a save may start, what its failure means, and which
checkpoint is the best.
"""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from common.system.errors import Hopeless, RunError
from common.system.files import write_atomically
from trainer.feed import Quarantine
from trainer.history import judgements
from trainer.history.saver import Outcome, Saver
from trainer.history.schedule import Position
from trainer.history.stage_history import StageHistory
from trainer.patience import Patience
from trainer.report.observe import Observer

if TYPE_CHECKING:
    from trainer.step.contract import Snapshot

log = logging.getLogger(__name__)

_MAX_FAILED = 3
_SAY_S = 10.0  # how often a save that is waited for is mentioned
_MAX_S = 600.0
_LAST_S = 25.0
# how long training waits for the save in flight, to keep the best checkpoint so far
_BEST_WAIT_S = 1.0


class Saves:
    """Starts saves and acts on their outcome. At most one is in flight, written while training goes
    on.

    Args:
        position: the stage's position in its newest checkpoint; step 0: there is none.
        snapshot: gives the step's current state (`Step.snapshot`).
        patience: how long a stop waits for a save.
        agree: raises if the trainers' weights after a step differ.
    """

    def __init__(
        self,
        history: StageHistory,
        quarantine: Quarantine,
        position: Position,
        snapshot: Callable[[], Snapshot],
        observer: Observer,
        patience: Patience,
        agree: Callable[[int], None] = lambda step: None,
    ):
        self._history, self._quarantine, self._snapshot, self._observer = (
            history,
            quarantine,
            snapshot,
            observer,
        )
        self._patience, self._agree = patience, agree
        self._saver = Saver(history.checkpoints, patience.saving)
        self._best = position.best_step, position.best_score
        self._saved = position if position.step else None  # of the newest checkpoint on disk
        self._in_flight = position
        self._failed = 0
        # As written: the feed may have set aside more already, or the process before have died
        # between its checkpoint and the file.
        file = history.files.quarantine
        self._known_bad = len(file.read_bytes().splitlines()) if file.is_file() else 0

    @property
    def step(self) -> int:
        """The step of the newest checkpoint on disk; 0: there is none."""
        return self._saved.step if self._saved is not None else 0

    @property
    def busy(self) -> bool:
        """Whether a save was started and its outcome has not been taken."""
        return self._saver.busy

    @property
    def left_for_another(self) -> bool:
        """Whether a stop leaves time for one more save."""
        return self._patience.left_for_another

    def leaving(self) -> AbstractContextManager:
        """While inside, a stop's deadline is a save's, also between two saves."""
        return self._patience.saving()

    def begin(self, position: Position) -> None:
        """Start a checkpoint of the current state; the previous one must have ended. The ledger has
        the lines of all steps so far. RanksDiffer: the trainers' weights are not equal.
        """
        self._observer.saving()
        self.settle()
        self._agree(position.step)
        self._in_flight = replace(
            self._with_best(position), quarantine=self._quarantine.before(position.next_g)
        )
        book = self._history.ledger
        try:
            book.flush()
        except OSError as e:
            self._fail(f"the ledger could not be written to {book.path}: {e.strerror or e}", e)
            return
        facts = {
            "position": asdict(self._in_flight),
            "best_step": self._in_flight.best_step,
            "ledger": book.extent,
            **self._history.facts,
        }
        self._saver.begin(position.step, self._snapshot, facts)

    def look(self, patience_s: float = 0.0) -> None:
        """Act on the outcome of the save in flight, if it has ended or ends within `patience_s`.

        Hopeless: too many saves in a row have failed.
        """
        outcome = self._saver.take(patience_s)
        if outcome is not None:
            self._end(outcome)

    def settle(self) -> None:
        """`look`, however long it takes. RunError: it takes longer than any disk should."""
        outcome, waited_s = self._saver.take(_SAY_S), _SAY_S
        while outcome is None and self._saver.busy:
            if waited_s >= _MAX_S:
                raise RunError(
                    f"the checkpoint of step {self._in_flight.step} is not on disk after"
                    f" {waited_s:.0f} s: look at the disk"
                )
            log.warning(
                "the checkpoint of step %d is being written for %.0f s",
                self._in_flight.step,
                waited_s,
            )
            outcome, waited_s = self._saver.take(_SAY_S), waited_s + _SAY_S
        if outcome is not None:
            self._end(outcome)

    def has(self, position: Position) -> bool:
        """Whether the newest checkpoint contains all that one at `position` would, or there is
        nothing to save yet.
        """
        return position.step == 0 or self._with_best(position).stands_as(self._saved)

    def is_better(self, score: float) -> bool:
        """Whether an evaluation's score is the lowest so far."""
        return score == score and (self._best[1] is None or score < self._best[1])

    @property
    def judged_since_best(self) -> int | None:
        """Judgements of samples since the best one (trainer/history/judgements.py); None: there are
        none.
        """
        return judgements.since_best(self._history.files.checkpoints.parent)

    def keep_as_best(self, step: int, score: float, save_due: bool) -> bool:
        """Note that the checkpoint of `step`, about to start, is the best so far.

        False: it will not be kept, because the disk is busy and no checkpoint is due. With epochs
        of seconds and saves of ten, training would mostly wait for the disk.
        """
        if not save_due:
            self.look(_BEST_WAIT_S)
            if self.busy:
                log.info(
                    "the best so far is not kept: the checkpoint of step %d is still being written",
                    self._in_flight.step,
                )
                return False
        self._best = step, score
        return True

    def check_last(self, step: int) -> None:
        """Raise Hopeless if the run's last checkpoint is not on disk."""
        if self.step != step:
            last = (
                f"the last checkpoint, step {step}, could not be written; on disk is step"
                f" {self.step}"
            )
            raise Hopeless(f"{last}; make room, then the same command goes on from there")

    def finish(self) -> None:
        """At the process's end: let a checkpoint that is being written finish."""
        left_s = self._patience.remaining_s
        if self.busy and self._saver.take(_LAST_S if left_s is None else left_s - 1.0) is None:
            self._say_lost()

    def abandon(self) -> None:
        """Leave without the save in flight."""
        if self.busy:
            self._say_lost()
        self._saver.abandon()

    def _say_lost(self) -> None:
        log.warning(
            "the checkpoint of step %d is not finished, and is lost; on disk is step %d",
            self._in_flight.step,
            self.step,
        )

    def _with_best(self, position: Position) -> Position:
        return replace(position, best_step=self._best[0], best_score=self._best[1])

    def _end(self, outcome: Outcome) -> None:
        if outcome.error is not None:
            self._fail(str(outcome.error), outcome.error.__cause__)
            return
        self._failed, self._saved = 0, self._in_flight
        self._patience.took(outcome.seconds)
        kept = self._in_flight.quarantine
        try:
            self._history.ledger.checkpoint(outcome.step)
            if len(kept) != self._known_bad:
                write_atomically(
                    self._history.files.quarantine, "".join(json.dumps(e) + "\n" for e in kept)
                )
                self._known_bad = len(kept)
        except OSError as e:  # the checkpoint itself is there: these lines come with the next one's
            log.error(
                "checkpoint %d is on disk, but its ledger lines are not yet: %s",
                outcome.step,
                e.strerror or e,
            )
        self._observer.saved(outcome.step, outcome.seconds, outcome.pause_s)

    def _fail(self, why: str, cause: BaseException | None) -> None:
        """Go on training without it, at most three times in a row; the best one stays the one on
        disk.
        """
        self._failed += 1
        log.error("%s (failure %d; %d in a row end the run)", why, self._failed, _MAX_FAILED)
        if self._best[0] == self._in_flight.step != self.step:
            best = self._saved or Position()
            self._best = best.best_step, best.best_score
        if self._failed >= _MAX_FAILED:
            failed = (
                f"{_MAX_FAILED} saves in a row failed; the newest checkpoint is of step {self.step}"
            )
            if isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE):
                raise RunError(
                    f"{failed}: too many files were open, and a new process begins with none"
                )
            raise Hopeless(f"{failed}; make room, then the same command goes on from there")
