"""The stages that a run trains, in one table. All that a stage's name decides stands here; no other
code compares a name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from common.xtts.dims import SIZES, ModelDims


@dataclass(frozen=True)
class StageSpec:
    """One stage. `maker`, `step`, `figures` and `panels` are "module:name", loaded where they are
    needed: some need TensorFlow, and each process needs different ones.
    """

    name: str
    title: str
    folder: str  # in the run folder; "": the run folder itself
    section: str  # of the settings
    kind: str  # of its batches, from `common.data.batch.FIELDS`
    score: str  # the evaluated loss that names the best checkpoint
    judged: tuple[
        str, str
    ]  # the loss that judges it: its name in training lines, and in evaluation lines
    maker: str  # (run) → producer.batches.maker.Maker
    step: str  # (run, schedule) → trainer.step.contract.Step, and how batches reach it
    # (history, run, entropy of the evaluation set's targets) → the summary's lines for this stage
    figures: str
    panels: str  # (history, figures) → the pictures.Panel of its curves
    crops: bool = False  # its batches are crops of one length, not rows in buckets
    # its last weights are RUN/dvae/model.safetensors, which later stages need for their batches
    publishes: bool = False
    needs_dvae: bool = False  # its batches are made with those weights
    # its model makes samples, and starts from `model.weights`; its targets are audio codes
    speaks: bool = False
    networks: bool = True  # it trains networks on a device, with features of recordings


NETWORKS = (
    StageSpec(
        name="dvae",
        title="stage 1, DVAE",
        folder="dvae",
        section="dvae",
        kind="dvae",
        score="recon",
        judged=("recon", "eval_recon"),
        maker="producer.batches.dvae:DvaeMaker",
        step="trainer.stages:dvae_step",
        figures="trainer.report.summary:codebook",
        panels="trainer.report.panels:dvae_panels",
        crops=True,
        publishes=True,
    ),
    StageSpec(
        name="gpt",
        title="stage 2, GPT",
        folder="",
        section="train",
        kind="gpt",
        score="audio",
        judged=("audio_ce", "eval_audio"),
        maker="producer.batches.gpt:GptMaker",
        step="trainer.stages:gpt_step",
        figures="trainer.report.summary:against_unigram",
        panels="trainer.report.panels:gpt_panels",
        needs_dvae=True,
        speaks=True,
    ),
)
STAGES = tuple(s.name for s in NETWORKS)
FAMILY = "xtts"  # of all sizes that train NETWORKS
_OTHERS: dict[str, tuple[StageSpec, ...]] = {}  # by size


def register(size: str, dims: ModelDims, specs: tuple[StageSpec, ...]) -> None:
    """Add a model size whose stages are `specs`, named as in STAGES."""
    if tuple(s.name for s in specs) != STAGES:
        raise ValueError(f"the stages of {size} are {[s.name for s in specs]}, not {list(STAGES)}")
    SIZES[size], _OTHERS[size] = dims, specs


def stages_of(size: str) -> tuple[StageSpec, ...]:
    """The stages of a model size, in order."""
    return _OTHERS.get(size, NETWORKS)


def family_of(size: str) -> str:
    """The entry for the stages in a run's identity."""
    return size if size in _OTHERS else FAMILY


def load(reference: str) -> Callable:
    """Import what a spec's "module:name" stands for."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)
