"""Numbers read out in words, by num2words, in the order and with the patterns of XTTS, and what num2words lacks."""

from __future__ import annotations

import functools
import re
import sys
import unicodedata

from num2words import num2words

from common.xtts.text import rules
from common.xtts.text.errors import TextError

# num2words raises these for a language, currency, kind or size of number that it does not have.
_UNSPELLABLE = (NotImplementedError, ArithmeticError, TypeError, ValueError, LookupError, AttributeError)
# Above this many digits a number is a card or serial number, and some of num2words' languages give nothing or nonsense.
_MAX_DIGITS = 15

FOREIGN_DIGITS = {
    code: str(unicodedata.decimal(chr(code))) for code in range(0x80, sys.maxunicode + 1) if unicodedata.category(chr(code)) == "Nd"
}
_HAS_DIGIT = re.compile(r"\d")
_DIGITS = re.compile("[0-9]+")
_XTTS_COMMA_GROUPS = re.compile(r"\b\d{1,3}(,\d{3})*(\.\d+)?\b")
_XTTS_DOT_GROUPS = re.compile(r"\b\d{1,3}(.\d{3})*(,\d+)?\b")  # any character may stand between groups; only dots are removed
# Ours also see the end of a number before a letter ("1,000" before a Korean or Japanese counter).
_COMMA_GROUPS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])")
_DOT_GROUPS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:\.[0-9]{3})+(?![0-9])")
_DECIMAL = re.compile("[0-9]+[.,][0-9]+")
_AMOUNT = {sign: re.compile(f"{re.escape(sign)}[0-9.,]*[0-9]+|[0-9.,]*[0-9]+{re.escape(sign)}") for sign in rules.CURRENCY_SIGNS}
_ORDINAL = {language: re.compile(f"([0-9]+)({suffixes})") for language, suffixes in rules.ORDINAL_SUFFIXES.items()}
_PERSIAN_ORDINAL = re.compile("([0-9]+)( ?ا\u064f?م|م| ?ا?مین)(?![\u0621-\u06cc\u200c])")
# A thin or no-break space between digits in threes groups thousands in any language, an ordinary space only in some.
_THIN_GROUPS = re.compile("(?<=[0-9])[\u00a0\u2009\u202f](?=[0-9]{3}(?![0-9]))")
# Two or more groups after one mark are thousands, whatever the language's custom ("1.000.000" in English).
_MANY_GROUPS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:(?:\.[0-9]{3}){2,}|(?:,[0-9]{3}){2,})(?![0-9])")
_SPACE_GROUPS = re.compile("(?<![0-9.,])[0-9]{1,3}(?: [0-9]{3})+(?![0-9])")
_LETTER_MEETS_DIGIT = re.compile(r"(?<=[^\W\d_])(?=[0-9])|(?<=[0-9])(?=[^\W\d_])")
_PERSIAN_FRACTIONS = {1: "دهم", 2: "صدم", 3: "هزارم"}


def separators(language: str) -> dict[int, str]:
    """The Arabic separators of thousands and decimals and percent sign, as `language` writes them in ASCII."""
    comma_groups = language in rules.COMMA_GROUPS
    return {0x66B: "." if comma_groups else ",", 0x66C: "," if comma_groups else ".", 0x66A: "%"}


def ungroup(text: str) -> str:
    """Removes thin and no-break spaces that group thousands."""
    return _THIN_GROUPS.sub("", text)


def expand(text: str, language: str, *, parity: bool) -> str:
    """Numbers, amounts of money and ordinals of `text` (lower case) as words; TextError if digits cannot be spelled."""
    if not _HAS_DIGIT.search(text):
        return text
    text = _join_groups_like_xtts(text, language) if parity else _join_groups(text, language)
    text = _expand_amounts_like_xtts(text, language) if parity else _expand_amounts(text, language)
    if language in ("ar", "fa") and not parity:  # a counter may follow without a space, and its letters would join the number's
        text = _LETTER_MEETS_DIGIT.sub(" ", _expand_ordinals(text, language, parity))
    if not (parity and language == "tr"):
        text = _DECIMAL.sub(lambda m: _decimal(m.group(), language, parity), text)
    text = _expand_ordinals(text, language, parity)
    text = _DIGITS.sub(lambda m: _cardinal(m.group(), language, parity), text)
    return text if parity else text.lower()


