"""The stages that a run trains, in one table. What a stage's name decides stands here, and nowhere
else is a name compared.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from common.xtts.dims import SIZES, ModelDims


@dataclass(frozen=True)
class StageSpec:
    """One stage. `maker`, `step`, `figures` and `panels` are "module:name", loaded where they are
    needed: some need TensorFlow, and each process has its own.
    """

    name: str
    title: str
    folder: str  # in the run folder; "": the run folder itself
    section: str  # of the settings
    kind: str  # of its batches, in `common.data.batch.FIELDS`
    score: str  # the evaluated loss that names the best checkpoint
    judged: tuple[
        str, str
    ]  # the loss that it is judged by: its name in training lines, and in evaluation lines
    maker: str  # (run) → producer.batches.maker.Maker
    step: str  # (run, schedule) → trainer.step.contract.Step, and how batches reach it
    # (history, run, entropy of the evaluation set's targets) → what the summary says of this stage
    # alone
    figures: str
    panels: str  # (history, figures) → pictures.Panel of its curves
    crops: bool = False  # batches of crops of one length, instead of rows in buckets
    # its last weights are RUN/dvae/model.safetensors, which the batches of the stages after it need
    publishes: bool = False
    needs_dvae: bool = False  # its batches are made with those weights
    # its model makes samples, and begins with `model.weights`; its targets are audio codes
    speaks: bool = False
    networks: bool = True  # features of recordings, and networks on a device


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
    """Another size of model, whose stages are `specs`, of the names in STAGES."""
    if tuple(s.name for s in specs) != STAGES:
        raise ValueError(f"the stages of {size} are {[s.name for s in specs]}, not {list(STAGES)}")
    SIZES[size], _OTHERS[size] = dims, specs


def stages_of(size: str) -> tuple[StageSpec, ...]:
    """The stages of a size of model, in order."""
    return _OTHERS.get(size, NETWORKS)


def family_of(size: str) -> str:
    """What a run's identity says of its stages."""
    return size if size in _OTHERS else FAMILY


def load(reference: str) -> Callable:
    """What a spec's "module:name" stands for."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)
