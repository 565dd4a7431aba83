"""Currencies in words: the meaning of each sign, code and local abbreviation, and the name in the
number's plural form.

Short names ("dollars", not "US dollars") of the currencies that have a sign are listed here for the
languages of XTTS and Persian; every other currency, and every other language, has CLDR's name
(Babel).
"""

from __future__ import annotations

import functools
import re
import unicodedata
from decimal import Decimal
from typing import TYPE_CHECKING

from common.xtts.text.marks import remove_silent

if TYPE_CHECKING:
    from babel import Locale

# Signs, the longest first where one begins another. "¥" is the yuan in Chinese.
SIGNS = {
    "US$": "USD", "AU$": "AUD", "CA$": "CAD", "NZ$": "NZD", "HK$": "HKD", "NT$": "TWD",
    "MX$": "MXN", "A$": "AUD", "C$": "CAD",
    "R$": "BRL", "S$": "SGD", "CN¥": "CNY", "JP¥": "JPY", "$": "USD", "€": "EUR", "£": "GBP",
    "¥": "JPY", "₹": "INR", "₨": "INR",
    "₩": "KRW", "₽": "RUB", "₺": "TRY", "₪": "ILS", "฿": "THB", "₴": "UAH", "﷼": "IRR",
    "₫": "VND", "₦": "NGN", "₱": "PHP",
    "₸": "KZT", "₾": "GEL", "₼": "AZN", "₡": "CRC", "₲": "PYG", "₵": "GHS", "₭": "LAK",
    "₮": "MNT", "؋": "AFN", "៛": "KHR",
    "৳": "BDT", "֏": "AMD",
}  # fmt: skip
CODES = frozenset(
    "AED AFN ARS AUD AZN BDT BGN BHD BRL CAD CHF CLP CNY CZK DKK DZD EGP EUR GBP GHS HKD HUF IDR"
    " ILS INR IQD IRR ISK JOD JPY KES KRW KWD KZT LBP LKR MXN MYR NGN NOK NPR NZD OMR PKR PLN QAR"
    " RON RSD RUB SAR SEK SGD THB TND TWD UAH USD UYU UZS VND ZAR".split()
)
# Codes that are words or other names, too ("TRY 5 times", "PHP 8"): only after a number.
LATE_CODES = frozenset("TRY PHP MAD COP PEN GEL AMD ALL".split())
# What a language's own texts write for a currency, before (Rs. 500) or after the number.
LOCAL = {
    "en": {"Rs.": "INR", "Rs": "INR"},
    "hi": {"Rs.": "INR", "Rs": "INR", "रु.": "INR", "रु": "INR"},
    "pl": {"zł": "PLN"},
    "cs": {"Kč": "CZK"},
    "hu": {"Ft": "HUF"},
    "tr": {"TL": "TRY"},
    "ru": {"руб.": "RUB", "руб": "RUB"},
}
# Currencies whose countries group thousands with commas: "$1,250" is that in any language.
COMMA_CURRENCIES = frozenset(
    "USD GBP JPY CNY INR KRW ILS THB AUD CAD NZD HKD SGD TWD MXN PHP NGN KES".split()
)

