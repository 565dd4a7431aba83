"""The run folder as its processes open it: settings, sizes, corpus, plans, and what identifies
each.

`producer/creation/prepare.py` creates it; everything here only reads, except the generation
counter, which belongs to the trainer.
"""

from __future__ import annotations

import logging
import os
import time
from functools import cached_property
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from common.data.manifest import Manifest
from common.data.plan import Plan
from common.run import beginning, recorded_settings
from common.run.proof import Proof
from common.run.settings import Config
from common.run.stages import StageSpec, stages_of
from common.system.errors import BadInput
from common.system.files import digest, file_digest, write_atomically
from common.xtts.dims import ModelDims

# Part of every feature hash: a producer whose feature code differs from the run's is refused.
FEATURE_VERSION = 2
_FEW_CLIPS = 10  # clips that may turn out unusable in any corpus
_DVAE = ("dvae/first.safetensors", "dvae/model.safetensors")  # what stage 1 starts from, and makes
log = logging.getLogger(__name__)
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
        self.proof = Proof.read(self.path)
        self.identity: dict = self.proof.identity
        self.config: Config = recorded_settings.of(self.proof)
        try:
            self.dims = ModelDims.from_dict(self.identity["dims"])
        except (KeyError, TypeError) as e:
            raise BadInput(
                f"{self.path}: identity.json is damaged, or of another version of this program"
                f" (sizes: {e})"
            ) from e

    @cached_property
    def damaged(self) -> dict[str, str]:
        """Read every file; return those that are not as they were written, and what is wrong."""
        found = self.proof.faults()
        if self.identity.get("trains_dvae") and not self.dvae_weights.exists():
            found.pop(_DVAE[1], None)  # stage 1 makes them
        if any((self.path / "checkpoints").glob("step-*")):
            found.pop(beginning.LIST, None)  # nothing trains from them any more
        return found

    def prove(self, trains: bool = False) -> None:
        """Check that every file that decides what is trained is as it was written.

        `trains`: for the trainer, which also reads what stage 1 starts from.

        BadInput: one is not; the message says which, and what to do.
        """
        if self.proof.files is None:
            log.warning(
                "%s was made before runs kept digests of their files: nothing is compared until"
                " `launch.py run=%s` has recorded them",
                self.path,
                self.path,
            )
        bundled = (self.path / BUNDLE).is_file()
        for name, why in self.damaged.items():
            if name == _DVAE[0] and (not trains or self.dvae_weights.is_file()):
                continue
            if name == beginning.LIST and not trains:
                continue
            if name == _DVAE[1] and bundled and why == "missing":
                continue  # `feature_hash` says what to do
            mend = (
                "make the bundle again with `launch.py bundle`, and delete this folder"
                if bundled
                else f"stop the run and start it again with `launch.py run={self.path}`, which"
                " makes it anew where that is possible"
            )
            raise BadInput(f"{self.path / name}: {why}; {mend}")

    @property
    def run_id(self) -> str:
        """16 random bytes in hex, drawn at the run's creation."""
        return self.identity["run_id"]

    def spec(self, stage: str) -> StageSpec:
        """A stage's entry in the table. KeyError: there is no stage of this name."""
        return {s.name: s for s in stages_of(self.config.model.size)}[stage]

    @property
    def trains_networks(self) -> bool:
        """Whether its processes open devices and compute features."""
        return any(self.spec(stage).networks for stage in self.stages)

    @cached_property
    def manifest(self) -> Manifest:
        """The scanned corpus."""
        return Manifest.open(self.path / "manifest.sqlite")

    @cached_property
    def mel_stats(self) -> np.ndarray:
        """float32[80], the per-channel divisor of the log-mels."""
        path = self.path / "mel_stats.safetensors"
        try:
            return load_file(path)["mel_stats"]
        except (OSError, KeyError, SafetensorError) as e:
            raise BadInput(
                f"{path} is damaged ({e}); `launch.py run={self.path}` makes it anew"
            ) from e

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
        """The file of the DVAE's weights, which exists once stage 1 has ended."""
        return self.path / "dvae" / "model.safetensors"

    @property
    def first_dvae(self) -> Path:
        """The DVAE that stage 1 starts from; the file does not exist if it starts from nothing."""
        return self.path / "dvae" / "first.safetensors"

    @property
    def pretrained(self) -> Path | None:
        """The folder of weights that the run started from; None: it started from nothing."""
        own = self.path / beginning.FOLDER
        if (own / "dims.json").is_file():
            return own
        weights = self.config.model.weights  # in runs made before runs kept it
        return None if weights is None else Path(weights)

    @property
    def cleaning(self) -> dict[str, bool]:
        """How texts are cleaned: options of `Tokenizer.load`."""
        text = self.config.text
        return {"parity": text.coqui_cleaning, "keep_diacritics": not text.strip_arabic_diacritics}

    @property
    def samples_events(self) -> Path:
        """TensorBoard's folder for samples: not the trainer's own, because TensorBoard follows one
        growing file per folder.
        """
        return self.path / "tensorboard" / "samples"

    def stage_folder(self, stage: str) -> Path:
        """Where a stage keeps its ledger, checkpoints and metrics."""
        return self.path / self.spec(stage).folder

    def plan(self, stage: str, name: str) -> Plan:
        """Plan "train" or "eval" of a stage, memory-mapped."""
        try:
            return Plan.open(self.path / "plan" / stage, name)
        except (OSError, ValueError, KeyError, TypeError, IndexError, EOFError) as e:
            raise BadInput(
                f"{self.path / 'plan' / stage}: the plan {name} is damaged ({type(e).__name__}:"
                f" {e}); `launch.py run={self.path}` makes it anew"
            ) from e

    def feature_hash(self, stage: str) -> str:
        """Hash of all that producers must agree on to make this stage's batches: sizes, vocabulary,
        statistics, weights, dtypes, threads, code.
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
        """Return a number larger than any before, after making it durable.

        Only the holder of RUN/lock may call this.
        """
        path = self.path / "generation"
        try:
            text, *proof = path.read_text().split()
            if proof not in ([], [digest(text)]):
                raise ValueError("its digest differs")
            number = int(text) + 1
        except FileNotFoundError:
            number = self._after_all() if self._begun() else 1
        except ValueError:
            number = self._after_all()
            log.warning("%s is damaged: counting on from %d", path, number)
        write_atomically(path, f"{number} {digest(str(number))}\n")
        return number

    def _begun(self) -> list[str]:
        """The stages with a ledger, which a trainer creates before its first generation."""
        return [s for s in self.stages if (self.stage_folder(s) / "ledger.jsonl").exists()]

    def _after_all(self) -> int:
        """A number larger than any count of starts and than the last number: milliseconds, since
        nothing starts so often, and not before the newest file, in case the clock was set back.
        """
        written = [self.path, *(self.stage_folder(s) / "ledger.jsonl" for s in self._begun())]
        return int(1000 * max(time.time(), *(p.stat().st_mtime for p in written))) + 1

    @property
    def endpoint_file(self) -> Path:
        """Where the trainer says how to reach it (common/transport/address.py)."""
        return self.path / "endpoint.json"

    @property
    def trainers_file(self) -> Path:
        """Where the first trainer says how trainers of other hosts reach it, likewise."""
        return self.path / "trainers.json"
