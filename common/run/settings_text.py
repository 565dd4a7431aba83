"""Settings as text: YAML and `key=value` overrides, read strictly, and how faults in them are
reported.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from common.system.errors import BadInput
from common.system.files import open_plain

RENAMED = {"model.coqui_init": "model.parity_init"}  # keys in the config.yaml of older runs


MOST_CHARACTERS = 256 << 10
_MOST_DEPTH, _MOST_VALUES, _MOST_PLAIN = 32, 20_000, 4000


class NoSection(BadInput):
    """An override's path runs through a value that is not a section."""


def as_yaml(value: str | list[str]) -> str:
    """YAML for these texts: JSON, except for characters beyond 16 bits, which YAML does not write
    as two surrogates.
    """
    pair = re.compile(r"\\ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2}")
    return pair.sub(
        lambda m: f"\\U{ord(json.loads(chr(34) + m.group() + chr(34))):08x}", json.dumps(value)
    )


def read_yaml(text: str, where: str) -> Any:
    """The plain values of a YAML text. Merge keys (`<<`) are as in YAML: the keys beside them win.

    Raises:
        BadInput: a key appears twice in one mapping, where YAML would keep only the last; or the
        text is too large for settings: in bytes, in depth, or with its aliases expanded.
        yaml.YAMLError, ValueError: it is not YAML.
    """
    _check_size(text, where)
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


def bounded_bytes(path: str | os.PathLike) -> bytes:
    """Read a settings file. OSError: it cannot be read. BadInput: too large for settings."""
    with open_plain(path) as file:
        data = file.read(4 * MOST_CHARACTERS + 1)
    if len(data) > 4 * MOST_CHARACTERS:
        raise BadInput(f"{path}: larger than {4 * MOST_CHARACTERS >> 10} kB: no settings")
    return data


def _check_size(text: str, where: str) -> None:
    """Check by the parser's events, which cost no more than the text, before building anything."""
    if len(text) > MOST_CHARACTERS:
        raise BadInput(f"{where}: larger than {MOST_CHARACTERS >> 10} kB: no settings")
    open_nodes: list[tuple[str | None, int]] = []  # (anchor, values before it)
    sizes: dict[str, int] = {}  # size of what an anchor names, with its aliases expanded
    count = 0
    for event in _events(text, where):
        anchor = getattr(event, "anchor", None)
        if isinstance(event, yaml.AliasEvent):
            if anchor in (name for name, _ in open_nodes):
                raise BadInput(f"{where}: *{anchor} stands within &{anchor} itself")
            count += sizes.get(anchor, 1)
        elif isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
            open_nodes.append((anchor, count))
            count += 1
        elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            anchor, before = open_nodes.pop()
            sizes[anchor or ""] = count - before
        elif isinstance(event, yaml.ScalarEvent):
            count += 1
            sizes[anchor or ""] = 1
            if event.implicit[0] and len(event.value) > _MOST_PLAIN:
                raise BadInput(f"{where}: a value of {len(event.value)} characters: no settings")
        if len(open_nodes) > _MOST_DEPTH:
            raise BadInput(f"{where}: nested more than {_MOST_DEPTH} deep: no settings")
        if count > _MOST_VALUES:
            raise BadInput(
                f"{where}: more than {_MOST_VALUES} values, aliases written out: no settings"
            )


def _events(text: str, where: str) -> Iterator[yaml.Event]:
    loader = yaml.SafeLoader(text)
    loader.name = where
    try:
        while loader.check_event():
            yield loader.get_event()
    finally:
        loader.dispose()


def _twice(node: yaml.Node, path: tuple[str, ...], seen: set[int]):
    """Yield an error text for each key that a mapping in `node` repeats.

    Call it before construction, which adds merged keys to the nodes.
    """
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
                what = (
                    "put all its keys under one"
                    if isinstance(value, yaml.MappingNode)
                    else "keep one"
                )
                yield (
                    f"'{'.'.join(name)}' is given twice, on"
                    f" {f'lines {a} and {b}' if a != b else f'line {a}'}; {what}"
                )
            yield from _twice(value, name, seen)


