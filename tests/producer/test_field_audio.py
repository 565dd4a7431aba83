"""Recordings as people have them, each with what is right: cases D1, D2, D8 to D11 and D13, and for
each two more of its kind.
"""

import os
import struct
import subprocess

import numpy as np
import pytest
import soundfile

from common.audio import ffmpeg
from common.audio.errors import DecodeError
from common.system.errors import BadInput
from common.xtts.clips import ReferenceClipError, load_clip
from producer.batches.decode import decode
from producer.corpus.headers import facts_of
from producer.corpus.readers.paths import FixedPlace
from producer.corpus.scan import scan
from producer.creation.prepare import _mel_stats
from tests.support import scan_cases
from tests.support.corpora import make_corpus, sentence, sine, write_metadata, write_wav

tokenizer, scanned = scan_cases.tokenizer, scan_cases.scanned
RATE = 22050
TONE = sine(RATE)


def clip(path, seconds=1.0, freq=440.0, rate=RATE, **options):
    return write_wav(path, sine(round(seconds * rate), freq, rate), rate, **options)


def decodable(path):
    try:
        return decode(path)
    except DecodeError as e:
        return e.reason


# -- D1: channels that cancel ----------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".wav", ".flac", ".mp3"])
@pytest.mark.parametrize("share", [-1.0, -0.9, -0.8])
def test_d1_of_channels_that_cancel_one_is_taken(tmp_path, scanned, suffix, share):
    root = make_corpus(tmp_path / "c", 2)
    path = write_wav(root / f"wavs/x{suffix}", np.stack([TONE, share * TONE], 1))
    write_metadata(root, ["c0001|one", "c0002|two", "x|three"])
    wave = decode(path)
    assert np.abs(wave).max() == pytest.approx(0.5, abs=0.03)
    assert np.abs(load_clip(path)).max() == pytest.approx(0.5, abs=0.03)
    if suffix != ".mp3":
        np.testing.assert_array_equal(decode(path, 3000, 5000), wave[3000:8000])
    warnings = scanned(root).report.warnings
    assert [w for w in warnings if "cancel" in w] == [
        "1 clip has channels that cancel each other when they are added; the louder one is taken"
        f" alone ({path})"
    ]


def test_d1_the_mean_stays_where_nothing_cancels(tmp_path, scanned):
    root = make_corpus(tmp_path / "c", 2)
    dead = write_wav(root / "wavs/dead.wav", np.stack([TONE, 0 * TONE], 1))
    alike = write_wav(root / "wavs/alike.wav", np.stack([TONE, 0.5 * TONE], 1))
    write_metadata(root, ["c0001|one", "c0002|two", "dead|three", "alike|four"])
    assert np.abs(decode(dead)).max() == pytest.approx(0.25, abs=1e-3)
    assert np.abs(decode(alike)).max() == pytest.approx(0.375, abs=1e-3)
    said = "\n".join(scanned(root).report.warnings)
    assert f"1 stereo clip has an empty channel, so that its mean is 6 dB softer ({dead})" in said
    assert "cancel" not in said


# -- D2: next to silence ---------------------------------------------------------------------------


