"""What a finished run leaves to look at and listen to: samples, curves, a summary."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from common.board import Board
from common.durable import write_atomically
from common.errors import is_out_of_memory
from common.plan import PlannedBatch
from common.run import RunFolder
from common.status import StatusFile
from trainer.stages import Stage

log = logging.getLogger(__name__)


class TargetCounter:
    """Counts the audio targets of an evaluation set as its batches come by, each batch once; their entropy is what a model that knows
    nothing but how often each code occurs would score."""

    def __init__(self, num_batches: int, num_audio_tokens: int):
        self._counts = np.zeros(num_audio_tokens, np.int64)
        self._left = set(range(num_batches))

    def __call__(self, planned: PlannedBatch, arrays: dict) -> None:
        """Take a batch; called by the feed for every batch of every plan."""
        from trainer.summary import count_targets

        if planned.plan == "eval" and planned.g in self._left:
            self._left.discard(planned.g)
            self._counts += count_targets(arrays["audio_targets"], len(self._counts))

    @property
    def entropy_nats(self) -> float | None:
        """None until every batch was seen."""
        from trainer.summary import unigram_entropy

        return None if self._left or not self._counts.any() else unigram_entropy(self._counts)


def remember_entropy(run: RunFolder, counter: TargetCounter | None) -> None:
    """Keep the evaluation set's entropy in the run, so that a run resumed at its very end has it, too."""
    if counter is not None and counter.entropy_nats is not None:
        write_atomically(run.path / "eval_codes.json", json.dumps({"unigram_nats": counter.entropy_nats}) + "\n")


class Speaker:
    """Speaks stage 2's samples with the weights of the moment; recordings and compiled functions are kept from time to time."""

    def __init__(self, run: RunFolder, stage: Stage):
        self._run, self._stage = run, stage
        self._maker = None

    def __call__(self, step: int) -> None:
        """The samples of `step`, into a folder of their own."""
        try:
            self.speak(self._run.path / "samples" / f"step-{step:08d}", step)
        except Exception as e:
            if is_out_of_memory(e):
                log.warning("no memory to speak samples beside training: samples.every=0 leaves them to the end")
                return
            raise

    def speak(self, folder: Path, step: int) -> None:
        """Write the samples, and show them on TensorBoard."""
        began = time.perf_counter()
        if self._maker is None:
            self._maker = self._load()
        board = Board(self._run.path / "tensorboard")
        try:
            infos = self._maker.make(folder, step, board)
        finally:
            board.close()
        log.info("%d samples in %s, %.1f s", len(infos), folder, time.perf_counter() - began)

    def _load(self):
        from common.xtts import weights
        from common.xtts.dvae import Dvae
        from trainer.samples import sample_maker

        dvae = Dvae(self._run.dims.dvae)
        weights.load_state_dict(dvae, load_file(self._run.dvae_weights))
        return sample_maker(self._run, self._stage.step.model, dvae)


def speaker_of(run: RunFolder, stage: Stage) -> Speaker | None:
    """None where there is nothing to say: stage 1, arithmetic, no samples wanted."""
    return Speaker(run, stage) if stage.kind == "gpt" and run.config.samples.count + len(run.config.samples.texts) else None


def finish(run: RunFolder, stage: Stage, retraces: dict[str, int], status: StatusFile) -> None:
    """Speak the samples with the final weights, then write curves.png and summary.json."""
    from trainer import summary  # matplotlib: not before it is needed, a restarted trainer should be quick

    speaker = speaker_of(run, stage)
    if speaker is not None:
        status.update(phase="speaking samples", message="")
        speaker.speak(run.path / "samples", stage.schedule.total_steps)
    path = run.path / "eval_codes.json"
    nats = json.loads(path.read_text())["unigram_nats"] if path.exists() else None
    for line in summary.lines(summary.finish(run, nats, retraces)):
        log.info("%s", line)
