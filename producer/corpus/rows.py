"""The rows of all of a run's sources, before any audio is looked at: read, with language and
speaker settled, duplicates refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from common.data.manifest import EVAL, TRAIN, Reject
from common.run.sections import Source
from common.run.settings import Config
from common.system.counted import counted
from common.system.errors import BadInput
from common.xtts.text.clean import UnknownLanguage, normalize_language, require_backend
from common.xtts.text.errors import LanguageUnavailable
from producer.corpus.readers import READERS, WITHOUT_COLUMNS, Notice, Row, RowError, Taken, parts_of


@dataclass(frozen=True)
class CorpusRow:
    """A row with what its source adds.

    `source` counts the folders, `split` is EVAL for rows of `data.val`, or of an evaluation set
    that lies beside the training set."""

    row: Row
    source: int
    split: int
    language: str  # the project's code
    speaker: str
    by_default: bool = (
        False  # the language is `data.language`: neither the row nor its source names one
    )


@dataclass
class CorpusRows:
    """All rows and refused lines in the order of the sources."""

    roots: list[Path] = field(default_factory=list)
    entries: list[CorpusRow | Reject] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # how each file was read

    def pairs(self) -> Iterator[tuple[str, str]]:
        """(text, language) of every row, to learn a vocabulary from."""
        return ((e.row.text, e.language) for e in self.entries if isinstance(e, CorpusRow))

    @property
    def languages(self) -> list[str]:
        """The languages that occur, in the order of appearance."""
        return list(dict.fromkeys(e.language for e in self.entries if isinstance(e, CorpusRow)))


class _Languages:
    """Codes → the project's codes; the unknown ones are collected, so that they make one message
    and not one per row.
    """

    def __init__(self):
        self.unknown: dict[str, list] = {}
        self.known: dict[str, str] = {}

    def settle(self, code: str, where: str) -> str:
        if code not in self.known:
            try:
                self.known[code] = normalize_language(code)
            except UnknownLanguage as e:
                self.known[code] = code
                self.unknown[code] = [0, where, f" (did you mean {e.meant}?)" if e.meant else ""]
        if code in self.unknown:
            self.unknown[code][0] += 1
        return self.known[code]

    def check(self) -> None:
        if self.unknown:
            found = "; ".join(
                f"'{code}'{meant} {counted(n, '[in 1 row, at|in {n} rows, first at]')} {where}"
                for code, (n, where, meant) in self.unknown.items()
            )
            raise BadInput(f"unknown language {found}; use codes like en, fa, zh-cn")
        for code in set(self.known.values()):
            try:
                require_backend(code)
            except LanguageUnavailable as e:
                raise BadInput(str(e)) from e


def _folder_names(roots: list[Path]) -> list[str]:
    """A speaker name for each folder: its own, with its parent's where two folders share it."""
    count = Counter(r.name for r in set(roots))
    return [r.name if count[r.name] == 1 else f"{r.parent.name}/{r.name}" for r in roots]


def read_rows(config: Config) -> CorpusRows:
    """Read the metadata of `data.train` and `data.val`.

    A row's language is its own, else its source's, else `data.language`; its speaker likewise, at
    last the folder's name. Of rows with the same id in one file the first counts.

    Raises:
        BadInput: no source given, a source is not there or has no readable metadata, a language is
            unknown or needs a package that is not installed.
    """
    if not config.data.train:
        raise BadInput("no corpus given; set data.train=DIR (a folder with metadata.csv and wavs/)")
    sources = [(s, TRAIN) for s in config.data.train] + [(s, EVAL) for s in config.data.val]
    rows = CorpusRows()
    rows.roots = [_root(source) for source, _ in sources]
    languages = _Languages()
    for number, ((source, split), name) in enumerate(
        zip(sources, _folder_names(rows.roots), strict=True)
    ):
        _read_source(rows, languages, config, source, number, split, source.speaker or name)
    languages.check()
    if config.data.language not in languages.known:
        _check_default(config.data.language)
    return rows


def _check_default(code: str) -> None:
    """BadInput: data.language is no language, though every row names its own."""
    try:
        normalize_language(code)
    except UnknownLanguage as e:
        meant = f"; did you mean {e.meant}?" if e.meant else ""
        raise BadInput(f"data.language={code}: no language that is known{meant}") from e


def _root(source: Source) -> Path:
    path = Path(source.path).expanduser().absolute()
    return path.parent if path.is_file() else path


def _read_source(
    rows: CorpusRows,
    languages: _Languages,
    config: Config,
    source: Source,
    number: int,
    split: int,
    name: str,
) -> None:
    """Append the rows of one source; `name`: the speaker of those that name none."""
    path = Path(source.path).expanduser().absolute()
    given = source.columns or config.data.columns
    found, notices = parts_of(path, source.format, separate=split == EVAL or bool(config.data.val))
    rows.warnings += [f"{n.file}: {n.message}" for n in notices]
    for part, format_name, evaluation in found:
        if given and format_name in WITHOUT_COLUMNS:
            raise BadInput(
                f"{part}: data.columns is set, and a corpus of the format {format_name} has no"
                " columns"
            )
        first_at: dict[tuple[str, str], int] = {}
        for item in READERS[format_name](part, given or None):
            if isinstance(item, Taken):
                rows.notes.append(f"{item.file}: {item.message}")
                continue
            if isinstance(item, Notice):
                rows.warnings.append(f"{item.file}: {item.message}")
                continue
            if isinstance(item, Row):
                item = _unusual(item) or item
            if isinstance(item, RowError):
                rows.entries.append(
                    Reject(
                        *map(_printable, (item.file, item.line, item.id, item.reason, item.kind))
                    )
                )
                continue
            first = first_at.setdefault((item.file, item.id), item.line)
            if first != item.line:
                rows.entries.append(
                    Reject(
                        item.file,
                        item.line,
                        item.id,
                        f"duplicate id (first at line {first})",
                        "duplicate id",
                    )
                )
                continue
            code = item.language or source.language or config.data.language
            by_default = item.language is None and source.language is None
            settled = languages.settle(
                code, f"{item.file}:{item.line}" + (", by data.language" if by_default else "")
            )
            as_split = EVAL if evaluation else split
            rows.entries.append(
                CorpusRow(item, number, as_split, settled, item.speaker or name, by_default)
            )


def _unusual(row: Row) -> RowError | None:
    """What no text may hold: half of a character (JSON's "\\ud800"), or a file name whose bytes are
    not UTF-8.
    """
    try:
        f"{row.file}{row.id}{row.text}{row.language}{row.speaker}".encode()
    except UnicodeEncodeError as e:
        broken = f"U+{ord(e.object[e.start]):04X}"
        return RowError(
            row.file,
            row.line,
            row.id,
            f"holds half a character or a byte that is not UTF-8 ({broken})",
            "not UTF-8",
        )
    return None


def _printable(value: str | int) -> str | int:
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value
