"""Decoding: exact lengths, exact parts, and every kind of bad file named."""

import logging
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import soundfile

from common.audio.errors import DecodeError
from common.audio.levels import measure
from common.audio.reading import mono
from common.system.errors import Stopped
from producer.batches import decode as module
from producer.batches.decode import DecodePool, decode
from tests.support.corpora import sine, write_wav

LJ = Path(__file__).resolve().parents[3] / "shared/data/ljspeech-mini/wavs"


def peak_hz(x, rate=22050):
    return np.argmax(np.abs(np.fft.rfft(x * np.hanning(len(x)), 1 << 18))) * rate / (1 << 18)


def fails(path, match):
    with pytest.raises(DecodeError, match=match) as e:
        decode(path)
    return e.value


def test_c11_stereo_flac_at_48_khz_becomes_mono_of_exact_length_and_pitch(tmp_path):
    x = np.stack([sine(96000, 440, 48000), np.zeros(96000, np.float32)], 1)
    y = decode(write_wav(tmp_path / "a.flac", x, 48000))
    assert (y.dtype, y.shape, y.flags.c_contiguous) == (np.float32, (44100,), True)
    assert abs(peak_hz(y) - 440) < 2
    assert np.abs(y).max() == pytest.approx(0.25, abs=0.01)  # the mean of 0.5 and 0


