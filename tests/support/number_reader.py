"""Reads number words back, in 18 languages: written from their grammars, knowing nothing of the
product's tables.

A word is looked up, or cut into known words (fünf|und|zwanzig), and the values are combined as
people do: a hundred multiplies what precedes it, a scale everything smaller that precedes it.
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal
from functools import cache, lru_cache


class Unreadable(ValueError):
    """Words that are not a number."""


def _counted(words: str, start: int = 0, step: int = 1) -> dict[str, int]:
    """ "a/b c" -> a and b mean `start`, c means `start + step`."""
    return {
        form: start + step * i for i, entry in enumerate(words.split()) for form in entry.split("/")
    }


# Simple values; then multipliers of 100; then scales.
_VALUES = {
    "en": {
        **_counted(
            "zero/oh one two three four five six seven eight nine ten eleven twelve thirteen"
            " fourteen fifteen sixteen seventeen"
            " eighteen nineteen"
        ),
        **_counted("twenty thirty forty fifty sixty seventy eighty ninety", 20, 10),
    },
    "de": {
        **_counted(
            "null eins/ein/eine zwei drei vier fünf sechs/sech sieben/sieb acht neun zehn elf"
            " zwölf dreizehn vierzehn fünfzehn"
            " sechzehn siebzehn achtzehn neunzehn"
        ),
        **_counted("zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig", 20, 10),
    },
    "nl": {
        **_counted(
            "nul een/één twee drie vier vijf zes zeven acht negen tien elf twaalf dertien veertien"
            " vijftien zestien zeventien"
            " achttien negentien"
        ),
        **_counted("twintig dertig veertig vijftig zestig zeventig tachtig negentig", 20, 10),
    },
    "fr": {
        **_counted("zéro un/une deux trois quatre cinq six sept huit neuf dix onze douze treize"
        " quatorze quinze seize"),
        **_counted("vingt trente quarante cinquante soixante", 20, 10),
        "quatrevingt": 80,
        "quatrevingts": 80,
    },
    "es": {
        **_counted(
            "cero uno/un/una dos tres cuatro cinco seis siete ocho nueve diez once doce trece"
            " catorce quince dieciséis diecisiete"
            " dieciocho diecinueve veinte veintiuno/veintiún/veintiuna veintidós veintitrés"
            " veinticuatro veinticinco veintiséis"
            " veintisiete veintiocho veintinueve"
        ),
        **_counted("treinta cuarenta cincuenta sesenta setenta ochenta noventa cien/ciento", 30,
        10),
        **_counted(
            "doscientos/doscientas trescientos/trescientas cuatrocientos/cuatrocientas"
            " quinientos/quinientas"
            " seiscientos/seiscientas setecientos/setecientas ochocientos/ochocientas"
            " novecientos/novecientas",
            200,
            100,
        ),
    },
    "pt": {
        **_counted(
            "zero um/uma dois/duas três quatro cinco seis sete oito nove dez onze doze treze"
            " catorze/quatorze quinze"
            " dezesseis/dezasseis dezessete/dezassete dezoito dezenove/dezanove"
        ),
        **_counted("vinte trinta quarenta cinquenta sessenta setenta oitenta noventa cem/cento",
        20, 10),
        **_counted(
            "duzentos/duzentas trezentos/trezentas quatrocentos/quatrocentas quinhentos/quinhentas"
            " seiscentos/seiscentas"
            " setecentos/setecentas oitocentos/oitocentas novecentos/novecentas",
            200,
            100,
        ),
    },
    "it": {
        **_counted(
            "zero uno/un/una due tre/tré quattro cinque sei sette otto nove dieci undici dodici"
            " tredici quattordici quindici sedici"
            " diciassette diciotto diciannove"
        ),
        **_counted(
            "venti/vent trenta/trent quaranta/quarant cinquanta/cinquant sessanta/sessant"
            " settanta/settant ottanta/ottant"
            " novanta/novant",
            20,
            10,
        ),
    },
    "pl": {
        **_counted(
            "zero jeden/jedna/jedno dwa/dwie trzy cztery pięć sześć siedem osiem dziewięć dziesięć"
            " jedenaście dwanaście trzynaście"
            " czternaście piętnaście szesnaście siedemnaście osiemnaście dziewiętnaście"
        ),
        **_counted("dwadzieścia trzydzieści czterdzieści pięćdziesiąt sześćdziesiąt siedemdziesiąt"
        " osiemdziesiąt dziewięćdziesiąt", 20, 10),
        **_counted("sto dwieście trzysta czterysta pięćset sześćset siedemset osiemset"
        " dziewięćset", 100, 100),
    },
    "ru": {
        **_counted(
            "ноль один/одна/одно два/две три четыре пять шесть семь восемь девять десять"
            " одиннадцать двенадцать тринадцать"
            " четырнадцать пятнадцать шестнадцать семнадцать восемнадцать девятнадцать"
        ),
        **_counted("двадцать тридцать сорок пятьдесят шестьдесят семьдесят восемьдесят девяносто"
        " сто", 20, 10),
        **_counted("двести триста четыреста пятьсот шестьсот семьсот восемьсот девятьсот", 200,
        100),
    },
    "cs": {
        **_counted(
            "nula jedna/jeden/jedno dva/dvě tři čtyři pět šest sedm osm devět deset jedenáct"
            " dvanáct třináct čtrnáct patnáct"
            " šestnáct sedmnáct osmnáct devatenáct"
        ),
        **_counted("dvacet třicet čtyřicet padesát šedesát sedmdesát osmdesát devadesát", 20, 10),
    },
    "tr": {
        **_counted("sıfır bir iki üç dört beş altı yedi sekiz dokuz on"),
        **_counted("yirmi otuz kırk elli altmış yetmiş seksen doksan", 20, 10),
    },
    "hu": {
        **_counted("nulla egy kettő/két három négy öt hat hét nyolc kilenc tíz/tizen"),
        **_counted("húsz/huszon harminc negyven ötven hatvan hetven nyolcvan kilencven", 20, 10),
    },
    "ar": {
        **_counted(
            "صفر واحد/احد/أحد اثنان/اثنا/اثني/اثنتان ثلاثة/ثلاث أربعة/أربع خمسة/خمس ستة/ست"
            " سبعة/سبع ثمانية/ثماني/ثمان تسعة/تسع عشرة/عشر"
        ),
        **_counted("عشرون ثلاثون أربعون خمسون ستون سبعون ثمانون تسعون", 20, 10),
        **dict.fromkeys("مئتان مائتان مئتا مائتا".split(), 200),
    },
    "fa": {
        **_counted(
            "صفر یک دو سه چهار پنج شش هفت هشت نه ده یازده دوازده سیزده چهارده پانزده شانزده هفده"
            " هجده نوزده"
        ),
        **_counted("بیست سی چهل پنجاه شصت هفتاد هشتاد نود صد", 20, 10),
        **_counted("دویست سیصد چهارصد پانصد ششصد هفتصد هشتصد نهصد", 200, 100),
    },
    # CLDR's words, with the other usual spelling of three of them.
    "hi": _counted(
        "शून्य एक दो तीन चार पाँच छह सात आठ नौ दस ग्यारह बारह तेरह चौदह पन्द्रह/पंद्रह सोलह सत्रह"
        " अठारह उन्नीस बीस इक्कीस बाईस तेईस चौबीस"
        " पच्चीस छब्बीस सत्ताईस अट्ठाईस उनतीस तीस इकतीस बत्तीस तैंतीस चौंतीस पैंतीस छत्तीस सैंतीस"
        " अड़तीस उनतालीस चालीस इकतालीस बयालीस"
        " तैंतालीस चौवालीस पैंतालीस छियालीस सैंतालीस अड़तालीस उनचास पचास इक्यावन बावन तिरेपन चौवन"
        " पचपन छप्पन सत्तावन अट्ठावन उनसठ साठ"
        " इकसठ बासठ तिरेसठ चौंसठ पैंसठ छियासठ सड़सठ अड़सठ उनहत्तर सत्तर इकहत्तर बहत्तर तिहत्तर"
        " चौहत्तर पचहत्तर छिहत्तर सतहत्तर अठहत्तर"
        " उनासी/उन्यासी अस्सी इक्यासी बयासी तिरासी चौरासी पचासी छियासी सत्तासी अट्ठासी नवासी नब्बे"
        " इक्यानबे बानबे तिरानबे चौरानबे"
        " पंचानबे/पचानबे छियानबे सत्तानबे अट्ठानबे निन्यानबे"
    ),
    "zh": _counted("零 一 二/两 三 四 五 六 七 八 九"),
    "ja": _counted("零 一 二 三 四 五 六 七 八 九"),
    "ko": _counted("영 일 이 삼 사 오 육 칠 팔 구"),
}  # fmt: skip
_HUNDREDS = {
    "en": {"hundred": 100}, "de": {"hundert": 100}, "nl": {"honderd": 100}, "fr": {"cent": 100,
    "cents": 100},
    "it": {"cento": 100, "cent": 100}, "cs": {"sto": 100, "stě": 100, "sta": 100, "set": 100},
    "tr": {"yüz": 100}, "hu": {"száz": 100},
    "ar": {"مائة": 100, "مئة": 100}, "hi": {"सौ": 100}, "zh": {"十": 10, "百": 100, "千": 1000},
    "ja": {"十": 10, "百": 100, "千": 1000}, "ko": {"십": 10, "백": 100, "천": 1000},
}  # fmt: skip


def _scales(words: str, powers: tuple[int, ...] = (3, 6, 9, 12)) -> dict[str, int]:
    return {
        form: 10**p
        for p, entry in zip(powers, words.split(), strict=False)
        for form in entry.split("/")
    }


_SCALES = {
    "en": _scales("thousand million billion trillion"),
    "de": _scales("tausend million/millionen milliarde/milliarden billion/billionen"),
    "nl": _scales("duizend miljoen miljard biljoen"),
    "fr": _scales("mille million/millions milliard/milliards billion/billions"),
    "es": _scales("mil millón/millones - billón/billones"),
    "pt": _scales("mil milhão/milhões - bilião/biliões"),
    "it": _scales("mille/mila milione/milioni miliardo/miliardi bilione/bilioni"),
    "pl": _scales(
        "tysiąc/tysiące/tysięcy milion/miliony/milionów/miliona miliard/miliardy/miliardów/miliarda"
        " bilion/biliony/bilionów/biliona"
    ),
    "ru": _scales(
        "тысяча/тысячи/тысяч миллион/миллиона/миллионов миллиард/миллиарда/миллиардов"
        " триллион/триллиона/триллионов"
    ),
    "cs": _scales(
        "tisíc/tisíce milion/miliony/milionů/milionu miliarda/miliardy/miliard"
        " bilion/biliony/bilionů/bilionu"
    ),
    "tr": _scales("bin milyon milyar trilyon"),
    "hu": _scales("ezer millió milliárd billió"),
    "ar": {
        **_scales(
            "ألف/ألفا/آلاف مليون/مليونا/ملايين مليار/مليارا/مليارات تريليون/تريليونا/تريليونات"
        ),
    },
    "fa": _scales("هزار میلیون میلیارد تریلیون"),
    "hi": _scales("हज़ार लाख करोड़ अरब खरब नील", (3, 5, 7, 9, 11, 13)),
    "zh": _scales("万 亿 兆", (4, 8, 12)),
    "ja": _scales("万 億 兆", (4, 8, 12)),
    "ko": _scales("만 억 조", (4, 8, 12)),
}
_DUALS = {
    "ألفان": 2000,
    "ألفين": 2000,
    "مليونان": 2 * 10**6,
    "ملياران": 2 * 10**9,
    "تريليونان": 2 * 10**12,
}
_AND = {
    "en": "and", "de": "und", "nl": "en ën", "fr": "et de d'", "es": "y de", "pt": "e de",
    "it": "e di", "ar": "و", "fa": "و",
}  # fmt: skip
_MINUS = {
    "ar": "سالب", "cs": "minus", "de": "minus", "en": "minus", "es": "menos", "fa": "منفی",
    "fr": "moins", "hi": "ऋण",
    "hu": "mínusz", "it": "meno", "ja": "マイナス", "ko": "마이너스", "nl": "min", "pl": "minus",
    "pt": "menos", "ru": "минус",
    "tr": "eksi", "zh": "负",
}  # fmt: skip
_POINTS = {
    "en": "point", "de": "komma", "nl": "komma", "fr": "virgule", "es": "punto", "pt": "vírgula",
    "it": "virgola", "hi": "दशमलव",
    "pl": "przecinek", "cs": "celá", "tr": "virgül", "ar": "فاصلة", "ja": "点", "zh": "点",
    "ko": "점", "fa": "ممیز", "hu": "egész",
    "ru": "целых целая",
}  # fmt: skip
# "N hundredths" -> how many decimals.
_PARTS = {
    "ru": {"десят": 1, "сот": 2, "тысячн": 3, "десятитысячн": 4, "стотысячн": 5, "миллионн": 6},
    "hu": {"tized": 1, "század": 2, "ezred": 3, "tízezred": 4, "százezred": 5, "milliomod": 6},
    "fa": {"دهم": 1, "صدم": 2, "هزارم": 3},
}


def read(words: str, language: str) -> Decimal:
    """The value of a number in words; Unreadable where a word is none of a number's."""
    text = (
        unicodedata.normalize("NFC", words)
        .replace("ً", "")
        .replace("-", " ")
        .replace(",", " ")
        .replace("d'", "d' ")
        .strip()
    )
    text = re.sub("quatre vingts?", "quatrevingt", text)
    sign = 1
    if text.startswith(_MINUS[language]):
        sign, text = -1, text[len(_MINUS[language]) :].strip()
    for point in _POINTS[language].split():
        pattern = point if language in ("zh", "ja") else rf"(?<!\S){point}(?!\S)"
        if re.search(pattern, text):
            whole, fraction = re.split(pattern, text, maxsplit=1)
            return sign * _with_fraction(whole, fraction.strip(), language)
    half = re.fullmatch(r"(.*?)(?:\bو )?نیم(?: (.+))?", text) if language == "fa" else None
    if half:
        whole = _whole(half[1], language) if half[1].strip() else Decimal(0)
        return sign * (whole + Decimal("0.5")) * (_SCALES["fa"][half[2]] if half[2] else 1)
    return sign * _whole(text, language)


