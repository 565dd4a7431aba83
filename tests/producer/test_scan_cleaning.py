"""The scan on texts: damage and unnamed currencies refused, foreign letters and silent characters
counted, what cleaning changes.
"""

import io
import json

import pytest
from rich.console import Console

from common.system.errors import BadInput
from producer.corpus.rows import read_rows
from producer.creation.prepare import make_vocabulary
from tests.support import scan_cases
from tests.support.corpora import make_corpus, write_metadata

tokenizer, scanned = scan_cases.tokenizer, scan_cases.scanned


def _corpus(tmp_path, texts):
    root = make_corpus(tmp_path / "c", len(texts))
    write_metadata(root, [f"c{i + 1:04d}|{text}" for i, text in enumerate(texts)])
    return root


def test_d15_damaged_texts_are_rejected_with_the_line(tmp_path, scanned):
    root = _corpus(tmp_path, ["good", "it\ufffds bad", "itâ€™s bad", "cafÃ© bad", "still good"])
    s = scanned(root)
    assert s.counts == (2, 3)
    assert [(r.line, r.kind) for r in s.rejects] == [
        (2, "damaged text"),
        (3, "damaged text"),
        (4, "damaged text"),
    ]
    assert s.reasons["c0002"] == "damaged text: U+FFFD at character 3, where a letter was lost"
    assert (
        s.reasons["c0004"]
        == "damaged text: UTF-8 that was read in another encoding; perhaps it was 'café bad'"
    )


def test_d15_damaged_texts_give_a_learnt_vocabulary_nothing(tmp_path):
    settings = scan_cases.settings(
        _corpus(tmp_path, ["good", "it\ufffds bad", "itâ€™s bad", "🇮🇷 \u3164 good"])
    )
    learnt = make_vocabulary(settings, read_rows(settings), None, lambda text: None)
    assert not {learnt.token(i) for i in range(learnt.vocab_size)} & set("\ufffdâ€™🇮🇷\u3164xtb")


def test_t2_a_currency_without_words_rejects_the_row(tmp_path, scanned):
    s = scanned(_corpus(tmp_path, ["five dollars", "only ₿5", "it cost $5", "¤ each"]))
    assert [(r.line, r.kind) for r in s.rejects] == [
        (2, "text cannot be read out"),
        (4, "text cannot be read out"),
    ]
    assert s.reasons["c0002"] == "no word in en for the currency ₿"
    assert (
        s.utterances[1].tokens.tolist()
        == s.utterances[0].tokens.tolist()[:1] + s.utterances[1].tokens.tolist()[1:]
    )


def test_t7_rows_with_emoji_are_kept_and_said(tmp_path, scanned):
    s = scanned(
        _corpus(
            tmp_path, ["hi there", "hi 👍🏽 there", "👨‍👩‍👧 hi there\0", "hi\u200b th\u00adere"]
        )
    )
    assert s.counts == (4, 0)
    assert len({tuple(u.tokens.tolist()) for u in s.utterances}) == 1
    said = [w for w in s.report.warnings if "without a sound" in w]
    assert len(said) == 1
    assert said[0].startswith(
        "2 texts hold characters without a sound, which are left out: U+0000 x1, "
    )
    assert "U+1F44D x1" in said[0]
    assert "200B" not in said[0]  # invisible marks are everywhere
    assert "metadata.csv:2)" in said[0]


def test_t8_texts_of_fillers_alone_are_rejected(tmp_path, scanned):
    s = scanned(_corpus(tmp_path, ["\u3164", "ـ", "\u115f \u1160", "😀", "words"]))
    assert s.counts == (1, 4)
    assert {r.kind for r in s.rejects} == {"empty text"}


def test_stop_typed_in_a_text_is_text(tmp_path):
    settings = scan_cases.settings(_corpus(tmp_path, ["say [STOP] now", "[START] and [en]"]))
    learnt = make_vocabulary(settings, read_rows(settings), None, lambda text: None)
    for text in ("say [STOP] now", "[START] and [en]"):
        assert not {learnt.stop, learnt.start, learnt.unk} & set(learnt.encode(text, "en"))
        assert learnt.encode(text, "en").count(learnt.encode("", "en")[0]) == 1


def test_letters_of_another_script_are_counted_by_language(tmp_path, scanned):
    root = make_corpus(tmp_path / "c", 5)
    rows = [
        "c0001|سلام abc|fa",
        "c0002|سلام|fa",
        "c0003|سلام abcd|fa",
        "c0004|hello|en",
        "c0005|سلام|ar",
    ]
    write_metadata(root, ["audio_file|text|language", *rows])
    s = scanned(root)
    assert s.counts == (5, 0)
    said = [w for w in s.report.warnings if "hold letters" in w]
    assert said == [
        "2 texts in fa hold letters of another script: Latin x7 (first at"
        f" {root / 'metadata.csv'}:2)"
    ]


def test_the_report_shows_what_cleaning_changes(tmp_path, scanned):
    texts = [f"It cost ${i} and “more”" if i % 2 else "Nothing to change" for i in range(60)]
    s = scanned(_corpus(tmp_path, texts), max_text_tokens=300)
    found = s.report.to_json()["cleaning"]
    assert (found["en"]["texts"], found["en"]["changed"], len(found["en"]["examples"])) == (
        60,
        30,
        20,
    )
    assert ["It cost $1 and “more”", "it cost one dollar and more"] in scanned(
        _corpus(tmp_path, texts[:9])
    ).report.cleaning["en"]["examples"]
    assert all(before in texts and "dollar" in after for before, after in found["en"]["examples"])
    assert json.loads(json.dumps(found)) == found
    line = (
        "cleaning changed more than case and spaces in: en 30 of 60 (scan --texts shows examples)"
    )
    assert line in s.report.lines()
    out = io.StringIO()
    s.report.print(Console(file=out), texts=True)
    assert out.getvalue().count("→ it cost") == 20
    out = io.StringIO()
    s.report.print(Console(file=out))
    assert "→" not in out.getvalue()


def test_examples_obey_no_terminal(tmp_path, scanned):
    s = scanned(_corpus(tmp_path, ["red \x1b[31malert\x07", "plain"]))
    assert s.report.cleaning["en"]["examples"] == [["red \x1b[31malert\x07", "red alert"]]
    assert s.report.cleaning_lines() == ["en  red <U+001B>[31malert<U+0007>", "  → red alert"]


def test_a_language_by_name_is_answered_with_its_code(tmp_path, scanned):
    root = _corpus(tmp_path, ["سلام"])
    for name, code in (("farsi", "fa"), ("english", "en"), ("Deutsch", "de")):
        with pytest.raises(
            BadInput,
            match=rf"unknown language '{name}' \(did you mean {code}\?\) in 1 row, at",
        ):
            scanned(root, language=name)
    scanned(root, language="per")
    write_metadata(root, ["audio_file|language|text", "c0001.wav|fa|سلام"])
    with pytest.raises(BadInput, match="data.language=farsi: no language .*did you mean fa?"):
        scanned(root, language="farsi")
