"""Amounts and numbers in 18 languages, read out by the product and read back by `number_reader`:
same value, same unit.
"""

import random
import re
from decimal import Decimal
from pathlib import Path

import pytest

from common.xtts.text import amounts, chinese, clock, currencies, fractions, numbers, rules
from common.xtts.text import clean as text
from common.xtts.text.clean import clean
from tests.support.number_reader import Unreadable, read

ROOT = Path(__file__).parents[2]
LANGUAGES = "en de fr es pt it pl ru tr nl cs hu ar hi fa zh ja ko".split()
COMMAS = {"en", "ru", "fa", "hi", "zh", "ja", "ko"}  # thousands
SIGNS = {
    "$": "USD", "€": "EUR", "£": "GBP", "¥": "JPY", "₹": "INR", "₩": "KRW", "₽": "RUB",
    "₺": "TRY", "₪": "ILS", "฿": "THB", "₴": "UAH",
    "﷼": "IRR",
}  # fmt: skip
ORDER = [*SIGNS.values(), "SGD", "CHF"]
# How the name of each currency (and of its hundredth part) begins, in the order above; of the last
# two any part of the name.
NOUNS = {
    "en": (
        "dollar euro pound yen rupee won roubl lira|liras shekel baht hryvnia rial singapore franc"
    ),
    "de": "dollar euro pfund yen rupie won rubel lira schekel baht hrywnja rial singapur frank",
    "fr": (
        "dollar euro livre yen roupie won rouble livre.?.turque shekel baht hryvnia rial singapour"
        " franc"
    ),
    "es": "dólar euro libra yen rupia won rublo lira séquel bat grivna rial singapur franco",
    "pt": "dólar euro libra iene rupia won rublo lira shekel baht grívnia ria singapur franco",
    "it": "dollar euro sterlin yen rupi won rubl lir shekel baht grivni rial singapor franc",
    "pl": "dolar euro funt jen rupi won rubl|rubel lir szek bat hryw rial singapur frank",
    "ru": "доллар евро фунт иен рупи вон рубл лир шекел бат грив риал сингапур франк",
    "tr": "dolar euro sterlin yen rupi won ruble lira şekel baht grivna riyal singapur frang",
    "nl": "dollar euro pond yen roepie won roebel lira sjekel baht hryvnia rial singapor fra",
    "cs": "dolar euro lib jen rupi won rubl lir šekel baht hřiv rijál singapur frank",
    "hu": "dollár euró font jen rúpia von rubel líra sékel bát hrivnya riál szingapúr frank",
    "ar": "دولار يورو جنيه ين روبي وون روبل لير شيكل|شواكل بات هريفنيا ريال سنغافور فرنك",
    "hi": "डॉलर यूरो पाउंड येन रुप वॉन रूबल लीरा शेकेल बाट रिव्निया रियाल सिंगापुर फ़्रैंक",
    "fa": "دلار یورو پوند ین روپیه وون روبل لیر شقل بات هریونا ریال سنگاپور فرانک",
    "zh": "美元 欧元 英镑 元 卢比 韩元 卢布 里拉 谢克尔 泰铢 格里夫纳 里亚尔 新加坡 法郎",
    "ja": (
        "ドル ユーロ ポンド 円 ルピー ウォン ルーブル リラ シェケル バーツ フリヴニャ リアル"
        " シンガポール フラン"
    ),
    "ko": "달러 유로 파운드 엔 루피 원 루블 리라 셰켈 바트 흐리브냐 리알 싱가포르 프랑",
}
CENTS = {
    "en": "cent pen", "de": "cent pen", "fr": "cent pen", "es": "céntimo|centavo peni",
    "pt": "cêntimo pence|péni", "it": "centesim penny",
    "pl": "cent pens", "ru": "цент пенс", "tr": "sent peni", "nl": "cent pen", "cs": "cent pen",
    "hu": "cent penny", "ar": "سنت بنس",
    "hi": "सेंट पेंस", "fa": "سنت پنس", "ja": "セント ペンス", "ko": "센트 펜스",
}  # fmt: skip
KILOMETRES = dict(
    zip(
        LANGUAGES,
        "kilomet kilometer kilomètre kilómetro quilômetro chilometr kilometr километр kilometre"
        " kilometer kilometr kilométer كيلومتر किलोमीटर کیلومتر 公里 キロメートル 킬로미터".split(),
        strict=True,
    )
)
UNSPACED = {"zh", "ja"}


