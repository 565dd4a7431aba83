"""Where a text may be cut, and the cost of each cut: none between sentences, more inside a
quotation or at a comma, much between words, most inside a word.

Nothing is cut between an enumerator and its item ("7. Milk"), nor before a mark that closes. The
costs are compared with each other and with those of pieces (`split.py`).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

from common.xtts.text.clean import normalize_language
from common.xtts.text.rules import ABBREVIATIONS, SCALE_ABBREVIATIONS

SENTENCE = 0.0
INNER = 1.5  # a sentence's end inside a quotation, or before a small letter
CLAUSE = 3.0
QUOTED = 6.0  # a clause of a quotation, or between a quotation and who says it
WORD = 12.0
HELD = 24.0  # between words that are read as one: "Dr. Smith", "3. Mai", "10 000"
LETTER = 40.0

_CLOSING = "\"'”“’‘»«›‹)\\]}」』】"
_OPENING = "\"'“„«»("
_SENTENCE_END = re.compile(rf"[.!?…؟۔।॥。！？]+(?P<closed>(?:\s*[{_CLOSING}])*)$")
_CLAUSE_END = re.compile(rf"[,;:،؛—–，、；：]+(?P<closed>(?:\s*[{_CLOSING}])*)$")
_GAP = re.compile(
    rf"\s+|(?<=[。！？，、；：])(?![{_CLOSING}。！？，、；：\s])|(?<=[。！？][」』])(?!\s)"
)
_PARAGRAPH = re.compile(r"\n[^\S\n]*\n\s*")
# What begins an item of a list, with a number or a letter, or a bullet. A Roman number with a dot.
_ENUMERATOR = re.compile(
    r"(?:\(?(?P<number>\d{1,3})[.)]|\(?[^\W\d_][.)]|\(?[ivxlcIVXLC]{1,6}[.)]|[•*·‣◦–—-])$"
)
_INITIAL = re.compile(r"(?:^|[\s.\"'“„«»(])[^\W\d_]\.$")
_SMALL_NUMBER = re.compile(r"(?:^|\s)\d{1,3}\.$")
# "3. Mai": a number with a dot is an ordinal.
_ORDINALS = frozenset("bg cs da de et eu fi hr hu is lv no pl sk sl sr tr".split())
_QUOTATION = re.compile(
    '„[^„“”]*[“”]|“[^“”]*”|”[^“”]*”|«[^«»]*»|»[^«»]*«|"[^"]*"|「[^「」]*」|『[^『』]*』|‹[^‹›]*›|›[^‹›]*‹'
)
_CONTEXT = 40  # characters before a gap that decide what it is


@dataclass(frozen=True)
class Boundary:
    """A place to cut: the part before ends at `end`, the part after begins at `at`."""

    end: int
    at: int
    cost: float

    @property
    def ends_sentence(self) -> bool:
        """Whether a speaker would pause here."""
        return self.cost <= INNER


def boundaries(text: str, language: str, longest: int) -> list[Boundary]:
    """All places to cut a text that has no space at its ends, the last one its end.

    Places inside a word exist only if the word is longer than `longest`. UnknownLanguage: as in
    `text.clean`.
    """
    out: list[Boundary] = []
    begin = 0
    for boundary in (*_between_words(text, normalize_language(language)), _end_of(text)):
        out += _inside(text, begin, boundary.end, longest)
        out.append(boundary)
        begin = boundary.at
    return out


def _end_of(text: str) -> Boundary:
    return Boundary(len(text), len(text), SENTENCE)


def _inside(text: str, begin: int, end: int, longest: int) -> Iterator[Boundary]:
    """Between the letters of a part that is too long, never before what belongs to a letter."""
    if end - begin <= longest:
        return
    for i in range(begin + 1, end):
        joined = unicodedata.category(text[i])[0] == "M" or "\u200c" in text[i - 1 : i + 1]
        if not joined and "\u200d" not in text[i - 1 : i + 1]:
            yield Boundary(i, i, LETTER)


def _between_words(text: str, language: str) -> Iterator[Boundary]:
    quotes = _Quotations(text)
    scales = (short.removesuffix(".").lower() for short in SCALE_ABBREVIATIONS.get(language, ()))
    abbreviations = {*ABBREVIATIONS.get(language, ()), *scales}
    begin, number = 0, 0  # of the sentence; of the last item of a list
    for gap in _GAP.finditer(text):
        end, at = gap.span()
        if at == len(text):
            return
        word = text[begin:end].rsplit(maxsplit=1)[-1].lstrip(_OPENING)
        item = _ENUMERATOR.match(word)
        found = int(item.group("number") or 0) if item else 0
        first = len(text[begin:end].strip()) == len(word)  # ... of the sentence
        if item and (first or found == number + 1):
            number = found or number
            continue
        if quotes.edge(end - 1, at):
            continue
        cost = _cost(text, end, at, quotes, language, abbreviations)
        if cost == WORD and number and _number_at(text, at) == number + 1:
            cost = CLAUSE  # the next item of a list that runs on
        if cost <= INNER:
            begin = at
        if _PARAGRAPH.search(gap.group()):
            number = 0
        yield Boundary(end, at, cost)


def _number_at(text: str, at: int) -> int:
    """The number of the list item that begins there; 0: no item does."""
    word = text[at : at + 8].split(maxsplit=1)
    item = _ENUMERATOR.match(word[0]) if word else None
    return int(item.group("number") or 0) if item else 0


def _cost(
    text: str, end: int, at: int, quotes: _Quotations, language: str, abbreviations: set[str]
) -> float:
    left, gap, following = text[max(0, end - _CONTEXT) : end], text[end:at], text[at]
    if _PARAGRAPH.search(gap) or ("\n" in gap and _begins_item(text, at)):
        return SENTENCE
    inside = quotes.inside(end, at)
    sentence, clause = _SENTENCE_END.search(left), _CLAUSE_END.search(left)
    if sentence:
        if not sentence.group("closed") and _goes_on(left, language, abbreviations):
            return HELD
        if following.islower():
            return QUOTED if sentence.group("closed") else INNER
        if sentence.group("closed") and following.isalpha() and not following.isupper():
            return QUOTED  # scripts without capitals: it may go on with who says it
        return INNER if inside else SENTENCE
    if clause:
        return QUOTED if inside or clause.group("closed") else CLAUSE
    if left[-1:].isdigit() and following.isdigit():
        return HELD
    return WORD


def _goes_on(left: str, language: str, abbreviations: set[str]) -> bool:
    """Whether the dot at the end of `left` belongs to its word."""
    if not left.endswith("."):
        return False
    word = left.split()[-1].removesuffix(".").lower().lstrip(_OPENING)
    return bool(
        word in abbreviations
        or _INITIAL.search(left)
        or (language in _ORDINALS and _SMALL_NUMBER.search(left))
    )


def _begins_item(text: str, at: int) -> bool:
    word = text[at : at + 8].split(maxsplit=1)
    return bool(word) and bool(_ENUMERATOR.match(word[0]))


class _Quotations:
    """Where quotations begin and end; one that its paragraph does not close does not count."""

    def __init__(self, text: str):
        self._inside = bytearray(len(text) + 1)
        self._opening, self._closing = set(), set()
        begin = 0
        for end in (*(m.start() for m in _PARAGRAPH.finditer(text)), len(text)):
            for m in _QUOTATION.finditer(text, begin, end):
                self._opening.add(m.start())
                self._closing.add(m.end() - 1)
                self._inside[m.start() + 1 : m.end()] = b"\1" * (m.end() - m.start() - 1)
            begin = end

    def inside(self, end: int, at: int) -> bool:
        """Whether a gap is in a quotation."""
        return bool(self._inside[end] and self._inside[at])

    def edge(self, before: int, at: int) -> bool:
        """Whether a gap is between a quotation and its own marks, as « in French »."""
        return before in self._opening or at in self._closing
