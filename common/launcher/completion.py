"""Completion of the command line by the shell: commands, flags, names of settings and their values.

The shell asks by running launch.py with _ARGCOMPLETE in the environment (argcomplete).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping

from common.launcher import flags


def asked(environ: Mapping[str, str]) -> bool:
    """Whether this process was started to complete a line."""
    return "_ARGCOMPLETE" in environ


def complete(parser_of: Callable[[str], flags.Parser], commands: Collection[str]) -> None:
    """Answer the shell, and end the process.

    Args:
        parser_of: of a command.
        commands: by name; a line without one is for `train`.
    """
    import argcomplete

    line = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])]
    command, line, begins = parts(line, commands)
    os.environ["COMP_LINE"], os.environ["COMP_POINT"] = line, str(len(line))
    parser = parser_of(command or "train")
    for action in parser._actions:
        if action.dest == "settings":
            offered = tuple(commands) if begins else ()
            action.completer = _Words(offered, action.metavar == "FOLDER")
    argcomplete.autocomplete(parser, always_complete_options="long")


def parts(line: str, commands: Collection[str]) -> tuple[str | None, str, bool]:
    """(the line's command, the line without it, whether its first word is being written)."""
    found = re.match(r"(.*?\blaunch\.py\s+)(?:(\S+)(\s.*))?", line, re.DOTALL)
    if found is None or found[2] is None:
        return None, line, True
    if found[2] not in commands:
        return None, line, False
    return found[2], found[1] + found[3].lstrip(), False


class _Words:
    """Completer of the words without a flag."""

    def __init__(self, commands: tuple[str, ...], folders: bool):
        self._commands, self._folders = commands, folders

    def __call__(self, prefix: str, **context) -> list[str]:
        from argcomplete.completers import DirectoriesCompleter

        found = [c for c in self._commands if c.startswith(prefix)]
        if self._folders and "=" not in prefix:
            found += DirectoriesCompleter()(prefix, **context)
        return found + settings(prefix)


def settings(prefix: str) -> list[str]:
    """`key=` of the settings that begin so; behind `key=`, its values where they are few."""
    from common.run import describe

    key, given, value = prefix.partition("=")
    leaves = [e for e in describe.entries() if not e.section and "[]" not in e.key]
    if not given:
        return [f"{e.key}=" for e in leaves if e.key.startswith(key)]
    values = next((e.choices for e in leaves if e.key == key), ())
    return [f"{key}={v}" for v in values if v.startswith(value)]
