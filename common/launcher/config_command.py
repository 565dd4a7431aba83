"""The command config: explain the settings."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from common.run import describe
from common.system.errors import OK, BadInput

WORDS = ("KEY", "a setting or a section: train, train.keep")
FLAGS = {
    "--schema": {"action": "store_true", "help": "print the JSON schema of settings files"},
    "--page": {"action": "store_true", "help": "print docs/settings.md"},
}


def run(args: argparse.Namespace, tell: Callable[[str], None]) -> int:
    """Print what the flags ask for."""
    if args.schema + args.page + bool(args.settings) > 1:
        raise BadInput("keys, --schema and --page exclude each other; give one")
    if args.schema or args.page:
        tell((describe.schema() if args.schema else describe.page()).rstrip("\n"))
    else:
        tell(describe.text_of(args.settings))
    return OK
