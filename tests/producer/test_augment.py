"""`augment`: recordings changed by counters alone, so that whoever makes a batch makes the same
bytes; codes of what was changed are never kept.
"""

import os
import sqlite3

import numpy as np
import pytest

from tests.support.arithmetic_runs import arithmetic_run, edit_identity
from tests.support.corpora import sine, write_wav
from tests.support.producer_runs import STATS, make_run

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from common.run.folder import RunFolder
from common.run.sections import Augment
from common.system.errors import BadInput
from common.transport.wire import digest
from common.xtts.filterbank import log_mel_numpy
from producer.batches.augment import Change, change_of, probe_change
from producer.batches.cache import stamp_of
from producer.batches.crops import crop_frames
from producer.batches.decode import DecodePool, decode
from producer.batches.dvae import DvaeMaker
from producer.batches.gpt import GptMaker

AUDIO = {"cond_min_samples": 11008, "cond_max_samples": 22016, "cond_eval_samples": 16512}
LENGTHS = [1.0, 1.3, 1.6, 1.1, 2.0, 1.2, 1.7, 1.4, 1.0, 1.5]
RATE = 22050


def power(x):
    return float(np.mean(np.square(x, dtype=np.float64)))


def db(ratio):
    return 10 * np.log10(ratio)


# -- one change ------------------------------------------------------------------------------------


def test_gain_is_exact_and_never_exceeds_full_scale():
    wave = sine(4000, amplitude=0.25)
    np.testing.assert_allclose(Change(0, gain_db=20 * np.log10(2))(wave), 2 * wave, rtol=1e-6)
    np.testing.assert_allclose(Change(0, gain_db=-6.0)(wave), wave * 10**-0.3, rtol=1e-6)
    loud = Change(0, gain_db=30.0)(wave)
    assert np.abs(loud).max() == 1
    np.testing.assert_allclose(loud, wave / np.abs(wave).max(), atol=1e-6)


def test_a_band_ends_where_it_is_said_to():
    inside = slice(2000, -2000)
    for hz, kept in ((500, 1), (3000, 1), (4100, 0), (8000, 0)):
        out = Change(0, band_hz=4000.0)(sine(RATE, hz))[inside]
        assert power(out) == pytest.approx(0.125 * kept, abs=1e-4), hz


@pytest.mark.parametrize(("slope", "ratio_db"), [(0.0, 0.0), (1.0, 10.0), (2.0, 20.0)])
def test_a_noise_has_its_level_and_its_colour(slope, ratio_db):
    wave = sine(8 * RATE, 440, amplitude=0.1)
    noise = Change(7, noise_db=12.0, slope=slope)(wave).astype(np.float64) - wave
    assert db(power(wave) / power(noise)) == pytest.approx(12, abs=0.1)
    spectrum = np.square(np.abs(np.fft.rfft(noise)))
    low, high = (spectrum[h * 8 : (h + 100) * 8].mean() for h in (800, 8450))  # 850 and 8 500 Hz
    assert db(low / high) == pytest.approx(ratio_db, abs=0.7)


def test_a_room_dies_away_in_its_time_and_keeps_the_level():
    click = np.zeros(RATE, np.float32)
    click[0] = 0.5
    change = Change(3, room_s=0.3, direct_db=0.0, echo_s=0.01)
    out = change(click).astype(np.float64)
    assert not np.abs(out[1:220]).max() > 1e-6  # nothing before the first echo
    assert power(out) == pytest.approx(power(click), rel=1e-4)
    assert np.square(out[0]) == pytest.approx(np.square(out[220:]).sum(), rel=1e-3)  # 0 dB
    left = db(np.cumsum(np.square(out[::-1]))[::-1] + 1e-30)
    at = [int(np.argmax(left < left[220] - d)) for d in (5, 25)]
    assert (at[1] - at[0]) / RATE == pytest.approx(0.1, rel=0.1)  # 20 of 60 dB


