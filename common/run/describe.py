"""Describes every setting, from the texts in `settings.py`: for `launch.py config`, for
docs/settings.md, and as a JSON schema for editors.
"""

from __future__ import annotations

import difflib
import json
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from common.run.settings import Config
from common.system.errors import BadInput

# Sections that decide what is trained: with another value, a run folder holds another run.
IDENTITY_SECTIONS = ("seed", "data", "text", "model", "batching", "augment")
_NO_IDENTITY = ("data.scan_threads",)
_WORDS = {int: "integer", float: "number", str: "text", bool: "true or false", dict: "mapping"}
_SIGNS = {
    annotated_types.Ge: ("≥", "ge"),
    annotated_types.Gt: (">", "gt"),
    annotated_types.Le: ("≤", "le"),
    annotated_types.Lt: ("<", "lt"),
}


@dataclass(frozen=True)
class Entry:
    """One setting, or a section of them (`section`). The key of a list's items ends in `[]`."""

    key: str
    kind: str
    default: str
    meaning: str
    section: bool = False
    choices: tuple[str, ...] = ()  # its values as they are written, where they are few

    @property
    def takes_effect(self) -> str:
        """Which runs a new value affects."""
        first = self.key.split(".")[0]
        if self.key in _NO_IDENTITY or first not in (*IDENTITY_SECTIONS, "threads"):
            return "at the next start, of existing runs too"
        if first == "threads":
            return "in new runs: fixed when a run is created"
        return "in new runs: part of what a run is, so a changed value needs a new folder"


def entries() -> list[Entry]:
    """Every section and setting, in the tree's order."""
    return list(_entries(Config, ""))


def _entries(model: type[BaseModel], prefix: str) -> Iterator[Entry]:
    for name, field in model.model_fields.items():
        key, meaning = f"{prefix}{name}", _one_line(field.description or "")
        part = _section(field.annotation)
        if part is None:
            choices = tuple(_choices(field.annotation))
            yield Entry(key, _kind(field), _default(field), meaning, choices=choices)
            continue
        is_list = typing.get_origin(field.annotation) is list
        meaning = meaning or _one_line(part.__doc__ or "")
        yield Entry(key, "list" if is_list else "section", _default(field), meaning, not is_list)
        yield from _entries(part, f"{key}[]." if is_list else f"{key}.")


def _section(annotation: Any) -> type[BaseModel] | None:
    kinds = (annotation, *typing.get_args(annotation))
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def _kind(field: FieldInfo) -> str:
    text, limits = _type(field.annotation), []
    for rule in field.metadata:
        if type(rule) in _SIGNS:
            sign, name = _SIGNS[type(rule)]
            limits.append(f"{sign} {_figure(getattr(rule, name))}")
    return f"{text} {', '.join(limits)}" if limits else text


def _type(annotation: Any) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _kind(FieldInfo.from_annotation(annotation))
    if annotation is types.NoneType:
        return "null"
    if origin is typing.Literal:
        return ", ".join(json.dumps(a) if a in ("", True, False) else str(a) for a in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(a) for a in args)
    if origin is list:
        return f"list of {_type(args[0])}"
    return _WORDS.get(origin or annotation, getattr(annotation, "__name__", str(annotation)))


def _choices(annotation: Any) -> Iterator[str]:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        yield from (json.dumps(a) if isinstance(a, bool) else a for a in args if a != "")
    elif origin in (typing.Union, types.UnionType):
        for a in args:
            yield from _choices(a)
    elif annotation is bool:
        yield from ("true", "false")
    elif annotation is types.NoneType:
        yield "null"


def _figure(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "none: you have to give it"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return ""
    if isinstance(value, float):
        return _figure(value)
    return json.dumps(value, ensure_ascii=False)


def text_of(keys: list[str]) -> str:
    """The text that `launch.py config KEY…` prints; without keys, every section.

    BadInput: an unknown key; the message names the nearest one.
    """
    known = {e.key.replace("[]", ""): e for e in entries()}
    if not keys:
        lines = [f"{e.key:28}{e.meaning}" for e in known.values() if "." not in e.key]
        return "\n".join([*lines, "", "launch.py config SECTION lists the settings of a section"])
    blocks = []
    for key in keys:
        if key not in known:
            last = key.rpartition(".")[2]
            near = [k for k in known if k.rpartition(".")[2] == last]
            near = near or difflib.get_close_matches(key, known, 1, 0.5)
            hint = (
                f"; did you mean {' or '.join(near)}?"
                if near
                else "; `launch.py config` lists them"
            )
            raise BadInput(f"no setting is called {key!r}{hint}")
        inner = [e for k, e in known.items() if k.startswith(f"{key}.")]
        blocks.append(_block(known[key]))
        blocks += [_block(e) for e in inner if not e.section]
    return "\n\n".join(blocks)


def _block(e: Entry) -> str:
    if e.section:
        return f"{e.key}: {e.meaning}"
    lines = (f"type       {e.kind}", f"default    {e.default}", f"effective  {e.takes_effect}")
    return "\n  ".join((e.key, e.meaning, *lines))


def schema() -> str:
    """The JSON schema of a settings file."""
    tree = Config.model_json_schema()
    tree["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    for where, name in _plain_values():
        # `data.train: folder` stands for `[{path: folder}]`.
        field = tree["$defs"][where]["properties"][name]
        items = field.pop("items")
        one = {"anyOf": [{"type": "string"}, items]}
        field.pop("type")
        field["anyOf"] = [{"type": "array", "items": one}, *one["anyOf"]]
    for name in ("run", "data_gpu", "model_gpu"):  # texts that may look like numbers
        field = tree["properties"][name]
        kinds = field.pop("anyOf", [{"type": field.pop("type", "string")}])
        field["anyOf"] = [*kinds, {"type": "integer"}]
    return json.dumps(tree, indent=1, ensure_ascii=False) + "\n"


def _plain_values() -> list[tuple[str, str]]:
    return [("Data", "train"), ("Data", "val"), ("Samples", "texts")]


def page() -> str:
    """docs/settings.md."""
    found = entries()
    out = [
        "# Settings",
        "",
        "Written by `python launch.py config --page` from `common/run/settings.py`; a test holds it"
        " current. In a terminal:",
        "",
        "    python launch.py config train.optim.learning_rate",
        "",
        "Put a setting into a settings file (`configs/`), or give it as `key=value` on the command"
        " line. Settings of `data`, `text`, `model`, `batching`, `augment` and the `seed` are part"
        " of a run's identity: a changed value needs a new run folder. Those of `threads` are fixed"
        " when a run is created. All others take effect at the next start, also of a run that"
        " exists.",
        "",
        "Editors complete and check files of settings that begin with the line that those in"
        " `configs/` have; it names `configs/schema.json`, which `launch.py config --schema`"
        " writes.",
    ]
    sections = [Entry("", "section", "", "A whole run", True), *(e for e in found if e.section)]
    for s in sections:
        prefix = f"{s.key}." if s.key else ""
        own = [
            e
            for e in found
            if not e.section
            and e.key.startswith(prefix)
            and "." not in e.key.removeprefix(prefix).replace("[].", "")
        ]
        title = f"`{s.key}`: {s.meaning.rstrip('.')}" if s.key else s.meaning
        out += [
            "",
            f"## {title}",
            "",
            "| setting | type | default | meaning |",
            "|---|---|---|---|",
        ]
        out += [
            f"| `{e.key}` | {_cell(e.kind)} | {_cell(e.default)} | {_cell(e.meaning)} |"
            for e in own
        ]
    return "\n".join(out) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
