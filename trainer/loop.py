"""One stage's training loop: batches in order → micro-steps → update → ledger, evaluation,
checkpoint. Knows no socket and no TensorFlow.

The loop promises: the weights result from exactly the steps that the folded ledger lists; the
position in a checkpoint belongs to its weights; an evaluation changes no weight; a step that is not
finite changes only the ledger.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from common.system import logs
from common.system.errors import Replaced, RunError, Stopped
from trainer.feed import FedBatch, Feed
from trainer.history import ledger
from trainer.history.differing import BytesDiffer
from trainer.history.schedule import Position, Schedule
from trainer.ranks.words import RanksDiffer
from trainer.readback import LAG, Readback, TrainedStep
from trainer.report.observe import Observer
from trainer.saves import Saves

if TYPE_CHECKING:
    from trainer.step.contract import Scalars, Step

log = logging.getLogger(__name__)


class Loop:
    """Trains one stage from its current position to its end.

    Args:
        score: which evaluated loss names the best checkpoint ("audio" or "recon").
        stop: None, or why to leave now: "stop" (save and leave), "replace" (another trainer takes
        over: save and leave), "orphan" (the supervisor is gone: leave without saving).
    """

    def __init__(
        self,
        step: Step,
        schedule: Schedule,
        score: str,
        feed: Feed,
        readback: Readback,
        saves: Saves,
        observer: Observer,
        stop: Callable[[], str | None],
    ):
        self.step, self.schedule, self.score, self.feed = step, schedule, score, feed
        self.readback, self.saves, self.observer, self.stop = readback, saves, observer, stop
        self.position = Position()
        self._announced: set[str] = set()

    def run(self, position: Position) -> Position:
        """Train from `position` to the end; returns the final one.

        A stop, a failure or a replacement raises after saving what is complete.
        """
        self.position = position
        try:
            self._run()
        except Stopped:
            self._leave()
        except (BytesDiffer, RanksDiffer):  # weights that may be wrong are not saved
            raise
        # no data, a batch nobody can make, a full disk, steps that are not finite: all that was
        # trained so far is complete
        except RunError:
            self._save_before_failing()
            raise
        finally:
            if self.stop() != "orphan":  # in a stop without time for the save in flight
                self.saves.finish()
            self.readback.close()
        return self.position

    def _run(self) -> None:
        if (
            self.schedule.eval_due(self.position.step)
            and self.position.evaluated != self.position.step
        ):
            self._evaluate()
        while self.position.step < self.schedule.total_steps and not self._worn_out():
            self._train_step()
            s = self.position.step
            better = self._evaluate() if self.schedule.eval_due(s) else False
            if better or self.schedule.save_due(s):
                self._save()
            if self.stop():
                raise Stopped("stop was asked for")
        self._save_if_new()
        self.saves.check_last(self.position.step)

    def _worn_out(self) -> bool:
        """Whether `train.patience` is exhausted."""
        if self.schedule.patience is None:
            return False
        judged = self.saves.judged_since_best if self.schedule.judged else None
        if not self.schedule.worn_out(self.position, judged):
            return False
        log.log(
            logs.NEWS,
            "ends at step %d of %d: %d %s in a row brought nothing better (train.patience=%d)",
            self.position.step,
            self.schedule.total_steps,
            self.schedule.since_best(self.position, judged),
            "evaluations" if judged is None else "judged checkpoints",
            self.schedule.patience,
        )
        return True

    # -- a step ------------------------------------------------------------------------------------
    # --------------------------------

    def _train_step(self) -> None:
        planned = self.schedule.step(self.position.step + 1)
        numbers = range(planned.first_g, planned.first_g + planned.count)
        rows = sum(self.schedule.train.num_rows(g) for g in numbers)
        began, waited, batches = time.perf_counter(), 0.0, []
        for g, scale in zip(numbers, self.schedule.scales(planned), strict=True):
            fed, wait_s = self._next("train", g)
            waited += wait_s
            batches.append(fed)
            if not fed.elsewhere:
                result = self._add(fed, scale)
                self.feed.release()
        if self.schedule.accumulate > 1:
            result = self.step.apply()
        metrics = self.readback.ask(result)
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
        self.position = replace(
            self.position, step=planned.step, next_g=planned.first_g + planned.count
        )
        self.readback.add(TrainedStep(line, metrics, batches, rows))
        for b in batches:
            b.arrays = None  # the next batch needs the device's memory
        self.readback.write(LAG)
        self.saves.look()

    def _add(self, fed: FedBatch, scale: float) -> Scalars:
        """Add a batch to the step's group; if it is the only one, make the whole update."""
        if self.schedule.accumulate == 1:
            self._announce("update", fed)
            return self.step.update(fed.planned.bucket, fed.arrays, fed.planned.seed)
        self._announce("micro", fed)
        return self.step.micro(fed.planned.bucket, fed.arrays, fed.planned.seed, scale)

    def _next(self, plan: str, g: int) -> tuple[FedBatch, float]:
        """The next batch and the seconds waited for it. RuntimeError: it is not the one that is
        due.
        """
        fed, wait_s = self.feed.next()
        if (fed.planned.plan, fed.planned.g) != (plan, g):
            raise RuntimeError(
                f"the feed gave {fed.planned.plan} batch {fed.planned.g} where {plan} batch {g}"
                " was due"
            )
        return fed, wait_s

    def _announce(self, what: str, fed: FedBatch) -> None:
        """Report the first use of a bucket: unless compiled ahead, it compiles now, which can take
        a minute.
        """
        bucket = fed.planned.bucket
        key = f"{what}/{bucket}"
        if key in self._announced or self.step.trace_counts.get(key):
            return
        self._announced.add(key)
        self.readback.write()  # what is reported next concerns this step, none before it
        self.observer.compiling(
            "evaluation" if what == "evaluate" else "training",
            bucket,
            len(self.schedule.train.buckets),
            self.schedule.train.buckets[bucket],
        )

    # -- evaluation and checkpoints ----------------------------------------------------------------

    def _evaluate(self) -> bool:
        """Run the evaluation plan; True if a checkpoint now would be the best one."""
        self.readback.write()  # the steps before it are timed as steps
        began, results, s = time.perf_counter(), [], self.position.step
        self.observer.evaluating(s, self.schedule.num_eval_batches)
        for g in range(self.schedule.num_eval_batches):
            fed, _ = self._next("eval", g)
            self._announce("evaluate", fed)
            results.append(self.step.evaluate(fed.planned.bucket, fed.arrays))
            self.feed.release()
        losses = mean_losses(results)
        better = self.saves.is_better(losses[self.score])
        since = 0 if better else self.position.since_best + 1
        self.position = replace(self.position, evaluated=s, since_best=since)
        self.observer.evaluation(s, losses, better, time.perf_counter() - began)
        return better and self.saves.keep_as_best(s, losses[self.score], self.schedule.save_due(s))

    def _save(self) -> None:
        self.readback.write()
        self.saves.begin(self.position)

    def _save_if_new(self) -> None:
        """Save the newest state and wait until it is on disk."""
        self.readback.write()
        self.saves.settle()
        if not self.saves.has(self.position):
            self._save()
            self.saves.settle()

    def _save_before_failing(self) -> None:
        """As `_save_if_new`, while an error is already on its way: log what fails here, without
        replacing that error.
        """
        try:
            self._save_if_new()
        except RunError as e:
            log.error("%s", e)

    def _leave(self) -> None:
        why = self.stop()
        if why == "orphan":
            self.saves.abandon()
            raise Stopped(f"stopped at step {self.position.step}")
        was_busy = self.saves.busy
        self.observer.saving()
        with self.saves.leaving():
            self.saves.settle()
            # Whoever waits for this process has a limit: after a long save in flight, do not begin
            # another.
            if not was_busy or self.saves.left_for_another:
                self._save_if_new()
        at = f"step {self.position.step}, saved up to step {self.saves.step}"
        if why == "replace":
            raise Replaced(f"{at}; another trainer takes over")
        raise Stopped(f"stopped at {at}")


def mean_losses(results: list[dict]) -> dict[str, float]:
    """{"audio": Σ audio_sum / Σ audio_count, …} over an evaluation's batches; NaN where a count is
    0.
    """
    totals: dict[str, float] = {}
    for r in results:
        for k, v in r.items():
            totals[k] = totals.get(k, 0.0) + float(v)
    names = [k[:-4] for k in totals if k.endswith("_sum")]
    return {
        n: totals[f"{n}_sum"] / totals[f"{n}_count"] if totals[f"{n}_count"] else float("nan")
        for n in names
    }
