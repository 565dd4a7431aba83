"""The scan on synthetic folders with known answers: faults that people report in public threads,
numbered c01 to c50.
"""

import io
import json
import os

import numpy as np
import pytest
import soundfile
from rich.console import Console

from common.data.manifest import EVAL, Manifest
from common.system.errors import BadInput
from producer.corpus import headers as probe_module
from producer.corpus.report import reject_line
from producer.corpus.scan import choose_eval, scan
from tests.support import scan_cases
from tests.support.corpora import make_corpus, sentence, sine, write_metadata, write_wav
from tests.support.scan_cases import Scanned, settings

tokenizer, scanned = scan_cases.tokenizer, scan_cases.scanned


def test_good_clips_are_kept_in_the_order_of_the_metadata(tmp_path, scanned):
    s = scanned(make_corpus(tmp_path / "c", 5))
    assert s.counts == (5, 0)
    assert [
        (u.id, u.name, u.num_samples, u.source_rate, u.language, u.speaker) for u in s.utterances
    ] == [(i, f"c{i + 1:04d}", 44100, 22050, "en", "c") for i in range(5)]
    assert s.utterances[2].text == s.utterances[2].clean == sentence(2)
    assert all(
        len(u.tokens) == u.tokens.size == n
        for u, n in zip(s.utterances, s.columns["num_tokens"], strict=True)
    )
    assert s.report.headline().startswith("kept=5 rejected=0 train=4 eval=1")


def test_c01_byte_order_mark(tmp_path, scanned):
    path = make_corpus(tmp_path / "c", 5) / "metadata.csv"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    s = scanned(tmp_path / "c")
    assert s.counts == (5, 0)
    assert s.utterances[0].name == "c0001"


def test_c02_columns(tmp_path, scanned):
    root = make_corpus(tmp_path / "c", 6)
    write_metadata(root, [f"c{i:04d}|{sentence(i)}" for i in range(1, 7)])
    assert scanned(root).counts == (6, 0)
    write_metadata(root, [f"c{i:04d}|{sentence(i)}" if i != 4 else "c0004" for i in range(1, 7)])
    s = scanned(root)
    assert s.counts == (5, 1)
    assert (
        "metadata.csv:4: expected 2 or 3 fields, got 1 (fields are separated by '|', as in id|text)"
        in "\n".join(s.report.lines())
    )
    write_metadata(root, [f"c{i:04d}|{sentence(i)}|3.21" for i in range(1, 7)])
    s = scanned(root)
    assert [u.text for u in s.utterances] == [sentence(i) for i in range(1, 7)]
    assert any("column 3 looks numeric in 6 of 6 rows" in line for line in s.report.lines())


def test_c04_quotes_and_c05_line_ends(tmp_path, scanned):
    root = make_corpus(tmp_path / "c", 4)
    write_metadata(
        root,
        [
            'c0001|"Stop, he said|"stop he said',
            "",
            "c0002|b|bee",
            'c0003|d" e|d" e',
            "c0004|x|end",
            "",
            "",
        ],
        end="\r\n",
    )
    path = root / "metadata.csv"
    path.write_bytes(path.read_bytes().rstrip(b"\r\n"))
    s = scanned(root)
    assert s.counts == (4, 0)
    assert [u.text for u in s.utterances] == ['"stop he said', "bee", 'd" e', "end"]


def test_c07_paths_from_another_directory(tmp_path, scanned, monkeypatch):
    root = make_corpus(tmp_path / "c", 5, prefix="LJ")
    os.rename(root / "wavs/LJ0004.wav", tmp_path / "LJ4.wav")
    soundfile.write(root / "wavs/LJ0005.flac", sine(44100), 22050)
    os.remove(root / "wavs/LJ0005.wav")
    write_metadata(
        root,
        [
            f"{i}|x|one two"
            for i in (
                "LJ0001",
                "LJ0002.wav",
                "wavs/LJ0003.wav",
                tmp_path / "LJ4.wav",
                "LJ0005",
                "nope",
            )
        ],
    )
    monkeypatch.chdir("/")
    s = scanned(root)
    assert s.counts == (5, 1)
    assert [str(u.path) for u in s.utterances[3:]] == [
        f"{tmp_path}/LJ4.wav",
        f"{root}/wavs/LJ0005.flac",
    ]
    tried = [
        f"{root}/{f}/nope{x}".replace("//", "/")
        for f in ("wavs", "")
        for x in (".wav", ".flac", ".mp3")
    ]
    assert all(path in s.reasons["nope"] for path in tried)
    s.result.write_rejects(tmp_path / "rejects.tsv")
    for complete in ((tmp_path / "rejects.tsv").read_text(), json.dumps(s.report.to_json())):
        assert all(path in complete for path in tried)
    printed = (
        f"{root}/metadata.csv:6: no such audio file; tried {root}/wavs/nope.wav (and 24 other"
        " places) (id nope)"
    )
    assert printed in s.report.lines()
    out = io.StringIO()
    s.report.print(Console(file=out, force_terminal=True, no_color=True, width=2000))
    assert printed in [line.rstrip() for line in out.getvalue().splitlines()]


