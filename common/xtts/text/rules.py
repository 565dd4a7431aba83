"""Tables for cleaning text, one entry per language: what is read out, and which letters belong to it.

Source: the rules that XTTS's tokenizer applies, plus Persian and the entries marked "ours", which XTTS lacks.
"""

from __future__ import annotations

# The 17 languages of XTTS v2, and Persian. Tag of "zh" in a vocabulary: [zh-cn].
XTTS_LANGUAGES = ("ar", "cs", "de", "en", "es", "fr", "hi", "hu", "it", "ja", "ko", "nl", "pl", "pt", "ru", "tr", "zh")
LANGUAGES = (*XTTS_LANGUAGES, "fa")
# Cleaned by the common rules alone: lower case, typographic characters, numbers. For vocabularies trained from nothing.
GENERIC_LANGUAGES = (
    "az", "be", "bg", "bn", "ca", "cy", "da", "el", "eo", "et", "eu", "fi", "ga", "gl", "he", "hr", "id", "is", "ka", "kk", "lt", "lv",
    "mk", "ms", "no", "ro", "sk", "sl", "sq", "sr", "sv", "sw", "ta", "te", "th", "tl", "uk", "ur", "uz", "vi",
)  # fmt: skip

# Other spellings of a code (ISO 639-2/3, older or mistaken ones). A region ("fa-IR", "pt_BR") is cut off before this.
ALIASES = {
    "ara": "ar", "arb": "ar", "ces": "cs", "cze": "cs", "cz": "cs", "deu": "de", "ger": "de", "eng": "en", "spa": "es", "fra": "fr",
    "fre": "fr", "hin": "hi", "hun": "hu", "ita": "it", "jpn": "ja", "jp": "ja", "kor": "ko", "kr": "ko", "nld": "nl", "dut": "nl",
    "pol": "pl", "por": "pt", "rus": "ru", "tur": "tr", "zho": "zh", "chi": "zh", "cmn": "zh", "cn": "zh", "fas": "fa", "per": "fa",
    "pes": "fa", "prs": "fa", "nb": "no", "nn": "no",
}  # fmt: skip

# Characters of a text above which XTTS warns that the audio may be cut off.
CHAR_LIMITS = {
    "en": 250, "de": 253, "fr": 273, "es": 239, "it": 213, "pt": 203, "pl": 224, "zh": 82, "ar": 166, "cs": 186, "ru": 182, "nl": 251,
    "tr": 226, "ja": 71, "hu": 224, "ko": 95, "hi": 150,
}  # fmt: skip
DEFAULT_CHAR_LIMIT = 250

# Language -> (module to import, package to install). Japanese needs a dictionary besides.
BACKENDS = {
    "zh": (("pypinyin", "pypinyin"),),
    "ja": (("cutlet", "cutlet"), ("fugashi", "fugashi")),
    "ko": (("hangul_romanize", "hangul-romanize"),),
}

# Languages whose thousands are grouped with commas and whose decimals follow a point; elsewhere the other way round.
COMMA_GROUPS = frozenset({"en", "ru", "fa", "ja", "ko", "zh"})
XTTS_COMMA_GROUPS = frozenset({"en", "ru"})
# Ours: languages that group thousands with a space ("12 500").
SPACE_GROUPS = frozenset({"cs", "fr", "hu", "pl", "ru", "be", "bg", "et", "fi", "kk", "lt", "lv", "no", "sk", "sv", "uk"})

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

# num2words joins the two parts of an amount with this; an amount without cents is cut there.
CURRENCY_JOINERS = {"es": " con ", "fr": " et ", "de": " und ", "pt": " e ", "it": " e "}
DEFAULT_CURRENCY_JOINER = ", "
CURRENCY_SIGNS = {"£": "GBP", "$": "USD", "€": "EUR"}
# Ours: languages where num2words fails on these currencies or names another one (Arabic: riyals for dollars; Hungarian: English
# names). Their amounts are read as number + the word of the symbol.
PLAIN_CURRENCY = frozenset({"ar", "fa", "hi", "hu", "ko"})
# Ours: where num2words is wrong on decimals (Arabic reads ,5 as fifty; Persian 3.05 as three and a half): number, this word, number.
DECIMAL_WORDS = {"ar": "فاصلة", "tr": "virgül", "fa": "ممیز"}
# Where num2words reads the digits after the point one by one.
DIGITWISE_DECIMALS = frozenset({"de", "en", "es", "fr", "it", "ja", "ko", "nl", "pt"})

ABBREVIATIONS = {
    "en": {
        "mrs": "misess", "mr": "mister", "dr": "doctor", "st": "saint", "co": "company", "jr": "junior", "maj": "major",
        "gen": "general", "drs": "doctors", "rev": "reverend", "lt": "lieutenant", "hon": "honorable", "sgt": "sergeant",
        "capt": "captain", "esq": "esquire", "ltd": "limited", "col": "colonel", "ft": "fort",
    },
    "es": {"sra": "señora", "sr": "señor", "dr": "doctor", "dra": "doctora", "st": "santo", "co": "compañía", "jr": "junior",
           "ltd": "limitada"},
    "fr": {"mme": "madame", "mr": "monsieur", "dr": "docteur", "st": "saint", "co": "compagnie", "jr": "junior", "ltd": "limitée"},
    "de": {"fr": "frau", "dr": "doktor", "st": "sankt", "co": "firma", "jr": "junior"},
    "pt": {"sra": "senhora", "sr": "senhor", "dr": "doutor", "dra": "doutora", "st": "santo", "co": "companhia", "jr": "júnior",
           "ltd": "limitada"},
    "it": {"sig": "signore", "dr": "dottore", "st": "santo", "co": "compagnia", "jr": "junior", "ltd": "limitata"},
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
    "ja": "アンド|アット|パーセント|ナンバー|ドル|ポンド|度",  # ours: XTTS hands Japanese over as it is
}
# Ours: signs that XTTS leaves in the text, where they become unknown tokens.
EXTRA_SYMBOLS = {
    "€": {
        "ar": "يورو", "cs": "euro", "de": "euro", "en": "euro", "es": "euro", "fa": "یورو", "fr": "euro", "hi": "यूरो", "hu": "euró",
        "it": "euro", "ja": "ユーロ", "ko": "유로", "nl": "euro", "pl": "euro", "pt": "euro", "ru": "евро", "tr": "euro", "zh": "欧元",
    },
    "№": {"ru": "номер"},
    "٪": {"ar": "في المئة", "fa": "درصد"},
}  # fmt: skip

