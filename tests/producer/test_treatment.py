"""Silence at the ends cut down and one level for all recordings: decided by the scan, the same in
training, samples and references, and part of what a run is.
"""

import numpy as np
import pytest

from common.audio.errors import DecodeError
from common.audio.treatment import Portion, Treatment
from common.data.manifest import Manifest
from common.system.errors import BadInput
from common.xtts import filterbank
from common.xtts.clips import load_clip, load_reference
from producer.batches.decode import decode
from producer.corpus.figures import Figures
from producer.corpus.page.clips import as_link
from producer.creation import prepare
from tests.support import scan_cases
from tests.support.arithmetic_runs import arithmetic_run
from tests.support.corpora import make_corpus, sentence, sine, write_metadata, write_wav

tokenizer, scanned = scan_cases.tokenizer, scan_cases.scanned
SINE_DB = 20 * np.log10(np.sqrt(0.5))  # of a sine of amplitude 1


def silence(seconds, rate=22050):
    return np.zeros(round(seconds * rate), np.float32)


def padded(before, sound, after, rate=22050, amplitude=0.5):
    """Silence, a tone, silence; the tone begins and ends on frames of 20 ms."""
    tone = sine(round(sound * rate), 440, rate, amplitude)
    return np.concatenate([silence(before, rate), tone, silence(after, rate)])


def corpus(root, samples, rates=None, suffix=".wav"):
    for i, x in enumerate(samples):
        write_wav(root / f"wavs/c{i}{suffix}", x, (rates or [22050] * 99)[i])
    write_metadata(root, [f"c{i}|{sentence(i)}" for i in range(len(samples))])
    return root


@pytest.mark.parametrize("rate", [22050, 48000, 16000])
def test_ends_are_cut_down_to_what_is_asked_for(tmp_path, scanned, rate):
    root = corpus(tmp_path / "c", [padded(0.8, 2.0, 1.2, rate)] * 2, [rate] * 2, ".flac")
    s = scanned(root, trim_s=0.2, eval_fraction=0)
    u = s.utterances[0]
    assert u.portion == Portion(round(0.6 * rate), round(2.4 * rate), 1.0)
    assert u.num_samples == round(2.4 * 22050)
    assert u.source_frames == round(4.0 * rate)
    assert s.report.notes[-1] == (
        "silence at the ends cut down to 0.2 s in 2 of 2 recordings, 3.2 s in all"
    )
    whole, cut = decode(u.path), decode(u.path, portion=u.portion)
    assert len(cut) == u.num_samples
    want = whole[round(0.6 * 22050) :][: u.num_samples]
    np.testing.assert_allclose(cut, want, atol=0 if rate == 22050 else 2e-3)


def test_less_silence_than_may_stay_is_left(tmp_path, scanned):
    root = corpus(tmp_path / "c", [padded(0.1, 1.0, 0.14), padded(0.0, 1.0, 0.4)])
    one, two = scanned(root, trim_s=0.14, eval_fraction=0).utterances
    assert one.portion == Portion(0, len(padded(0.1, 1.0, 0.14)), 1.0)
    assert two.portion == Portion(0, round(1.14 * 22050), 1.0)


