"""Tables of rows, one recording each: how fields are separated, which line is a header, and each
row with its line number.

Fields separated by `|` or a tab are taken as they are: a quote mark is text. Those separated by a
comma or a semicolon follow the rules of CSV, as do lines in which every field is quoted.
"""

from __future__ import annotations

import csv
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from common.system.counted import counted
from producer.corpus.readers.columns import Columns, Given, by_content, by_name, is_number
from producer.corpus.readers.paths import Locator, Place, audio_candidates, has_audio_suffix
from producer.corpus.readers.row import Item, Notice, Row, RowError, Taken, lines, not_utf8

SAMPLE = 2000  # rows that decide what the columns are
_MOST_LINES = 20  # of one quoted field
_NAMES = {"|": "'|'", "\t": "tabs", ",": "commas", ";": "semicolons"}
Record = tuple[int, "list[str] | None", str]  # line, its fields, or None and why there are none


@dataclass(frozen=True)
class Dialect:
    """How to split a line into fields. `quoted`: by the rules of CSV."""

    separator: str = "|"
    quoted: bool = False

    def describe(self) -> str:
        """The dialect in words."""
        return f"fields separated by {_NAMES[self.separator]}" + (", quoted" if self.quoted else "")


def dialect_of(path: Path) -> Dialect:
    """How the fields of a file are separated, by its first lines."""
    some = [text for _, text in itertools.islice(lines(path), 50) if text]
    for separator in ("|", "\t"):
        if sum(separator in line for line in some) * 2 > len(some):
            every = all(_is_quoted(field) for line in some for field in line.split(separator))
            return Dialect(separator, every)
    for separator in (",", ";"):
        first = [
            fields for _, fields, _ in _records(iter(enumerate(some, 1)), Dialect(separator, True))
        ]
        if first and first[0] and (by_name(first[0]) or _looks_parted(first, some[0])):
            return Dialect(separator, True)
    return Dialect()


def _looks_parted(rows: list[list[str] | None], line: str) -> bool:
    """Whether rows without a header have the same number of fields, and contain quotes or names of
    recordings.
    """
    width = len(rows[0])
    if width < 2 or any(fields is None or len(fields) != width for fields in rows):
        return False
    return '"' in line or any(
        all(has_audio_suffix(fields[i]) for fields in rows) for i in range(width)
    )


def _is_quoted(field: str) -> bool:
    field = field.strip()
    return len(field) > 1 and field[0] == field[-1] == '"'


def records(path: Path, dialect: Dialect) -> Iterator[Record]:
    """The records of a file."""
    return _records(lines(path), dialect)


def _records(numbered: Iterator[tuple[int, str | None]], dialect: Dialect) -> Iterator[Record]:
    waiting: list[tuple[int, str | None]] = []
    while waiting or (item := next(numbered, None)) is not None:
        number, line = waiting.pop(0) if waiting else item
        if line is None:
            yield number, None, "not UTF-8"
        elif not dialect.quoted:
            yield number, [f.strip() for f in line.split(dialect.separator)], ""
        else:
            fields, behind = _quoted(line, numbered, waiting, dialect.separator)
            waiting[:0] = behind
            yield number, fields, "" if fields is not None else "broken quoting"


def _quoted(
    line: str, numbered: Iterator, waiting: list, separator: str
) -> tuple[list[str] | None, list]:
    """The fields of a line and, if a quoted one goes on, of the next lines; lines read in vain are
    put back.
    """
    taken: list[tuple[int, str | None]] = []
    text = line
    while True:
        try:
            return [
                f.strip() for f in next(csv.reader([text], delimiter=separator, strict=True))
            ], []
        except csv.Error as e:
            if "unexpected end of data" not in str(e) or len(taken) == _MOST_LINES:
                return None, taken
        following = waiting.pop(0) if waiting else next(numbered, None)
        if following is None:
            return None, taken
        taken.append(following)
        if following[1] is None:
            return None, taken
        text = f"{text}\n{following[1]}"


def is_header(root: Path, fields: list[str], columns: Columns | None) -> bool:
    """Whether these are column names, and not a recording with such a name."""
    if columns is None or is_number(fields[columns.texts[0]]):
        return False
    return not any(os.path.isfile(p) for p in audio_candidates(root, fields[columns.audio]))


def header_of(path: Path, dialect: Dialect, given: Given | None = None) -> Columns | None:
    """The columns that a file's first line names; None: it is a row."""
    first = next(((n, f) for n, f, _ in records(path, dialect) if f is not None), None)
    if first is None or first[0] != next(lines(path))[0]:
        return None
    columns = by_name(first[1], given, f"{path}:{first[0]}")
    return columns if is_header(path.parent, first[1], columns) else None