def test_c07_a_relative_source_is_the_same_corpus(tmp_path, scanned, monkeypatch):
    make_corpus(tmp_path / "c", 3)
    a = scanned(tmp_path / "c")
    monkeypatch.chdir(tmp_path)
    b = scanned("c")
    assert (a.digest, a.utterances[0].path) == (b.digest, b.utterances[0].path)


def test_c07_more_than_half_missing_is_bad_input(tmp_path, scanned):
    root = make_corpus(tmp_path / "c", 10)
    for i in range(1, 7):
        os.remove(root / f"wavs/c{i:04d}.wav")
    with pytest.raises(
        BadInput,
        match=r"6 of 10 audio files are missing(?s:.*)metadata.csv:1: no such audio file; tried /",
    ) as e:
        scanned(root)
    lines = str(e.value).splitlines()
    assert (
        f"{root}/clips/c0001.opus" in lines[1]
    )  # nothing is left to look into, so one row is there with all that was tried
    assert lines[2].endswith(
        f"metadata.csv:2: no such audio file; tried {root}/wavs/c0002.wav (and 24 other places) (id"
        " c0002)"
    )
    assert len(lines) == 7
    assert not (tmp_path / "run.manifest").exists()


def test_c08_equal_names_in_two_corpora_and_repeats_in_one(tmp_path, scanned):
    for name, freq in (("a", 440), ("b", 880)):
        write_wav(tmp_path / name / "wavs/0001.wav", sine(44100, freq))
        write_metadata(tmp_path / name, ["0001|x|one", "0001|x|two"])
    s = scanned(tmp_path / "a", tmp_path / "b")
    assert s.counts == (2, 2)
    assert [u.path for u in s.utterances] == [
        tmp_path / "a/wavs/0001.wav",
        tmp_path / "b/wavs/0001.wav",
    ]
    assert [u.speaker for u in s.utterances] == ["a", "b"]
    assert [(r.line, r.reason) for r in s.rejects] == [(2, "duplicate id (first at line 1)")] * 2


def test_c08_a_replaced_file_is_read_again(tmp_path, tokenizer):
    root = make_corpus(tmp_path / "c", 3)
    first = Scanned(tmp_path, tokenizer, root)
    write_wav(root / "wavs/c0002.wav", sine(30000))
    with Manifest.open(tmp_path / "run.manifest") as previous:
        second = Scanned(tmp_path, tokenizer, root, options={"previous": previous})
    assert [u.num_samples for u in first.utterances] == [44100, 44100, 44100]
    assert [u.num_samples for u in second.utterances] == [44100, 30000, 44100]
    assert first.digest != second.digest


def test_unchanged_files_are_not_opened_again(tmp_path, tokenizer, monkeypatch):
    root = make_corpus(tmp_path / "c", 6)
    (root / "wavs/c0003.wav").write_bytes(b"")
    first = Scanned(tmp_path, tokenizer, root)
    opened = []
    monkeypatch.setattr(probe_module, "_examine", lambda path, *a: opened.append(path))
    with Manifest.open(tmp_path / "run.manifest") as previous:
        second = Scanned(tmp_path, tokenizer, root, options={"previous": previous})
    assert opened == []
    assert (first.digest, first.rejects) == (second.digest, second.rejects)


def test_a_deep_scan_looks_again_at_what_a_shallow_one_saw(tmp_path, tokenizer):
    root = make_corpus(tmp_path / "c", 4)
    x = sine(44100)
    x[5] = np.nan
    write_wav(root / "wavs/c0001.wav", x, subtype="FLOAT")
    assert Scanned(tmp_path, tokenizer, root, options={"deep": False}).counts == (4, 0)
    with Manifest.open(tmp_path / "run.manifest") as previous:
        assert Scanned(tmp_path, tokenizer, root, options={"previous": previous}).counts == (3, 1)


def test_folders_of_the_same_name_are_two_speakers(tmp_path, scanned):
    a, b = make_corpus(tmp_path / "x/data", 2), make_corpus(tmp_path / "y/data", 2)
    assert {u.speaker for u in scanned(a, b).utterances} == {"x/data", "y/data"}


def test_c49_nothing_usable_says_why(tmp_path, scanned):
    root = make_corpus(
        tmp_path / "c",
        10,
        seconds=lambda i: 2.0 if i < 7 else 12.0,
        text=lambda i: "word " * 60 if i < 7 else "short",
    )
    with pytest.raises(
        BadInput,
        match=(
            r"^0 of 10 usable: text >200 tokens 7, audio longer than 11.61 s \(data.max_audio_s\)"
            r" 3 \("
        ),
    ) as e:
        scanned(root)
    lines = str(
        e.value
    ).splitlines()  # there is no manifest to look into, so the rows are in the message
    assert len(lines) == 11
    assert lines[1].strip() == f"{root}/metadata.csv:1: 300 text tokens > 200 (id c0001)"
    assert "12.00 s > 11.61 s" in lines[8]
    assert not (tmp_path / "run.manifest").exists()


