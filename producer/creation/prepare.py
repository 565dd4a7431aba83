"""Create a run folder, or find that the existing one is the same run.

Order of creation: read the metadata → vocabulary → scan → mel statistics → plans → identity.
Everything is made aside and moved in at the end, so a folder either is a run or is not. No
TensorFlow, no GPU: whatever is wrong with the input is found here.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from common.audio import notes
from common.audio.errors import DecodeError
from common.data import stateless_random
from common.data.manifest import TRAIN, Manifest
from common.run import beginning
from common.run import proof as record
from common.run import settings as config_module
from common.run.beginning import Beginning
from common.run.folder import RunFolder
from common.run.parity import PARITY
from common.run.sections import Threads
from common.run.settings import Config
from common.run.stages import family_of, stages_of
from common.system.counted import counted
from common.system.errors import BadInput
from common.system.files import digest, file_digest, fsync_tree
from common.xtts import filterbank
from common.xtts.checkpoints import pretrained
from common.xtts.dims import ModelDims
from common.xtts.text.clean import UnknownLanguage, normalize_language
from common.xtts.text.tokenizer import Tokenizer, VocabularyError
from producer.batches.decode import decode
from producer.batches.rows import layout_of
from producer.corpus.report import write_rejects
from producer.corpus.rows import CorpusRows, read_rows
from producer.corpus.scan import ScanResult, scan
from producer.creation import begin, mend, place, plans, room, shares
from producer.creation.resume import about, changes, compare, moved_schedule, newest, without_effect
from producer.creation.sample_texts import check_samples

log = logging.getLogger(__name__)

# Enough clips for the means of 80 channels to settle, few enough to take only seconds.
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
            another run (says what differs) or other files.
    """
    folder = config.run_dir
    if config.parity:
        out(
            f"parity {config.parity}: "
            + ", ".join(f"{k}={v}" for k, v in PARITY[config.parity].items())
        )
    existing = RunFolder(folder) if record.is_run(folder) else None
    if existing is None:
        with room.needed(folder):
            place.check(folder)
    named, config = config.model.weights, begin.from_within(config, existing)
    start = None if config.model.weights is None else beginning.locate(config.model.weights)
    _check(config, start)
    config = (
        config_module.resolve(config, on_cpu, cores)
        if existing is None
        else resumed(config, existing, on_cpu, cores)
    )
    if config.train.precision == "fp8" and not config.jit:
        raise BadInput("train.precision=fp8 needs jit, which is false here; ask for bf16 or tf32")
    aside = _aside(folder)
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
            _resume(config, aside, existing, identity, out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    if existing is not None and "manifest" in vars(existing):
        existing.manifest.close()
    return RunFolder(folder)


def _aside(folder: Path) -> Path:
    """An empty folder inside the run's. BadInput: it cannot be created."""
    aside = folder / ".new"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
    except OSError as e:
        raise BadInput(
            f"cannot write to the run folder {folder}: {e.strerror}; choose another run= folder"
        ) from e
    return aside


def _resume(
    config: Config, aside: Path, existing: RunFolder, identity: dict, out: Callable[[str], None]
) -> None:
    """Take over what may have changed since the run was created. BadInput: it is another run."""
    folder = config.run_dir
    for setting in without_effect(existing, config):
        out(f"warning: no effect on this run: {setting}")
    lost = compare(identity, existing, config, aside / "manifest.sqlite")
    mended = mend.damaged(existing, aside, lost, lambda to: _own_plans(existing, to))
    if lost:
        out(f"warning: {about(lost, len(existing.manifest))}")
    for line in (
        *changes(existing.config, config),
        *moved_schedule(existing.config, config),
    ):
        out(f"changed: {line}")
    # The same corpus, wherever it lies now.
    scanned = ("rejects.tsv",) if lost else ("manifest.sqlite", "rejects.tsv")
    with room.needed(folder):
        mend.move_in(existing, config, aside, dict.fromkeys([*scanned, *mended]))
    for line in mend.told(existing, mended):
        out(line)
    out(f"resuming {folder} at {newest(existing)} (same corpus, plan, features and sizes)")


def resumed(config: Config, existing: RunFolder, on_cpu: bool, cores: int) -> Config:
    """The settings that a run goes on with when `config` is asked for."""
    config = config_module.resolve(_keep_arithmetic(config, existing.config), on_cpu, cores)
    return _keep_machine_settings(config, existing.config)


def _check(config: Config, start: Beginning | None) -> None:
    shares.check(config)
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
    """Keep the precision chosen when the run was created, unless another is asked for."""
    kept = {
        k: getattr(old.train, k)
        for k in ("precision", "attention_dropout")
        if getattr(config.train, k) is None
    }
    return config.model_copy(update={"train": config.train.model_copy(update=kept)})


def _keep_machine_settings(config: Config, old: Config) -> Config:
    """Threads, determinism and compile mode decide the bits: keep those with which the run was
    created.
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


# -- making ----------------------------------------------------------------------------------------


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
        previous=existing.manifest if _is_whole(existing, "manifest.sqlite") else None,
        journal=config.run_dir / ".scan-journal",
    )
    manifest = Manifest.open(aside / "manifest.sqlite", check=False)
    dims = config.dims.with_vocabulary(tokenizer.vocab_size, tokenizer.start, tokenizer.stop)
    stats = _mel_stats(config, manifest, existing, dims, begun)
    save_file({"mel_stats": stats}, aside / "mel_stats.safetensors")
    dvae = _copy_dvae(config, aside, begun)
    digests = {
        s.name: plans.write(config, aside / "plan" / s.name, s, manifest, dims)
        for s in stages_of(config.model.size)
    }
    plans.check_memory(config, aside, dims)
    for line in (*plans.lines(config, aside, manifest, dims), *result.report.lines()):
        out(line)
    manifest.close()
    write_rejects(result.report.rejects, aside / "rejects.tsv")
    return {
        "format": 1,
        "run_id": existing.run_id if existing is not None else os.urandom(16).hex(),
        "seed": config.seed,
        "manifest": manifest.digest,
        "plan": digests,
        "dims": dims.to_dict(),
        "vocabulary": tokenizer.digest,
        "mel_stats": digest(stats.tolist()),
        "weights": None if begun is None else pretrained.file_digests(begun)["model"],
        "trains_dvae": dvae is None or config.dvae.tune,
        "dvae": None if dvae is None else file_digest(dvae),
        **_asked_for(config),
    }


def _asked_for(config: Config) -> dict:
    """The settings that are part of what a run is, besides what they made of the corpus."""
    return {
        "accumulate": config.train.accumulate,
        "mel_dtype": config.transport.mel_dtype,
        "prompt": config.batching.prompt,
        "mask_prompt": config.batching.mask_prompt,
        "layout": dataclasses.asdict(layout_of(config)),
        "padded_codes": config.batching.padded_codes,
        "code_phases": config.batching.code_phases,
        "augment": config.augment.model_dump() if config.augment.share else None,
        "kind": family_of(config.model.size),
        "extend": config.text.extend.model_dump() if config.text.extend else None,
    }


def _copy_dvae(config: Config, aside: Path, begun: Path | None) -> Path | None:
    """Copy the given DVAE, if there is one; returns where it came from."""
    if config.model.dvae:
        dvae = Path(config.model.dvae)
    elif begun is not None:
        dvae = begun / "dvae.safetensors"
    else:
        return None
    (aside / "dvae").mkdir()
    name = "first.safetensors" if config.dvae.tune else "model.safetensors"
    shutil.copyfile(dvae, aside / "dvae" / name)
    return dvae


def make_vocabulary(
    config: Config,
    rows: CorpusRows,
    existing: RunFolder | None,
    out: Callable[[str], None],
    start: Beginning | None = None,
) -> Tokenizer:
    """The run's vocabulary: the given file, the existing run's, or a BPE learnt from the corpus.

    BadInput: there is none to be had.
    """
    vocab = config.text.vocab or (None if start is None else start.vocab)
    options = {
        "keep_diacritics": not config.text.strip_arabic_diacritics,
        "parity": config.text.coqui_cleaning,
    }
    try:
        if _is_whole(existing, "vocab.json") and (config.text.extend or not vocab):
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
    """The vocabulary extended by the languages of `text.extend`, learnt from their texts.

    VocabularyError as in `Tokenizer.extend`.
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
    whole = all(_is_whole(existing, n) for n in ("manifest.sqlite", "mel_stats.safetensors"))
    if whole and existing.manifest.digest == manifest.digest:
        return existing.mel_stats
    ids = np.flatnonzero(manifest.columns()["split"] == TRAIN)
    chosen = ids[
        np.argsort(stateless_random.draws(stateless_random.key(0, len(ids)), np.arange(len(ids))))[
            :_MEL_STATS_CLIPS
        ]
    ]
    errors: list[DecodeError] = []
    waves = _decodable(manifest, np.sort(chosen), errors)
    with notes.dropped():
        first = next(waves, None)
        if first is not None:
            return filterbank.mel_stats(itertools.chain([first], waves))
    shown = "\n  ".join(map(str, errors[:10]))
    raise BadInput(
        f"{counted(len(errors), '[the one clip|none of the {n} clips]')} drawn for the mel"
        f" statistics {counted(len(errors), '[cannot|can]')} be used:\n  {shown}"
    )


def _is_whole(existing: RunFolder | None, name: str) -> bool:
    """Whether there is a run and this file of it is as it was written."""
    return existing is not None and name not in existing.damaged


def _decodable(
    manifest: Manifest, ids: np.ndarray, errors: list[DecodeError]
) -> Iterator[np.ndarray]:
    for u in manifest.utterances(ids):
        try:
            yield decode(u.path, portion=u.portion)
        except DecodeError as e:
            errors.append(e)
            log.warning("not used for the mel statistics: %s", e)


def _own_plans(run: RunFolder, to: Path) -> None:
    """Make the plans of a run again, from its own manifest and settings."""
    for s in stages_of(run.config.model.size):
        plans.write(run.config, to / "plan" / s.name, s, run.manifest, run.dims)


def _move_in(config: Config, aside: Path, folder: Path, identity: dict) -> None:
    fsync_tree(aside)
    for name in (
        place.FIRST,
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
    mend.first_record(folder, identity, config).write()
