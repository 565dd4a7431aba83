"""The commands import-coqui and export-coqui: Coqui's files ↔ a folder of weights, and a run's checkpoint → Coqui's file. No TensorFlow."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from common import config as config_module
from common.durable import file_digest
from common.errors import OK, BadInput, RunError
from common.xtts.coqui import export_model, import_model
from common.xtts.pretrained import CoquiError
from common.xtts.pth import PthError
from trainer.checkpoint import step_of


def import_files(args: argparse.Namespace, tell: Callable[[str], None]) -> int:
    """`--model`, `--dvae`, `--vocab`, `--mel-stats` → the folder `--out`. BadInput: what does not fit; RunError: no room, no permission."""
    with _as_run_errors(args):
        import_model(args.model, args.out, dvae=args.dvae, vocab=args.vocab, mel_stats=args.mel_stats, tell=tell)
    tell(f"written: {args.out}")
    return OK


def export_file(args: argparse.Namespace, tell: Callable[[str], None]) -> int:
    """`--weights`, or `--run` and `--step` → the file `--out`. Errors as of `import_files`."""
    if (args.weights is None) == (args.run is None):
        raise BadInput("give one of --weights FOLDER and --run RUN")
    with _as_run_errors(args):
        if args.run is None:
            source, number = args.weights, export_model(args.weights, args.out)
        else:
            run = Path(args.run)
            weights = config_module.load(run / "config.yaml").model.weights
            if weights is None:
                raise BadInput(f"{run} did not begin with imported weights (model.weights): Coqui needs the vocoder that comes with them")
            source = trained_model(run, args.step)
            number = export_model(weights, args.out, gpt=source, vocab=run / "vocab.json")
    tell(f"written: {args.out}, {number} tensors, GPT of {source}")
    return OK


def trained_model(run: Path, which: str | None) -> Path:
    """The GPT in one of a run's checkpoints: `which` is a step, "best", or None for the newest. The file is verified.

    Raises:
        BadInput: no such checkpoint, or it is damaged.
    """
    folder = run / "checkpoints"
    found = {n: p for p in folder.iterdir() if (n := step_of(p)) is not None} if folder.is_dir() else {}
    if not found:
        raise BadInput(f"{run} has no checkpoint yet")
    try:
        newest = max(found)
        step = json.loads((found[newest] / "state.json").read_text())["best_step"] if which == "best" else int(which or newest)
        path = found[step] / "model.safetensors"
        whole = file_digest(path) == json.loads((found[step] / "state.json").read_text())["digests"]["model"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise BadInput(f"{run} has no whole checkpoint {which or newest}; it has {sorted(found)} ({type(e).__name__}: {e})") from e
    if not whole:
        raise BadInput(f"{path} is damaged (its digest differs); choose another --step of {sorted(found)}")
    return path


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
