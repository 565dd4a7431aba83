"""Field cases T1 to T8 with siblings: money, units, times, dates and fractions; emoji, fillers and
control characters; damage.
"""

import random
import unicodedata

import pytest
from num2words import CONVERTER_CLASSES

from common.xtts.text import currencies, rules
from common.xtts.text.clean import (
    UnknownLanguage,
    clean,
    foreign_script,
    has_words,
    normalize_language,
    require_backend,
)
from common.xtts.text.errors import (
    DamagedText,
    LanguageNotInVocabulary,
    LanguageUnavailable,
    TextError,
)
from common.xtts.text.tokenizer import Tokenizer

MONEY = [
    # T1: the unit is never cut off
    ("pt", "Custa $21 hoje.", "custa vinte e um dólares hoje."),
    ("pt", "£200 e 1.250,50€",
        "duzentas libras e mil duzentos e cinquenta euros e cinquenta cêntimos"),
    ("es", "$31 o £31", "treinta y un dólares o treinta y una libras"),
    ("it", "$21, €1", "ventuno dollari, un euro"),
    ("fr", "1 000 000 € ou £21", "un million d'euros ou vingt et une livres"),
    # T2: every sign
    ("en", "¥500", "five hundred yen"),
    ("en", "₹500, ₩5, ₽1, ₺2", "five hundred rupees, five won, one rouble, two liras"),
    ("en", "₪3 ฿4 ₴5", "three shekels four baht five hryvnias"),
    ("de", "¥500 und 20 ₺", "fünfhundert yen und zwanzig lira"),
    ("ru", "1 ₽, 2 ₽, 5 ₽, 21 ₴", "один рубль, два рубля, пять рублей, двадцать одна гривна"),
    ("pl", "22 zł, 5,50 zł, 1 ₴",
        "dwadzieścia dwa złote, pięć złotych, pięćdziesiąt groszy, jedna hrywna"),
    ("cs", "2 £ a 5 Kč", "dvě libry a pět korun"),
    ("hu", "$2 és 12 Ft", "két dollár és tizenkét forint"),
    ("tr", "100 TL, ₺5", "yüz lira, beş lira"),
    ("hi", "₹1 और ₹500", "एक रुपया और पाँच सौ रुपये"),
    ("fa", "₺۵ و ۲۰ ¥", "پنج لیر و بیست ین"),
    ("en", "- $5, please", "- five dollars, please"),
    ("en", "-50¢", "minus fifty cents"),
    ("sv", "$5.5M", "fem miljoner femhundratusen amerikanska dollar"),
    ("sv", "€5 och 2,50 €", "fem euro och två komma fem noll euro"),
    ("uk", "5 ₴, -1,5 км", "п'ять українських гривень, мінус один кома п'ять км"),
    ("vi", "1,5 km", "một phẩy năm kilômét"),
    # T3: the sign of the rial is a sign, not four letters
    ("en", "500 ﷼", "five hundred rials"),
    ("ar", "15 ﷼", "خمسة عشر ريالا"),
    ("fa", "۵۰۰ ﷼", "پانصد ریال"),
    # T4: suffixes
    ("en", "$5.5 million", "five point five million dollars"),
    ("en", "$20k", "twenty thousand dollars"),
    ("en", "$1.2bn and £3M", "one point two billion dollars and three million pounds sterling"),
    ("en", "2.5k views, 4K", "two thousand, five hundred views, four k"),
    ("de", "5,5 Mio. € und 3 Mrd. $", "fünf komma fünf millionen euro und drei milliarden dollar"),
    ("fr", "1,5 M€ et 20k€", "un virgule cinq millions d'euros et vingt mille euros"),
    ("ru", "5,5 млн руб. и 5 тыс. руб. ныне",
        "пять целых пять десятых миллиона рублей и пять тысяч рублей ныне"),
    ("fa", "۵ میلیون $", "پنج میلیون دلار"),
    ("hi", "₹1.5 करोड़", "एक करोड़ पचास लाख रुपये"),
    # T5: codes
    ("en", "SGD 5", "five singapore dollars"),
    ("en", "5 CHF or 12.50 USD", "five swiss francs or twelve dollars, fifty cents"),
    ("pl", "2 SGD", "dwa dolary singapurskie"),
    ("de", "CHF 5'000.50", "fünftausend komma fünf null schweizer franken"),
    ("en", "TRY 5 times", "try five times"),  # a word if it is before the number
    # signs on both sides, negative, ranges, two signs beside a number
    ("en", "-$5, $-5 and US$5", "minus five dollars, minus five dollars and five dollars"),
    ("en", "in 2020 $30, then 5€ 10€",
        "in two thousand and twenty thirty dollars, then five euro ten euro"),
    ("en", "5-10 €", "five - ten euro"),
    ("en", "it cost $5.", "it cost five dollars."),
    ("nl", "€ 5,- of 20.-- €", "vijf euro of twintig euro"),
    ("en", "$0.05 and 50¢", "five cents and fifty cents"),
    ("en", "₹1,00,000", "one hundred thousand rupees"),
]  # fmt: skip
READ = [
    # T6: negative, times, decimals as they are written in Persian
    ("fa", "-۵", "منفی پنج"),
    ("fa", "۸:۳۰", "هشت و سی دقیقه"),
    ("fa", "۳/۵", "سه و نیم"),
    ("fa", "۱/۲ و -۲٫۵", "یک دوم و منفی دو و نیم"),
    ("fa", "۱۴۰۲/۵/۱", "یک مرداد هزار و چهارصد و دو"),
    ("en", "8:30, 8:05, 8:00, 14:00, 8:00 pm",
        "eight thirty, eight oh five, eight o'clock, fourteen hundred, eight pm"),
    ("de", "8:30 Uhr, 8.30 Uhr, 1:00 Uhr", "acht uhr dreißig, acht uhr dreißig, ein uhr"),
    ("fr", "10h30 et 1:00", "dix heures trente et une heure"),
    ("es", "a las 8:30", "a las ocho treinta"),
    ("pt", "às 2:30", "às duas e trinta"),
    ("it", "alle 8:30", "alle otto e trenta"),
    ("nl", "om 8:30", "om acht uur dertig"),
    ("pl", "o 8:30", "o ósma trzydzieści"),
    ("ru", "в 8:05 и 2:00", "в восемь ноль пять и два часа"),
    ("cs", "v 2:30", "v dvě hodiny třicet minut"),
    ("hu", "8:30", "nyolc óra harminc"),
    ("tr", "8:30", "sekiz otuz"),
    ("ar", "الساعة 8:30", "الساعة الثامنة و ثلاثون دقيقة"),
    ("hi", "8:30 बजे और 9:00 बजे", "आठ बजकर तीस मिनट और नौ बजे"),
    ("de", "um 1 Uhr", "um ein uhr"),
    ("en", "a ratio of 16:9, John 3:2", "a ratio of sixteen:nine, john three:two"),
    ("en", "2024-05-03", "may third, twenty twenty-four"),
    ("en", "13.5.2024 or 5/13/1984",
        "may thirteenth, twenty twenty-four or may thirteenth, nineteen eighty-four"),
    ("en", "5/3/2024", "five/three/two thousand and twenty-four"),  # May or March: nobody knows
    ("de", "3.5.2024", "dritte mai zweitausendvierundzwanzig"),
    ("fr", "1/5/2024", "premier mai deux mille vingt-quatre"),
    ("es", "03/05/2024", "tres de mayo de dos mil veinticuatro"),
    ("ru", "03.05.2024", "третьего мая две тысячи двадцать четвёртого года"),
    ("pl", "23.05.2024", "dwudziestego trzeciego maja dwa tysiące dwadzieścia cztery"),
    ("cs", "21. 5. 2024", "dvacátého prvního května dva tisíce dvacet čtyři"),
    ("hu", "2024.05.03.", "kétezer-huszonnégy május három."),
    ("en", "31.31.2024", "thirty-one point three one.two thousand and twenty-four"),
    # fractions
    ("en", "½ cup, 2½ cups, 3/5, 1 1/2",
        "one half cup, two and one half cups, three fifths, one and one half"),
    ("de", "¾", "drei viertel"),
    ("fr", "⅔", "deux tiers"),
    ("ru", "⅖ и ½", "две пятых и одна вторая"),
    ("pl", "¾ i ⅚", "trzy czwarte i pięć szóstych"),
    ("ar", "½ و ¾", "نصف و ثلاثة أرباع"),
    ("tr", "⅗ ve ½", "beşte üç ve yarım"),
    ("hi", "⅗", "तीन बटा पाँच"),
    ("en", "24/7 and/or 10/3", "twenty-four/seven and/or ten/three"),
    # negative numbers, and hyphens that are none
    ("en", "-5 or (-2.5), 3-4, covid-19",
        "minus five or (minus two point five), three - four, covid-nineteen"),
    ("en", "1990-2000", "one thousand, nine hundred and ninety - two thousand"),
    ("en", "x=-3", "x=minus three"),
    ("en", "the 1990s, '80s and 1900s", "the nineteen nineties, eighties and nineteen hundreds"),
    ("en", "in the 80s, wait 30s", "in the eighties, wait thirty s"),
    ("en", "B2B in 1080p", "b two b in one thousand and eighty p"),
    ("de", "-5", "minus fünf"),
    ("ru", "−5", "минус пять"),
    ("hi", "-5", "ऋण पाँच"),
    # units
    ("en", "12.5kg, 1 km, 100 km/h",
        "twelve point five kilograms, one kilometer, one hundred kilometers per hour"),
    ("en", "-3 °C", "minus three degrees celsius"),
    ("pl", "22 GB i 5 km", "dwadzieścia dwa gigabajty i pięć kilometrów"),
    ("ru", "5 км", "пять километров"),
    ("de", "1 km und 5–10 m²", "ein kilometer und fünf - zehn quadratmeter"),
    ("hu", "2 km", "két kilométer"),
    ("en", "5㎏, 3㎡ and 5'10\"", "five kilograms, three square meters and five foot ten"),
    ("de", "𝟓 ㎞ und ｆünf ℓ", "fünf kilometer und fünf l"),
    ("es", "1ºC, n.º 1 y 1.º", "un grado celsius, n.º uno y primero"),
    ("fr", "n° 5, à 20h", "numéro cinq, à vingt heures"),
    ("en", "8:30pm, № 5", "eight thirty pm, number five"),
    ("en", "I'm 5'7 on 5th Ave.", "i'm five'seven on fifth ave."),
    # numbers that num2words reads wrongly
    ("tr", "491.027", "dörtyüzdoksanbirbinyirmiyedi"),
    ("it", "118", "centodiciotto"),
    ("ar", "2000", "ألفان"),
    ("hi", "12,34,567", "बारह लाख चौंतीस हज़ार पाँच सौ सड़सठ"),
    ("ru", "1,5 и 21,01", "одна целая пять десятых и двадцать одна целая одна сотая"),
    ("en", "0.000001", "zero point zero zero zero zero zero one"),
    ("de", "999999999999999",
     "neunhundertneunundneunzig billionen neunhundertneunundneunzig milliarden"
     " neunhundertneunundneunzig millionen"
     " neunhundertneunundneunzigtausendneunhundertneunundneunzig"),
]  # fmt: skip


