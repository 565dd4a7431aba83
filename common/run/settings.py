"""One run's settings: a typed tree, strict about names, read from YAML and `a.b=c` overrides, and
written into the run folder.

`load` reads and checks; `resolve` fills in what depends on the machine (threads, window,
determinism) exactly once, when a run is created; children read only the resolved `RUN/config.yaml`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field, ValidationError

from common.run import beginning
from common.run.parity import PARITY, with_parity
from common.run.sections import (
    Augment,
    Batching,
    Data,
    DvaeStage,
    Model,
    Producers,
    Samples,
    Section,
    Text,
    Threads,
    Train,
    Trainers,
    Transport,
)
from common.run.setting_types import Word
from common.run.settings_text import (
    NoSection,
    bounded_bytes,
    explain,
    read_yaml,
    renamed,
    set_override,
)
from common.run.stages import stages_of
from common.system.errors import BadInput
from common.system.files import write_atomically
from common.xtts.dims import SIZES, ModelDims


class Config(Section):
    """A whole run."""

    parity: Literal["", "coqui"] = ""
    """coqui: all behaviours of Coqui's trainer that are probably unintended, at once."""
    run: Word = "runs/run"
    """The run folder: a new one, an empty one, or a run, which then goes on."""
    seed: int = Field(1, ge=0, lt=2**31)
    """Seed of every random choice in the run."""
    deterministic: bool | None = None
    """Equal bits from equal runs. null: true on the CPU."""
    devices: Literal["gpu", "auto"] = "gpu"
    """auto: GPUs where there are any, else the CPU."""
    loggers: list[Literal["wandb", "mlflow"]] = Field(default_factory=list)
    """Services that curves go to besides TensorBoard's files, which are always written."""
    data_gpu: Word | None = None
    """The producers' GPU: 0, a UUID or cpu; 0,2: two GPUs, taken in turn. null: chosen."""
    model_gpu: Word | None = None
    """The trainer's GPU: 1, a UUID or cpu; 0,1: one for each of two trainers. null: chosen."""
    jit: bool | None = None
    """Compile with XLA. null: on GPUs."""
    gpu_memory_mb: int = Field(0, ge=0)
    """Most GPU memory of a producer. 0: no limit; or if the producers share the trainer's card, a
    sixth of it for all."""
    data: Data = Field(default_factory=Data)
    """What to train on."""
    text: Text = Field(default_factory=Text)
    """Vocabulary and normalisation."""
    model: Model = Field(default_factory=Model)
    """Which networks."""
    batching: Batching = Field(default_factory=Batching)
    """How utterances become batches."""
    augment: Augment = Field(default_factory=Augment)
    """Changes to recordings during training."""
    train: Train = Field(default_factory=Train)
    """Stage 2."""
    dvae: DvaeStage = Field(default_factory=DvaeStage)
    """Stage 1."""
    trainers: Trainers = Field(default_factory=Trainers)
    """The processes that train."""
    producers: Producers = Field(default_factory=Producers)
    """The processes that make batches."""
    transport: Transport = Field(default_factory=Transport)
    """The wire."""
    threads: Threads = Field(default_factory=Threads)
    """TensorFlow's CPU threads."""
    samples: Samples = Field(default_factory=Samples)
    """What to speak during training."""

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        return Path(self.run)

    @property
    def sample_every(self) -> int:
        """Steps between the samples of a run that trains; 0: none are made before its end."""
        speaks = any(s.speaks for s in stages_of(self.model.size))
        if not speaks or not self.samples.count + len(self.samples.texts):
            return 0
        return self.train.save_every if self.samples.every is None else self.samples.every

    @property
    def dims(self) -> ModelDims:
        """The model's sizes before the vocabulary is known.

        BadInput: `model.weights` names nothing to begin with.
        """
        if self.model.weights is not None:
            return beginning.locate(self.model.weights, verify=False).dims
        dims = SIZES[self.model.size]
        if self.model.layers is None:
            return dims
        return dims.with_layers(self.model.layers)


def _with_absolute_weights(config: Config) -> Config:
    m = config.model
    if m.weights is None:
        return config
    return config.model_copy(
        update={"model": m.model_copy(update={"weights": beginning.absolute(m.weights)})}
    )


