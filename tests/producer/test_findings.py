"""Clips and texts that are out of line: each a finding with its rows, and each may be set to
reject.
"""

import contextlib
import typing

import numpy as np
import pytest
import soundfile

from common.audio.errors import DecodeError
from common.audio.levels import require_sound, shape
from common.data.corpus_terms import FindingKind, Format
from common.system.errors import BadInput
from producer.corpus.findings import MESSAGES, REASONS, misfits
from producer.corpus.headers import facts_of
from producer.corpus.languages import WORDS
from producer.corpus.readers import READERS
from producer.corpus.rows import read_rows
from tests.support import scan_cases
from tests.support.corpora import make_corpus, sentence, sine, write_metadata, write_wav

tokenizer, scanned = scan_cases.tokenizer, scan_cases.scanned
RATE = 22050
GERMAN = "die frau und der mann sind nicht mehr in das haus mit den blumen"


def voice(n=2 * RATE, low=110.0, high=9000.0):
    """Harmonics of a low voice with the noise of consonants, up to `high` Hz."""
    t, rng = np.arange(n) / RATE, np.random.default_rng(0)
    spectrum = np.fft.rfft(rng.standard_normal(n))
    spectrum[round(high * n / RATE) :] = 0
    noise = np.fft.irfft(spectrum, n)
    tones = sum(np.sin(2 * np.pi * k * low * t) / k for k in range(1, 30) if k * low < high)
    return (0.1 * tones + 0.01 * noise / np.abs(noise).max()).astype(np.float32)[:, None]


def test_the_names_in_the_settings_are_those_of_the_code():
    assert set(typing.get_args(FindingKind)) == set(MESSAGES) == set(REASONS)
    assert set(typing.get_args(Format)) == {"auto", *READERS}


def test_a_band_and_a_hum_are_heard():
    t = np.arange(2 * RATE)[:, None] / RATE
    assert (shape(voice(), RATE).band_hz, shape(voice(), RATE).hum_hz) == (0, 0)
    assert shape(voice(high=3400), RATE).band_hz == pytest.approx(3400, abs=120)
    for mains in (50, 60):
        hum = 0.01 * np.sin(2 * np.pi * mains * t).astype(np.float32)
        assert shape(voice() + hum, RATE).hum_hz == mains
        assert shape(voice() + 0.01 * hum, RATE).hum_hz == 0
    for hz in (50, 440):
        assert shape(sine(RATE, hz)[:, None], RATE).band_hz == 0  # a tone is no voice


@pytest.mark.parametrize("parts", ["v0000", "0000v", "v0000v", "vv"])
def test_a_band_is_that_of_what_sounds(parts):
    """Digital silence in the middle of a recording has nothing above any frequency."""
    for high, band in ((9000.0, 0), (3400.0, 3400)):
        sound = {"v": voice(high=high), "0": np.zeros((RATE, 1), np.float32)}
        wave = np.concatenate([sound[c] for c in parts])
        assert shape(wave, RATE).band_hz == pytest.approx(band, abs=120)


