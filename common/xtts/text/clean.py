"""Text as the tokenizer wants it: lower case, numbers, abbreviations and symbols read out, one spelling per sound.

`clean` does what XTTS's VoiceBpeTokenizer does (coqui-tts, TTS/tts/layers/xtts/tokenizer.py), for its 17 languages, and repairs what it
loses: digits of other scripts, numbers that num2words cannot spell, typographic characters, invisible marks. `parity=True` gives XTTS's
own output. Persian is ours.
"""

from __future__ import annotations

import functools
import importlib
import re
import unicodedata

from common.xtts.text import chinese, numbers, rules
from common.xtts.text.errors import LanguageUnavailable, TextError, UnknownLanguage

__all__ = [
    "LANGUAGES", "VERSION", "LanguageUnavailable", "TextError", "UnknownLanguage", "char_limit", "clean", "normalize_language",
    "require_backend", "script_share",
]  # fmt: skip

# Part of a vocabulary's digest: raise it whenever `clean` gives another text for the same input.
VERSION = 1
LANGUAGES = rules.LANGUAGES

_WHITESPACE = re.compile(r"\s+")
_COMPATIBILITY = re.compile("[\ufb00-\ufdff\ufe70-\ufefc\uff01-\uffef]+")
_ZWNJ = "\u200c"
_HAMZA_HEH = re.compile("ه\u0654 ?")
_PERCENT_FIRST = re.compile("[%٪]([0-9][0-9.,]*)")


def normalize_language(code: str) -> str:
    """The code that all of the project uses: "ZH-CN", "zh" and "cmn" are "zh", "fa-IR" is "fa". UnknownLanguage if there is none."""
    base = re.split(r"[-_@.]", code.strip().lower(), maxsplit=1)[0]
    base = rules.ALIASES.get(base, base)
    if base in rules.LANGUAGES or base in rules.GENERIC_LANGUAGES:
        return base
    raise UnknownLanguage(code, rules.LANGUAGES)


def char_limit(language: str) -> int:
    """Characters above which XTTS warns of audio cut off."""
    return rules.CHAR_LIMITS.get(normalize_language(language), rules.DEFAULT_CHAR_LIMIT)


def require_backend(language: str) -> None:
    """LanguageUnavailable, naming the package to install, if `language` needs one that is absent; fast where none is needed."""
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

    parity: exactly XTTS's own cleaning. keep_diacritics: False removes short vowels and other marks from Arabic and Persian.
    Raises TextError (this text cannot be read out), UnknownLanguage, LanguageUnavailable (a package is missing).
    """
    language = normalize_language(language)
    parity = parity and language in rules.XTTS_LANGUAGES
    if not parity:
        text = _normalize(text, language)
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
        return _with_backend("ko", lambda: _romanizer().translit(text))
    return text


def script_share(text: str, language: str) -> float:
    """Share, 0 to 1, of the letters of `text` that belong to another script than `language` is written in; 0 without letters."""
    ranges = _script_ranges(normalize_language(language))
    letters = [c for c in text if c.isalpha()]
    if not letters:
        return 0.0
    return sum(not any(low <= ord(c) <= high for low, high in ranges) for c in letters) / len(letters)


@functools.cache
def _script_ranges(language: str) -> tuple[tuple[int, int], ...]:
    return tuple(r for script in rules.LANGUAGE_SCRIPTS.get(language, ("Latin",)) for r in rules.SCRIPT_RANGES[script])


# -- what XTTS lacks: one code point per character, digits of any script -----------------------------------------------------------------


def _normalize(text: str, language: str) -> str:
    if text.isascii():
        return _percent_last(text) if language in ("fa", "ar") else text
    text = unicodedata.normalize("NFC", text)
    text = _COMPATIBILITY.sub(lambda m: unicodedata.normalize("NFKC", m.group()), text)
    text = numbers.ungroup(text).translate(_translation(language))
    if _ZWNJ in text:
        # Between Arabic letters it separates the parts of a word ("mi-khaham"): a space keeps them apart in any vocabulary.
        text = text.replace(_ZWNJ, " ") if language in ("fa", "ar", "ur") else text.replace(_ZWNJ, "")
    if language == "fa":
        text = _HAMZA_HEH.sub("ه ی ", text)
    return _percent_last(text) if language in ("fa", "ar") else text


def _percent_last(text: str) -> str:
    """In text written from right to left the sign may be typed on either side; it is read after the number."""
    return _PERCENT_FIRST.sub(r"\1%", text)


@functools.cache
def _translation(language: str) -> dict[int, str | None]:
    table: dict[int, str | None] = dict(numbers.FOREIGN_DIGITS)
    table |= numbers.separators(language)
    table |= dict.fromkeys(map(ord, rules.INVISIBLE))
    if language not in ("zh", "ja"):  # there, XTTS has rules of its own for these
        table |= rules.TYPOGRAPHY | rules.CJK_PUNCTUATION
    if language in ("fa", "ar", "ur"):
        table[0x640] = None  # tatweel only stretches the line
    if language == "fa":
        table |= {ord(c): plain for c, plain in rules.PERSIAN_LETTERS.items()}
    return table


@functools.cache
def _diacritics() -> dict[int, None]:
    return dict.fromkeys(map(ord, rules.ARABIC_DIACRITICS))


# -- abbreviations and symbols -----------------------------------------------------------------------------------------------------------


@functools.cache
def _abbreviations(language: str) -> list[tuple[re.Pattern, str]]:
    end = r"\b" if language == "ru" else r"\."
    return [(re.compile(rf"\b{short}{end}", re.IGNORECASE), word) for short, word in rules.ABBREVIATIONS.get(language, {}).items()]


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


# -- languages that need a package -------------------------------------------------------------------------------------------------------


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
    return any(c.isalnum() for c in clean_text)