@pytest.mark.parametrize(("language", "text", "expected"), MONEY)
def test_money_keeps_its_unit(language, text, expected):
    assert clean(text, language) == expected


@pytest.mark.parametrize(("language", "text", "expected"), READ)
def test_numbers_are_read_out(language, text, expected):
    assert clean(text, language) == expected


@pytest.mark.parametrize(
    ("language", "text", "expected"),
    [
        (
            "zh",
            "价格20€，走了5km，早上8:30",
            "jia4ge2er4shi2ou1yuan2,zou3le5wu3gong1li3,zao3shang4ba1dian3san1shi2fen1",
        ),
        ("ja", "$20です。8:30に", "nijuu dollar desu. hachi ji sanjuu fun ni"),
        ("ko", "$20이다. 3/5", "isib dalleo-ida. obun-ui sam"),
    ],
)
def test_particles_follow_an_amount_without_a_space(language, text, expected):
    try:
        require_backend(language)
    except LanguageUnavailable:
        pytest.skip(f"a package for {language} is not installed")
    assert clean(text, language) == expected


@pytest.mark.parametrize(
    ("language", "text", "message"),
    [
        ("en", "₿5 a day", "no word in en for the currency ₿"),
        ("fa", "۵ ¤", "no word in fa for the currency ¤"),
        ("de", "nur ₰ allein", "no word in de for the currency sign ₰"),
        ("en", "it was $1.2.3", r"'\$1.2.3' is no amount"),
    ],
)
def test_t2_an_amount_without_words_is_refused_and_never_read_as_the_number(
    language, text, message
):
    with pytest.raises(TextError, match=message):
        clean(text, language)


