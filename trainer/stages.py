"""Builds a stage of the trainer from its run folder: its step, its schedule, and how batches reach
the device.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors.numpy import load_file

from common.data.batch import batch_spec
from common.data.plan import PlannedBatch
from common.run.beginning import FOLDER
from common.run.folder import RunFolder
from common.run.sections import Optim, Section
from common.run.settings import Config
from common.run.stages import StageSpec, load
from common.system.errors import BadInput
from trainer.feed import HostCopy
from trainer.history.schedule import Schedule, schedule_of
from trainer.history.stage_history import StageFiles

if TYPE_CHECKING:
    from trainer.step.contract import Step, StepOptions
    from trainer.step.upload import Upload

log = logging.getLogger(__name__)

_STATE_BYTES = 12  # of a parameter in a checkpoint: itself and two moments, in float32


@dataclass
class Stage:
    """What the loop needs of one stage."""

    number: int
    spec: StageSpec
    step: Step
    schedule: Schedule
    files: StageFiles
    upload: Upload | HostCopy

    @property
    def name(self) -> str:
        """Its entry in the table of stages."""
        return self.spec.name


def files_of(run: RunFolder, stage: str) -> StageFiles:
    """Where a stage keeps its history."""
    folder = run.stage_folder(stage)
    return StageFiles(folder / "ledger.jsonl", folder / "checkpoints", folder / "quarantine.jsonl")


def build(run: RunFolder, stage: str) -> Stage:
    """Step, schedule and files of a stage. Imports TensorFlow if it trains networks."""
    spec, schedule = run.spec(stage), schedule_of(run, stage)
    step, upload = load(spec.step)(run, schedule)
    return Stage(run.stages.index(stage) + 1, spec, step, schedule, files_of(run, stage), upload)


def check_room(checkpoints: Path, num_bytes: int) -> None:
    """Warn if a checkpoint of this size does not fit on the disk: the user can still make room
    before the first one.
    """
    folder = next(f for f in (checkpoints, *checkpoints.parents) if f.is_dir())
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        log.warning(
            "a checkpoint needs %.0f MB, and %s has %.0f MB free: make room before the first one",
            num_bytes / 1e6,
            folder,
            free / 1e6,
        )


def first_weights(run: RunFolder, stage: Stage) -> None:
    """Load what a stage starts from, if not from nothing: stage 1 from the DVAE that it tunes,
    stage 2 from the GPT of `model.weights`, with new rows for a larger vocabulary.

    Raises:
        BadInput: the weights are gone, or are not the ones that the run was created with.
    """
    if stage.spec.publishes:
        if run.first_dvae.is_file():
            _load(stage, load_file(run.first_dvae), run.first_dvae)
            log.info("stage 1 goes on with the DVAE that was given")
        return
    folder = run.pretrained
    if not stage.spec.speaks:
        return
    if folder is None:
        if run.identity.get("weights") is not None:
            raise BadInput(
                f"{run.path} started from other weights, and its copy of them is damaged"
                f" ({run.path / FOLDER}): restore that folder from a copy, or start a new run"
            )
        return
    from common.xtts.checkpoints import pretrained

    try:
        path = pretrained.verified(folder, "model")
        if pretrained.file_digests(folder)["model"] != run.identity["weights"]:
            raise BadInput(
                f"{folder} contains other weights than the run was created with; restore them, or"
                " start a new run"
            )
        state = load_file(path)
        kept = len(state["text_embedding.weight"])
        _load(stage, pretrained.grow(state, run.dims.gpt.num_text_tokens, run.config.seed), folder)
    except pretrained.CoquiError as e:
        raise BadInput(f"model.weights={folder}: {e}") from e
    named = run.config.model.weights
    log.info(
        "began with the weights of %s: %d rows kept, %d new",
        named,
        kept,
        run.dims.gpt.num_text_tokens - kept,
    )


def _load(stage: Stage, state: dict[str, np.ndarray], of: Path) -> None:
    from common.xtts import weights

    try:
        weights.load_state_dict(stage.step.model, state)
    except weights.WeightsError as e:
        raise BadInput(f"{of}: {e}") from e


def options_of(
    run: RunFolder, stage: str, optim: Optim, schedule: Schedule, *sections: Section
) -> StepOptions:
    """A step's options: from `optim` and other sections of the settings, every field that it
    has.
    """
    config = run.config
    from trainer.step.contract import StepOptions

    total, warmup = optim.decay_steps or schedule.total_steps, optim.warmup_steps
    if optim.schedule == "cosine" and warmup >= total:
        # A trial of a few steps with a config for many: warm up for half of them.
        log.warning(
            "a warm-up of %d steps is as long as the run (%d steps): using %d",
            warmup,
            total,
            total // 2,
        )
        warmup = total // 2
    names = {f.name for f in fields(StepOptions)}
    own = {
        name: value for section in (optim, *sections) for name, value in section if name in names
    }
    own |= {"betas": (optim.beta1, optim.beta2), "warmup_steps": warmup, "total_steps": total}
    # Weights that are loaded later need not be drawn first.
    given = run.first_dvae.is_file() if run.spec(stage).publishes else run.pretrained is not None
    loaded = given or any(files_of(run, stage).checkpoints.glob("step-*"))
    seed = None if loaded else config.seed
    return StepOptions(
        **own, mel_dtype=config.transport.mel_dtype, jit=bool(config.jit), init_seed=seed
    )


def dvae_step(run: RunFolder, schedule: Schedule) -> tuple[Step, Upload]:
    """Stage 1's step, and how batches reach it."""
    from trainer.step.dvae import DvaeStep

    c = run.config
    _set_up(c)
    return _on_device(
        run,
        "dvae",
        DvaeStep(
            run.dims,
            options_of(run, "dvae", c.dvae.optim, schedule),
            schedule.train.buckets,
            tunes=run.first_dvae.is_file(),
        ),
    )


