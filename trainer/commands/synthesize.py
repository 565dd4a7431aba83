"""The command synthesize: checks what it is given, chooses the device, becomes the process that speaks (speak.py). No TensorFlow."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from common.gpu import choose
from common.gpu.choose import Device
from common.run import settings as config_module
from common.system.errors import BadInput

FLAGS: dict[str, dict] = {
    "--weights": {"metavar": "FOLDER", "help": "imported weights (import-coqui) instead of --run"},
    "--text": {"metavar": "TEXT", "required": True, "help": "what to say; - reads standard input"},
    "--language": {"metavar": "X", "default": "en", "help": "en, de, fa, … (en)"},
    "--reference": {"metavar": "CLIP", "nargs": "+", "required": True, "help": "recordings of the voice, together 3 s or more"},
    "--out": {"metavar": "WAV", "help": "the file to write, named .wav"},
    "--stream": {"action": "store_true", "help": "16-bit mono samples to standard output as they are made"},
    "--step": {"metavar": "N", "help": "which checkpoint of --run: a step, newest or best (default: best by evaluation, else newest)"},
    "--device": {"metavar": "X", "help": "a GPU's index or UUID, or cpu; default: a GPU where there is one"},
    "--seed": {"metavar": "N", "type": int, "default": 0, "help": "the same seed says it the same way (0)"},
    "--temperature": {"metavar": "X", "type": float, "help": "lower is calmer"},
    "--top-k": {"metavar": "K", "type": int, "help": "draw from the K likeliest codes; 0: all"},
    "--top-p": {"metavar": "P", "type": float, "help": "draw from the likeliest codes of this probability together"},
    "--repetition-penalty": {"metavar": "X", "type": float, "help": "1: none"},
    "--candidates": {"metavar": "N", "type": int, "default": 1, "help": "say each sentence N times and keep the likeliest (1)"},
    "--speed": {"metavar": "X", "type": float, "default": 1.0, "help": "2: twice as fast (1)"},
}
SAMPLING = ("temperature", "top_k", "top_p", "repetition_penalty")


def run(args: argparse.Namespace, environment: Callable[[Device], Mapping[str, str | None]]) -> NoReturn:
    """Become `python -m trainer.commands.speak` on one device. `environment`: a child's, by its device.

    Raises:
        BadInput: not exactly one source of weights, no WAV file to write to, no such clip, device or text.
    """
    options = _options(args)
    device = _device(args.device)
    env = dict(os.environ)
    for name, value in environment(device).items():
        env.pop(name, None)
        if value is not None:
            env[name] = value
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", "trainer.commands.speak", json.dumps(options)], env)


def _options(args: argparse.Namespace) -> dict:
    if args.settings or args.config:
        raise BadInput("synthesize takes flags only, no config and no key=value settings")
    if (args.weights is None) == (args.run is None):
        raise BadInput("give one of --run RUN and --weights FOLDER")
    if args.weights is not None and args.step is not None:
        raise BadInput("--step chooses a checkpoint of --run; --weights has none")
    if args.stream == (args.out is not None):
        raise BadInput("give one of --out FILE.wav and --stream (samples on standard output)")
    if args.out is not None:
        _check_out(Path(args.out))
    for clip in args.reference:
        if not Path(clip).is_file():
            raise BadInput(f"--reference {clip}: no such file")
    text = sys.stdin.read() if args.text == "-" else args.text
    if not text.strip():
        raise BadInput("--text is empty: nothing to say")
    if not args.speed > 0:
        raise BadInput(f"--speed must be positive, not {args.speed}")
    if args.candidates < 1:
        raise BadInput(f"--candidates must be at least 1, not {args.candidates}")
    if args.candidates > 1 and args.stream:
        raise BadInput("--candidates compares whole sentences, and --stream plays them while they are made: leave one out")
    names = ("run", "weights", "language", "reference", "out", "stream", "step", "seed", "speed", "candidates", *SAMPLING)
    return {"text": text, **{name: getattr(args, name) for name in names}}


def _check_out(out: Path) -> None:
    if out.is_dir():
        raise BadInput(f"--out {out} is a folder: name the file to write, {out / 'speech.wav'}")
    if out.suffix.lower() != ".wav":
        raise BadInput(f"--out {out}: only WAV is written; name a file that ends in .wav, {out.with_suffix('.wav').name}")
    if not out.absolute().parent.is_dir():
        raise BadInput(f"--out {out}: the folder {out.absolute().parent} does not exist")


def _device(asked: str | None) -> Device:
    """The one device: `asked`, else the first GPU that is free, else the CPU."""
    if asked is not None and "," in asked:
        raise BadInput(f"--device {asked}: one device speaks")
    tree = {"devices": "auto"} if asked is None else {"data_gpu": asked, "model_gpu": asked}
    devices = choose.choose_gpus(config_module.parse(tree, "--device"), choose.without_use(choose.list_gpus()), os.environ)
    return dataclasses.replace(devices.trainer, memory_mb=None)  # it shares the card with no producer of its own