# Where our currency names differ from num2words', and why.
DIFFERS = {
    ("hu", "EUR"): "num2words has English names", ("hu", "GBP"): "the same",
    ("hu", "USD"): "the same", ("hu", "INR"): "the same",
    ("hu", "RUB"): "the same", ("hu", "HUF"): "the same", ("ko", "JPY"): "joined to the number",
    ("ko", "KRW"): "joined to the number",
    ("ko", "USD"): "joined to the number", ("ja", "JPY"): "joined to the number",
    ("es", "THB"): "a plural in s, as the Academy has it",
    ("es", "ILS"): "Spanish spelling", ("es", "IRR"): "iraní is left out", ("es", "KRW"): "plural",
    ("es", "UAH"): "feminine, as CLDR",
    ("ru", "UAH"): "the same words",
}  # fmt: skip


def test_currency_names_are_num2words_where_it_has_them():
    compared = 0
    for language in sorted(set(rules.LANGUAGES) - {"zh", "hi"}):
        forms = getattr(CONVERTER_CLASSES[language], "CURRENCY_FORMS", {})
        for code in sorted(set(forms) & set(currencies._COLUMNS)):
            if (language, code) in DIFFERS:
                continue
            large, small = forms[code]
            for count, form in ((1, 0), (2, 1)):
                name, _ = currencies.name(language, code, currencies.Decimal(count))
                assert name == large[form].lower(), (language, code)
                hundredth = currencies.small_name(language, code, count)
                if hundredth:
                    assert hundredth[0] == small[form].lower(), (language, code)
            compared += 1
    assert compared >= 30


