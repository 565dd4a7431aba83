"""What users write: the command line's flags (one table from flag to config key, and the parser built from it), `key=value`
settings, YAML; and how a fault in these is told."""

from __future__ import annotations

import argparse
import difflib
import json
import re
from dataclasses import dataclass
from typing import Any, NoReturn

import yaml
from pydantic import BaseModel, ValidationError

from common.errors import BadInput


@dataclass(frozen=True)
class Flag:
    """`--name VALUE` sets the config key `key`. `clears`: a key that would hide the value is set to null."""

    name: str
    key: str
    help: str
    text: bool = False  # the value is text even where it looks like a number
    several: bool = False  # may be repeated: a list
    clears: str = ""


FLAGS = (
    Flag("--run", "run", "the run folder", text=True),
    Flag("--checkpoint-dir", "run", "the run folder (its checkpoints are in DIR/checkpoints)", text=True),
    Flag("--data-gpu", "data_gpu", "GPU of the producers: 0, a UUID, cpu; 0,2 = two devices, producers go round-robin", text=True),
    Flag("--model-gpu", "model_gpu", "GPU of the trainer: 1, a UUID, cpu", text=True),
    Flag("--num-producers", "producers.count", "producer processes"),
    Flag("--num-workers", "producers.decode_threads", "decode threads per producer"),
    Flag("--buffer-size", "transport.high_water_mark", "the most batches in existence between producers and step"),
    Flag("--batch-size", "batching.batch_size", "utterances per batch", clears="batching.positions_per_batch"),
    Flag("--train-data", "data.train", "a corpus: folder or metadata file; may be repeated", text=True, several=True),
    Flag("--val-data", "data.val", "a corpus for evaluation; may be repeated", text=True, several=True),
    Flag("--epochs", "train.epochs", "epochs of stage 2 (the GPT)"),
    Flag("--max-steps", "train.max_steps", "steps of stage 2, if that is fewer"),
    Flag("--seed", "seed", "the run's seed"),
)

# Flags of the predecessor that need no setting any more: name → (takes a value, answer).
ANSWERED = {
    "--model-start-delay": (True, "replaced by readiness: step 1 starts when `min_ready` batches wait"),
    "--enable-static-shapes": (False, "always on"),
    "--enable-memory-isolation": (False, "always on"),
    "--resume": (False, "always on: an existing run of the same identity resumes"),
}

# launch.py's table, for the nearest name to a misspelt one.
COMMANDS = (
    "train", "trainer", "producer", "bundle", "scan", "check", "profile", "status", "stop", "synthesize", "import-coqui", "export-coqui",
)  # fmt: skip


class Override(str):
    """A `key=value` text that knows the flag it came from; "" for a setting."""

    flag: str = ""


class NoSection(BadInput):
    """An override runs through a value that is no section."""


class _Once(argparse.Action):
    """Stores a value, as argparse's own `store`, but does not drop that of an earlier flag of the same name."""

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
        words = [w.split("=")[0] for w in message.split() if w.startswith("--")] if "unrecognized" in message else []
        near = [n for w in words for n in difflib.get_close_matches(w, self._option_string_actions, 1, 0.6)]
        hint = f"; did you mean {', '.join(near)}?" if near else f"; `{self.prog} --help` lists the flags"
        raise BadInput(message + hint)