def sample(path: Path, dialect: Dialect) -> list[list[str]]:
    """The first rows."""
    return [fields for _, fields, _ in itertools.islice(records(path, dialect), SAMPLE) if fields]


class Table:
    """A metadata file: its dialect and columns, and its rows."""

    def __init__(self, path: Path, name: str, given: Given | None = None, root: Path | None = None):
        """`name`: the reader's name, for messages.

        `root`: the folder that paths are relative to; None: the file's.
        """
        self.path, self.name = path, name
        self.root = root or path.parent
        self.dialect = dialect_of(path)
        self.header = header_of(path, self.dialect, given)
        some = sample(path, self.dialect)
        self.columns = self.header
        if self.columns is None and some:
            self.columns = by_content(some, given, str(path))
        self.numbers = 0  # rows with a number in the text's column, and a text in another
        self.num_rows = 0
        self.broken: list[int] = []  # lines of rows that go on in the next line

    def read(self, speaker: str | None = None, language: str | None = None) -> Iterator[Item]:
        """Every row, or why it is not one; first, how the columns were read.

        `speaker`, `language`: for rows that name none.
        """
        if self.columns is None:
            return
        file, columns, locator = str(self.path), self.columns, Locator(self.root)
        yield Taken(file, f"read as {self.name}, {self.dialect.describe()}: {columns.describe()}")
        rows = records(self.path, self.dialect)
        if self.header is not None:
            next(rows)
        for number, fields, fault in rows:
            if fields is None:
                yield self._fault(number, fault)
                continue
            self.num_rows += 1
            wrong = self._wrong(number, fields)
            if wrong is not None:
                yield wrong
                continue
            if self.dialect.quoted and any("\n" in field for field in fields):
                self.broken.append(number)
            name = fields[columns.audio]
            own = [
                fields[i] if i is not None and i < len(fields) else ""
                for i in (columns.speaker, columns.language)
            ]
            text = self._text(fields)
            yield Row(
                file,
                number,
                name,
                Place(locator, name),
                text,
                own[1] or language,
                own[0] or speaker,
            )
        if self.broken:
            said = counted(
                len(self.broken), "{n} [row goes|rows go] on over several lines ([|first ]at line"
            )
            said = f"{said} {self.broken[0]})"
            yield Notice(file, f"{said}; an unclosed quote mark swallows the rows after it")
        if self.numbers:
            column, other = columns.texts[0] + 1, columns.texts[1] + 1
            rows_of = counted(self.num_rows, "{n} [row|rows]")
            yield Notice(
                file,
                f"column {column} looks numeric in {self.numbers} of {rows_of}; column {other} was"
                " taken as the text there",
            )

    def _text(self, fields: list[str]) -> str:
        """A row's text; the other column's if there is none, or only a number beside words (a
        tool's duration).
        """
        first, *others = (fields[i] if i < len(fields) else "" for i in self.columns.texts)
        if not others or not others[0]:
            return first
        if self.header is None and is_number(first) and any(c.isalpha() for c in others[0]):
            self.numbers += 1
            return others[0]
        return first or others[0]

    def _fault(self, number: int, fault: str) -> RowError:
        if fault == "not UTF-8":
            return not_utf8(self.path, number)
        reason = (
            "broken quoting: a quoted field has no end, or goes on after it; double the quote"
            " marks inside a text"
        )
        return RowError(str(self.path), number, "", reason, fault)

    def _wrong(self, number: int, fields: list[str]) -> RowError | None:
        """Why a row is not one; None if it is."""
        file, count, width = str(self.path), len(fields), self.columns.width
        name = fields[self.columns.audio] if self.columns.audio < count else ""
        kind = "wrong number of fields"
        if self.header is not None:
            if count != width:
                hint = (
                    "; put quotes around a text that has commas"
                    if self.dialect.quoted and count > width
                    else ""
                )
                return RowError(
                    file,
                    number,
                    name,
                    f"expected {width} fields as in the header, got {count}{hint}",
                    kind,
                )
            return None if name else RowError(file, number, "", "empty audio path", "empty id")
        plain = width <= 3 and self.columns.speaker is None and self.columns.language is None
        if plain and count not in (2, 3):
            hint = "fields are separated by '|', as in id|text"
            if count > 1:
                hint = "other columns need a header line: audio_file|text|speaker_name|language"
            return RowError(
                file, number, fields[0], f"expected 2 or 3 fields, got {count} ({hint})", kind
            )
        if not plain and count != width:
            return RowError(
                file, number, name, f"expected {width} fields as in most rows, got {count}", kind
            )
        return None if name else RowError(file, number, "", "empty id", "empty id")
