"""The run folder as its processes open it: settings, sizes, corpus, plans, and what identifies
them.

`producer/creation/prepare.py` creates it; everything here only reads, except the generation
counter, which belongs to the trainer.
"""

from __future__ import annotations

import json
import os
from functools import cached_property
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from common.data.manifest import Manifest
from common.data.plan import Plan
from common.run import beginning
from common.run import settings as config_module
from common.run.settings import Config
from common.run.stages import StageSpec, stages_of
from common.system.errors import BadInput
from common.system.files import digest, file_digest, write_atomically
from common.xtts.dims import ModelDims

# Part of every feature hash: producers with other feature code than the run began with are refused.
FEATURE_VERSION = 2
_FEW_CLIPS = 10  # may turn out unusable in any corpus
BUNDLE = "bundle.json"  # in the folder of a producer on another host (common/run/bundle.py)


def most_set_aside(config: Config, num_clips: int) -> int:
    """How many of a run's clips may turn out unusable before the run ends."""
    return max(_FEW_CLIPS, int(config.train.max_set_aside * num_clips))


class RunFolder:
    """An existing run folder.

    Raises:
        BadInput: the folder is no run, or a part that the settings promise is missing.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        if not (self.path / "identity.json").is_file():
            raise BadInput(
                f"{self.path} is not a run folder (no identity.json); `python launch.py …"
                f" run={self.path}` creates one"
            )
        self.identity: dict = json.loads((self.path / "identity.json").read_text())
        self.config: Config = config_module.load(self.path / "config.yaml")
        self.dims = ModelDims.from_dict(self.identity["dims"])

    @property
    def run_id(self) -> str:
        """16 random bytes in hex, drawn when the run was created."""
        return self.identity["run_id"]

    def spec(self, stage: str) -> StageSpec:
        """What the table says of a stage. KeyError: there is none of this name."""
        return {s.name: s for s in stages_of(self.config.model.size)}[stage]

    @property
    def trains_networks(self) -> bool:
        """Its processes open devices and compute features."""
        return any(self.spec(stage).networks for stage in self.stages)

    @cached_property
    def manifest(self) -> Manifest:
        """The scanned corpus."""
        return Manifest.open(self.path / "manifest.sqlite")

    @cached_property
    def mel_stats(self) -> np.ndarray:
        """float32[80], per-channel divisor of the log-mels."""
        return load_file(self.path / "mel_stats.safetensors")["mel_stats"]

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages this run trains, in order."""
        return tuple(
            s.name
            for s in stages_of(self.config.model.size)
            if self.identity["trains_dvae"] or not s.publishes
        )

    @property
    def dvae_weights(self) -> Path:
        """Where the DVAE's weights are, or will be once stage 1 has ended."""
        return self.path / "dvae" / "model.safetensors"

    @property
    def first_dvae(self) -> Path:
        """The DVAE that stage 1 goes on with; no such file where it begins from nothing."""
        return self.path / "dvae" / "first.safetensors"

    @property
    def pretrained(self) -> Path | None:
        """The folder of weights that the run began with; None: it began from nothing."""
        own = self.path / beginning.FOLDER
        if (own / "dims.json").is_file():
            return own
        weights = self.config.model.weights  # of a run made before runs kept it
        return None if weights is None else Path(weights)

    @property
    def cleaning(self) -> dict[str, bool]:
        """How texts are cleaned: options of `Tokenizer.load`."""
        text = self.config.text
        return {"parity": text.coqui_cleaning, "keep_diacritics": not text.strip_arabic_diacritics}

    @property
    def samples_events(self) -> Path:
        """TensorBoard's folder for samples: not the trainer's own, since it follows one growing
        file per folder.
        """
        return self.path / "tensorboard" / "samples"

    def stage_folder(self, stage: str) -> Path:
        """Where a stage keeps its ledger, checkpoints and metrics."""
        return self.path / self.spec(stage).folder

    def plan(self, stage: str, name: str) -> Plan:
        """Plan "train" or "eval" of a stage, memory-mapped."""
        return Plan.open(self.path / "plan" / stage, name)

    def feature_hash(self, stage: str) -> str:
        """What producers must agree on to make this stage's batches: sizes, vocabulary, statistics,
        weights, dtypes, threads, code.
        """
        parts = {
            "version": FEATURE_VERSION,
            "stage": stage,
            "identity": {k: v for k, v in self.identity.items() if k != "run_id"},
            "threads": (
                [self.config.threads.producer_intra, self.config.threads.producer_inter]
                if self.config.deterministic
                else None
            ),
        }
        if self.spec(stage).needs_dvae:
            if not self.dvae_weights.is_file() and (self.path / BUNDLE).is_file():
                raise BadInput(
                    "stage 2 needs the DVAE, and this bundle was made before stage 1 had ended:"
                    " make it again with `launch.py bundle` on the trainer's host, and start this"
                    " producer from the new one"
                )
            if not self.dvae_weights.is_file():
                raise BadInput(
                    f"{self.dvae_weights} is missing: stage 1 writes it, or model.dvae names it"
                )
            parts["dvae"] = file_digest(self.dvae_weights)
        return digest(parts)

    def next_generation(self) -> int:
        """A number larger than any before; durable before it is returned.

        Only the holder of RUN/lock may call this.
        """
        path = self.path / "generation"
        number = int(path.read_text()) + 1 if path.exists() else 1
        write_atomically(path, f"{number}\n")
        return number

    @property
    def endpoint_file(self) -> Path:
        """Where the trainer says how to reach it (common/transport/address.py)."""
        return self.path / "endpoint.json"
