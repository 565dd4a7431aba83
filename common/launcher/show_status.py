"""The command status: what each process of a run is doing, once, again and again, or as JSON."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.live import Live

from common.launcher import resolve
from common.system import status
from common.system.errors import OK, BadInput

FLAGS = {
    "--json": {"action": "store_true", "help": "print JSON (docs/operations.md explains it)"},
    "--watch": {"action": "store_true", "help": "keep showing it until the run ends"},
    "--every": {
        "metavar": "S",
        "type": float,
        "default": 2.0,
        "help": "with --watch: seconds between updates (2)",
    },
}


def run(args: argparse.Namespace, tell: Callable[[str], None]) -> int:
    """Show a run's status. BadInput: no process has reported in that folder."""
    if args.json and args.watch:
        raise BadInput("--json and --watch exclude each other; give one")
    if not args.every > 0:
        raise BadInput(f"--every must be positive, not {args.every:g}")
    run_dir = resolve.run_dir_of(args)
    if not status.read_all(run_dir):
        raise BadInput(f"no process has reported in {run_dir}; --run names the run folder")
    if args.json:
        tell(json.dumps(status.as_json(run_dir), ensure_ascii=False, indent=1))
        return OK
    view = Console(width=None if sys.stdout.isatty() else 160, markup=False)
    if not args.watch:
        view.print(status.table(run_dir))
        return OK
    with Live(status.table(run_dir), console=view, auto_refresh=False) as live:
        while any(s.alive for s in status.read_all(run_dir)):
            time.sleep(args.every)
            live.update(status.table(run_dir), refresh=True)
    return OK