def build(prog: str, help_text: str, names: tuple[str, ...] | None) -> Parser:
    """A parser with `--config`, the flags of `names` (None: all of the table) and key=value settings."""
    parser = Parser(prog=prog, description=help_text, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = "the named run's; for data.train=… those of configs/ljspeech.yaml; else of configs/demo.yaml"
    parser.add_argument("--config", metavar="FILE", help=f"settings of the run (default: {which})")
    group = parser.add_argument_group("flags, and the config keys they set")
    for flag in FLAGS:
        if names is None or flag.name in names:
            action = "append" if flag.several else "store"
            group.add_argument(flag.name, dest=_dest(flag.name), metavar="X", action=action, help=f"{flag.help}  [{flag.key}]")
    if names is None:
        for name, (takes_value, answer) in ANSWERED.items():
            kind = {"metavar": "X"} if takes_value else {"action": "store_true"}
            group.add_argument(name, dest=_dest(name), help=answer, **kind)
    parser.add_argument("settings", nargs="*", metavar="key=value", help="any config key, e.g. train.optim.learning_rate=1e-5")
    return parser


def parse(parser: Parser, argv: list[str]) -> argparse.Namespace:
    """Parse; flags and key=value settings may come in any order. BadInput: anything the parser does not know, a flag given twice."""
    # A misspelt command is told before its flags are, which the parser that runs in its place does not know.
    if parser.prog == "launch.py" and argv and not argv[0].startswith("-") and "=" not in argv[0]:
        raise _no_setting(argv[0])
    return parser.parse_intermixed_args(argv)


def overrides(args: argparse.Namespace) -> list[Override]:
    """The `key=value` overrides that flags and settings amount to.

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
        # `run=007` and `data_gpu=0` are texts, as with the flags.
        result[key] = as_yaml(value) if _is_text(key) and value not in ("", "null", "~") and value[0] not in "\"'[{" else value
    return [_override(key, value, by.get(key, "")) for key, value in result.items()]


def answers(args: argparse.Namespace) -> list[str]:
    """What to tell a user of the predecessor's flags."""
    return [f"{name}: {answer}" for name, (_, answer) in ANSWERED.items() if getattr(args, _dest(name), None)]


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
    hint = f"; did you mean `launch.py {near[0]}`?" if near and near[0] != word else "; a command comes first" if near else ""
    return BadInput(f"'{word}' is no command, flag or key=value; `launch.py --help` lists them, configs/ shows the keys{hint}")


# -- settings as text -----------------------------------------------------------------------------------------------------------


def as_yaml(value: str | list[str]) -> str:
    """YAML that means these texts: JSON, but for characters beyond 16 bits, which YAML does not write as two surrogates."""
    pair = re.compile(r"\\ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2}")
    return pair.sub(lambda m: f"\\U{ord(json.loads(chr(34) + m.group() + chr(34))):08x}", json.dumps(value))


def read_yaml(text: str, where: str) -> Any:
    """The plain values of a YAML text. Merge keys (`<<`) are as in YAML: the keys beside them win.

    Raises:
        BadInput: a key is given twice in one mapping, of which YAML would keep the last alone.
        yaml.YAMLError, ValueError: it is not YAML.
    """
    loader = yaml.SafeLoader(text)
    loader.name = where  # in YAML's own messages
    try:
        node = loader.get_single_node()
        twice = [] if node is None else list(_twice(node, (), set()))
        if twice:
            raise BadInput("\n".join(f"{where}: {line}" for line in twice))
        return None if node is None else loader.construct_document(node)
    finally:
        loader.dispose()


def _twice(node: yaml.Node, path: tuple[str, ...], seen: set[int]):
    """What to say of the keys that mappings in `node` repeat. Before construction, which adds merged keys to the nodes."""
    if id(node) in seen:  # an alias
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            yield from _twice(value, (*path, str(i)), seen)
    elif isinstance(node, yaml.MappingNode):
        first: dict[tuple[str, str], yaml.Node] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            merge = key.tag == "tag:yaml.org,2002:merge"
            name = path if merge else (*path, key.value)
            earlier = key if merge else first.setdefault((key.tag, key.value), key)
            if earlier is not key:
                a, b = earlier.start_mark.line + 1, key.start_mark.line + 1
                what = "put all its keys under one" if isinstance(value, yaml.MappingNode) else "keep one"
                yield f"'{'.'.join(name)}' is given twice, on {f'lines {a} and {b}' if a != b else f'line {a}'}; {what}"
            yield from _twice(value, name, seen)


def set_override(tree: dict, override: str) -> str:
    """Apply one `a.b=value` to a nested dict; the value is YAML, so `null`, `3`, `[a, b]` mean what they mean in a file.

    Returns:
        The key from which on the tree is the override's own: `a.b`, or `a` where there was none.

    Raises:
        BadInput: the text has no `=`, or its value is not YAML.
        NoSection: the path runs through a value that is no section.
    """
    key, eq, text = override.partition("=")
    if not eq or not key or key.startswith("-"):
        raise BadInput(f"'{override}' is neither a flag nor key=value; --help lists the flags, configs/ shows the keys")
    try:
        value = read_yaml(text, override)
    except (yaml.YAMLError, ValueError) as e:
        raise BadInput(f"{override}: the value is not YAML: {e}") from e
    *parents, last = key.split(".")
    own = key
    for i, p in enumerate(parents):
        path, section = ".".join(parents[: i + 1]), tree.get(p)
        if section is None:
            section, own = {}, min(own, path, key=len)
        if not isinstance(section, dict):
            raise NoSection(f"{override}: '{path}' is not a section, its value is {section!r}; set '{path}' itself")
        tree[p] = dict(section)  # a copy: keys of a file may share it (&anchor, *alias)
        tree = tree[p]
    tree[last] = value
    return own


# -- faults in settings ---------------------------------------------------------------------------------------------------------


def explain(error: ValidationError, model: type[BaseModel], where: str, by: dict[str, str]) -> str:
    """A line for each fault in the settings of `model`, with the nearest known name.

    `by` holds the keys that were set elsewhere than in `where`, and by what.
    """
    lines = []
    for e in error.errors():
        loc = e["loc"]
        key = _dotted(loc)
        at = next((by[k] for k in (_dotted(loc[:n]) for n in range(len(loc), 0, -1)) if k in by), where)
        section = _section(model, loc) if e["type"] == "model_type" else None
        if e["type"] == "extra_forbidden":
            lines.append(f"{at}: unknown key '{key}'{_nearest(model, loc)}")
        elif section:
            hint = f"its keys are {_keys(section)}{_example(section, key, e['input'])}"
            lines.append(f"{at}: {key} is a section: {hint} (got {e['input']!r})")
        else:
            lines.append(f"{at}: {key}: {e['msg']} (got {e['input']!r})")
    return "\n".join(lines)


def _dotted(loc: tuple) -> str:
    return ".".join(str(part) for part in loc)


def _section(model: type[BaseModel], loc: tuple) -> type[BaseModel] | None:
    """The section that `loc` names; None where it names none."""
    found: type[BaseModel] | None = model
    for part in (p for p in loc if not isinstance(p, int)):  # an int is a place in a list
        f = found.model_fields.get(part) if found else None
        kinds = (f.annotation, *getattr(f.annotation, "__args__", ())) if f else ()
        found = next((a for a in kinds if isinstance(a, type) and issubclass(a, BaseModel)), None)
    return found


def _nearest(model: type[BaseModel], loc: tuple) -> str:
    """ "; did you mean 'a.x'?" for the last name of `loc`, or the names that exist there."""
    section = _section(model, loc[:-1])
    if section is None:
        return ""
    names, last = list(section.model_fields), str(loc[-1])
    if "." in last and last.split(".")[0] in names:  # as on the command line
        nested = ": {".join(last.split(".")) + ": …" + "}" * last.count(".")
        return f"; keys with dots are for the command line: write {nested}"
    near = difflib.get_close_matches(last, names, 1, 0.5)
    return f"; did you mean '{_dotted((*loc[:-1], near[0]))}'?" if near else f"; known here: {', '.join(names)}"


def _keys(section: type[BaseModel], most: int = 8) -> str:
    names = list(section.model_fields)
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


def _example(section: type[BaseModel], key: str, value: Any) -> str:
    """ "; for example a.b=value": the first key that takes the value that was given for all, else the first with a plain default."""
    plain = isinstance(value, (str, int, float)) and not isinstance(value, bool)
    for candidate, text in ((value, f"{value}"), ([value], f"[{value}]")) if plain else ():
        for name in section.model_fields:
            try:
                section.model_validate({name: candidate})
            except ValidationError:
                continue
            return f"; for example {key}.{name}={text}"
    fields = section.model_fields.items()
    if any(f.is_required() for _, f in fields):  # no default makes a section of these
        return ""
    defaults = [(name, f.default) for name, f in fields if isinstance(f.default, (str, int, float)) and not isinstance(f.default, bool)]
    return f"; for example {key}.{defaults[0][0]}={defaults[0][1]}" if defaults else ""