def spoken(written, language):
    """What is read out, before Chinese, Japanese and Korean are romanised."""
    if language not in ("zh", "ja", "ko"):
        return clean(written, language)
    normal = text._normalize(written, language)
    read_out = fractions.expand(amounts.expand(clock.expand(normal, language), language), language)
    if language == "zh":
        return chinese.expand_numbers(read_out, parity=False)
    return numbers.expand(read_out, language, parity=False)


def written(value, language):
    """A number as the language writes it, thousands grouped."""
    groups, point = (",", ".") if language in COMMAS else (".", ",")
    return f"{value:,}".translate(str.maketrans({",": groups, ".": point}))


def amount_read(words, language, code):
    """The value of an amount; Unreadable where its currency (or unit) is not named beside the
    number.
    """
    noun = KILOMETRES[language] if code == "km" else NOUNS[language].split()[ORDER.index(code)]
    cents = dict(zip(("USD", "GBP"), CENTS.get(language, "(?!) (?!)").split(), strict=True)).get(
        "USD" if code == "EUR" else code, "(?!)"
    )
    found = _noun(noun, words, language)
    small = _noun(cents, words[found.end() :] if found else words, language)
    if not found and not small:
        raise Unreadable(f"neither {noun} nor {cents} in {words!r}")
    value = Decimal(0)
    if found:
        value += _count(
            _longest(words[: found.start()], language, first=True), found.group(), language
        )
    if small:
        between = words[found.end() :][: small.start()] if found else words[: small.start()]
        between = between.removeprefix(" واحد")  # the one before it
        value += _count(_longest(between, language, first=False), small.group(), language) / 100
    return value


def _noun(stem, words, language):
    """Where a name that begins so stands, with its ending; an adjective may come before
    the stem.
    """
    if language in ("zh", "ja", "ko"):
        return re.search(stem, words)
    return re.search(rf"(?<![^\W_])(?:d')?(?:{stem})\w*", words)


def _longest(words, language, first):
    """The value of the words at the beginning (or end) that are a number; None if there is
    none.
    """
    parts = list(words) if language in UNSPACED else words.replace(",", " ").split()
    for end in range(len(parts), 0, -1):
        chosen = parts[:end] if first else parts[len(parts) - end :]
        try:
            return read(("" if language in UNSPACED else " ").join(chosen), language)
        except Unreadable:
            continue
    return None


def _count(value, noun, language):
    """The number, or what the noun says by itself in Arabic: one or two."""
    if value is None and language == "ar":
        return Decimal(2) if noun.endswith("ان") else Decimal(1)
    if value is None:
        raise Unreadable(f"no number before {noun!r}")
    return value