# -- characters without a sound, T7 and T8 -------------------------------------------------------

SILENT = [
    ("fa", "🇮🇷 سلام", "سلام"),
    ("en", "\U0001f468\u200d\U0001f469\u200d\U0001f467 hi", "hi"),
    ("en", "hi😀there 👍🏽 ok ❤\ufe0f", "hi there ok"),
    ("de", "eins\U000e0067\U000e007f zwei 1\ufe0f\u20e3", "eins zwei eins"),
    ("en", "a\0b \x1b[31mred\x1b[0m \x07", "ab red"),
    ("ru", "да\u2800нет \ue000", "да нет"),
    ("fa", "ســلام", "سلام"),
    ("en", "so\u00adft w\u200bord", "soft word"),
    ("en", "½ of it\0", "one half of it"),
]
WORDLESS = [
    "\u3164",
    "\u115f\u1160",
    "ـ",
    "ــ ـ",
    "\ufe0f",
    "\U000e0041",
    "😀",
    "\u200d",
    "\0",
    "\uffa0",
    "\u2800",
]


@pytest.mark.parametrize(("language", "text", "expected"), SILENT)
def test_characters_without_a_sound_are_left_out(language, text, expected):
    assert clean(text, language) == expected


@pytest.mark.parametrize("text", WORDLESS)
def test_fillers_are_no_words(text):
    for language in ("en", "fa", "ar"):
        assert not has_words(clean(text, language))
    assert not has_words(clean(text, "en", parity=True))


