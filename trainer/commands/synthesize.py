"""The command synthesize: checks its flags, chooses the device, becomes the process that speaks
(speak.py). Loads no TensorFlow.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from common.gpu import choose
from common.gpu.choose import Device
from common.gpu.listing import list_gpus
from common.run import settings as config_module
from common.run.beginning import as_bad_input, pieces_of
from common.run.folder import RunFolder
from common.system.errors import OK, BadInput
from common.system.lifecycle import hold_signals
from common.xtts.checkpoints import pretrained
from trainer.commands import voices

FLAGS: dict[str, dict] = {
    "--weights": {
        "metavar": "FOLDER",
        "help": (
            "imported weights (import-coqui) instead of --run; with --run: where its vocoder is"
        ),
    },
    "--text": {"metavar": "TEXT", "help": "what to say; - reads standard input"},
    "--language": {"metavar": "X", "default": "en", "help": "en, de, fa, … (en)"},
    "--voice": {
        "metavar": "NAME",
        "help": "a voice by its name: a speaker of --run, or one that came with the weights",
    },
    "--list-voices": {"action": "store_true", "help": "list their names and exit"},
    "--reference": {
        "metavar": "CLIP",
        "nargs": "+",
        "help": "recordings of the voice instead: 3 s or more in all, of which 30 s are used",
    },
    "--out": {"metavar": "WAV", "help": "the file to write, named .wav"},
    "--stream": {
        "action": "store_true",
        "help": "write 16-bit mono samples to standard output as they are made",
    },
    "--step": {
        "metavar": "N",
        "help": (
            "checkpoint of --run: a step, newest or best (default: best by evaluation, else newest)"
        ),
    },
    "--device": {
        "metavar": "X",
        "help": "a GPU's index or UUID, or cpu (default: a GPU if there is one)",
    },
    "--seed": {
        "metavar": "N",
        "type": int,
        "default": 0,
        "help": "random seed; the same seed gives the same speech (0)",
    },
    "--temperature": {
        "metavar": "X",
        "type": float,
        "help": "how freely codes are drawn; lower is calmer, 0 always takes the likeliest",
    },
    "--top-k": {"metavar": "K", "type": int, "help": "draw from the K likeliest codes; 0: all"},
    "--top-p": {
        "metavar": "P",
        "type": float,
        "help": "draw from the likeliest codes that together have probability P",
    },
    "--repetition-penalty": {
        "metavar": "X",
        "type": float,
        "help": "penalty on codes already spoken; 1: none",
    },
    "--candidates": {
        "metavar": "N",
        "type": int,
        "default": 1,
        "help": "say each sentence N times and keep the likeliest (1)",
    },
    "--speed": {
        "metavar": "X",
        "type": float,
        "default": 1.0,
        "help": "speed of speaking, 0.5 to 2; 2: twice as fast (1)",
    },
    "--pause": {
        "metavar": "S",
        "type": float,
        "default": 0.2,
        "help": "seconds of silence after each piece of a long text that ends a sentence (0.2)",
    },
}
SAMPLING = ("temperature", "top_k", "top_p", "repetition_penalty")
RANGES = {
    "speed": (0.5, 2.0),
    "pause": (0.0, 10.0),
    "temperature": (0.0, 10.0),
    "top_k": (0, 100_000),
    "top_p": (0.01, 1.0),
    "repetition_penalty": (0.1, 100.0),
    "candidates": (1, 64),
    "seed": (-(2**31), 2**31 - 1),
}


def run(
    args: argparse.Namespace,
    environment: Callable[[Device], Mapping[str, str | None]],
    tell: Callable[[str], None],
) -> int | NoReturn:
    """Become `python -m trainer.commands.speak` on one device; or list the voices and return.

    `environment`: a child's, by its device.

    Raises:
        BadInput: not exactly one source of weights, no WAV file to write to, no such clip, device
            or text.
    """
    _check_source(args)
    if args.list_voices:
        return list_voices(args, tell)
    options = _options(args)
    device = device_of(args.device)
    env = dict(os.environ)
    for name, value in environment(device).items():
        env.pop(name, None)
        if value is not None:
            env[name] = value
    sys.stdout.flush()
    hold_signals()
    fd = _handed_over(options)
    os.execve(sys.executable, [sys.executable, "-m", "trainer.commands.speak", str(fd)], env)


def _handed_over(options: dict) -> int:
    """An open file with the options that outlives exec: an argument has at most 128 KiB, which a
    chapter of a book exceeds.
    """
    with tempfile.TemporaryFile() as f:
        f.write(json.dumps(options).encode())
        f.seek(0)
        fd = os.dup(f.fileno())
    os.set_inheritable(fd, True)
    return fd


def list_voices(args: argparse.Namespace, tell: Callable[[str], None]) -> int:
    """One line per voice that --voice may name. BadInput: no such run or weights."""
    run = None if args.run is None else RunFolder(args.run)
    with as_bad_input(str(args.weights), "--weights"):
        weights = Path(args.weights) if run is None else pieces_of(run.path, args.weights)
        if run is None:
            pretrained.read_dims(weights)
        found = voices.listed(run, weights)
    for name, origin in found.items():
        tell(f"{name}  ({origin})")
    if not found:
        tell(
            "no voices: these weights came without speakers_xtts.pth; --reference takes any"
            " recording"
        )
    return OK


def _check_source(args: argparse.Namespace) -> None:
    if args.settings or args.config:
        raise BadInput("synthesize takes flags only, no config and no key=value settings")
    if args.weights is None and args.run is None:
        raise BadInput("give one of --run RUN and --weights FOLDER")
    if args.run is None and args.step is not None:
        raise BadInput("--step chooses a checkpoint of --run; --weights has none")


def _options(args: argparse.Namespace) -> dict:
    if args.text is None:
        raise BadInput("--text is missing: what to say")
    if args.stream == (args.out is not None):
        raise BadInput("give one of --out FILE.wav and --stream (samples on standard output)")
    if args.out is not None:
        _check_out(Path(args.out))
    if (args.voice is None) == (args.reference is None):
        raise BadInput("give one of --voice NAME (--list-voices lists them) and --reference CLIP")
    for clip in args.reference or ():
        if not Path(clip).is_file():
            raise BadInput(
                f"--reference {clip}: no such file (a voice by its name is --voice; --list-voices"
                " lists them)"
            )
    text = _standard_input() if args.text == "-" else args.text
    if not text.strip():
        raise BadInput("--text is empty: nothing to say")
    for name, (least, most) in RANGES.items():
        value = getattr(args, name)
        if value is not None and not least <= value <= most:
            flag = name.replace("_", "-")
            raise BadInput(f"--{flag} {value} is out of range: {least} to {most}")
    if args.candidates > 1 and args.stream:
        raise BadInput(
            "--candidates compares whole sentences, and --stream plays them while they are made:"
            " leave one out"
        )
    names = (
        "run",
        "weights",
        "language",
        "voice",
        "reference",
        "out",
        "stream",
        "step",
        "seed",
        "speed",
        "pause",
        "candidates",
        *SAMPLING,
    )
    return {"text": text, **{name: getattr(args, name) for name in names}}


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise BadInput(
            f"--text -: standard input is not UTF-8 (byte {e.start}): convert it, as `iconv -t"
            " utf-8` does"
        ) from e


def _check_out(out: Path) -> None:
    if out.is_dir():
        raise BadInput(f"--out {out} is a folder: name the file to write, {out / 'speech.wav'}")
    if out.suffix.lower() != ".wav":
        raise BadInput(
            f"--out {out}: only WAV is written; name a file that ends in .wav,"
            f" {out.with_suffix('.wav').name}"
        )
    if not out.absolute().parent.is_dir():
        raise BadInput(f"--out {out}: the folder {out.absolute().parent} does not exist")


def device_of(asked: str | None) -> Device:
    """The one device: `asked`, else the first GPU that is free, else the CPU.

    BadInput: it is not there.
    """
    if asked is not None and "," in asked:
        raise BadInput(f"--device {asked}: name one device")
    tree = {"devices": "auto"} if asked is None else {"data_gpu": asked, "model_gpu": asked}
    devices = choose.choose_gpus(
        config_module.parse(tree, "--device"), choose.without_use(list_gpus()), os.environ
    )
    return dataclasses.replace(
        devices.trainer, memory_mb=None
    )  # it shares the card with no producer of its own
