"""What a finished run leaves to look at and listen to: samples, curves, a summary."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from common.data.plan import PlannedBatch
from common.run.beginning import checkpoint_of
from common.run.folder import RunFolder
from common.system.errors import BadInput, RunError
from common.system.files import write_atomically
from common.system.status import SAVING, StatusFile
from trainer.history.checkpoint import Checkpoints
from trainer.report.tensorboard import EventWriter
from trainer.stages import Stage, files_of

log = logging.getLogger(__name__)

_STOP_S = 6.0  # a stop stays quick


class TargetCounter:
    """Counts the audio targets of an evaluation set as its batches come by, each batch once; their
    entropy is what a model that knows
    nothing but how often each code occurs would score."""

    def __init__(self, num_batches: int, num_audio_tokens: int):
        self._counts = np.zeros(num_audio_tokens, np.int64)
        self._left = set(range(num_batches))

    def __call__(self, planned: PlannedBatch, arrays: dict) -> None:
        """Take a batch; called by the feed for every batch of every plan."""
        from trainer.report.summary import count_targets

        if planned.plan == "eval" and planned.g in self._left:
            self._left.discard(planned.g)
            self._counts += count_targets(arrays["audio_targets"], len(self._counts))

    @property
    def entropy_nats(self) -> float | None:
        """None until every batch was seen."""
        from trainer.report.summary import unigram_entropy

        return None if self._left or not self._counts.any() else unigram_entropy(self._counts)


def remember_entropy(run: RunFolder, counter: TargetCounter | None) -> None:
    """Keep the evaluation set's entropy in the run, so that a run resumed at its very end has it,
    too.
    """
    if counter is not None and counter.entropy_nats is not None:
        write_atomically(
            run.path / "eval_codes.json", json.dumps({"unigram_nats": counter.entropy_nats}) + "\n"
        )


def finish(run: RunFolder, stage: Stage, status: StatusFile) -> None:
    """Speak the samples of the best checkpoint and of the last one, then write curves.png and
    summary.json. A run that was finished before is left as it is; how to go on is said.
    """
    step = _newest(run)
    ended = "finished" if step >= stage.schedule.total_steps else "patience"
    if _was_finished(run, ended, step):
        log.info("nothing is left to do: %s", _how_to_go_on(run, ended, step))
        return
    if stage.spec.speaks and run.config.samples.count + len(run.config.samples.texts):
        status.update(phase="speaking samples")
        try:
            _speak(run, stage, step)
        # What lacks a package, or memory, must not begin a finished run's trainer anew.
        except Exception as e:  # the edge of a finished run
            log.exception(
                "no samples: %s: %s; `launch.py synthesize --run %s` speaks later",
                type(e).__name__,
                e,
                run.path,
            )
    _summarise(run, ended)


def leave_summary(run: RunFolder, status: StatusFile) -> None:
    """What a run that was asked to stop leaves: summary, curves, and the best samples that were
    spoken already; within `_STOP_S`. What it has no time for is said.
    """
    status.update(phase=SAVING, message="the summary")  # the supervisor waits for this phase
    work = threading.Thread(target=_leave, args=(run,), name="summary", daemon=True)
    work.start()
    work.join(_STOP_S)
    if work.is_alive():
        log.warning(
            "summary.json and curves.png are left out: they take more than %.0f s; the same command"
            " goes on and writes them at its end",
            _STOP_S,
        )


def _leave(run: RunFolder) -> None:
    try:
        _summarise(run, "stopped")
        best, spoken = _best(run), _spoken(run)
        if not spoken:
            log.info("no samples were spoken yet; `launch.py synthesize --run %s` speaks", run.path)
            return
        step = best if best in spoken else max(spoken)
        for file in spoken[step].iterdir():
            shutil.copy(file, run.path / "samples" / file.name)
        later = "" if step == best else f"; those of the best, step {best}, were not spoken"
        log.info("samples/ is of step %d%s", step, later)
    except (OSError, ValueError, RunError) as e:  # the checkpoint is on disk: the stop goes on
        log.warning("the summary is not whole: %s: %s", type(e).__name__, e)


def _summarise(run: RunFolder, ended: str) -> None:
    from trainer.report import (
        summary,
    )  # matplotlib: not before it is needed, a restarted trainer should be quick

    for line in summary.lines(summary.finish(run, summary.unigram_of(run), ended)):
        log.info("%s", line)


def _was_finished(run: RunFolder, ended: str, step: int) -> bool:
    """Whether the summary on disk is of this very end."""
    try:
        found = json.loads((run.path / "summary.json").read_text())
        return (found["ended"], found["last_step"]) == (ended, step)
    except (OSError, ValueError, KeyError):
        return False


def _how_to_go_on(run: RunFolder, ended: str, step: int) -> str:
    if ended == "patience":
        better = f"a larger train.patience than {run.config.train.patience}, or null"
        return f"patience ended the run at step {step}; {better}, goes on"
    setting = "--max-steps" if run.config.train.max_steps is not None else "train.epochs"
    return f"the run has done its {step} steps; a larger {setting} goes on from here"


def _newest(run: RunFolder) -> int:
    steps = Checkpoints(files_of(run, run.stages[-1]).checkpoints, 1).steps()
    return steps[-1] if steps else 0


def _best(run: RunFolder) -> int | None:
    """The step that a run speaks with where none is named; None: there is no checkpoint."""
    try:
        return int(checkpoint_of(run.path, None, verify=False).parent.name.partition("-")[2])
    except BadInput:
        return None


def _spoken(run: RunFolder) -> dict[int, Path]:
    folders = sorted((run.path / "samples").glob("step-*"))
    return {int(p.name.partition("-")[2]): p for p in folders if (p / "samples.json").is_file()}


def _speak(run: RunFolder, stage: Stage, last: int) -> None:
    """The last step's samples are made first: by them it may turn out to be the best."""
    from common.xtts import weights
    from common.xtts.dvae import Dvae
    from trainer.previews.judge import judge_checkpoint
    from trainer.previews.samples import maker_of

    began = time.perf_counter()
    dvae = Dvae(run.dims.dvae)
    weights.load_state_dict(dvae, load_file(run.dvae_weights))
    folder, aside = run.path / "samples", run.path / "samples" / ".tmp-last"
    events = EventWriter(run.samples_events)
    try:
        maker = maker_of(run, stage.step.model, dvae)
        infos = maker.make(aside, last, events)
        judge_checkpoint(run, maker, last, events)
        best = _best(run)
        if best is None or best == last:
            _move(aside, folder)
        else:
            _move(aside, folder / f"step-{last:08d}")
            weights.load_state_dict(stage.step.model, load_file(checkpoint_of(run.path, str(best))))
            infos = maker.make(folder, best, events)
            judge_checkpoint(run, maker, best, events)
            log.info("samples/ is of step %d, the best; beside it step-%08d, the last", best, last)
    finally:
        events.close()
    log.info("%d samples in %s, %.1f s", len(infos), folder, time.perf_counter() - began)


def _move(files: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file in files.iterdir() if files.is_dir() else ():
        os.replace(file, folder / file.name)
    shutil.rmtree(files, ignore_errors=True)
