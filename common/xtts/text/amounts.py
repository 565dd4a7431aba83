"""Amounts of money, counted units and shortened numbers in words: "$5.5 million", "20k", "12 km",
"SGD 5".

Works on text that is normalised but not yet lower case ("5 M" and "5 m" differ). It leaves no digit
and no sign of what it reads; an amount in a currency without a name is a TextError, never only the
number.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from dataclasses import dataclass
from decimal import Decimal

from common.xtts.text import currencies, numbers, rules
from common.xtts.text.errors import TextError

_UNSPACED = ("zh", "ja")
_FIGURE = r"(?:[0-9]{1,3}(?:[ '][0-9]{3}){1,5}(?![0-9])|[0-9]+)(?:[.,][0-9]+){0,9}|[.,][0-9]+"

_FEET = re.compile("(?<![\\w.,'])([1-9])'(1[01]|[0-9])\"")  # 5'10"
_ASCII_DIGIT = re.compile("[0-9]")
_NO_CENTS = re.compile("(?<=[0-9])[.,]--?(?![0-9-])")  # "5,- €" and "20.--"


@dataclass(frozen=True)
class Figure:
    """A number as digits: 1250.50 is ("1250", "50")."""

    whole: str
    fraction: str = ""

    @property
    def value(self) -> Decimal:
        """Exact; plural forms depend on whether there are decimals, so 22 is not 22.0."""
        return Decimal(f"{self.whole}.{self.fraction}" if self.fraction else self.whole)

    def shifted(self, power: int) -> Figure:
        """Times ten to the power."""
        moved = self.fraction.ljust(power, "0")
        return Figure((self.whole + moved[:power]).lstrip("0") or "0", moved[power:].rstrip("0"))


def parse(written: str, language: str, currency: str | None = None) -> Figure | None:
    """The number as written, with both separators, spaces or apostrophes between groups; None for
    "2.0.1".

    A single separator before three digits groups thousands where the language, or the currency's
    home, groups with it.
    """
    written = written.replace(" ", "").replace("'", "")
    marks = re.findall("[.,]", written)
    parts = re.split("[.,]", written)
    if not marks:
        return Figure(written)
    if len(marks) > 1:
        decimals = len(set(marks)) == 2 and marks.count(marks[-1]) == 1
        groups = parts[:-1] if decimals else parts
        if (len(set(marks[:-1] if decimals else marks)) > 1) or not _grouped(groups):
            return None
        return Figure("".join(groups), parts[-1] if decimals else "")
    grouping = "," if language in rules.COMMA_GROUPS else "."
    if currency in currencies.COMMA_CURRENCIES and marks[0] == ",":
        grouping = ","
    if (
        marks[0] == grouping
        and len(parts[1]) == 3
        and 0 < len(parts[0]) <= 3
        and parts[0][0] != "0"
    ):
        return Figure(parts[0] + parts[1])
    return Figure(parts[0] or "0", parts[1])


def _grouped(groups: list[str]) -> bool:
    """Threes, or twos and a three as in India (1,00,000)."""
    middle = {len(g) for g in groups[1:-1]}
    return 0 < len(groups[0]) <= 3 and len(groups[-1]) == 3 and (middle <= {3} or middle == {2})


def expand(text: str, language: str) -> str:
    """`text` with every amount of money, unit and shortened number in words.

    TextError: a currency sign beside a number has no name in `language`.
    """
    if _ASCII_DIGIT.search(text) or not text.isascii() and any(c.isdigit() for c in text):
        text = _NO_CENTS.sub("", text)
        if language == "en":
            text = _FEET.sub(
                lambda m: f"{number(Figure(m[1]), 'en')} foot {number(Figure(m[2]), 'en')}", text
            )
        for pattern in _money_patterns(language):
            text = pattern.sub(lambda m: _money(m, language), text)
        text = _counted(language).sub(lambda m: _unit(m, language), text)
        text = _scaled(language).sub(lambda m: _shortened(m, language), text)
    return _name_signs(text, language)


def placed(match: re.Match, words: str, language: str) -> str:
    """Words in place of a match, separated from letters beside it; a dot that ends the text
    stays.
    """
    if match.group().endswith(".") and not match.string[match.end() :].strip():
        words += "."
    if language in _UNSPACED or language == "ko":  # particles follow without a space
        return words
    before, after = match.string[: match.start()][-1:], match.string[match.end() :][:1]
    return (" " if before.isalnum() else "") + words + (" " if after.isalnum() else "")


def negative(words: str, language: str) -> str:
    """The words with the language's word for the minus sign; unchanged where none is known."""
    sign = numbers.minus_word(language)
    return words if sign is None else sign + ("" if language in _UNSPACED else " ") + words


