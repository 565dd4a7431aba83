"""Numbers in words, by num2words, in the order and with the patterns of XTTS, plus what num2words
lacks.
"""

from __future__ import annotations

import functools
import re
import sys
import unicodedata

from common.xtts.text import chinese, hindi, rules
from common.xtts.text.errors import TextError

# num2words raises these for a language, currency, kind or size of number that it lacks.
_UNSPELLABLE = (
    NotImplementedError,
    ArithmeticError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    RecursionError,
)
# Above this many digits a number is a card or serial number, and some of num2words' languages give
# nothing or nonsense.
_MAX_DIGITS = 15
_MOST_DIGITS_AT_ONCE = 3  # of a fraction: "sixty-seven hundredths", beyond that digit by digit

_HAS_DIGIT = re.compile(r"\d")
_DIGITS = re.compile("[0-9]+")
_XTTS_COMMA_GROUPS = re.compile(r"\b\d{1,3}(,\d{3})*(\.\d+)?\b")
_XTTS_DOT_GROUPS = re.compile(
    r"\b\d{1,3}(.\d{3})*(,\d+)?\b"
)  # any character may stand between groups; only dots are removed
# Ours also see the end of a number before a letter ("1,000" before a Korean or Japanese counter).
_COMMA_GROUPS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])")
_DOT_GROUPS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:\.[0-9]{3})+(?![0-9])")
_DECIMAL = re.compile("(?<![0-9])[0-9]+[.,][0-9]+")
_AMOUNT = {
    sign: re.compile(f"{re.escape(sign)}[0-9.,]*[0-9]+|[0-9.,]*[0-9]+{re.escape(sign)}")
    for sign in rules.CURRENCY_SIGNS
}
_ORDINAL = {
    language: re.compile(f"(?<![0-9])([0-9]+)({suffixes})")
    for language, suffixes in rules.ORDINAL_SUFFIXES.items()
}
_PERSIAN_ORDINAL = re.compile("(?<![0-9])([0-9]+)( ?ا\u064f?م|م| ?ا?مین)(?![\u0621-\u06cc\u200c])")
# A thin or no-break space between digits in threes groups thousands in any language, an ordinary
# space only in some.
_THIN_GROUPS = re.compile("(?<=[0-9])[\u00a0\u2009\u202f](?=[0-9]{3}(?![0-9]))")
# Two or more groups after one mark are thousands, whatever the language's custom ("1.000.000" in
# English, "12,34,567" in India).
_MANY_GROUPS = re.compile(
    r"(?<![0-9.,])[0-9]{1,3}(?:(?:\.[0-9]{3}){2,}|(?:,[0-9]{3}){2,}|(?:,[0-9]{2})+,[0-9]{3})(?![0-9])"
)
_SPACE_GROUPS = re.compile("(?<![0-9.,])[0-9]{1,3}(?: [0-9]{3})+(?![0-9])")
_LETTER_MEETS_DIGIT = re.compile(r"(?<=[^\W\d_])(?=[0-9])|(?<=[0-9])(?=[^\W\d_])")
_DOTTED_ORDINAL = re.compile("(?<=[0-9])[.](?=[ºª])")  # 1.º
_DIGITS_HYPHEN_DIGITS = re.compile("(?<=[0-9])-(?=[0-9])")  # "1990-2000" is not ninety-two thousand
_PERSIAN_FRACTIONS = {1: "دهم", 2: "صدم", 3: "هزارم"}


@functools.cache
def foreign_digits() -> dict[int, str]:
    """Every decimal digit of Unicode outside of ASCII, as the ASCII digit that it stands for."""
    return {
        code: str(unicodedata.decimal(chr(code)))
        for code in range(0x80, sys.maxunicode + 1)
        if unicodedata.category(chr(code)) == "Nd"
    }


def separators(language: str) -> dict[int, str]:
    """The Arabic separators of thousands and decimals and percent sign, as `language` writes them
    in ASCII.
    """
    comma_groups = language in rules.COMMA_GROUPS
    return {0x66B: "." if comma_groups else ",", 0x66C: "," if comma_groups else ".", 0x66A: "%"}


def ungroup(text: str) -> str:
    """Remove thin and no-break spaces that group thousands."""
    return _THIN_GROUPS.sub("", text)


