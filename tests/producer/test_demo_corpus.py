"""The demo corpus: what it promises, by its own reader and scan; the speech itself by level,
length, pitch and spectrum.
"""

import hashlib
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import soundfile

from common.data.manifest import Manifest
from common.run import settings as config
from common.system.errors import BadInput
from common.xtts.text.tokenizer import Tokenizer
from producer.corpus import demo
from producer.corpus.demo import SPEAKERS, make_demo_corpus, script
from producer.corpus.demo_texts import TEXTS
from producer.corpus.rows import read_rows
from producer.corpus.scan import scan

ROOT = Path(__file__).resolve().parents[2]


def contents(folder):
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "corpus"
    start = os.times()
    make_demo_corpus(folder)
    assert (
        sum(os.times()[:4]) - sum(start[:4]) < 60
    )  # seconds of work, the children's included; 3 s on two idle cores
    return folder


def pitch_hz(x):
    """Median over voiced stretches of 46 ms of the autocorrelation's first strong peak, 60 to 400
    Hz.
    """
    found = []
    for i in range(0, len(x) - 1024, 1024):
        s = x[i : i + 1024] - x[i : i + 1024].mean()
        a = np.correlate(s, s, "full")[1023:]
        k = 55 + np.argmax(a[55:368])
        if np.sqrt((s**2).mean()) > 0.03 and a[k] > 0.5 * a[0]:
            found.append(22050 / k)
    return np.median(found)


def test_it_is_an_ordinary_folder_and_all_of_it_is_usable(corpus, tmp_path):
    settings = config.parse({"data": {"train": str(corpus)}})
    rows = read_rows(settings)
    tokenizer = Tokenizer.train(rows.pairs(), settings.text.vocab_size, rows.languages)
    report = scan(settings, tmp_path / "m.sqlite", tokenizer, rows=rows).report
    report.require_all()
    assert report.kept >= 240
    assert len(report.speakers) >= 6
    assert {"en", "fa", "ar", "es"} <= {s.name for s in report.languages}
    assert 10 < report.hours * 60 < 20
    assert report.shortest_s >= 1
    assert report.longest_s <= 10
    with Manifest.open(tmp_path / "m.sqlite") as m:
        seconds = m.columns()["num_samples"] / 22050
    assert np.mean((seconds > 1.3) & (seconds < 5)) > 0.85
    assert not any(
        "clipped" in w or "exceed" in w or "per second" in w or "script" in w
        for w in report.warnings
    )


def test_the_files_are_what_the_readme_says(corpus):
    assert (corpus / "README.txt").read_text().startswith("This folder was made by")
    assert (corpus / "metadata.csv").read_text().splitlines()[
        0
    ] == "audio_file|text|speaker_name|language"
    for path in corpus.glob("wavs/*.wav"):
        info = soundfile.info(path)
        assert (info.samplerate, info.channels, info.subtype) == (22050, 1, "PCM_16")


def test_each_clip_is_speech_at_a_sane_level(corpus):
    for path in sorted(corpus.glob("wavs/*.wav")):
        x, _ = soundfile.read(path)
        assert 0.02 < np.sqrt((x**2).mean()) < 0.3, path
        assert 0.2 < np.abs(x).max() < 1, path
        assert np.mean(np.abs(x) > 1e-3) > 0.4, path  # not silence with a click
        sounding = np.flatnonzero(np.abs(x) > 0.01)
        assert sounding[0] < 0.15 * 22050, path
        assert len(x) - sounding[-1] < 0.25 * 22050, path


def test_longer_texts_take_longer(corpus):
    for language in TEXTS:
        lines = script(language)
        seconds = [soundfile.info(corpus / x.file).duration for x in lines]
        assert np.corrcoef(seconds, [len(x.text) for x in lines])[0, 1] > 0.85


def test_the_speakers_of_a_language_differ_in_pitch(corpus):
    for language, (woman, man) in SPEAKERS.items():
        pitch = {}
        for speaker in (woman, man):
            files = [x.file for x in script(language) if x.speaker is speaker][:4]
            pitch[speaker.name] = np.median(
                [pitch_hz(soundfile.read(corpus / f)[0]) for f in files]
            )
        assert pitch[woman.name] > 1.3 * pitch[man.name], pitch


def test_texts_are_distinct_words_of_their_language():
    assert len(TEXTS) >= 4
    for language, texts in TEXTS.items():
        assert len(set(texts)) == len(texts) >= 50
        assert all(t == t.strip() and "|" not in t and t[-1] in ".!?؟" for t in texts), language
    assert sum("\u200c" in t for t in TEXTS["fa"]) > 10
    assert any(c in t for t in TEXTS["fa"] for c in "۰۱۲۳۴۵۶۷۸۹")
    assert not set("".join(TEXTS["fa"])) & set("يك"), "Arabic yeh or kaf in a Persian text"
    assert not set("".join(TEXTS["ar"])) & set("یکپچژگ"), "a Persian letter in an Arabic text"


def test_every_speaker_says_as_much_as_the_others():
    said = Counter(line.speaker.name for language in TEXTS for line in script(language))
    assert len(said) == 10
    assert len(set(said.values())) == 1
    files = [line.file for language in TEXTS for line in script(language)]
    assert len(set(files)) == len(files) == 320


def test_a_language_is_the_same_bytes_again(corpus, tmp_path):
    (tmp_path / "wavs").mkdir()
    subprocess.run(
        [sys.executable, "-m", "producer.corpus.demo", "--speak", "fa", str(tmp_path)],
        cwd=ROOT,
        check=True,
        timeout=280,
    )
    again = contents(tmp_path)
    assert len(again) == 64
    assert again.items() <= contents(corpus).items()


def test_an_existing_corpus_is_left_alone(corpus):
    before = {p: p.stat().st_mtime_ns for p in corpus.rglob("*")}
    argv = [sys.executable, "-m", "producer.corpus.demo", str(corpus)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert (done.returncode, done.stdout.strip()) == (0, str(corpus))
    assert {p: p.stat().st_mtime_ns for p in corpus.rglob("*")} == before


def test_nothing_else_is_ever_overwritten(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(BadInput, match="the demo corpus is not made over it"):
        make_demo_corpus(tmp_path)
    assert contents(tmp_path).keys() == {"thesis.txt"}


def test_a_failure_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(language, folder):
        (folder / "wavs" / "half.wav").write_bytes(b"x")
        raise BadInput("no voice")

    monkeypatch.setattr(demo, "_speak_apart", fail)
    with pytest.raises(BadInput, match="no voice"):
        make_demo_corpus(tmp_path / "d")
    assert os.listdir(tmp_path) == []


def test_wrong_arguments_exit_2():
    for arguments in ([], ["--help"], ["a", "b"]):
        assert demo.main(arguments) == 2
