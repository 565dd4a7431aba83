"""The scan looks at audio: what is none, lengths and levels, limits, many files; field cases C10 to
C14 and C40.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import soundfile

from common.system.errors import BadInput
from tests.support import scan_cases
from tests.support.corpora import make_corpus, sentence, sine, write_metadata, write_wav
from tests.support.scan_cases import Scanned

ROOT = Path(__file__).resolve().parents[2]
tokenizer, scanned = scan_cases.tokenizer, scan_cases.scanned


def test_c10_files_that_are_no_audio(tmp_path, scanned):
    root = tmp_path / "c"
    mp3 = write_wav(root / "wavs/a.mp3", sine(44100)).read_bytes()
    for name, data in (
        ("b.mp3", b""),
        ("c.wav", mp3),
        ("d.wav", b"<html>404"),
        ("e.wav", b"version https://git-lfs.github.com/spec/v1\n"),
    ):
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
    assert [(u.num_samples, u.source_rate, u.source_frames) for u in s.utterances] == [
        (44100, 48000, 96000),
        (22051, 48000, 48001),
    ]


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
    write_metadata(
        root, [f"{i}|x|one" for i in ("c0001", "c0002", "nan", "inf", "huge", "loud", "clip")]
    )
    s = scanned(root)
    assert s.counts == (4, 3)
    assert (s.reasons["nan"], s.reasons["inf"]) == ("non-finite: 1", "non-finite: 1")
    assert s.reasons["huge"].startswith("absurd level: peak 1e+30")
    text = "\n".join(s.report.warnings)
    assert "1 clip exceeds full scale and will be scaled (peak 4: " in text
    assert "1 clip is clipped (30.0% of the samples" in text


def test_c14_limits(tmp_path, scanned):
    root = tmp_path / "c"
    lengths = {"s1": 4410, "s2": 10805, "s3": 11024, "ok1": 11025, "ok2": 255995, "l1": 255996}
    for name, n in lengths.items():
        write_wav(root / f"wavs/{name}.wav", sine(n))
    write_wav(root / "wavs/lie.wav", sine(22050), 1)
    write_metadata(root, [f"{i}|x|one" for i in (*lengths, "lie")])
    s = scanned(root)
    assert [(u.name, -(-u.num_samples // 1024)) for u in s.utterances] == [
        ("ok1", 11),
        ("ok2", 250),
    ]
    assert s.reasons["s1"] == "0.20 s < 0.50 s (4410 < 11025 samples)"
    assert s.reasons["s2"].startswith("0.49 s < 0.50 s")
    assert s.reasons["l1"] == "11.61 s > 11.61 s (255996 > 255995 samples)"
    assert "sample rate 1 Hz is not credible" in s.reasons["lie"]
    short, long = (
        "audio shorter than 0.5 s (data.min_audio_s) 3",
        "audio longer than 11.61 s (data.max_audio_s) 1",
    )
    assert f"rejected: {short}, {long}, sample rate not credible 1" in s.report.lines()
    s = scanned(root, min_audio_s=0.3, max_audio_s=11)
    assert s.report.tally["audio shorter than 0.3 s (data.min_audio_s)"] == 1
    assert s.report.tally["audio longer than 11 s (data.max_audio_s)"] == 2


def scan_apart(root, before: str = "", after: str = "") -> str:
    """What a process of its own prints when it has scanned a folder of texts "one two": its
    headline, then what `after` prints.
    """
    code = f"""
import resource
from common.run import settings as config
from common.xtts.text.tokenizer import Tokenizer
from producer.corpus.scan import scan
{before}
c = config.parse({{"data": {{"train": "{root}", "scan_threads": 8}}}})
tokenizer = Tokenizer.train([("one two", "en")], 64, ["en"])
print(scan(c, "{root.parent}/m.sqlite", tokenizer).report.headline())
{after}
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_c14_a_huge_file_does_not_fill_the_memory(tmp_path):
    """In a process of its own: the most memory that another test has used would hide what this one
    does.
    """
    root = make_corpus(tmp_path / "c", 2)
    with soundfile.SoundFile(root / "wavs/huge.wav", "w", 22050, 2, "PCM_16") as f:
        for _ in range(40):
            f.write(np.zeros((1 << 20, 2), np.int16))
    write_metadata(root, [f"{i}|x|one" for i in ("c0001", "c0002", "huge")])
    peak = "resource.getrusage(resource.RUSAGE_SELF).ru_maxrss"
    headline, added = scan_apart(root, f"before = {peak}", f"print({peak} - before)").splitlines()
    assert headline.startswith("kept=2 rejected=1")
    assert int(added) < 100_000  # kB; as floats the file is 335 MB


def test_limits_beyond_the_model_are_bad_input(tmp_path, scanned):
    root = make_corpus(tmp_path / "c", 2)
    with pytest.raises(BadInput, match="max_text_tokens=500, but the model has positions for 402"):
        scanned(root, max_text_tokens=500)
    with pytest.raises(BadInput, match=r"max_audio_s=60.0, but the model has positions for 28.0 s"):
        scanned(root, max_audio_s=60)


def test_c40_many_clips_under_a_low_limit_of_open_files(tmp_path):
    root = make_corpus(tmp_path / "c", 1)
    for i in range(600):
        os.link(root / "wavs/c0001.wav", root / f"wavs/x{i}.wav")
    write_metadata(root, [f"x{i}|one two" for i in range(600)])
    assert scan_apart(root, "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))").startswith(
        "kept=600 rejected=0"
    )


def test_suspicious_pairs_are_warned_about(tmp_path, scanned):
    s = scanned(
        make_corpus(
            tmp_path / "c",
            3,
            seconds=lambda i: 0.6 if i else 9,
            text="a sentence that cannot be said in so short a time",
        )
    )
    assert any("2 texts have more than 40 characters per second" in w for w in s.report.warnings)
    root = make_corpus(tmp_path / "d", 3, rate=8000)
    assert any("3 clips are sampled below 16 kHz" in w for w in scanned(root).report.warnings)
    write_metadata(root, ["c0001|one", "wavs/c0001.wav|two", "c0002|three"])
    assert any("1 row shares its audio file" in w for w in scanned(root).report.warnings)


def test_thousands_of_headers_take_seconds(tmp_path, tokenizer):
    root = make_corpus(tmp_path / "c", 20)
    for i in range(2500):
        os.symlink(root / f"wavs/c{i % 20 + 1:04d}.wav", root / f"wavs/x{i}.wav")
    write_metadata(root, [f"x{i}|{sentence(i)}" for i in range(2500)])
    start = time.process_time()
    s = Scanned(tmp_path, tokenizer, root)
    assert (
        time.process_time() - start < 3
    )  # CPU time of all threads: 0.4 s measured, so 23 000 take a few seconds
    assert s.counts == (2500, 0)
    assert s.report.evaluation == 25
