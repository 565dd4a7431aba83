"""Cleaning: Coqui's own output as the reference, then what ours adds to it."""

import json
import sys
from pathlib import Path

import pytest

from common.xtts.text import chinese
from common.xtts.text.clean import (
    LANGUAGES,
    LanguageUnavailable,
    TextError,
    UnknownLanguage,
    char_limit,
    clean,
    normalize_language,
    require_backend,
    script_share,
)

GOLDEN = Path(__file__).parents[1] / "golden"
from tests.golden.text_sentences import PERSIAN  # noqa: E402

ROWS = json.loads((GOLDEN / "text.json").read_text(encoding="utf-8"))

# Golden sentences that we clean differently from Coqui, except with parity: beginning of the
# sentence -> ours, and why.
EXPLAINED = {
    "Version 2.0.1": (
        "version two point zero.one of the manual has one point five errors per page.",
        "Coqui drops the zero of 2.0",
    ),
    "Fr. Keller": (
        (
            "frau keller und doktor voss zahlten eintausendzweihundertfünfzig euro und fünfzig cent"
            " für das klavier."
        ),
        "capitals out of num2words are in no vocabulary",
    ),
    "Nur 0,75": ("nur null komma sieben fünf sekunden fehlten zum sieg.", "capitals"),
    "Die Karte": ("die karte kostet zwanzig dollar oder achtzehn pfund.", "capitals"),
    "Mehr als": ("mehr als eine million blätter lagen im weg.", "capitals"),
    "Das Gerät": ("das gerät wiegt zwölf komma fünf kilogramm, größer ist keines.", "capitals"),
    "Bilet kosztuje": (
        "bilet kosztuje dwadzieścia dolarów amerykańskich albo osiemnaście funtów.",
        (
            "no pounds in num2words: Coqui then leaves the dollars too, and reads the sign before"
            " the number"
        ),
    ),
    "Bilet $20": ("bilet yirmi dolar ya da onsekiz sterlin tutuyor.", "as in Polish"),
    "Билет": ("билет стоит двадцать долларов или восемнадцать фунтов.", "as in Polish"),
    "Ölçü": (
        "ölçü oniki virgül beş kilo, üç gün sonra işik geldi.",
        "Coqui reads no Turkish decimals",
    ),
    "Lístek": (
        "lístek stojí dvacet dolarů nebo osmnáct liber.",
        "Coqui raises NotImplementedError",
    ),
    "Vrátil": ("vrátil se třetí května.", "Coqui raises NotImplementedError"),
    "تأخر": (
        "تأخر عن الفوز صفر فاصلة خمسة و سبعون ثانية.",
        "Coqui loses the zero and says a comma for the point",
    ),
    "ثمن التذكرة": (
        "ثمن التذكرة عشرون دولارا أو ثمانية عشر جنيها.",
        "num2words makes riyals of dollars and pounds",
    ),
    "你好": ("ni3hao3 world,jia4ge2shi2ba1ying1bang4,", "the unit is read after the amount"),
    "電車": ("densha wa go ji sanjuu fun ni demasu.", "Coqui leaves Japanese digits as they are"),
    "A jegy": ("a jegy tizennyolc font volt.", "num2words has English names"),
    "피아노": (
        "pi-ano gabs-eun il jeom i o yeong dalleo-yeossda.",
        "Korean groups with commas; 1.250 is a decimal",
    ),
    "표는": ("pyoneun isib dalleo ibnida.", "Coqui adds zero cents"),
    "कमरे": (
        "कमरे में बारह कुर्सियाँ हैं।",
        "num2words has no Hindi: Coqui raises NotImplementedError",
    ),
    "It was -5°": (
        "it was minus five degree outside, and one million stars were shining.",
        "Coqui does not read the minus sign",
    ),
    "Sgt. Bell": (
        "sergeant bell, colonel ames and lieutenant fox met at ten thirty.",
        "Coqui leaves the colon of a time",
    ),
}


def _available(language):
    try:
        require_backend(language)
    except LanguageUnavailable:
        return False
    return True