def test_a_change_depends_on_its_numbers_alone():
    wave = sine(30000, 440, amplitude=0.3)
    once = probe_change()(wave)
    assert once.dtype == np.float32
    assert once.shape == wave.shape
    np.testing.assert_array_equal(once, probe_change()(wave.copy()))
    np.testing.assert_array_equal(wave, sine(30000, 440, amplitude=0.3))
    assert not np.array_equal(once, Change(**{**vars(probe_change()), "seed": 2})(wave))
    assert not Change(0, room_s=0.2, noise_db=20.0, band_hz=5000.0)(0 * wave).any()


# -- which change ----------------------------------------------------------------------------------


def test_rows_are_changed_as_often_and_as_far_as_the_settings_say():
    augment = Augment(share=0.4, gain_db=6, band_hz=3400, noise_db=15, room_s=0.4)
    drawn = [change_of(augment, 1000 + i, i) for i in range(4000)]
    changes = [c for c in drawn if c is not None]
    assert len(changes) / 4000 == pytest.approx(0.4, abs=0.025)  # three deviations
    shares = {
        "gain": np.mean([c.gain_db != 0 for c in changes]),
        "band": np.mean([c.band_hz is not None for c in changes]),
        "noise": np.mean([c.noise_db is not None for c in changes]),
        "room": np.mean([c.room_s is not None for c in changes]),
    }
    # A half, and a quarter of the sixteenth that would have none.
    assert shares == pytest.approx(dict.fromkeys(shares, 0.5 + 1 / 64), abs=0.04)
    for name, low, high in (
        ("gain_db", -6, 6),
        ("band_hz", 3400, 10000),
        ("noise_db", 15, 40),
        ("room_s", 0.1, 0.4),
    ):
        values = [getattr(c, name) for c in changes if getattr(c, name)]
        assert low <= min(values) < low + 0.02 * (high - low), name
        assert high >= max(values) > high - 0.02 * (high - low), name
    assert all(c == change_of(augment, 1000 + i, i) for i, c in enumerate(drawn))
    # Another utterance of the row: another noise in the same place.
    other = change_of(augment, 1000 + drawn.index(changes[0]), 77)
    assert other.seed != changes[0].seed
    assert {**vars(other), "seed": 0} == {**vars(changes[0]), "seed": 0}


def test_what_is_off_does_not_occur():
    assert change_of(Augment(), 5, 5) is None
    only = Augment(share=1, gain_db=0, band_hz=None, noise_db=20, room_s=None)
    changes = [change_of(only, i, i) for i in range(200)]
    assert all(c.noise_db and not (c.gain_db or c.band_hz or c.room_s) for c in changes)
    nothing = Augment(share=1, gain_db=0, band_hz=None, noise_db=None, room_s=None)
    assert change_of(nothing, 5, 5) is None


# -- batches ---------------------------------------------------------------------------------------


class Samples(GptMaker):
    """Stage 2 whose features are the samples themselves, so that what is computed from is seen;
    `heard`: float32[B, …] of the last batch, by "cond" and "codes".
    """

    def __init__(self, run):
        super().__init__(run)
        self.heard = {}

    def _call(self, shape, body, values):
        if shape[0] == "cond":
            self.heard["cond"] = values
            frames, mels = self._empty(self.plan("train", 0))["cond_mel"].shape[1:]
            return values[:, : frames * mels].reshape(-1, frames, mels).astype(np.float16)
        self.heard["codes"] = values
        sums = np.abs(values).reshape(len(values), -1, 1024).sum(2)
        return (7919 * sums).astype(np.int32) % 1000


def run_of(folder, **sections):
    return make_run(
        folder, LENGTHS, num_eval=2, audio=AUDIO, speakers="aabbaabbaa",
        batching={"batch_size": 4, "buckets": 2, **sections.pop("batching", {})}, **sections,
    )  # fmt: skip


@pytest.fixture
def samples(monkeypatch):
    """Makers without a network."""
    monkeypatch.setattr("producer.batches.gpt.load_dvae", lambda run: None)
    monkeypatch.setattr(RunFolder, "feature_hash", lambda self, stage: f"{stage}-features")
    return Samples


