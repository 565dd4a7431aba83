"""Tables for cleaning text, one entry per language: what to read out, and which letters belong to
it.

Source: the rules that XTTS's tokenizer applies, plus Persian and the entries marked "ours", which
XTTS lacks.
"""

from __future__ import annotations

# The 17 languages of XTTS v2, and Persian. Tag of "zh" in a vocabulary: [zh-cn].
XTTS_LANGUAGES = (
    "ar",
    "cs",
    "de",
    "en",
    "es",
    "fr",
    "hi",
    "hu",
    "it",
    "ja",
    "ko",
    "nl",
    "pl",
    "pt",
    "ru",
    "tr",
    "zh",
)
LANGUAGES = (*XTTS_LANGUAGES, "fa")
# Cleaned by the common rules alone: lower case, typographic characters, numbers. For vocabularies
# trained from nothing.
GENERIC_LANGUAGES = (
    "az", "be", "bg", "bn", "ca", "cy", "da", "el", "eo", "et", "eu", "fi", "ga", "gl", "he", "hr",
    "id", "is", "ka", "kk", "lt", "lv",
    "mk", "ms", "no", "ro", "sk", "sl", "sq", "sr", "sv", "sw", "ta", "te", "th", "tl", "uk", "ur",
    "uz", "vi",
)  # fmt: skip

# Other spellings of a code (ISO 639-2/3, older or mistaken ones). A region ("fa-IR", "pt_BR") is
# cut off before this.
ALIASES = {
    "ara": "ar", "arb": "ar", "ces": "cs", "cze": "cs", "cz": "cs", "deu": "de", "ger": "de",
    "eng": "en", "spa": "es", "fra": "fr",
    "fre": "fr", "hin": "hi", "hun": "hu", "ita": "it", "jpn": "ja", "jp": "ja", "kor": "ko",
    "kr": "ko", "nld": "nl", "dut": "nl",
    "pol": "pl", "por": "pt", "rus": "ru", "tur": "tr", "zho": "zh", "chi": "zh", "cmn": "zh",
    "cn": "zh", "fas": "fa", "per": "fa",
    "pes": "fa", "prs": "fa", "nb": "no", "nn": "no",
}  # fmt: skip

# Characters of a text above which XTTS warns that the audio may be cut off.
CHAR_LIMITS = {
    "en": 250, "de": 253, "fr": 273, "es": 239, "it": 213, "pt": 203, "pl": 224, "zh": 82,
    "ar": 166, "cs": 186, "ru": 182, "nl": 251,
    "tr": 226, "ja": 71, "hu": 224, "ko": 95, "hi": 150,
}  # fmt: skip
DEFAULT_CHAR_LIMIT = 250

# Language -> (module to import, package to install). Japanese needs a dictionary besides.
BACKENDS = {
    "zh": (("pypinyin", "pypinyin"),),
    "ja": (("cutlet", "cutlet"), ("fugashi", "fugashi")),
    "ko": (("hangul_romanize", "hangul-romanize"),),
}

# Languages whose thousands are grouped with commas and whose decimals follow a point; elsewhere the
# other way round.
COMMA_GROUPS = frozenset(
    {
        "en",
        "ru",
        "fa",
        "ja",
        "ko",
        "zh",
        "hi",
        "bn",
        "cy",
        "ga",
        "he",
        "ms",
        "sw",
        "ta",
        "te",
        "th",
        "tl",
        "ur",
    }
)
XTTS_COMMA_GROUPS = frozenset({"en", "ru"})
# Ours: languages that group thousands with a space ("12 500").
SPACE_GROUPS = frozenset(
    {"cs", "fr", "hu", "pl", "ru", "be", "bg", "et", "fi", "kk", "lt", "lv", "no", "sk", "sv", "uk"}
)

