"""What a finished run leaves to look at and listen to: samples, curves, a summary."""

from __future__ import annotations

import json
import logging
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from safetensors.numpy import load_file

from common.data.plan import PlannedBatch
from common.run.folder import RunFolder
from common.system.errors import disk_refuses
from common.system.files import write_atomically
from common.system.lifecycle import Stop
from common.system.status import StatusFile
from trainer.report.tensorboard import EventWriter
from trainer.stages import Stage

log = logging.getLogger(__name__)


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


def finish(run: RunFolder, stage: Stage, status: StatusFile, stop: Stop) -> None:
    """Speak the samples with the final weights, then write curves.png and summary.json.

    A stop ends the speaking: all is trained and saved.
    """
    from trainer.report import (
        summary,
    )  # matplotlib: not before it is needed, a restarted trainer should be quick

    if stage.spec.speaks and run.config.samples.count + len(run.config.samples.texts):
        status.update(phase="speaking samples")
        try:
            # A text's loop over codes cannot be interrupted; a stop leaves it behind.
            work = ThreadPoolExecutor(1, "speaker").submit(_speak, run, stage)
            while not work.done() and not stop.wait(0.1):
                pass
            if work.done():
                work.result()
            else:
                log.warning(
                    "no samples: stopped; `launch.py synthesize --run %s` speaks later", run.path
                )
        # What lacks a package, or memory, must not begin a finished run's trainer anew.
        except Exception as e:  # the edge of a finished run
            refusal = disk_refuses(e)
            log.error(
                "no samples: %s; `launch.py synthesize --run %s` speaks later",
                refusal or f"{type(e).__name__}: {e}",
                run.path,
                exc_info=None if refusal else e,
            )
    for line in summary.lines(summary.finish(run, summary.unigram_of(run))):
        log.info("%s", line)


def _speak(run: RunFolder, stage: Stage) -> None:
    from common.xtts import weights
    from common.xtts.dvae import Dvae
    from trainer.previews.samples import maker_of

    began = time.perf_counter()
    dvae = Dvae(run.dims.dvae)
    weights.load_state_dict(dvae, load_file(run.dvae_weights))
    events = EventWriter(run.samples_events)
    try:
        infos = maker_of(run, stage.step.model, dvae).make(
            run.path / "samples", stage.schedule.total_steps, events
        )
    finally:
        events.close()
    log.info(
        "%d samples in %s, %.1f s", len(infos), run.path / "samples", time.perf_counter() - began
    )
