"""`python -m trainer.previews.sampler --run RUN`: speaks the samples of a run's checkpoints while
the run trains.

A process of its own, which reads what the trainer has saved and is unknown to it: the trainer's
weights, random numbers and ledger are the same without it, a step never waits for it, and a kill
loses only samples. Inside the trainer, compiling the sampling loop and speaking would delay the
step by a minute each time. It computes on the producers' GPU, which is nearly idle: memory grows
there as needed, by the networks and the caches of a few rows (`samples.ROWS`). If the trainer
shares that GPU, its memory is divided already, so samples are made on the CPU. Its priority is low:
producers and trainer go first if cores are scarce.

It speaks the first checkpoint at or after each multiple of `samples.every`, one at a time. Others
may come while it speaks: it takes the newest next and reports what it left out. It leaves the last
step to the trainer, which speaks at the run's end in any case (finale.py), and skips a checkpoint
that is removed before it was read. RUN/sampler.lock makes it the only one of a run; another one,
from `launch.py trainer` beside a running launch.py, waits for its place.

Modules that are slow to load are imported where they are used.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from common.system import lock, logs, status
from common.system.errors import OK, BadInput, Hopeless, disk_refuses, is_out_of_memory
from common.system.lifecycle import Stop, run_main
from common.system.status import StatusFile

if TYPE_CHECKING:
    import numpy as np

    from common.run.folder import RunFolder

log = logging.getLogger(__name__)

NICE = 5
POLL_S = 0.5
SPEAKING = "speaking"  # its phase while it speaks and judges a checkpoint


def next_step(steps: Iterable[int], every: int, last: int, total: int) -> int | None:
    """Which of the checkpoints `steps` to speak next, after `last`: the first in the newest stretch
    of `every` steps that has one; None: nothing new. The trainer speaks step `total` itself.
    """
    first: dict[int, int] = {}
    for step in sorted(s for s in steps if every and s < total):
        first.setdefault(step // every, step)
    newest = max(first, default=0)
    return first[newest] if newest and newest > last // every else None


def unspoken(run: RunFolder, tried: int, total: int) -> int | None:
    """The checkpoint on disk to speak next, after `tried`; None: nothing new."""
    last = max({tried, *_steps_in(run.path / "samples")})
    return next_step(_steps_in(run.path / "checkpoints"), run.config.sample_every, last, total)


def own_of_trainer(run: RunFolder) -> int:
    """The step that the trainer speaks itself: the last one, or the one at which it ends early."""
    from trainer.history.schedule import schedule_of

    s, total = status.read(run.path, "trainer"), schedule_of(run, "gpt").total_steps
    return min(total, s.step) if s is not None and s.phase == status.SPEAKING_LAST else total


def is_too_late(run: Path) -> bool:
    """Whether the trainer is writing the summary, or has left: the best checkpoint is
    decided.
    """
    s = status.read(run, "trainer")
    settled = (status.SUMMING_UP, status.DONE, status.LEFT)
    return s is not None and s.phase in settled


class Gone(Exception):
    """A checkpoint was removed before it was read."""


class Networks:
    """A run's networks in this process, loaded with one checkpoint's weights after another.

    The first one loads TensorFlow.
    """

    def __init__(self, run: RunFolder):
        from safetensors.numpy import load_file

        from common.xtts import weights
        from common.xtts.dvae import Dvae
        from common.xtts.gpt import Gpt
        from trainer.previews.samples import maker_of

        self.run, self._gpt, dvae = run, Gpt(run.dims.gpt), Dvae(run.dims.dvae)
        weights.load_state_dict(dvae, load_file(run.dvae_weights))
        self._maker = maker_of(run, self._gpt, dvae)

    def speak(self, state: dict[str, np.ndarray], step: int) -> int:
        """Write RUN/samples/step-…, whole or not at all, and TensorBoard's copies; return how many
        were spoken.
        """
        from common.xtts import weights
        from trainer.previews.judge import judge_checkpoint
        from trainer.report.tensorboard import EventWriter

        weights.load_state_dict(self._gpt, state)
        name = f"step-{step:08d}"
        aside, events = (
            self.run.path / "samples" / f".tmp-{name}",
            EventWriter(self.run.samples_events),
        )
        try:
            spoken = self._maker.make(aside, step, events, interim=True)
            # Judge first: after a kill, a step with a folder is not spoken again.
            judge_checkpoint(
                self.run, self._maker.judge, step, events, lambda: is_too_late(self.run.path)
            )
            if spoken and not aside.with_name(name).exists():
                os.replace(aside, aside.with_name(name))
        finally:
            events.close()
            shutil.rmtree(aside, ignore_errors=True)
        return len(spoken)


class PreviewProcess:
    """The process's work, from checkpoint to checkpoint."""

    def __init__(self, path: Path, stop: Stop):
        self.path, self.stop = path, stop
        self.status = StatusFile(path, "sampler", "sampler")
        stop.at_exit(self.status.finish)
        self._networks: Networks | None = None
        self._nothing_in: set[int] | None = None  # these checkpoints needed nothing
        self._tried, self._took_s, self._complained = 0, 0.0, False
        # The main thread must notice a stop, and the loop over a text's codes cannot be
        # interrupted.
        self._worker = ThreadPoolExecutor(1, "speaker")

    def run(self, done: Callable[[], bool]) -> None:
        """Work until the trainer is `done`; a stop raises."""
        folder = self.path / "samples"
        folder.mkdir(exist_ok=True)
        for left in folder.glob(".tmp-*"):
            shutil.rmtree(left)
        while not done():
            if (step := self._next()) is None:
                self.status.update(phase="waiting for a checkpoint")
                pause(self.stop, POLL_S)
            else:
                self.status.update(phase=SPEAKING, step=step)
                self._round(step)

    def _next(self) -> int | None:
        from common.run.folder import RunFolder

        steps = _steps_in(self.path / "checkpoints")
        if steps == self._nothing_in:
            return None
        run = RunFolder(self.path)  # read again: settings can change while it trains
        step, every = unspoken(run, self._tried, own_of_trainer(run)), run.config.sample_every
        self._nothing_in = steps if step is None else None
        if step is not None and self._tried and step // every > self._tried // every + 1:
            self._complain(step)
        return step

    def _complain(self, step: int) -> None:
        log.log(
            logging.INFO if self._complained else logging.WARNING,
            "no samples between steps %d and %d: step %d took %.0f s; set a larger samples.every or"
            " another samples.device",
            self._tried,
            step,
            self._tried,
            self._took_s,
        )
        self._complained = True

    def _round(self, step: int) -> None:
        """Speak one checkpoint. Log a failure; the next one is tried.

        Raises:
            BadInput: the device cannot be used. Hopeless: it has too little memory.
        """
        began = time.perf_counter()
        work = self._worker.submit(self._speak, step)
        while not work.done():
            pause(self.stop, 0.1)
        error = work.exception()
        if isinstance(error, Gone):
            log.info("the checkpoint of step %d was removed before it was read", step)
            return
        self._tried, self._took_s = step, time.perf_counter() - began
        if error is None:
            log.info("%d samples of step %d, %.1f s", work.result(), step, self._took_s)
        elif is_out_of_memory(error):
            raise Hopeless(
                f"no memory for samples on {self.status.value.device}: set samples.device=cpu, or"
                " samples.every=0 to make none"
            )
        elif isinstance(error, BadInput):
            raise error
        elif (refusal := disk_refuses(error)) is not None:
            log.warning("no samples of step %d: %s", step, refusal)
        else:
            log.warning(
                "the samples of step %d failed: %s: %s",
                step,
                type(error).__name__,
                error,
                exc_info=error,
            )

    def _speak(self, step: int) -> int:
        """Runs in the worker.

        Reads the weights first: the checkpoint may be removed while TensorFlow loads.
        """
        from common.run.folder import RunFolder

        run = RunFolder(self.path)
        state = _weights_of(self.path, step)
        if self._networks is None:
            from common.gpu.device import prove_device

            threads = run.config.threads
            info = prove_device(
                intra_threads=threads.producer_intra, inter_threads=threads.producer_inter
            )
            self.status.update(device=info.label)
        if self._networks is None or self._networks.run.config != run.config:
            self._networks = Networks(run)
        return self._networks.speak(state, step)