# What follows the digits of an ordinal number.
ORDINAL_SUFFIXES = {
    "en": "st|nd|rd|th",
    "es": "º|ª|er|o|a|os|as",
    "fr": "º|ª|er|re|e|ème",
    "de": r"st|nd|rd|th|º|ª|\.(?=\s|$)",
    "pt": "º|ª|o|a|os|as",
    "it": "º|°|ª|o|a|i|e",
    "pl": "º|ª|st|nd|rd|th",
    "ar": "ون|ين|ث|ر|ى",
    "cs": r"\.(?=\s|$)",
    "ru": "-й|-я|-е|-ое|-ье|-го",
    "nl": "de|ste|e",
    "tr": r"\.|inci|nci|uncu|üncü",
    "hu": r"\.|adik|edik|odik|ödik|ödike|ik",
    "ko": "번째|번|차|째",
    "hi": "st|nd|rd|th",
}

# num2words joins the two parts of an amount with this; XTTS cuts an amount without cents there.
CURRENCY_JOINERS = {"es": " con ", "fr": " et ", "de": " und ", "pt": " e ", "it": " e "}
DEFAULT_CURRENCY_JOINER = ", "
CURRENCY_SIGNS = {"£": "GBP", "$": "USD", "€": "EUR"}  # those that XTTS reads
# Ours: between dollars and cents; between millions and what they are millions of.
MONEY_JOINERS = CURRENCY_JOINERS | {
    "ar": " و ", "fa": " و ", "hi": " ", "hu": " ", "ja": "", "ko": " ", "tr": " ",
}  # fmt: skip
MILLIONS_OF = {"es": "de", "fr": "de", "it": "di", "pt": "de"}
MINUS_WORDS = {
    "ar": "سالب", "cs": "minus", "de": "minus", "en": "minus", "es": "menos", "fa": "منفی",
    "fr": "moins", "hi": "ऋण",
    "hu": "mínusz", "it": "meno", "ja": "マイナス", "ko": "마이너스", "nl": "min", "pl": "minus",
    "pt": "menos", "ru": "минус",
    "tr": "eksi", "zh": "负", "bn": "মাইনাস", "sk": "mínus", "te": "మైనస్", "vi": "âm",
}  # fmt: skip
# Ours, where num2words has no words for decimals or wrong ones: number, this word, the digits one
# by one.
POINT_WORDS = {
    "de": "komma", "en": "point", "es": "punto", "fr": "virgule", "hi": "दशमलव", "it": "virgola",
    "ja": "点", "ko": "점",
    "nl": "komma", "pt": "vírgula", "vi": "phẩy",
}  # fmt: skip
# The same, with the fraction read as a number (Arabic: num2words reads ,5 as fifty).
DECIMAL_WORDS = {"ar": "فاصلة", "tr": "virgül", "cs": "celá", "pl": "przecinek"}
# By the number of decimals: tenths, hundredths, …; the Russian ones without their ending.
RUSSIAN_FRACTIONS = {
    1: "десят",
    2: "сот",
    3: "тысячн",
    4: "десятитысячн",
    5: "стотысячн",
    6: "миллионн",
}
HUNGARIAN_FRACTIONS = {
    1: "tized",
    2: "század",
    3: "ezred",
    4: "tízezred",
    5: "százezred",
    6: "milliomod",
}