def number(figure: Figure, language: str) -> str:
    """The figure in words."""
    if figure.fraction:
        return numbers.decimal(figure.whole, figure.fraction, language).lower()
    return numbers.cardinal(figure.whole, language).lower()


# -- what stands for money -----------------------------------------------------------------------


def _beside(language: str) -> str:
    """What may not be beside a code or a unit, for use in brackets: letters, but in East Asia
    particles follow without a space.
    """
    return "A-Za-z0-9_" if language in ("zh", "ja", "ko") else r"\w"


@functools.cache
def _marks(language: str) -> tuple[str, str]:
    """Signs as a pattern before and after a number: one that begins or ends with a letter must not
    be part of a word.
    """
    signs = sorted(currencies.signs(language), key=len, reverse=True)
    word = _beside(language)
    before = [(rf"(?<![{word}])" if s[0].isalpha() else "") + re.escape(s) for s in signs]
    after = [re.escape(s) + (rf"(?![{word}])" if s[-1].isalpha() else "") for s in signs]
    return "|".join([*before, f"[{_unnamed_signs()}]"]), "|".join([*after, f"[{_unnamed_signs()}]"])


@functools.cache
def _money_patterns(language: str) -> tuple[re.Pattern, ...]:
    """By how close the sign is: "$30" and "30€" before "30 €" and "€ 30", so that a sign between
    two numbers goes with the one it touches.
    """
    word, scales = _beside(language), _scale_words(language)
    before, after = _marks(language)
    codes, all_codes = (
        "|".join(sorted(c)) for c in (currencies.CODES, currencies.CODES | currencies.LATE_CODES)
    )
    minus = rf"(?P<minus>(?<![{word}.,)])-)?"
    begin, end = rf"(?<![{word}.,])", rf"(?![{word}])"
    figure = rf"(?P<figure>{_FIGURE})(?:(?P<range> ?- ?)(?P<to>{_FIGURE}))?"
    tight = rf"(?P<inner>-)?(?P<figure>{_FIGURE})(?:(?P<range>-)(?P<to>{_FIGURE}))?"
    attached = (
        rf"(?:(?P<scale>[kKmMbBT]|bn|mn|mln|tn){end})?(?: ?(?P<word>{scales}){end})?(?:"
        rf" (?P<code>{codes}){end})?"
    )
    spaced = rf"(?: ?(?P<scale>[kKMBT]|bn|mn|mln|tn)(?![a-z]))?(?: ?(?P<word>{scales}))?"
    return (
        re.compile(rf"{minus}(?<![0-9])(?P<currency>{before}){tight}{attached}"),
        re.compile(rf"{minus}{begin}{figure}{spaced}(?P<currency>{after})(?![0-9])"),
        re.compile(rf"{minus}{begin}{figure}{spaced} (?P<currency>(?:{all_codes}){end}|{after})"),
        re.compile(
            rf"{minus}(?<![0-9])(?<![0-9] )(?P<currency>(?<![{word}])(?:{codes})|{before})"
            rf" {tight}{attached}"
        ),
        re.compile(rf"{minus}{begin}{figure}{spaced}(?P<currency>{codes}){end}"),
        re.compile(rf"{minus}(?<![{word}])(?P<currency>{codes}){tight}{attached}"),
    )


@functools.cache
def _unnamed_signs() -> str:
    """Every other currency sign of Unicode: it is found, to be refused by name."""
    known = set("".join(currencies.SIGNS))
    return "".join(
        chr(c)
        for c in (*range(0xA2, 0x3000), *range(0xA800, 0xABFF))
        if unicodedata.category(chr(c)) == "Sc" and chr(c) not in known
    )