@pytest.mark.parametrize("parity", [False, True])
def test_a_learnt_vocabulary_has_no_tokens_without_a_sound(parity):
    pairs = [(text, language) for language, text, _ in SILENT if language != "fa"] + [
        (text, "en") for text in WORDLESS
    ]
    learnt = Tokenizer.train(
        [*pairs, ("say [STOP] now", "en")], 300, ["en", "de", "ru"], parity=parity
    )
    characters = {c for i in range(learnt.vocab_size) for c in learnt.token(i) or ""}
    assert not [c for c in characters if unicodedata.category(c) in ("Cc", "Cf", "Co", "So", "Mn")]
    assert not characters & set("\u3164\u115f\u1160\uffa0\u2800ـ")
    assert learnt.stop not in learnt.encode("say [STOP] now", "en")
    assert learnt.decode(learnt.encode("say [STOP] now", "en")) == "[en]say [stop] now"


def test_a_given_vocabulary_says_the_text_without_them():
    given = Tokenizer.train([("hi there ok", "en")], 100, ["en"])
    assert given.unknown_characters("hi😀there \0ok", "en") == []
    assert given.unk not in given.encode("hi😀there \0ok", "en")


# -- D15: damage ---------------------------------------------------------------------------------

WHOLE = [
    "Spaß“ sagte er",
    "CAFÉ… fermé",
    "»MENÜ« und »Ü«",
    "naïve œuf",
    "« À bientôt… »",
    "“it’s”…",
    "30°C – 5 €",
    "SEÑOR — ¡OLÉ!",
    "ÂGE",
    # fmt: skip
    "Đorđe Ž. Š.",
    "ĞÜŞİ ÖÇ",
    "привет, как дела?",
    "سگ و گربه",
    "عکس طغرا",
    "XÃ HỘI CHỦ NGHĨA",
    "日本語です。",
]
DAMAGED = [
    ("en", "it\ufffds"), ("en", "itâ€™s"), ("fr", "cafÃ© au lait"), ("de", "fÃ¼r"),
    ("ru", "Ð¿Ñ€Ð¸Ð²ÐµÑ‚ Ð¼Ð¸Ñ€"), ("ru", "РїСЂРёРІРµС‚"),
    ("fa", "Ø³Ù„Ø§Ù… Ø¯Ù†ÛŒØ§"), ("fa", "ط³ظ„ط§ظ…"), ("en", "5 â‚¬ each"), ("tr", "Ä°stanbul"),
    ("cs", "ÄŒeskÃ½"), ("en", "a \ud83d b"),
    ("en", "itâ\x80\x99s"), ("fr", "voilÃ\xa0 tout"), ("fr", "voilÃ  tout"),
]  # fmt: skip


@pytest.mark.parametrize(("language", "text"), DAMAGED)
def test_d15_damaged_text_is_refused(language, text):
    for parity in (False, True):
        with pytest.raises(DamagedText, match="^damaged text: "):
            clean(text, language, parity=parity)


@pytest.mark.parametrize("text", WHOLE)
def test_d15_whole_text_is_not_damaged(text):
    for language in ("en", "de", "ru", "fa"):
        clean(text, language)


# -- languages -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "code"),
    [("farsi", "fa"), ("Persian", "fa"), ("فارسی", "fa"), ("english", "en"), ("Deutsch", "de"),
        ("español", "es"), ("germn", "de"),
     ("Chinese (Mandarin)", "zh"), ("norwegian", "no")],
)  # fmt: skip
def test_a_language_by_name_is_answered_with_its_code(name, code):
    with pytest.raises(UnknownLanguage, match=f"did you mean {code}[?]"):
        normalize_language(name)
    tokenizer = Tokenizer.train([("a", "en")], 50, ["en"])
    with pytest.raises(LanguageNotInVocabulary, match=f"did you mean {code}[?]"):
        tokenizer.require_language(name)