# Powers of ten as a language's texts write them after a number: words, which are read as they are,
# and what is short for them.
SCALE_WORDS = {
    "en": {"thousand": 3, "million": 6, "millions": 6, "billion": 9, "billions": 9, "trillion": 12,
        "trillions": 12},
    "de": {"Tausend": 3, "tausend": 3, "Million": 6, "Millionen": 6, "Milliarde": 9,
        "Milliarden": 9, "Billion": 12, "Billionen": 12},
    "fr": {"mille": 3, "million": 6, "millions": 6, "milliard": 9, "milliards": 9, "billion": 12,
        "billions": 12},
    "es": {"mil": 3, "millón": 6, "millones": 6, "mil millones": 9, "billón": 12, "billones": 12},
    "pt": {"mil": 3, "milhão": 6, "milhões": 6, "mil milhões": 9, "bilhão": 9, "bilhões": 9,
        "trilhão": 12, "trilhões": 12},
    "it": {"mila": 3, "milione": 6, "milioni": 6, "miliardo": 9, "miliardi": 9, "bilioni": 12},
    "nl": {"duizend": 3, "miljoen": 6, "miljard": 9, "biljoen": 12},
    "pl": {"tysiąc": 3, "tysiące": 3, "tysięcy": 3, "milion": 6, "miliony": 6, "milionów": 6,
        "miliona": 6, "miliard": 9, "miliardy": 9,
           "miliardów": 9, "miliarda": 9},
    "ru": {"тысяча": 3, "тысячи": 3, "тысяч": 3, "миллион": 6, "миллиона": 6, "миллионов": 6,
        "миллиард": 9, "миллиарда": 9,
           "миллиардов": 9},
    "tr": {"bin": 3, "milyon": 6, "milyar": 9, "trilyon": 12},
    "cs": {"tisíc": 3, "tisíce": 3, "milion": 6, "miliony": 6, "milionů": 6, "milionu": 6,
        "miliarda": 9, "miliardy": 9, "miliard": 9},
    "hu": {"ezer": 3, "millió": 6, "milliárd": 9, "billió": 12},
    "ar": {"ألف": 3, "آلاف": 3, "مليون": 6, "ملايين": 6, "مليار": 9, "مليارات": 9, "تريليون": 12},
    "hi": {"हज़ार": 3, "हजार": 3, "लाख": 5, "मिलियन": 6, "करोड़": 7, "बिलियन": 9, "अरब": 9},
    "fa": {"هزار": 3, "میلیون": 6, "میلیارد": 9, "تریلیون": 12},
    "zh": {"千": 3, "万": 4, "百万": 6, "千万": 7, "亿": 8, "万亿": 12},
    "ja": {"千": 3, "万": 4, "百万": 6, "億": 8, "兆": 12},
    "ko": {"천": 3, "만": 4, "백만": 6, "억": 8, "조": 12},
}  # fmt: skip
SCALE_ABBREVIATIONS = {
    "de": {"Tsd.": 3, "Tsd": 3, "Mio.": 6, "Mio": 6, "Mrd.": 9, "Mrd": 9},
    "fr": {"Md": 9, "Mds": 9}, "es": {"MM": 6},
    "pt": {"mi": 6, "bi": 9}, "it": {"mln": 6, "mld": 9},
    "nl": {"mln.": 6, "mln": 6, "mld.": 9, "mld": 9, "mrd": 9},
    "pl": {"tys.": 3, "tys": 3, "mln": 6, "mld": 9},
    "ru": {"тыс.": 3, "тыс": 3, "млн": 6, "млрд": 9, "трлн": 12},
    "cs": {"tis.": 3, "tis": 3, "mil.": 6, "mld.": 9, "mld": 9}, "tr": {"mn": 6, "mr": 9},
    "hu": {"Mrd": 9},
}  # fmt: skip
# After a decimal number: million, thousand million, million million. Elsewhere (zh, ja, ko, hi and
# the languages that XTTS lacks) the product is read, which is exact and in the language's own
# scales.
DECIMAL_SCALES = {
    "ar": "مليون|مليار|تريليون", "cs": "milionu|miliardy|bilionu",
    "de": "millionen|milliarden|billionen", "en": "million|billion|trillion",
    "es": "millones|mil millones|billones", "fa": "میلیون|میلیارد|تریلیون",
    "fr": "millions|milliards|billions",
    "hu": "millió|milliárd|billió", "it": "milioni|miliardi|bilioni",
    "nl": "miljoen|miljard|biljoen", "pl": "miliona|miliarda|biliona",
    "pt": "milhões|mil milhões|biliões", "ru": "миллиона|миллиарда|триллиона",
    "tr": "milyon|milyar|trilyon",
}  # fmt: skip
# Units after a number -> their name in CLDR, which has the words in every language.
UNITS = {
    "km/h": "speed-kilometer-per-hour", "km²": "area-square-kilometer", "km": "length-kilometer",
    "m²": "area-square-meter",
    "m³": "volume-cubic-meter", "m": "length-meter", "cm": "length-centimeter",
    "mm": "length-millimeter", "kg": "mass-kilogram",
    "mg": "mass-milligram", "g": "mass-gram", "ml": "volume-milliliter", "l": "volume-liter",
    "°C": "temperature-celsius",
    "°F": "temperature-fahrenheit", "ºC": "temperature-celsius", "ºF": "temperature-fahrenheit",
    "kB": "digital-kilobyte", "MB": "digital-megabyte", "GB": "digital-gigabyte",
    "TB": "digital-terabyte", "Hz": "frequency-hertz", "kHz": "frequency-kilohertz",
    "MHz": "frequency-megahertz",
    "GHz": "frequency-gigahertz", "kW": "power-kilowatt", "kWh": "energy-kilowatt-hour",
    "‰": "concentr-permille",
}  # fmt: skip
# Ours, where CLDR writes a sign.
UNIT_PATTERNS = {
    ("tr", "speed-kilometer-per-hour"): "saatte {0} kilometre",
    ("ar", "energy-kilowatt-hour"): "{0} كيلو واط ساعة",
    ("ko", "concentr-permille"): "{0} 퍼밀",
    ("zh", "concentr-permille"): "千分之{0}",
}
LOCAL_UNITS = {
    "en": {"mph": "speed-mile-per-hour", "lbs": "mass-pound", "lb": "mass-pound",
        "oz": "mass-ounce", "″": "length-inch"},
    "ru": {"км/ч": UNITS["km/h"], "км": UNITS["km"], "см": UNITS["cm"], "мм": UNITS["mm"],
        "кг": UNITS["kg"], "мл": UNITS["ml"],
           "кВт": UNITS["kW"], "ГБ": UNITS["GB"], "МБ": UNITS["MB"]},
    "ar": {"كم": UNITS["km"], "كلم": UNITS["km"], "سم": UNITS["cm"], "كغ": UNITS["kg"],
        "كجم": UNITS["kg"]},
    "hi": {"किमी": UNITS["km"], "सेमी": UNITS["cm"], "मिमी": UNITS["mm"], "किग्रा": UNITS["kg"]},
}  # fmt: skip

