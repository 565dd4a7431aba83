"""The sections of a run's settings: their keys, the values allowed, and what they mean."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from common.audio.treatment import Treatment
from common.data.corpus_terms import Columns, FindingKind, Format
from common.run.recognise import SPHINX
from common.run.setting_types import ClipPath, Positive, Word, known_size, list_of


class Section(BaseModel):
    """A part of the tree: unknown keys are errors, values are immutable.

    The text under a field documents it: `launch.py config KEY` and docs/settings.md show it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Source(Section):
    """One corpus: a folder (or its metadata file) in one of the formats of `producer/readers`."""

    path: str
    """The folder of the corpus, or its metadata file."""
    format: Format = "auto"
    """How the corpus is laid out; auto: detected."""
    language: str | None = None
    """The language of rows that name none. null: data.language."""
    speaker: str | None = None
    """The speaker of rows that name none. null: the folder's name."""
    columns: Columns = Field(default_factory=dict)
    """As data.columns, for this source only."""
    share: float | None = Field(None, gt=0, lt=1)
    """Share of the trained rows that come from it, with batching.sampling=balanced. null: what the
    sources with a share leave."""


Sources = Annotated[list[Source], list_of("path")]


class Data(Section):
    """What to train on, and what to leave out."""

    train: Sources = Field(default_factory=list)
    """The corpora to train on: a folder, or a list of folders and sources."""
    val: Sources = Field(default_factory=list)
    """Corpora for evaluation. Empty: part of data.train is held out."""
    language: str = "en"
    """The language of rows that name none, as a code: fa, en, de."""
    columns: Columns = Field(default_factory=dict)
    """Role (audio, text, speaker, language) to the name or number (from 1) of its column; null:
    there is none. Empty: the columns are detected."""
    eval_fraction: float = Field(0.01, ge=0, lt=1)
    """Share of data.train that is held out where data.val is empty."""
    eval_max: Positive = 256
    """Most utterances that are held out."""
    min_audio_s: float = Field(0.5, gt=0)
    """Leave out recordings shorter than this, in seconds."""
    max_audio_s: float = Field(255995 / 22050, gt=0)
    """Leave out recordings longer than this, in seconds. The default is XTTS's limit."""
    max_text_tokens: Positive = 200
    """Leave out texts longer than this, in tokens."""
    reject: list[FindingKind] = Field(default_factory=list)
    """Findings of a scan that leave a row out, instead of a warning."""
    trim_s: float | None = Field(None, ge=0.05, le=5)
    """Cut silence at both ends of recordings down to so many seconds. null: leave it."""
    level_db: float | None = Field(None, ge=-50, le=-6)
    """Make recordings equally loud where they are not silent, in dBFS. null: leave them."""
    scan_threads: int = Field(0, ge=0)
    """Threads that read the corpus before the run. 0: one per CPU."""

    @property
    def treatment(self) -> Treatment:
        """What is done to every recording before it is used."""
        return Treatment(self.trim_s, self.level_db)


class Extend(Section):
    """New languages for an existing vocabulary, learnt from their texts in the corpus."""

    languages: list[str] = Field(min_length=1)
    """Codes of the languages to add."""
    tokens: Positive = 1000
    """Most new ids: language tags, characters, then merges."""


class Text(Section):
    """Vocabulary and normalisation."""

    vocab: str | None = None
    """A vocab.json. null: the one of model.weights, else one learnt from the corpus (BPE)."""
    extend: Extend | None = None
    """New languages for the given vocabulary. null: none."""
    vocab_size: Positive = 256
    """Size of a vocabulary that is learnt from the corpus."""
    strip_arabic_diacritics: bool = False
    """Remove vowel signs from Arabic and Persian texts."""
    coqui_cleaning: bool = False
    """Clean texts exactly as XTTS does, even where we read more (numbers, symbols, quotes)."""