# CLDR's plural categories in the order of the forms below; one form stands for all, two for "one"
# and "other".
_CATEGORIES = {
    "pl": ("one", "few", "many", "other"),
    "ru": ("one", "few", "many", "other"),
    "cs": ("one", "few", "other", "many"),
    "ar": ("one", "two", "few", "many", "other"),
}
_LOCALES = {"sr": "sr_Latn"}  # num2words has Serbian in Latin letters
_COLUMNS = "USD EUR GBP JPY CNY INR KRW RUB TRY ILS THB UAH IRR".split()
# "f:" feminine, "n:" neuter: where the number's last word agrees with it.
_NAMES = {
    "en": "dollar|dollars, euro, pound sterling|pounds sterling, yen, yuan, rupee|rupees, won,"
    " rouble|roubles, lira|liras,"
    " shekel|shekels, baht, hryvnia|hryvnias, rial|rials",
    "de": "dollar, euro, pfund, yen, yuan, f:rupie|rupien, won, rubel, f:lira, schekel, baht,"
    " f:hrywnja, rial",
    "fr": "dollar|dollars, euro|euros, f:livre|livres, yen|yens, yuan|yuans, f:roupie|roupies,"
    " won|wons, rouble|roubles,"
    " f:livre turque|livres turques, shekel|shekels, baht|bahts, f:hryvnia|hryvnias, rial|rials",
    "es": "dólar|dólares, euro|euros, f:libra|libras, yen|yenes, yuan|yuanes, f:rupia|rupias,"
    " won|wones, rublo|rublos, f:lira|liras,"
    " séquel|séqueles, bat|bats, f:grivna|grivnas, rial|riales",
    "pt": "dólar|dólares, euro|euros, f:libra|libras, iene|ienes, yuan|yuans, f:rupia|rupias,"
    " won|wons, rublo|rublos, f:lira|liras,"
    " shekel|shekels, baht|bahts, f:grívnia|grívnias, rial|riais",
    "it": "dollaro|dollari, euro, f:sterlina|sterline, yen, yuan, f:rupia|rupie, won, rublo|rubli,"
    " f:lira turca|lire turche,"
    " shekel, baht, f:grivnia|grivnie, rial",
    "nl": "dollar, euro, pond, yen, yuan, roepie, won, roebel, lira, sjekel, baht, hryvnia, rial",
    "pl": "dolar amerykański|dolary amerykańskie|dolarów amerykańskich|dolara amerykańskiego,"
    " euro, funt|funty|funtów|funta,"
    " jen|jeny|jenów|jena, juan|juany|juanów|juana, f:rupia|rupie|rupii|rupii,"
    " won|wony|wonów|wona, rubel|ruble|rubli|rubla,"
    " f:lira|liry|lir|liry, szekel|szekle|szekli|szekla, bat|baty|batów|bata,"
    " f:hrywna|hrywny|hrywien|hrywny, rial|riale|riali|riala",
    "ru": "доллар|доллара|долларов|доллара, евро, фунт|фунта|фунтов|фунта, f:иена|иены|иен|иены,"
    " юань|юаня|юаней|юаня,"
    " f:рупия|рупии|рупий|рупии, f:вона|воны|вон|воны, рубль|рубля|рублей|рубля,"
    " f:лира|лиры|лир|лиры,"
    " шекель|шекеля|шекелей|шекеля, бат|бата|батов|бата, f:гривна|гривны|гривен|гривны,"
    " риал|риала|риалов|риала",
    "tr": "dolar, euro, sterlin, yen, yuan, rupi, won, ruble, lira, şekel, baht, grivna, riyal",
    "cs": "dolar|dolary|dolarů|dolaru, n:euro, f:libra|libry|liber|libry, jen|jeny|jenů|jenu,"
    " jüan|jüany|jüanů|jüanu,"
    " f:rupie|rupie|rupií|rupie, won|wony|wonů|wonu, rubl|rubly|rublů|rublu, f:lira|liry|lir|liry,"
    " šekel|šekely|šekelů|šekelu,"
    " baht|bahty|bahtů|bahtu, f:hřivna|hřivny|hřiven|hřivny, rijál|rijály|rijálů|rijálu",
    "hu": "dollár, euró, font, jen, jüan, rúpia, von, rubel, líra, sékel, bát, hrivnya, riál",
    "ar": "دولار|دولاران|دولارات|دولارا|دولار, يورو, جنيه|جنيهان|جنيهات|جنيها|جنيه, ين, يوان,"
    " روبية|روبيتان|روبيات|روبية|روبية,"
    " وون, روبل|روبلان|روبلات|روبلا|روبل, ليرة|ليرتان|ليرات|ليرة|ليرة,"
    " شيكل|شيكلان|شواكل|شيكلا|شيكل, بات, هريفنيا,"
    " ريال|ريالان|ريالات|ريالا|ريال",
    "hi": "डॉलर, यूरो, पाउंड, येन, युआन, रुपया|रुपये, वॉन, रूबल, लीरा, शेकेल, बाट, रिव्निया, रियाल",
    "fa": "دلار, یورو, پوند, ین, یوان, روپیه, وون, روبل, لیر, شقل, بات, هریونا, ریال",
    "zh": "美元, 欧元, 英镑, 日元, 元, 卢比, 韩元, 卢布, 里拉, 谢克尔, 泰铢, 格里夫纳, 里亚尔",
    "ja": "ドル, ユーロ, ポンド, 円, 人民元, ルピー, ウォン, ルーブル,"
    " リラ, シェケル, バーツ, フリヴニャ, リアル",
    "ko": "달러, 유로, 파운드, 엔, 위안, 루피, 원, 루블, 리라, 셰켈, 바트, 흐리브냐, 리알",
}  # fmt: skip
_OWN_NAMES = {
    ("pl", "PLN"): "złoty|złote|złotych|złotego",
    ("cs", "CZK"): "f:koruna|koruny|korun|koruny",
    ("hu", "HUF"): "forint",
    ("pt", "BRL"): "real|reais",
}
_SMALL_COLUMNS = "USD EUR GBP INR RUB TRY".split()
_SMALL_NAMES = {
    "en": "cent|cents, cent|cents, penny|pence, paisa|paise, kopek|kopeks, kurush",
    "de": "cent, cent, penny|pence, paisa, f:kopeke|kopeken, kurusch",
    "fr": "cent|cents, centime|centimes, penny|pence, paisa|paisas, kopeck|kopecks, kurus",
    "es": (
        "centavo|centavos, céntimo|céntimos, penique|peniques, paisa|paisas, kopeyka|kopeykas,"
        " kuruş"
    ),
    "pt": "cêntimo|cêntimos, cêntimo|cêntimos, péni|pence, paisa|paisas, copeque|copeques, kurus",
    "it": "centesimo|centesimi, centesimo|centesimi, penny, paisa|paise, copeco|copechi, kurus",
    "nl": "cent, cent, penny|pence, paisa, kopeke, kurus",
    "pl": (
        "cent|centy|centów|centa, cent|centy|centów|centa, pens|pensy|pensów|pensa,"
        " f:pajsa|pajsy|pajs|pajsy, f:kopiejka|kopiejki|kopiejek|kopiejki,"
        " kurusz|kurusze|kuruszy|kurusza"
    ),
    "ru": (
        "цент|цента|центов|цента, цент|цента|центов|цента, пенс|пенса|пенсов|пенса,"
        " f:пайса|пайсы|пайс|пайсы, f:копейка|копейки|копеек|копейки, куруш|куруша|курушей|куруша"
    ),
    "tr": "sent, sent, peni, paisa, kapik, kuruş",
    "cs": (
        "cent|centy|centů|centu, cent|centy|centů|centu, f:pence|pence|pencí|pence,"
        " f:paisa|paisy|pais|paisy, f:kopejka|kopejky|kopejek|kopejky, kuruš|kuruše|kurušů|kuruše"
    ),
    "hu": "cent, cent, penny, paisza, kopejka, kurus",
    "ar": (
        "سنت|سنتان|سنتات|سنتا|سنت, سنت|سنتان|سنتات|سنتا|سنت, بنس|بنسان|بنسات|بنسا|بنس,"
        " بيسة|بيستان|بيسات|بيسة|بيسة, كوبيك, قرش|قرشان|قروش|قرشا|قرش"
    ),
    "hi": "सेंट, सेंट, पेंस, पैसा|पैसे, कोपेक, कुरुश",
    "fa": "سنت, سنت, پنس, پیسه, کوپک, قروش",
    "ja": "セント, セント, ペンス, パイサ, コペイカ, クルシュ",
    "ko": "센트, 센트, 펜스, 파이사, 코페이카, 쿠루시",
}
_OWN_SMALL_NAMES = {
    ("pl", "PLN"): "grosz|grosze|groszy|grosza",
    ("cs", "CZK"): "haléř|haléře|haléřů|haléře",
    ("pt", "BRL"): "centavo|centavos",
}