ABBREVIATIONS = {
    "en": {
        "mrs": "misess", "mr": "mister", "dr": "doctor", "st": "saint", "co": "company",
        "jr": "junior", "maj": "major",
        "gen": "general", "drs": "doctors", "rev": "reverend", "lt": "lieutenant",
        "hon": "honorable", "sgt": "sergeant",
        "capt": "captain", "esq": "esquire", "ltd": "limited", "col": "colonel", "ft": "fort",
    },
    "es": {"sra": "señora", "sr": "señor", "dr": "doctor", "dra": "doctora", "st": "santo",
        "co": "compañía", "jr": "junior",
           "ltd": "limitada"},
    "fr": {"mme": "madame", "mr": "monsieur", "dr": "docteur", "st": "saint", "co": "compagnie",
        "jr": "junior", "ltd": "limitée"},
    "de": {"fr": "frau", "dr": "doktor", "st": "sankt", "co": "firma", "jr": "junior"},
    "pt": {"sra": "senhora", "sr": "senhor", "dr": "doutor", "dra": "doutora", "st": "santo",
        "co": "companhia", "jr": "júnior",
           "ltd": "limitada"},
    "it": {"sig": "signore", "dr": "dottore", "st": "santo", "co": "compagnia", "jr": "junior",
        "ltd": "limitata"},
    "pl": {"p": "pani", "m": "pan", "dr": "doktor", "sw": "święty", "jr": "junior"},
    "cs": {"dr": "doktor", "ing": "inženýr", "p": "pan"},
    "ru": {"г-жа": "госпожа", "г-н": "господин", "д-р": "доктор"},
    "nl": {"dhr": "de heer", "mevr": "mevrouw", "dr": "dokter", "jhr": "jonkheer"},
    "tr": {"b": "bay", "byk": "büyük", "dr": "doktor"},
    "hu": {"dr": "doktor", "b": "bácsi", "nőv": "nővér"},
}  # fmt: skip

