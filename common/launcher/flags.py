"""The command line's flags: one table from flag to config key, the parser built from it, and the
`key=value` settings that they stand for.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import NoReturn

from common.run.settings_text import as_yaml
from common.system.errors import BadInput


@dataclass(frozen=True)
class Flag:
    """`--name VALUE` sets the config key `key`.

    `clears`: a key that would hide the value is set to null.
    """

    name: str
    key: str
    help: str
    text: bool = False  # the value is text even where it looks like a number
    several: bool = False  # may be repeated: a list
    clears: str = ""
    value: str = "N"  # what --help shows for the value


FLAGS = (
    Flag("--run", "run", "the run folder", text=True, value="DIR"),
    Flag(
        "--checkpoint-dir",
        "run",
        "the run folder (checkpoints are in DIR/checkpoints)",
        text=True,
        value="DIR",
    ),
    Flag(
        "--data-gpu",
        "data_gpu",
        "the producers' GPU: 0, a UUID or cpu; 0,2: two GPUs, taken in turn",
        text=True,
        value="GPU",
    ),
    Flag(
        "--model-gpu",
        "model_gpu",
        "the trainer's GPU: 1, a UUID or cpu; 0,1: one for each of two trainers",
        text=True,
        value="GPU",
    ),
    Flag("--num-trainers", "trainers.count", "number of trainer processes"),
    Flag("--num-producers", "producers.count", "number of producer processes"),
    Flag(
        "--num-workers",
        "producers.decode_threads",
        "decode threads per producer; 0: share out the cores",
    ),
    Flag(
        "--buffer-size",
        "transport.high_water_mark",
        "most batches that exist between producers and step",
    ),
    Flag(
        "--batch-size",
        "batching.batch_size",
        "utterances per batch",
        clears="batching.positions_per_batch",
    ),
    Flag(
        "--train-data",
        "data.train",
        "a corpus: folder or metadata file; may be repeated",
        text=True,
        value="PATH",
        several=True,
    ),
    Flag(
        "--val-data",
        "data.val",
        "a corpus for evaluation; may be repeated",
        text=True,
        value="PATH",
        several=True,
    ),
    Flag("--epochs", "train.epochs", "epochs of stage 2 (the GPT)"),
    Flag("--max-steps", "train.max_steps", "most steps of stage 2"),
    Flag("--seed", "seed", "the run's seed"),
)

# Flags of the predecessor that need no setting any more: name → (takes a value, answer).
ANSWERED = {
    "--model-start-delay": (
        True,
        "replaced by readiness: step 1 starts when `min_ready` batches wait",
    ),
    "--enable-static-shapes": (False, "always on"),
    "--enable-memory-isolation": (False, "always on"),
    "--resume": (False, "always on: an existing run of the same identity resumes"),
}

# launch.py's table of commands, to find the nearest name to a misspelt one.
COMMANDS = (
    "train", "finetune", "trainer", "producer", "bundle", "scan", "split", "transcribe", "check",
    "profile", "status", "stop", "serve", "report", "config", "synthesize", "import-coqui",
    "export-coqui",
)  # fmt: skip


class Override(str):
    """A `key=value` text, with the flag it came from; "" for a setting."""

    flag: str = ""


class _Once(argparse.Action):
    """Stores a value as argparse's own `store` does, but refuses to replace the value of an earlier
    flag of the same name.
    """

    def __call__(self, parser, namespace, values, option_string=None):
        earlier = getattr(namespace, self.dest, self.default)
        if option_string and earlier is not self.default:
            raise BadInput(f"{option_string} is given twice, with {earlier} and {values}; give one")
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are BadInput, with the nearest known flag."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        for name in (None, "store"):
            self.register("action", name, _Once)

    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting."""
        words = (
            [w.split("=")[0] for w in message.split() if w.startswith("--")]
            if "unrecognized" in message
            else []
        )
        near = [
            n
            for w in words
            for n in difflib.get_close_matches(w, self._option_string_actions, 1, 0.6)
        ]
        hint = (
            f"; did you mean {', '.join(near)}?"
            if near
            else f"; `{self.prog} --help` lists the flags"
        )
        raise BadInput(message + hint)


KEY_VALUE = ("key=value", "set any config key, e.g. train.optim.learning_rate=1e-5")


