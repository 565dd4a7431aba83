"""The vocabulary: ids as published, texts that try to be special, learning, extending."""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import tokenizers

from common.xtts.text.bpe import learn_merges
from common.xtts.text.clean import LanguageUnavailable, TextError
from common.xtts.text.errors import LanguageNotInVocabulary
from common.xtts.text.tokenizer import Tokenizer, VocabularyError, describe_characters

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
from tests.golden.text_sentences import PERSIAN, SENTENCES  # noqa: E402

ROWS = json.loads((GOLDEN / "text.json").read_text(encoding="utf-8"))
V1 = ROOT.parent / "shared" / "data" / "xtts-vocab" / "v1.json"
needs_v1 = pytest.mark.skipif(not V1.exists(), reason="XTTS's first vocabulary is not here")
# Languages that need no package.
PLAIN = sorted(set(SENTENCES) - {"zh", "ja", "ko"})
CORPUS = [(sentence, language) for language in PLAIN for sentence in SENTENCES[language]]


@pytest.fixture(scope="module")
def learnt():
    return Tokenizer.train(CORPUS, 900, PLAIN)


@pytest.fixture(scope="module")
def v1():
    return Tokenizer.load(V1)


@needs_v1
def test_published_ids(v1):
    ids = (
        "259 147 2 1972 18 2 54 2 198 18 48 9 2 60 4 32 2 123 2 636 91 1185 142 2 53 2 115 54 33 9"
    )
    assert v1.encode("This cake is great. It's so delicious and moist.", "en") == [
        int(i) for i in ids.split()
    ]
    assert (v1.vocab_size, v1.stop, v1.unk, v1.space, v1.start) == (5413, 0, 1, 2, 261)


@needs_v1
@pytest.mark.parametrize(
    ("text", "ids"),
    [
        (
            "This cake is great. It's so delicious and moist.",
            "259 147 2 183 93 2 54 2 198 18 48 9 2 60 4 32 2 123 2 636 91 1185 142 2 53 2 842 63 9",
        ),
        ('Hello... World?!  "ok"', "259 62 84 28 2303 2 179 79 13 3 2 166"),
    ],
)
def test_published_ids_of_the_second_vocabulary_spell_what_is_read_here(v1, text, ids):
    """Its first ids are v1's; its merges, which are not here, cut the words elsewhere."""
    assert v1.decode(map(int, ids.split())) == v1.decode(v1.encode(text, "en"))


@needs_v1
def test_ids_are_coquis():
    parity = Tokenizer.load(V1, parity=True)
    compared = 0
    for row in (r for r in ROWS if "ids" in r):
        try:
            assert parity.encode(row["text"], row["language"]) == row["ids"], row["text"]
        except LanguageUnavailable:
            continue
        compared += 1
    assert compared >= 150


@needs_v1
def test_three_spellings_of_chinese_are_one_tag(v1):
    assert {v1.encode_clean("ni3hao3", code)[0] for code in ("zh", "zh-cn", "ZH-CN")} == {5023}
    assert len({tuple(v1.encode_clean("ni3hao3", code)) for code in ("zh", "zh-cn", "ZH-CN")}) == 1


def _write(path, **changes):
    model = {"type": "BPE", "vocab": {}, "merges": []}
    for token in ["[STOP]", "[UNK]", "[SPACE]", "[START]", "[en]", *"abc", "ab", "bc", "abc"]:
        model["vocab"][token] = len(model["vocab"])
    added = [{"id": i, "content": token} for token, i in list(model["vocab"].items())[:5]]
    path.write_text(json.dumps({"added_tokens": added, "model": {**model, **changes}}))
    return path


def test_last_of_repeated_merges_sets_the_rank(tmp_path):
    first = Tokenizer.load(_write(tmp_path / "a.json", merges=["a b", "b c"]))
    repeated = Tokenizer.load(_write(tmp_path / "b.json", merges=["a b", "b c", "a b"]))
    assert first.decode(first.encode("abc", "en")[1:2]) == "ab"
    assert repeated.decode(repeated.encode("abc", "en")[2:]) == "bc"