# Words for & @ % # $ £ °, in the order in which XTTS replaces them.
XTTS_SYMBOLS = "&@%#$£°"
SYMBOL_WORDS = {
    "en": "and|at|percent|hash|dollar|pound|degree",
    "es": "y|arroba|por ciento|numeral|dolar|libra|grados",
    "fr": "et|arobase|pour cent|dièse|dollar|livre|degrés",
    "de": "und|at|prozent|raute|dollar|pfund|grad",
    "pt": "e|arroba|por cento|cardinal|dólar|libra|graus",
    "it": "e|chiocciola|per cento|cancelletto|dollaro|sterlina|gradi",
    "pl": "i|małpa|procent|krzyżyk|dolar|funt|stopnie",
    "ar": "و|على|في المئة|رقم|دولار|جنيه|درجة",
    "zh": "和|在|百分之|号|美元|英镑|度",
    "cs": "a|na|procento|křížek|dolar|libra|stupně",
    "ru": "и|собака|процентов|номер|доллар|фунт|градус",
    "nl": "en|bij|procent|hekje|dollar|pond|graden",
    "tr": "ve|at|yüzde|diyez|dolar|sterlin|derece",
    "hu": "és|kukac|százalék|kettőskereszt|dollár|font|fok",
    "ko": "그리고|에|퍼센트|번호|달러|파운드|도",
    "hi": "और|ऐट दी रेट|प्रतिशत|हैश|डॉलर|पाउंड|डिग्री",
    "fa": "و|ات|درصد|هشتگ|دلار|پوند|درجه",
    "ja": (
        "アンド|アット|パーセント|ナンバー|ドル|ポンド|度"
    ),  # ours: XTTS hands Japanese over as it is
}
# Ours: signs that XTTS leaves in the text, where they become unknown tokens.
EXTRA_SYMBOLS = {
    "€": {
        "ar": "يورو", "cs": "euro", "de": "euro", "en": "euro", "es": "euro", "fa": "یورو",
        "fr": "euro", "hi": "यूरो", "hu": "euró",
        "it": "euro", "ja": "ユーロ", "ko": "유로", "nl": "euro", "pl": "euro", "pt": "euro",
        "ru": "евро", "tr": "euro", "zh": "欧元",
    },
    "№": {
        "ar": "رقم", "cs": "číslo", "de": "nummer", "en": "number", "es": "número", "fa": "شماره",
        "fr": "numéro", "hi": "नंबर",
        "hu": "szám", "it": "numero", "ja": "ナンバー", "ko": "번호", "nl": "nummer", "pl": "numer",
        "pt": "número", "ru": "номер",
        "tr": "numara", "zh": "号",
    },
    "٪": {"ar": "في المئة", "fa": "درصد"},
}  # fmt: skip

# Czech ordinals, which num2words lacks: units, teens, tens, hundreds.
CZECH_ORDINALS = {
    1: "první", 2: "druhý", 3: "třetí", 4: "čtvrtý", 5: "pátý", 6: "šestý", 7: "sedmý", 8: "osmý",
    9: "devátý", 10: "desátý",
    11: "jedenáctý", 12: "dvanáctý", 13: "třináctý", 14: "čtrnáctý", 15: "patnáctý",
    16: "šestnáctý", 17: "sedmnáctý",
    18: "osmnáctý", 19: "devatenáctý", 20: "dvacátý", 30: "třicátý", 40: "čtyřicátý",
    50: "padesátý", 60: "šedesátý",
    70: "sedmdesátý", 80: "osmdesátý", 90: "devadesátý", 100: "stý", 200: "dvoustý", 300: "třístý",
    400: "čtyřstý",
    500: "pětistý", 600: "šestistý", 700: "sedmistý", 800: "osmistý", 900: "devítistý",
}  # fmt: skip

