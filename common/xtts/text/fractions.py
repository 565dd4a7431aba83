"""Fractions and negative numbers in words: "½", "2½", "3/5", "-5".

A slash is a fraction where the numerator is the smaller number and the denominator has a name (2 to
10). Persian writes its decimal point as a slash: ۳/۵ is three and a half.
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal

from common.xtts.text import numbers
from common.xtts.text.amounts import placed
from common.xtts.text.currencies import plural

_SLASH = "\u2044"
_VULGAR = re.compile("(?:([0-9\u0660-\u0669\u06f0-\u06f9]) ?)?([\u00bc-\u00be\u2150-\u215e])")
_FRACTION = re.compile(
    rf"(?<![A-Za-z0-9_.,/{_SLASH}])(?:([0-9]+)"
    rf" )?([0-9]+)([/{_SLASH}])([0-9]+)(?![A-Za-z0-9_/{_SLASH}]|[.,][0-9])"
)
_PERSIAN_POINT = re.compile(r"(?<![\w/.,])([۰-۹0-9]+)/([۰-۹0-9]+)(?![\w/]|[.,][0-9۰-۹])")
_PERSIAN_FRACTIONS = frozenset({("1", "2"), ("1", "3"), ("2", "3"), ("1", "4"), ("3", "4")})
_MINUS = re.compile(r"(?:(?<=[\s(\[{\"'=<>×*])|^)-(?=[0-9])")
_MINUS_IN_CHINESE = re.compile(r"(?<![A-Za-z0-9_.,)])-(?=[0-9])")

# The names of halves to tenths, by plural form: one and other; one, few and many in Slavic
# languages; one, two and more in Arabic.
_NAMES = {
    "en": "half|halves third|thirds quarter|quarters fifth|fifths sixth|sixths seventh|sevenths"
    " eighth|eighths ninth|ninths tenth|tenths",
    "de": "halb|halbe drittel viertel fünftel sechstel siebtel achtel neuntel zehntel",
    "fr": "demi|demis tiers quart|quarts cinquième|cinquièmes sixième|sixièmes septième|septièmes"
    " huitième|huitièmes neuvième|neuvièmes"
    " dixième|dixièmes",
    "es": "medio|medios tercio|tercios cuarto|cuartos quinto|quintos sexto|sextos séptimo|séptimos"
    " octavo|octavos noveno|novenos"
    " décimo|décimos",
    "pt": "meio|meios terço|terços quarto|quartos quinto|quintos sexto|sextos sétimo|sétimos"
    " oitavo|oitavos nono|nonos décimo|décimos",
    "it": "mezzo|mezzi terzo|terzi quarto|quarti quinto|quinti sesto|sesti settimo|settimi"
    " ottavo|ottavi nono|noni decimo|decimi",
    "nl": "half|halve derde kwart vijfde zesde zevende achtste negende tiende",
    "pl": "druga|drugie|drugich trzecia|trzecie|trzecich czwarta|czwarte|czwartych"
    " piąta|piąte|piątych szósta|szóste|szóstych"
    " siódma|siódme|siódmych ósma|ósme|ósmych dziewiąta|dziewiąte|dziewiątych"
    " dziesiąta|dziesiąte|dziesiątych",
    "ru": "вторая|вторых|вторых третья|третьих|третьих четвёртая|четвёртых|четвёртых"
    " пятая|пятых|пятых шестая|шестых|шестых"
    " седьмая|седьмых|седьмых восьмая|восьмых|восьмых девятая|девятых|девятых"
    " десятая|десятых|десятых",
    "cs": "polovina|poloviny|polovin třetina|třetiny|třetin čtvrtina|čtvrtiny|čtvrtin"
    " pětina|pětiny|pětin šestina|šestiny|šestin"
    " sedmina|sedminy|sedmin osmina|osminy|osmin devítina|devítiny|devítin"
    " desetina|desetiny|desetin",
    "tr": "ikide üçte dörtte beşte altıda yedide sekizde dokuzda onda",
    "hu": "fél harmad negyed ötöd hatod heted nyolcad kilenced tized",
    "ar": "نصف|نصفان|أنصاف ثلث|ثلثان|أثلاث ربع|ربعان|أرباع خمس|خمسان|أخماس سدس|سدسان|أسداس"
    " سبع|سبعان|أسباع ثمن|ثمنان|أثمان"
    " تسع|تسعان|أتساع عشر|عشران|أعشار",
    "fa": "دوم سوم چهارم پنجم ششم هفتم هشتم نهم دهم",
}  # fmt: skip
# Any denominator: numerator {n}, denominator {d}.
_PATTERNS = {"hi": "{n} बटा {d}", "ja": "{d}分の{n}", "ko": "{d}분의 {n}", "zh": "{d}分之{n}"}
_AND = {
    "ar": " و ", "cs": " a ", "de": " und ", "en": " and ", "es": " y ", "fa": " و ",
    "fr": " et ", "hi": " सही ", "hu": " egész ",
    "it": " e ", "ja": "と", "ko": "와 ", "nl": " en ", "pl": " i ", "pt": " e ", "ru": " и ",
    "tr": " tam ", "zh": "又",
}  # fmt: skip


def plain(text: str, language: str) -> str:
    """Fractions of one character as digits around U+2044, before digits are translated; in Persian
    the slash as a decimal sign.
    """
    text = _VULGAR.sub(
        lambda m: (m[1] + " " if m[1] else "") + unicodedata.normalize("NFKC", m[2]), text
    )
    return _PERSIAN_POINT.sub(_persian_point, text) if language == "fa" and "/" in text else text


def _persian_point(match: re.Match) -> str:
    pair = tuple("".join(str(unicodedata.decimal(c)) for c in part) for part in match.groups())
    if pair in _PERSIAN_FRACTIONS or match.group().isascii():
        return match.group()
    return match[1] + "\u066b" + match[2]


def expand(text: str, language: str) -> str:
    """`text` with fractions and the minus signs of numbers in words."""
    if _SLASH in text or "/" in text:
        text = _FRACTION.sub(lambda m: _fraction(m, language), text).replace(_SLASH, "/")
    sign = numbers.minus_word(language)
    if sign and "-" in text:
        pattern = _MINUS_IN_CHINESE if language in ("zh", "ja") else _MINUS
        text = pattern.sub(sign + ("" if language in ("zh", "ja") else " "), text)
    return text


def _fraction(match: re.Match, language: str) -> str:
    n, d = int(match[2]), int(match[4])
    words = _words(n, d, language) if 0 < n < d else None
    if words is None:
        return match.group()
    if match[1]:
        words = numbers.cardinal(match[1], language).lower() + _AND[language] + words
    return placed(match, words, language)


def _words(n: int, d: int, language: str) -> str | None:
    pattern = _PATTERNS.get(language)
    if pattern:
        return pattern.format(
            n=numbers.cardinal(str(n), language), d=numbers.cardinal(str(d), language)
        )
    if language not in _NAMES or not 2 <= d <= 10:
        return None
    forms = _NAMES[language].split()[d - 2].split("|")
    if language == "ar":
        return (
            forms[0]
            if n == 1
            else forms[1]
            if n == 2
            else numbers.cardinal(str(n), "ar") + " " + forms[2]
        )
    if language in ("tr", "hu") and (n, d) == (1, 2):
        return {"tr": "yarım", "hu": "fél"}[language]
    count = numbers.cardinal(str(n), language).lower()
    if language == "tr":
        return f"{forms[0]} {count}"
    if language == "nl":
        count = count.replace("één", "een")  # "een half", not "one half"
    gender = "f" if language in ("pl", "ru", "cs") else "m"
    return f"{numbers.agree(count, language, gender)} {_form(forms, n, language)}"


def _form(forms: list[str], n: int, language: str) -> str:
    if len(forms) < 3:
        return forms[0] if n == 1 else forms[-1]
    return forms[{"one": 0, "few": 1}.get(plural(language, Decimal(n)), 2)]