def _samples(language, number=200):
    rng = random.Random(f"amounts {language}")
    for i in range(number):
        kind = (
            "whole",
            "decimal",
            "before",
            "after",
            "cents",
            "code",
            "thousands",
            "millions",
            "negative",
            "unit",
        )[i % 10]
        value = rng.choice(
            (
                rng.randrange(30),
                rng.randrange(130),
                rng.randrange(2500),
                rng.randrange(10 ** rng.randint(4, 12)),
            )
        )
        sign = rng.choice(list(SIGNS))
        if language == "zh" and sign == "¥":
            sign = "$"
        if kind == "whole":
            yield written(value, language), Decimal(value), None
        elif kind == "decimal":
            value = Decimal(value % 10**6) + Decimal(rng.randrange(1, 1000)) / 10 ** rng.choice(
                (3, 4)
            )
            yield written(value, language), value, None
        elif kind == "before":
            yield sign + written(value, language), Decimal(value), SIGNS[sign]
        elif kind == "after":
            yield (
                written(value, language) + rng.choice(("", " ")) + sign,
                Decimal(value),
                SIGNS[sign],
            )
        elif kind == "cents":
            sign, value = rng.choice("$€£"), Decimal(value) + Decimal(rng.randrange(1, 100)) / 100
            yield sign + written(value, language), value, SIGNS[sign]
        elif kind == "code":
            code = rng.choice(("SGD", "CHF", "USD", "INR"))
            both = f"{code} {written(value, language)}", f"{written(value, language)} {code}"
            yield rng.choice(both), Decimal(value), code
        elif kind == "negative":
            yield "-" + written(value, language), Decimal(-value), None
        elif kind == "unit":
            value = Decimal(value) if value % 2 else Decimal(value) + Decimal("0.5")
            yield written(value, language) + rng.choice(("", " ")) + "km", value, "km"
        elif kind == "thousands":
            value = value % 900 + 1
            yield f"{sign}{value}k", Decimal(value) * 1000, SIGNS[sign]
        else:
            value = Decimal(rng.randrange(11, 9999)) / 10
            shown = f"{value}" if language in COMMAS else f"{value}".replace(".", ",")
            yield f"{sign}{shown}M", value * 10**6, SIGNS[sign]


@pytest.mark.parametrize(
    ("language", "text", "expected"),
    [
        (
            "ja",
            "￥500、気温−5度、5㎏、3:30pm",
            "五百円、気温マイナス五度、五キログラム、三時三十分 pm",
        ),
        ("zh", "500￥，气温-5℃，010-87654321", "五百元,气温负五摄氏度,零一零八七六五四三二一"),
        ("ko", "₩5,000를 오전 8:30에", "오천 원를 오전 여덟시 삼십분에"),
    ],
)
def test_amounts_within_a_sentence_without_spaces(language, text, expected):
    assert spoken(text, language) == expected


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_sign_and_code_has_a_name(language):
    for sign, code in SIGNS.items():
        if not (language == "zh" and sign == "¥"):
            assert amount_read(spoken(f"{sign}7", language), language, code) == 7, sign
            assert amount_read(spoken(f"1000 {sign}", language), language, code) == 1000, sign
    for code in (
        currencies.CODES | currencies.LATE_CODES - {"ALL", "MAD"} | set(currencies.SIGNS.values())
    ):
        for count in (1, 2, 5):
            name, _ = currencies.name(language, code, Decimal(count))
            assert name == name.lower(), name
            assert re.fullmatch(r"[^\d()/]+", name), name
            assert code.lower() not in name.split(), name


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_unit_has_words(language):
    for unit in {**rules.UNITS, **rules.LOCAL_UNITS.get(language, {})}.values():
        pattern = amounts._unit_pattern(language, unit, Decimal(5))
        words = pattern.replace("{0}", "")
        assert any(c.isalpha() for c in words), (unit, pattern)
        assert not re.search("[0-9/%‰°]", words), (unit, pattern)


@pytest.mark.parametrize("language", LANGUAGES)
def test_200_numbers_and_amounts_are_read_back(language):
    wrong = []
    for shown, value, code in _samples(language):
        words = spoken(shown, language)
        try:
            found = amount_read(words, language, code) if code else read(words, language)
        except Unreadable as error:
            found = error
        if found != value:
            wrong.append((shown, words, found))
    assert not wrong, f"{len(wrong)} of 200: {wrong[:5]}"


def test_the_table_in_the_documentation_is_what_is_read():
    lines = (ROOT / "docs" / "text.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rows = [row for row in rows if len(row) == 7 and row[0] in LANGUAGES]
    assert {row[0] for row in rows} == set(LANGUAGES)
    for language, _, _, *expected in rows:
        amount = "$5.50" if language in COMMAS else "$5,50"
        assert [spoken(text, language) for text in (amount, "8:30", "½", "-5")] == expected, (
            language
        )