class _Forms:
    """A currency's name by plural category, with its gender: "m", "f" or "n"."""

    def __init__(self, entry: str, language: str):
        gender, _, forms = entry.rpartition(":")
        self.gender = gender or "m"
        parts = forms.split("|")
        self.by_category = dict(
            zip(_CATEGORIES.get(language, ("one", "other")), parts, strict=False)
        )
        self.by_category.setdefault("other", parts[-1])

    def of(self, category: str) -> str:
        return self.by_category.get(category) or self.by_category["other"]


@functools.cache
def _forms(language: str, code: str, small: bool) -> _Forms | None:
    names, columns, own = (
        (_SMALL_NAMES, _SMALL_COLUMNS, _OWN_SMALL_NAMES)
        if small
        else (_NAMES, _COLUMNS, _OWN_NAMES)
    )
    entry = own.get((language, code))
    if entry is None and language in names and code in columns:
        entry = names[language].split(",")[columns.index(code)].strip()
    return _Forms(entry, language) if entry else None


@functools.cache
def locale(language: str) -> Locale | None:
    """CLDR's data of a language; None where Babel has none."""
    from babel import Locale, UnknownLocaleError  # slow to load

    try:
        return Locale.parse(_LOCALES.get(language, language))
    except (UnknownLocaleError, ValueError):
        return None