def expand(text: str, language: str, *, parity: bool) -> str:
    """Numbers, amounts of money and ordinals of `text` (lower case) as words; TextError if digits
    cannot be spelled.
    """
    if not _HAS_DIGIT.search(text):
        return text
    text = _join_groups_like_xtts(text, language) if parity else _join_groups(text, language)
    text = _expand_amounts_like_xtts(text, language) if parity else text
    if not parity:
        text = _DOTTED_ORDINAL.sub("", text)
        text = _DIGITS_HYPHEN_DIGITS.sub(" - ", text)
        if language not in ("zh", "ja", "ko"):  # there, counters follow without a space
            text = _LETTER_MEETS_DIGIT.sub(" ", _expand_ordinals(text, language, parity))
    if not (parity and language == "tr"):
        text = _DECIMAL.sub(lambda m: _decimal(m.group(), language, parity), text)
    text = _expand_ordinals(text, language, parity)
    text = _DIGITS.sub(lambda m: _cardinal(m.group(), language, parity), text)
    return text if parity else text.lower()


def _join_groups_like_xtts(text: str, language: str) -> str:
    pattern, mark = (
        (_XTTS_COMMA_GROUPS, ",")
        if language in rules.XTTS_COMMA_GROUPS
        else (_XTTS_DOT_GROUPS, ".")
    )
    return pattern.sub(lambda m: m.group().replace(mark, ""), text)


def _join_groups(text: str, language: str) -> str:
    if language in rules.SPACE_GROUPS:
        text = _SPACE_GROUPS.sub(lambda m: m.group().replace(" ", ""), text)
    text = _MANY_GROUPS.sub(lambda m: re.sub("[.,]", "", m.group()), text)
    pattern, mark = (_COMMA_GROUPS, ",") if language in rules.COMMA_GROUPS else (_DOT_GROUPS, ".")
    return pattern.sub(lambda m: m.group().replace(mark, ""), text)


def _unspelled(language: str, error: Exception) -> TextError:
    return TextError(
        f"digits left, no speller for {language}" + (f": {error}" if str(error) else "")
    )


@functools.lru_cache(maxsize=1 << 14, typed=True)  # 2 and 2.0 are read differently
def _words(value: int | float, language: str, to: str = "cardinal") -> str:
    from num2words import num2words  # slow to load: it loads all of its languages

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


def _spelled(value: int, language: str) -> str:
    """num2words, except for Hindi, which it lacks, Turkish, where it loses thousands (491 027),
    Italian 118 and Arabic 2000.
    """
    if language == "hi":
        return hindi.number_words(value)
    if language == "tr":
        return _turkish(value)
    words = _words(value, language)
    if language == "ar" and words in ("مئتا", "ألفا", "مليونا", "مليارا", "تريليونا"):
        return words + "ن"  # num2words has the form before a noun
    return words.replace("odicotto", "odiciotto") if language == "it" else words


_TURKISH_UNITS = "|bir|iki|üç|dört|beş|altı|yedi|sekiz|dokuz".split("|")
_TURKISH_TENS = "|on|yirmi|otuz|kırk|elli|altmış|yetmiş|seksen|doksan".split("|")
_TURKISH_SCALES = ("", "bin", "milyon", "milyar", "trilyon")


def _turkish(value: int) -> str:
    """In one word, as num2words writes it: "binikiyüzelli"."""
    words = ""
    for scale in _TURKISH_SCALES:
        value, group = divmod(value, 1000)
        hundreds, tens, units = group // 100, group // 10 % 10, group % 10
        spelled = (
            (_TURKISH_UNITS[hundreds] if hundreds > 1 else "")
            + ("yüz" if hundreds else "")
            + _TURKISH_TENS[tens]
            + _TURKISH_UNITS[units]
        )
        if group:
            words = ("" if scale == "bin" and group == 1 else spelled) + scale + words
    return words or "sıfır"


def cardinal(digits: str, language: str) -> str:
    """A whole number in words: exact, and digit by digit where it is no quantity ("007", more than
    15 digits).

    TextError: the language has no words for it.
    """
    if language == "zh":
        return chinese.number_words(digits) if digits.strip("0") else chinese.digit_words(digits)
    if len(digits) > _MAX_DIGITS or (digits.startswith("0") and len(digits) > 2):
        return " ".join(
            _spelled(int(c), language) for c in digits
        )  # so that no zero of "007" is lost
    return _spelled(_integer(digits, language), language)


def _cardinal(digits: str, language: str, parity: bool) -> str:
    return _words(_integer(digits, language), language) if parity else cardinal(digits, language)


