"""The scan on synthetic folders with known answers: faults that people report in public threads, numbered c01 to c50."""

import io
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import soundfile
from corpora import make_corpus, sentence, sine, write_metadata, write_wav
from rich.console import Console

from common import config
from common.errors import BadInput
from common.manifest import EVAL, Manifest
from common.xtts.tokenizer import Tokenizer
from producer import probe as probe_module
from producer.corpus import read_rows
from producer.report import reject_line
from producer.scan import choose_eval, scan

ROOT = Path(__file__).resolve().parents[1]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
ALPHABET = [(LETTERS, "en"), ("آابپتثجچحخدذرزژسشصضطظعغفقکگلمنوهیئءأؤ", "fa"), ("ابتثجحخدذرزسشصضطظعغفقكلمنهويةىءأإ", "ar")]


@pytest.fixture(scope="module")
def tokenizer():
    """All of a to z and the Arabic letters, no merges worth mentioning: one token per character."""
    return Tokenizer.train(ALPHABET, 100, ["en", "fa", "ar"])


def settings(*train, **data):
    return config.parse({"data": {"train": [s if isinstance(s, dict) else {"path": str(s)} for s in train], **data}})


class Scanned:
    def __init__(self, tmp_path, tokenizer, *train, options=None, **data):
        path = tmp_path / "run.manifest"
        self.result = scan(settings(*train, **data), path, tokenizer, **(options or {}))
        self.report = self.result.report
        with Manifest.open(path) as m:
            self.utterances = list(m)
            self.columns = m.columns()
            self.rejects = m.rejects()
            self.digest = m.digest

    @property
    def counts(self):
        return self.result.kept, self.result.rejected

    @property
    def reasons(self):
        return {r.id: r.reason for r in self.rejects}


@pytest.fixture
def scanned(tmp_path, tokenizer):
    return lambda *train, **kw: Scanned(tmp_path, tokenizer, *train, **kw)


def test_good_clips_are_kept_in_the_order_of_the_metadata(tmp_path, scanned):
    s = scanned(make_corpus(tmp_path / "c", 5))
    assert s.counts == (5, 0)
    assert [(u.id, u.name, u.num_samples, u.source_rate, u.language, u.speaker) for u in s.utterances] == [
        (i, f"c{i + 1:04d}", 44100, 22050, "en", "c") for i in range(5)
    ]
    assert s.utterances[2].text == s.utterances[2].clean == sentence(2)
    assert all(len(u.tokens) == u.tokens.size == n for u, n in zip(s.utterances, s.columns["num_tokens"], strict=True))
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
    assert "metadata.csv:4: expected 2 or 3 fields, got 1" in "\n".join(s.report.lines())
    write_metadata(root, [f"c{i:04d}|{sentence(i)}|3.21" for i in range(1, 7)])
    s = scanned(root)
    assert [u.text for u in s.utterances] == [sentence(i) for i in range(1, 7)]
    assert any("column 3 looks numeric in 6/6 rows" in line for line in s.report.lines())


def test_c04_quotes_and_c05_line_ends(tmp_path, scanned):
    root = make_corpus(tmp_path / "c", 4)
    write_metadata(root, ['c0001|"Stop, he said|"stop he said', "", "c0002|b|bee", 'c0003|d" e|d" e', "c0004|x|end", "", ""], end="\r\n")
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
    write_metadata(root, [f"{i}|x|one two" for i in ("LJ0001", "LJ0002.wav", "wavs/LJ0003.wav", tmp_path / "LJ4.wav", "LJ0005", "nope")])
    monkeypatch.chdir("/")
    s = scanned(root)
    assert s.counts == (5, 1)
    assert [str(u.path) for u in s.utterances[3:]] == [f"{tmp_path}/LJ4.wav", f"{root}/wavs/LJ0005.flac"]
    assert all(f"{root}/{f}/nope{x}".replace("//", "/") in s.reasons["nope"] for f in ("wavs", "") for x in (".wav", ".flac", ".mp3"))


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
    with pytest.raises(BadInput, match=r"6 of 10 audio files are missing(?s:.*)metadata.csv:1: no such audio file; tried /") as e:
        scanned(root)
    assert str(e.value).splitlines()[-1] == "  … and 4 more"  # each comes with the twenty paths that were tried
    assert not (tmp_path / "run.manifest").exists()


