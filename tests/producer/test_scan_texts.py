"""The scan looks at texts: languages, characters, scripts; field cases C16 to C22."""

import pytest

from common.system.errors import BadInput
from producer.corpus.rows import read_rows
from tests.support import scan_cases
from tests.support.corpora import make_corpus, sentence, write_metadata
from tests.support.scan_cases import settings

tokenizer, scanned = scan_cases.tokenizer, scan_cases.scanned


def test_c16_languages(tmp_path, scanned):
    root = make_corpus(tmp_path / "c", 5)
    codes = ["fa", "en", "EN-us", "fa-IR", ""]
    write_metadata(
        root,
        [
            "audio_file|text|language",
            *(
                f"c{i + 1:04d}|{'سلام' if c[:2] == 'fa' else 'hello'}|{c}"
                for i, c in enumerate(codes)
            ),
        ],
    )
    s = scanned(root)
    assert [u.language for u in s.utterances] == ["fa", "en", "en", "fa", "en"]
    assert s.utterances[0].tokens.tolist() == s.utterances[3].tokens.tolist()


def test_c16_one_message_for_a_language_that_cannot_be_had(tmp_path, scanned):
    root = make_corpus(tmp_path / "c", 5)
    write_metadata(
        root,
        [
            "audio_file|text|language",
            *(f"c{i + 1:04d}|hello|{c}" for i, c in enumerate(["en", "xx", "xx", "qq", "en"])),
        ],
    )
    with pytest.raises(
        BadInput,
        match=r"unknown language 'xx' in 2 rows, first at \S+metadata.csv:3; 'qq' in 1 row, at",
    ) as e:
        scanned(root)
    assert str(e.value).count("\n") == 0
    write_metadata(root, ["audio_file|text|language", "c0001|hello|en", "c0002|bonjour|fr"])
    with pytest.raises(
        BadInput,
        match=r"language fr not in vocabulary; have: ar, en, fa \(first at \S+metadata.csv:3; set",
    ):
        scanned(root)


def test_c16_a_missing_package_is_named_once(tmp_path, scanned):
    pytest.importorskip("tokenizers")
    try:
        import cutlet  # noqa: F401

        pytest.skip("the Japanese package is installed")
    except ImportError:
        pass
    root = make_corpus(tmp_path / "c", 3)
    with pytest.raises(BadInput, match="language ja needs the package cutlet: pip install cutlet"):
        scanned({"path": str(root), "language": "ja"})


def test_c19_unknown_characters(tmp_path, scanned):
    root = make_corpus(tmp_path / "c", 6)
    texts = [
        "rune ᚠ here",
        "thai กข",
        "“smart” quotes — and… so",
        "say [STOP] now",
        "plain",
        "rune ᚠ ᚠ",
    ]
    write_metadata(root, [f"c{i + 1:04d}|{t}" for i, t in enumerate(texts)])
    s = scanned(root)
    assert "U+16A0 x1" in s.reasons["c0001"]
    assert "U+0E01 x1, U+0E02 x1" in s.reasons["c0002"]
    kept = {u.name: u for u in s.utterances}
    assert 0 not in {t for u in s.utterances for t in u.tokens}
    assert "c0003" in kept
    assert "c0005" in kept
    assert s.report.unknown_characters["ᚠ"] == 3
    assert any("U+16A0 RUNIC LETTER FEHU FEOH FE F x3" in line for line in s.report.lines())


def test_texts_without_words_are_rejected(tmp_path, scanned):
    root = make_corpus(tmp_path / "c", 4)
    write_metadata(root, ["c0001|", "c0002|...", "c0003|fine", "c0004|fine too"])
    s = scanned(root)
    assert s.counts == (2, 2)
    assert s.reasons["c0001"] == "empty text"


def test_c22_languages_are_counted_and_other_scripts_warned_about(tmp_path, scanned):
    root = make_corpus(tmp_path / "c", 4)
    rows = [
        "wavs/c0001.wav|en|ann|hello",
        "wavs/c0002.wav|fa|ali|سلام hello world",
        "wavs/c0003.wav|ar|ali|سلام",
        "wavs/c0004.wav||ann|hello there",
    ]
    write_metadata(root, ["audio_file|language|speaker_name|text", *rows])
    s = scanned(root)
    assert s.counts == (4, 0)
    assert [(u.language, u.speaker) for u in s.utterances] == [
        ("en", "ann"),
        ("fa", "ali"),
        ("ar", "ali"),
        ("en", "ann"),
    ]
    lines = s.report.lines()
    assert "languages: en=2 fa=1 ar=1 (1 by default: en)" in lines
    assert "Arabic diacritics: kept (text.strip_arabic_diacritics)" in lines
    assert any(
        "1 text has more than 30 % letters of another script" in w and "metadata.csv:3" in w
        for w in s.report.warnings
    )
    write_metadata(root, rows)
    s = scanned(root)  # without a header, by what the columns hold
    assert [(u.language, u.speaker) for u in s.utterances] == [
        ("en", "ann"),
        ("fa", "ali"),
        ("ar", "ali"),
        ("en", "ann"),
    ]


def test_c22_defaults_of_a_source(tmp_path, scanned):
    a, b = make_corpus(tmp_path / "a", 2, text="سلام"), make_corpus(tmp_path / "b", 2)
    s = scanned({"path": str(a), "language": "fa", "speaker": "ali"}, b)
    assert [(u.language, u.speaker) for u in s.utterances] == [("fa", "ali")] * 2 + [
        ("en", "b")
    ] * 2
    assert s.report.num_default_language == 2
    assert "languages: fa=2 en=2 (2 by default: en)" in s.report.lines()
    (b / "wavs/c0002.wav").write_bytes(b"")
    s = scanned({"path": str(a), "language": "fa", "speaker": "ali"}, b)
    assert "languages: fa=2 en=1 (1 by default: en)" in s.report.lines()  # no more than were kept


def test_c49_character_limits_only_warn(tmp_path, scanned):
    s = scanned(
        make_corpus(tmp_path / "c", 3, seconds=10, text=lambda i: "ab " * (90 if i == 1 else 3)),
        max_text_tokens=400,
    )
    assert s.counts == (3, 0)
    assert any(
        "1 text is longer than XTTS's limit" in w and "269 characters, en: 250" in w
        for w in s.report.warnings
    )


def test_texts_for_a_vocabulary_come_before_the_audio(tmp_path):
    root = make_corpus(tmp_path / "c", 2)
    rows = read_rows(settings(root))
    assert list(rows.pairs()) == [(sentence(0), "en"), (sentence(1), "en")]
    assert rows.languages == ["en"]