class Model(Section):
    """Which networks, and where their initial weights come from."""

    size: Annotated[str, AfterValidator(known_size)] = "xtts"
    """tiny (2 M parameters, for a CPU), small (40 M) or xtts (the published size)."""
    layers: Positive | None = None
    """Fewer GPT layers than the size has. null: all."""
    parity_init: bool = False
    """From nothing, draw token embeddings from N(0, 1) as Coqui does, instead of N(0, 0.02)."""
    weights: str | None = None
    """What stage 2 starts from: a folder made by import-coqui or export-coqui, or a run (RUN,
    RUN@best, RUN@1200), with its sizes, DVAE, statistics and vocabulary. null: nothing."""
    dvae: str | None = None
    """DVAE weights (.safetensors). null: the ones of model.weights, else stage 1 trains them."""
    mel_stats: str | None = None
    """The mel statistics that belong to model.dvae. null: as with model.dvae, else measured on the
    corpus."""
    other_dvae: bool = False
    """Use model.dvae or model.mel_stats although model.weights was trained with others."""


class Batching(Section):
    """How utterances become batches of static shape."""

    buckets: Positive = 8
    """Static shapes: more mean less padding and more programs to compile."""
    batch_size: Positive = 8
    """Utterances per batch."""
    positions_per_batch: Positive | None = None
    """A budget of positions instead of a fixed batch size. null: batching.batch_size holds."""
    sampling: Literal["epoch", "balanced"] = "epoch"
    """epoch: every utterance once per epoch. balanced: every language equally often, or as weights
    and the shares of data.train say."""
    weights: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Language to its weight with sampling=balanced; languages not named have weight 1."""
    prompt: Literal["own", "speaker"] = "own"
    """Cut conditioning clips from the utterance itself, or from another of the same speaker."""
    mask_prompt: bool | Literal["last_row"] = True
    """Do not predict codes that the conditioning clip shows. last_row: Coqui's way."""
    text_stop_input: bool = False
    """STOP after the text is an input, as at synthesis. XTTS hides it in training."""
    stop_labels: int = Field(4, ge=1, le=4)
    """How often STOP is a target after the last code. XTTS: 4."""
    padded_codes: bool = False
    """Compute a clip's codes as padded in its batch, instead of from the clip alone."""
    code_phases: int = Field(1, ge=1, le=4)
    """Above 1, each epoch begins a clip 0 to code_phases - 1 mel frames (of 4) into its first
    code: against overfitting."""


class Augment(Section):
    """Changes to recordings during training. Off if the share is 0; never in an evaluation."""

    share: float = Field(0.0, ge=0, le=1)
    """Share of a batch's clips to change. 0: none."""
    of: Literal["prompt", "clip"] = "prompt"
    """prompt: the conditioning clip alone; what is predicted stays clean, and its codes are kept.
    clip: the clip and its conditioning clip alike, in stage 1 too; such codes are computed each
    time."""
    gain_db: float = Field(6.0, ge=0, le=30)
    """Make clips louder or softer by at most so much. 0: never."""
    band_hz: float | None = Field(3400.0, ge=1000, le=10000)
    """Cut everything above a frequency between this and 10 kHz. null: never."""
    noise_db: float | None = Field(15.0, ge=0, le=60)
    """Add noise, white to brown, this many dB softer than the clip or up to 25 dB more. null:
    never."""
    room_s: float | None = Field(0.4, gt=0.1, le=2)
    """Add the echoes of a room that decay by 60 dB within 0.1 s to this. null: never."""


class Optim(Section):
    """AdamW and its schedule."""

    learning_rate: float = Field(5e-6, gt=0)
    """The rate after the warm-up."""
    schedule: Literal["constant", "cosine"] = "constant"
    """How the rate changes after the warm-up."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the rate rises from 0."""
    decay_steps: Positive | None = None
    """Where the cosine ends. null: at the run's last step."""
    weight_decay: float = Field(0.01, ge=0)
    """Decay of matrices per step, times the rate."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the gradient's running mean."""
    beta2: float = Field(0.96, ge=0, lt=1)
    """Decay of the squared gradient's running mean."""
    clip_norm: float = Field(0.0, ge=0)
    """Largest gradient norm. 0: no limit."""


