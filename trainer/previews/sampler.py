"""`python -m trainer.previews.sampler --run RUN`: speaks the samples of a run's checkpoints while
the run trains.

A process of its own, which reads what the trainer has saved and which the trainer knows nothing of:
its weights, random numbers and ledger are what they are without it, a step never waits for it, and
a kill loses nothing but samples. Within the trainer, compiling the sampling loop and speaking would
hold up the step for a minute each time. It computes on the producers' GPU, which is nearly idle:
memory grows as needed there, by the networks and the caches of a few rows (`samples.ROWS`). Where
the trainer shares that GPU its memory is divided already, so samples are made on the CPU. Its
priority is low: producers and trainer go first where cores are short.

Which: the first checkpoint at or after each multiple of `samples.every`. One at a time: while it
speaks others may come, of which it takes the newest next and says what it left out. The last step
is left to the trainer, which speaks at the run's end in any case (finale.py). A checkpoint that is
removed before it was read is passed over. RUN/sampler.lock makes it the only one of a run; another,
of `launch.py trainer` beside a running launch.py, waits for its place.

What takes time to load is imported where it is used.
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


def next_step(steps: Iterable[int], every: int, last: int, total: int) -> int | None:
    """Which of the checkpoints `steps` to speak next, where `last` was spoken before: of the newest
    stretch of `every` steps that has
    one, the first; None: nothing new. The step `total` is the trainer's own."""
    first: dict[int, int] = {}
    for step in sorted(s for s in steps if every and s < total):
        first.setdefault(step // every, step)
    newest = max(first, default=0)
    return first[newest] if newest and newest > last // every else None


class Gone(Exception):
    """A checkpoint was removed before it was read."""


class Networks:
    """A run's networks in this process, given the weights of one checkpoint after another.

    TensorFlow is loaded with the first.
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
        """Write RUN/samples/step-…, whole or not at all, and TensorBoard's copies; returns how many
        were spoken.
        """
        from common.xtts import weights
        from trainer.report.tensorboard import EventWriter

        weights.load_state_dict(self._gpt, state)
        name = f"step-{step:08d}"
        aside, events = (
            self.run.path / "samples" / f".tmp-{name}",
            EventWriter(self.run.samples_events),
        )
        try:
            spoken = self._maker.make(aside, step, events, interim=True)
        finally:
            events.close()
        if spoken:
            os.replace(aside, aside.with_name(name))
        return len(spoken)


class PreviewProcess:
    """The process's work, from checkpoint to checkpoint."""

    def __init__(self, path: Path, stop: Stop):
        self.path, self.stop = path, stop
        self.status = StatusFile(path, "sampler", "sampler")
        stop.at_exit(self.status.finish)
        self._networks: Networks | None = None
        self._nothing_in: set[int] | None = None  # these checkpoints held nothing to do
        self._tried, self._took_s, self._complained = 0, 0.0, False
        # The main thread has to hear of a stop, and the loop over a text's codes cannot be
        # interrupted.
        self._worker = ThreadPoolExecutor(1, "speaker")

    def run(self, done: Callable[[], bool]) -> None:
        """Until the trainer is `done`; a stop raises."""
        folder = self.path / "samples"
        folder.mkdir(exist_ok=True)
        for left in folder.glob(".tmp-*"):
            shutil.rmtree(left)
        while not done():
            if (step := self._next()) is None:
                self.status.update(phase="waiting for a checkpoint")
                pause(self.stop, POLL_S)
            else:
                self.status.update(phase="speaking", step=step)
                self._round(step)

    def _next(self) -> int | None:
        from common.run.folder import RunFolder
        from trainer.history.schedule import schedule_of

        steps = _steps_in(self.path / "checkpoints")
        if steps == self._nothing_in:
            return None
        run = RunFolder(self.path)  # anew: settings can be changed while it trains
        every, last = run.config.sample_every, max({self._tried, *_steps_in(self.path / "samples")})
        step = next_step(steps, every, last, schedule_of(run, "gpt").total_steps)
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
        """Speak one checkpoint. What goes wrong is told; the next one is tried.

        Raises:
            BadInput: the device cannot be used. Hopeless: its memory does not suffice.
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
        """In the worker.

        The weights are read first: while TensorFlow loads, the checkpoint may be removed.
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
    """Sleep; raises as soon as the process is asked to leave."""
    stop.wait(seconds)
    stop.check()


def take_place(
    run: Path, stop: Stop, done: Callable[[], bool], name: str = "sampler"
) -> lock.Lock | None:
    """The lock of the run's only process of a name, as soon as it is free; None: the run was done
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