def _silences():
    rng = np.random.default_rng(0)
    zeros = np.zeros(2 * RATE, np.float32)
    noise = (10 ** (-90 / 20) * rng.standard_normal(2 * RATE)).astype(np.float32)
    one_click = zeros.copy()
    one_click[RATE] = 0.9
    short = zeros.copy()
    short[: RATE // 10] = TONE[: RATE // 10]
    clicks = zeros.copy()
    clicks[[100, RATE, 2 * RATE - 100]] = 0.9
    return {
        "noise": (noise, "silent: -90.0 dBFS"),
        "offset": (zeros + np.float32(0.25), "silent: -inf dBFS, a constant offset of 0.25"),
        "click": (one_click, "almost silent: 0.02 s of sound in 2.00 s"),
        "short": (short, "almost silent: 0.10 s of sound in 2.00 s"),
        "clicks": (clicks, "almost silent: 0.06 s of sound in 2.00 s"),
        "noise on an offset": (
            noise - np.float32(0.1),
            "silent: -90.0 dBFS, a constant offset of 0.1",
        ),
    }


SILENCES = _silences()


@pytest.mark.parametrize("kind", SILENCES)
@pytest.mark.parametrize("subtype", ["PCM_24", "FLOAT"])
def test_d2_what_is_next_to_silence_passes_nowhere(tmp_path, scanned, kind, subtype):
    """The same judgement in the scan, in training and for a reference clip."""
    root = make_corpus(tmp_path / "c", 2)
    samples, reason = SILENCES[kind]
    path = write_wav(root / "wavs/x.wav", samples, subtype=subtype)
    write_metadata(root, ["c0001|one", "c0002|two", "x|three"])
    assert scanned(root).reasons["x"].startswith(reason)
    with pytest.raises(DecodeError) as e:
        decode(path)
    assert e.value.reason.startswith(reason)
    with pytest.raises(ReferenceClipError, match="silent"):
        load_clip(path)


def test_d2_soft_speech_and_sound_on_an_offset_are_kept(tmp_path, scanned):
    root = tmp_path / "c"
    write_wav(root / "wavs/soft.wav", 0.01 * TONE)
    write_wav(root / "wavs/offset.wav", 0.2 * TONE + np.float32(0.25))
    x = np.zeros(3 * RATE, np.float32)
    x[: RATE // 2] = TONE[: RATE // 2]
    write_wav(root / "wavs/word.wav", x)
    write_metadata(root, ["soft|a soft word", "offset|another word", "word|just this one word"])
    s = scanned(root)
    assert s.counts == (3, 0)
    said = "\n".join(s.report.warnings)
    assert "1 clip is very quiet (below -45 dBFS where it sounds; -49.0 dBFS: " in said
    assert "1 clip has a constant offset (0.25 of full scale: " in said
    assert "1 clip ends with more than 1.5 s of silence (2.5 s: " in said


def test_d2_silent_clips_never_move_the_statistics(tmp_path, tokenizer):
    """A scan that saw headers alone lets them pass; the statistics do not count them."""
    found = {}
    for name, silent in (("good", False), ("mixed", True)):
        root = make_corpus(tmp_path / name, 6, 0.6)
        if silent:
            for kind, (samples, _) in SILENCES.items():
                write_wav(root / f"wavs/z {kind}.wav", samples, subtype="FLOAT")
            rows = (root / "metadata.csv").read_text().splitlines()
            write_metadata(root, rows + [f"z {kind}|one" for kind in SILENCES])
        settings = scan_cases.settings(root, eval_fraction=0)
        scan(settings, tmp_path / name / "m", tokenizer, deep=False)
        with scan_cases.Manifest.open(tmp_path / name / "m") as m:
            assert len(m) == (12 if silent else 6)
            found[name] = _mel_stats(settings, m, None, settings.dims, None)
    np.testing.assert_allclose(found["mixed"], found["good"], rtol=1e-6)


# -- D8: what libsndfile cannot read ---------------------------------------------------------------


def converted(path, *options, source=None):
    """The tone in another format, made by ffmpeg."""
    if ffmpeg.find() is None:
        pytest.skip("there is no ffmpeg")
    wav = source or clip(path.with_suffix(".made.wav"))
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [ffmpeg.find(), "-nostdin", "-v", "error", "-y", "-i", wav, *options, path],
        check=True,
        timeout=60,
    )
    if source is None:
        wav.unlink()
    return path


@pytest.mark.parametrize("suffix", [".m4a", ".webm", ".wma", ".aac"])
def test_d8_other_formats_are_read_through_ffmpeg(tmp_path, scanned, suffix):
    root = make_corpus(tmp_path / "c", 1)
    path = converted(root / f"wavs/x{suffix}")
    write_metadata(root, ["c0001|one", f"x{suffix}|two"])
    s = scanned(root)
    assert s.counts == (2, 0), s.report.lines()
    wave = decode(path)
    assert len(wave) == pytest.approx(RATE, abs=2500)
    assert np.abs(wave).max() == pytest.approx(0.5, abs=0.05)
    np.testing.assert_array_equal(decode(path, 1000, 2000), wave[1000:3000])
    assert len(load_clip(path)) == len(wave)


@pytest.mark.parametrize(
    ("suffix", "kind"),
    [(".m4a", "ends early"), (".webm", "ends early"), (".wma", "ends early"), (".aac", "damaged")],
)
def test_d8_ends_that_are_missing(tmp_path, suffix, kind):
    data = converted(tmp_path / f"x{suffix}").read_bytes()
    for share in (0.75, 0.4):
        (tmp_path / f"cut{suffix}").write_bytes(data[: int(len(data) * share)])
        assert scan_reason(tmp_path / f"cut{suffix}").startswith(kind)
    if suffix == ".m4a":
        (tmp_path / "two.m4a").write_bytes(data + data)
        assert scan_reason(tmp_path / "two.m4a").startswith("two M4A files are joined")


def test_d8_without_ffmpeg_it_is_said(tmp_path, scanned, monkeypatch):
    root = make_corpus(tmp_path / "c", 2)
    (root / "wavs/x.m4a").write_bytes(struct.pack(">I", 20) + b"ftypM4A " + bytes(8))
    write_metadata(root, ["c0001|one", "c0002|two", "x.m4a|three"])
    monkeypatch.setattr(ffmpeg, "find", lambda: None)
    s = scanned(root)
    assert s.reasons["x.m4a"].startswith(
        "M4A is read through ffmpeg, which is not installed here; install ffmpeg"
    )
    assert s.rejects[0].kind == "needs ffmpeg"


def test_d8_ffmpeg_is_bounded(tmp_path, monkeypatch):
    slow, loud = tmp_path / "slow", tmp_path / "loud"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    loud.write_text("#!/bin/sh\nexec cat /dev/zero\n")
    for script in (slow, loud):
        script.chmod(0o755)
    monkeypatch.setattr(ffmpeg, "find", lambda: str(slow))
    with pytest.raises(DecodeError, match=r"ffmpeg did not finish within 0.2 s"):
        ffmpeg.convert(tmp_path / "x.m4a", "M4A", deadline_s=0.2)
    monkeypatch.setattr(ffmpeg, "find", lambda: str(loud))
    monkeypatch.setattr(ffmpeg, "MAX_BYTES", 1 << 20)
    with pytest.raises(DecodeError, match="more than 1 MiB of samples"):
        ffmpeg.convert(tmp_path / "x.m4a", "M4A")


# -- D9, D10: ends ---------------------------------------------------------------------------------


def container(path, suffix):
    """44 100 samples of a tone and a little noise in a container."""
    x = (sine(2 * RATE) + 0.02 * np.random.default_rng(0).standard_normal(2 * RATE)).astype(
        np.float32
    )
    kinds = {
        ".ogg": ("OGG", "VORBIS"),
        ".opus": ("OGG", "OPUS"),
        ".mp3": ("MP3", None),
        ".w64": ("W64", "PCM_16"),
    }
    kinds |= {
        ".aiff": ("AIFF", "PCM_16"),
        ".au": ("AU", "PCM_16"),
        ".caf": ("CAF", "PCM_16"),
        ".sph": ("NIST", "PCM_16"),
    }
    kinds |= {".flac": ("FLAC", "PCM_16"), ".wav": ("WAV", "PCM_16"), ".rf64": ("RF64", "PCM_24")}
    name, subtype = kinds[suffix]
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, x, 24000 if suffix == ".opus" else RATE, subtype, format=name)
    return path


