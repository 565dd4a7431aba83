"""The commands report and serve: a run's page as a file, and live in a browser."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from common.launcher import resolve
from common.system.errors import OK, BadInput, Stopped

FLAGS = {
    "--compare": {
        "metavar": "RUN",
        "nargs": "+",
        "help": "put several run folders on one page, instead of --run",
    },
    "--out": {
        "metavar": "FILE",
        "help": "with --compare: the page to write (default: comparison.html)",
    },
    "--audio": {
        "choices": ("embed", "files"),
        "default": "embed",
        "help": "embed: the sounds are in the page, as Opus; files: the page plays the run's WAVs",
    },
}

SERVE_FLAGS = {
    "--host": {
        "metavar": "ADDRESS",
        "default": "127.0.0.1",
        "help": "where to listen (127.0.0.1: this machine only; others require a token)",
    },
    "--port": {"metavar": "N", "type": int, "default": 8600, "help": "its port (8600); 0: any"},
}


def run(args: argparse.Namespace, tell: Callable[[str], None]) -> int:
    """Write the page and say where it is."""
    from trainer.page import report  # imported here, since every command loads this file

    if args.compare:
        if args.run:
            raise BadInput("--run and --compare exclude each other; name every run after --compare")
        tell(str(report.write_comparison(args.compare, args.out or "comparison.html", args.audio)))
        return OK
    if args.out:
        raise BadInput("--out goes with --compare; one run's page is RUN/report.html")
    path = report.write(resolve.run_dir_of(args), args.audio)
    tell(f"{path} ({Path(path).stat().st_size / 1e6:.1f} MB)")
    return OK


def serve(args: argparse.Namespace, tell: Callable[[str], None]) -> int:
    """Serve until Ctrl-C or SIGTERM: both are its ordinary end."""
    from trainer.page.serve import server_of

    server = server_of(resolve.run_dir_of(args), args.host, args.port)
    host, port = server.server_address[:2]
    host = f"[{host}]" if ":" in host else host
    token = f"?token={server.token}" if server.token else ""
    try:
        with server:
            tell(f"http://{host}:{port}/{token}   (Prometheus: /metrics{token}; Ctrl-C ends it)")
            server.serve_forever()
    except (KeyboardInterrupt, Stopped):
        tell("ended; the run goes on")
    return OK