def test_silence_is_measured_where_it_lies():
    x = np.concatenate(
        [np.zeros(RATE), sine(RATE), np.zeros(2 * RATE), sine(RATE), np.zeros(RATE // 2)]
    ).astype(np.float32)
    found = shape(x[:, None], RATE)
    assert (found.lead_s, found.pause_s, found.tail_s) == pytest.approx((1.0, 2.0, 0.5), abs=0.03)
    assert found.level_db == pytest.approx(20 * np.log10(0.5 / np.sqrt(2)), abs=0.1)


def test_what_a_few_samples_settle_all_samples_would():
    """The quick look may pass nothing that the whole would refuse."""
    rng = np.random.default_rng(0)
    for n in rng.integers(2000, 60000, 60):
        x = np.zeros((int(n), 1), np.float32)
        for _ in range(rng.integers(1, 12)):
            at, width = rng.integers(0, n), rng.integers(1, 2000)
            x[at : at + width] = rng.uniform(5e-4, 0.5)
        some = np.sort(x[:: max(1, len(x) // 512), 0])
        frames = [
            np.abs(x[i : i + 441] - some[len(some) // 2]).max() > 1e-3
            for i in range(0, len(x), 441)
        ]
        enough = sum(frames) * 0.02 >= min(0.15, n / RATE / 2)
        with contextlib.nullcontext() if enough else pytest.raises(DecodeError, match="silent"):
            require_sound("x", x, RATE)


def corpus(root):
    """Forty clips with nothing wrong, then one of each kind of misfit; returns what may be rejected
    of each row.
    """
    rows, misfit = [], {}
    for i in range(40):
        write_wav(root / f"wavs/good{i}.wav", sine(2 * RATE, 200 + i))
        rows.append(f"good{i}|{sentence(i)}|ann")

    def add(name, samples, kind, text=None, rate=RATE, speaker="ann"):
        write_wav(
            root / f"wavs/{name}.wav",
            samples,
            rate,
            subtype="PCM_16" if kind == "same_audio" else "FLOAT",
        )
        rows.append(f"{name}|{text or sentence(100 + len(rows))}|{speaker}")
        misfit[name] = kind

    quiet, second = 0 * sine(2 * RATE), sine(RATE, 333)
    add("loud", 3 * sine(2 * RATE, 301), "loud")
    add("clip", np.clip(3 * sine(2 * RATE, 302), -1, 1), "clipped")
    add("rate", sine(16000, 303, 8000), "low_rate", rate=8000)
    add("soft", 0.005 * sine(2 * RATE, 304), "quiet")
    add("dc", 0.5 * sine(2 * RATE, 305) + np.float32(0.3), "offset")
    add("cancel", np.stack([sine(2 * RATE, 306), -sine(2 * RATE, 306)], 1), "cancelled")
    add("dead", np.stack([sine(2 * RATE, 307), quiet], 1), "dead_channel")
    add("phone", voice(high=3400), "band_limited")
    add("hum", voice() + 0.02 * sine(2 * RATE, 50)[:, None], "hum")
    add("head", np.r_[quiet, second], "silence_before")
    add("tail", np.r_[second, quiet], "silence_after")
    add("gap", np.r_[second, quiet, quiet, second], "pause")
    add("fast", sine(RATE, 308), "fast", sentence(7) + " " + sentence(8) + " " + sentence(9))
    add("slow", sine(5 * RATE, 309), "slow", "yes")
    add("quick", sine(RATE, 310), "faster_than_most", "a " + sentence(3))
    add("again", sine(2 * RATE, 200), "same_audio")
    add("words", sine(2 * RATE, 311), "same_text", sentence(5))
    add("lone", sine(2 * RATE, 312), "lone_speaker", speaker="bob")
    write_metadata(root, ["audio_file|text|speaker", *rows])
    return misfit


def test_each_finding_may_be_set_to_reject(tmp_path, scanned):
    root = tmp_path / "c"
    misfit = corpus(root)
    s = scanned(root, eval_fraction=0)
    assert s.counts == (40 + len(misfit), 0)
    names = {f"{root}/metadata.csv:{u.id + 2}": u.name for u in s.utterances}
    found = {f["kind"]: {names[w] for w in f["worst"]} for f in s.report.findings}
    entries = read_rows(scan_cases.settings(root)).entries
    looked = [(entry, facts_of(entry.row.place, True)) for entry in entries]
    for name, kind in misfit.items():
        assert name in found[kind], (name, kind, found[kind])
        assert not any(n.startswith("good") for n in found[kind])
        left_out = misfits(looked, [kind])
        assert {names[where] for where in left_out} == found[kind]
        assert {kind for _, kind in left_out.values()} == {f"{kind} (data.reject)"}
    all_kinds = scanned(root, eval_fraction=0, reject=sorted(set(misfit.values())))
    assert all_kinds.counts == (40, len(misfit))
    assert all_kinds.reasons["tail"] == "2.0 s of silence after the words"
    assert all_kinds.report.tally["silence_after (data.reject)"] == 1


def others(root, second):
    """Rows of the kinds that are of several rows, of texts and of files: row → kind. `second`: a
    corpus for evaluation that shares a recording.
    """
    rows, misfit = [], {}
    for i in range(40):
        write_wav(root / f"wavs/good{i}.wav", sine(2 * RATE, 200 + i))
        rows.append(f"good{i}|{sentence(i)}")

    def add(name, kind, text=None, samples=None):
        if samples is not None:
            write_wav(root / f"wavs/{name.rpartition('/')[2]}.wav", samples)
        rows.append(f"{name}|{text or sentence(100 + len(rows))}")
        misfit[name] = kind

    add("murmur", "softer_than_most", samples=sine(2 * RATE, 301, amplitude=0.03))
    add("wavs/good3.wav", "shared")
    add("script", "other_script", "کتاب خوب است river", sine(2 * RATE, 302))
    # 251 characters in 11 s are 23 per second, as fast as the others
    add("epic", "long_text", " ".join(["river"] * 42)[:251], sine(11 * RATE, 303))
    write_wav(root / "elsewhere/deep/found.wav", sine(2 * RATE, 304))
    add("C:\\old\\found.wav", "found_by_name")
    add("stream", "doubtful_end")
    soundfile.write(root / "wavs/stream.ogg", sine(2 * RATE, 305), RATE, format="OGG")
    unmarked = bytearray((root / "wavs/stream.ogg").read_bytes())
    unmark_last_page(unmarked)
    (root / "wavs/stream.ogg").write_bytes(unmarked)
    write_metadata(root, rows)
    write_metadata(second, [f"../{root.name}/wavs/good7.wav|{sentence(7)}"])
    return misfit


def unmark_last_page(ogg: bytearray):
    """Take the mark of the stream's end off its last page, and mend the page's checksum."""
    at = ogg.rindex(b"OggS")
    ogg[at + 5] &= ~4
    ogg[at + 22 : at + 26] = bytes(4)
    crc = 0
    for byte in ogg[at:]:
        crc ^= byte << 24
        for _ in range(8):
            crc = (crc << 1) ^ (0x04C11DB7 if crc & 0x80000000 else 0)
            crc &= 0xFFFFFFFF
    ogg[at + 22 : at + 26] = crc.to_bytes(4, "little")


def test_every_other_finding_may_be_set_to_reject(tmp_path, scanned):
    """Together with the ones above and below, all kinds there are."""
    root, second = tmp_path / "c", tmp_path / "d"
    misfit = others(root, second)
    data = {"val": [{"path": str(second)}], "max_text_tokens": 400}
    s = scanned(root, **data)
    assert s.counts == (40 + len(misfit) + 1, 0)
    found = {f["kind"]: f["worst"] for f in s.report.findings}
    lines = {f"{root}/metadata.csv:{u.id + 1}": u.name for u in s.utterances}
    for name, kind in misfit.items():
        assert [lines[w] for w in found[kind]] == [name], kind
    assert found["in_both"] == [f"{second}/metadata.csv:1"]
    kinds = sorted({*misfit.values(), "in_both"} - {"in_both"})
    left = scanned(root, **data, reject=kinds)
    assert left.counts == (41, len(misfit))
    assert {r.id: r.kind for r in left.rejects} == {
        name: f"{kind} (data.reject)" for name, kind in misfit.items()
    }
    named = {"in_both", "other_language", *misfit.values(), *corpus(tmp_path / "e").values()}
    assert named == set(MESSAGES)


def test_a_corpus_may_do_without_what_it_evaluates_on(tmp_path, scanned):
    root = make_corpus(tmp_path / "c", 8)
    write_metadata(tmp_path / "d", [f"../c/wavs/c000{i}.wav|{sentence(i)}" for i in (1, 2)])
    make_corpus(tmp_path / "d2", 2, freq=900)
    data = {"val": [{"path": str(tmp_path / "d")}, {"path": str(tmp_path / "d2")}]}
    assert scanned(root, **data).counts == (12, 0)
    left = scanned(root, **data, reject=["in_both"])
    assert left.counts == (10, 2)
    assert set(left.reasons.values()) == {"in data.train and in data.val"}


def test_a_language_that_is_not_the_one_said(tmp_path, scanned):
    root = make_corpus(
        tmp_path / "c", 20, 3.0, text=lambda i: f"{GERMAN} {sentence(i, 2)}", freq=lambda i: 300 + i
    )
    (found,) = [f for f in scanned(root).report.findings if f["kind"] == "other_language"]
    assert found["rows"] == 20
    assert (
        "look like another language than they are said to be: en, of whose common words they have"
        in found["message"]
    )
    assert "of those of de; set data.language" in found["message"]
    with pytest.raises(BadInput, match="other_language \\(data.reject\\) 20"):
        scanned(root, reject=["other_language"])
    english = "the old man and the sea is a story that was told of him by all who had been with her"
    root = make_corpus(
        tmp_path / "d",
        20,
        3.0,
        text=lambda i: f"{english} {sentence(i, 2)}",
        freq=lambda i: 300 + i,
    )
    assert not [f for f in scanned(root).report.findings if f["kind"] == "other_language"]


def test_words_of_languages_are_their_own():
    for language, words in WORDS.items():
        assert len(words) >= 20, language
        for other, others in WORDS.items():
            shared = len(words & others) / min(len(words), len(others))
            assert language == other or shared < 0.5, (language, other)


def test_rows_of_a_finding_are_the_worst_twenty(tmp_path, scanned):
    root = tmp_path / "c"
    for i in range(25):
        write_wav(
            root / f"wavs/{i}.wav",
            np.r_[sine(RATE, 300 + i), np.zeros(round((1.6 + i / 10) * RATE), np.float32)],
        )
    write_metadata(root, [f"{i}|{sentence(i)}" for i in range(25)])
    (found,) = [f for f in scanned(root).report.findings if f["kind"] == "silence_after"]
    assert (found["rows"], len(found["worst"])) == (25, 20)
    assert found["worst"][0].endswith(":25")
    assert soundfile.info(root / "wavs/24.wav").duration == pytest.approx(5.0, abs=0.01)
