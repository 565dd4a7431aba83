"""Writes what a finished run leaves to look at and listen to: samples, curves, a summary."""

from __future__ import annotations

import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from common.data.plan import PlannedBatch
from common.run.folder import RunFolder
from common.system.documents import read_json
from common.system.errors import RunError, disk_refuses
from common.system.files import write_atomically
from common.system.lifecycle import Stop
from common.system.status import SAVING, SPEAKING_LAST, SUMMING_UP, StatusFile
from trainer import last_samples
from trainer.history import judgements
from trainer.history.checkpoint import Checkpoints
from trainer.report import summary
from trainer.stages import Stage, files_of

log = logging.getLogger(__name__)

FINISHED, PATIENCE, STOPPED = "finished", "patience", "stopped"  # how a run may have ended
_STOP_S, _SPARE_S = 20.0, 0.5  # a stop stays quick
_LEFT = ("samples/", "summary.json", "curves.png")


class TargetCounter:
    """Counts the audio targets of an evaluation set as its batches arrive, each batch once. Their
    entropy is the score of a model that knows only how often each code occurs.
    """

    def __init__(self, num_batches: int, num_audio_tokens: int):
        self._counts = np.zeros(num_audio_tokens, np.int64)
        self._left = set(range(num_batches))

    def __call__(self, planned: PlannedBatch, arrays: dict) -> None:
        """Take a batch; called by the feed for every batch of every plan."""
        if planned.plan == "eval" and planned.g in self._left:
            self._left.discard(planned.g)
            self._counts += summary.count_targets(arrays["audio_targets"], len(self._counts))

    @property
    def entropy_nats(self) -> float | None:
        """The entropy; None until every batch was seen."""
        if self._left or not self._counts.any():
            return None
        return summary.unigram_entropy(self._counts)


def remember_entropy(run: RunFolder, counter: TargetCounter | None) -> None:
    """Store the evaluation set's entropy in the run, for a run that is resumed at its very
    end.
    """
    if counter is not None and counter.entropy_nats is not None:
        write_atomically(
            run.path / "eval_codes.json", json.dumps({"unigram_nats": counter.entropy_nats}) + "\n"
        )


def finish(run: RunFolder, stage: Stage, status: StatusFile, stop: Stop) -> None:
    """Speak the samples of the best checkpoint and of the last one, then write curves.png and
    summary.json.

    A stop ends the speaking, since all is trained and saved. Leaves a run that was finished before
    as it is.
    """
    last = _newest(run)
    ended = FINISHED if last >= stage.schedule.total_steps else PATIENCE
    wanted = last_samples.wanted(run) if stage.spec.speaks else None
    if _was_finished(run, ended, last, wanted):
        log.info("summary.json, curves.png and samples/ stay as they are")
        return
    made = _last_samples(run, stage, status, stop, last) if wanted is not None else None
    status.update(phase=SUMMING_UP)  # from here on, no judgement changes which checkpoint is best
    if stage.spec.speaks:  # the sampler may have decided before the last line
        judgements.decide(run.path, run.config.train.best_by)
    # Without `settings` if they are not what a run's end leaves: the same command speaks again.
    samples = None if made is None else {"step": made[0], **(wanted if made[1] else {})}
    read = summary.histories(run)
    figures = summary.write(run, read, summary.unigram_of(run), ended, samples)
    summary.draw(run, read, figures)
    for line in summary.lines(figures):
        log.info("%s", line)


def _last_samples(
    run: RunFolder, stage: Stage, status: StatusFile, stop: Stop, last: int
) -> tuple[int, bool] | None:
    """(the step of RUN/samples, whether that is what a run's end leaves)."""
    status.update(phase=SPEAKING_LAST, step=last)
    try:
        # A text's loop over codes cannot be interrupted; a stop leaves it behind.
        work = ThreadPoolExecutor(1, "speaker").submit(
            last_samples.speak, run, stage, last, stop.is_set
        )
        while not work.done() and not stop.wait(0.1):
            pass
        if work.done():
            return None if (step := work.result()) is None else (step, True)
        log.warning("no samples: stopped; `launch.py synthesize --run %s` speaks later", run.path)
        return None if (step := last_samples.leave_spoken(run)) is None else (step, False)
    # A missing package, or too little memory, must not restart a finished run's trainer.
    except Exception as e:  # the edge of a finished run
        refusal = disk_refuses(e)
        log.error(
            "no samples: %s; `launch.py synthesize --run %s` speaks later",
            refusal or f"{type(e).__name__}: {e}",
            run.path,
            exc_info=None if refusal else e,
        )
    return None


def leave_summary(run: RunFolder, status: StatusFile, stop: Stop) -> None:
    """Write what a stopped run leaves: the best samples already spoken, the summary and the curves,
    in this order, while the stop waits. Reports what it has no time for.
    """
    status.update(phase=SAVING, message="the summary")  # the supervisor waits for this phase
    with stop.saving():
        done: list[str] = []
        work = threading.Thread(target=_leave, args=(run, done), name="summary", daemon=True)
        work.start()
        left_s = stop.remaining_s()
        limit_s = _STOP_S if left_s is None else min(_STOP_S, left_s - _SPARE_S)
        work.join(max(0.0, limit_s))
        if len(done) < len(_LEFT):
            missing = ", ".join(n for n in _LEFT if n not in done)
            log.warning(
                "%s: left out; the same command goes on, and writes them at its end",
                missing,
            )


def _leave(run: RunFolder, done: list[str]) -> None:
    try:
        step = last_samples.leave_spoken(run)
        samples = None if step is None else {"step": step}
        read = summary.histories(run)
        figures = summary.write(run, read, summary.unigram_of(run), STOPPED, samples)
        done += ["samples/", "summary.json"]
        summary.draw(run, read, figures)
        done.append("curves.png")
    except Exception as e:  # the thread's edge: the checkpoint is on disk, and the stop goes on
        known = isinstance(e, (OSError, ValueError, RunError))
        log.warning(
            "the results of a stopped run are incomplete: %s: %s",
            type(e).__name__,
            e,
            exc_info=None if known else e,
        )


def _was_finished(run: RunFolder, ended: str, last: int, wanted: dict | None) -> bool:
    """Whether the existing results are from exactly this end, with the samples asked for."""
    try:
        found = read_json(run.path / "summary.json")
        samples = found["samples"] and {k: v for k, v in found["samples"].items() if k != "step"}
        return (found["ended"], found["last_step"], samples) == (ended, last, wanted)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _newest(run: RunFolder) -> int:
    steps = Checkpoints(files_of(run, run.stages[-1]).checkpoints, 1).steps()
    return steps[-1] if steps else 0
