"""A run's plans: written for each stage from the manifest and the settings, checked against the
memory budget, and described to the user.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from common.data import stateless_random
from common.data.batch import num_bytes
from common.data.buckets import Bucket, make_buckets, padded_share, row_lengths
from common.data.manifest import EVAL, TRAIN, Manifest
from common.data.plan import Plan, PlanRows, write_plan
from common.run.settings import Config
from common.run.stages import STAGES, StageSpec, stages_of
from common.system import cgroup
from common.system.counted import counted
from common.system.errors import BadInput
from common.xtts.dims import ModelDims
from producer.batches.rows import hidden_share, layout_of, most_codes
from producer.creation import shares

CONTAINER_SHARE = 0.5  # of a container's memory, for batches; the rest is the processes'


def write(
    config: Config, folder: Path, stage: StageSpec, manifest: Manifest, dims: ModelDims
) -> dict[str, str]:
    """Write both plans of a stage; returns their digests."""
    columns = manifest.columns()
    n = len(columns["split"])
    if stage.crops:
        buckets = [
            Bucket(config.dvae.batch_size, config.dvae.crop_frames, 0, config.dvae.crop_frames // 4)
        ]
        of = np.zeros(n, np.int16)
    else:
        buckets, of = make_buckets(
            columns["num_tokens"],
            _num_codes(config, columns, dims),
            num_buckets=config.batching.buckets,
            batch_size=config.batching.batch_size,
            positions_per_batch=config.batching.positions_per_batch,
            num_latents=dims.gpt.num_latents,
            layout=layout_of(config),
        )
    groups = shares.groups_of(config, manifest)
    seed = int(stateless_random.key(config.seed, STAGES.index(stage.name)) >> np.uint64(1))
    digests = {}
    for name, split, sampling in (
        ("train", TRAIN, config.batching.sampling),
        ("eval", EVAL, "fixed"),
    ):
        ids, pool = np.flatnonzero(columns["split"] == split), None
        if not stage.crops and config.batching.prompt == "speaker":
            # Training never hears the evaluation set. An evaluation may take its voices from both
            # sets: nothing is learnt from them.
            lenders = ids if name == "train" else np.arange(n)
            pool = lenders, columns["speaker"][lenders]
        own = None if groups is None or name == "eval" else (groups[0][ids], groups[1])
        rows = PlanRows(ids, of[ids], columns["language"][ids], columns["speaker"][ids], pool, own)
        digests[name] = write_plan(
            folder, name, rows, seed=seed, sampling=sampling, buckets=buckets
        )
    return digests


def check_memory(config: Config, aside: Path, dims: ModelDims) -> None:
    """BadInput if the window times the largest batch exceeds the budget, or what a container's
    memory leaves beside the processes themselves.
    """
    buckets = [
        (s.kind, b)
        for s in stages_of(config.model.size)
        for b in Plan.open(aside / "plan" / s.name, "train").buckets
    ]
    sizes = [num_bytes(kind, bucket, dims, config.transport.mel_dtype) for kind, bucket in buckets]
    window, budget = config.transport.high_water_mark, config.transport.memory_budget_mb * 1e6
    named = f"transport.memory_budget_mb={config.transport.memory_budget_mb}"
    limit = cgroup.memory_limit()
    if limit is not None and limit * CONTAINER_SHARE < budget:
        budget = limit * CONTAINER_SHARE
        named = f"half of the {limit / 1e6:.0f} MB that this container or job may use"
    if window * max(sizes) > budget:
        raise BadInput(
            f"transport.high_water_mark={window} x the largest batch ({max(sizes) / 1e6:.1f} MB) is"
            f" {window * max(sizes) / 1e6:.0f} MB, over {named}; {int(budget // max(sizes))}"
            " batches would fit"
        )


def lines(config: Config, aside: Path, manifest: Manifest, dims: ModelDims) -> list[str]:
    """Lines for the user about the plans in `aside`."""
    plan = Plan.open(aside / "plan" / "gpt", "train")
    evaluation = Plan.open(aside / "plan" / "gpt", "eval").num_utterances
    shapes = ", ".join(f"{b.batch_size}x{b.row_len + dims.gpt.num_latents}" for b in plan.buckets)
    columns, ids = manifest.columns(), np.asarray(plan.order)
    lengths = row_lengths(
        columns["num_tokens"], _num_codes(config, columns, dims), layout_of(config)
    )[columns["split"] == TRAIN]
    padding = padded_share(lengths, [b.row_len for b in plan.buckets])
    told = [
        f"plan: {plan.num_utterances} training and {evaluation} evaluation utterances,"
        f" {plan.batches_per_epoch} batches/epoch; rows x positions {shapes}, {100 * padding:.1f} %"
        " of them padding"
    ]
    told += shares.lines(config, manifest)
    if config.batching.prompt == "speaker":
        alone = int((np.bincount(columns["speaker"][ids]) == 1).sum())
        told.append(
            "conditioning clips: of another utterance of the speaker;"
            f" {counted(alone, '{n} [utterance is its|utterances are their]')} speaker's only one"
        )
    elif config.batching.mask_prompt is True and len(ids):
        share = hidden_share(columns["num_samples"][ids], dims.audio)
        told.append(
            f"conditioning clips: of the utterance itself, so that {share:.0%} of the codes are no"
            " targets (see batching.prompt)"
        )
    return told


def _num_codes(config: Config, columns: dict[str, np.ndarray], dims: ModelDims) -> np.ndarray:
    return most_codes(columns["num_samples"], config.batching.code_phases, dims.audio)
