"""Cutting long texts: at sentences, never inside a quotation's clause or after an enumerator, no
tiny piece; and nothing lost.
"""

import re
import unicodedata

import numpy as np
import pytest

from common.xtts.text.clean import char_limit
from common.xtts.text.split import pieces, split_text
from common.xtts.text.tokenizer import Tokenizer

DIALOGUE = (
    "»Ja,« sagte er, »ich komme. Wir gehen dann zusammen zum Fluss.« Dann stand er auf und nahm"
    " den Mantel. »Nein!« rief sie. »Bleib noch, bitte, bis der Regen aufhört.« Er blieb."
)
LONG = "word " * 48 + "word."  # 245 characters, no comma


def cut(text: str, language: str, limit: int) -> list[str]:
    return [part.text for part in split_text(text, language, limit)]


@pytest.mark.parametrize(
    ("text", "language", "limit", "expected"),
    [
        ("One. Two!", "en", 100, ["One. Two!"]),
        ("One two. Three four? Five six.", "en", 22, ["One two. Three four?", "Five six."]),
        ("He met Dr. Smith. They left.", "en", 18, ["He met Dr. Smith.", "They left."]),
        (
            "J. R. R. Tolkien wrote it. It is long.",
            "en",
            26,
            ["J. R. R. Tolkien wrote it.", "It is long."],
        ),
        ("Gut. Das kostet 5 Mio. Euro.", "de", 23, ["Gut.", "Das kostet 5 Mio. Euro."]),
        ("She said “go.” He went.", "en", 15, ["She said “go.”", "He went."]),
        ("version 2.5 is here now", "en", 15, ["version 2.5", "is here now"]),
        ("red, green, blue; white", "en", 12, ["red, green,", "blue; white"]),
        ("alpha beta gamma", "en", 6, ["alpha", "beta", "gamma"]),
        ("abcdefghij", "en", 4, ["abcd", "efg", "hij"]),
        ("سلام دنیا؟ خوبم. ممنون", "fa", 16, ["سلام دنیا؟", "خوبم. ممنون"]),
        ("你好。再见！", "zh", 3, ["你好。", "再见！"]),
        ("「你好。」他说。再见！", "zh", 9, ["「你好。」他说。", "再见！"]),
        ("   ", "en", 10, []),
    ],
)
def test_texts_are_cut_where_a_speaker_would(text, language, limit, expected):
    assert cut(text, language, limit) == expected


def test_v3_a_dialogue_is_cut_after_its_sentences():
    assert cut(DIALOGUE, "de", 120) == [
        "»Ja,« sagte er, »ich komme. Wir gehen dann zusammen zum Fluss.« Dann stand er auf und nahm"
        " den Mantel.",
        "»Nein!« rief sie. »Bleib noch, bitte, bis der Regen aufhört.« Er blieb.",
    ]


QUOTED = {
    "de": ("»Ja, gut,« sagte er leise. ", "»Komm mit!« rief sie laut. "),
    "de2": ("„Ja, gut“, sagte er leise. ", "„Komm mit!“ rief sie laut. "),
    "en": ("“Yes, sure,” he said softly. ", "“Come along!” she called loudly. "),
    "en2": ('"Yes, sure," he said softly. ', '"Where to?" she asked loudly. '),
    "fr": ("« Oui, bien, » dit-il tout bas. ", "« Où ça ? » demanda-t-elle enfin. "),
    "fa": ("«بله، حتماً،» آهسته گفت. ", "«کجا؟» بلند پرسید. "),
}


@pytest.mark.parametrize("kind", QUOTED)
@pytest.mark.parametrize("limit", [60, 90, 250])
def test_v3_no_cut_inside_a_quotations_clause(kind, limit):
    """Every piece ends where a sentence does, whatever marks the language quotes with."""
    sentences = QUOTED[kind]
    text = "".join(sentences[i % 2] for i in range(40))
    whole = [s.strip() for s in sentences]
    for part in split_text(text, kind[:2], limit):
        assert part.ends_sentence
        left = part.text
        while left:
            left = next(left.removeprefix(s) for s in whole if left.startswith(s)).strip()


def test_v3_a_quotation_of_one_sentence_stays_whole_where_it_fits():
    text = (
        "Er zögerte lange. »Wenn du kommst, wenn du wirklich kommst, dann freue ich mich.« Stille."
    )
    for limit in (70, 80, 90):
        (quoted,) = [p for p in cut(text, "de", limit) if "»" in p]
        assert "«" in quoted


@pytest.mark.parametrize("tail", ["OK. Yes.", "OK.", "Go on now."])
def test_v4_a_tiny_last_sentence_is_joined(tail):
    assert cut(f"{LONG} {tail}", "en", 250) == [f"{LONG} {tail}"]
    assert cut(f"{LONG} {LONG} {tail}", "en", 250) == [LONG, f"{LONG} {tail}"]


