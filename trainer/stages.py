"""Building a stage of the trainer from its run folder: which step, which schedule, how batches reach the device."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors.numpy import load_file, save_file

from common.data.batch import batch_spec
from common.run.folder import RunFolder
from common.run.settings import Optim
from common.system.errors import BadInput
from common.system.files import fsync
from trainer.feed import HostCopy
from trainer.history.schedule import Schedule, schedule_of
from trainer.loop import StageFiles

if TYPE_CHECKING:
    from trainer.step.upload import Upload

log = logging.getLogger(__name__)

_STATE_BYTES = 12  # of a parameter in a checkpoint: itself and two moments, in float32
# The evaluated loss that names a stage's best checkpoint.
SCORES = {"gpt": "audio", "dvae": "recon", "arithmetic": "audio"}


@dataclass
class Stage:
    """What the loop needs of one stage."""

    number: int
    name: str  # "dvae" or "gpt"
    kind: str  # its batches: "dvae", "gpt" or "arithmetic"
    step: object
    schedule: Schedule
    files: StageFiles
    upload: Upload | HostCopy


def files_of(run: RunFolder, stage: str) -> StageFiles:
    """Where a stage keeps its history."""
    folder = run.stage_folder(stage)
    return StageFiles(folder / "ledger.jsonl", folder / "checkpoints", folder / "quarantine.jsonl")


def build(run: RunFolder, stage: str) -> Stage:
    """Networks, schedule and files of a stage. Imports TensorFlow unless the run is arithmetic."""
    schedule = schedule_of(run, stage)
    kind = run.kind(stage)
    if kind == "arithmetic":
        from trainer.step.arithmetic import ArithmeticStep

        step, upload = ArithmeticStep(), HostCopy()
    else:
        step, upload = _networks(run, stage, schedule)
    number = run.stages.index(stage) + 1
    return Stage(number, stage, kind, step, schedule, files_of(run, stage), upload)


def check_room(checkpoints: Path, num_bytes: int) -> None:
    """Warn where a checkpoint of this size does not fit on the disk: room may still be made before the first one."""
    folder = next(f for f in (checkpoints, *checkpoints.parents) if f.is_dir())
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        log.warning(
            "a checkpoint needs %.0f MB, and %s has %.0f MB free: make room before the first one", num_bytes / 1e6, folder, free / 1e6
        )


def first_weights(run: RunFolder, stage: Stage) -> None:
    """What stage 2 begins with where `model.weights` names imported weights: their GPT, with new rows for a bigger vocabulary.

    Raises:
        BadInput: the folder is not there any more, or not the one that the run was created with.
    """
    folder = run.config.model.weights
    if stage.name != "gpt" or folder is None or run.arithmetic:
        return
    from common.xtts import weights
    from common.xtts.checkpoints import pretrained

    try:
        path = pretrained.verified(folder, "model")
        if pretrained.file_digests(folder)["model"] != run.identity["weights"]:
            raise BadInput(f"{folder} holds other weights than the run was created with; restore them, or start a new run")
        state = load_file(path)
        weights.load_state_dict(stage.step.model, pretrained.grow(state, run.dims.gpt.num_text_tokens, run.config.seed))
        stage.step.weights_changed()
    except (pretrained.CoquiError, weights.WeightsError) as e:
        raise BadInput(f"model.weights={folder}: {e}") from e
    kept = len(state["text_embedding.weight"])
    log.info("began with the weights of %s: %d rows kept, %d new", folder, kept, run.dims.gpt.num_text_tokens - kept)


def _options(optim: Optim, schedule: Schedule, **more):
    from trainer.step.gpt import StepOptions

    total, warmup = optim.decay_steps or schedule.total_steps, optim.warmup_steps
    if optim.schedule == "cosine" and warmup >= total:
        # A trial of a few steps with a config made for many: it warms up for half of them.
        log.warning("warm-up of %d steps is as long as the run's %d: %d used", warmup, total, total // 2)
        warmup = total // 2
    return StepOptions(
        learning_rate=optim.learning_rate,
        betas=(optim.beta1, optim.beta2),
        weight_decay=optim.weight_decay,
        clip_norm=optim.clip_norm,
        schedule=optim.schedule,
        warmup_steps=warmup,
        total_steps=total,
        **more,
    )


def _networks(run: RunFolder, stage: str, schedule: Schedule):
    import tensorflow as tf

    from common.xtts.weights import num_parameters
    from trainer.step.precision import allow_tf32, choose
    from trainer.step.upload import Upload

    c = run.config
    common = {"mel_dtype": c.transport.mel_dtype, "jit": bool(c.jit), "init_seed": c.seed if c.model.weights is None else None}
    allow_tf32(c)
    if stage == "dvae":
        from trainer.step.dvae import DvaeStep

        step = DvaeStep(run.dims, _options(c.dvae.optim, schedule, **common), schedule.train.buckets)
    else:
        from trainer.step.gpt import GptStep

        precision = choose(c)
        own = {"text_loss_weight": c.train.text_loss_weight, "decay_latents": c.train.decay_latents, "coqui_init": c.model.coqui_init}
        own |= {"compute_dtype": precision.compute_dtype, "kernels": precision.kernels}
        own |= {"dropout": c.train.dropout, "attention_dropout": c.train.attention_dropout, "code_dropout": c.train.code_dropout}
        own |= {"recompute": c.train.recompute}
        options = _options(c.train.optim, schedule, **own, **common)
        step = GptStep(run.dims, options, schedule.train.buckets)
    log.info("%s: %s parameters in %s", stage, f"{num_parameters(step.model):,}", step.options.compute_dtype)
    check_room(files_of(run, stage).checkpoints, _STATE_BYTES * num_parameters(step.model))
    return step, Upload("/device:GPU:0" if tf.config.list_logical_devices("GPU") else None)


def spec_of(run: RunFolder, stage: Stage) -> Callable:
    """PlannedBatch → dtypes and shapes of its arrays."""
    buckets = stage.schedule.train.buckets
    specs = [batch_spec(stage.kind, b, run.dims, run.config.transport.mel_dtype) for b in buckets]
    return lambda planned: specs[planned.bucket]


def largest_array(run: RunFolder) -> int:
    """Bytes of the largest array in any batch of the run: no frame that a producer sends is larger."""
    sizes = []
    for stage in run.stages:
        for bucket in run.plan(stage, "train").buckets:
            spec = batch_spec(run.kind(stage), bucket, run.dims, run.config.transport.mel_dtype)
            sizes += [dtype.itemsize * math.prod(shape) for dtype, shape in spec.values()]
    return max(sizes)


def publish_dvae(run: RunFolder, weights: dict[str, np.ndarray]) -> None:
    """Stage 1 has ended: its weights become the ones that producers of stage 2 load. Atomic; its presence means "ended"."""
    tmp = run.dvae_weights.with_suffix(".tmp")
    save_file({k: np.asarray(v, order="C") for k, v in weights.items()}, tmp)
    fsync(tmp)
    tmp.replace(run.dvae_weights)
    fsync(run.dvae_weights.parent)
    log.info("stage 1 ended: %s", run.dvae_weights)