def test_c49_five_clips_split_into_four_and_one(tmp_path, scanned):
    s = scanned(make_corpus(tmp_path / "c", 5), eval_fraction=0.1)
    assert s.columns["split"].sum() == 1
    assert s.columns["split"].sum() == s.report.evaluation
    assert any("evaluation set is small (1)" in w for w in s.report.warnings)


def test_eval_split_leaves_every_speaker_an_utterance():
    speakers = [0] * 40 + [1] + [2] * 2 + [3] * 57
    chosen = choose_eval(speakers, 0.5, 256)
    left = np.delete(np.array(speakers), chosen)
    assert len(chosen) == 50 == len(set(chosen))
    assert set(left) == {0, 1, 2, 3}
    assert chosen == choose_eval(speakers, 0.5, 256) == sorted(chosen)
    assert len(choose_eval([0] * 100000, 0.01, 256)) == 256
    assert len(choose_eval([0] * 1000, 0.01, 256)) == 10
    assert len(choose_eval([0, 0], 0.01, 256)) == 1
    assert (
        choose_eval([0], 0.5, 256)
        == choose_eval([0, 1, 2], 0.5, 256)
        == choose_eval([0] * 9, 0.0, 256)
        == choose_eval([], 0.5, 9)
        == []
    )


def test_a_separate_evaluation_corpus(tmp_path, scanned):
    a, b = make_corpus(tmp_path / "a", 4), make_corpus(tmp_path / "b", 2)
    s = scanned(a, val=[{"path": str(b)}])
    assert s.columns["split"].tolist() == [0, 0, 0, 0, EVAL, EVAL]
    s = scanned(a, val=[{"path": str(a)}])
    assert any("4 clips of data.val are in data.train too" in w for w in s.report.warnings)
    (b / "wavs/c0001.wav").write_bytes(b"")
    (b / "wavs/c0002.wav").write_bytes(b"")
    with pytest.raises(BadInput, match="nothing in data.val is usable"):
        scanned(a, val=[{"path": str(b)}])


def test_strict_makes_any_reject_an_error(tmp_path, scanned):
    root = make_corpus(tmp_path / "c", 4)
    scanned(root).report.require_all()
    (root / "wavs/c0002.wav").write_bytes(b"")
    with pytest.raises(BadInput, match="^--strict: 1 of 4 rows rejected: empty file 1$"):
        scanned(root).report.require_all()


def test_no_corpus_is_bad_input(tmp_path, scanned):
    with pytest.raises(BadInput, match="no corpus given; set data.train=DIR"):
        scanned()
    write_metadata(tmp_path / "c", [])
    with pytest.raises(BadInput, match="no rows in the metadata"):
        scanned(tmp_path / "c")


def test_the_report_as_lines_json_table_and_file(tmp_path, scanned):
    root = make_corpus(tmp_path / "c", 40)
    for i in range(1, 26):
        (root / f"wavs/c{i + 10:04d}.wav").write_bytes(b"")
    s = scanned(root)
    lines = s.report.lines()
    assert lines[0].startswith("kept=15 rejected=25")
    assert sum("empty file (id" in line for line in lines) == 20
    assert lines[-1] == "… and 5 more rejected rows; RUN/rejects.tsv has all"
    assert reject_line(s.rejects[0]) == f"{root}/metadata.csv:11: empty file (id c0011)"
    assert json.loads(json.dumps(s.report.to_json()))["tally"] == {"empty file": 25}
    s.result.write_rejects(tmp_path / "rejects.tsv")
    table = (tmp_path / "rejects.tsv").read_text().splitlines()
    assert (len(table), table[0]) == (26, "file\tline\tid\tkind\treason")
    plain, terminal = io.StringIO(), io.StringIO()
    s.report.print(Console(file=plain))
    s.report.print(Console(file=terminal, force_terminal=True, width=200))
    assert plain.getvalue().splitlines() == s.report.lines(
        None
    )  # printed by `launch.py scan`, which leaves no file behind
    assert sum("empty file (id" in line for line in plain.getvalue().splitlines()) == 25
    assert "kept=15 rejected=25" in terminal.getvalue()


def test_a_terminal_hides_nothing_that_a_pipe_shows(tmp_path, scanned):
    root = make_corpus(tmp_path / "c", 4)
    rows = ["c0001|fa|[ali]|سلام", "c0002|fa|[ali]|سلام", "c0003||ann|hello", "c0004|en|ann|hello"]
    write_metadata(root, ["audio_file|language|speaker_name|text", *rows])
    out = io.StringIO()
    scanned(root).report.print(Console(file=out, force_terminal=True, no_color=True, width=60))
    shown = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    for expected in (
        "language fa 2 0.00",
        "speaker [ali] 2 0.00",
        "ann 2 0.00",
        "1 kept row names no language: en (data.language)",
    ):
        assert expected in shown
    assert "Arabic diacritics: kept (text.strip_arabic_diacritics)" in shown
    assert not any(line.startswith("speakers (") for line in shown)


def test_a_scan_prints_nothing(tmp_path, tokenizer, capsys):
    done = scan(settings(make_corpus(tmp_path / "c", 3)), tmp_path / "m", tokenizer)
    assert done.report.lines()[0].startswith("kept=3")
    assert capsys.readouterr() == ("", "")
