"""Creating a run folder, or finding that the one there is the same run.

Order of birth: read the metadata → vocabulary → scan → mel statistics → plans → identity.
Everything is made aside and moved in at the end, so a folder either is a run or is not. No
TensorFlow, no GPU: whatever is wrong with the input is found here.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from common.audio.errors import DecodeError
from common.data import stateless_random
from common.data.batch import num_bytes
from common.data.buckets import Bucket, make_buckets, padded_share, row_lengths
from common.data.manifest import EVAL, TRAIN, Manifest
from common.data.plan import Plan, PlanRows, write_plan
from common.run import beginning
from common.run import settings as config_module
from common.run.beginning import Beginning
from common.run.folder import RunFolder
from common.run.parity import PARITY
from common.run.settings import Config, Threads
from common.run.stages import STAGES, StageSpec, family_of, stages_of
from common.system.errors import BadInput
from common.system.files import digest, file_digest, write_atomically
from common.xtts import filterbank
from common.xtts.checkpoints import pretrained
from common.xtts.dims import ModelDims
from common.xtts.text.clean import UnknownLanguage, normalize_language
from common.xtts.text.tokenizer import Tokenizer, VocabularyError
from producer.batches.decode import decode
from producer.batches.rows import hidden_share, layout_of, most_codes
from producer.corpus.report import write_rejects
from producer.corpus.rows import CorpusRows, read_rows
from producer.corpus.scan import ScanResult, scan
from producer.creation import begin, room
from producer.creation.resume import changes, compare, moved_schedule, names, newest, without_effect
from producer.creation.sample_texts import check_samples

log = logging.getLogger(__name__)

# Enough clips for the mean of 80 channels to settle, few enough to take seconds.
_MEL_STATS_CLIPS = 64


def prepare_run(
    config: Config, *, on_cpu: bool, cores: int, out: Callable[[str], None] = log.info
) -> RunFolder:
    """Create `config.run`, or resume it.

    Args:
        on_cpu: no process of the run uses a GPU (decides determinism and compile mode).
        cores: CPU cores this machine lends the run (decides TensorFlow's threads, once).
        out: receives lines for the user.

    Raises:
        BadInput: nothing usable in the corpus, a setting that cannot work, or the folder holds
        another run (says what differs).
    """
    folder = config.run_dir
    if config.parity:
        out(
            f"parity {config.parity}: "
            + ", ".join(f"{k}={v}" for k, v in PARITY[config.parity].items())
        )
    existing = RunFolder(folder) if (folder / "identity.json").is_file() else None
    if existing is None and folder.exists() and (folder / "checkpoints").exists():
        raise BadInput(
            f"{folder} has checkpoints but no identity.json: it is not a whole run; choose another"
            " run= folder"
        )
    named, config = config.model.weights, begin.from_within(config, existing)
    start = None if config.model.weights is None else beginning.locate(config.model.weights)
    _check(config, start)
    config = (
        config_module.resolve(config, on_cpu, cores)
        if existing is None
        else resumed(config, existing, on_cpu, cores)
    )
    aside = folder / ".new"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
    except OSError as e:
        raise BadInput(
            f"cannot write to the run folder {folder}: {e.strerror}; choose another run= folder"
        ) from e
    try:
        with room.needed(folder):
            identity = _make(config, aside, existing, start, out)
        config = config.model_copy(
            update={"model": config.model.model_copy(update={"weights": named})}
        )
        if existing is None:
            with room.needed(folder):
                _move_in(config, aside, folder, identity)
            out(f"created {folder}")
        else:
            for setting in without_effect(existing, config):
                out(f"warning: no effect on this run: {setting}")
            lost = compare(identity, existing, config, aside / "manifest.sqlite")
            if lost:
                out(
                    f"warning: {len(lost)} of the run's {len(existing.manifest)} clips are gone or"
                    f" unusable ({names(lost)}); the run goes on as it was planned, and sets them"
                    " aside when their turn comes. To train on them, restore the files and start"
                    " again"
                )
            for name in (
                ("rejects.tsv",) if lost else ("manifest.sqlite", "rejects.tsv")
            ):  # of the same corpus, wherever it lies now
                os.replace(aside / name, folder / name)
            for line in (
                *changes(existing.config, config),
                *moved_schedule(existing.config, config),
            ):
                out(f"changed: {line}")
            with room.needed(folder):
                config_module.dump(config, folder / "config.yaml")
            out(f"resuming {folder} at {newest(existing)} (same corpus, plan, features and sizes)")
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    if existing is not None:
        existing.manifest.close()
    return RunFolder(folder)


def resumed(config: Config, existing: RunFolder, on_cpu: bool, cores: int) -> Config:
    """The settings that a run goes on with where `config` is asked for."""
    config = config_module.resolve(_keep_arithmetic(config, existing.config), on_cpu, cores)
    return _keep_machine_settings(config, existing.config)


def _check(config: Config, start: Beginning | None) -> None:
    if config.dvae.crop_frames % 4:
        raise BadInput(
            f"dvae.crop_frames={config.dvae.crop_frames}: the DVAE halves the time axis twice, so"
            " it must be a multiple of 4"
        )
    if config.model.dvae and not config.model.mel_stats and start is None:
        raise BadInput(
            "model.dvae needs model.mel_stats: codes mean nothing without the statistics the DVAE"
            " was trained with"
        )
    for key in ("dvae", "mel_stats"):
        path = getattr(config.model, key)
        if path and not Path(path).is_file():
            raise BadInput(f"model.{key}: there is no file {path}")
    if config.text.vocab and not Path(config.text.vocab).is_file():
        raise BadInput(f"text.vocab: there is no file {config.text.vocab}")
    if start is not None:
        begin.check(config, start)
    elif config.dvae.tune and not config.model.dvae:
        raise BadInput(
            "dvae.tune needs a DVAE to go on with: model.weights, or model.dvae with"
            " model.mel_stats"
        )


def _keep_arithmetic(config: Config, old: Config) -> Config:
    """The precision that was chosen when the run was created stays, unless another is asked for."""
    kept = {
        k: getattr(old.train, k)
        for k in ("precision", "attention_dropout")
        if getattr(config.train, k) is None
    }
    return config.model_copy(update={"train": config.train.model_copy(update=kept)})


def _keep_machine_settings(config: Config, old: Config) -> Config:
    """Threads, determinism and compile mode decide the bits: they stay what they were when the run
    was created.
    """
    for name in ("deterministic", "jit"):
        if getattr(config, name) != getattr(old, name):
            log.warning(
                "%s stays %s as in the run so far (this start would choose %s)",
                name,
                getattr(old, name),
                getattr(config, name),
            )
    if config.threads != old.threads:
        log.warning(
            "thread counts stay as they were when the run was created: %s", old.threads.model_dump()
        )
    return config.model_copy(
        update={
            "deterministic": old.deterministic,
            "jit": old.jit,
            "threads": Threads(**old.threads.model_dump()),
        }
    )


# -- making
# --------------------------------------------------------------------------------------------------


def _make(
    config: Config,
    aside: Path,
    existing: RunFolder | None,
    start: Beginning | None,
    out: Callable[[str], None],
) -> dict:
    """Fill `aside` with everything a run consists of; returns its identity."""
    rows = read_rows(config)
    tokenizer = make_vocabulary(config, rows, existing, out, start)
    begun = None
    if start is not None:
        for line in (begin.check_rows(config, tokenizer, start), *begin.notes(config, start)):
            out(line)
        begun = begin.make(config, aside, existing, start)
    check_samples(config, tokenizer, config.dims.gpt.max_text_tokens - 1)
    tokenizer.save(aside / "vocab.json")
    result: ScanResult = scan(
        config,
        aside / "manifest.sqlite",
        tokenizer,
        rows=rows,
        previous=existing.manifest if existing is not None else None,
    )
    manifest = Manifest.open(aside / "manifest.sqlite", check=False)
    dims = config.dims.with_vocabulary(tokenizer.vocab_size, tokenizer.start, tokenizer.stop)
    stats = _mel_stats(config, manifest, existing, dims, begun)
    save_file({"mel_stats": stats}, aside / "mel_stats.safetensors")
    dvae = (
        Path(config.model.dvae)
        if config.model.dvae
        else None
        if begun is None
        else begun / "dvae.safetensors"
    )
    if dvae is not None:
        (aside / "dvae").mkdir()
        shutil.copyfile(
            dvae,
            aside / "dvae" / ("first.safetensors" if config.dvae.tune else "model.safetensors"),
        )
    plans = {
        s.name: _plans(config, aside / "plan" / s.name, s, manifest, dims)
        for s in stages_of(config.model.size)
    }
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
        "kind": family_of(config.model.size),
        "weights": None if begun is None else pretrained.file_digests(begun)["model"],
        "extend": config.text.extend.model_dump() if config.text.extend else None,
        "trains_dvae": dvae is None or config.dvae.tune,
        "dvae": None if dvae is None else file_digest(dvae),
    }


def make_vocabulary(
    config: Config,
    rows: CorpusRows,
    existing: RunFolder | None,
    out: Callable[[str], None],
    start: Beginning | None = None,
) -> Tokenizer:
    """The run's vocabulary: the given file, the existing run's, or a BPE learnt from the corpus.

    BadInput: it cannot be had.
    """
    vocab = config.text.vocab or (None if start is None else start.vocab)
    options = {
        "keep_diacritics": not config.text.strip_arabic_diacritics,
        "parity": config.text.coqui_cleaning,
    }
    try:
        if existing is not None and (config.text.extend or not vocab):
            return Tokenizer.load(existing.path / "vocab.json", **options)
        if vocab:
            return _extended(Tokenizer.load(vocab, **options), config, rows, out)
        if config.text.extend:
            raise BadInput(
                "text.extend needs a vocabulary to extend: set text.vocab, or model.weights"
            )
        tokenizer = Tokenizer.train(rows.pairs(), config.text.vocab_size, rows.languages, **options)
    except VocabularyError as e:
        raise BadInput(str(e)) from e
    out(
        f"vocabulary: {tokenizer.vocab_size} tokens learnt from the corpus, languages"
        f" {', '.join(tokenizer.languages)}"
    )
    return tokenizer


def _extended(
    tokenizer: Tokenizer, config: Config, rows: CorpusRows, out: Callable[[str], None]
) -> Tokenizer:
    """The vocabulary with `text.extend`'s languages, learnt from their texts.

    VocabularyError as of `Tokenizer.extend`.
    """
    extend = config.text.extend
    if extend is None:
        return tokenizer
    try:
        languages = [normalize_language(language) for language in extend.languages]
    except UnknownLanguage as e:
        raise BadInput(f"text.extend.languages: {e}") from e
    absent = [language for language in languages if language not in rows.languages]
    if absent:
        raise BadInput(
            f"text.extend.languages: the corpus has no texts in {', '.join(absent)}; it has"
            f" {', '.join(rows.languages)}"
        )
    pairs = (pair for pair in rows.pairs() if pair[1] in languages)
    longer = tokenizer.extend(pairs, languages, extend.tokens)
    out(
        f"vocabulary: {tokenizer.vocab_size} ids kept, {longer.vocab_size - tokenizer.vocab_size}"
        f" new for {', '.join(languages)}"
    )
    return longer


def _mel_stats(
    config: Config,
    manifest: Manifest,
    existing: RunFolder | None,
    dims: ModelDims,
    begun: Path | None,
) -> np.ndarray:
    """float32[80]: the given statistics, or the mean |log-mel| per channel over a fixed sample of
    the training clips.
    """
    given = config.model.mel_stats or (None if begun is None else begun / "mel_stats.safetensors")
    if given is not None:
        try:
            arrays = load_file(given)
        except (SafetensorError, OSError) as e:
            raise BadInput(f"model.mel_stats={given} is not a safetensors file: {e}") from e
        stats = arrays.get("mel_stats")
        if stats is None or stats.shape != (dims.audio.num_mels,):
            raise BadInput(
                f"{given}: expected one tensor 'mel_stats' of {dims.audio.num_mels} values, has"
                f" {sorted(arrays)}"
            )
        return stats.astype(np.float32)
    if not any(s.networks for s in stages_of(config.model.size)):
        return np.ones(dims.audio.num_mels, np.float32)
    if existing is not None and existing.manifest.digest == manifest.digest:
        return existing.mel_stats
    ids = np.flatnonzero(manifest.columns()["split"] == TRAIN)
    chosen = ids[
        np.argsort(stateless_random.draws(stateless_random.key(0, len(ids)), np.arange(len(ids))))[
            :_MEL_STATS_CLIPS
        ]
    ]
    errors: list[DecodeError] = []
    waves = _decodable(manifest, np.sort(chosen), errors)
    first = next(waves, None)
    if first is None:
        shown = "\n  ".join(map(str, errors[:10]))
        raise BadInput(
            f"none of the {len(errors)} clips drawn for the mel statistics can be used:\n  {shown}"
        )
    return filterbank.mel_stats(itertools.chain([first], waves))


def _decodable(
    manifest: Manifest, ids: np.ndarray, errors: list[DecodeError]
) -> Iterator[np.ndarray]:
    for u in manifest.utterances(ids):
        try:
            yield decode(u.path)
        except DecodeError as e:
            errors.append(e)
            log.warning("not used for the mel statistics: %s", e)


def _plans(
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
    seed = int(stateless_random.key(config.seed, STAGES.index(stage.name)) >> np.uint64(1))
    digests = {}
    for name, split, sampling in (
        ("train", TRAIN, config.batching.sampling),
        ("eval", EVAL, "fixed"),
    ):
        ids, pool = np.flatnonzero(columns["split"] == split), None
        if not stage.crops and config.batching.prompt == "speaker":
            # Training never hears the evaluation set. An evaluation may take its voices from both:
            # nothing is learnt from it.
            lenders = ids if name == "train" else np.arange(n)
            pool = lenders, columns["speaker"][lenders]
        rows = PlanRows(ids, of[ids], columns["language"][ids], columns["speaker"][ids], pool)
        digests[name] = write_plan(
            folder, name, rows, seed=seed, sampling=sampling, buckets=buckets
        )
    return digests


def _check_memory(config: Config, aside: Path, dims: ModelDims) -> None:
    """BadInput where the window times the largest batch is more than the budget."""
    buckets = [
        (s.kind, b)
        for s in stages_of(config.model.size)
        for b in Plan.open(aside / "plan" / s.name, "train").buckets
    ]
    sizes = [num_bytes(kind, bucket, dims, config.transport.mel_dtype) for kind, bucket in buckets]
    window = config.transport.high_water_mark
    if window * max(sizes) > config.transport.memory_budget_mb * 1e6:
        fits = int(config.transport.memory_budget_mb * 1e6 // max(sizes))
        raise BadInput(
            f"transport.high_water_mark={window} x the largest batch ({max(sizes) / 1e6:.1f} MB) is"
            f" {window * max(sizes) / 1e6:.0f} MB, over"
            f" transport.memory_budget_mb={config.transport.memory_budget_mb}; {fits} batches"
            " would fit"
        )


def _plan_lines(config: Config, aside: Path, manifest: Manifest, dims: ModelDims) -> list[str]:
    plan = Plan.open(aside / "plan" / "gpt", "train")
    evaluation = Plan.open(aside / "plan" / "gpt", "eval").num_utterances
    shapes = ", ".join(f"{b.batch_size}x{b.row_len + dims.gpt.num_latents}" for b in plan.buckets)
    columns, ids = manifest.columns(), np.asarray(plan.order)
    lengths = row_lengths(
        columns["num_tokens"], _num_codes(config, columns, dims), layout_of(config)
    )[columns["split"] == TRAIN]
    padding = padded_share(lengths, [b.row_len for b in plan.buckets])
    lines = [
        f"plan: {plan.num_utterances} training and {evaluation} evaluation utterances,"
        f" {plan.batches_per_epoch} batches/epoch; rows x positions {shapes}, {100 * padding:.1f} %"
        " of them padding"
    ]
    if config.batching.prompt == "speaker":
        alone = int((np.bincount(columns["speaker"][ids]) == 1).sum())
        lines.append(
            f"conditioning clips: of another utterance of the speaker; {alone} utterances are their"
            " speaker's only one"
        )
    elif config.batching.mask_prompt is True and len(ids):
        share = hidden_share(columns["num_samples"][ids], dims.audio)
        lines.append(
            f"conditioning clips: of the utterance itself, so that {share:.0%} of the codes are no"
            " targets (see batching.prompt)"
        )
    return lines


def _num_codes(config: Config, columns: dict[str, np.ndarray], dims: ModelDims) -> np.ndarray:
    return most_codes(columns["num_samples"], config.batching.code_phases, dims.audio)


# -- same run?
# --------------------------------------------------------------------------------------------------


def _move_in(config: Config, aside: Path, folder: Path, identity: dict) -> None:
    for name in (
        "manifest.sqlite",
        "vocab.json",
        "mel_stats.safetensors",
        "rejects.tsv",
        "plan",
        "dvae",
        beginning.FOLDER,
    ):
        if (aside / name).exists():
            target = folder / name
            if target.is_dir():
                shutil.rmtree(target)
            os.replace(aside / name, target)
    config_module.dump(config, folder / "config.yaml")
    write_atomically(folder / "identity.json", json.dumps(identity, indent=1))