def _with_fraction(whole: str, fraction: str, language: str) -> Decimal:
    scale = Decimal(1)
    tokens = fraction.split()
    while (
        tokens
        and language not in ("ru", "hu", "fa")
        and tokens[-1] in _SCALES[language] | {"de": 1, "di": 1}
    ):
        scale *= (_SCALES[language] | {"de": 1, "di": 1})[tokens.pop()]
    if language in ("ru", "hu", "fa"):
        while tokens and tokens[-1] in _SCALES[language]:
            scale *= _SCALES[language][tokens.pop()]
    first = _whole(whole, language)
    part = (
        re.sub("(ая|ых)$", "", tokens[-1])
        if tokens and language == "ru"
        else (tokens[-1] if tokens else "")
    )
    if part in _PARTS.get(language, {}):
        return scale * (
            first + _whole(" ".join(tokens[:-1]), language) / Decimal(10) ** _PARTS[language][part]
        )
    values = [value for token in tokens for value, _ in _tokens(token, language)]
    if all(value < 10 for value in values):  # one by one
        digits = "".join(map(str, values))
    else:
        zeros = next((i for i, value in enumerate(values) if value), len(values))
        digits = "0" * zeros + str(_whole(" ".join(tokens[zeros:]), language))
    return scale * Decimal(f"{first}.{digits}")