# Typographic characters read like their plain forms. A double quote is then removed, as XTTS
# removes '"'.
_TO_QUOTE = "“”„‟«»‹›〝〞＂"
_TO_APOSTROPHE = "‘’‚‛′ʼ`´＇"
_TO_HYPHEN = "‐‑‒–—―−⁃﹣－"
TYPOGRAPHY = {
    **dict.fromkeys(map(ord, _TO_QUOTE), '"'),
    **dict.fromkeys(map(ord, _TO_APOSTROPHE), "'"),
    **dict.fromkeys(map(ord, _TO_HYPHEN), "-"),
    ord("…"): "...",
}
CJK_PUNCTUATION = {ord("、"): ", ", ord("。"): ". "}
# Persian: Arabic yeh, alef maksura and kaf become the Persian letters; marks of punctuation the
# common ones. A heh with hamza or yeh above is the same sound as heh + yeh ("khane-ye"), usually
# written with a zero-width non-joiner before that yeh.
PERSIAN_LETTERS = {
    "ي": "ی", "ى": "ی", "ې": "ی", "ك": "ک", "ڪ": "ک", "ٱ": "ا", "ہ": "ه", "ھ": "ه", "ە": "ه",
    "ۀ": "ه ی", "ۂ": "ه ی",
    "،": ",", "؛": ";", "؟": "?", "۔": ".",
}  # fmt: skip
ARABIC_DIACRITICS = "\u064b\u064c\u064d\u064e\u064f\u0650\u0651\u0652\u0653\u0656\u0657\u0658\u0670"

# Code point ranges of the letters of a script.
SCRIPT_RANGES = {
    "Latin": (
        (0x41, 0x24F),
        (0x1E00, 0x1EFF),
        (0x2C60, 0x2C7F),
        (0xA720, 0xA7FF),
        (0xFB00, 0xFB06),
        (0xFF21, 0xFF5A),
        (0x250, 0x2AF),
    ),
    "Cyrillic": ((0x400, 0x52F), (0x1C80, 0x1C8F), (0x2DE0, 0x2DFF), (0xA640, 0xA69F)),
    "Greek": ((0x370, 0x3FF), (0x1F00, 0x1FFF)),
    "Arabic": ((0x600, 0x6FF), (0x750, 0x77F), (0x8A0, 0x8FF), (0xFB50, 0xFDFF), (0xFE70, 0xFEFF)),
    "Hebrew": ((0x590, 0x5FF), (0xFB1D, 0xFB4F)),
    "Devanagari": ((0x900, 0x97F), (0xA8E0, 0xA8FF)),
    "Bengali": ((0x980, 0x9FF),),
    "Tamil": ((0xB80, 0xBFF),),
    "Telugu": ((0xC00, 0xC7F),),
    "Thai": ((0xE00, 0xE7F),),
    "Georgian": ((0x10A0, 0x10FF), (0x1C90, 0x1CBF)),
    "Han": (
        (0x3005, 0x3007),
        (0x3400, 0x4DBF),
        (0x4E00, 0x9FFF),
        (0xF900, 0xFAFF),
        (0x20000, 0x323AF),
    ),
    "Kana": ((0x3040, 0x30FF), (0x31F0, 0x31FF), (0xFF66, 0xFF9F)),
    "Hangul": ((0x1100, 0x11FF), (0x3130, 0x318F), (0xA960, 0xA97F), (0xAC00, 0xD7FF)),
}
# Scripts of a language; Latin where not listed.
LANGUAGE_SCRIPTS = {
    "ru": ("Cyrillic",), "uk": ("Cyrillic",), "be": ("Cyrillic",), "bg": ("Cyrillic",),
    "mk": ("Cyrillic",), "kk": ("Cyrillic",),
    "sr": ("Cyrillic", "Latin"), "ar": ("Arabic",), "fa": ("Arabic",), "ur": ("Arabic",),
    "he": ("Hebrew",), "el": ("Greek",),
    "hi": ("Devanagari",), "bn": ("Bengali",), "ta": ("Tamil",), "te": ("Telugu",), "th": ("Thai",),
    "ka": ("Georgian",),
    "zh": ("Han",), "ja": ("Han", "Kana"), "ko": ("Hangul", "Han"),
}  # fmt: skip


def symbol_words(language: str, *, parity: bool) -> dict[str, str]:
    """Sign -> word; without parity also the signs that XTTS leaves alone.

    Empty for a language without words.
    """
    words = (
        dict(zip(XTTS_SYMBOLS, SYMBOL_WORDS[language].split("|"), strict=True))
        if language in SYMBOL_WORDS
        else {}
    )
    if not parity:
        words |= {
            sign: by_language[language]
            for sign, by_language in EXTRA_SYMBOLS.items()
            if language in by_language
        }
    return words