def test_v4_a_tiny_sentence_at_the_beginning_or_between():
    assert cut(f"Hi. {LONG}", "en", 246) == [f"Hi. {LONG}"]
    assert cut(f"{LONG} Oh. {LONG}", "en", 250) in (
        [f"{LONG} Oh.", LONG],
        [LONG, f"Oh. {LONG}"],
    )


def test_v4_a_long_sentence_is_cut_into_like_halves():
    text = "This is a clause of some length, " * 9 + "and this is its end."
    first, second = cut(text, "en", 250)
    assert abs(len(first) - len(second)) < 40
    assert first.endswith(",")


LISTS = [
    "\n".join(f"{i}. The item of number {i} is a thing to buy" for i in range(1, 30)),
    "\n".join(f"{i}) The item of number {i} is a thing to buy" for i in range(1, 30)),
    " ".join(f"{i}. The item of number {i} is a thing to buy" for i in range(1, 30)),
    "\n".join(f"({c}) The item of this letter is a thing to buy" for c in "abcdefgh"),
    "\n".join(f"{n}. The item of this number is a thing" for n in ("I", "II", "III", "IV", "V")),
    "\n".join("- The item of this bullet is a thing to buy" for _ in range(20)),
    "\n".join(f"{i}. گزینهٔ این شماره چیزی برای خریدن است" for i in "۱۲۳۴۵۶۷۸۹"),
]
_ENUMERATOR = re.compile(r"\(?(\w{1,3})[.)]|-")


@pytest.mark.parametrize("text", LISTS)
@pytest.mark.parametrize("limit", [45, 60, 250])
def test_v4_an_enumerator_stays_with_its_item(text, limit):
    parts = cut(text, "en", limit)
    for part in parts:
        assert not _ENUMERATOR.fullmatch(part.split()[-1]), part
    if limit == 60:  # a whole item fits
        assert all(_ENUMERATOR.fullmatch(part.split()[0]) for part in parts)


def test_v4_an_ordinal_stays_with_its_noun():
    text = "Am 3. Mai kommt er, am 12. Juni geht er. " * 12
    for limit in (30, 45, 100):
        assert all(not re.search(r"\d\.$", p) for p in cut(text, "de", limit))
    assert cut("He was born in 1912. Then he left.", "en", 21) == [
        "He was born in 1912.",
        "Then he left.",
    ]


def test_a_break_of_paragraphs_ends_a_sentence():
    text = "A title without a dot\n\nThe first sentence begins the first paragraph of this book."
    first, second = split_text(text, "en", 70)
    assert (first.text, first.ends_sentence) == ("A title without a dot", True)
    assert second.text.startswith("The first sentence")


def test_letters_keep_their_marks():
    """No cut before a combining mark or beside a joiner, where a word is longer than a piece."""
    word = "का" * 30 + "می\u200cخواهم" * 5
    parts = cut(word, "hi", 7)
    assert "".join(parts) == word
    assert all(unicodedata.category(p[0])[0] != "M" for p in parts)
    assert all("\u200c" not in (p[0], p[-1]) for p in parts)


def test_cutting_loses_nothing_and_keeps_the_limit():
    """A tenth more at most, and that only where a tiny sentence would be left over."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        text = "".join(rng.choice(list("abc .,!? 。"), 120))
        limit = int(rng.integers(1, 40))
        parts = cut(text, "en", limit)
        assert "".join("".join(parts).split()) == "".join(text.split())
        assert all(0 < len(p) <= limit + limit // 10 for p in parts)
    for _ in range(50):
        text = " ".join("".join(rng.choice(list("abc"), 6)) for _ in range(60)) + "."
        assert all(len(p) <= 40 for p in cut(text, "en", 40))  # no sentence to join


def test_a_book_is_cut_in_pieces_of_like_length():
    limit = char_limit("de")
    parts = cut((DIALOGUE + " ") * 300, "de", limit)
    assert len(parts) <= 300 * len(DIALOGUE) / (0.6 * limit)
    assert min(map(len, parts)) > limit // 3
    assert all(part[-1] in ".«" for part in parts)


def test_one_part_with_too_many_tokens_is_cut_alone():
    """It is cut smaller; the other parts stay as they are."""
    tokenizer = Tokenizer.train([("the small red house by the river. it is old", "en")], 60, ["en"])
    text = "the small red house. " * 20 + "zqx " * 50
    most = 190
    found = pieces(tokenizer, text, "en", most)
    assert all(len(p.ids) <= most for p in found)
    assert max(len(p.text) for p in found) > 200
    assert "".join("".join(p.text for p in found).split()) == "".join(text.split())


def test_a_part_without_words_is_left_out():
    tokenizer = Tokenizer.train([("the small red house by the river", "en")], 48, ["en"])
    text = "the house. " * 24 + "\n\n" + "* * * " * 60 + "\n\n" + "the river. " * 24
    found = pieces(tokenizer, text, "en", 400)
    assert all("the" in p.text for p in found)
    assert [p.chars for p in found] == [len(tokenizer.clean(p.text, "en")) for p in found]