def decimal(whole: str, fraction: str, language: str, mark: str = ",") -> str:
    """A decimal number in words, every digit of it; `mark` stands for the point in a language
    without a word for it.

    TextError: the language has no words for it.
    """
    if language == "zh":
        return chinese.number_words(whole + "." + fraction)
    if language == "fa":
        return _persian_decimal(whole, fraction)
    if language == "ru" and len(fraction) in rules.RUSSIAN_FRACTIONS:
        return _russian_decimal(whole, fraction)
    if language == "hu" and len(fraction) in rules.HUNGARIAN_FRACTIONS:
        part = cardinal(fraction.lstrip("0") or "0", "hu")
        return f"{cardinal(whole, 'hu')} egész {part} {rules.HUNGARIAN_FRACTIONS[len(fraction)]}"
    if language in rules.POINT_WORDS:
        joint = "" if language == "ja" else " "
        digits = (_spelled(int(c), language) for c in fraction)
        return joint.join([cardinal(whole, language), rules.POINT_WORDS[language], *digits])
    if language in rules.DECIMAL_WORDS:
        return _plain_decimal(whole, fraction, rules.DECIMAL_WORDS[language], language)
    point = _point_word(language)
    if point is None:
        return _plain_decimal(whole, fraction, mark, language)
    return " ".join(
        [cardinal(whole, language), point, *(_spelled(int(c), language) for c in fraction)]
    )


@functools.cache
def _point_word(language: str) -> str | None:
    """num2words' word between two and three in 2.3; None if it says something else."""
    try:
        words, two, three = _words(2.3, language), _words(2, language), _words(3, language)
    except TextError:
        return None
    between = words[len(two) : len(words) - len(three)].strip()
    return between if between and words.startswith(two) and words.endswith(three) else None


@functools.cache
def minus_word(language: str) -> str | None:
    """The language's word for a minus sign: from our table, else from num2words; None if neither
    has one.
    """
    if language in rules.MINUS_WORDS:
        return rules.MINUS_WORDS[language]
    try:
        words, three = _words(-3, language), _words(3, language)
    except TextError:
        return None
    return words.removesuffix(three).strip() or None if words.endswith(three) else None


def _decimal(number: str, language: str, parity: bool) -> str:
    whole, fraction = re.split("[.,]", number)
    if parity:
        return _words(float(f"{whole}.{fraction}"), language)
    return decimal(whole, fraction, language, number[len(whole)])


def _plain_decimal(whole: str, fraction: str, point: str, language: str) -> str:
    if len(fraction) > _MOST_DIGITS_AT_ONCE:
        parts = [_spelled(int(c), language) for c in fraction]
    else:
        parts = [_spelled(0, language)] * (len(fraction) - len(fraction.lstrip("0")))
        parts += [cardinal(fraction.lstrip("0"), language)] if fraction.strip("0") else []
    return " ".join([cardinal(whole, language), point, *parts])


def _persian_decimal(whole: str, fraction: str) -> str:
    if fraction == "5":
        return "نیم" if int(whole) == 0 else cardinal(whole, "fa") + " و نیم"
    if not fraction.strip("0"):
        return cardinal(whole, "fa") + " ممیز " + " ".join(_words(0, "fa") for _ in fraction)
    if len(fraction) in _PERSIAN_FRACTIONS:
        spelled = _words(int(fraction), "fa") + " " + _PERSIAN_FRACTIONS[len(fraction)]
    else:
        spelled = " ".join(_words(int(c), "fa") for c in fraction)
    return cardinal(whole, "fa") + " ممیز " + spelled


def _russian_decimal(whole: str, fraction: str) -> str:
    """ "две целых пять десятых": both parts are counted in the feminine."""
    stem = rules.RUSSIAN_FRACTIONS[len(fraction)]
    first = agree(cardinal(whole, "ru"), "ru", "f") + (
        " целая " if _ends_in_one(whole) else " целых "
    )
    part = fraction.lstrip("0") or "0"
    return (
        first
        + agree(cardinal(part, "ru"), "ru", "f")
        + " "
        + stem
        + ("ая" if _ends_in_one(part) else "ых")
    )


def _ends_in_one(digits: str) -> bool:
    return digits.endswith("1") and not digits.endswith("11")