def test_what_is_wrong_with_a_vocabulary_is_said(tmp_path):
    for content, message in (
        ("{", "JSONDecodeError"),
        ('{"model": {"type": "WordPiece"}}', "WordPiece"),
        ("[]", "not a vocabulary"),
    ):
        (tmp_path / "v.json").write_text(content)
        with pytest.raises(VocabularyError, match=message) as caught:
            Tokenizer.load(tmp_path / "v.json")
        assert "v.json" in str(caught.value)
    with pytest.raises(VocabularyError, match="not in the vocabulary"):
        Tokenizer.load(_write(tmp_path / "v.json", merges=["a x"]))
    with pytest.raises(VocabularyError, match=r"lacks \[UNK\]"):
        Tokenizer({"[STOP]": 0, "[SPACE]": 1, "[START]": 2}, [], [])
    with pytest.raises(VocabularyError, match="cannot read the vocabulary .*: No such file"):
        Tokenizer.load(tmp_path / "absent.json")


@pytest.mark.parametrize(
    "special", ["[STOP]", "[SPACE]", "[START]", "[UNK]", "[en]", "[de]", "[ru]", "[zh-cn]"]
)
def test_special_tokens_in_a_text_are_just_characters(learnt, special):
    ids = learnt.encode(f"say {special} now", "en")
    inner = ids[1:]
    assert learnt.stop not in inner
    assert learnt.start not in inner
    assert inner.count(learnt.space) == 2
    assert not any(learnt.decode([i]) == special for i in inner if i != learnt.unk)


def test_unknown_characters_are_named(learnt):
    assert learnt.unknown_characters("ᚠ cat ᚠ ก", "en") == ["ᚠ", "ᚠ", "ก"]
    assert describe_characters(["ก", "ᚠ", "ᚠ"]) == "U+16A0 x2, U+0E01 x1"
    assert learnt.encode("ᚠ", "en")[1:] == [learnt.unk]
    for text, language in CORPUS:
        try:
            unknown = learnt.unknown_characters(text, language)
        except TextError:
            continue
        assert unknown == []
        assert learnt.unk not in learnt.encode(text, language)


def test_language_without_tag(learnt):
    for code in ("fa", "fa-IR", "xx"):
        with pytest.raises(
            LanguageNotInVocabulary,
            match=r"language (fa|xx) not in vocabulary; have: ar, cs, de, en",
        ):
            learnt.encode("a", code)


def test_trained_layout(learnt):
    tags = [f"[{language}]" for language in PLAIN]
    assert learnt.decode(range(4 + len(PLAIN))) == "[STOP][UNK] [START]" + "".join(tags)
    assert learnt.vocab_size == 900
    assert learnt.languages == tuple(PLAIN)
    assert learnt.decode(learnt.encode("The cat, at last!", "en")) == "[en]the cat, at last!"


def test_training_needs_room_for_the_characters():
    with pytest.raises(VocabularyError, match="vocab_size 20 is too small"):
        Tokenizer.train([("abcdefghijklm", "en")], 20, ["en"])
    with pytest.raises(VocabularyError, match="a text is in de"):
        Tokenizer.train([("ja", "de")], 200, ["en"])


def test_training_is_the_same_in_every_process(learnt, tmp_path):
    script = (
        "import sys\n"
        "from tests.golden.text_sentences import SENTENCES\n"
        "from common.xtts.text.tokenizer import Tokenizer\n"
        "plain = sorted(set(SENTENCES) - {'zh', 'ja', 'ko'})\n"
        "pairs = [(s, language) for language in reversed(plain) for s in SENTENCES[language]]\n"
        "sys.stdout.write(Tokenizer.train(pairs, 900, plain).digest)\n"
    )
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        out = subprocess.run(
            [sys.executable, "-c", script],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert out == learnt.digest


def test_saved_file_reads_back_here_and_in_the_library(learnt, tmp_path):
    learnt.save(tmp_path / "vocab.json")
    again = Tokenizer.load(tmp_path / "vocab.json")
    assert again.digest == learnt.digest
    assert again.digest != Tokenizer.load(tmp_path / "vocab.json", parity=True).digest
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "vocab.json"))
    for text, language in CORPUS[::7]:
        try:
            clean = again.clean(text, language)
        except TextError:
            continue
        spoken = f"[{language}]" + clean.replace(" ", "[SPACE]")
        assert library.encode(spoken).ids == again.encode(text, language)
    assert list(tmp_path.iterdir()) == [tmp_path / "vocab.json"]