def _money(match: re.Match, language: str) -> str:
    found = match.groupdict()
    sign = found.get("code") or found["currency"]
    code = currencies.signs(language).get(sign) or sign
    figure = parse(found["figure"], language, code)
    if figure is None:
        raise TextError(f"{match.group().strip()!r} is no amount: how are its digits grouped?")
    power = _power(found.get("scale"), found.get("word"), language)
    if code == "¢":
        words = _cents(figure, language)
    else:
        words = amount(figure, code, language, power, found.get("word"), sign)
    if found["range"]:
        last = parse(found["to"], language, code)
        if last is None:
            raise TextError(f"{match.group().strip()!r} is no amount: how are its digits grouped?")
        words = (
            number(figure, language)
            + " - "
            + amount(last, code, language, power, found.get("word"), sign)
        )
    if found["minus"] or found.get("inner"):
        words = negative(words, language)
    return placed(match, words, language)


def amount(
    figure: Figure,
    code: str,
    language: str,
    power: int = 0,
    typed: str | None = None,
    sign: str = "",
) -> str:
    """An amount of money in words.

    Args:
        power: the power of ten of a suffix ("k" is 3). typed: the suffix if it is a word.
        sign: as written, for the message of the TextError of a currency without a name.
    """
    mantissa = figure
    if power and not (figure.fraction and power >= 6 and language in rules.DECIMAL_SCALES):
        figure, power = figure.shifted(power), 0
    count = (
        Decimal(10**power) if power else figure.value
    )  # millions take the plural, however many they are
    found = currencies.name(language, code, count)
    if found is None:
        raise TextError(f"no word in {language} for the currency {sign or code}")
    name, gender = found
    if power:
        words = number(mantissa, language) + " " + _scale_word(power, typed, language)
    elif 0 < len(figure.fraction) <= 2 and _has_small(language, code):
        return _with_small(figure, code, language)
    else:
        words = number(figure, language)
        if not figure.fraction:
            words = numbers.agree(words, language, gender)
    return _joined(words, name, language, count)


def _joined(words: str, name: str, language: str, count: Decimal) -> str:
    if language in _UNSPACED:
        return words + name
    if language == "ar" and count in (1, 2):  # the noun alone says one and two
        return (
            name + " واحد" if count == 1 else (name if name.endswith("ان") else words + " " + name)
        )
    of = rules.MILLIONS_OF.get(language)
    if of and count >= 10**6 and count % 10**6 == 0:
        elided = language == "fr" and name[0] in "aeéiou"
        return f"{words} d'{name}" if elided else f"{words} {of} {name}"
    return f"{words} {name}"


def _has_small(language: str, code: str) -> bool:
    return currencies.small_name(language, code, 2) is not None


def _with_small(figure: Figure, code: str, language: str) -> str:
    cents = int(figure.fraction.ljust(2, "0"))
    parts = []
    if int(figure.whole) or not cents:
        name, gender = currencies.name(language, code, Decimal(figure.whole))
        whole = numbers.agree(number(Figure(figure.whole), language), language, gender)
        parts.append(_joined(whole, name, language, Decimal(figure.whole)))
    if cents:
        small, small_gender = currencies.small_name(language, code, cents)
        words = numbers.agree(number(Figure(str(cents)), language), language, small_gender)
        parts.append(_joined(words, small, language, Decimal(cents)))
    return rules.MONEY_JOINERS.get(language, rules.DEFAULT_CURRENCY_JOINER).join(parts)


def _cents(figure: Figure, language: str) -> str:
    found = (
        currencies.small_name(language, "USD", int(figure.value)) if not figure.fraction else None
    )
    if found is None:
        raise TextError(f"no word in {language} for the currency ¢")
    return _joined(
        numbers.agree(number(figure, language), language, found[1]),
        found[0],
        language,
        figure.value,
    )


def _name_signs(text: str, language: str) -> str:
    """Read signs that stand alone as the currency's name; refuse those without a name in
    `language`.

    "$" and "£" have XTTS's own words and are left to the table of symbols.
    """
    if text.isascii() and "$" not in text:  # most rows of a scan; no other ASCII sign is money's
        return text
    for sign in {c for c in text if unicodedata.category(c) == "Sc"} - set(
        rules.symbol_words(language, parity=False)
    ):
        code = currencies.signs(language).get(sign)
        found = currencies.name(language, code, Decimal(0)) if code else None
        if found is None:
            raise TextError(f"no word in {language} for the currency sign {sign}")
        text = text.replace(sign, f" {found[0]} ")
    return text


# -- thousands, millions -------------------------------------------------------------------------


@functools.cache
def _scale_words(language: str) -> str:
    words = {**rules.SCALE_WORDS.get(language, {}), **rules.SCALE_ABBREVIATIONS.get(language, {})}
    return "|".join(re.escape(w) for w in sorted(words, key=len, reverse=True)) or r"(?!)"


