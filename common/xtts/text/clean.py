"""Prepares text for the tokenizer: lower case, numbers, abbreviations and symbols read out, one
spelling per sound.

`clean` does what XTTS's VoiceBpeTokenizer does (coqui-tts, TTS/tts/layers/xtts/tokenizer.py), for
its 17 languages, and repairs what it loses: money, units, times and dates, digits of other scripts,
numbers that num2words cannot spell, typographic characters, marks without a sound. `parity=True`
gives XTTS's own output. Persian is ours. docs/text.md lists what is read how.
"""

from __future__ import annotations

import functools
import importlib
import re
import unicodedata

from common.xtts.text import (
    amounts,
    chinese,
    clock,
    fractions,
    language_names,
    marks,
    numbers,
    rules,
)
from common.xtts.text.errors import LanguageUnavailable, TextError, UnknownLanguage

__all__ = [
    "LANGUAGES", "VERSION", "LanguageUnavailable", "TextError", "UnknownLanguage", "char_limit",
    "clean", "foreign_script",
    "has_words", "normalize_language", "require_backend", "script_share",
]  # fmt: skip

# Part of a vocabulary's digest: raise it whenever `clean` gives another text for the same input.
VERSION = 2
LANGUAGES = rules.LANGUAGES

_WHITESPACE = re.compile(r"\s+")
# Presentation forms, full width, circled and subscript digits, Roman numerals, degrees, East Asian
# squares (㎏), mathematical letters; not the sign of the rial (U+FDFC).
_COMPATIBILITY = re.compile(
    "[\u2080-\u2089\u2103\u2109\u2113\u2160-\u217f\u2460-\u249b\u3200-\u33ff\ufb00-\ufdfb\ufdfd-\ufdff\ufe70-\ufefc"
    "\uff01-\uffef\U0001d400-\U0001d7ff]+"
)
_SQUARES = str.maketrans(
    {"㎟": "mm²", "㎠": "cm²", "㎡": "m²", "㎢": "km²", "㎣": "mm³", "㎤": "cm³", "㎥": "m³"}
)
_NUMBER_SIGN = re.compile("\\b[nN][°º] ?(?=[0-9])")
_MINUS_BEFORE_DIGIT = re.compile("\u2212(?=[0-9])")
_ZWNJ = "\u200c"
_HAMZA_HEH = re.compile("ه\u0654 ?")
_PERCENT_FIRST = re.compile("[%٪]([0-9][0-9.,]*)")


@functools.lru_cache(1024)
def normalize_language(code: str) -> str:
    """The code used in this project: "ZH-CN", "zh" and "cmn" are "zh", "fa-IR" is "fa".

    UnknownLanguage if there is none.
    """
    base = re.split(r"[-_@.]", code.strip().lower(), maxsplit=1)[0]
    base = rules.ALIASES.get(base, base)
    if base in rules.LANGUAGES or base in rules.GENERIC_LANGUAGES:
        return base
    raise UnknownLanguage(code, rules.LANGUAGES, language_names.code_of(code))


def char_limit(language: str) -> int:
    """Characters above which XTTS warns of audio cut off."""
    return rules.CHAR_LIMITS.get(normalize_language(language), rules.DEFAULT_CHAR_LIMIT)


def require_backend(language: str) -> None:
    """Raise LanguageUnavailable, naming the package to install, if `language` needs one that is
    missing; fast if it needs none.
    """
    language = normalize_language(language)
    for module, package in rules.BACKENDS.get(language, ()):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise LanguageUnavailable(language, package) from error
    if language == "ja":
        _katsu()


def clean(text: str, language: str, *, parity: bool = False, keep_diacritics: bool = True) -> str:
    """`text` ready for the tokenizer: single spaces, no leading or trailing one.

    parity: exactly XTTS's own cleaning. keep_diacritics: False removes short vowels and other marks
    from Arabic and Persian. Raises TextError (this text cannot be read out), UnknownLanguage,
    LanguageUnavailable (a package is missing).
    """
    language = normalize_language(language)
    parity = parity and language in rules.XTTS_LANGUAGES
    marks.require_undamaged(text, _script_ranges(language))
    if not parity:
        text = _normalize(text, language)
        text = amounts.expand(clock.expand(text, language), language)
        text = fractions.expand(text, language)
    if language in ("ar", "fa") and not keep_diacritics:
        text = text.translate(_diacritics())
    if language == "ja":
        return _clean_japanese(text, parity)
    text = text.replace('"', "")
    if language == "tr":
        text = text.replace("İ", "i").replace("Ö", "ö").replace("Ü", "ü")
    text = text.lower()
    if language == "zh":
        text = chinese.expand_numbers(text, parity=parity)
    else:
        text = numbers.expand(text, language, parity=parity)
    text = _expand_abbreviations(text, language)
    text = _expand_symbols(text, language, parity)
    text = _WHITESPACE.sub(" ", text).strip()
    if language == "zh":
        return _with_backend("zh", lambda: chinese.to_pinyin(text))
    if language == "ko":
        text = _with_backend("ko", lambda: _romanizer().translit(text))
    return text if parity or text.isascii() else unicodedata.normalize("NFC", text)


def script_share(text: str, language: str) -> float:
    """Share, 0 to 1, of the letters of `text` that belong to another script than `language` is
    written in; 0 without letters.
    """
    ranges = _script_ranges(normalize_language(language))
    letters = [c for c in text if c.isalpha()]
    if not letters:
        return 0.0
    return sum(not any(low <= ord(c) <= high for low, high in ranges) for c in letters) / len(
        letters
    )


