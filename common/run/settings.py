"""One run's settings: a typed tree, strict about names, read from YAML and `a.b=c` overrides,
dumped into the run folder.

`load` reads and checks; `resolve` fills in what depends on the machine (threads, window,
determinism) exactly once, when a run is created; children read only the resolved `RUN/config.yaml`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from common.data.corpus_terms import Columns, FindingKind, Format
from common.run import beginning
from common.run.parity import PARITY, with_parity
from common.run.recognise import SPHINX
from common.run.settings_text import NoSection, explain, read_yaml, renamed, set_override
from common.run.stages import stages_of
from common.system.errors import BadInput
from common.xtts.dims import SIZES, ModelDims

Positive = Annotated[int, Field(ge=1)]


def _as_text(value: Any) -> Any:
    """`data_gpu: 0` and `run: 7` are texts in a file as on the command line."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Word = Annotated[str, BeforeValidator(_as_text)]


def _list_of(key: str) -> BeforeValidator:
    """`data.train: a` and `data.train: [a, {path: b, language: fa}]` both mean a list; a plain
    value is that of `key`.
    """

    def as_list(value: Any) -> Any:
        values = [] if value is None else value if isinstance(value, list) else [value]
        return [{key: v} if isinstance(v, (str, os.PathLike)) else v for v in values]

    return BeforeValidator(as_list)


# A file of the user's: the processes may start in another folder.
ClipPath = Annotated[str, AfterValidator(lambda path: str(Path(path).expanduser().absolute()))]


