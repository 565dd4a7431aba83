"""The command scan: what of a corpus is usable, and why the rest is not."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from common.audio import notes
from common.run import beginning
from common.run.settings import Config
from common.system.errors import OK, BadInput
from producer.corpus.figures import Figures
from producer.corpus.journal import place_of
from producer.corpus.page.render import write_page
from producer.corpus.report import Report
from producer.corpus.rows import read_rows
from producer.corpus.scan import scan
from producer.creation.prepare import make_vocabulary


def run(args: argparse.Namespace, config: Config, tell: Callable[[str], None]) -> int:
    """Print what is found, or write it as a page.

    BadInput: no such corpus; with --strict, a row is rejected.
    """
    if args.html and not Path(args.html).absolute().parent.is_dir():
        raise BadInput(f"--html {args.html}: no such folder; make it first")
    made = [Path(s.path) for s in config.data.train if s.format == "demo"]
    made = [path for path in made if not path.exists()]
    with tempfile.TemporaryDirectory(prefix="scan-") as folder:
        path = Path(folder) / "manifest.sqlite"
        report = _scan(config, path, progress=not args.json)
        figures = Figures.of(path, config) if args.json or args.html else None
        if args.html:
            with notes.dropped():  # it plays some of the recordings
                write_page(report, figures, path, Path(args.html))
    if args.json:
        tell(json.dumps(report.to_json() | figures.to_json(), ensure_ascii=False))
    else:
        report.print(Console(), texts=args.texts)
        if args.html:
            tell(f"report: {args.html}")
        for path in made:
            tell(
                f"{_megabytes(path):.0f} MB written into {path}: the demo corpus was not there yet"
            )
    if args.strict:
        report.require_all()
    return OK


def _scan(config: Config, path: Path, progress: bool) -> Report:
    rows = read_rows(config)
    weights = config.model.weights
    start = None if weights is None else beginning.locate(weights, verify=False)
    tokenizer = make_vocabulary(config, rows, None, lambda text: None, start)
    kept = place_of(rows.roots)  # a scan that was killed goes on where it was
    return scan(config, path, tokenizer, rows=rows, progress=progress, journal=kept).report


def _megabytes(folder: Path) -> float:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) / 1e6