_LETTER_POWERS = {"k": 3, "m": 6, "mn": 6, "mln": 6, "b": 9, "bn": 9, "t": 12, "tn": 12}


def _power(letter: str | None, word: str | None, language: str) -> int:
    power = _LETTER_POWERS[letter.lower()] if letter else 0
    words = {**rules.SCALE_WORDS.get(language, {}), **rules.SCALE_ABBREVIATIONS.get(language, {})}
    return power + (words[word] if word else 0)


def _scale_word(power: int, typed: str | None, language: str) -> str:
    """The word for a power of ten after a decimal number: as typed, else the
    language's.
    """
    if typed and typed in rules.SCALE_WORDS.get(language, {}):
        return typed.lower()
    words = rules.DECIMAL_SCALES[language].split("|")
    if power // 3 - 2 >= len(words):
        raise TextError(f"no word in {language} for ten to the power of {power}")
    return words[power // 3 - 2]


@functools.cache
def _scaled(language: str) -> re.Pattern:
    """Read a number with a suffix that is not a unit: "20k", "1.5M", "5 Mio.". 4K and 8K are names
    of screens.
    """
    short = "|".join(re.escape(w) for w in rules.SCALE_ABBREVIATIONS.get(language, {}))
    spaced = rf"| ?(?P<word>{short})" if short else r"|(?P<word>(?!))"
    word = _beside(language)
    return re.compile(
        rf"(?<![{word}.,])(?![248]K\b)(?P<figure>{_FIGURE})(?:(?P<scale>[kKM]|bn)(?![{word}]){spaced}(?![{word}]))"
    )


def _shortened(match: re.Match, language: str) -> str:
    figure = parse(match["figure"], language)
    if figure is None:
        return match.group()
    power = _power(match["scale"], match["word"], language)
    if figure.fraction and power >= 6 and language in rules.DECIMAL_SCALES:
        return placed(
            match, number(figure, language) + " " + _scale_word(power, None, language), language
        )
    return placed(match, number(figure.shifted(power), language), language)


# -- units ---------------------------------------------------------------------------------------


@functools.cache
def _counted(language: str) -> re.Pattern:
    units = {**rules.UNITS, **rules.LOCAL_UNITS.get(language, {})}
    written = "|".join(re.escape(u) for u in sorted(units, key=len, reverse=True))
    word = _beside(language)
    figures = rf"(?P<figure>{_FIGURE})(?:(?P<range> ?- ?)(?P<to>{_FIGURE}))?"
    return re.compile(
        rf"(?P<minus>(?<![{word}.,)])-)?(?<![{word}.,]){figures}"
        rf" ?(?P<unit>{written})(?![{word}²³/'])"
    )


def _unit(match: re.Match, language: str) -> str:
    first = parse(match["figure"], language)
    last = parse(match["to"], language) if match["range"] else first
    unit = {**rules.UNITS, **rules.LOCAL_UNITS.get(language, {})}[match["unit"]]
    pattern = _unit_pattern(language, unit, last.value) if first and last else None
    if pattern is None:
        return match.group()
    words = number(last, language)
    words = pattern.replace("{0}", words if last.fraction else numbers.agree(words, language, "m"))
    if match["range"]:
        words = number(first, language) + " - " + words
    return placed(match, negative(words, language) if match["minus"] else words, language)


@functools.lru_cache(maxsize=1 << 12)
def _unit_pattern(language: str, unit: str, value: Decimal) -> str | None:
    """ "{0} kilometres" as it goes with `value`; None where CLDR has none for the language."""
    known = currencies.locale(language)
    if known is None or (language, unit) in rules.UNIT_PATTERNS:
        return rules.UNIT_PATTERNS.get((language, unit))
    if value >= 10**6:
        value = value % 10**6 + 10**6  # of the same plural form
    if value.as_tuple().exponent < -3:
        value = round(value, 3)
    from babel.units import format_unit

    written = currencies.plain(format_unit(value, unit, "long", "0.###", locale=known), language)
    pattern, found = re.subn(r"[0-9]+(?:[.,٫][0-9]+)?", "{0}", written, count=1)
    if not found:
        return written if value in (1, 2) else None  # Arabic says one and two by the noun
    return pattern.replace("{0} ", "{0}") if language in _UNSPACED else pattern