class Train(Section):
    """Stage 2: the GPT."""

    epochs: Positive = 1000
    """Most passes over the corpus."""
    max_steps: Positive | None = None
    """Most steps. null: train.epochs alone decides."""
    accumulate: Positive = 1
    """Batches whose gradients make one step."""
    mean_of_means: bool = False
    """Weigh a step's batches equally, instead of its utterances."""
    decay_latents: bool = False
    """Apply weight decay to the perceiver's latents and gain too."""
    precision: Literal["fp32", "tf32", "bf16", "fp8"] | None = None
    """Precision of products. null: bf16 on GPUs (without jit tf32), fp32 on the CPU. fp8: as bf16,
    but the blocks' products have 8 bits: from compute capability 8.9 on, with jit."""
    dropout: float | None = Field(None, ge=0, lt=1)
    """null: the model's (0.1)."""
    attention_dropout: float | None = Field(None, ge=0, lt=1)
    """null: none with bf16 and fp8, whose fused attention has none; else as train.dropout."""
    code_dropout: float = Field(0.0, ge=0, lt=1)
    """Share of the codes hidden from the GPT as inputs: against overfitting, for few hours."""
    recompute: bool = False
    """Recompute blocks in the backward pass: larger batches on small cards, a third more
    work."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which several trainers send each other their gradients. bfloat16: half the bytes,
    with 8 bits of precision."""
    text_loss_weight: float = Field(0.01, ge=0)
    """Weight of the text's cross-entropy in the loss; the audio's is 1."""
    optim: Optim = Field(default_factory=Optim)
    """The optimizer of stage 2."""
    eval_every: int = Field(1000, ge=0)
    """Steps between evaluations. 0: not by steps."""
    eval_at_epoch_end: bool = True
    """Evaluate at the end of every epoch, too."""
    eval_batches: Positive | None = None
    """Most batches per evaluation. null: all."""
    save_every: Positive = 1000
    """Steps between checkpoints."""
    keep: Positive = 3
    """How many of the newest checkpoints to keep; the best one is kept too."""
    patience: Positive | None = None
    """End the run after so many evaluations (of checkpoints' samples, where best_by is not a loss)
    without a better one. null: never."""
    best_by: Literal["audio_ce", "cer", "similarity"] = "audio_ce"
    """What decides the best checkpoint; cer and similarity only judge checkpoints with samples
    (samples.every)."""
    save_grace_s: float = Field(600.0, ge=10)
    """Longest wait for a save at a stop, in seconds; less if saves have taken less so far."""
    log_every: Positive = 50
    """Steps between lines in the trainer's log."""
    max_bad_steps: Positive = 10
    """End the run after so many steps in a row without finite gradients."""
    max_set_aside: float = Field(0.01, ge=0, le=1)
    """Share of the clips that may turn out bad during training, or ten clips; more end the run."""


class DvaeStage(Section):
    """Stage 1: the audio tokeniser, trained if no weights are given, or if `tune` says so."""

    max_steps: Positive = 20000
    """Steps of stage 1."""
    batch_size: Positive = 32
    """Crops per batch."""
    crop_frames: Positive = 128
    """Mel frames of a crop (11.6 ms each)."""
    tune: bool = False
    """Train the given DVAE (model.weights, model.dvae) further, instead of leaving it as it is."""
    optim: Optim = Field(
        default_factory=lambda: Optim(
            learning_rate=3e-4, warmup_steps=100, beta2=0.99, weight_decay=0.0, clip_norm=1.0
        )
    )
    """The optimizer of stage 1."""
    eval_every: int = Field(1000, ge=0)
    """Steps between evaluations. 0: not by steps."""
    eval_at_epoch_end: bool = False
    """Evaluate at the end of every epoch, too."""
    save_every: Positive = 1000
    """Steps between checkpoints."""