def _weights_of(run: Path, step: int) -> dict[str, np.ndarray]:
    """The GPT in a checkpoint. Gone: rotation was faster. ValueError: it is damaged."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    from common.run.beginning import checkpoint_of

    try:
        return load_file(checkpoint_of(run, str(step)))
    except (BadInput, OSError, SafetensorError) as e:
        if not (run / "checkpoints" / f"step-{step:08d}" / "state.json").is_file():
            raise Gone from e
        raise ValueError(str(e)) from e


def _steps_in(folder: Path) -> set[int]:
    from trainer.history.checkpoint import step_of

    return (
        {step for p in folder.iterdir() if (step := step_of(p)) is not None}
        if folder.is_dir()
        else set()
    )


def pause(stop: Stop, seconds: float) -> None:
    """Sleep; raise as soon as the process is asked to leave."""
    stop.wait(seconds)
    stop.check()


def take_place(
    run: Path, stop: Stop, done: Callable[[], bool], name: str = "sampler"
) -> lock.Lock | None:
    """Take the lock of the run's only process of a name as soon as it is free; None: the run ended
    first.
    """
    file, said = run / f"{name}.lock", False
    while not done():
        if (by := lock.holder(file)) is None:
            return lock.lock(file, name)
        if not said:
            log.info("%s does this run's work already; waiting for its place", by)
        said = True
        pause(stop, POLL_S)
    return None


def main(stop: Stop) -> int:
    """Take the place, work, leave with the trainer."""
    p = argparse.ArgumentParser(prog="python -m trainer.previews.sampler", description=__doc__)
    p.add_argument("--run", required=True, type=Path)
    run = p.parse_args().run
    logs.setup("sampler")
    os.nice(NICE)
    began = lock.program_began()

    def done():
        return status.trainer_is_done(run, began)

    held = take_place(run, stop, done)
    if held is not None:
        PreviewProcess(run, stop).run(done)
        held.release()
    return OK


if __name__ == "__main__":
    run_main(main)
