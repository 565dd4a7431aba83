"""Times of day and dates in words: "8:30", "10h30", "2024-05-03", "3.5.2024", "۱۴۰۲/۵/۱".

Works on normalised text before it is lower case. Read are times with two digits of minutes, and
dates with four digits of the year. A date like 5/3/2024, which is May or March in English, is left
as it is.
"""

from __future__ import annotations

import functools
import re
from decimal import Decimal

from common.xtts.text import currencies, numbers
from common.xtts.text.amounts import placed

_ALONE, _END = r"(?<![A-Za-z0-9_:.,/])", r"(?![A-Za-z0-9_:/]|[.,][0-9])"
_SUFFIX = r"(?P<after> ?(?:Uhr\b|uur\b|बजे|[ap]\.?m\b\.?))?"
_TIME = re.compile(rf"{_ALONE}([0-9]{{1,2}}):([0-5][0-9])(?::([0-5][0-9]))?{_SUFFIX}{_END}")
_HOUR_MARK = re.compile(
    rf"{_ALONE}([0-9]{{1,2}}) ?h(?: ?([0-5][0-9]))?(?![A-Za-z0-9_'/])"
)  # 10h30, 20 h
_DOTTED = re.compile(rf"{_ALONE}([0-9]{{1,2}})\.([0-5][0-9]) ?(?:Uhr|uur)\b")
_ONE_O_CLOCK = re.compile(r"(?<![A-Za-z0-9_:.,/])1(?= Uhr\b)")
# "1990s" anywhere, but "30s" may be seconds: two digits after an apostrophe or one of these words.
_BEFORE_DECADE = "the |mid-|early |late |his |her |their |my |our "
_DECADE = re.compile(
    r"(?<![A-Za-z0-9_:.,/$£€])(?:'?([12][0-9][0-9])0'?s\b|'([2-9])0s\b)|"
    + "|".join(rf"(?<=\b{word})([2-9])0'?s\b" for word in _BEFORE_DECADE.split("|")),
    re.IGNORECASE,
)
_HAS_TIME = re.compile("[0-9] ?(?:h|[:.] ?[0-5][0-9])")

_YEAR_FIRST = re.compile(
    r"(?<![A-Za-z0-9_./-])([12][0-9]{3})([-/])(0?[1-9]|1[0-2])\2(0?[1-9]|[12][0-9]|3[01])(?![A-Za-z0-9_/]|[-.][0-9])"
)
_YEAR_FIRST_DOTS = re.compile(
    r"(?<![A-Za-z0-9_./-])([12][0-9]{3})(\. ?)(0?[1-9]|1[0-2])\."
    r" ?(0?[1-9]|[12][0-9]|3[01])\.?(?![A-Za-z0-9_/])"
)
_YEAR_LAST = re.compile(
    r"(?<![A-Za-z0-9_./-])([0-9]{1,2})(\."
    r" ?|/|-)([0-9]{1,2})\2([12][0-9]{3})(?![A-Za-z0-9_/]|[-.][0-9])"
)
_HAS_DATE = re.compile("[0-9][-/.] ?[0-9]{1,2}[-/.]")

# {h} and {m}: hours and minutes in words. The second form is of a full hour.
_TIMES = {
    "ar": ("{h} و {m} دقيقة", "{h}"), "cs": ("{h} {m}", "{h}"), "de": ("{h} uhr {m}", "{h} uhr"),
    "en": ("{h} {m}", "{h} o'clock"),
    "es": ("{h} {m}", "{h}"), "fa": ("{h} و {m} دقیقه", "{h}"), "fr": ("{h} {m}", "{h}"),
    "hi": ("{h} बजकर {m} मिनट", "{h} बजे"),
    "hu": ("{h} óra {m}", "{h} óra"), "it": ("{h} e {m}", "{h}"), "ja": ("{h}時{m}分", "{h}時"),
    "ko": ("{h}시 {m}분", "{h}시"),
    "nl": ("{h} uur {m}", "{h} uur"), "pl": ("{h} {m}", "{h}"), "pt": ("{h} e {m}", "{h}"),
    "ru": ("{h} {m}", "{h}"),
    "tr": ("{h} {m}", "{h}"), "zh": ("{h}点{m}分", "{h}点"),
}  # fmt: skip
_SECONDS = {"ja": "{}秒", "ko": " {}초", "zh": "{}秒"}
# Between the hour and minutes below ten, where both would be taken for one number.
_ZEROS = {
    "en": "oh ",
    "es": "cero ",
    "it": "zero ",
    "nl": "",
    "pl": "zero ",
    "pt": "zero ",
    "ru": "ноль ",
    "tr": "sıfır ",
    "fr": "zéro ",
}
_ARABIC_HOURS = (
    "الثانية"
    " عشرة|الواحدة|الثانية|الثالثة|الرابعة|الخامسة|السادسة|السابعة|الثامنة|التاسعة|العاشرة|الحادية"
    " عشرة|الثانية عشرة".split("|")
)
_KOREAN_HOURS = "영 한 두 세 네 다섯 여섯 일곱 여덟 아홉 열 열한 열두".split()