class Trainers(Section):
    """Processes that train stage 2 together, each on a device of its own (docs/trainers.md)."""

    count: Positive = 1
    """How many trainers; they share each step's batches, so this must divide
    train.accumulate."""
    timeout_s: float = Field(25.0, ge=5)
    """Seconds that one may be silent, or late for a step; then all start again."""
    compiling_s: float = Field(1800.0, ge=60)
    """Seconds that one may compile the same program, or get ready, without getting on."""
    bind: str | None = None
    """Where the first trainer listens for those of other hosts: tcp://HOST:PORT, where HOST is its
    host's name or number there. Then each further one is started by `launch.py trainer --rank N`.
    null: all are on this host."""
    join_s: float = Field(600.0, ge=5)
    """With trainers.bind: seconds that the first trainer and the others look for each other."""

    @property
    def here(self) -> int:
        """How many of them one launcher starts."""
        return self.count if self.bind is None else 1


class Producers(Section):
    """Processes that turn files into batches."""

    count: int = Field(1, ge=0)
    """How many producers."""
    decode_threads: int = Field(0, ge=0)
    """Decode threads per producer. 0: share out the cores."""
    leases: Positive = 3
    """Batches in progress in one producer."""
    lease_ttl_s: float = Field(60.0, gt=0)
    """Seconds after which a batch that has not arrived goes to another producer."""
    cache_codes: bool = True
    """Keep DVAE codes in RUN/cache: from the second epoch on, only conditioning clips are
    decoded."""


class Transport(Section):
    """The wire between producers and trainer."""

    high_water_mark: Positive | None = None
    """Most batches that exist between producers and step. null: max(8, 2 x producers)."""
    min_ready: int = Field(1, ge=0)
    """Batches that must be waiting before step 1."""
    bind: str = "ipc"
    """Where the trainer listens: ipc or ipc:///path for this machine, tcp://address:port for
    others too."""
    mel_dtype: Literal["float16", "float32"] = "float16"
    """Type of mels on the wire."""
    memory_budget_mb: Positive = 4096
    """Most memory for the window of batches; a window that could take more is refused."""
    data_timeout_s: float = Field(120.0, gt=0)
    """Seconds without a batch after which the trainer gives up."""


class Threads(Section):
    """TensorFlow's CPU threads.

    They change the bits, so they are fixed when the run is created; 0: decided then.
    """

    trainer_intra: int = Field(0, ge=0)
    """Threads within an operation of the trainer. 0: decided when the run is created."""
    trainer_inter: int = Field(0, ge=0)
    """Operations of the trainer side by side. 0: decided when the run is created."""
    producer_intra: int = Field(0, ge=0)
    """Threads within an operation of a producer. 0: decided when the run is created."""
    producer_inter: int = Field(0, ge=0)
    """Operations of a producer side by side. 0: decided when the run is created."""


# A name, or the user's folder.
Recogniser = Annotated[
    str, AfterValidator(lambda n: n if n == SPHINX else str(Path(n).expanduser().absolute()))
]


class SampleText(Section):
    """The user's own sentence.

    `texts: [a, {text: b, language: fa, reference: clip.wav}]` may mix both forms.
    """

    text: str
    """The text to speak."""
    language: str | None = None
    """Its language. null: data.language."""
    reference: ClipPath | None = None
    """A recording of the voice. null: the next of samples.references."""


class Samples(Section):
    """What to make for listening while the GPT trains (trainer/previews/sampler.py) and at the
    run's end (trainer/finale.py).
    """

    every: int | None = Field(None, ge=0)
    """Steps between samples, made from checkpoints. null: train.save_every. 0: only at the end."""
    count: int = Field(4, ge=0)
    """Utterances of the evaluation set to speak, each in its speaker's own voice."""
    judged: int = Field(32, ge=0)
    """Utterances whose loss to report by language and speaker."""
    recogniser: Recogniser | None = None
    """Who listens to the samples: pocketsphinx (English), or a folder with a faster-whisper model.
    null: nobody."""
    texts: Annotated[list[SampleText], list_of("text")] = Field(default_factory=list)
    """Sentences of your own to speak as well."""
    references: list[ClipPath] = Field(default_factory=list)
    """Voices of samples.texts, in turn. Empty: utterances of the evaluation set."""
    device: Word | None = None
    """The GPU of the process that makes them, as data_gpu. null: the producers' GPU, or the CPU if
    that is the trainer's."""
