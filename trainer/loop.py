"""One stage's training loop: batches in order → micro-steps → update → ledger, evaluation, checkpoint. Knows no socket and no TensorFlow.

What the loop promises: weights are the product of exactly the steps that the folded ledger lists; the position in a checkpoint is that
of its weights; an evaluation changes no weight; a step that is not finite changes nothing but the ledger.
"""

from __future__ import annotations

import errno
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from common.system.errors import BadInput, Hopeless, Replaced, RunError, Stopped
from common.system.files import write_atomically
from trainer.differing import BytesDiffer
from trainer.feed import Feed, Quarantine
from trainer.history import ledger
from trainer.history.checkpoint import Checkpoints
from trainer.history.ledger import Ledger
from trainer.history.saver import Saver
from trainer.history.schedule import Position, Schedule
from trainer.report.observe import Observer

if TYPE_CHECKING:
    from trainer.step.gpt import Scalars, Step

log = logging.getLogger(__name__)

# Metrics are read this many steps late, so that the device always has a step before it. A copy from the device waits for all that was
# begun before the asking: each step's is asked for by a thread of its own, and the next step is not begun before. Else the copies of
# several steps would end together, with the last of these steps, and the device stand still until the next several are begun.
_LAG = 2
_ASK_S = 0.05  # a thread takes a fraction of a millisecond to ask
_MAX_FAILED_SAVES = 3
_SHORT_SAVE_S = 8.0
_SAY_S = 10.0  # a save that is waited for is mentioned this often
_MAX_SAVE_S = 600.0
_STEP_SAY_S, _MAX_STEP_S = 60.0, 900.0  # a step takes seconds, with many batches a minute
_LAST_SAVE_S = 25.0
_BEST_WAIT_S = 1.0  # training waits so long for the save in flight, to keep a checkpoint that is the best so far
_IN_WORDS = {"update": "the training step", "micro": "the training step", "evaluate": "the evaluation"}


@dataclass(frozen=True)
class StageFiles:
    """Where a stage keeps its history."""

    ledger: Path
    checkpoints: Path
    quarantine: Path


def restore(files: StageFiles, keep: int, step: Step, identity: dict, dims: dict) -> tuple[Checkpoints, Ledger, Position]:
    """Open a stage's history and bring the step to its newest whole checkpoint; a run without one stands at step 0.

    Raises:
        BadInput: checkpoints existed and none is whole, or the checkpoint belongs to another run.
    """
    checkpoints = Checkpoints(files.checkpoints, keep)
    lines = ledger.read(files.ledger)
    found = checkpoints.load_latest(ledger.last_checkpoint(lines))
    position = Position()
    if found is not None:
        if found.state["identity"] != identity or found.state["dims"] != dims:
            raise BadInput(f"{found.path} belongs to another run; give this run a folder of its own")
        step.load_state_dict(found.tensors)
        position = Position(**found.state["position"])
        log.info("resumed step %d from %s", position.step, found.path.name)
    book = Ledger(files.ledger)
    if lines:
        book.resume(position.step, lines)
    return checkpoints, book, position