def _join_groups_like_xtts(text: str, language: str) -> str:
    pattern, mark = (_XTTS_COMMA_GROUPS, ",") if language in rules.XTTS_COMMA_GROUPS else (_XTTS_DOT_GROUPS, ".")
    return pattern.sub(lambda m: m.group().replace(mark, ""), text)


def _join_groups(text: str, language: str) -> str:
    if language in rules.SPACE_GROUPS:
        text = _SPACE_GROUPS.sub(lambda m: m.group().replace(" ", ""), text)
    text = _MANY_GROUPS.sub(lambda m: re.sub("[.,]", "", m.group()), text)
    pattern, mark = (_COMMA_GROUPS, ",") if language in rules.COMMA_GROUPS else (_DOT_GROUPS, ".")
    return pattern.sub(lambda m: m.group().replace(mark, ""), text)


def _unspelled(language: str, error: Exception) -> TextError:
    return TextError(f"digits left, no speller for {language}" + (f": {error}" if str(error) else ""))


@functools.lru_cache(maxsize=1 << 14, typed=True)  # 2 and 2.0 are read differently
def _words(value: int | float, language: str, to: str = "cardinal") -> str:
    try:
        words = num2words(value, lang=language, to=to)
    except _UNSPELLABLE as error:
        raise _unspelled(language, error) from error
    if any(c.isdigit() for c in words) or not (words or to == "ordinal"):
        raise TextError(f"digits left, no speller for {language}")
    return words


def _integer(digits: str, language: str) -> int:
    try:
        return int(digits)
    except ValueError as error:  # Python refuses more than 4300 digits
        raise _unspelled(language, error) from error


def _cardinal(digits: str, language: str, parity: bool) -> str:
    one_by_one = len(digits) > _MAX_DIGITS or (digits.startswith("0") and len(digits) > 2)
    if parity or not one_by_one:
        return _words(_integer(digits, language), language)
    # Read one by one, so that no zero of "007" is lost.
    return " ".join(_words(int(c), language) for c in digits)


def _decimal(number: str, language: str, parity: bool) -> str:
    whole, fraction = re.split("[.,]", number)
    if parity:
        return _words(float(f"{whole}.{fraction}"), language)
    if language == "fa":
        return _persian_decimal(whole, fraction)
    if language in rules.DECIMAL_WORDS or len(whole + fraction) > _MAX_DIGITS:
        return _plain_decimal(whole, fraction, rules.DECIMAL_WORDS.get(language, number[len(whole)]), language)
    try:
        if fraction.endswith("0") and language in rules.DIGITWISE_DECIMALS:
            # num2words drops final zeros ("2.0"): let a last digit hold their place, and take its word away.
            words = _words(float(f"{whole}.{fraction}1"), language)
            return words[:-1] if language == "ja" else words.rpartition(" ")[0]
        return _words(float(f"{whole}.{fraction}"), language)
    except TextError:  # Hungarian has no name for the fourth decimal
        return _plain_decimal(whole, fraction, number[len(whole)], language)


def _plain_decimal(whole: str, fraction: str, point: str, language: str) -> str:
    zeros = [_words(0, language)] * (len(fraction) - len(fraction.lstrip("0")))
    rest = [_cardinal(fraction.lstrip("0"), language, False)] if fraction.strip("0") else []
    return " ".join([_cardinal(whole, language, False), point, *zeros, *rest])


