"""A manifest's summary for people: lines for a log, a table for a terminal, JSON for a program, and
every reject as a file.
"""

from __future__ import annotations

import csv
import io
import unicodedata
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.data.manifest import EVAL, Manifest, Reject
from common.system.counted import counted
from common.system.errors import BadInput
from common.system.files import write_atomically
from producer.batches.decode import SAMPLE_RATE

SHOWN_REJECTS = 20
SHOWN_SPEAKERS = 12
MISSING = "audio file missing"  # the kind whose reason is `missing_reason`
_OTHERS = " other places"


@dataclass(frozen=True)
class Share:
    """A part of a corpus: clips and hours."""

    name: str
    clips: int
    hours: float


@dataclass(frozen=True)
class Report:
    """What a scan found. Shares are sorted by hours, tallies by count."""

    kept: int
    rejected: int
    train: int
    evaluation: int
    hours: float
    shortest_s: float
    longest_s: float
    languages: list[Share]
    speakers: list[Share]
    tally: dict[str, int]  # kind of reason → rejected rows
    unknown_characters: dict[str, int]
    warnings: list[str]
    num_default_language: int  # of the rows kept
    default_language: str
    strip_arabic_diacritics: bool
    digest: str
    rejects: list[Reject] = field(default_factory=list)
    # language → {"texts", "changed" (beyond case and spaces), "examples": up to twenty [before,
    # after]}
    cleaning: dict[str, dict] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # how the files were read
    findings: list[dict] = field(
        default_factory=list
    )  # kind, rows, message, worst: `findings.Finding.to_json`

    @classmethod
    def of(cls, manifest: Manifest) -> Report:
        """Summarise an open manifest."""
        c = manifest.columns()
        rejects = manifest.rejects()
        seconds = c["num_samples"] / SAMPLE_RATE
        return cls(
            kept=len(manifest),
            rejected=len(rejects),
            train=int((c["split"] != EVAL).sum()),
            evaluation=int((c["split"] == EVAL).sum()),
            hours=float(seconds.sum() / 3600),
            shortest_s=float(seconds.min(initial=np.inf)) if len(manifest) else 0.0,
            longest_s=float(seconds.max(initial=0)),
            languages=_shares(manifest.languages, c["language"], seconds),
            speakers=_shares(manifest.speakers, c["speaker"], seconds),
            tally=dict(Counter(r.kind for r in rejects).most_common()),
            unknown_characters=manifest.meta.get("unknown_characters", {}),
            warnings=manifest.meta.get("warnings", []),
            num_default_language=manifest.meta.get("num_default_language", 0),
            default_language=manifest.meta.get("default_language", ""),
            strip_arabic_diacritics=manifest.meta.get("strip_arabic_diacritics", False),
            digest=manifest.digest,
            rejects=rejects,
            cleaning=manifest.meta.get("cleaning", {}),
            notes=manifest.meta.get("notes", []),
            findings=manifest.meta.get("findings", []),
        )

    def require_all(self) -> None:
        """BadInput: a row was rejected."""
        if self.rejected:
            rows = counted(self.kept + self.rejected, "{n} [row|rows]")
            reasons = ", ".join(f"{kind} {n}" for kind, n in self.tally.items())
            raise BadInput(f"--strict: {self.rejected} of {rows} rejected: {reasons}")

    def headline(self) -> str:
        """`kept=… rejected=…` and the sizes, in one line."""
        sizes = f"train={self.train} eval={self.evaluation} hours={self.hours:.2f}"
        return (
            f"kept={self.kept} rejected={self.rejected} {sizes}"
            f" clips={self.shortest_s:.2f}..{self.longest_s:.2f}s"
        )

    def lines(self, shown_rejects: int | None = SHOWN_REJECTS) -> list[str]:
        """Plain lines: the headline, languages, speakers, reasons, unknown characters, warnings,
        the first rejects (None: all).
        """
        out = [self.headline()]
        default = (
            f" ({self.num_default_language} by default: {self.default_language})"
            if self.num_default_language
            else ""
        )
        out.append(
            "languages: " + " ".join(f"{s.name}={s.clips}" for s in self.languages) + default
        )
        if {s.name for s in self.languages} & {"ar", "fa"}:
            out.append(
                f"Arabic diacritics: {'removed' if self.strip_arabic_diacritics else 'kept'}"
                " (text.strip_arabic_diacritics)"
            )
        speakers = [f"{s.name}={s.clips}" for s in self.speakers[:SHOWN_SPEAKERS]]
        more = len(self.speakers) - SHOWN_SPEAKERS
        out.append(
            f"speakers ({len(self.speakers)}): {' '.join(speakers)}"
            + (f" and {more} more" if more > 0 else "")
        )
        if self.tally:
            out.append("rejected: " + ", ".join(f"{kind} {n}" for kind, n in self.tally.items()))
        if self.unknown_characters:
            out.append(
                "unknown characters: "
                + ", ".join(f"{_character(c)} x{n}" for c, n in self.unknown_characters.items())
            )
        changed = ", ".join(
            f"{name} {c['changed']} of {c['texts']}"
            for name, c in self.cleaning.items()
            if c["changed"]
        )
        if changed:
            out.append(
                f"cleaning changed more than case and spaces in: {changed} (scan --texts shows"
                " examples)"
            )
        out += self.notes
        out += [f"warning: {w}" for w in self.warnings]
        out += [reject_line(r) for r in self.rejects[:shown_rejects]]
        if shown_rejects is not None and len(self.rejects) > shown_rejects:
            out.append(
                counted(
                    len(self.rejects) - shown_rejects,
                    "… and {n} more rejected [row|rows]; RUN/rejects.tsv has all",
                )
            )
        return out

    def cleaning_lines(self) -> list[str]:
        """Up to twenty texts of each language before and after cleaning."""
        out = []
        for language, found in self.cleaning.items():
            for before, after in found["examples"]:
                out += [
                    f"{language}  {_visible(before)}",
                    f"{' ' * len(language)}→ {_visible(after)}",
                ]
        return out

    def to_json(self) -> dict:
        """Plain values, all rejects included."""
        return asdict(self)

    def print(self, console: Console, texts: bool = False) -> None:
        """A table and what follows it on a terminal, plain lines elsewhere; every reject; with
        `texts` what cleaning changes.
        """
        lines = self.lines(None) + (self.cleaning_lines() if texts else [])
        if not console.is_terminal:
            for line in lines:
                console.print(line, markup=False, highlight=False, soft_wrap=True)
            return
        table = Table(box=None)
        for column in ("", "", "clips", "hours"):
            table.add_column(column, justify="right" if column else "left")
        more = len(self.speakers) - SHOWN_SPEAKERS
        for what, shares in (
            ("language", self.languages),
            ("speaker", self.speakers[:SHOWN_SPEAKERS]),
        ):
            for i, share in enumerate(shares):
                table.add_row(
                    "" if i else what, Text(share.name), str(share.clips), f"{share.hours:.2f}"
                )
        rest = [counted(more, "and {n} more [speaker|speakers]")] if more > 0 else []
        if self.num_default_language:
            rest.append(
                counted(self.num_default_language, "{n} kept [row names|rows name] no language:")
                + f" {self.default_language} (data.language)"
            )
        rest += [
            line for line in lines[1:] if not line.startswith(("languages: ", "speakers ("))
        ]  # the table shows them
        console.print(Text(lines[0], style="bold"))
        console.print(table)
        for line in rest:
            console.print(
                Text(line, "yellow" if line.startswith("warning") else ""), soft_wrap=True
            )