def test_golden_covers_the_languages():
    assert len(ROWS) >= 200
    assert {row["language"] for row in ROWS} == set(LANGUAGES) - {"fa"}


@pytest.mark.parametrize("language", sorted(set(LANGUAGES) - {"fa"}))
def test_parity_is_coquis_cleaning(language):
    if not _available(language):
        pytest.skip(f"a package for {language} is not installed")
    for row in (r for r in ROWS if r["language"] == language):
        if "error" in row:
            with pytest.raises(TextError, match=f"no speller for {language}"):
                clean(row["text"], language, parity=True)
        else:
            assert clean(row["text"], language, parity=True) == row["clean"], row["text"]


@pytest.mark.parametrize("language", sorted(set(LANGUAGES) - {"fa"}))
def test_default_is_coquis_cleaning_but_for_the_explained(language):
    if not _available(language):
        pytest.skip(f"a package for {language} is not installed")
    for row in (r for r in ROWS if r["language"] == language):
        start = next((s for s in EXPLAINED if row["text"].startswith(s)), None)
        ours = EXPLAINED[start][0] if start else row["clean"]
        assert clean(row["text"], language) == ours, row["text"]


def test_every_explanation_is_used():
    texts = [row["text"] for row in ROWS]
    assert all(any(text.startswith(start) for text in texts) for start in EXPLAINED)


@pytest.mark.parametrize(
    ("language", "text", "expected"),
    [
        ("en", "3.14", "three point one four"),
        ("en", "1,000", "one thousand"),
        ("en", "1st", "first"),
        ("en", "007", "zero zero seven"),
        ("en", "2.50", "two point five zero"),
        ("en", "1.000.000", "one million"),
        ("cs", "8.", "osm."),
        ("cs", "21. den", "dvacátý první den"),
        ("fr", "12\u202f500 €", "douze mille cinq cents euros"),
        ("ru", "12 500", "двенадцать тысяч пятьсот"),
        ("hu", "3,1415", "három egész ezernégyszáztizenöt tízezred"),
    ],
)
def test_numbers(language, text, expected):
    assert clean(text, language) == expected


@pytest.mark.parametrize(
    ("language", "words"),
    [
        ("fa", "صد و بیست و سه"),
        ("ar", "مائة و ثلاثة و عشرون"),
        ("en", "one hundred and twenty-three"),
    ],
)
def test_digits_of_any_script_give_the_same_words(language, words):
    for digits in ("123", "۱۲۳", "١٢٣", "１２３", "१२३"):
        assert clean(digits, language) == words


def test_unspellable_digits_are_the_rows_error():
    for text in ("12", "50% off"):
        with pytest.raises(TextError, match="^digits left, no speller for hi"):
            clean(text, "hi", parity=True)
    with pytest.raises(TextError, match="^digits left, no speller for et"):
        clean("12", "et")
    with pytest.raises(TextError, match="^digits left"):
        clean("9" * 5000 + "th", "en", parity=True)


def test_typographic_characters_become_plain():
    assert clean("“Smart” ‘quotes’ — it’s… «done»", "en") == "smart 'quotes' - it's... done"
    assert clean("a\u200bb\ufeff c\u00a0d\u00ad", "en") == "ab c d"
    assert clean("ｆｕｌｌ ﬁne cafe\u0301", "en") == "full fine café"


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("كتاب علي", "کتاب علی"),
        ("می\u200cخواهم", "می خواهم"),
        ("آب", "آب"),
        ("ســـلام", "سلام"),
        ("\u202bسلام\u202c\u200f", "سلام"),
        ("\ufefb", "\u0644\u0627"),
        ("خانهٔ ما", "خانه\u200cی ما"),
        ("خانۀ ما", "خانه\u200cی ما"),
        ("۵۰٪", "٪۵۰"),
        ("خوبی؟ بله، «ما»؛", "خوبی? بله, ما;"),
        ("۱۲٫۵", "12.5"),
        ("۱۵٬۰۰۰", "15,000"),
    ],
)
def test_persian_spellings_of_one_sound_are_one_text(text, same):
    assert clean(text, "fa") == clean(same, "fa")