def _whole(text: str, language: str) -> Decimal:
    cut = [pair for token in text.split() for pair in _tokens(token, language)]
    if not cut:
        raise Unreadable(f"no number in {text!r}")
    if (
        all(kind == "value" and value < 10 for value, kind in cut) and len(cut) > 1
    ):  # 007 and long serial numbers
        return Decimal("".join(str(value) for value, _ in cut))
    parts: list[Decimal] = []
    group = small = Decimal(0)
    for value, kind in cut:
        if kind == "value" and value >= 1000:  # Arabic duals
            parts.append(Decimal(value))
        elif kind == "value":
            small += value
        elif kind == "hundred":
            group, small = group + (small or 1) * value, Decimal(0)
        else:
            before = [p for p in parts if p < value]
            parts = [p for p in parts if p >= value]
            parts.append((sum(before) + group + small or 1) * value)
            group = small = Decimal(0)
    return sum(parts) + group + small


def _tokens(token: str, language: str) -> tuple[tuple[int, str], ...]:
    found = _cut(token, language)
    if found is None:
        raise Unreadable(f"{token!r} is no word of a number in {language}")
    return found


@cache
def _lexicon(language: str) -> dict[str, tuple[int, str] | None]:
    words = {word: (value, "value") for word, value in _VALUES[language].items()}
    words |= {word: (value, "hundred") for word, value in _HUNDREDS.get(language, {}).items()}
    words |= {word: (value, "scale") for word, value in _SCALES[language].items() if word != "-"}
    words |= {word: (value, "value") for word, value in _DUALS.items()} if language == "ar" else {}
    words |= dict.fromkeys(_AND.get(language, "").split())
    return {unicodedata.normalize("NFC", word): value for word, value in words.items()}


@lru_cache(maxsize=1 << 14)
def _cut(token: str, language: str) -> tuple[tuple[int, str], ...] | None:
    """The token as known words, the longest first; None where it cannot be cut so."""
    if not token:
        return ()
    lexicon = _lexicon(language)
    for end in range(len(token), 0, -1):
        if token[:end] in lexicon:
            rest = _cut(token[end:], language)
            if rest is not None:
                found = lexicon[token[:end]]
                return (found, *rest) if found else rest
    return None