class Section(BaseModel):
    """A part of the tree: unknown keys are errors, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Source(Section):
    """One corpus: a folder (or its metadata file) in one of the formats of `producer/readers`."""

    path: str
    format: Format = "auto"
    language: str | None = None  # of rows that name none; null: data.language
    speaker: str | None = None  # of rows that name none; null: the folder's name
    columns: Columns = Field(default_factory=dict)  # as data.columns, of this source alone


Sources = Annotated[list[Source], _list_of("path")]


class Data(Section):
    """What is trained on and what is left out."""

    train: Sources = Field(default_factory=list)
    val: Sources = Field(default_factory=list)  # empty: a split of `train`, stored in the manifest
    language: str = "en"
    columns: Columns = Field(
        default_factory=dict
    )  # role: name or number (from 1) of its column, null: none; else they are found
    eval_fraction: float = Field(0.01, ge=0, lt=1)
    eval_max: Positive = 256
    min_audio_s: float = Field(0.5, gt=0)
    max_audio_s: float = Field(255995 / 22050, gt=0)
    max_text_tokens: Positive = 200
    reject: list[FindingKind] = Field(
        default_factory=list
    )  # findings of a scan that leave a row out, instead of a warning
    scan_threads: int = Field(0, ge=0)  # 0: one per CPU


class Extend(Section):
    """New languages for an existing vocabulary, learnt from their texts in the corpus."""

    languages: list[str] = Field(min_length=1)
    tokens: Positive = 1000  # at most so many new ids: language tags, characters, then merges


class Text(Section):
    """Vocabulary and normalisation."""

    vocab: str | None = (
        None  # a vocab.json; null: that of model.weights, else a BPE is trained on the corpus
    )
    extend: Extend | None = None
    vocab_size: Positive = 256
    strip_arabic_diacritics: bool = False
    # texts cleaned exactly as XTTS does, where ours reads more (numbers, symbols, quotes)
    coqui_cleaning: bool = False


def _known_size(size: str) -> str:
    if size not in SIZES:
        raise PydanticCustomError(
            "size",
            f"Input should be {', '.join(map(repr, list(SIZES)[:-1]))} or {list(SIZES)[-1]!r}",
        )
    return size


class Model(Section):
    """Which networks, and where their first weights come from."""

    size: Annotated[str, AfterValidator(_known_size)] = "xtts"
    layers: Positive | None = None  # fewer GPT layers than the size has
    parity_init: bool = False  # from nothing: token embeddings N(0, 1) instead of N(0, 0.02)
    # What stage 2 begins with: a folder made by import-coqui or export-coqui, or a run of this
    # project (RUN, RUN@best, RUN@1200), with its sizes, DVAE, statistics and vocabulary
    # (common/run/beginning.py).
    weights: str | None = None
    dvae: str | None = (
        None  # DVAE weights (.safetensors); null: those of model.weights, else stage 1 trains them
    )
    mel_stats: str | None = (
        # the statistics that belong to those weights; null: as with dvae, else measured on the
        # corpus
        None
    )
    other_dvae: bool = (
        False  # dvae or mel_stats are meant, though model.weights was trained with others
    )


class Batching(Section):
    """How utterances become batches of static shape."""

    buckets: Positive = 8
    batch_size: Positive = 8
    positions_per_batch: Positive | None = None  # a token budget instead of a fixed batch size
    sampling: Literal["epoch", "balanced"] = "epoch"
    prompt: Literal["own", "speaker"] = (
        "own"  # conditioning clips are cut from the utterance itself, or another one of its speaker
    )
    mask_prompt: bool | Literal["last_row"] = (
        True  # codes that the conditioning clip shows are not predicted; last_row: Coqui's way
    )
    text_stop_input: bool = (
        False  # STOP after the text is an input, as at synthesis; XTTS hides it in training
    )
    stop_labels: int = Field(
        4, ge=1, le=4
    )  # how often STOP is asked for after the last code; XTTS: 4
    padded_codes: bool = False  # codes of a clip as its batch pads it, instead of the clip's alone
    code_phases: int = Field(
        1,
        ge=1,
        le=4,
        # above 1: each epoch begins a clip 0 to code_phases - 1 mel frames (of 4) into its first
        # code
    )


class Optim(Section):
    """AdamW and its schedule."""

    learning_rate: float = Field(5e-6, gt=0)
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    decay_steps: Positive | None = None  # where the cosine ends; null: the run's last step
    weight_decay: float = Field(0.01, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.96, ge=0, lt=1)
    clip_norm: float = Field(0.0, ge=0)  # 0: none


class Train(Section):
    """Stage 2: the GPT."""

    epochs: Positive = 1000
    max_steps: Positive | None = None
    accumulate: Positive = 1
    mean_of_means: bool = False  # a step's batches count alike, instead of its utterances
    decay_latents: bool = False  # weight decay on the perceiver's latents and gain, too
    precision: Literal["fp32", "tf32", "bf16"] | None = (
        None  # of products; null: bf16 on GPUs (without jit tf32), fp32 on the CPU
    )
    dropout: float | None = Field(None, ge=0, lt=1)  # null: the model's (0.1)
    attention_dropout: float | None = Field(
        None, ge=0, lt=1
    )  # null: none with bf16, whose fused attention has none; else as dropout
    code_dropout: float = Field(
        0.0, ge=0, lt=1
    )  # share of the codes hidden from the GPT as inputs: against overfitting, for few hours
    # blocks computed again in the backward pass: larger batches on small cards, a third more work
    recompute: bool = False
    text_loss_weight: float = Field(0.01, ge=0)
    optim: Optim = Field(default_factory=Optim)
    eval_every: int = Field(1000, ge=0)  # steps; 0: not by steps
    eval_at_epoch_end: bool = True
    eval_batches: Positive | None = None
    save_every: Positive = 1000
    keep: Positive = 3
    log_every: Positive = 50
    # ends after so many evaluations (judged checkpoints, where best_by is no loss) without a better
    # one; null: never
    patience: Positive | None = None
    # what names the best checkpoint; cer and similarity are of those that are spoken
    # (samples.every)
    best_by: Literal["audio_ce", "cer", "similarity"] = "audio_ce"
    max_bad_steps: Positive = 10
    max_set_aside: float = Field(
        0.01, ge=0, le=1
    )  # share of the clips that may turn out bad while it trains, or ten; more end the run


class DvaeStage(Section):
    """Stage 1: the audio tokeniser, trained where no weights are given, or `tune` says so."""

    max_steps: Positive = 20000
    batch_size: Positive = 32
    crop_frames: Positive = 128
    # stage 1 goes on with the DVAE that is given (model.weights, model.dvae) instead of leaving it
    # as it is
    tune: bool = False
    optim: Optim = Field(
        default_factory=lambda: Optim(
            learning_rate=3e-4, warmup_steps=100, beta2=0.99, weight_decay=0.0, clip_norm=1.0
        )
    )
    eval_every: int = Field(1000, ge=0)
    eval_at_epoch_end: bool = False
    save_every: Positive = 1000


class Producers(Section):
    """Processes that turn files into batches."""

    count: int = Field(1, ge=0)
    decode_threads: int = Field(0, ge=0)  # per producer; 0: the cores there are, shared out
    leases: Positive = 3  # batches in work in one producer
    lease_ttl_s: float = Field(60.0, gt=0)
    # DVAE codes are kept in RUN/cache: from the second epoch on only the conditioning clips are
    # decoded
    cache_codes: bool = True


class Transport(Section):
    """The wire between producers and trainer."""

    high_water_mark: Positive | None = None  # batches in existence; null: max(8, 2 x producers)
    min_ready: int = Field(1, ge=0)  # batches waiting before step 1
    bind: str = "ipc"  # or tcp://address:port
    mel_dtype: Literal["float16", "float32"] = "float16"
    memory_budget_mb: Positive = 4096
    data_timeout_s: float = Field(120.0, gt=0)


class Threads(Section):
    """TensorFlow's CPU threads.

    They change the bits, so they are fixed when the run is created; 0: decided then.
    """

    trainer_intra: int = Field(0, ge=0)
    trainer_inter: int = Field(0, ge=0)
    producer_intra: int = Field(0, ge=0)
    producer_inter: int = Field(0, ge=0)


# A name, or a folder of the user's.
Recogniser = Annotated[
    str, AfterValidator(lambda n: n if n == SPHINX else str(Path(n).expanduser().absolute()))
]


class SampleText(Section):
    """A sentence of the user's own.

    `texts: [a, {text: b, language: fa, reference: clip.wav}]` may mix both forms.
    """

    text: str
    language: str | None = None  # null: data.language
    reference: ClipPath | None = (
        None  # a recording of the voice; null: the next of samples.references
    )


class Samples(Section):
    """What is made to be listened to while the GPT trains (trainer/previews/sampler.py) and at the
    run's end (trainer/finale.py).
    """

    every: int | None = Field(
        None, ge=0
    )  # steps, of the checkpoints there are; null: train.save_every; 0: at the end alone
    count: int = Field(4, ge=0)  # utterances of the evaluation set, each in its speaker's own voice
    judged: int = Field(32, ge=0)  # utterances whose loss is told by language and speaker
    # who listens to the samples: pocketsphinx (English), or a folder with a faster-whisper model;
    # null: nobody
    recogniser: Recogniser | None = None
    texts: Annotated[list[SampleText], _list_of("text")] = Field(
        default_factory=list
    )  # spoken besides
    references: list[ClipPath] = Field(
        default_factory=list
    )  # voices of the texts, in turn; none: utterances of the evaluation set
    device: Word | None = (
        # of the process that makes them, as data_gpu; null: the producers' GPU, the CPU where that
        # is the trainer's
        None
    )


class Config(Section):
    """A whole run."""

    parity: Literal["", "coqui"] = ""  # see common/run/parity.py
    run: Word = "runs/run"
    seed: int = Field(1, ge=0, lt=2**31)
    deterministic: bool | None = None  # null: true on the CPU
    devices: Literal["gpu", "auto"] = "gpu"  # auto: GPUs where there are, else the CPU
    data_gpu: Word | None = None  # "0", "0,2", a UUID, "cpu"; null: chosen
    model_gpu: Word | None = None
    jit: bool | None = None  # XLA; null: on GPUs
    gpu_memory_mb: int = Field(
        0, ge=0
    )  # a producer's cap; 0: none, or where it shares the trainer's card, a sixth of it together
    data: Data = Field(default_factory=Data)
    text: Text = Field(default_factory=Text)
    model: Model = Field(default_factory=Model)
    batching: Batching = Field(default_factory=Batching)
    train: Train = Field(default_factory=Train)
    dvae: DvaeStage = Field(default_factory=DvaeStage)
    producers: Producers = Field(default_factory=Producers)
    transport: Transport = Field(default_factory=Transport)
    threads: Threads = Field(default_factory=Threads)
    samples: Samples = Field(default_factory=Samples)

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
        where: what the values were read from, for the errors.
        by: keys that were set elsewhere, and by what (`--seed`, `command line`).

    Raises:
        BadInput: lists every fault with where it was made and the nearest known name.
    """
    by, tree = by or {}, renamed(tree, where)
    # `parity` and what contradicts it may be one in the file, the other not.
    elsewhere = any(
        f"{p}.".startswith(f"{key}.") for key in by for p in ("parity", *PARITY["coqui"])
    )
    tree = with_parity(tree, f"{where} and the command line" if elsewhere else where)
    try:
        return _with_absolute_weights(Config.model_validate(tree))
    except ValidationError as e:
        raise BadInput(explain(e, Config, where, by)) from e