@pytest.mark.parametrize("rate", [8000, 16000, 22050, 24000, 44100, 48000, 96000])
@pytest.mark.parametrize("frames", [8000, 8001, 12345])
def test_length_is_the_ceiling_at_every_rate(tmp_path, rate, frames):
    y = decode(write_wav(tmp_path / "a.wav", sine(frames, 200, rate), rate))
    assert len(y) == -(-frames * 22050 // rate)
    ideal = sine(len(y), 200)
    np.testing.assert_allclose(y[500:-500], ideal[500:-500], atol=2e-3)


def test_a_part_is_that_part_of_the_whole(tmp_path):
    rng = np.random.default_rng(0)
    for rate in (22050, 44100, 48000, 16000):
        for suffix in (".wav", ".flac", ".ogg", ".mp3"):
            path = write_wav(
                tmp_path / f"a{rate}{suffix}",
                0.3 * rng.standard_normal(rate * 3).clip(-3, 3).astype(np.float32),
                rate,
            )
            whole = decode(path)
            assert len(whole) == 66150 or suffix == ".mp3"
            for start, n in ((0, 22050), (30000, 11025), (66150 - 8000, 8000), (1, 66149)):
                part = decode(path, start, n)
                assert part.shape == (n,)
                np.testing.assert_allclose(
                    part, whole[start : start + n], atol=0 if rate == 22050 else 2e-5
                )


def test_a_part_outside_the_file_is_an_error(tmp_path):
    path = write_wav(tmp_path / "a.wav", sine(22050))
    for start, n in ((0, 22051), (-1, 100), (22050, 1), (5, 0)):
        with pytest.raises(DecodeError, match="of 22050 asked for"):
            decode(path, start, n)


def test_a_part_reads_only_that_part(tmp_path):
    path = write_wav(tmp_path / "long.wav", np.tile(sine(22050), 600))
    began = time.process_time()
    decode(path)
    whole = time.process_time()
    for k in range(20):
        decode(path, 22050 * 20 * k, 66150)
    assert time.process_time() - whole < 5 * (whole - began)  # a tenth of it is read in all


def test_c13_non_finite_and_absurd_samples(tmp_path):
    tone = sine(44100)
    for name, value, text in (
        ("nan", np.nan, "non-finite: 1"),
        ("inf", -np.inf, "non-finite: 1"),
        ("huge", 1e30, "absurd level: peak 1e\\+30"),
    ):
        x = tone.copy()
        x[1000] = value
        fails(write_wav(tmp_path / f"{name}.wav", x, subtype="FLOAT"), text)
    fails(
        write_wav(tmp_path / "all.wav", tone * 1e30, subtype="FLOAT"), "absurd level: peak 5e\\+29"
    )
    spike = np.zeros(44100, np.float32)
    spike[7] = 1e6
    fails(
        write_wav(tmp_path / "spike.wav", spike + 0.1 * tone, subtype="FLOAT"), "over a signal of"
    )
    fails(write_wav(tmp_path / "zero.wav", 0 * tone), "silent")


def test_sound_is_heard_wherever_it_lies(tmp_path):
    for at in (0, 1, 996, 12345, 22050 - 3528):
        x = np.zeros(22050, np.float32)
        x[at : at + 3528] = sine(3528)  # 0.16 s
        np.testing.assert_allclose(decode(write_wav(tmp_path / "one.flac", x)), x, atol=2**-15)
        x = np.zeros(22050, np.float32)
        x[at] = 0.5
        fails(write_wav(tmp_path / "one.flac", x), "almost silent: 0.02 s of sound in 1.00 s")


def test_two_channels_become_their_mean_to_the_bit():
    samples = np.random.default_rng(0).standard_normal((10000, 2)).astype(np.float32)
    np.testing.assert_array_equal(mono(samples), samples.mean(1, dtype=np.float32))


def test_a_whole_file_is_read_without_seeking(tmp_path, monkeypatch):
    """In FLAC, seeking decodes; and a part is sought once."""
    sought, seek = [], soundfile.SoundFile.seek
    monkeypatch.setattr(
        soundfile.SoundFile, "seek", lambda self, *args: sought.append(args) or seek(self, *args)
    )
    path = write_wav(tmp_path / "a.flac", sine(44100))
    whole = decode(path)
    assert sought == []
    np.testing.assert_array_equal(decode(path, 30000, 5000), whole[30000:35000])
    assert sought == [(30000,)]


def test_c13_loud_floats_are_scaled_with_a_warning_once(tmp_path, caplog):
    path = write_wav(tmp_path / "loud.wav", 8 * sine(44100), subtype="FLOAT")
    with caplog.at_level(logging.WARNING):
        y = decode(path)
        part = decode(path, 10000, 5000)
    assert np.abs(y).max() == pytest.approx(1, abs=1e-4)
    np.testing.assert_array_equal(part, y[10000:15000])  # by the whole file's peak, not the part's
    assert [r.getMessage() for r in caplog.records] == [f"{path}: peak 4, scaled to 1"]
    shorts = write_wav(
        tmp_path / "shorts.wav", np.round(20000 * sine(44100, amplitude=1)), subtype="FLOAT"
    )
    np.testing.assert_allclose(decode(shorts), sine(44100, amplitude=1), atol=1e-4)


def test_c13_the_share_of_clipped_samples_is_measured():
    x = 0.5 * sine(44100)
    x[: int(0.3 * 44100)] = 1.0
    level = measure("x", x[:, None], 22050)
    assert level.clipped == pytest.approx(0.3, abs=1e-3)
    assert level.peak == pytest.approx(1, abs=1e-3)
    assert measure("x", sine(22050)[:, None], 22050).clipped == 0


def test_c10_files_that_are_no_audio_say_what_they_are(tmp_path):
    for name, data, text in (
        ("b.mp3", b"", "empty file"),
        ("d.wav", b"<html>404", "not audio"),
        (
            "e.wav",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
            "Git LFS pointer",
        ),
        ("f.wav", bytes(range(256)) * 20, "not audio"),
    ):
        (tmp_path / name).write_bytes(data)
        assert str(fails(tmp_path / name, text)).startswith(f"{tmp_path / name}: {text}")
    fails(tmp_path / "nowhere.wav", "No such file")


def test_c10_mp3_bytes_under_a_wav_name_are_read(tmp_path):
    mp3 = write_wav(tmp_path / "a.mp3", sine(44100))
    wav = tmp_path / "c.wav"
    wav.write_bytes(mp3.read_bytes())
    np.testing.assert_array_equal(decode(wav), decode(mp3))


def test_c14_a_header_of_1_hz_is_refused_without_reading(tmp_path):
    fails(write_wav(tmp_path / "a.wav", sine(22050), 1), "sample rate 1 Hz is not credible")


def test_damaged_and_cut_files(tmp_path):
    for suffix in (".flac", ".mp3"):
        good = write_wav(tmp_path / f"a{suffix}", sine(66150)).read_bytes()
        (tmp_path / f"cut{suffix}").write_bytes(good[: len(good) // 2])
        fails(tmp_path / f"cut{suffix}", "damaged audio data|ends early")


def test_a_file_that_changed_since_the_scan_is_an_error(tmp_path):
    path = write_wav(tmp_path / "a.wav", sine(22050))
    assert len(decode(path, source_rate=22050, source_frames=22050)) == 22050
    with pytest.raises(
        DecodeError,
        match="changed since the scan: 22051 samples at 22050 Hz then, 22050 at 22050 now",
    ):
        decode(path, source_rate=22050, source_frames=22051)


def test_c40_open_descriptors_stay_flat(tmp_path):
    good, bad = (
        write_wav(tmp_path / "a.wav", sine(4000)),
        write_wav(tmp_path / "b.wav", sine(4000), 1),
    )
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(500):
        decode(good)
        with pytest.raises(DecodeError):
            decode(bad)
    assert abs(len(os.listdir("/proc/self/fd")) - before) <= 2


def test_the_pool_gives_arrays_and_errors_in_futures(tmp_path):
    paths = [write_wav(tmp_path / f"{i}.wav", sine(22050 + i)) for i in range(20)]
    with DecodePool(2) as pool:
        futures = [pool.submit(p) for p in paths]
        bad = pool.submit(tmp_path / "nope.wav")
        assert [len(f.result(90)) for f in futures] == [22050 + i for i in range(20)]
        with pytest.raises(DecodeError, match="No such file"):
            bad.result(90)
        np.testing.assert_array_equal(
            pool.submit(paths[0], 100, 50).result(90), decode(paths[0], 100, 50)
        )


def test_a_full_pool_waits_stops_and_times_out(tmp_path, monkeypatch):
    gate, begun, stop = threading.Event(), threading.Event(), threading.Event()
    monkeypatch.setattr(module, "decode", lambda path: begun.set() or gate.wait(90))
    pool = DecodePool(1, capacity=1, should_stop=stop.is_set)
    running = pool.submit("a")
    assert begun.wait(90)
    waiting = pool.submit("b")
    with pytest.raises(TimeoutError, match="next is c"):
        pool.submit("c", timeout_s=0.2)
    stop.set()
    with pytest.raises(Stopped):
        pool.submit("d")
    gate.set()
    assert running.result(90) is True
    pool.close()
    assert waiting.cancelled() or waiting.result(90) is True


def test_a_hanging_read_does_not_hold_the_process(monkeypatch):
    gate, begun = threading.Event(), threading.Event()
    monkeypatch.setattr(module, "decode", lambda path: begun.set() or gate.wait(90))
    pool = DecodePool(1)
    reading = pool.submit("a")
    assert begun.wait(90)
    pool.close(timeout_s=0.2)
    assert not reading.done()
    gate.set()


@pytest.mark.skipif(not LJ.is_dir(), reason="the speech sample is not there")
def test_real_speech_in_three_formats():
    wav, flac, mp3 = (decode(LJ / f"LJ001-0001.{s}") for s in ("wav", "flac", "mp3"))
    np.testing.assert_array_equal(wav, flac)
    assert len(wav) == soundfile.info(LJ / "LJ001-0001.wav").frames
    n = min(len(wav), len(mp3))
    assert np.corrcoef(wav[:n], mp3[:n])[0, 1] > 0.97