_DATES = {
    "ar": "{d} {m} {y}", "cs": "{d} {m} {y}", "de": "{d} {m} {y}", "en": "{m} {d}, {y}",
    "es": "{d} de {m} de {y}", "fa": "{d} {m} {y}",
    "fr": "{d} {m} {y}", "hi": "{d} {m} {y}", "hu": "{y} {m} {d}", "it": "{d} {m} {y}",
    "ja": "{y}年{m}月{d}日", "ko": "{y}년 {m}월 {d}일",
    "nl": "{d} {m} {y}", "pl": "{d} {m} {y}", "pt": "{d} de {m} de {y}", "ru": "{d} {m} {y} года",
    "tr": "{d} {m} {y}",
    "zh": "{y}年{m}月{d}日",
}  # fmt: skip
_PERSIAN_MONTHS = "فروردین اردیبهشت خرداد تیر مرداد شهریور مهر آبان آذر دی بهمن اسفند".split()
_FIRST_DAY = {"fr": "premier", "it": "primo", "pt": "primeiro"}


def expand(text: str, language: str) -> str:
    """`text` with its times and dates in words; unchanged in a language without rules for them."""
    if language in _DATES and _HAS_DATE.search(text):
        patterns = (
            (_YEAR_FIRST, _YEAR_FIRST_DOTS)
            if language in ("hu", "ko", "ja", "zh")
            else (_YEAR_FIRST,)
        )
        for pattern in patterns:
            text = pattern.sub(lambda m: _date(m, m[1], m[3], m[4], language), text)
        text = _YEAR_LAST.sub(lambda m: _day_first(m, language), text)
    if language == "en":
        text = _DECADE.sub(lambda m: placed(m, _decade(next(filter(None, m.groups()))), "en"), text)
    if language == "de":
        text = _ONE_O_CLOCK.sub("ein", text)
    if language in _TIMES and _HAS_TIME.search(text):
        text = _TIME.sub(lambda m: _time(m, language), text)
        if language in ("fr", "pt"):
            text = _HOUR_MARK.sub(lambda m: _time(m, language), text)
        if language in ("de", "nl"):
            text = _DOTTED.sub(lambda m: _time(m, language), text)
    return text


# -- times ---------------------------------------------------------------------------------------


def _time(match: re.Match, language: str) -> str:
    hour, minute = int(match[1]), int(match[2] or 0)
    if hour > 24:
        return match.group()
    groups = match.groupdict()
    meridiem = (groups.get("after") or "").strip() if language == "en" else ""
    full, sharp = _TIMES[language]
    hours = _hour(hour, language)
    if minute:
        words = full.format(h=hours, m=_minute(minute, language))
    else:
        words = hours if meridiem else _sharp(hour, hours, language, sharp)
    if match.re is _TIME and match[3]:
        words += _SECONDS.get(language, " {}").format(
            numbers.cardinal(str(int(match[3])), language)
        )
    if (groups.get("after") or "").strip() and language not in ("de", "nl", "hi"):
        words += groups["after"] if groups["after"].startswith(" ") else " " + groups["after"]
    return placed(match, words, language)


def _sharp(hour: int, hours: str, language: str, form: str) -> str:
    if language == "en" and not 0 < hour <= 12:
        return hours + " hundred" if hour else "midnight"
    if language == "ru":
        return f"{hours} {_counted(hour, 'час|часа|часов', 'ru')}"
    return form.format(h=hours)


