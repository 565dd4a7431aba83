"""Chinese: writes out numbers, dates, amounts and telephone numbers in Chinese characters, and
converts to pinyin.

Source: the rules of XTTS's Chinese normaliser (coqui-tts, TTS/tts/layers/xtts/zh_num2words.py),
rewritten. Each rule finds its matches in the text before the rule and replaces their first
occurrence, as there.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable

_DIGITS = "零一二三四五六七八九"
# Powers of ten that have a character of their own, largest first.
_UNITS = [(4 * i, c) for i, c in reversed(list(enumerate("万亿兆京垓秭穰沟涧正载", start=1)))] + [
    (3, "千"),
    (2, "百"),
    (1, "十"),
]
_ZERO, _POINT, _TEN = (
    0,
    -1,
    1,
)  # markers in a list of symbols: digits are 0..9, units are (power, character)

_MEASURES = (
    "匹张座回场尾条个首阙阵网炮顶丘棵只支袭辆挑担颗壳窠曲墙群腔砣客贯扎捆刀令打手罗坡山岭江溪钟队单双对出口头脚板跳枝件贴针线管名"
    "位身堂课本页家户层丝毫厘分钱两斤铢石钧锱忽寸尺丈里寻常铺程撮勺合升斗盘碗碟叠桶笼盆盒杯斛锅簋篮罐瓶壶卮盏箩箱煲啖袋钵年月日季刻"
    "时周天秒旬纪岁世更夜春夏秋冬代伏辈丸泡粒幢堆根道面片块"
)
_MONEY_UNIT = "(?:(?:亿|千万|百万|万|千|百)?[元块]|亿|千万|百万|万|千|百|角|毛|分)"
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_DATE = re.compile(r"\D+((?:(?:[089]\d|(?:19|20)\d{2})年)?(?:\d{1,2}月(?:\d{1,2}[日号])?)?)")
_MONEY = re.compile(rf"\D+(\d+(?:\.\d+)?[多余几]?{_MONEY_UNIT}(?:\d{_MONEY_UNIT}?)?)")
_MOBILE = re.compile(r"\D((?:\+?86 ?)?1(?:[38]\d|5[0-35-9]|7[678]|9[89])\d{8})\D")
_LANDLINE = re.compile(r"\D((?:0(?:10|2[1-3]|[3-9]\d{2})-?)?[1-9]\d{6,7})\D")
_FRACTION = re.compile(r"(\d+/\d+)")
_PERCENT = re.compile(r"(\d+(?:\.\d+)?%)")
_MEASURED = re.compile(rf"(\d+(?:\.\d+)?)[多余几]?(?:[{_MEASURES}]|[千毫微]克|[千分厘毫微]米)")
_LONG = re.compile(r"(\d{4,32})")
_ANY = re.compile(f"({_NUMBER.pattern})")
_LATIN_TWO = re.compile("([a-zA-Z]+二[a-zA-Z]+)")
_HAS_DIGIT = re.compile(r"\d")

_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、"
    "〃《》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏·〈〉-"
)
_TO_COMMA = str.maketrans(dict.fromkeys(_PUNCTUATION + string.punctuation, ","))

_GROUPS = re.compile(r"(?<![\d,])\d{1,3}(?:,\d{3})+(?:\.\d+)?(?![\d,])")
_DECIMAL = re.compile(r"(?<![\d.])\d+\.\d+(?![\d.%])")
_SPOKEN = {"&": " 和 ", "@": " 在 ", "#": " 号 ", "$": " 美元 ", "€": " 欧元 "}
_MINUS = re.compile(r"(?<![0-9A-Za-z])[-−](?=\d)")
_LONE_PERCENT = re.compile(r"(?<!\d)%")


def number_words(digits: str, *, two_as_liang: bool = True) -> str:
    """A decimal number such as "1005.2" as Chinese characters; "" for two or more zeros, as XTTS
    has it (see `expand_numbers`).
    """
    whole, _, fraction = digits.partition(".")
    symbols = _symbols(whole) if len(whole) > 1 else [int(c) for c in whole]
    if fraction:
        symbols += [_POINT, *(int(c) for c in fraction)]
    if two_as_liang:
        symbols = [_liang(symbols, i) for i in range(len(symbols))]
    words = "".join(
        (
            s
            if isinstance(s, str)
            else s[1]
            if isinstance(s, tuple)
            else "点"
            if s == _POINT
            else _DIGITS[s]
        )
        for s in symbols
    )
    if words.startswith("点"):
        return "零" + words
    return words[1:] if words.startswith("一十") else words


def digit_words(digits: str) -> str:
    """Digits one by one."""
    return "".join(_DIGITS[int(c)] for c in digits)


def _symbols(digits: str) -> list:
    significant = digits.lstrip("0")
    if not significant:
        return []
    if len(significant) == 1:
        return [_ZERO, int(significant)] if len(digits) > 1 else [int(significant)]
    power, unit = next((p, c) for p, c in _UNITS if p < len(significant))
    return [*_symbols(digits[:-power]), (power, unit), *_symbols(significant[-power:])]


def _liang(symbols: list, i: int):
    """The symbol at i; a 2 before a unit other than ten is 两, unless it follows a digit or ten."""
    if (
        symbols[i] != 2
        or i + 1 == len(symbols)
        or not isinstance(symbols[i + 1], tuple)
        or symbols[i + 1][0] == _TEN
    ):
        return symbols[i]
    if i and (not isinstance(symbols[i - 1], tuple) or symbols[i - 1][0] == _TEN):
        return symbols[i]
    return "两"


def expand_numbers(text: str, *, parity: bool) -> str:
    """Numbers to characters, then every punctuation mark to a comma.

    Without `parity`, what XTTS loses is kept: grouped thousands ("1,000"), runs of zeros, long
    decimals and symbols.
    """
    if not parity:
        text = _spoken_signs(text)
    if parity or _HAS_DIGIT.search(text):
        text = _expand(text, parity)
    return text.translate(_TO_COMMA)


def _spoken_signs(text: str) -> str:
    text = text.replace("％", "%")
    text = _GROUPS.sub(lambda m: number_words(m.group().replace(",", "")), text)
    text = _DECIMAL.sub(lambda m: number_words(m.group()), text)
    text = _MINUS.sub("负", text)
    for sign, words in _SPOKEN.items():
        text = text.replace(sign, words)
    return _LONE_PERCENT.sub(" 百分之 ", text)


def _expand(text: str, parity: bool) -> str:
    text = "^" + text + "$"
    cardinal = number_words if parity else _whole_number
    text = _each(_DATE, text, lambda s: _date(s, cardinal))
    text = _each(_MONEY, text, lambda s: _NUMBER.sub(lambda m: cardinal(m.group()), s))
    text = _each(_MOBILE, text, lambda s: digit_words(s.strip("+").replace(" ", "")))
    text = _each(_LANDLINE, text, lambda s: digit_words(s.replace("-", "")))
    text = _each(
        _FRACTION, text, lambda s: cardinal(s.split("/")[1]) + "分之" + cardinal(s.split("/")[0])
    )
    text = _each(_PERCENT, text.replace("％", "%"), lambda s: "百分之" + cardinal(s.rstrip("%")))
    text = _each(_MEASURED, text, cardinal)
    text = _each(_LONG, text, digit_words)
    text = _each(_ANY, text, cardinal)
    text = _each(_LATIN_TWO, text, lambda s: s.replace("二", "2"))  # B2B, P2P
    return text.lstrip("^").rstrip("$") if parity else text[1:-1]


def _whole_number(digits: str) -> str:
    return (
        number_words(digits)
        if digits.strip("0.") or len(digits) == 1 or "." in digits
        else digit_words(digits)
    )


def _each(pattern: re.Pattern, text: str, spell: Callable[[str], str]) -> str:
    for match in list(pattern.finditer(text)):
        if match.group(1):
            text = text.replace(match.group(1), spell(match.group(1)), 1)
    return text


def _date(date: str, cardinal: Callable[[str], str]) -> str:
    year, mark, rest = date.rpartition("年")
    words = digit_words(year) + mark
    month, mark, day = rest.rpartition("月")
    if mark:
        words += cardinal(month) + mark
    return words + (cardinal(day[:-1]) + day[-1] if day else "")


def to_pinyin(text: str) -> str:
    """Pinyin with tone digits, the neutral tone as 5; other characters stay.

    ImportError without pypinyin.
    """
    import pypinyin

    return "".join(
        p[0]
        for p in pypinyin.pinyin(
            text, style=pypinyin.Style.TONE3, heteronym=False, neutral_tone_with_five=True
        )
    )