def test_a_part_is_that_part_of_what_is_used(tmp_path):
    rng = np.random.default_rng(0)
    for rate, name in ((22050, "a.wav"), (44100, "b.flac"), (22050, "c.ogg")):
        x = (0.1 * rng.standard_normal(4 * rate)).astype(np.float32)
        path = write_wav(tmp_path / name, x, rate)
        portion = Portion(rate // 3, 3 * rate, 1.5)
        whole = decode(path, portion=portion)
        part = decode(path, 5000, 20000, portion=portion)
        exact = name != "b.flac"
        np.testing.assert_allclose(part, whole[5000:25000], atol=0 if exact else 1e-4)
        end = decode(path, len(whole) - 9000, 9000, portion=portion)
        np.testing.assert_allclose(end, whole[-9000:], atol=0 if exact else 1e-4)


def test_one_level_for_all_unless_a_peak_forbids_it(tmp_path, scanned):
    click = sine(2 * 22050, 440, amplitude=0.05)
    click[9000] = 0.9
    loud = 3.0 * sine(2 * 22050, 440, amplitude=0.5)  # stored as floats above full scale
    root = tmp_path / "c"
    for i, x in enumerate([sine(44100, amplitude=0.05), sine(44100, amplitude=0.9), click, loud]):
        write_wav(root / f"wavs/c{i}.wav", x, subtype="FLOAT")
    write_metadata(root, [f"c{i}|{sentence(i)}" for i in range(4)])
    s = scanned(root, level_db=-20, eval_fraction=0)
    heard = [decode(u.path, portion=u.portion) for u in s.utterances]
    levels = [10 * np.log10(np.mean(np.square(x, dtype=np.float64))) for x in heard]
    for i in (0, 1, 3):
        assert levels[i] == pytest.approx(-20, abs=0.1)
    assert np.abs(heard[2]).max() == pytest.approx(1.0, abs=1e-6)
    assert levels[2] == pytest.approx(20 * np.log10(0.05 / 0.9) + SINE_DB, abs=0.1)
    assert s.report.notes[-1].startswith("4 recordings brought to -20 dBFS where they sound, gains")
    assert s.report.notes[-1].endswith("1 is softer, since its peak would exceed full scale")


def test_findings_and_limits_are_of_what_is_used(tmp_path, scanned):
    root = corpus(tmp_path / "c", [padded(0, 8.0, 6.0)] + [padded(0, 2.0, 0)] * 3)
    as_it_is = scanned(root, eval_fraction=0)
    assert as_it_is.reasons["c0"].startswith("14.00 s > 11.61 s")
    trimmed = scanned(root, trim_s=0.3, eval_fraction=0)
    assert trimmed.counts == (4, 0)
    assert not [f for f in trimmed.report.findings if f["kind"] == "silence_after"]
    root = corpus(tmp_path / "d", [padded(2.0, 2.0, 2.0)] * 3)
    kinds = {f["kind"] for f in scanned(root, level_db=-20).report.findings}
    assert {"silence_after", "silence_before"} <= kinds
    assert scanned(root, trim_s=0.3, reject=["silence_after", "slow"]).counts == (3, 0)


def test_every_recording_of_a_large_corpus_is_looked_at(tmp_path, scanned, monkeypatch):
    monkeypatch.setattr("producer.corpus.scan.DEEP_FILES", 4)
    monkeypatch.setattr("producer.corpus.scan.SAMPLED_FILES", 2)
    root = corpus(tmp_path / "c", [padded(0, 1.0, 1.0 + 0.02 * i) for i in range(9)])
    s = scanned(root, trim_s=0.1, eval_fraction=0)
    assert {u.num_samples for u in s.utterances} == {round(1.1 * 22050)}
    assert not [n for n in s.report.notes if "were decoded" in n]


def test_what_is_known_of_a_file_serves_other_settings(tmp_path, scanned, tokenizer, monkeypatch):
    """Remembered facts describe the recording, however it was treated."""
    root = corpus(tmp_path / "c", [padded(1.0, 2.0, 1.0)] * 3)
    scanned(root, trim_s=0.1, eval_fraction=0)
    (tmp_path / "run.manifest").rename(tmp_path / "first")
    monkeypatch.setattr("producer.corpus.headers.open_audio", None)
    with Manifest.open(tmp_path / "first") as previous:
        again = scanned(root, trim_s=0.5, eval_fraction=0, options={"previous": previous})
    assert {u.num_samples for u in again.utterances} == {3 * 22050}


def test_a_manifest_without_treatment_is_as_before(tmp_path, scanned):
    root = corpus(tmp_path / "c", [padded(1.0, 2.0, 1.0)] * 3)
    plain, treated = scanned(root), scanned(root, trim_s=0.1)
    assert [u.portion for u in plain.utterances] == [None] * 3
    other = scanned(root, trim_s=0.1, level_db=-20)
    assert len({plain.digest, treated.digest, other.digest}) == 3


def test_references_and_samples_hear_what_training_hears(tmp_path, scanned):
    root = corpus(tmp_path / "c", [padded(1.0, 2.0, 1.0, amplitude=0.05)] * 2)
    u = scanned(root, trim_s=0.2, level_db=-20, eval_fraction=0).utterances[0]
    np.testing.assert_array_equal(load_clip(u.path, portion=u.portion), decode_of(u))
    assert as_link(u)[0].startswith("data:audio/mpeg")
    found = load_reference(u.path, treatment=Treatment(0.1, -20))
    assert len(found.wav) == pytest.approx(2.2 * 22050, abs=0.021 * 22050)
    sound = found.wav[2205:-2205]
    level = 10 * np.log10(np.mean(np.square(sound, dtype=np.float64)))
    assert level == pytest.approx(-20, abs=0.1)
    assert load_reference(u.path).wav.max() == pytest.approx(0.05, abs=1e-3)


def decode_of(u):
    return decode(u.path, source_frames=u.source_frames, portion=u.portion)


def test_it_is_part_of_what_a_run_is(tmp_path):
    root = make_corpus(tmp_path / "corpus", 30, seconds=lambda i: 0.6 + 0.05 * (i % 9))
    quiet = silence(1.0)
    for i in range(30):
        path = root / f"wavs/c{i + 1:04d}.wav"
        write_wav(path, np.concatenate([decode(path), quiet]))
    run = arithmetic_run(tmp_path, data__trim_s=0.1)
    assert max(u.num_samples for u in run.manifest) < 1.2 * 22050
    again = arithmetic_run(tmp_path, data__trim_s=0.1)
    assert again.feature_hash("gpt") == run.feature_hash("gpt")
    with pytest.raises(BadInput, match=r"data\.trim_s: 0\.1 there, 0\.2 now"):
        arithmetic_run(tmp_path, data__trim_s=0.2)


def test_statistics_are_of_what_is_used(tmp_path):
    root = corpus(tmp_path / "c", [padded(1.0, 1.0, 1.0, amplitude=0.1)] * 3)
    config = scan_cases.settings(root, trim_s=0.1, level_db=-20, eval_fraction=0)
    manifest = tmp_path / "m"
    vocabulary = prepare.make_vocabulary(config, prepare.read_rows(config), None, print)
    prepare.scan(config, manifest, vocabulary)
    with Manifest.open(manifest) as m:
        stats = prepare._mel_stats(config, m, None, config.dims, None)
        want = filterbank.mel_stats(iter([decode_of(u) for u in m]))
    np.testing.assert_array_equal(stats, want)


def test_a_portion_that_is_not_there_any_more_is_told(tmp_path):
    path = write_wav(tmp_path / "x.wav", sine(22050))
    with pytest.raises(DecodeError, match="changed since the scan"):
        decode(path, source_frames=30000, portion=Portion(100, 29000, 1.0))
    with pytest.raises(DecodeError, match="changed since the scan"):
        decode(path, portion=Portion(100, 29000, 1.0))


def test_treatment_is_suggested_where_the_recordings_ask_for_it(tmp_path, scanned):
    soft_to_loud = [padded(0.1, 2.0, 0.1, amplitude=0.02 * 1.2**i) for i in range(20)]
    soft_to_loud[3] = padded(0.1, 1.0, 2.0, amplitude=0.1)
    root = corpus(tmp_path / "c", soft_to_loud)
    found = scanned(root, eval_fraction=0)
    config = scan_cases.settings(root)
    said = {s.setting: s.why for s in Figures.of(found.result.path, config).suggestions}
    assert said["data.trim_s=0.3"] == "1 clip or more begin or end with long silence"
    # Levels of 0.02 * 1.2^i: -37.0 dBFS and 1.58 more each, without the fourth, which lies at -23.
    assert said["data.level_db=-22"] == "nine recordings in ten lie between -35 and -8 dBFS"
    treated = scan_cases.settings(root, trim_s=0.3, level_db=-20)
    assert not [
        s for s in Figures.of(found.result.path, treated).suggestions if "data." in s.setting
    ]