def test_c08_equal_names_in_two_corpora_and_repeats_in_one(tmp_path, scanned):
    for name, freq in (("a", 440), ("b", 880)):
        write_wav(tmp_path / name / "wavs/0001.wav", sine(44100, freq))
        write_metadata(tmp_path / name, ["0001|x|one", "0001|x|two"])
    s = scanned(tmp_path / "a", tmp_path / "b")
    assert s.counts == (2, 2)
    assert [u.path for u in s.utterances] == [tmp_path / "a/wavs/0001.wav", tmp_path / "b/wavs/0001.wav"]
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


def test_c10_files_that_are_no_audio(tmp_path, scanned):
    root = tmp_path / "c"
    mp3 = write_wav(root / "wavs/a.mp3", sine(44100)).read_bytes()
    for name, data in (("b.mp3", b""), ("c.wav", mp3), ("d.wav", b"<html>404"), ("e.wav", b"version https://git-lfs.github.com/spec/v1\n")):
        (root / "wavs" / name).write_bytes(data)
    write_metadata(root, [f"{i}|x|one" for i in "abcde"])
    s = scanned(root)
    assert s.counts == (2, 3)
    assert [u.name for u in s.utterances] == ["a", "c"]
    assert s.reasons["b"] == "empty file"
    assert s.reasons["d"].startswith("not audio")
    assert s.reasons["e"].startswith("Git LFS pointer")


def test_c11_length_at_22_050_hz(tmp_path, scanned):
    root = tmp_path / "c"
    write_wav(root / "wavs/a.flac", np.stack([sine(96000, 440, 48000), 0 * sine(96000)], 1), 48000)
    write_wav(root / "wavs/b.flac", sine(48001, 440, 48000), 48000)
    write_metadata(root, ["a|x|one", "b|x|two"])
    s = scanned(root)
    assert [(u.num_samples, u.source_rate, u.source_frames) for u in s.utterances] == [(44100, 48000, 96000), (22051, 48000, 48001)]


def test_c13_bad_samples(tmp_path, scanned):
    root = make_corpus(tmp_path / "c", 3)
    for name, bad in (("nan", np.nan), ("inf", np.inf), ("huge", 1e30)):
        x = sine(44100)
        x[100] = bad
        write_wav(root / f"wavs/{name}.wav", x, subtype="FLOAT")
    write_wav(root / "wavs/loud.wav", 8 * sine(44100), subtype="FLOAT")
    clipped = sine(44100)
    clipped[:13230] = 1
    write_wav(root / "wavs/clip.wav", clipped)
    write_metadata(root, [f"{i}|x|one" for i in ("c0001", "c0002", "nan", "inf", "huge", "loud", "clip")])
    s = scanned(root)
    assert s.counts == (4, 3)
    assert (s.reasons["nan"], s.reasons["inf"]) == ("non-finite: 1", "non-finite: 1")
    assert s.reasons["huge"].startswith("absurd level: peak 1e+30")
    text = "\n".join(s.report.warnings)
    assert "1 clips exceed full scale and will be scaled (highest peak 4: " in text
    assert "1 clips are clipped (worst 30.0% of the samples" in text