def set_override(tree: dict, override: str) -> str:
    """Apply one `a.b=value` to a nested dict; the value is YAML, so `null`, `3`, `[a, b]` mean the
    same as in a file.

    Returns:
        The key below which everything comes from the override: `a.b`, or `a` if it was new.

    Raises:
        BadInput: the text has no `=`, or its value is not YAML.
        NoSection: the path runs through a value that is not a section.
    """
    key, eq, text = override.partition("=")
    if not eq or not key or key.startswith("-"):
        raise BadInput(
            f"'{override}' is neither a flag nor key=value; --help lists the flags, configs/ shows"
            " the keys"
        )
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
            raise NoSection(
                f"{override}: '{path}' is not a section, its value is {section!r}; set '{path}'"
                " itself"
            )
        tree[p] = dict(section)  # a copy: several keys of a file may share it (&anchor, *alias)
        tree = tree[p]
    tree[last] = value
    return own


def explain(error: ValidationError, model: type[BaseModel], where: str, by: dict[str, str]) -> str:
    """One line for each fault in the settings of `model`, with the nearest known name.

    `by`: the keys that were set elsewhere than in `where`, and what set them.
    """
    lines = []
    for e in error.errors():
        loc = e["loc"]
        key = _dotted(loc)
        at = next(
            (by[k] for k in (_dotted(loc[:n]) for n in range(len(loc), 0, -1)) if k in by), where
        )
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
    """The section that `loc` names; None if it names none."""
    found: type[BaseModel] | None = model
    for part in (p for p in loc if not isinstance(p, int)):  # an int is an index into a list
        f = found.model_fields.get(part) if found else None
        kinds = (f.annotation, *getattr(f.annotation, "__args__", ())) if f else ()
        found = next((a for a in kinds if isinstance(a, type) and issubclass(a, BaseModel)), None)
    return found


def _nearest(model: type[BaseModel], loc: tuple) -> str:
    """ "; did you mean 'a.x'?" for the last name of `loc`, else the names that exist there."""
    section = _section(model, loc[:-1])
    if section is None:
        return ""
    names, last = list(section.model_fields), str(loc[-1])
    if "." in last and last.split(".")[0] in names:  # as on the command line
        nested = ": {".join(last.split(".")) + ": …" + "}" * last.count(".")
        return f"; keys with dots are for the command line: write {nested}"
    near = difflib.get_close_matches(last, names, 1, 0.5)
    return (
        f"; did you mean '{_dotted((*loc[:-1], near[0]))}'?"
        if near
        else f"; known here: {', '.join(names)}"
    )


def _keys(section: type[BaseModel], most: int = 8) -> str:
    names = list(section.model_fields)
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


def _example(section: type[BaseModel], key: str, value: Any) -> str:
    """ "; for example a.b=value": the first key that takes the value given for the section, else
    the first with a plain default.
    """
    plain = isinstance(value, (str, int, float)) and not isinstance(value, bool)
    for candidate, text in ((value, f"{value}"), ([value], f"[{value}]")) if plain else ():
        for name in section.model_fields:
            try:
                section.model_validate({name: candidate})
            except ValidationError:
                continue
            return f"; for example {key}.{name}={text}"
    fields = section.model_fields.items()
    if any(f.is_required() for _, f in fields):  # one value does not make such a section
        return ""
    defaults = [
        (name, f.default)
        for name, f in fields
        if isinstance(f.default, (str, int, float)) and not isinstance(f.default, bool)
    ]
    return f"; for example {key}.{defaults[0][0]}={defaults[0][1]}" if defaults else ""


def renamed(tree: dict, where: str) -> dict:
    """The tree with today's key names; runs keep the config.yaml that they were created with.

    BadInput: a key appears under both names.
    """
    for old, new in RENAMED.items():
        section, name = old.split(".")
        values = tree.get(section)
        if isinstance(values, dict) and name in values:
            values = dict(values)
            value, now = values.pop(name), new.split(".")[1]
            if values.setdefault(now, value) != value:
                raise BadInput(
                    f"{where}: {old} is called {new} now, and both are set: {value} and"
                    f" {values[now]}; leave {old} out"
                )
            tree = {**tree, section: values}
    return tree


def leaves(tree, prefix: str = "") -> dict[str, Any]:
    """A tree of settings as {"a.b": value}."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {
        k: v
        for name, sub in tree.items()
        for k, v in leaves(sub, f"{prefix}.{name}" if prefix else name).items()
    }


def flat(tree, prefix: str = "") -> dict[str, str]:
    """A tree of settings as {"a.b": repr(value)}."""
    return {k: repr(v) for k, v in leaves(tree, prefix).items()}
