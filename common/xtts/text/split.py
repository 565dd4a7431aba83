"""Long texts to pieces that a model can speak: the cuts that hurt least, and no tiny piece.

TensorFlow-free.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from common.xtts.text.boundaries import Boundary, boundaries
from common.xtts.text.clean import char_limit, has_words
from common.xtts.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

# What a piece costs, beside its cut's cost (`boundaries.py`).
_PIECE = 1.0
_TINY = 8.0  # a piece of so few characters that a model makes up the rest
_TINY_SHARE = 8  # ... of a limit: 31 of 250
_STRETCH = 10  # a tiny sentence may make its neighbour longer than the limit by a tenth
_STRETCHED = 0.5


@dataclass(frozen=True)
class Part:
    """A part of a text. `ends_sentence`: a speaker would pause after it."""

    text: str
    ends_sentence: bool = True


@dataclass(frozen=True)
class Piece:
    """A part of a text that is spoken in one go.

    Attributes:
        ids: language tag and tokens.
        chars: its length as it is read out, in characters: numbers and signs in words.
        ends_sentence: a speaker would pause after it.
    """

    text: str
    ids: list[int]
    chars: int
    ends_sentence: bool = True


def pieces(tokenizer: Tokenizer, text: str, language: str, most_tokens: int) -> list[Piece]:
    """The text cut where it is longer than the language's limit, or a part than `most_tokens`.

    ValueError: nothing to say. The tokenizer's errors: a language without a tag, a text that cannot
    be read out.
    """
    if text.strip() and not has_words(tokenizer.clean(text, language)):
        raise ValueError(f"no words in the text {text.strip()[:40]!r}: nothing to say")
    unknown = tokenizer.unknown_characters(text, language)
    if unknown:
        log.warning(
            "the vocabulary has no %s: these characters are not spoken",
            ", ".join(repr(c) for c in dict.fromkeys(unknown)),
        )
    limit = char_limit(language)
    found = [
        piece
        for part in split_text(text, language, limit)
        for piece in _fitting(tokenizer, part, language, limit, most_tokens)
    ]
    if not found:
        raise ValueError("the text is empty: nothing to say")
    return found


def _fitting(
    tokenizer: Tokenizer, part: Part, language: str, limit: int, most_tokens: int
) -> Iterator[Piece]:
    """A part as a piece, or as several where it has too many tokens."""
    clean = tokenizer.clean(part.text, language)
    ids = tokenizer.encode(part.text, language)
    if len(ids) <= most_tokens or limit == 1:
        if has_words(clean):
            yield Piece(part.text, ids, len(clean), part.ends_sentence)
        return
    limit = max(1, min(limit, len(part.text)) * 3 // 4)
    for smaller in split_text(part.text, language, limit):
        yield from _fitting(tokenizer, smaller, language, limit, most_tokens)


def split_text(text: str, language: str, limit: int) -> list[Part]:
    """The text in parts of at most `limit` characters; [] for an empty text, the text itself where
    it fits.

    Cut at the ends of sentences, outside of quotations if possible; else at clauses, else at words,
    else anywhere. Neighbouring sentences share a part, and parts are of like length. A tiny
    sentence may make a part a tenth longer than the limit. ValueError: limit < 1. UnknownLanguage
    as in `text.clean`.
    """
    if limit < 1:
        raise ValueError(f"pieces of {limit} characters: at least 1 is needed")
    text = text.strip()
    if len(text) <= limit:
        return [Part(text)] if text else []
    places = boundaries(text, language, limit)
    out, begin = [], 0
    for place in _cheapest(places, limit):
        out.append(Part(text[begin : place.end], place.ends_sentence))
        begin = place.at
    return out


def _cheapest(places: list[Boundary], limit: int) -> list[Boundary]:
    """The places to cut at whose costs, with those of the parts between, are least; the last one is
    the text's end.
    """
    begins = [0, *(p.at for p in places)]
    sentences = _Sentences(places, limit // _TINY_SHARE)
    best, before = [0.0], [0]
    for k, place in enumerate(places, start=1):
        least, chosen = float("inf"), k - 1
        for j in range(k - 1, -1, -1):
            length = place.end - begins[j]
            if length > limit + limit // _STRETCH:
                break
            cost = best[j] + _cost_of(length, limit)
            if length > limit:
                cost += _STRETCHED if sentences.joins_a_tiny_one(j, k) else float("inf")
            if cost < least:
                least, chosen = cost, j
        best.append(least + place.cost)
        before.append(chosen)
    k, chosen = len(places), []
    while k:
        chosen.append(places[k - 1])
        k = before[k]
    return chosen[::-1]


def _cost_of(length: int, limit: int) -> float:
    """Of a part by its length: many short ones cost more than few, unlike ones more than like."""
    room = max(0, limit - length) / limit
    return _PIECE + room * room + (_TINY if length < limit // _TINY_SHARE else 0.0)


class _Sentences:
    """The ends of sentences among places to cut."""

    def __init__(self, places: list[Boundary], tiny: int):
        self._places, self._tiny = places, tiny
        ends = [i for i, place in enumerate(places) if place.ends_sentence]
        self._last, self._next = [-1] * len(places), [len(places)] * (len(places) + 1)
        for i in ends:  # of each place: the sentence's end before it, and the one from it on
            self._last[i + 1 : i + 2] = [i]
            self._next[i] = i
        for i in range(1, len(places)):
            self._last[i] = max(self._last[i], self._last[i - 1])
        for i in range(len(places) - 1, -1, -1):
            self._next[i] = min(self._next[i], self._next[i + 1])

    def joins_a_tiny_one(self, j: int, k: int) -> bool:
        """Whether the part between cuts `j` and `k` (0 is the text's beginning) begins or ends with
        a tiny sentence beside others.
        """
        begin, end = (self._places[j - 1].at if j else 0), self._places[k - 1].end
        last, first = self._last[k - 1], self._next[j]
        return (last >= j and end - self._places[last].at < self._tiny) or (
            first < k - 1 and self._places[first].end - begin < self._tiny
        )