def test_other_spellings_of_a_code_are_taken():
    assert [normalize_language(code) for code in ("de-DE", "per", "zh-Hant", "en_US.UTF-8")] == [
        "de",
        "fa",
        "zh",
        "en",
    ]
    with pytest.raises(UnknownLanguage, match="'klingon' is not known; have: ar, "):
        normalize_language("klingon")


def test_letters_of_a_foreign_script_are_counted():
    assert foreign_script("hello мир", "en") == {"Cyrillic": 3}
    assert foreign_script("сlever", "en") == {"Cyrillic": 1}  # the first letter only looks like a c
    assert foreign_script("سلام Windows 10", "fa") == {"Latin": 7}
    assert foreign_script("rune ᚠ, naïve œuf, 5µ ª", "fr") == {"Runic": 1}
    assert foreign_script("カタカナと漢字", "ja") == {}


# -- whatever comes ------------------------------------------------------------------------------

PIECES = [
    "abc xyz ÄÖÜß éàç", "привет ёЁ", "سلام یک پژ", "こんにちはカタカナ漢字", "안녕하세요",
    "你好世界", "नमस्ते", "Ωμέγα", "שלום", "ไทย",
    "0123456789", "٠١٢٣۴۵۶۷۸۹", "१२३４５６", "$€£¥₹₽₺₿¢﷼", "..,,::;;//--−%°#&@'\"“”‘’«»…()[]",
    "½¾⅓²³①Ⅷ",
    "\u200b\u200c\u200d\u200e\ufeff\u00ad\u0640\u3164\x00\x1b\x07", "😀🇮🇷",
    "k M bn Mio. km kg m² °C USD SGD Rs. zł руб. million",
    " \t\n\u00a0\u2009\u202f", "İIıi", "st. Dr. co. ing. p. b.", "e\u0301a\u0308", "\u0600\u06dd",
]  # fmt: skip


def _anything(rng):
    parts = []
    for _ in range(rng.randint(1, 12)):
        piece = rng.choice(PIECES)
        if rng.random() < 0.3:
            parts.append(rng.choice(piece.split(" ")))
        elif rng.random() < 0.3:
            end = rng.choice(("", ".5", ",50", "/3", ":30", " km", "k", "%", ".", "th", "-й"))
            parts.append(
                rng.choice(("", "$", "-", "€ "))
                + str(rng.randrange(10 ** rng.randint(1, 17)))
                + end
            )
        else:
            parts.append("".join(rng.choice(piece) for _ in range(rng.randint(1, 6))))
        parts.append(" " * (rng.random() < 0.5))
    return "".join(parts)


def test_any_text_in_any_language_is_cleaned_or_refused():
    rng = random.Random(15)
    languages, cleaned = (*rules.LANGUAGES, *rules.GENERIC_LANGUAGES), 0
    for _ in range(700):
        text, language = _anything(rng), rng.choice(languages)
        try:
            found = clean(text, language)
        except (TextError, LanguageUnavailable):
            continue
        cleaned += 1
        assert unicodedata.normalize("NFC", found) == found, (language, text)
        assert not {unicodedata.category(c) for c in found} & {"Cc", "Cf", "Co", "Cs"}, (
            language,
            text,
        )
        assert found == " ".join(found.split()), (language, text)
        if language not in ("zh", "ja", "ko"):  # romanised: pinyin's tones are digits
            assert not any(c.isdecimal() for c in found), (language, text)
            assert clean(found, language) == found, (language, text)
    assert cleaned > 300


def test_a_number_that_num2words_cannot_end_is_refused():
    with pytest.raises(TextError, match="^digits left, no speller for hu"):
        clean("01234567892014132715665665,50", "hu", parity=True)


def test_any_text_under_parity_is_cleaned_or_refused():
    rng = random.Random(16)
    for _ in range(200):
        try:
            clean(_anything(rng), rng.choice(rules.XTTS_LANGUAGES), parity=True)
        except (TextError, LanguageUnavailable):
            continue