def plural(language: str, count: Decimal) -> str:
    """CLDR's plural category of a number; "other" for a language that Babel lacks."""
    known = locale(language)
    return known.plural_form(abs(count)) if known else "other"


def name(language: str, code: str, count: Decimal) -> tuple[str, str] | None:
    """The currency's name that goes with `count`, and its gender; None where there is no name."""
    forms = _forms(language, code, False)
    if forms:
        return forms.of(plural(language, count)), forms.gender
    known = locale(language)
    from babel.numbers import get_currency_name

    found = get_currency_name(code, count=abs(count), locale=known) if known else code
    if found == code:
        return None
    found = plain(found, language)
    return found, _gender_of(language, found)


def small_name(language: str, code: str, count: int) -> tuple[str, str] | None:
    """`name` of the hundredth part ("cents"); None where amounts of that currency are read as
    decimals.
    """
    forms = _forms(language, code, True)
    return (forms.of(plural(language, Decimal(count))), forms.gender) if forms else None


def plain(words: str, language: str) -> str:
    """Words of CLDR as cleaning writes them: lower case, nothing invisible."""
    if language in ("tr", "az"):
        words = words.replace("İ", "i").replace("I", "ı")
    if language == "fa":
        words = words.replace("\u0647\u0654", "\u0647 \u06cc")
    words = words.replace("\u200c", " " if language in ("ar", "fa", "ur") else "")
    return unicodedata.normalize("NFC", remove_silent(words.replace("\xa0", " ")).lower())


def _gender_of(language: str, found: str) -> str:
    """The gender of "singapore dollars" is that of the dollar."""
    words = set(re.findall(r"\w+", found))
    for code in _COLUMNS:
        forms = _forms(language, code, False)
        if forms and words & set(forms.by_category.values()):
            return forms.gender
    return (
        "f"
        if language in ("cs", "ru", "pl")
        and words & {"koruna", "koruny", "korun", "крона", "кроны", "крон", "korona", "korony"}
        else "m"
    )


def signs(language: str) -> dict[str, str]:
    """Sign or local abbreviation -> code, as `language` means them."""
    return {**SIGNS, **LOCAL.get(language, {}), **({"¥": "CNY"} if language == "zh" else {})}
