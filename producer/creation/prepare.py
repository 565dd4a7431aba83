"""Creating a run folder, or finding that the one there is the same run.

Order of birth: read the metadata → vocabulary → scan → mel statistics → plans → identity. Everything is made aside and moved in at
the end, so a folder either is a run or is not. No TensorFlow, no GPU: whatever is wrong with the input is found here.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from common.data import stateless_random
from common.data.batch import num_bytes
from common.data.buckets import Bucket, make_buckets, padded_share, row_lengths
from common.data.manifest import EVAL, TRAIN, Manifest
from common.data.plan import Plan, write_plan
from common.run import settings as config_module
from common.run.folder import STAGES, RunFolder
from common.run.parity import PARITY
from common.run.settings import Config, Threads
from common.system.errors import BadInput
from common.system.files import digest, file_digest, write_atomically
from common.xtts import filterbank
from common.xtts.checkpoints import pretrained
from common.xtts.dims import ModelDims
from common.xtts.text.clean import UnknownLanguage, normalize_language
from common.xtts.text.tokenizer import Tokenizer, VocabularyError
from producer.batches.decode import DecodeError, decode
from producer.batches.rows import hidden_share, layout_of, most_codes
from producer.corpus.report import write_rejects
from producer.corpus.rows import CorpusRows, read_rows
from producer.corpus.scan import ScanResult, scan
from producer.creation.resume import compare, names, newest, without_effect
from producer.creation.sample_texts import check_samples

log = logging.getLogger(__name__)

# Enough clips for the mean of 80 channels to settle, few enough to take seconds.
_MEL_STATS_CLIPS = 64


def prepare_run(config: Config, *, on_cpu: bool, cores: int, out: Callable[[str], None] = log.info) -> RunFolder:
    """Create `config.run`, or resume it.

    Args:
        on_cpu: no process of the run uses a GPU (decides determinism and compile mode).
        cores: CPU cores this machine lends the run (decides TensorFlow's threads, once).
        out: receives lines for the user.

    Raises:
        BadInput: nothing usable in the corpus, a setting that cannot work, or the folder holds another run (says what differs).
    """
    _check(config)
    folder = config.run_dir
    if config.parity:
        out(f"parity {config.parity}: " + ", ".join(f"{k}={v}" for k, v in PARITY[config.parity].items()))
    existing = RunFolder(folder) if (folder / "identity.json").is_file() else None
    if existing is None and folder.exists() and (folder / "checkpoints").exists():
        raise BadInput(f"{folder} has checkpoints but no identity.json: it is not a whole run; choose another run= folder")
    if existing is not None:
        config = _keep_arithmetic(config, existing.config)
    config = config_module.resolve(config, on_cpu, cores)
    if existing is not None:
        config = _keep_machine_settings(config, existing.config)
    aside = folder / ".new"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
    except OSError as e:
        raise BadInput(f"cannot write to the run folder {folder}: {e.strerror}; choose another run= folder") from e
    try:
        identity = _make(config, aside, existing, out)
        if existing is None:
            _move_in(config, aside, folder, identity)
            out(f"created {folder}")
        else:
            for setting in without_effect(existing, config):
                out(f"warning: no effect on this run: {setting}")
            lost = compare(identity, existing, config, aside / "manifest.sqlite")
            if lost:
                out(
                    f"warning: {len(lost)} of the run's {len(existing.manifest)} clips are gone or unusable ({names(lost)}); the run goes "
                    "on as it was planned, and sets them aside when their turn comes. To train on them, restore the files and start again"
                )
            for name in ("rejects.tsv",) if lost else ("manifest.sqlite", "rejects.tsv"):  # of the same corpus, wherever it lies now
                os.replace(aside / name, folder / name)
            config_module.dump(config, folder / "config.yaml")
            out(f"resuming {folder} at {newest(existing)} (same corpus, plan, features and sizes)")
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    if existing is not None:
        existing.manifest.close()
    return RunFolder(folder)


def _check(config: Config) -> None:
    if config.dvae.crop_frames % 4:
        raise BadInput(f"dvae.crop_frames={config.dvae.crop_frames}: the DVAE halves the time axis twice, so it must be a multiple of 4")
    if config.model.weights is not None:
        _check_weights(config)
    if config.model.dvae and not config.model.mel_stats:
        raise BadInput("model.dvae needs model.mel_stats: codes mean nothing without the statistics the DVAE was trained with")
    for key in ("dvae", "mel_stats"):
        path = getattr(config.model, key)
        if path and not Path(path).is_file():
            raise BadInput(f"model.{key}: there is no file {path}")
    if config.text.vocab and not Path(config.text.vocab).is_file():
        raise BadInput(f"text.vocab: there is no file {config.text.vocab}")


def _check_weights(config: Config) -> None:
    """What a run that starts from imported weights needs of their folder."""
    m = config.model
    if m.size != "xtts" or m.layers is not None:
        raise BadInput("model.weights brings its own sizes: leave model.size and model.layers out")
    _ = config.dims
    for what, path, flag in (("DVAE", m.dvae, "--dvae dvae.pth"), ("vocabulary", config.text.vocab, "--vocab vocab.json")):
        if Path(path).parent == Path(m.weights) and not Path(path).is_file():
            raise BadInput(
                f"{m.weights} was imported without its {what}, and training needs the one that the model was trained with: "
                f"`launch.py import-coqui` again with {flag}"
            )


def _keep_arithmetic(config: Config, old: Config) -> Config:
    """The precision that was chosen when the run was created stays, unless another is asked for."""
    kept = {k: getattr(old.train, k) for k in ("precision", "attention_dropout") if getattr(config.train, k) is None}
    return config.model_copy(update={"train": config.train.model_copy(update=kept)})


def _keep_machine_settings(config: Config, old: Config) -> Config:
    """Threads, determinism and compile mode decide the bits: they stay what they were when the run was created."""
    for name in ("deterministic", "jit"):
        if getattr(config, name) != getattr(old, name):
            log.warning("%s stays %s as the run was created (this start would have %s)", name, getattr(old, name), getattr(config, name))
    if config.threads != old.threads:
        log.warning("threads stay as the run was created: %s", old.threads.model_dump())
    return config.model_copy(update={"deterministic": old.deterministic, "jit": old.jit, "threads": Threads(**old.threads.model_dump())})


# -- making ------------------------------------------------------------------------------------------------------------------------


def _make(config: Config, aside: Path, existing: RunFolder | None, out: Callable[[str], None]) -> dict:
    """Fill `aside` with everything a run consists of; returns its identity."""
    rows = read_rows(config)
    tokenizer = make_vocabulary(config, rows, existing, out)
    if config.model.weights is not None:
        out(_check_rows(config, tokenizer))
    check_samples(config, tokenizer, config.dims.gpt.max_text_tokens - 1)
    tokenizer.save(aside / "vocab.json")
    result: ScanResult = scan(
        config, aside / "manifest.sqlite", tokenizer, rows=rows, previous=existing.manifest if existing is not None else None
    )
    manifest = Manifest.open(aside / "manifest.sqlite", check=False)
    dims = config.dims.with_vocabulary(tokenizer.vocab_size, tokenizer.start, tokenizer.stop)
    stats = _mel_stats(config, manifest, existing, dims)
    save_file({"mel_stats": stats}, aside / "mel_stats.safetensors")
    if config.model.dvae:
        (aside / "dvae").mkdir()
        shutil.copyfile(config.model.dvae, aside / "dvae" / "model.safetensors")
    plans = {stage: _plans(config, aside / "plan" / stage, stage, manifest, dims) for stage in STAGES}
    _check_memory(config, aside, dims)
    for line in _plan_lines(config, aside, manifest, dims):
        out(line)
    manifest.close()
    write_rejects(result.report.rejects, aside / "rejects.tsv")
    for line in result.report.lines():
        out(line)
    return {
        "format": 1,
        "run_id": existing.run_id if existing is not None else os.urandom(16).hex(),
        "seed": config.seed,
        "manifest": manifest.digest,
        "plan": plans,
        "accumulate": config.train.accumulate,
        "dims": dims.to_dict(),
        "vocabulary": tokenizer.digest,
        "mel_stats": digest(stats.tolist()),
        "mel_dtype": config.transport.mel_dtype,
        "prompt": config.batching.prompt,
        "mask_prompt": config.batching.mask_prompt,
        "layout": dataclasses.asdict(layout_of(config)),
        "padded_codes": config.batching.padded_codes,
        "code_phases": config.batching.code_phases,
        "kind": "arithmetic" if config.model.size == "arithmetic" else "xtts",
        "weights": pretrained.file_digests(config.model.weights)["model"] if config.model.weights else None,
        "extend": config.text.extend.model_dump() if config.text.extend else None,
        "trains_dvae": config.model.dvae is None,
        "dvae": file_digest(config.model.dvae) if config.model.dvae else None,
    }


def make_vocabulary(config: Config, rows: CorpusRows, existing: RunFolder | None, out: Callable[[str], None]) -> Tokenizer:
    """The run's vocabulary: the given file, the existing run's, or a BPE learnt from the corpus. BadInput: it cannot be had."""
    options = {"keep_diacritics": not config.text.strip_arabic_diacritics, "parity": config.text.coqui_cleaning}
    try:
        if existing is not None and (config.text.extend or not config.text.vocab):
            return Tokenizer.load(existing.path / "vocab.json", **options)
        if config.text.vocab:
            return _extended(Tokenizer.load(config.text.vocab, **options), config, rows, out)
        if config.text.extend:
            raise BadInput("text.extend needs a vocabulary to extend: set text.vocab, or model.weights")
        tokenizer = Tokenizer.train(rows.pairs(), config.text.vocab_size, rows.languages, **options)
    except VocabularyError as e:
        raise BadInput(str(e)) from e
    out(f"vocabulary: {tokenizer.vocab_size} tokens learnt from the corpus, languages {', '.join(tokenizer.languages)}")
    return tokenizer


def _extended(tokenizer: Tokenizer, config: Config, rows: CorpusRows, out: Callable[[str], None]) -> Tokenizer:
    """The vocabulary with `text.extend`'s languages, learnt from their texts. VocabularyError as of `Tokenizer.extend`."""
    extend = config.text.extend
    if extend is None:
        return tokenizer
    try:
        languages = [normalize_language(language) for language in extend.languages]
    except UnknownLanguage as e:
        raise BadInput(f"text.extend.languages: {e}") from e
    absent = [language for language in languages if language not in rows.languages]
    if absent:
        raise BadInput(f"text.extend.languages: the corpus has no texts in {', '.join(absent)}; it has {', '.join(rows.languages)}")
    pairs = (pair for pair in rows.pairs() if pair[1] in languages)
    longer = tokenizer.extend(pairs, languages, extend.tokens)
    out(f"vocabulary: {tokenizer.vocab_size} ids kept, {longer.vocab_size - tokenizer.vocab_size} new for {', '.join(languages)}")
    return longer


def _check_rows(config: Config, tokenizer: Tokenizer) -> str:
    """A line on how the vocabulary and the imported model's rows go together. BadInput where they do not: an old id means another token."""
    rows, folder = config.dims.gpt.num_text_tokens, Path(config.model.weights)
    if tokenizer.vocab_size < rows:
        raise BadInput(
            f"the vocabulary has {tokenizer.vocab_size} ids, the model in {folder} has {rows}: name the vocabulary it was trained with, or "
            "one that extends it, in text.vocab"
        )
    if (folder / "vocab.json").is_file():
        own = Tokenizer.load(folder / "vocab.json")
        moved = [i for i in range(rows) if own.token(i) != tokenizer.token(i)]
        if moved:
            named = ", ".join(f"{i} {own.token(i)!r} → {tokenizer.token(i)!r}" for i in moved[:20])
            raise BadInput(f"text.vocab gives {len(moved)} of the model's {rows} ids another meaning ({named}): only new ids may be added")
    return f"text rows of the model: {rows} kept, {tokenizer.vocab_size - rows} new"


def _mel_stats(config: Config, manifest: Manifest, existing: RunFolder | None, dims: ModelDims) -> np.ndarray:
    """float32[80]: the given statistics, or the mean |log-mel| per channel over a fixed sample of the training clips."""
    if config.model.mel_stats:
        try:
            arrays = load_file(config.model.mel_stats)
        except (SafetensorError, OSError) as e:
            raise BadInput(f"model.mel_stats={config.model.mel_stats} is not a safetensors file: {e}") from e
        stats = arrays.get("mel_stats")
        if stats is None or stats.shape != (dims.audio.num_mels,):
            raise BadInput(
                f"{config.model.mel_stats}: expected one tensor 'mel_stats' of {dims.audio.num_mels} values, has {sorted(arrays)}"
            )
        return stats.astype(np.float32)
    if config.model.size == "arithmetic":
        return np.ones(dims.audio.num_mels, np.float32)
    if existing is not None and existing.manifest.digest == manifest.digest:
        return existing.mel_stats
    ids = np.flatnonzero(manifest.columns()["split"] == TRAIN)
    chosen = ids[np.argsort(stateless_random.draws(stateless_random.key(0, len(ids)), np.arange(len(ids))))[:_MEL_STATS_CLIPS]]
    return filterbank.mel_stats(_decodable(manifest, np.sort(chosen)))


def _decodable(manifest: Manifest, ids: np.ndarray):
    for u in manifest.utterances(ids):
        try:
            yield decode(u.path)
        except DecodeError as e:
            log.warning("not used for the mel statistics: %s", e)


def _plans(config: Config, folder: Path, stage: str, manifest: Manifest, dims: ModelDims) -> dict[str, str]:
    """Write both plans of a stage; returns their digests."""
    columns = manifest.columns()
    n = len(columns["split"])
    if stage == "dvae":
        buckets = [Bucket(config.dvae.batch_size, config.dvae.crop_frames, 0, config.dvae.crop_frames // 4)]
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
    seed = int(stateless_random.key(config.seed, STAGES.index(stage)) >> np.uint64(1))
    digests = {}
    for name, split, sampling in (("train", TRAIN, config.batching.sampling), ("eval", EVAL, "fixed")):
        ids, pool = np.flatnonzero(columns["split"] == split), None
        if stage == "gpt" and config.batching.prompt == "speaker":
            # Training never hears the evaluation set. An evaluation may take its voices from both: nothing is learnt from it.
            lenders = ids if name == "train" else np.arange(n)
            pool = lenders, columns["speaker"][lenders]
        digests[name] = write_plan(
            folder,
            name,
            seed=seed,
            sampling=sampling,
            buckets=buckets,
            ids=ids,
            bucket_of=of[ids],
            language=columns["language"][ids],
            speaker=columns["speaker"][ids],
            pool=pool,
        )
    return digests


def _check_memory(config: Config, aside: Path, dims: ModelDims) -> None:
    """BadInput where the window times the largest batch is more than the budget."""
    kinds = [("arithmetic", "gpt")] if config.model.size == "arithmetic" else [(s, s) for s in STAGES]
    sizes = [num_bytes(k, b, dims, config.transport.mel_dtype) for k, s in kinds for b in Plan.open(aside / "plan" / s, "train").buckets]
    window = config.transport.high_water_mark
    if window * max(sizes) > config.transport.memory_budget_mb * 1e6:
        fits = int(config.transport.memory_budget_mb * 1e6 // max(sizes))
        raise BadInput(
            f"transport.high_water_mark={window} x the largest batch ({max(sizes) / 1e6:.1f} MB) is "
            f"{window * max(sizes) / 1e6:.0f} MB, over transport.memory_budget_mb={config.transport.memory_budget_mb}; "
            f"{fits} batches would fit"
        )


def _plan_lines(config: Config, aside: Path, manifest: Manifest, dims: ModelDims) -> list[str]:
    plan = Plan.open(aside / "plan" / "gpt", "train")
    evaluation = Plan.open(aside / "plan" / "gpt", "eval").num_utterances
    shapes = ", ".join(f"{b.batch_size}x{b.row_len + dims.gpt.num_latents}" for b in plan.buckets)
    columns, ids = manifest.columns(), np.asarray(plan.order)
    lengths = row_lengths(columns["num_tokens"], _num_codes(config, columns, dims), layout_of(config))[columns["split"] == TRAIN]
    padding = padded_share(lengths, [b.row_len for b in plan.buckets])
    lines = [
        f"plan: {plan.num_utterances} training and {evaluation} evaluation utterances, {plan.batches_per_epoch} batches/epoch; "
        f"rows x positions {shapes}, {100 * padding:.1f} % of them padding"
    ]
    if config.batching.prompt == "speaker":
        alone = int((np.bincount(columns["speaker"][ids]) == 1).sum())
        lines.append(f"conditioning clips: of another utterance of the speaker; {alone} utterances are their speaker's only one")
    elif config.batching.mask_prompt is True and len(ids):
        share = hidden_share(columns["num_samples"][ids], dims.audio)
        lines.append(f"conditioning clips: of the utterance itself, so that {share:.0%} of the codes are no targets (see batching.prompt)")
    return lines


def _num_codes(config: Config, columns: dict[str, np.ndarray], dims: ModelDims) -> np.ndarray:
    return most_codes(columns["num_samples"], config.batching.code_phases, dims.audio)


# -- same run? ---------------------------------------------------------------------------------------------------------------------


def _move_in(config: Config, aside: Path, folder: Path, identity: dict) -> None:
    for name in ("manifest.sqlite", "vocab.json", "mel_stats.safetensors", "rejects.tsv", "plan", "dvae"):
        if (aside / name).exists():
            target = folder / name
            if target.is_dir():
                shutil.rmtree(target)
            os.replace(aside / name, target)
    config_module.dump(config, folder / "config.yaml")
    write_atomically(folder / "identity.json", json.dumps(identity, indent=1))