# Czech ordinals, which num2words lacks: units, teens, tens, hundreds.
CZECH_ORDINALS = {
    1: "první", 2: "druhý", 3: "třetí", 4: "čtvrtý", 5: "pátý", 6: "šestý", 7: "sedmý", 8: "osmý", 9: "devátý", 10: "desátý",
    11: "jedenáctý", 12: "dvanáctý", 13: "třináctý", 14: "čtrnáctý", 15: "patnáctý", 16: "šestnáctý", 17: "sedmnáctý",
    18: "osmnáctý", 19: "devatenáctý", 20: "dvacátý", 30: "třicátý", 40: "čtyřicátý", 50: "padesátý", 60: "šedesátý",
    70: "sedmdesátý", 80: "osmdesátý", 90: "devadesátý", 100: "stý", 200: "dvoustý", 300: "třístý", 400: "čtyřstý",
    500: "pětistý", 600: "šestistý", 700: "sedmistý", 800: "osmistý", 900: "devítistý",
}  # fmt: skip

# Typographic characters read like their plain forms. A double quote is then removed, as XTTS removes '"'.
_TO_QUOTE = "“”„‟«»‹›〝〞＂"
_TO_APOSTROPHE = "‘’‚‛′ʼ`´＇"
_TO_HYPHEN = "‐‑‒–—―−⁃﹣－"
# Soft hyphen, zero-width space, joiner and no-break, bidirectional marks, variation selectors: they carry no sound.
INVISIBLE = "\u00ad\u200b\u200d\u200e\u200f\u2060\u2061\u2062\u2063\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u061c"
INVISIBLE += "\ufeff\ufe0e\ufe0f"
TYPOGRAPHY = {
    **dict.fromkeys(map(ord, _TO_QUOTE), '"'),
    **dict.fromkeys(map(ord, _TO_APOSTROPHE), "'"),
    **dict.fromkeys(map(ord, _TO_HYPHEN), "-"),
    ord("…"): "...",
}
CJK_PUNCTUATION = {ord("、"): ", ", ord("。"): ". "}
# Persian: Arabic yeh, alef maksura and kaf become the Persian letters; marks of punctuation the common ones. A heh with hamza or yeh
# above is the same sound as heh + yeh ("khane-ye"), usually written with a zero-width non-joiner before that yeh.
PERSIAN_LETTERS = {
    "ي": "ی", "ى": "ی", "ې": "ی", "ك": "ک", "ڪ": "ک", "ٱ": "ا", "ہ": "ه", "ھ": "ه", "ە": "ه", "ۀ": "ه ی", "ۂ": "ه ی",
    "،": ",", "؛": ";", "؟": "?", "۔": ".",
}  # fmt: skip
ARABIC_DIACRITICS = "\u064b\u064c\u064d\u064e\u064f\u0650\u0651\u0652\u0653\u0656\u0657\u0658\u0670"

# Code point ranges of the letters of a script.
SCRIPT_RANGES = {
    "Latin": ((0x41, 0x24F), (0x1E00, 0x1EFF), (0x2C60, 0x2C7F), (0xA720, 0xA7FF), (0xFB00, 0xFB06), (0xFF21, 0xFF5A), (0x250, 0x2AF)),
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
    "Han": ((0x3005, 0x3007), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x323AF)),
    "Kana": ((0x3040, 0x30FF), (0x31F0, 0x31FF), (0xFF66, 0xFF9F)),
    "Hangul": ((0x1100, 0x11FF), (0x3130, 0x318F), (0xA960, 0xA97F), (0xAC00, 0xD7FF)),
}
# Scripts of a language; Latin where not listed.
LANGUAGE_SCRIPTS = {
    "ru": ("Cyrillic",), "uk": ("Cyrillic",), "be": ("Cyrillic",), "bg": ("Cyrillic",), "mk": ("Cyrillic",), "kk": ("Cyrillic",),
    "sr": ("Cyrillic", "Latin"), "ar": ("Arabic",), "fa": ("Arabic",), "ur": ("Arabic",), "he": ("Hebrew",), "el": ("Greek",),
    "hi": ("Devanagari",), "bn": ("Bengali",), "ta": ("Tamil",), "te": ("Telugu",), "th": ("Thai",), "ka": ("Georgian",),
    "zh": ("Han",), "ja": ("Han", "Kana"), "ko": ("Hangul", "Han"),
}  # fmt: skip


def symbol_words(language: str, *, parity: bool) -> dict[str, str]:
    """Sign -> word; without parity also the signs that XTTS leaves alone. Empty for a language without words."""
    words = dict(zip(XTTS_SYMBOLS, SYMBOL_WORDS[language].split("|"), strict=True)) if language in SYMBOL_WORDS else {}
    if not parity:
        words |= {sign: by_language[language] for sign, by_language in EXTRA_SYMBOLS.items() if language in by_language}
    return words