def load(path: str | os.PathLike, overrides: list[str] = ()) -> Config:
    """Read a YAML file and apply overrides.

    Raises:
        BadInput: no such file, not UTF-8, not YAML, a key given twice, an unknown key or a wrong
        value; a fault of an override is
            laid to its flag or to the command line.
    """
    try:
        tree = read_yaml(_text(path), str(path)) or {}
    except (yaml.YAMLError, ValueError) as e:
        raise BadInput(f"{path} is not YAML: {e}") from e
    if not isinstance(tree, dict):
        raise BadInput(f"{path}: expected keys and values at the top level")
    by: dict[str, str] = {}
    for o in overrides:
        try:
            own = set_override(tree, o)
        except NoSection:
            parse(
                tree, str(path), by
            )  # where the file has a value in the place of a section, that is the fault
            raise
        by[own] = getattr(o, "flag", "") or "command line"
    return parse(tree, str(path), by)


def _text(path: str | os.PathLike) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
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
    train, jit = config.train, (not on_cpu) if config.jit is None else config.jit
    precision = train.precision or ("fp32" if on_cpu else "bf16" if jit else "tf32")
    rate = train.attention_dropout
    if rate is None:
        rate = (
            0.0
            if precision == "bf16"
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


def dump(config: Config, path: str | os.PathLike) -> None:
    """Write the whole tree as YAML, atomically."""
    path = Path(path)
    tmp = path.with_name(path.name + ".tmp")
    tmp.write_text(
        yaml.safe_dump(config.model_dump(), sort_keys=False, allow_unicode=True), encoding="utf-8"
    )
    os.replace(tmp, path)