def _check_extended(base, extended, extra):
    assert extended.vocab_size <= base.vocab_size + extra
    assert all(extended.decode([i]) == base.decode([i]) for i in base.encode("abc def", "en"))
    for language, sentences in SENTENCES.items():
        if language not in base.languages:
            continue
        for sentence in sentences:
            try:
                ids = base.encode(sentence, language)
            except (TextError, LanguageUnavailable):
                continue
            assert extended.encode(sentence, language) == ids, sentence
    for sentence in PERSIAN:
        ids = extended.encode(sentence, "fa")
        assert extended.unknown_characters(sentence, "fa") == []
        assert extended.unk not in ids
        assert ids[0] >= base.vocab_size
        assert extended.decode(ids) == "[fa]" + extended.clean(sentence, "fa")


def test_extending_keeps_old_ids_and_reads_persian(learnt, tmp_path):
    extended = learnt.extend([(s, "fa") for s in PERSIAN], ["fa"], 200)
    _check_extended(learnt, extended, 200)
    extended.save(tmp_path / "vocab.json")
    again = Tokenizer.load(tmp_path / "vocab.json")
    assert again.digest == extended.digest
    _check_extended(learnt, again, 200)
    tokenizers.Tokenizer.from_file(str(tmp_path / "vocab.json"))
    # New merges are of use to the new language, and a third language leaves both alone.
    assert sum(len(extended.encode(s, "fa")) for s in PERSIAN) < sum(
        len(learnt.encode_clean(extended.clean(s, "fa"), "ar")) for s in PERSIAN
    )
    twice = again.extend([("hej på dig, hur mår du? mår du bra?", "sv")], ["sv"], 40)
    _check_extended(learnt, twice, 240)
    assert [twice.encode(s, "fa") for s in PERSIAN] == [extended.encode(s, "fa") for s in PERSIAN]
    assert twice.unknown_characters("hur mår du?", "sv") == []


def test_extending_refuses_what_it_cannot_do(learnt):
    with pytest.raises(VocabularyError, match="already in the vocabulary: en"):
        learnt.extend([("a", "en")], ["en"], 100)
    with pytest.raises(VocabularyError, match="extra=1 is too small"):
        learnt.extend([(PERSIAN[0], "fa")], ["fa"], 1)


@needs_v1
def test_extending_the_published_vocabulary(v1):
    extended = v1.extend([(s, "fa") for s in PERSIAN], ["fa"], 300)
    _check_extended(v1, extended, 300)
    assert all(
        v1.unknown_in_clean(extended.clean(s, "fa")) != [] for s in ["گچپژ"]
    )  # letters that it lacked


def test_merges_by_count_then_by_order():
    words = {tuple("ab"): 3, tuple("cd"): 3, tuple("abab"): 1, tuple("xy"): 1}
    # ab: 3 + 2 = 5, cd: 3, ba: 1, xy: 1; then (ab, ab): 1 stays below two.
    assert learn_merges(words, 10) == [("a", "b"), ("c", "d")]
    assert learn_merges({tuple("cd"): 2, tuple("ab"): 2}, 1) == [("a", "b")]
    assert learn_merges({tuple("aaaa"): 2}, 5) == [("a", "a"), ("aa", "aa")]
    # A merge into a token that exists costs no id.
    assert learn_merges({tuple("ab"): 5, tuple("cd"): 3}, 1, frozenset({"ab"})) == [
        ("a", "b"),
        ("c", "d"),
    ]


def _merges_by_counting_anew(words, num_merges):
    merges, split = [], [(list(word), n) for word, n in words.items()]
    while len(merges) < num_merges:
        counts = Counter()
        for word, n in split:
            for pair in zip(word, word[1:], strict=False):
                counts[pair] += n
        candidates = [(-n, pair) for pair, n in counts.items() if n >= 2]
        if not candidates:
            break
        merges.append(min(candidates)[1])
        for word, _ in split:
            for i in range(len(word)):
                if tuple(word[i : i + 2]) == merges[-1]:
                    word[i : i + 2] = ["".join(merges[-1])]
    return merges


def test_merges_are_those_of_counting_anew():
    draw = random.Random(7)
    for letters in ("ab", "abc", "abcdef"):
        words = {
            tuple(draw.choices(letters, k=draw.randint(1, 9))): draw.randint(1, 5)
            for _ in range(80)
        }
        assert learn_merges(words, 40) == _merges_by_counting_anew(words, 40)