def test_c14_limits(tmp_path, scanned):
    root = tmp_path / "c"
    lengths = {"s1": 4410, "s2": 10805, "s3": 11024, "ok1": 11025, "ok2": 255995, "l1": 255996}
    for name, n in lengths.items():
        write_wav(root / f"wavs/{name}.wav", sine(n))
    write_wav(root / "wavs/lie.wav", sine(22050), 1)
    write_metadata(root, [f"{i}|x|one" for i in (*lengths, "lie")])
    s = scanned(root)
    assert [(u.name, -(-u.num_samples // 1024)) for u in s.utterances] == [("ok1", 11), ("ok2", 250)]
    assert s.reasons["s1"] == "0.20 s < 0.50 s (4410 < 11025 samples)"
    assert s.reasons["s2"].startswith("0.49 s < 0.50 s")
    assert s.reasons["l1"] == "11.61 s > 11.61 s (255996 > 255995 samples)"
    assert "sample rate 1 Hz is not credible" in s.reasons["lie"]


def test_c14_a_huge_file_does_not_fill_the_memory(tmp_path, scanned):
    root = make_corpus(tmp_path / "c", 2)
    with soundfile.SoundFile(root / "wavs/huge.wav", "w", 22050, 2, "PCM_16") as f:
        for _ in range(40):
            f.write(np.zeros((1 << 20, 2), np.int16))
    write_metadata(root, [f"{i}|x|one" for i in ("c0001", "c0002", "huge")])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    s = scanned(root)
    assert s.reasons["huge"].startswith("1902")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB


def test_limits_beyond_the_model_are_bad_input(tmp_path, scanned):
    root = make_corpus(tmp_path / "c", 2)
    with pytest.raises(BadInput, match="max_text_tokens=500, but the model has positions for 402"):
        scanned(root, max_text_tokens=500)
    with pytest.raises(BadInput, match=r"max_audio_s=60.0, but the model has positions for 28.0 s"):
        scanned(root, max_audio_s=60)


def test_c16_languages(tmp_path, scanned):
    root = make_corpus(tmp_path / "c", 5)
    codes = ["fa", "en", "EN-us", "fa-IR", ""]
    write_metadata(
        root, ["audio_file|text|language", *(f"c{i + 1:04d}|{'سلام' if c[:2] == 'fa' else 'hello'}|{c}" for i, c in enumerate(codes))]
    )
    s = scanned(root)
    assert [u.language for u in s.utterances] == ["fa", "en", "en", "fa", "en"]
    assert s.utterances[0].tokens.tolist() == s.utterances[3].tokens.tolist()


def test_c16_one_message_for_a_language_that_cannot_be_had(tmp_path, scanned):
    root = make_corpus(tmp_path / "c", 5)
    write_metadata(root, ["audio_file|text|language", *(f"c{i + 1:04d}|hello|{c}" for i, c in enumerate(["en", "xx", "xx", "qq", "en"]))])
    with pytest.raises(BadInput, match=r"unknown language 'xx' in 2 rows, first at \S+metadata.csv:3; 'qq' in 1 rows") as e:
        scanned(root)
    assert str(e.value).count("\n") == 0
    write_metadata(root, ["audio_file|text|language", "c0001|hello|en", "c0002|bonjour|fr"])
    with pytest.raises(BadInput, match=r"language fr not in vocabulary; have: ar, en, fa \(first at \S+metadata.csv:3; set"):
        scanned(root)


def test_c16_a_missing_package_is_named_once(tmp_path, scanned):
    pytest.importorskip("tokenizers")
    try:
        import cutlet  # noqa: F401

        pytest.skip("the Japanese package is installed")
    except ImportError:
        pass
    root = make_corpus(tmp_path / "c", 3)
    start = time.monotonic()
    with pytest.raises(BadInput, match="language ja needs the package cutlet: pip install cutlet"):
        scanned({"path": str(root), "language": "ja"})
    assert time.monotonic() - start < 10


def test_c19_unknown_characters(tmp_path, scanned):
    root = make_corpus(tmp_path / "c", 6)
    texts = ["rune ᚠ here", "thai กข", "“smart” quotes — and… so", "say [STOP] now", "plain", "rune ᚠ ᚠ"]
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
    assert [(u.language, u.speaker) for u in s.utterances] == [("en", "ann"), ("fa", "ali"), ("ar", "ali"), ("en", "ann")]
    lines = s.report.lines()
    assert "languages: en=2 fa=1 ar=1 (1 by default: en)" in lines
    assert "Arabic diacritics: kept (text.strip_arabic_diacritics)" in lines
    assert any("1 texts have more than 30 % letters of another script" in w and "metadata.csv:3" in w for w in s.report.warnings)
    write_metadata(root, rows)
    with pytest.raises(BadInput, match="0 of 4 usable: wrong number of fields 4"):
        scanned(root)


def test_c22_defaults_of_a_source(tmp_path, scanned):
    a, b = make_corpus(tmp_path / "a", 2, text="سلام"), make_corpus(tmp_path / "b", 2)
    s = scanned({"path": str(a), "language": "fa", "speaker": "ali"}, b)
    assert [(u.language, u.speaker) for u in s.utterances] == [("fa", "ali")] * 2 + [("en", "b")] * 2
    assert s.report.num_default_language == 2


def test_folders_of_the_same_name_are_two_speakers(tmp_path, scanned):
    a, b = make_corpus(tmp_path / "x/data", 2), make_corpus(tmp_path / "y/data", 2)
    assert {u.speaker for u in scanned(a, b).utterances} == {"x/data", "y/data"}


def test_c40_many_clips_under_a_low_limit_of_open_files(tmp_path):
    root = make_corpus(tmp_path / "c", 1)
    for i in range(600):
        os.link(root / "wavs/c0001.wav", root / f"wavs/x{i}.wav")
    write_metadata(root, [f"x{i}|one two" for i in range(600)])
    code = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from common import config
from common.xtts.tokenizer import Tokenizer
from producer.scan import scan
c = config.parse({{"data": {{"train": "{root}", "scan_threads": 8}}}})
print(scan(c, "{tmp_path}/m.sqlite", Tokenizer.train([("one two", "en")], 64, ["en"])).report.headline())
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("kept=600 rejected=0"), done.stderr


def test_c49_nothing_usable_says_why(tmp_path, scanned):
    root = make_corpus(tmp_path / "c", 10, seconds=lambda i: 2.0 if i < 7 else 12.0, text=lambda i: "word " * 60 if i < 7 else "short")
    with pytest.raises(BadInput, match=r"^0 of 10 usable: text >200 tokens 7, audio >255995 samples 3 \(") as e:
        scanned(root)
    lines = str(e.value).splitlines()  # there is no manifest to look into, so the rows are in the message
    assert len(lines) == 11
    assert lines[1].strip() == f"{root}/metadata.csv:1: 300 text tokens > 200 (id c0001)"
    assert "12.00 s > 11.61 s" in lines[8]
    assert not (tmp_path / "run.manifest").exists()


def test_c49_five_clips_split_into_four_and_one(tmp_path, scanned):
    s = scanned(make_corpus(tmp_path / "c", 5), eval_fraction=0.1)
    assert s.columns["split"].sum() == 1
    assert s.columns["split"].sum() == s.report.evaluation
    assert any("evaluation set is small (1)" in w for w in s.report.warnings)


def test_c49_character_limits_only_warn(tmp_path, scanned):
    s = scanned(make_corpus(tmp_path / "c", 3, seconds=10, text=lambda i: "ab " * (90 if i == 1 else 3)), max_text_tokens=400)
    assert s.counts == (3, 0)
    assert any("1 texts are longer than XTTS's limit" in w and "269 characters, en: 250" in w for w in s.report.warnings)


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
    assert choose_eval([0], 0.5, 256) == choose_eval([0, 1, 2], 0.5, 256) == choose_eval([0] * 9, 0.0, 256) == choose_eval([], 0.5, 9) == []


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
    assert scanned(root, options={"strict": True}).counts == (4, 0)
    (root / "wavs/c0002.wav").write_bytes(b"")
    with pytest.raises(BadInput, match="--strict: 1 of 4 rows rejected: empty file 1"):
        scanned(root, options={"strict": True})


def test_no_corpus_is_bad_input(tmp_path, scanned):
    with pytest.raises(BadInput, match="no corpus given; set data.train=DIR"):
        scanned()
    write_metadata(tmp_path / "c", [])
    with pytest.raises(BadInput, match="no rows in the metadata"):
        scanned(tmp_path / "c")


def test_suspicious_pairs_are_warned_about(tmp_path, scanned):
    s = scanned(make_corpus(tmp_path / "c", 3, seconds=lambda i: 0.6 if i else 9, text="a sentence that cannot be said in so short a time"))
    assert any("2 texts have more than 40 characters per second" in w for w in s.report.warnings)
    root = make_corpus(tmp_path / "d", 3, rate=8000)
    assert any("3 clips are sampled below 16 kHz" in w for w in scanned(root).report.warnings)
    write_metadata(root, ["c0001|one", "wavs/c0001.wav|two", "c0002|three"])
    assert any("1 rows share their audio file" in w for w in scanned(root).report.warnings)


def test_texts_for_a_vocabulary_come_before_the_audio(tmp_path):
    root = make_corpus(tmp_path / "c", 2)
    rows = read_rows(settings(root))
    assert list(rows.pairs()) == [(sentence(0), "en"), (sentence(1), "en")]
    assert rows.languages == ["en"]


def test_the_report_as_lines_json_table_and_file(tmp_path, scanned):
    root = make_corpus(tmp_path / "c", 40)
    for i in range(1, 26):
        (root / f"wavs/c{i + 10:04d}.wav").write_bytes(b"")
    s = scanned(root)
    lines = s.report.lines()
    assert lines[0].startswith("kept=15 rejected=25")
    assert sum("empty file (id" in line for line in lines) == 20
    assert lines[-1] == "… and 5 more rejected rows, all of them in RUN/rejects.tsv"
    assert reject_line(s.rejects[0]) == f"{root}/metadata.csv:11: empty file (id c0011)"
    assert json.loads(json.dumps(s.report.to_json()))["tally"] == {"empty file": 25}
    s.result.write_rejects(tmp_path / "rejects.tsv")
    table = (tmp_path / "rejects.tsv").read_text().splitlines()
    assert (len(table), table[0]) == (26, "file\tline\tid\tkind\treason")
    plain, terminal = io.StringIO(), io.StringIO()
    s.report.print(Console(file=plain))
    s.report.print(Console(file=terminal, force_terminal=True, width=200))
    assert plain.getvalue().splitlines() == s.report.lines(None)  # printed by `launch.py scan`, which leaves no file behind
    assert sum("empty file (id" in line for line in plain.getvalue().splitlines()) == 25
    assert "kept=15 rejected=25" in terminal.getvalue()


def test_a_terminal_hides_nothing_that_a_pipe_shows(tmp_path, scanned):
    root = make_corpus(tmp_path / "c", 4)
    rows = ["c0001|fa|[ali]|سلام", "c0002|fa|[ali]|سلام", "c0003||ann|hello", "c0004|en|ann|hello"]
    write_metadata(root, ["audio_file|language|speaker_name|text", *rows])
    out = io.StringIO()
    scanned(root).report.print(Console(file=out, force_terminal=True, no_color=True, width=60))
    shown = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    for expected in ("language fa 2 0.00", "speaker [ali] 2 0.00", "ann 2 0.00", "1 rows name no language: en (data.language)"):
        assert expected in shown
    assert "Arabic diacritics: kept (text.strip_arabic_diacritics)" in shown
    assert not any(line.startswith("speakers (") for line in shown)


def test_the_output_goes_where_it_is_asked_to(tmp_path, tokenizer, capsys):
    got = []
    scan(settings(make_corpus(tmp_path / "c", 3)), tmp_path / "m", tokenizer, out=got.append)
    assert got[0].startswith("kept=3")
    assert capsys.readouterr() == ("", "")


def test_thousands_of_headers_take_seconds(tmp_path, tokenizer):
    root = make_corpus(tmp_path / "c", 20)
    for i in range(2500):
        os.symlink(root / f"wavs/c{i % 20 + 1:04d}.wav", root / f"wavs/x{i}.wav")
    write_metadata(root, [f"x{i}|{sentence(i)}" for i in range(2500)])
    start = time.process_time()
    s = Scanned(tmp_path, tokenizer, root)
    assert time.process_time() - start < 3  # CPU time of all threads: 0.4 s measured, so 23 000 take a few seconds
    assert s.counts == (2500, 0)
    assert s.report.evaluation == 25
