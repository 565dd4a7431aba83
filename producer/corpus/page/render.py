"""The scan's report as one HTML file that needs nothing else: no script, font or picture from
elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import jinja2

from common.data.manifest import Manifest, Reject
from common.system.errors import BadInput
from common.system.files import write_atomically
from producer.corpus.figures import Figures
from producer.corpus.page import clips, drawing
from producer.corpus.report import Report, brief

SHOWN_REJECTS = 20  # of each reason
SHOWN_SPEAKERS = 50
SHOWN_CHARACTERS = 200  # of each language
PLAYABLE = 5  # rows of each finding
# histogram → its heading, the unit, digits of the numbers below it
HISTOGRAMS = {
    "seconds": ("Seconds of a clip", "s", 1),
    "tokens": ("Text tokens of a clip", "tokens", 0),
    "characters_per_second": ("Characters per second", "per second", 1),
    "level_db": ("Level where it sounds", "dBFS", 0),
}


@dataclass(frozen=True)
class Row:
    """A row with a remark."""

    at: str
    said: str
    text: str = ""
    language: str = ""
    speaker: str = ""
    sound: str = ""  # a `data:` link
    silent_because: str = ""


@dataclass(frozen=True)
class Found:
    """A finding or a reason with its rows."""

    kind: str
    count: int
    message: str
    rows: list[Row] = field(default_factory=list)


def write_page(report: Report, figures: Figures, manifest_path: Path, path: Path) -> None:
    """Write the page of a scan in one step. BadInput: the disk refuses."""
    with Manifest.open(manifest_path) as manifest:
        text = render(report, figures, manifest)
    try:
        write_atomically(path.absolute(), text)
    except OSError as e:
        raise BadInput(f"{path}: the report cannot be written ({e.strerror})") from e


def render(report: Report, figures: Figures, manifest: Manifest) -> str:
    """The page's HTML."""
    page = _environment().get_template("page.html.j2")
    return page.render(
        report=report,
        figures=figures,
        width=drawing.WIDTH,
        height=drawing.HEIGHT,
        roots=list(dict.fromkeys(map(str, manifest.roots))),
        reasons=list(_reasons(report)),
        findings=[_finding(f, manifest) for f in report.findings],
        general=_general(report),
        pictures=list(_pictures(figures)),
        padding=drawing.of_shares(figures.padding, "padding by number of buckets")
        if figures.padding
        else None,
        shown_speakers=SHOWN_SPEAKERS,
        shown_characters=SHOWN_CHARACTERS,
    )


def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["ord"] = ord
    return made


def _pictures(figures: Figures) -> Iterator[tuple[str, drawing.Picture]]:
    for name, (heading, unit, digits) in HISTOGRAMS.items():
        if name in figures.histograms:
            yield heading, drawing.of_histogram(figures.histograms[name], unit, digits)


def _general(report: Report) -> list[str]:
    """Warnings that do not belong to a finding."""
    of_findings = {f["message"] for f in report.findings}
    return [w for w in report.warnings if w not in of_findings]


def _reasons(report: Report) -> Iterator[Found]:
    by_kind: dict[str, list[Reject]] = {}
    for reject in report.rejects:
        rows = by_kind.setdefault(reject.kind, [])
        if len(rows) < SHOWN_REJECTS:
            rows.append(reject)
    for kind, count in report.tally.items():
        rows = [Row(f"{r.file}:{r.line}", brief(r), r.id) for r in by_kind[kind]]
        yield Found(kind, count, kind, rows)


def _finding(finding: dict, manifest: Manifest) -> Found:
    rows = []
    utterances = manifest.utterances(finding["utterances"])
    for at, said, u in zip(finding["worst"], finding["said"], utterances, strict=True):
        sound, why_not = clips.as_link(u) if len(rows) < PLAYABLE else ("", "")
        more = said.removeprefix(at).lstrip(", ")  # the place has its own line
        rows.append(Row(at, more, u.text, u.language, u.speaker, sound, why_not))
    return Found(finding["kind"], finding["rows"], finding["message"], rows)
