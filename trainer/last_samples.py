"""The samples that a run leaves: RUN/samples from the best checkpoint, RUN/samples/step-… from the
last.

In TensorBoard each of the two is a run of its own beside the sampler's: if the steps of a run go
back, TensorBoard drops all that belongs to later steps.

Which one is best may depend on what the sampler (trainer/previews/sampler.py) is measuring while
the trainer ends, so the trainer waits for it, for a limited time.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from safetensors.numpy import load_file

from common.run.beginning import checkpoint_of
from common.run.folder import RunFolder
from common.system import status
from common.system.documents import read_json
from common.system.errors import BadInput
from common.system.files import digest, write_atomically
from trainer.history.checkpoint import step_of
from trainer.previews import sampler
from trainer.previews.sampler import SPEAKING
from trainer.report.tensorboard import EventWriter
from trainer.stages import Stage

log = logging.getLogger(__name__)

JUDGED_S = 120.0  # how long the summary waits for the sampler
_POLL_S = 0.2


def wanted(run: RunFolder) -> dict | None:
    """What decides the samples at the run's end, besides the weights; None: none are made."""
    samples = run.config.samples
    if not samples.count + len(samples.texts):
        return None
    plain = samples.model_dump(mode="json", exclude={"every", "device"})
    return {"settings": digest({"samples": plain, "best_by": run.config.train.best_by})}


def best_of(run: RunFolder) -> int | None:
    """The step that a run speaks with if none is named; None: there is no checkpoint."""
    try:
        return step_of(checkpoint_of(run.path, None, verify=False).parent)
    except BadInput:
        return None


def spoken(run: RunFolder) -> dict[int, Path]:
    """Folders with complete samples, by step."""
    found = {step_of(p): p for p in (run.path / "samples").glob("step-*")}
    return {
        step: p for step, p in found.items() if step is not None and (p / "samples.json").is_file()
    }


def leave_spoken(run: RunFolder) -> int | None:
    """Make RUN/samples from what was spoken so far: the best checkpoint's, else the newest.

    Returns its step; None: nothing was spoken. Computes nothing.
    """
    found, best = spoken(run), best_of(run)
    there = _step_of_samples(run.path / "samples" / "samples.json")
    if there is not None and there == best:
        return there  # from an earlier end, or as far as this one came
    if not found:
        log.info("no samples were spoken yet; `launch.py synthesize --run %s` speaks", run.path)
        return None
    step = best if best in found else max(found)
    for file in found[step].iterdir():
        write_atomically(run.path / "samples" / file.name, file.read_bytes())
    later = "" if step == best else f"; the best, step {best}, has not been spoken yet"
    log.info("samples/ is of step %d%s", step, later)
    return step


def speak(run: RunFolder, stage: Stage, last: int, asked: Callable[[], bool]) -> int | None:
    """Speak and judge the last checkpoint, whose weights the stage holds, then the best one.

    Args:
        asked: whether to stop; then it waits for nothing.

    Returns the step of RUN/samples; None: nothing could be spoken.
    """
    from common.xtts import weights
    from common.xtts.dvae import Dvae
    from trainer.previews.judge import judge_checkpoint
    from trainer.previews.samples import maker_of

    dvae = Dvae(run.dims.dvae)
    weights.load_state_dict(dvae, load_file(run.dvae_weights))
    folder, beside = run.path / "samples", run.path / "samples" / f"step-{last:08d}"
    maker = maker_of(run, stage.step.model, dvae)

    def make(step: int, to: Path, which: str) -> bool:
        began, aside = time.perf_counter(), folder / f".tmp-last-{step}"
        events = EventWriter(run.samples_events.with_name(f"samples-{which}"))
        try:
            num = len(maker.make(aside, step, events))
            judge_checkpoint(run, maker.judge, step, events)
        finally:
            events.close()
        _move(aside, to)
        log.info("%d samples of step %d, %.1f s", num, step, time.perf_counter() - began)
        return num > 0

    # The last checkpoint's own samples may prove it the best.
    made = make(last, beside, "last")
    wait_for_sampler(run, last, asked)
    best = best_of(run)
    if best is not None and best != last:
        try:
            state = load_file(checkpoint_of(run.path, str(best)))
        except (BadInput, OSError) as e:
            log.warning("samples/ is of the last step, %d, not of the best: %s", last, e)
        else:
            weights.load_state_dict(stage.step.model, state)
            made = make(best, folder, "best")
            log.info("samples/ is of step %d, the best; %s is of the last", best, beside.name)
            return best if made else None
    _move(beside, folder)
    return last if made else None


def wait_for_sampler(run: RunFolder, last: int, asked: Callable[[], bool]) -> None:
    """Wait until the sampler has judged its checkpoints before `last`, at most `JUDGED_S`; report
    what the summary lacks.
    """
    deadline, said = time.monotonic() + JUDGED_S, False
    while (step := _pending(run, last)) is not None and not asked():
        if time.monotonic() > deadline:
            log.warning(
                "the judgement of step %d is left out: the sampler needs more than %.0f s for it;"
                " set a larger samples.every, or another samples.device",
                step,
                JUDGED_S,
            )
            return
        if not said:
            log.info("waiting for the sampler, which is at step %d", step)
        said = True
        time.sleep(_POLL_S)


def _pending(run: RunFolder, last: int) -> int | None:
    """The checkpoint that the sampler is judging, or takes next; None: it has finished, or there is
    no sampler.
    """
    s = status.read(run.path, "sampler")
    if s is None or not s.alive:
        return None
    if s.phase == SPEAKING:
        return s.step
    return sampler.unspoken(run, s.step, last)


def _step_of_samples(file: Path) -> int | None:
    try:
        return int(read_json(file)[0]["step"])
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


def _move(files: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file in files.iterdir() if files.is_dir() else ():
        os.replace(file, folder / file.name)
    shutil.rmtree(files, ignore_errors=True)
