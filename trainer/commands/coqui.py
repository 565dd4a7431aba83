"""The commands import-coqui and export-coqui: Coqui's files → a folder of weights; weights or a
run's checkpoint → Coqui's folder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from common.data.manifest import Manifest
from common.gpu.choose import Device
from common.run.beginning import checkpoint_of, pieces_of
from common.run.folder import RunFolder
from common.system.documents import read_json
from common.system.errors import OK, BadInput, RunError
from common.xtts.checkpoints.coqui import import_model
from common.xtts.checkpoints.coqui_export import Parts, export_folder, export_model, is_one_file
from common.xtts.checkpoints.coqui_rules import Rules
from common.xtts.checkpoints.pretrained import CoquiError
from common.xtts.checkpoints.pth_zip import PthError

IMPORT_FLAGS: dict[str, dict] = {
    "--model": {
        "metavar": "PATH",
        "required": True,
        "help": (
            "a folder with model.pth, config.json, vocab.json, dvae.pth, … (all are used), or the"
            " model's file alone"
        ),
    },
    "--out": {"metavar": "FOLDER", "required": True, "help": "the folder to make"},
    "--dvae": {"metavar": "PATH", "help": "dvae.pth: training needs it"},
    "--vocab": {"metavar": "PATH", "help": "vocab.json of the model"},
    "--mel-stats": {"metavar": "PATH", "help": "mel_stats.pth, if model.pth contains none"},
    "--speakers": {"metavar": "PATH", "help": "speakers_xtts.pth: named voices"},
    "--other-dvae": {
        "action": "store_true",
        "help": "take a DVAE that the model was not trained with",
    },
}
EXPORT_FLAGS: dict[str, dict] = {
    "--weights": {
        "metavar": "FOLDER",
        "help": (
            "a folder made by import-coqui, instead of --run; with --run: where the vocoder is, if"
            " the run has lost it"
        ),
    },
    "--out": {
        "metavar": "PATH",
        "required": True,
        "help": "the folder to make, or a file x.pth for the model alone",
    },
    "--step": {
        "metavar": "N",
        "help": (
            "which checkpoint of --run: a step, newest or best (default: best by evaluation, else"
            " newest)"
        ),
    },
    "--voices": {
        "metavar": "N",
        "type": int,
        "default": 50,
        "help": "include at most N of --run's speakers as named voices (50); 0: none",
    },
    "--device": {
        "metavar": "X",
        "help": (
            "where voices are made: a GPU's index or UUID, or cpu; default: a GPU if there is one"
        ),
    },
}
# Texts of the run's corpus that are compared with Coqui's tokenizer, at most.
_COMPARED = 5000
_VOICES_LIMIT_S = 3600


def import_files(args: argparse.Namespace, tell: Callable[[str], None]) -> int:
    """`--model` and what is named besides → the folder `--out`.

    BadInput: files that do not fit together; RunError: no room, no permission.
    """
    with _as_run_errors(args):
        named = {
            "dvae": args.dvae,
            "vocab": args.vocab,
            "mel_stats": args.mel_stats,
            "speakers": args.speakers,
        }
        import_model(args.model, args.out, **named, other_dvae=args.other_dvae, tell=tell)
    tell(f"written: {args.out}")
    return OK


def export(
    args: argparse.Namespace,
    tell: Callable[[str], None],
    device: Callable[[], tuple[Device, Mapping[str, str | None]]],
) -> int:
    """`--weights`, or `--run` and `--step` → the folder, or the file x.pth, `--out`.

    Errors: as for `import_files`.

    Args:
        device: () → the device for making voices, and a child's environment for it; called only if
        there are voices to make.
    """
    if args.run is None and args.weights is None:
        raise BadInput("give one of --run RUN and --weights FOLDER")
    if args.run is None and args.step is not None:
        raise BadInput("--step chooses a checkpoint of --run; --weights has none")
    if args.voices < 0:
        raise BadInput(f"--voices must be 0 or more, not {args.voices}")
    with _as_run_errors(args), tempfile.TemporaryDirectory(prefix="export-") as aside:
        alone = is_one_file(args.out)
        run = None if args.run is None else RunFolder(args.run)
        parts = (
            Parts.of_weights(args.weights)
            if run is None
            else parts_of_run(run, args.step, args.weights)
        )
        if alone:
            number = export_model(parts, args.out, tell)
        else:
            if run is not None and args.voices:
                parts = _with_voices(run, parts, args.voices, Path(aside), tell, device)
            rules = _rules(run, parts)
            number = export_folder(parts, args.out, rules, tell)
            _tell_of_texts(run, rules, tell)
    tell(f"written: {args.out}, {number} tensors, GPT of {parts.gpt}")
    return OK


def parts_of_run(run: RunFolder, which: str | None, weights: str | None = None) -> Parts:
    """The parts to export a run's checkpoint with.

    BadInput: there is none, or the run never had a vocoder.
    """
    if not run.trains_networks:
        raise BadInput(
            f"{run.path} trains arithmetic instead of networks: there is nothing to export"
        )
    pieces = pieces_of(run.path, weights)
    if pieces is None:
        raise BadInput(
            f"{run.path} started from nothing, not imported weights (model.weights), and has no"
            " vocoder: Coqui cannot speak without one"
        )
    return Parts(
        pieces,
        checkpoint_of(run.path, which),
        run.path / "mel_stats.safetensors",
        run.path / "vocab.json",
        run.dvae_weights,
        dims=run.dims.gpt,
    )


# -- voices ----------------------------------------------------------------------------------------


def _with_voices(run: RunFolder, parts: Parts, most: int, aside: Path, tell, device) -> Parts:
    """`parts` with voices of the run's speakers, made by a process of its own because that needs
    TensorFlow.
    """
    chosen, environment = device()
    env = {k: v for k, v in {**os.environ, **environment}.items() if v is not None}
    job = {
        "run": str(run.path),
        "gpt": str(parts.gpt),
        "weights": str(parts.weights),
        "most": most,
        "out": str(aside),
    }
    tell(f"making voices of the run's speakers on {chosen}")
    command = [sys.executable, "-m", "trainer.commands.make_voices", json.dumps(job)]
    try:
        done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, timeout=_VOICES_LIMIT_S)
    except subprocess.TimeoutExpired as e:
        raise RunError(
            f"the voices were not made within {_VOICES_LIMIT_S} s; --voices 0 exports without them"
        ) from e
    if done.returncode:
        raise RunError(
            f"the voices could not be made (exit {done.returncode}, see above); --voices 0 exports"
            " without them"
        )
    made = read_json(aside / "voices.json")
    if not made:
        return parts
    clips = {name: Path(clip) for name, clip in made.items()}
    return replace(parts, made_voices=aside / "speakers.safetensors", clips=clips)


# -- texts -----------------------------------------------------------------------------------------


def _rules(run: RunFolder | None, parts: Parts) -> Rules | None:
    if parts.vocab is None:
        return None
    cleaning = {"parity": True, "keep_diacritics": True} if run is None else run.cleaning
    return Rules(parts.vocab, **cleaning)


def _tell_of_texts(run: RunFolder | None, rules: Rules | None, tell: Callable[[str], None]) -> None:
    """Report texts that Coqui would read differently from training, and what helps."""
    if rules is None:
        return
    if rules.unknown:
        tell(
            f"Coqui has no rules for {', '.join(rules.unknown)} and refuses such texts until"
            " coqui_languages.install() has run there"
        )
    if rules.merge_limits:
        grown = ", ".join(x for x in rules.tokenizer.languages if x in rules.merge_limits)
        tell(
            f"the vocabulary grew for {grown}: Coqui uses the new tokens for all languages, until"
            " coqui_languages.install() has run"
        )
    if run is not None:
        compared, differing, shown = rules.differences(_texts(run.manifest))
        if compared:
            total = sum(compared.values())
            listed = ", ".join(f"{x} {n} of {compared[x]}" for x, n in sorted(differing.items()))
            tell(f"texts in other tokens in Coqui, of {total} compared: {listed or 'none'}")
        for d in shown:
            tell(
                f"  {d.language} {d.text[:60]!r}: trained on {d.ours[:60]!r}, Coqui reads"
                f" {d.coquis[:60]!r}"
            )
        if differing:
            tell("  coqui_languages.install() makes Coqui read them as in training")
    if rules.needed:
        tell("coqui_languages.py is in the folder: README.md shows its use")


def _texts(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """(text, language) of utterances spread evenly over the corpus."""
    for u in manifest.utterances(range(0, len(manifest), max(1, len(manifest) // _COMPARED))):
        yield u.text, u.language


@contextlib.contextmanager
def _as_run_errors(args: argparse.Namespace) -> Iterator[None]:
    if args.settings or args.config:
        raise BadInput("this command takes flags only, no config and no key=value settings")
    try:
        yield
    except (CoquiError, PthError) as e:
        raise BadInput(str(e)) from e
    except OSError as e:
        raise RunError(f"{e.filename or args.out}: {e.strerror or e}") from e