def build(
    prog: str,
    help_text: str,
    names: tuple[str, ...] | None,
    examples: tuple[str, ...] = (),
    words: tuple[str, str] | None = KEY_VALUE,
) -> Parser:
    """A parser with the flags of `names` (None: all of the table).

    Args:
        examples: shown below the flags.
        words: name and meaning of the arguments without a flag; None: there are none, and no
        `--config` either.
    """
    parser = Parser(
        prog=prog,
        description=help_text,
        epilog="examples:\n" + "\n".join(f"  {e}" for e in examples) if examples else None,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if words is None:
        parser.set_defaults(config=None, settings=[])
    else:
        parser.set_defaults(config=None)
        _add_settings(parser, words)
    group = parser.add_argument_group("flags, and the config keys they set")
    for flag in FLAGS:
        if names is None or flag.name in names:
            action = "append" if flag.several else "store"
            group.add_argument(
                flag.name,
                dest=_dest(flag.name),
                metavar=flag.value,
                action=action,
                help=f"{flag.help}  [{flag.key}]",
            )
    if names is None:
        for name, (takes_value, _) in ANSWERED.items():  # accepted, but not listed by --help
            kind = {} if takes_value else {"action": "store_true"}
            group.add_argument(name, dest=_dest(name), help=argparse.SUPPRESS, **kind)
    return parser


def _add_settings(parser: Parser, words: tuple[str, str]) -> None:
    if words == KEY_VALUE:
        which = "those of --run; with data.train=…: configs/ljspeech.yaml, or, with"
        which += " model.weights=… too, configs/finetune_xtts.yaml; else configs/demo.yaml"
        parser.add_argument("--config", metavar="FILE", help=f"settings file (default: {which})")
    parser.add_argument("settings", nargs="*", metavar=words[0], help=words[1])


def parse(parser: Parser, argv: list[str]) -> argparse.Namespace:
    """Parse; flags and key=value settings may come in any order.

    BadInput: anything the parser does not know, a flag given twice.
    """
    # Report a misspelt command before its flags: the parser that runs in its place does not know
    # them.
    if parser.prog == "launch.py" and argv and not argv[0].startswith("-") and "=" not in argv[0]:
        raise _no_setting(argv[0])
    return parser.parse_intermixed_args(argv)


def overrides(args: argparse.Namespace) -> list[Override]:
    """The `key=value` overrides that flags and settings stand for.

    Raises:
        BadInput: a key is set twice, or a section as a whole after a key of it.
    """
    result: dict[str, str] = {}
    by: dict[str, str] = {}
    for flag in FLAGS:
        value = getattr(args, _dest(flag.name), None)
        if value is None:
            continue
        _once(by, flag.key, flag.name)
        if flag.several and len(value) == 1:
            value = value[0]
        result[flag.key] = as_yaml(value) if flag.text else value
        if flag.clears:
            result[flag.clears] = "null"
    for setting in args.settings:
        key, eq, value = setting.partition("=")
        if not eq:
            raise _no_setting(setting)
        _once(by, key, setting)
        # `run=007` and `data_gpu=0` are texts, as the flags' values are.
        result[key] = (
            as_yaml(value)
            if _is_text(key) and value not in ("", "null", "~") and value[0] not in "\"'[{"
            else value
        )
    return [_override(key, value, by.get(key, "")) for key, value in result.items()]


def answers(args: argparse.Namespace) -> list[str]:
    """What to tell a user of the predecessor's flags."""
    return [
        f"{name}: {answer}"
        for name, (_, answer) in ANSWERED.items()
        if getattr(args, _dest(name), None)
    ]


def _dest(name: str) -> str:
    return name[2:].replace("-", "_")


def _is_text(key: str) -> bool:
    return any(f.key == key and f.text for f in FLAGS)


def _override(key: str, value: str, what: str) -> Override:
    result = Override(f"{key}={value}")
    result.flag = what if what.startswith("--") else ""
    return result


def _once(by: dict[str, str], key: str, what: str) -> None:
    if key in by:
        raise BadInput(f"{by[key]} and {what} both set {key}; give one")
    for other in by:
        if other.startswith(f"{key}."):
            raise BadInput(f"{what} sets all of {key} and would undo {by[other]}; give one")
    by[key] = what


def _no_setting(word: str) -> BadInput:
    near = difflib.get_close_matches(word, COMMANDS, 1, 0.6)
    hint = (
        f"; did you mean `launch.py {near[0]}`?"
        if near and near[0] != word
        else "; a command comes first"
        if near
        else ""
    )
    return BadInput(
        f"'{word}' is no command, flag or key=value; `launch.py --help` lists them, configs/ shows"
        f" the keys{hint}"
    )


@dataclass(frozen=True)
class Command:
    """A subcommand: what it runs, the flags of the table it takes (None: all), and its own."""

    run: Callable[[argparse.Namespace], int]
    flags: tuple[str, ...] | None
    own: dict[str, dict] | None = None
    words: tuple[str, str] | None = KEY_VALUE  # as of `build`


def switch(text: str) -> dict:
    """argparse's options for a flag without a value."""
    return {"action": "store_true", "help": text}


def version(root: Path) -> str:
    """This project's version from pyproject.toml in `root`, and TensorFlow's without loading it."""
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    ours = re.search(r'^version = "([^"]+)"', text, re.M)[1]
    found = {n: v for n in ("tensorflow", "tensorflow-cpu") if (v := _installed(n))}
    return ", ".join((f"xtts-trainer {ours}", *(f"{n} {v}" for n, v in found.items())))


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