def test_persian_numbers_and_fragments():
    assert clean("۲۱م و ۳ام و ۳۰ام و ۳مین", "fa") == "بیست و یکم و سوم و سی ام و سومین"
    assert clean("۳٫۰۵ و ۲٫۵", "fa") == "سه ممیز پنج صدم و دو و نیم"
    assert clean("$5 و ۵۰٪ و €۱۸", "fa") == "پنج دلار و پنجاه درصد و هجده یورو"
    assert clean("۵متر", "fa") == "پنج متر"
    assert clean("Windows 10 را", "fa") == "windows ده را"
    assert clean("می\u200cخواهم", "fa") != clean("میخواهم", "fa")
    assert all(
        "\u200c" not in clean(s, "fa") and not any(c.isdigit() for c in clean(s, "fa"))
        for s in PERSIAN
    )


def test_arabic_keeps_its_letters_and_diacritics_by_option():
    assert clean("كتاب علي، ما؟", "ar") == "كتاب علي، ما؟"
    assert clean("كَتَبَ", "ar") == "كَتَبَ"
    assert clean("كَتَبَ", "ar", keep_diacritics=False) == "كتب"
    assert clean("قُرآن", "fa", keep_diacritics=False) == "قرآن"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("zh", "zh"),
        ("zh-cn", "zh"),
        ("ZH-CN", "zh"),
        ("cmn", "zh"),
        ("fa-IR", "fa"),
        ("per", "fa"),
        (" EN_us", "en"),
        ("sv", "sv"),
    ],
)
def test_language_codes(code, expected):
    assert normalize_language(code) == expected


def test_unknown_language_says_what_there_is():
    with pytest.raises(UnknownLanguage, match="'xx' is not known; have: ar, cs, .*, fa, "):
        clean("a", "xx")


def test_missing_package_is_named(monkeypatch):
    for module, language, package in (
        ("pypinyin", "zh", "pypinyin"),
        ("cutlet", "ja", "cutlet"),
        ("hangul_romanize", "ko", "hangul-romanize"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(
            LanguageUnavailable, match=f"language {language} needs the package {package}"
        ):
            require_backend(language)
    require_backend("fa")
    with pytest.raises(LanguageUnavailable):
        clean("你好", "zh")


def test_script_share():
    assert script_share("سلام abcd", "fa") == 0.5
    assert script_share("سلام", "fa") == 0.0
    assert script_share("привет", "en") == 1.0
    assert script_share("naïve œuf, 12", "fr") == 0.0
    assert script_share("12 !?", "en") == 0.0
    assert script_share("カタカナと漢字", "ja") == 0.0


def test_char_limits():
    assert (char_limit("en"), char_limit("zh-cn"), char_limit("ja"), char_limit("fa")) == (
        250,
        82,
        71,
        250,
    )


@pytest.mark.parametrize(
    ("digits", "words"),
    [
        ("0", "零"), ("10", "十"), ("15", "十五"), ("2", "二"), ("200", "两百"), ("12", "十二"),
        ("20002", "两万零二"),
        ("1005", "一千零五"),
        ("100500", "十万零五百"), ("120000", "十二万"), ("0.25", "零点二五"), ("200000000", "两亿"),
    ],
)  # fmt: skip
def test_chinese_numbers(digits, words):
    assert chinese.number_words(digits) == words


def test_chinese_rules():
    def expand(text):
        return chinese.expand_numbers(text, parity=False)

    assert expand("2024年5月3日") == "二零二四年五月三日"
    assert expand("1/3和65%") == "三分之一和百分之六十五"
    assert expand("83.0539和1,000.5") == "八十三点零五三九和一千点五"
    assert expand("电话13912345678") == "电话一三九一二三四五六七八"
    assert expand("编号20481024") == "编号二零四八一零二四"
    assert chinese.expand_numbers("$1,000", parity=True) == ",一,"  # what the fix is for