CONTAINERS = [
    ".ogg",
    ".opus",
    ".mp3",
    ".w64",
    ".aiff",
    ".au",
    ".caf",
    ".sph",
    ".flac",
    ".wav",
    ".rf64",
]


@pytest.mark.parametrize("suffix", CONTAINERS)
def test_d9_ends_that_are_missing_and_files_that_are_joined(tmp_path, tokenizer, suffix):
    root = tmp_path / "c"
    kind, suffix = suffix, suffix.replace("rf64", "wav")
    whole = container(root / f"wavs/whole{suffix}", kind).read_bytes()
    for name, data in {
        "cut": whole[: len(whole) * 3 // 4],
        "half": whole[: len(whole) // 2],
        "joined": whole + whole,
    }.items():
        (root / f"wavs/{name}{suffix}").write_bytes(data)
    write_metadata(
        root, [f"{n}{suffix}|some words to say" for n in ("whole", "cut", "half", "joined")]
    )
    for deep in (True, False):
        s = scan_cases.Scanned(tmp_path, tokenizer, root, options={"deep": deep})
        kinds = {r.id.split(".")[0]: r.kind for r in s.rejects}
        joined = {"joined": "joined recordings"}
        if suffix == ".flac" and not deep:
            joined = {}  # it takes reading all of it to see that
        assert kinds == {"cut": "ends early", "half": "ends early"} | joined
    assert len(decode(root / f"wavs/whole{suffix}")) == -(
        -2 * RATE * RATE // (24000 if kind == ".opus" else RATE)
    )


@pytest.mark.parametrize("rate", ["-q:a 4", "-q:a 9", "-b:a 64k"])
def test_d9_mp3_without_a_length_header_is_read_whole(tmp_path, rate):
    x = sine(4 * RATE)
    x[: 2 * RATE] *= 0.01  # so that the first frame's bit rate says little of the rest
    source = write_wav(
        tmp_path / "a.wav",
        x + 0.001 * np.random.default_rng(0).standard_normal(4 * RATE).astype(np.float32),
    )
    path = converted(tmp_path / "vbr.mp3", *rate.split(), "-write_xing", "0", source=source)
    wave = decode(path)
    assert len(wave) == pytest.approx(4 * RATE, abs=3000)
    assert np.abs(wave[3 * RATE :]).max() > 0.4
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 3 // 4])
    assert scan_reason(path).startswith("ends early: its last frame is incomplete")
    path.write_bytes(b"ID3\x04\0\0\0\0\0\x0a" + bytes(10) + data)
    assert len(decode(path)) == len(wave)


def test_d9_mp3_whose_length_header_gives_no_length_is_read_whole(tmp_path):
    good = container(tmp_path / "a.mp3", ".mp3")
    data, length = good.read_bytes(), len(decode(good))
    at = max(data.find(b"Xing"), data.find(b"Info"))
    (tmp_path / "b.mp3").write_bytes(data[: at + 4] + bytes(4) + data[at + 8 :])
    assert len(decode(tmp_path / "b.mp3")) == pytest.approx(length, abs=2400)


def scan_reason(path):
    return facts_of(FixedPlace(str(path)), deep=True).error


def piped_flac(path, samples, cut=0):
    """A FLAC whose header gives no length, as a program leaves it that writes into a pipe."""
    soundfile.write(path, samples, RATE, "PCM_16", format="FLAC")
    data = bytearray(path.read_bytes())
    total = int.from_bytes(data[18:26], "big")
    data[18:26] = (total >> 36 << 36).to_bytes(8, "big")
    path.write_bytes(bytes(data[: len(data) - cut]))
    return path


@pytest.mark.parametrize("n", [44100, 8192, 30001])
def test_d10_flac_without_a_length_is_read(tmp_path, n):
    x = (sine(n) + 0.05 * np.random.default_rng(1).standard_normal(n)).astype(np.float32)
    soundfile.write(tmp_path / "good.flac", x, RATE, "PCM_16")
    path = piped_flac(tmp_path / "pipe.flac", x)
    np.testing.assert_array_equal(decode(path), decode(tmp_path / "good.flac"))
    np.testing.assert_array_equal(decode(path, 1000, 3000), decode(path)[1000:4000])
    for cut in (1, 700):
        assert scan_reason(piped_flac(tmp_path / "cut.flac", x, cut)).startswith("ends early")
    path.write_bytes(path.read_bytes() + b"TAG" + bytes(125))
    assert len(decode(path)) == n


def test_d10_a_length_that_is_a_lie_costs_nothing(tmp_path):
    path = write_wav(tmp_path / "a.flac", TONE)
    data = bytearray(path.read_bytes())
    data[18:26] = (int.from_bytes(data[18:26], "big") | (1 << 36) - 1).to_bytes(8, "big")
    path.write_bytes(bytes(data))
    assert decodable(path) == "3116530 s of 1 channels are too much to read at once"
    assert scan_reason(path).startswith("ends early: the header announces 68719476735 samples")


# -- D11: above the limit of a deep scan -----------------------------------------------------------


def _broken(kind):
    x = TONE.copy()
    if kind == "nan":
        x[100] = np.nan
    elif kind == "silent":
        x *= 1e-5
    else:
        x *= 1e30
    return x


@pytest.mark.parametrize("kind", ["nan", "silent", "absurd"])
def test_d11_a_large_corpus_of_broken_samples_is_bad_input(tmp_path, tokenizer, kind, monkeypatch):
    monkeypatch.setattr("producer.corpus.scan.DEEP_FILES", 40)
    monkeypatch.setattr("producer.corpus.scan.SAMPLED_FILES", 10)
    root = tmp_path / "c"
    write_wav(root / "wavs/c0.wav", _broken(kind), subtype="FLOAT")
    for i in range(1, 50):
        os.link(root / "wavs/c0.wav", root / f"wavs/c{i}.wav")
    write_metadata(root, [f"c{i}|{sentence(i)}" for i in range(50)])
    word = {"nan": "non-finite", "silent": "silent", "absurd": "absurd level"}[kind]
    with pytest.raises(
        BadInput, match=rf"10 of the 10 recordings that were decoded \(of 50\) are unusable: {word}"
    ):
        scan_cases.Scanned(tmp_path, tokenizer, root)
    for i in range(0, 50, 5):
        os.remove(root / f"wavs/c{i}.wav")
        write_wav(root / f"wavs/c{i}.wav", TONE)
    s = scan_cases.Scanned(tmp_path, tokenizer, root, eval_fraction=0)
    assert (
        "10 of 50 recordings were decoded; of the others the headers alone are known (corpora above"
        " 40 rows)" in s.report.lines()
    )
    settings = scan_cases.settings(root)
    with scan_cases.Manifest.open(tmp_path / "run.manifest") as m:
        assert (
            _mel_stats(settings, m, None, settings.dims, None) > 0
        ).all()  # of those that can be used


def test_d11_one_good_clip_of_a_small_corpus_is_kept(tmp_path, scanned):
    root = make_corpus(tmp_path / "c", 1)
    for name in "abc":
        write_wav(root / f"wavs/{name}.wav", _broken("nan"), subtype="FLOAT")
    write_metadata(root, ["c0001|one", "a|two", "b|three", "c|four", "nowhere|five"])
    s = scanned(root)
    assert s.counts == (1, 4)
    assert not any("were decoded" in line for line in s.report.lines())


def test_d11_statistics_of_no_usable_clip_are_bad_input(tmp_path, tokenizer):
    root = tmp_path / "c"
    write_wav(root / "wavs/a.wav", _broken("nan"), subtype="FLOAT")
    write_metadata(root, ["a|one"])
    scan(scan_cases.settings(root, eval_fraction=0), tmp_path / "m", tokenizer, deep=False)
    settings = scan_cases.settings(root)
    with (
        scan_cases.Manifest.open(tmp_path / "m") as m,
        pytest.raises(BadInput, match=r"the one clip drawn (?s:.*)a.wav: non-finite: 1"),
    ):
        _mel_stats(settings, m, None, settings.dims, None)


# -- D13: what does not belong together ------------------------------------------------------------


def test_d13_silence_at_the_ends_and_texts_that_are_too_short(tmp_path, scanned):
    root = tmp_path / "c"
    rows = []
    for i in range(30):
        clip(root / f"wavs/good{i}.wav", 2.0)
        rows.append(f"good{i}|{sentence(i)}")
    for i in range(3):
        write_wav(
            root / f"wavs/tail{i}.wav", np.concatenate([TONE, np.zeros(6 * RATE, np.float32)])
        )
        write_wav(
            root / f"wavs/head{i}.wav", np.concatenate([np.zeros(2 * RATE, np.float32), TONE])
        )
        write_wav(
            root / f"wavs/gap{i}.wav", np.concatenate([TONE, np.zeros(4 * RATE, np.float32), TONE])
        )
        clip(root / f"wavs/yes{i}.wav", 10.0)
        rows += [f"{kind}{i}|{sentence(40 + i)} and {kind}" for kind in ("tail", "head", "gap")]
        rows.append(f"yes{i}|Yes. {i}"[: len(f"yes{i}|Yes.")])
    write_metadata(root, rows)
    s = scanned(root)
    assert s.counts == (42, 0)
    found = {f["kind"]: f for f in s.report.findings}
    assert {k: found[k]["rows"] for k in ("silence_after", "silence_before", "pause")} == {
        "silence_after": 3,
        "silence_before": 3,
        "pause": 3,
    }
    assert found["silence_after"]["message"].startswith(
        "3 clips end with more than 1.5 s of silence (longest 6.0 s: "
    )
    assert found["slow"]["rows"] >= 3
    assert "0.4 per second against 1" in found["slow"]["message"]
    assert found["slow"]["worst"][0].startswith(f"{root}/metadata.csv:")
