"""The rows of all of a run's sources, before any audio is looked at: read, with language and speaker settled, duplicates refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from common.data.manifest import EVAL, TRAIN, Reject
from common.run.settings import Config, Source
from common.system.errors import BadInput
from common.xtts.text.clean import UnknownLanguage, normalize_language, require_backend
from common.xtts.text.errors import LanguageUnavailable
from producer.corpus.readers import READERS, Notice, Row, RowError, detect


@dataclass(frozen=True)
class CorpusRow:
    """A row with what its source adds. `source` counts the folders, `split` is EVAL for rows of `data.val`."""

    row: Row
    source: int
    split: int
    language: str  # the project's code
    speaker: str
    by_default: bool = False  # the language is `data.language`: neither the row nor its source names one


@dataclass
class CorpusRows:
    """All rows and refused lines in the order of the sources."""

    roots: list[Path] = field(default_factory=list)
    entries: list[CorpusRow | Reject] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def pairs(self) -> Iterator[tuple[str, str]]:
        """(text, language) of every row, to learn a vocabulary from."""
        return ((e.row.text, e.language) for e in self.entries if isinstance(e, CorpusRow))

    @property
    def languages(self) -> list[str]:
        """The languages that occur, in the order of appearance."""
        return list(dict.fromkeys(e.language for e in self.entries if isinstance(e, CorpusRow)))


class _Languages:
    """Codes → the project's codes; the unknown ones are collected, so that they make one message and not one per row."""

    def __init__(self):
        self.unknown: dict[str, list] = {}
        self._known: dict[str, str] = {}

    def settle(self, code: str, where: str) -> str:
        if code not in self._known:
            try:
                self._known[code] = normalize_language(code)
            except UnknownLanguage:
                self._known[code] = code
                self.unknown[code] = [0, where]
        if code in self.unknown:
            self.unknown[code][0] += 1
        return self._known[code]

    def check(self) -> None:
        if self.unknown:
            found = "; ".join(f"'{code}' in {n} rows, first at {where}" for code, (n, where) in self.unknown.items())
            raise BadInput(f"unknown language {found}; use codes like en, fa, zh-cn")
        for code in set(self._known.values()):
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

    A row's language is its own, else its source's, else `data.language`; its speaker likewise, at last the folder's name. Of rows
    with the same id in one file the first counts.

    Raises:
        BadInput: no source given, a source is not there or has no readable metadata, a language is unknown or needs a package that is
            not installed.
    """
    if not config.data.train:
        raise BadInput("no corpus given; set data.train=DIR (a folder with metadata.csv and wavs/)")
    sources = [(s, TRAIN) for s in config.data.train] + [(s, EVAL) for s in config.data.val]
    rows = CorpusRows()
    rows.roots = [_root(source) for source, _ in sources]
    languages = _Languages()
    for number, ((source, split), name) in enumerate(zip(sources, _folder_names(rows.roots), strict=True)):
        _read_source(rows, languages, source, number, split, config.data.language, source.speaker or name)
    languages.check()
    return rows


def _root(source: Source) -> Path:
    path = Path(source.path).expanduser().absolute()
    return path.parent if path.is_file() else path


def _read_source(rows: CorpusRows, languages: _Languages, source: Source, number: int, split: int, language: str, speaker: str) -> None:
    path = Path(source.path).expanduser().absolute()
    format_name = detect(path) if source.format == "auto" else source.format
    first_at: dict[tuple[str, str], int] = {}
    for item in READERS[format_name](path):
        if isinstance(item, Notice):
            rows.warnings.append(f"{item.file}: {item.message}")
            continue
        if isinstance(item, RowError):
            rows.entries.append(Reject(item.file, item.line, item.id, item.reason, item.kind))
            continue
        first = first_at.setdefault((item.file, item.id), item.line)
        if first != item.line:
            rows.entries.append(Reject(item.file, item.line, item.id, f"duplicate id (first at line {first})", "duplicate id"))
            continue
        code = item.language or source.language or language
        settled = languages.settle(code, f"{item.file}:{item.line}")
        by_default = item.language is None and source.language is None
        rows.entries.append(CorpusRow(item, number, split, settled, item.speaker or speaker, by_default))