class Loop:
    """Trains one stage from where it stands to its end.

    Args:
        stop: None, or why to leave now: "stop" (save and leave), "replace" (another trainer takes over: save and leave),
            "orphan" (the supervisor is gone: leave without saving).
        score: which evaluated loss names the best checkpoint ("audio" or "recon").
        saving: entered around each save, so that a stop waits for it.
    """

    def __init__(
        self,
        step: Step,
        schedule: Schedule,
        position: Position,
        feed: Feed,
        server,
        *,
        checkpoints: Checkpoints,
        book: Ledger,
        quarantine: Quarantine,
        quarantine_file: Path,
        observer: Observer,
        identity: dict,
        dims: dict,
        stop: Callable[[], str | None],
        max_bad_steps: int,
        score: str,
        saving: Callable[[], AbstractContextManager],
    ):
        self.step, self.schedule, self.position, self.feed, self.server = step, schedule, position, feed, server
        self.checkpoints, self.book, self.quarantine, self.quarantine_file = checkpoints, book, quarantine, quarantine_file
        self.observer, self.identity, self.dims, self.stop = observer, identity, dims, stop
        self.max_bad_steps, self.score = max_bad_steps, score
        self._pending: deque = deque()
        self._bad_in_a_row = 0
        self._reader = ThreadPoolExecutor(_LAG + 1, "metrics")
        self._saver = Saver(checkpoints, saving)
        self._saved = position if position.step else None  # of the newest checkpoint on disk
        self._being_saved = position
        self._save_s = 0.0
        self._failed_saves = 0
        self._announced: set[str] = set()
        # As written: the feed may have set aside more already, or the process before have died between its checkpoint and the file.
        self._known_bad = len(quarantine_file.read_text().splitlines()) if quarantine_file.is_file() else 0

    def run(self) -> Position:
        """Train to the end; returns the final position. A stop, a failure or a replacement raises, after saving what is whole."""
        try:
            self._run()
        except Stopped:
            self._leave()
        except BytesDiffer:  # weights that may be wrong are not saved
            raise
        except RunError:  # no data, a batch nobody can make, a full disk, steps that are not finite: what was trained so far is whole
            self._save_before_failing()
            raise
        finally:
            self._finish_save()
            self._reader.shutdown(wait=False)
        return self.position

    def _run(self) -> None:
        if self.schedule.eval_due(self.position.step) and self.position.evaluated != self.position.step:
            self._evaluate()
        while self.position.step < self.schedule.total_steps:
            self._train_step()
            s = self.position.step
            better = self._evaluate() if self.schedule.eval_due(s) else False
            if better or self.schedule.save_due(s):
                self._save()
            if self.stop():
                raise Stopped("stop was asked for")
        self._save_if_new()
        if self._saved is None or self._saved.step != self.position.step:
            last = f"the last checkpoint, step {self.position.step}, could not be written; on disk is step {self._saved_step}"
            raise Hopeless(f"{last}; make room, then the same command goes on from there")

    # -- a step --------------------------------------------------------------------------------------------------------------------

    def _train_step(self) -> None:
        planned = self.schedule.step(self.position.step + 1)
        began, waited = time.perf_counter(), 0.0
        rows = [self.schedule.train.num_rows(g) for g in range(planned.first_g, planned.first_g + planned.count)]
        batches = []
        for g, scale in zip(range(planned.first_g, planned.first_g + planned.count), self.schedule.scales(planned), strict=True):
            fed, wait_s = self.feed.next()
            if (fed.planned.plan, fed.planned.g) != ("train", g):
                raise RuntimeError(f"the feed gave {fed.planned.plan} batch {fed.planned.g} where train batch {g} was due")
            waited += wait_s
            self._announce("update" if self.schedule.accumulate == 1 else "micro", fed)
            if self.schedule.accumulate == 1:
                result = self.step.update(fed.planned.bucket, fed.arrays, fed.planned.seed)
            else:
                self.step.micro(fed.planned.bucket, fed.arrays, fed.planned.seed, scale)
            self.server.release()
            batches.append(fed)
        if self.schedule.accumulate > 1:
            result = self.step.apply()
        values = self._ask_for(result)
        line = {
            "step": planned.step,
            "epoch": planned.epoch,
            "g": planned.first_g,
            "count": planned.count,
            "digest": ledger.combine([b.digest for b in batches]),
            "producers": [b.producer for b in batches],
            "wait_ms": round(waited * 1e3, 2),
            "step_ms": round((time.perf_counter() - began) * 1e3, 2),
        }
        self.position = replace(self.position, step=planned.step, next_g=planned.first_g + planned.count)
        self._pending.append((line, values, batches, sum(rows)))
        for b in batches:
            b.arrays = None  # the device's memory is the next batch's
        self._drain(_LAG)
        self._take_outcome(wait=False)

    def _ask_for(self, result: Scalars) -> Future[dict[str, float]]:
        """Have a step's metrics read; on return, the copy has been asked for."""
        asking = threading.Event()

        def read() -> dict[str, float]:
            asking.set()
            return self.step.read(result)

        values = self._reader.submit(read)
        asking.wait(_ASK_S)
        return values

    def _announce(self, what: str, fed) -> None:
        """The first use of a bucket compiles it unless that was done ahead, and can take a minute: say so."""
        bucket = fed.planned.bucket
        key = f"{what}/{bucket}"
        if key in self._announced or self.step.trace_counts.get(key):
            return
        self._announced.add(key)
        self._drain(0)  # what is told next concerns this step and none before it
        self.observer.compiling(_IN_WORDS[what], bucket, len(self.schedule.train.buckets), self.schedule.train.buckets[bucket])

    def _drain(self, keep: int) -> None:
        """Read the metrics of all steps but the newest `keep`, and write their ledger lines."""
        while len(self._pending) > keep:
            line, read, batches, rows = self._pending.popleft()
            values = self._result(read, line["step"])
            finite = bool(values.pop("finite"))
            line["loss"] = values["loss"] if finite else None
            if not finite:
                line["skipped"] = True
            line |= self.observer.times(line, rows)
            self.book.append(line)
            self.observer.step(line, values, rows=rows, num_bytes=sum(b.num_bytes for b in batches), server=self.server)
            self._bad_in_a_row = 0 if finite else self._bad_in_a_row + 1
            if not finite:
                self._report_bad(line, values, batches)

    def _result(self, read: Future[dict[str, float]], step: int) -> dict[str, float]:
        """A step's metrics, once the device has ended it. RuntimeError: it does not; its state cannot be saved, a restart may help."""
        waited_s = 0.0
        while not wait([read], _STEP_SAY_S).done:
            waited_s += _STEP_SAY_S
            if waited_s >= _MAX_STEP_S:
                raise RuntimeError(f"the device has not ended step {step} for {waited_s:.0f} s: see `nvidia-smi` and the system's log")
            log.warning("step %d is being computed for %.0f s", step, waited_s)
        return read.result()

    def _report_bad(self, line: dict, values: dict, batches: list) -> None:
        ids = [int(u) for b in batches for u in b.planned.utterances if u >= 0]
        log.warning(
            "step %d skipped: loss %s, gradient norm %s; weights unchanged; utterances %s",
            line["step"],
            values["loss"],
            values.get("grad_norm"),
            ids,
        )
        if self._bad_in_a_row >= self.max_bad_steps:
            count, self._bad_in_a_row = self._bad_in_a_row, 0  # the steps begun meanwhile are told, and end nothing
            raise Hopeless(
                f"{count} steps in a row were not finite, the last one step {line['step']} (utterances {ids}); they changed no weight, "
                f"and the weights before them are saved. Lower the learning rate, set a clip_norm, or look at these recordings"
            )

    # -- evaluation and checkpoints -----------------------------------------------------------------------------------------------

    def _evaluate(self) -> bool:
        """Run the evaluation plan; True if it is the best so far."""
        self._drain(0)  # the steps before it are timed as steps
        began, results = time.perf_counter(), []
        self.observer.evaluating(self.position.step, self.schedule.num_eval_batches)
        for _ in range(self.schedule.num_eval_batches):
            fed, _ = self.feed.next()
            if fed.planned.plan != "eval":
                raise RuntimeError(f"the feed gave train batch {fed.planned.g} during an evaluation")
            self._announce("evaluate", fed)
            results.append(self.step.evaluate(fed.planned.bucket, fed.arrays))
            self.server.release()
        losses = mean_losses(results)
        s, score = self.position.step, losses[self.score]
        better = score == score and (self.position.best_score is None or score < self.position.best_score)
        self.position = replace(self.position, evaluated=s)
        self.observer.evaluation(s, losses, better, time.perf_counter() - began)
        if better and not self.schedule.save_due(s) and not self._disk_is_free():
            # With epochs of seconds and saves of ten, training would do little but wait for the disk.
            log.info("the best so far is not kept: the checkpoint of step %d is still being written", self._being_saved.step)
            return False
        if better:
            self.position = replace(self.position, best_step=s, best_score=score)
        return better

    def _disk_is_free(self) -> bool:
        self._take_outcome(wait=False, patience_s=_BEST_WAIT_S)
        return not self._saver.busy

    @property
    def _saved_step(self) -> int:
        return self._saved.step if self._saved is not None else 0

    def _save(self) -> None:
        """Begin a checkpoint of this moment. It is written while training goes on; the one before it must have ended."""
        self._drain(0)
        self.observer.saving()
        self._take_outcome(wait=True)
        self.position = replace(self.position, quarantine=self.quarantine.before(self.position.next_g))
        self._being_saved = self.position
        try:
            self.book.flush()
        except OSError as e:
            self._save_failed(f"the ledger could not be written to {self.book.path}: {e.strerror or e}", e)
            return
        self._saver.begin(self.position.step, self.step.snapshot, self._state())

    def _take_outcome(self, wait: bool, patience_s: float = 0.0) -> None:
        """Act on how the save in flight ended, if it has, or does within `patience_s`; with `wait`, however long it takes."""
        outcome, waited_s = self._saver.take(_SAY_S if wait else patience_s), _SAY_S
        while wait and outcome is None and self._saver.busy:
            if waited_s >= _MAX_SAVE_S:
                raise RunError(f"the checkpoint of step {self._being_saved.step} is not on disk after {waited_s:.0f} s: look at the disk")
            log.warning("the checkpoint of step %d is being written for %.0f s", self._being_saved.step, waited_s)
            outcome, waited_s = self._saver.take(_SAY_S), waited_s + _SAY_S
        if outcome is None:
            return
        if outcome.error is not None:
            self._save_failed(str(outcome.error), outcome.error.__cause__)
            return
        self._failed_saves, self._saved, self._save_s = 0, self._being_saved, outcome.seconds
        kept = self._being_saved.quarantine
        try:
            self.book.checkpoint(outcome.step)
            if len(kept) != self._known_bad:
                self._write_quarantine(kept)
                self._known_bad = len(kept)
        except OSError as e:  # the checkpoint itself is there: the next one's lines bring these along
            log.error("checkpoint %d is on disk, but what the ledger says of it is not yet: %s", outcome.step, e.strerror or e)
        self.observer.saved(outcome.step, outcome.seconds, outcome.pause_s)

    def _save_failed(self, why: str, cause: BaseException | None) -> None:
        """Training goes on without it, three times in a row at most; "the best" stays what is on disk."""
        self._failed_saves += 1
        log.error("%s (failure %d; %d in a row end the run)", why, self._failed_saves, _MAX_FAILED_SAVES)
        if self.position.best_step == self._being_saved.step != self._saved_step:
            best = self._saved or Position()
            self.position = replace(self.position, best_step=best.best_step, best_score=best.best_score)
        if self._failed_saves >= _MAX_FAILED_SAVES:
            failed = f"{_MAX_FAILED_SAVES} saves in a row failed; the newest checkpoint is of step {self._saved_step}"
            if isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE):
                raise RunError(f"{failed}: too many files were open, and a new process begins with none")
            raise Hopeless(f"{failed}; make room, then the same command goes on from there")

    def _state(self) -> dict:
        return {
            "position": asdict(self.position),
            "best_step": self.position.best_step,
            "identity": self.identity,
            "dims": self.dims,
        }

    def _write_quarantine(self, kept: list[dict]) -> None:
        write_atomically(self.quarantine_file, "".join(json.dumps(e) + "\n" for e in kept))

    def _save_if_new(self) -> None:
        """Bring the newest state to disk, and wait for it."""
        self._drain(0)
        self._take_outcome(wait=True)
        if self.position.step > 0 and not self.position.stands_as(self._saved):
            self._save()
            self._take_outcome(wait=True)

    def _save_before_failing(self) -> None:
        """As `_save_if_new`, where an error is on its way already: what goes wrong here is told, and does not take its place."""
        try:
            self._save_if_new()
        except RunError as e:
            log.error("%s", e)

    def _finish_save(self) -> None:
        """Whatever ends the loop, a checkpoint that is being written is let finish; only an orphan has no time for it."""
        if self._saver.busy and self.stop() != "orphan":
            self._saver.take(_LAST_SAVE_S)

    def _leave(self) -> None:
        why = self.stop()
        if why == "orphan":
            self._saver.abandon()
            raise Stopped(f"stopped at step {self.position.step}")
        was_busy = self._saver.busy
        self.observer.saving()
        self._take_outcome(wait=True)
        # The supervisor waits 30 s for saves: after a long one that was in flight, no other is begun. A replacement has a minute.
        if why == "replace" or not (was_busy and self._save_s > _SHORT_SAVE_S):
            self._save_if_new()
        if why == "replace":
            raise Replaced(f"step {self.position.step}, saved up to step {self._saved_step}; another trainer takes over")
        raise Stopped(f"stopped at step {self.position.step}, saved up to step {self._saved_step}")


def mean_losses(results: list[dict]) -> dict[str, float]:
    """{"audio": Σ audio_sum / Σ audio_count, …} over an evaluation's batches; NaN where a count is 0."""
    totals: dict[str, float] = {}
    for r in results:
        for k, v in r.items():
            totals[k] = totals.get(k, 0.0) + float(v)
    names = [k[:-4] for k in totals if k.endswith("_sum")]
    return {n: totals[f"{n}_sum"] / totals[f"{n}_count"] if totals[f"{n}_count"] else float("nan") for n in names}