def parse(tree: dict, where: str = "settings", by: dict[str, str] | None = None) -> Config:
    """A checked `Config` from plain values.

    Args:
        where: where the values were read from, for error messages.
        by: keys that were set elsewhere, and what set them (`--seed`, `command line`).

    Raises:
        BadInput: lists every fault, where it is, and the nearest known name.
    """
    by, tree = by or {}, renamed(tree, where)
    # `parity` and what contradicts it may come from different places.
    elsewhere = any(
        f"{p}.".startswith(f"{key}.") for key in by for p in ("parity", *PARITY["coqui"])
    )
    tree = with_parity(tree, f"{where} and the command line" if elsewhere else where)
    try:
        config = _with_absolute_weights(Config.model_validate(tree))
    except ValidationError as e:
        raise BadInput(explain(e, Config, where, by)) from e
    _check_trainers(config, where)
    return config


def _check_trainers(config: Config, where: str) -> None:
    """BadInput: a step's batches cannot be divided among the trainers."""
    count, batches = config.trainers.count, config.train.accumulate
    if batches % count:
        fits = count * -(-batches // count)
        raise BadInput(
            f"{where}: {count} trainers (trainers.count, --num-trainers) divide the batches of a"
            f" step, and train.accumulate={batches} is not a multiple of {count}: set"
            f" train.accumulate={fits} (a smaller batching.batch_size keeps the step's size), or"
            " --num-trainers 1"
        )


def load(path: str | os.PathLike, overrides: list[str] = ()) -> Config:
    """Read a YAML file and apply overrides.

    Raises:
        BadInput: no such file, not UTF-8, not YAML, a key given twice, an unknown key or a wrong
            value; names the flag or the command line where an override is at fault.
    """
    return of_tree(read_tree(path), path, overrides)


def read_tree(path: str | os.PathLike) -> dict:
    """The plain values of a YAML file. BadInput: no such file, not UTF-8, or not settings."""
    try:
        tree = read_yaml(_text(path), str(path)) or {}
    except (yaml.YAMLError, ValueError) as e:
        raise BadInput(f"{path} is not YAML: {e}") from e
    if not isinstance(tree, dict):
        raise BadInput(f"{path}: expected keys and values at the top level")
    return tree


def of_tree(tree: dict, path: str | os.PathLike, overrides: list[str] = ()) -> Config:
    """Settings from plain values, read from `path`, and overrides. BadInput as of `load`."""
    by: dict[str, str] = {}
    for o in overrides:
        try:
            own = set_override(tree, o)
        except NoSection:
            parse(
                tree, str(path), by
            )  # if the file has a value in place of a section, report that instead
            raise
        by[own] = getattr(o, "flag", "") or "command line"
    return parse(tree, str(path), by)


def _text(path: str | os.PathLike) -> str:
    try:
        text = bounded_bytes(path).decode("utf-8-sig")
    except OSError as e:
        raise BadInput(
            f"cannot read the config {path}: {e.strerror}; the ready ones are in configs/"
        ) from e
    except UnicodeDecodeError as e:
        raise BadInput(f"{path} is not UTF-8 (byte {e.start}: {e.reason}); save it as UTF-8") from e
    if "\0" in text:  # UTF-16 of English letters is UTF-8, too
        raise BadInput(f"{path} is not UTF-8 (it has null bytes, as UTF-16 has); save it as UTF-8")
    return text


def resolve(config: Config, on_cpu: bool, cores: int) -> Config:
    """Fill in what depends on the machine.

    Done once, when the run is created: the results decide the bits.
    """
    share = max(1, cores // 2)
    t = config.threads
    threads = Threads(
        trainer_intra=t.trainer_intra or (cores if on_cpu else 4),
        trainer_inter=t.trainer_inter or 2,
        producer_intra=t.producer_intra or (share if on_cpu else 4),
        producer_inter=t.producer_inter or 2,
    )
    hwm = config.transport.high_water_mark or max(8, 2 * config.producers.count)
    train, jit = config.train, config.jit
    if jit is None:
        jit = not on_cpu or train.precision == "fp8"
    precision = train.precision or ("fp32" if on_cpu else "bf16" if jit else "tf32")
    rate = train.attention_dropout
    if rate is None:
        rate = (
            0.0
            if precision in ("bf16", "fp8")
            else config.dims.gpt.dropout
            if train.dropout is None
            else train.dropout
        )
    return config.model_copy(
        update={
            "deterministic": on_cpu if config.deterministic is None else config.deterministic,
            "jit": jit,
            "threads": threads,
            "train": train.model_copy(update={"precision": precision, "attention_dropout": rate}),
            "transport": config.transport.model_copy(update={"high_water_mark": hwm}),
        }
    )


def as_text(config: Config) -> str:
    """The whole tree as YAML."""
    return yaml.safe_dump(config.model_dump(), sort_keys=False, allow_unicode=True)


def dump(config: Config, path: str | os.PathLike) -> None:
    """Write the whole tree as YAML, atomically and durably."""
    write_atomically(Path(path), as_text(config))