def make(maker, planned):
    clips = maker.clips(planned)
    decoded = []
    for c in clips:
        wave = decode(c.utterance.path, c.start, c.num_samples, portion=c.utterance.portion)
        decoded.append(wave if c.change is None else c.change(wave))
    maker.heard = {}
    made = maker.make(planned, clips, decoded)
    assert not made.bad
    return made


def batches(maker, numbers, plan="train"):
    return {g: make(maker, maker.plan(plan, g)) for g in numbers}


def digests(found):
    return {g: digest(m.arrays) for g, m in found.items()}


ALL = {"share": 0.5, "gain_db": 6, "band_hz": 3400, "noise_db": 10, "room_s": 0.3}
UNKEPT = {"leases": 2, "decode_threads": 2, "cache_codes": False}


def changes_of(maker, planned, augment):
    """(row, utterance, what is done to it), as the settings say."""
    for row, u in maker._utterances(planned.utterances):
        yield row, u, change_of(Augment(**augment), int(planned.row_seeds[row]), u.id)


@pytest.mark.parametrize("of", ["prompt", "clip"])
@pytest.mark.parametrize("prompt", ["own", "speaker"])
def test_whoever_makes_a_batch_makes_the_same_bytes(tmp_path, samples, of, prompt):
    """A producer that has gone through three epochs, one that takes over half way with the codes
    that the first has kept by then, and one without any kept codes.
    """
    sections = {"augment": {**ALL, "of": of}, "batching": {"prompt": prompt}}
    run = run_of(tmp_path / "a", **sections)
    count = 3 * run.plan("gpt", "train").batches_per_epoch
    first = samples(run)
    half = batches(first, range(count // 2))
    after_a_kill = batches(samples(run), range(count // 2, count))
    rest = batches(first, range(count // 2, count))
    assert digests(rest) == digests(after_a_kill)
    alone = run_of(tmp_path / "b", **sections, producers=UNKEPT)
    found = batches(samples(alone), range(count))
    assert digests(half | rest) == digests(found)
    assert (
        sum(m.num_cached for m in found.values())
        == 0
        < sum(m.num_cached for m in after_a_kill.values())
    )


def test_a_changed_prompt_leaves_what_is_predicted_alone(tmp_path, samples):
    clean, maker = samples(run_of(tmp_path / "clean")), samples(run_of(tmp_path / "a", augment=ALL))
    seen = {True: 0, False: 0}
    for g in range(2 * maker._plans["train"].batches_per_epoch):
        planned = maker.plan("train", g)
        got, want = make(maker, planned).arrays, make(clean, planned).arrays
        assert {k for k in got if not np.array_equal(got[k], want[k])} <= {"cond_mel"}
        for row, u, change in changes_of(maker, planned, ALL):
            at, n = maker._prompt(planned, row, u.num_samples)
            wave = decode(u.path)[at : at + n]
            heard = maker.heard["cond"][row]
            np.testing.assert_array_equal(heard[:n], wave if change is None else change(wave))
            assert not heard[n:].any()
            seen[change is None] += 1
    assert min(seen.values()) > 3


@pytest.mark.parametrize("rate", [22050, 16000])
def test_codes_of_a_changed_clip_are_its_own_and_are_not_kept(tmp_path, samples, rate):
    augment, seen = {**ALL, "of": "clip"}, {True: 0, False: 0}
    run = run_of(tmp_path / "a", augment=augment)
    if rate != 22050:
        at_another_rate(run, rate)
    maker, kept = samples(run), {}
    for g in range(4 * maker._plans["train"].batches_per_epoch):
        planned = maker.plan("train", g)
        made = make(maker, planned)
        for row, u, change in changes_of(maker, planned, augment):
            wave = decode(u.path)
            at, n = maker._prompt(planned, row, u.num_samples)
            seen[change is None] += 1
            known = u.id in kept and change is None
            if change is not None:
                wave = change(wave)
                np.testing.assert_array_equal(maker.heard["cond"][row, :n], wave[at : at + n])
            if not known:
                np.testing.assert_array_equal(maker.heard["codes"][row, : len(wave)], wave)
            elif "codes" in maker.heard:
                assert not maker.heard["codes"][row].any()
            if change is None:
                kept[u.id] = u
        assert made.num_cached <= sum(c is None for _, _, c in changes_of(maker, planned, augment))
    assert min(seen.values()) > 8
    assert kept
    for u in kept.values():
        wav = np.zeros((1, -(-u.num_samples // 1024) * 1024), np.float32)
        wav[0, : u.num_samples] = decode(u.path)
        got = maker._cache.get(u.id, wav.shape[1] // 1024, stamp_of(u.path))
        np.testing.assert_array_equal(got, maker._call((1, 1), None, wav)[0])


def at_another_rate(run, rate):
    """The run's recordings, and what its manifest says of them, at another rate."""
    db = sqlite3.connect(run.path / "manifest.sqlite")
    for i, s in enumerate(LENGTHS):
        write_wav(run.path / f"clips/c{i}.wav", sine(round(s * rate), 200 + 37 * i, rate), rate)
        db.execute(
            "UPDATE utterances SET source_rate = ?, source_frames = ? WHERE id = ?",
            (rate, round(s * rate), i),
        )
    db.commit()
    db.close()


@pytest.mark.parametrize("of", ["prompt", "clip"])
def test_an_evaluation_hears_recordings_as_they_are(tmp_path, samples, of):
    plain = samples(run_of(tmp_path / "a"))
    other = samples(run_of(tmp_path / "b", augment={**ALL, "share": 1, "of": of}))
    assert digests(batches(plain, [0], "eval")) == digests(batches(other, [0], "eval"))
    assert digests(batches(plain, [0])) != digests(batches(other, [0]))


def test_crops_of_stage_one_are_parts_of_the_changed_clip(tmp_path):
    augment = {**ALL, "of": "clip"}
    maker, seen = DvaeMaker(run_of(tmp_path / "a", augment=augment)), {True: 0, False: 0}
    for plan, numbers in (("train", range(4)), ("eval", range(1))):
        for g in numbers:
            planned = maker.plan(plan, g)
            got = make(maker, planned).arrays["mel"]
            for row, u, change in changes_of(maker, planned, augment):
                change, wave = None if plan == "eval" else change, decode(u.path)
                wave = wave if change is None else change(wave)
                seed, audio = int(planned.row_seeds[row]), maker.dims.audio
                first, n = crop_frames(u.num_samples, seed, 64, audio, plan == "train")
                want = (log_mel_numpy(wave, 1024) / STATS)[first : first + n]
                np.testing.assert_allclose(got[row, :n], want, atol=6e-3)
                seen[change is None] += 1
    assert min(seen.values()) > 3
    spared = DvaeMaker(run_of(tmp_path / "b", augment={**ALL, "share": 1}))
    assert not [c for c in spared.clips(spared.plan("train", 0)) if c.change]


def test_decode_threads_change_what_they_decode(tmp_path):
    run = run_of(tmp_path / "a")
    path = next(iter(run.manifest)).path
    change = Change(1, gain_db=-6.0)
    with DecodePool(1) as pool:
        got = pool.submit(path, 100, 5000, change=change).result(30)
    np.testing.assert_array_equal(got, change(decode(path, 100, 5000)))


def test_producers_that_change_recordings_otherwise_differ(tmp_path):
    plain, other = (DvaeMaker(run_of(tmp_path / n, augment=a)) for n, a in (("a", {}), ("b", ALL)))
    assert plain.probe() != other.probe()


def test_it_is_part_of_what_a_run_is(tmp_path):
    run = arithmetic_run(tmp_path / "r")
    assert run.identity["augment"] is None
    edit_identity(run.path, without="augment")  # of the time before
    arithmetic_run(tmp_path / "r")
    with pytest.raises(BadInput, match=r"augment\.share: 0\.0 there, 0\.5 now"):
        arithmetic_run(tmp_path / "r", augment__share=0.5)
    changed = arithmetic_run(tmp_path / "s", augment__share=0.5)
    assert changed.identity["augment"]["noise_db"] == 15
    with pytest.raises(BadInput, match=r"augment\.of: 'prompt' there, 'clip' now"):
        arithmetic_run(tmp_path / "s", augment__share=0.5, augment__of="clip")