def _hour(hour: int, language: str) -> str:
    if language == "ar" and hour <= 12:
        return _ARABIC_HOURS[hour]
    if language == "ko" and hour <= 12:
        return _KOREAN_HOURS[hour]
    if language == "pl" and hour:
        return _feminine(numbers.ordinal(hour, "pl"))
    if language == "zh" and hour == 2:
        return "两"
    words = numbers.cardinal(str(hour), language).lower()
    if language in ("es", "pt", "fr", "it"):
        words = numbers.agree(words, language, "f")
    if language == "fr":
        return words + (" heure" if hour < 2 else " heures")
    if language == "cs":
        return f"{numbers.agree(words, 'cs', 'f')} {_counted(hour, 'hodina|hodiny|hodin', 'cs')}"
    return numbers.agree(words, "de", "m") if language == "de" else words


def _minute(minute: int, language: str) -> str:
    words = numbers.cardinal(str(minute), language).lower()
    if language == "cs":
        return f"{numbers.agree(words, 'cs', 'f')} {_counted(minute, 'minuta|minuty|minut', 'cs')}"
    return _ZEROS.get(language, "") + words if minute < 10 else words


def _counted(count: int, forms: str, language: str) -> str:
    one, few, many = forms.split("|")
    return {"one": one, "few": few}.get(currencies.plural(language, Decimal(count)), many)


def _feminine(ordinal: str) -> str:
    """Polish: "ósmy" -> "ósma", "dwudziesty trzeci" -> "dwudziesta trzecia"."""
    return " ".join(w[:-1] + "a" if w.endswith("y") else w + "a" for w in ordinal.split()).replace(
        "gia", "ga"
    )


# -- dates ---------------------------------------------------------------------------------------


def _day_first(match: re.Match, language: str) -> str:
    first, second = int(match[1]), int(match[3])
    if language == "en" and match[2] != ". " and match[2] != ".":
        if first > 12 >= second:
            return _date(match, match[4], match[3], match[1], language)
        if second > 12 >= first:
            return _date(match, match[4], match[1], match[3], language)
        return match.group()
    return _date(match, match[4], match[3], match[1], language)


def _date(match: re.Match, year: str, month: str, day: str, language: str) -> str:
    if not (1 <= int(month) <= 12 and 1 <= int(day) <= 31):
        return match.group()
    words = _DATES[language].format(
        d=_day(int(day), language),
        m=_month(int(month), int(year), language),
        y=_year(int(year), language),
    )
    return placed(match, words, language)


def _decade(tens: str) -> str:
    """ "199" -> "nineteen nineties"."""
    number = int(tens) * 10
    words = numbers.year(number, "en") if number > 100 else numbers.cardinal(str(number), "en")
    return words[:-1] + "ies" if words.endswith("ty") else words + "s"


def _day(day: int, language: str) -> str:
    if day == 1 and language in _FIRST_DAY:
        return _FIRST_DAY[language]
    if language in ("en", "de"):
        return numbers.ordinal(day, language)
    if language in ("pl", "ru", "cs"):
        return _genitive(numbers.ordinal(day, language), language)
    return numbers.cardinal(str(day), language)


def _genitive(ordinal: str, language: str) -> str:
    """ "dwudziesty trzeci" -> "dwudziestego trzeciego"; in Russian the last word alone is
    inflected.
    """
    if language == "pl":
        return " ".join((w[:-1] if w.endswith("y") else w) + "ego" for w in ordinal.split())
    if language == "cs":
        return " ".join(w[:-1] + "ého" if w.endswith("ý") else w + "ho" for w in ordinal.split())
    head, space, last = ordinal.rpartition(" ")
    return head + space + ("третьего" if last == "третий" else last[:-2] + "ого")


def _month(month: int, year: int, language: str) -> str:
    if language in ("zh", "ja"):
        return numbers.cardinal(str(month), language)
    if language == "ko":
        return {6: "유", 10: "시"}.get(month) or numbers.cardinal(str(month), "ko")
    if language == "fa" and 1200 <= year <= 1500:
        return _PERSIAN_MONTHS[month - 1]
    return currencies.plain(_months(language)[month], language)


@functools.cache
def _months(language: str) -> dict[int, str]:
    context = "stand-alone" if language == "fa" else "format"
    return dict(currencies.locale(language).months[context]["wide"])


def _year(year: int, language: str) -> str:
    if language == "zh":
        return numbers.digits_in_chinese(str(year))
    if language in ("en", "de"):
        return numbers.year(year, language)
    if language == "ru":
        return _genitive(numbers.ordinal(year, "ru"), "ru")
    return numbers.cardinal(str(year), language).lower()