def _shares(names: list[str], ids: np.ndarray, seconds: np.ndarray) -> list[Share]:
    clips = np.bincount(ids, minlength=len(names))
    hours = np.bincount(ids, seconds, len(names)) / 3600
    return [
        Share(names[i], int(clips[i]), float(hours[i])) for i in np.argsort(-hours, kind="stable")
    ]


def _character(c: str) -> str:
    return f"U+{ord(c):04X} {unicodedata.name(c, 'unnamed')}"


def _visible(text: str) -> str:
    """`text` without characters that a terminal would obey."""
    return "".join(c if c.isprintable() else f"<U+{ord(c):04X}>" for c in text)


def missing_reason(candidates: tuple[str, ...]) -> str:
    """The reason for a file that is nowhere: every path that was tried, the likeliest first."""
    first, *others = candidates
    return f"no such audio file; tried {first}" + (
        f" (and {len(others)}{_OTHERS}: {', '.join(others)})" if others else ""
    )


def brief(reject: Reject) -> str:
    """The reason; of the paths that were tried for a missing file the first alone."""
    head, others, _ = reject.reason.partition(f"{_OTHERS}: ")
    return f"{head}{_OTHERS})" if reject.kind == MISSING and others else reject.reason


def reject_line(reject: Reject, full: bool = False) -> str:
    """`file:line: reason (id)`, the form of compilers, which editors can jump to.

    Of the twenty paths that were tried for a missing file only the first is there, unless `full`.
    """
    reason = reject.reason if full else brief(reject)
    return f"{reject.file}:{reject.line}: {reason}" + (f" (id {reject.id})" if reject.id else "")


def write_rejects(rejects: list[Reject], path: Path) -> None:
    """All rejects as tab-separated file, line, id, kind, reason, with a header; written aside and
    renamed.
    """
    out = io.StringIO()
    table = csv.writer(
        out, delimiter="\t", lineterminator="\n", quoting=csv.QUOTE_NONE, escapechar="\\"
    )
    table.writerow(["file", "line", "id", "kind", "reason"])
    table.writerows([r.file, r.line, r.id, r.kind, r.reason] for r in rejects)
    write_atomically(path, out.getvalue())
