"""Long texts to pieces that a model can speak: at sentences, else at clauses, else at words, else
anywhere. TensorFlow-free.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

from common.xtts.text.clean import char_limit, has_words, normalize_language
from common.xtts.text.rules import ABBREVIATIONS, SCALE_ABBREVIATIONS
from common.xtts.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

# A sentence's or a clause's end with what closes it, and the space after it; scripts without spaces
# need none.
_CLOSING = "[\"'”’»)\\]」』]*"
_SENTENCE = re.compile(rf"[.!?…؟۔।॥]+{_CLOSING}(?=\s|$)\s*|[。！？]+{_CLOSING}\s*")
_CLAUSE = re.compile(rf"[,;:،؛—–]+{_CLOSING}(?=\s|$)\s*|[，、；：]+{_CLOSING}\s*")
_WORD = re.compile(r"\s+")
_LAST_WORD = re.compile(r"(\S+)\.\s*$")


@dataclass(frozen=True)
class Piece:
    """A part of a text that is spoken in one go. `ids`: language tag and tokens."""

    text: str
    ids: list[int]


def pieces(tokenizer: Tokenizer, text: str, language: str, most_tokens: int) -> list[Piece]:
    """The text cut at sentences where it is longer than the language's limit, or than
    `most_tokens`.

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
    while True:
        found = [
            Piece(part, tokenizer.encode(part, language))
            for part in split_text(text, language, limit)
        ]
        if limit == 1 or all(len(p.ids) <= most_tokens for p in found):
            break
        limit = max(1, limit * 3 // 4)
    if not found:
        raise ValueError("the text is empty: nothing to say")
    return found


def split_text(text: str, language: str, limit: int) -> list[str]:
    """Pieces of at most `limit` characters, each as many whole sentences as fit; [] for an empty
    text, the text itself where it fits.

    A dot after an abbreviation of the language ends no sentence. ValueError: limit < 1.
    UnknownLanguage as in `text.clean`.
    """
    if limit < 1:
        raise ValueError(f"pieces of {limit} characters: at least 1 is needed")
    language = normalize_language(language)
    scales = (short.removesuffix(".").lower() for short in SCALE_ABBREVIATIONS.get(language, ()))
    abbreviations = {*ABBREVIATIONS.get(language, ()), *scales}
    pieces = _packed(_cut(text.strip(), _SENTENCE, abbreviations), limit, [_CLAUSE, _WORD])
    return [piece.strip() for piece in pieces if piece.strip()]


def _cut(text: str, end: re.Pattern, abbreviations=()) -> list[str]:
    """The text in parts that end where `end` matches; joined they are the text."""
    parts, begin = [], 0
    for match in end.finditer(text):
        word = _LAST_WORD.search(text[begin : match.end()])
        if (
            abbreviations
            and word
            and word.group(1).lower() in abbreviations
            and match.end() < len(text)
        ):
            continue
        parts.append(text[begin : match.end()])
        begin = match.end()
    return [*parts, text[begin:]] if begin < len(text) else parts


def _packed(parts: list[str], limit: int, finer: list[re.Pattern]) -> list[str]:
    """Neighbouring parts joined up to `limit`; a longer part is cut by the first of `finer`, at
    last by length.
    """
    out: list[str] = []
    for part in parts:
        if len(part.strip()) > limit:
            if finer:
                out += _packed(_cut(part, finer[0]), limit, finer[1:])
            else:
                out += [part[i : i + limit] for i in range(0, len(part), limit)]
        elif out and len((out[-1] + part).strip()) <= limit:
            out[-1] += part
        else:
            out.append(part)
    return out