_LAST_WORDS = {
    ("es", "m"): {"uno": "un", "veintiuno": "veintiún"},
    ("es", "f"): {"uno": "una", "un": "una", "veintiuno": "veintiuna", "veintiún": "veintiuna"},
    ("pt", "f"): {"um": "uma", "dois": "duas"},
    ("it", "m"): {"uno": "un"},
    ("it", "f"): {"uno": "una"},
    ("fr", "f"): {"un": "une"},
    ("ru", "f"): {"один": "одна", "два": "две"},
    ("ru", "n"): {"один": "одно"},
    ("pl", "f"): {"dwa": "dwie"},
    ("cs", "m"): {"jedna": "jeden"},
    ("cs", "f"): {"dva": "dvě"},
    ("cs", "n"): {"jedna": "jedno", "dva": "dvě"},
}
_LARGE = re.compile(
    r".*\b(?:mill[oó]n(?:es)?|milh(?:ão|ões)|bili(?:ão|ões)|bill[oó]n(?:es)?)\b", re.DOTALL
)
_HUNDREDS = re.compile(
    r"\b(\w+(?:cient|cent|quinient|quinhent|setecient|novecient))os\b|\b(quinient|quinhent|trezent|duzent)os\b"
)


def agree(words: str, language: str, gender: str) -> str:
    """A cardinal as it stands before a noun of that gender ("m", "f", "n"): "veintiún",
    "veintiuna", "двадцать одна".
    """
    if language == "de" and words.endswith("eins"):
        return words[:-1] + ("e" if gender == "f" else "")
    if language == "hu" and words.endswith("kettő"):
        return words[:-5] + "két"
    if language == "pl" and words == "jeden":
        return {"f": "jedna", "n": "jedno"}.get(gender, words)
    table = _LAST_WORDS.get((language, gender), {})
    if language in ("es", "pt") and gender == "f":  # thousands agree as well, millions do not
        large = _LARGE.match(words)
        head, tail = (large.group(), words[large.end() :]) if large else ("", words)
        tail = _HUNDREDS.sub(lambda m: (m.group(1) or m.group(2)) + "as", tail)
        return head + re.sub(r"\w+", lambda m: table.get(m.group(), m.group()), tail)
    head, space, last = words.rpartition(" ")
    return head + space + table.get(last, last)


def ordinal(number: int, language: str) -> str:
    """An ordinal number in words, as a noun's or a day's: "third", "dritte", "trzeci".

    TextError: there are no words for it.
    """
    if language == "cs":
        return _czech_ordinal_words(number)
    return _words(number, language, "ordinal").lower()


def year(number: int, language: str) -> str:
    """A year as spoken: "nineteen eighty-four"."""
    return _words(number, language, "year").lower()


def digits_in_chinese(digits: str) -> str:
    """Chinese digits one by one, as of a year."""
    return chinese.digit_words(digits)


# -- ordinals --------------------------------------------------------------------------------------


def _expand_ordinals(text: str, language: str, parity: bool) -> str:
    if language == "fa":
        return _PERSIAN_ORDINAL.sub(
            lambda m: _persian_ordinal(m.group(1)) + ("ین" if m.group(2).endswith("ین") else ""),
            text,
        )
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
    # Without an ordinal (of 0, or of numbers too large) the digits stay, to be read as a plain
    # number.
    return words if words or parity else match.group()


def _czech_ordinal(match: re.Match, text: str) -> str:
    number = _integer(match.group(1), "cs")
    # At the very end the dot is the sentence's; above 999 the ordinal would have to be declined
    # throughout.
    if number >= 1000 or number == 0 or match.end() == len(text.rstrip()):
        return cardinal(match.group(1), "cs") + "."
    return _czech_ordinal_words(number)


def _czech_ordinal_words(number: int) -> str:
    parts = [number // 100 * 100] if number >= 100 else []
    rest = number % 100
    parts += [rest] if rest in rules.CZECH_ORDINALS else [rest // 10 * 10, rest % 10]
    return " ".join(rules.CZECH_ORDINALS[p] for p in parts if p)


def _persian_ordinal(digits: str) -> str:
    words = cardinal(digits, "fa")
    if words.endswith("سه"):
        return words[:-1] + "وم"
    return words + (" ام" if words.endswith("ی") else "م")


# -- money -----------------------------------------------------------------------------------------


def _amount_words(match: str, language: str, code: str) -> str:
    from num2words import num2words

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
            text = _AMOUNT[sign].sub(
                lambda m, code=code: _amount_words(m.group(), language, code), text
            )
        except _UNSPELLABLE:  # any failure ends the treatment of currencies there, without a word
            return text
    return text