def _persian_decimal(whole: str, fraction: str) -> str:
    if fraction == "5":
        return "نیم" if int(whole) == 0 else _cardinal(whole, "fa", False) + " و نیم"
    if not fraction.strip("0"):
        return _cardinal(whole, "fa", False) + " ممیز " + " ".join(_words(0, "fa") for _ in fraction)
    if len(fraction) in _PERSIAN_FRACTIONS:
        spelled = _words(int(fraction), "fa") + " " + _PERSIAN_FRACTIONS[len(fraction)]
    else:
        spelled = " ".join(_words(int(c), "fa") for c in fraction)
    return _cardinal(whole, "fa", False) + " ممیز " + spelled


# -- ordinals ----------------------------------------------------------------------------------------------------------------------------


def _expand_ordinals(text: str, language: str, parity: bool) -> str:
    if language == "fa":
        return _PERSIAN_ORDINAL.sub(lambda m: _persian_ordinal(m.group(1)) + ("ین" if m.group(2).endswith("ین") else ""), text)
    pattern = _ORDINAL.get(language)
    if pattern is None:
        return text
    if language == "cs" and not parity:
        return pattern.sub(lambda m: _czech_ordinal(m, text), text)
    return pattern.sub(lambda m: _ordinal(m, language, parity), text)


def _ordinal(match: re.Match, language: str, parity: bool) -> str:
    try:
        words = _words(_integer(match.group(1), language), language, "ordinal")
    except TextError:
        if parity:
            raise
        words = ""
    # Without an ordinal (of 0, or of numbers too large) the digits stay, to be read as a plain number.
    return words if words or parity else match.group()


def _czech_ordinal(match: re.Match, text: str) -> str:
    number = _integer(match.group(1), "cs")
    # At the very end the dot is the sentence's; above 999 the ordinal would have to be declined throughout.
    if number >= 1000 or number == 0 or match.end() == len(text.rstrip()):
        return _cardinal(match.group(1), "cs", False) + "."
    parts = [number // 100 * 100] if number >= 100 else []
    rest = number % 100
    parts += [rest] if rest in rules.CZECH_ORDINALS else [rest // 10 * 10, rest % 10]
    return " ".join(rules.CZECH_ORDINALS[p] for p in parts if p)


def _persian_ordinal(digits: str) -> str:
    words = _cardinal(digits, "fa", False)
    if words.endswith("سه"):
        return words[:-1] + "وم"
    return words + (" ام" if words.endswith("ی") else "م")


# -- money -------------------------------------------------------------------------------------------------------------------------------


def _amount_words(match: str, language: str, code: str) -> str:
    amount = float(re.sub(r"[^\d.]", "", match.replace(",", ".")))
    words = num2words(amount, to="currency", currency=code, lang=language)
    if amount.is_integer():
        joint = words.rfind(rules.CURRENCY_JOINERS.get(language, rules.DEFAULT_CURRENCY_JOINER))
        words = words if joint == -1 else words[:joint]
    return words


def _expand_amounts_like_xtts(text: str, language: str) -> str:
    for sign, code in rules.CURRENCY_SIGNS.items():
        if sign not in text:
            continue
        try:
            text = _AMOUNT[sign].sub(lambda m, code=code: _amount_words(m.group(), language, code), text)
        except _UNSPELLABLE:  # any failure ends the treatment of currencies there, without a word
            return text
    return text


def _expand_amounts(text: str, language: str) -> str:
    for sign, code in rules.CURRENCY_SIGNS.items():
        if sign in text:
            text = _AMOUNT[sign].sub(lambda m, sign=sign, code=code: _amount(m.group(), language, sign, code), text)
    return text


def _amount(match: str, language: str, sign: str, code: str) -> str:
    if language in rules.SYMBOL_WORDS and language not in rules.PLAIN_CURRENCY:
        try:
            return _amount_words(match, language, code)
        except _UNSPELLABLE:
            pass  # number and sign are read one after the other below
    word = rules.symbol_words(language, parity=False).get(sign, sign)
    return match.replace(sign, "").lstrip(".,") + " " + word
