"""Silent characters, which cleaning removes, and text that was decoded wrongly, which nobody can
repair.
"""

from __future__ import annotations

import functools
import re
import unicodedata

from common.xtts.text.errors import DamagedText

# Signs of category So that are read out or written in words.
_SPOKEN_SIGNS = frozenset("°№℃℉")
# Letters and marks that Unicode lists as ignorable or blank: Hangul fillers, Khmer inherent vowels,
# the grapheme joiner, Mongolian selectors, the blank Braille cell; and the tatweel, which stretches
# a line.
_FILLERS = frozenset(
    "\u034f\u0640\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180e\u180f\u2800\u3164\uffa0\u20e3"
)
# Invisible between letters: removed without separating them. Anything else leaves a space.
_JOINED = frozenset("\u034f\u0640")
_ANSI = re.compile("\x1b\\[[0-9;?]*[A-Za-z]")
_CAPITALS = re.compile(r"(\w)Ã ")
_PRIVATE = ("Cc", "Cf", "Cn", "Co", "Cs", "So")
# UTF-8 read as the code page of Arabic Windows: each letter became one of these and a second
# character.
_ARABIC_WINDOWS = re.compile(
    "[طظعغ][^\\s\\w]|[طظعغ][\u0679\u067e\u0686\u0688\u0691\u0698\u06a9\u06af\u06ba\u06be\u0192ˆ]"
)


@functools.lru_cache(maxsize=1 << 14)
def is_silent(character: str) -> bool:
    """Whether a character carries no sound: control and format characters, emoji and pictures,
    variation selectors, tags, joiners, fillers, unassigned and private code points. White space is
    none of them.
    """
    if character in _FILLERS:
        return True
    if character.isspace() or character in _SPOKEN_SIGNS:
        return False
    kind = unicodedata.category(character)
    if kind in _PRIVATE or "\U0001f3fb" <= character <= "\U0001f3ff":
        return True
    return "\ufe00" <= character <= "\ufe0f" or "\U000e0000" <= character <= "\U000e0fff"


def remove_silent(text: str) -> str:
    """`text` without silent characters; words with an emoji between them stay separate."""
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    found = {c for c in set(text) if is_silent(c)}
    if not found:
        return text
    return text.translate({ord(c): None if _parts_no_words(c) else " " for c in found})


def _parts_no_words(character: str) -> bool:
    return character in _JOINED or unicodedata.category(character) in ("Cc", "Cf", "Mn")


def require_undamaged(text: str, scripts: tuple[tuple[int, int], ...]) -> None:
    """DamagedText: U+FFFD, half of a surrogate pair, or UTF-8 that was read in another encoding.

    Args:
        scripts: code point ranges of the letters that the language is written in. What looks
            decoded wrongly counts as such if the repair gives Latin letters, these, or signs: »Ü«
            is a quotation, not Syriac.
    """
    if text.isascii():
        return
    for bad in ("\ufffd", *(c for c in set(text) if "\ud800" <= c <= "\udfff")):
        if bad in text:
            raise DamagedText(
                f"damaged text: U+{ord(bad):04X} at character {text.index(bad) + 1}, where a letter"
                " was lost"
            )
    repaired = _repaired(text)
    if repaired != text and all(_expected(c, scripts) for c in set(repaired) - set(text)):
        raise DamagedText(
            "damaged text: UTF-8 that was read in another encoding; perhaps it was"
            f" {repaired.strip()[:60]!r}"
        )


def _repaired(text: str) -> str:
    import ftfy  # slow to load, and most processes read no such text
    from ftfy.badness import is_bad

    if is_bad(text):
        capitals = _CAPITALS.search(
            text
        )  # Vietnamese "XÃ HỘI", not a French "à" whose second byte was stripped
        return ftfy.fix_encoding(text, restore_byte_a0=not (capitals and capitals[1].isupper()))
    if _ARABIC_WINDOWS.search(text):
        return " ".join(map(_from_arabic_windows, text.split(" ")))
    return text


def _from_arabic_windows(word: str) -> str:
    """A word whose bytes in Windows-1256 are UTF-8 of two letters or more; else the word."""
    try:
        repaired = word.encode("cp1256").decode("utf-8")
    except UnicodeError:
        return word
    return repaired if len(word) >= 4 else word


def _expected(character: str, scripts: tuple[tuple[int, int], ...]) -> bool:
    if character.isalpha():
        return ord(character) < 0x250 or any(low <= ord(character) <= high for low, high in scripts)
    return unicodedata.category(character) not in ("Cn", "Co")
