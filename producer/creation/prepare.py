"""Creating a run folder, or finding that the one there is the same run.

Order of birth: read the metadata → vocabulary → scan → mel statistics → plans → identity.
Everything is made aside and moved in at the end, so a folder either is a run or is not. No
TensorFlow, no GPU: whatever is wrong with the input is found here.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors.numpy import save_file

from common.data.manifest import Manifest
from common.run import beginning
from common.run import settings as config_module
from common.run.beginning import Beginning
from common.run.folder import RunFolder
from common.run.parity import PARITY
from common.run.sections import Threads
from common.run.settings import Config
from common.run.stages import family_of, stages_of
from common.system.errors import BadInput
from common.system.files import digest, file_digest, write_atomically
from common.xtts.checkpoints import pretrained
from producer.batches.rows import layout_of
from producer.corpus.report import write_rejects
from producer.corpus.rows import read_rows
from producer.corpus.scan import ScanResult, scan
from producer.creation import begin
from producer.creation.mel_statistics import mel_stats
from producer.creation.plans import check_memory, plan_lines, write_plans
from producer.creation.resume import compare, names, newest, without_effect
from producer.creation.sample_texts import check_samples
from producer.creation.vocabulary import make_vocabulary

log = logging.getLogger(__name__)


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
    if existing is not None:
        config = _keep_arithmetic(config, existing.config)
    config = config_module.resolve(config, on_cpu, cores)
    if existing is not None:
        config = _keep_machine_settings(config, existing.config)
    aside = _aside(folder)
    try:
        identity = _make(config, aside, existing, start, out)
        config = config.model_copy(
            update={"model": config.model.model_copy(update={"weights": named})}
        )
        if existing is None:
            _move_in(config, aside, folder, identity)
            out(f"created {folder}")
        else:
            _resume(config, aside, existing, identity, out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    if existing is not None:
        existing.manifest.close()
    return RunFolder(folder)


def _aside(folder: Path) -> Path:
    """An empty folder within the run's. BadInput: it cannot be made."""
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
    if lost:
        out(
            f"warning: {len(lost)} of the run's {len(existing.manifest)} clips are gone or"
            f" unusable ({names(lost)}); the run goes on as it was planned, and sets them"
            " aside when their turn comes. To train on them, restore the files and start"
            " again"
        )
    # Of the same corpus, wherever it lies now.
    for name in ("rejects.tsv",) if lost else ("manifest.sqlite", "rejects.tsv"):
        os.replace(aside / name, folder / name)
    config_module.dump(config, folder / "config.yaml")
    out(f"resuming {folder} at {newest(existing)} (same corpus, plan, features and sizes)")


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
    stats = mel_stats(config, manifest, existing, dims, begun)
    save_file({"mel_stats": stats}, aside / "mel_stats.safetensors")
    dvae = _copy_dvae(config, aside, begun)
    plans = {
        s.name: write_plans(config, aside / "plan" / s.name, s, manifest, dims)
        for s in stages_of(config.model.size)
    }
    check_memory(config, aside, dims)
    for line in plan_lines(config, aside, manifest, dims):
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
        **_batch_facts(config),
        "weights": None if begun is None else pretrained.file_digests(begun)["model"],
        "extend": config.text.extend.model_dump() if config.text.extend else None,
        "trains_dvae": dvae is None or config.dvae.tune,
        "dvae": None if dvae is None else file_digest(dvae),
    }


def _copy_dvae(config: Config, aside: Path, begun: Path | None) -> Path | None:
    """Copy the given DVAE, if there is one; where it came from."""
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


def _batch_facts(config: Config) -> dict:
    """Settings that decide what is in a batch."""
    return {
        "mel_dtype": config.transport.mel_dtype,
        "prompt": config.batching.prompt,
        "mask_prompt": config.batching.mask_prompt,
        "layout": dataclasses.asdict(layout_of(config)),
        "padded_codes": config.batching.padded_codes,
        "code_phases": config.batching.code_phases,
        "kind": family_of(config.model.size),
    }


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