def foreign_script(text: str, language: str) -> dict[str, int]:
    """How many letters of `text` belong to a script that `language` is not written in, by script
    ("Latin", "Cyrillic").
    """
    language = normalize_language(language)
    if text.isascii() and "Latin" in rules.LANGUAGE_SCRIPTS.get(language, ("Latin",)):
        return {}
    found: dict[str, int] = {}
    for character in set(text):
        script = _foreign_script_of(character, language)
        if script:
            found[script] = found.get(script, 0) + text.count(character)
    return found


@functools.lru_cache(maxsize=1 << 14)
def _foreign_script_of(character: str, language: str) -> str | None:
    if (
        not character.isalpha()
        or marks.is_silent(character)
        or unicodedata.category(character) == "Lm"
    ):
        return None
    code = ord(character)
    if any(low <= code <= high for low, high in _script_ranges(language)):
        return None
    for script, ranges in rules.SCRIPT_RANGES.items():
        if any(low <= code <= high for low, high in ranges):
            return script
    return unicodedata.name(character, "unnamed").partition(" ")[0].title()


@functools.cache
def _script_ranges(language: str) -> tuple[tuple[int, int], ...]:
    return tuple(
        r
        for script in rules.LANGUAGE_SCRIPTS.get(language, ("Latin",))
        for r in rules.SCRIPT_RANGES[script]
    )


# -- what XTTS lacks: one code point per character, digits of any script ---------------------------


def _normalize(text: str, language: str) -> str:
    if text.isascii():
        text = marks.remove_silent(text)
        return _percent_last(text) if language in ("fa", "ar") else text
    text = unicodedata.normalize("NFC", text)
    text = text.translate(_SQUARES)
    text = _COMPATIBILITY.sub(lambda m: unicodedata.normalize("NFKC", m.group()), text)
    text = fractions.plain(text, language)
    text = numbers.ungroup(text).translate(_translation(language))
    text = _MINUS_BEFORE_DIGIT.sub(
        "-", text
    )  # in Chinese and Japanese, where typographic characters stay
    if language in ("es", "fr", "it", "pt"):
        text = _NUMBER_SIGN.sub("№ ", text)
    if _ZWNJ in text:
        # Between Arabic letters it separates the parts of a word ("mi-khaham"): a space keeps them
        # apart in any vocabulary.
        text = (
            text.replace(_ZWNJ, " ") if language in ("fa", "ar", "ur") else text.replace(_ZWNJ, "")
        )
    if language == "fa":
        text = _HAMZA_HEH.sub("ه ی ", text)
    text = marks.remove_silent(text)
    return _percent_last(text) if language in ("fa", "ar") else text


def _percent_last(text: str) -> str:
    """In text written from right to left the sign may be typed on either side; it is read after the
    number.
    """
    return _PERCENT_FIRST.sub(r"\1%", text)


@functools.cache
def _translation(language: str) -> dict[int, str | None]:
    table: dict[int, str | None] = dict(numbers.foreign_digits())
    table |= numbers.separators(language)
    if language not in ("zh", "ja"):  # there, XTTS has rules of its own for these
        table |= rules.TYPOGRAPHY | rules.CJK_PUNCTUATION
    if language == "fa":
        table |= {ord(c): plain for c, plain in rules.PERSIAN_LETTERS.items()}
    return table


@functools.cache
def _diacritics() -> dict[int, None]:
    return dict.fromkeys(map(ord, rules.ARABIC_DIACRITICS))


# -- abbreviations and symbols ---------------------------------------------------------------------


@functools.cache
def _abbreviations(language: str) -> list[tuple[re.Pattern, str]]:
    end = r"\b" if language == "ru" else r"\."
    return [
        (re.compile(rf"\b{short}{end}", re.IGNORECASE), word)
        for short, word in rules.ABBREVIATIONS.get(language, {}).items()
    ]


def _expand_abbreviations(text: str, language: str) -> str:
    if ("-" if language == "ru" else ".") in text:
        for pattern, word in _abbreviations(language):
            text = pattern.sub(word, text)
    return text


@functools.cache
def _symbols(language: str, parity: bool) -> tuple[re.Pattern, dict[str, str]] | None:
    words = rules.symbol_words(language, parity=parity)
    return (re.compile("[" + "".join(words) + "]"), words) if words else None


def _expand_symbols(text: str, language: str, parity: bool) -> str:
    found = _symbols(language, parity)
    if found is None:
        return text
    pattern, words = found
    return pattern.sub(lambda m: f" {words[m.group()]} ", text)


# -- languages that need a package -----------------------------------------------------------------


def _with_backend(language: str, convert):
    try:
        return convert()
    except ImportError as error:
        raise LanguageUnavailable(language, rules.BACKENDS[language][0][1]) from error


@functools.cache
def _romanizer():
    from hangul_romanize import Transliter
    from hangul_romanize.rule import academic

    return Transliter(academic)


@functools.cache
def _katsu():
    try:
        import cutlet
    except ImportError as error:
        raise LanguageUnavailable("ja", (error.name or "cutlet").partition(".")[0]) from error
    try:
        return cutlet.Cutlet()
    except (RuntimeError, ImportError) as error:  # MeCab without a dictionary
        raise LanguageUnavailable("ja", "unidic-lite") from error


def _clean_japanese(text: str, parity: bool) -> str:
    katsu = _katsu()
    if not parity:
        text = _expand_symbols(numbers.expand(text, "ja", parity=False), "ja", parity=False)
    text = katsu.romaji(text).lower()
    return text if parity else _WHITESPACE.sub(" ", text).strip()


def has_words(clean_text: str) -> bool:
    """Whether a cleaned text has anything to speak."""
    return any(c.isalnum() and not marks.is_silent(c) for c in clean_text)
