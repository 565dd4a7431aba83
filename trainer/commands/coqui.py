"""The commands import-coqui and export-coqui: Coqui's files ↔ a folder of weights, and a run's checkpoint → Coqui's file. No TensorFlow."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from common.run import settings as config_module
from common.system.errors import OK, BadInput, RunError
from common.xtts.checkpoints.coqui import export_model, import_model
from common.xtts.checkpoints.pretrained import CoquiError
from common.xtts.checkpoints.pth import PthError
from trainer.history.checkpoint import trained_model


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