def gpt_step(run: RunFolder, schedule: Schedule) -> tuple[Step, Upload]:
    """Stage 2's step, and how batches reach it."""
    from common.xtts.attention_check import why_not
    from trainer.step.gpt import GptStep
    from trainer.step.precision import choose
    from trainer.tried import Tried

    c = run.config
    _set_up(c)
    precision = choose(c, lambda: Tried.of_process().attention(why_not))
    options = options_of(run, "gpt", c.train.optim, schedule, c.train, c.model)
    options = replace(options, **vars(precision))
    return _on_device(run, "gpt", GptStep(run.dims, options, schedule.train.buckets))


def _set_up(config: Config) -> None:
    """Set the precision of products from the settings."""
    import tensorflow as tf

    from trainer.step.precision import allow_tf32

    allow_tf32(config)
    if config.jit:
        # It would examine hundreds of variables for seconds per bucket, around programs that XLA
        # optimises itself.
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


def _on_device(run: RunFolder, stage: str, step: Step) -> tuple[Step, Upload]:
    import tensorflow as tf

    from common.xtts.weights import num_parameters
    from trainer.step.upload import Upload

    log.info(
        "%s: %s parameters in %s",
        stage,
        f"{num_parameters(step.model):,}",
        step.options.compute_dtype,
    )
    check_room(files_of(run, stage).checkpoints, _STATE_BYTES * num_parameters(step.model))
    return step, Upload("/device:GPU:0" if tf.config.list_logical_devices("GPU") else None)


def planned_batches(
    run: RunFolder, stage: Stage
) -> Callable[[str, int], tuple[PlannedBatch, dict]]:
    """(plan, g) → the batch, and its arrays' dtypes and shapes."""
    plans = {"train": stage.schedule.train, "eval": stage.schedule.eval}
    specs = [
        batch_spec(stage.spec.kind, b, run.dims, run.config.transport.mel_dtype)
        for b in stage.schedule.train.buckets
    ]

    def planned(plan: str, g: int) -> tuple[PlannedBatch, dict]:
        batch = plans[plan].batch(g)
        return batch, specs[batch.bucket]

    return planned


def largest_array(run: RunFolder) -> int:
    """Bytes of the largest array in any batch of the run: no producer's frame is larger."""
    sizes = []
    for stage in run.stages:
        for bucket in run.plan(stage, "train").buckets:
            spec = batch_spec(
                run.spec(stage).kind, bucket, run.dims, run.config.transport.mel_dtype
            )
            sizes += [dtype.itemsize * math.prod(shape) for dtype, shape in spec.values()]
    return max(sizes)
