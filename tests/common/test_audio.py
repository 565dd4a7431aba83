"""Mels, filter bank, resampler and prompt slice against golden values from torchaudio/Coqui,
librosa and closed forms.
"""

from __future__ import annotations

import pathlib

import librosa
import numpy as np
import pytest
import tensorflow as tf

from common.xtts.audio import (
    CondMel,
    DvaeMel,
    counter_hash,
    log_mel,
    prompt_slice,
    resample,
    resampled_length,
)
from common.xtts.dims import SIZES, AudioDims
from common.xtts.filterbank import hann, log_mel_numpy, mel_filterbank, mel_stats, num_frames

AUDIO = AudioDims()
GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "audio.npz"


def voice_like(num_samples, seed=0, rate=22050):
    """Harmonics with a moving pitch, a level that comes and goes, and a little noise."""
    rng = np.random.default_rng(seed)
    t = np.arange(num_samples) / rate
    pitch = 120 + 30 * np.sin(2 * np.pi * 0.7 * t + seed)
    phase = 2 * np.pi * np.cumsum(pitch) / rate
    tone = sum(np.sin(k * phase) / k for k in range(1, 20))
    wav = 0.2 * tone * (0.5 + 0.5 * np.sin(2 * np.pi * 1.3 * t)) + 0.003 * rng.standard_normal(
        num_samples
    )
    return wav.astype(np.float32)


@pytest.mark.parametrize(("fft", "total"), [(1024, 3.7147253), (2048, 7.4298534)])
def test_filter_bank_sums_of_the_specification(fft, total):
    bank = mel_filterbank(fft)
    assert bank.shape == (fft // 2 + 1, 80)
    assert bank.sum() == pytest.approx(total, abs=2e-6)


@pytest.mark.parametrize("fft", [1024, 2048])
def test_filter_bank_is_librosas_htk_scale_with_slaney_norm(fft):
    ours = mel_filterbank(fft)
    theirs = librosa.filters.mel(
        sr=22050, n_fft=fft, n_mels=80, fmin=0, fmax=8000, htk=True, norm="slaney"
    ).T
    assert np.abs(ours - theirs).max() < 1e-7


@pytest.mark.parametrize(("fft", "win"), [(1024, 1024), (2048, 1024), (512, 400)])
def test_log_mel_against_librosa(fft, win):
    wav = voice_like(9000)
    stft = librosa.stft(
        wav.astype(np.float64),
        n_fft=fft,
        hop_length=256,
        win_length=win,
        window="hann",
        center=True,
        pad_mode="reflect",
    )
    bank = librosa.filters.mel(
        sr=22050, n_fft=fft, n_mels=80, fmin=0, fmax=8000, htk=True, norm="slaney"
    )
    want = np.log(np.maximum(bank @ np.abs(stft) ** 2, 1e-5)).T
    got = log_mel(wav[None], fft, win=win)[0].numpy()
    # librosa reflects fft/2 samples and we win/2: the same samples under the window.
    assert got.shape == want.shape == (num_frames(9000), 80)
    assert np.abs(got - want).max() < 2e-4
    assert np.abs(log_mel_numpy(wav.astype(np.float64), fft, win=win) - want).max() < 1e-5
    assert np.abs(log_mel_numpy(wav, fft, win=win) - want).max() < 2e-4


def test_windows_are_periodic():
    assert hann(4).tolist() == pytest.approx([0.0, 0.5, 1.0, 0.5])


def test_pure_tone_peaks_in_its_mel_channel():
    tone = np.sin(2 * np.pi * 1000 * np.arange(22050) / 22050).astype(np.float32)
    channel = int(np.argmax(log_mel(tone[None], 1024)[0, 40].numpy()))
    corners = 700 * (10 ** (np.linspace(0, 2595 * np.log10(1 + 8000 / 700), 82) / 2595) - 1)
    assert corners[channel] < 1000 < corners[channel + 2]


def test_silence_is_the_log_floor_divided_by_the_stats():
    stats = np.linspace(1, 2, 80, dtype=np.float32)
    for mel in (DvaeMel(stats, AUDIO), CondMel(stats, AUDIO)):
        got = mel(tf.zeros([2, AUDIO.cond_max_samples])).numpy()
        assert got.shape == (2, AUDIO.cond_frames, 80) == (2, 517, 80)
        assert got == pytest.approx(np.broadcast_to(np.log(1e-5) / stats, got.shape), rel=1e-5)


def test_mel_shapes_are_static_inside_a_function():
    traced = tf.function(
        DvaeMel(np.ones(80), AUDIO), input_signature=[tf.TensorSpec([3, 4096], tf.float32)]
    )
    assert traced.get_concrete_function().output_shapes == (3, 17, 80)


@pytest.mark.parametrize("bad", [np.ones(79), np.r_[np.zeros(1), np.ones(79)], np.full(80, np.nan)])
def test_unusable_mel_stats_are_refused(bad):
    with pytest.raises(ValueError, match="mel stats"):
        DvaeMel(bad, AUDIO)


def test_mel_stats_is_the_mean_absolute_log_mel_over_all_frames():
    wavs = [voice_like(6000, 1), voice_like(9000, 2)]
    want = np.abs(np.concatenate([log_mel_numpy(w, 1024) for w in wavs])).mean(axis=0)
    got = mel_stats(iter(wavs))
    assert got.dtype == np.float32
    assert got == pytest.approx(want, rel=1e-5)
    with pytest.raises(ValueError, match="at least one clip"):
        mel_stats([])
    with pytest.raises(ValueError, match="clip 1"):
        mel_stats([wavs[0], np.full(6000, np.nan, np.float32)])


def test_a_clip_shorter_than_the_reflection_is_refused():
    with pytest.raises(ValueError, match="513"):
        log_mel_numpy(np.zeros(512, np.float32), 1024)


@pytest.mark.parametrize("rate", [16000, 24000, 32000, 44100, 48000])
def test_resampling_keeps_pitch_and_exact_length(rate):
    seconds = 2
    tone = np.sin(2 * np.pi * 440 * np.arange(seconds * rate) / rate).astype(np.float32)
    got = resample(tone[None], rate, 22050)[0].numpy()
    assert len(got) == resampled_length(len(tone), rate, 22050) == 44100
    want = np.sin(2 * np.pi * 440 * np.arange(44100) / 22050)
    assert np.abs(got - want)[200:-200].max() < 5e-3
    assert np.argmax(np.abs(np.fft.rfft(got))) * 0.5 == 440


def test_resampling_removes_what_would_alias():
    tone = np.sin(2 * np.pi * 15000 * np.arange(48000) / 48000).astype(np.float32)
    assert np.abs(resample(tone[None], 48000, 22050)[0, 200:-200].numpy()).max() < 1e-2


def test_resampling_to_the_same_rate_is_the_identity():
    wav = voice_like(1000)[None]
    assert resample(wav, 22050, 22050) is wav


def test_odd_length_rounds_up():
    assert resample(np.zeros([1, 48001], np.float32), 48000, 22050).shape == (1, 22051)


def test_counter_hash_is_splitmix64():
    # First outputs of Vigna's reference splitmix64.c for the seeds 0 and 1234567.
    assert counter_hash(0, 0) == 0xE220A8397B1DCDAF
    assert [counter_hash(1234567, k) for k in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_prompt_slice_is_a_function_of_the_seed_and_stays_in_bounds():
    seen = []
    for seed in range(400):
        start, length = prompt_slice(200_000, seed, AUDIO, training=True)
        assert (start, length) == prompt_slice(200_000, np.uint64(seed), AUDIO, training=True)
        assert AUDIO.cond_min_samples <= length <= AUDIO.cond_max_samples
        assert 0 <= start <= 200_000 - length
        seen.append((start, length))
    assert len(set(seen)) == 400
    middle = (AUDIO.cond_min_samples + AUDIO.cond_max_samples) / 2
    assert np.mean([length for _, length in seen]) == pytest.approx(middle, rel=0.03)
    assert np.mean([start / (200_000 - length) for start, length in seen]) == pytest.approx(
        0.5, abs=0.05
    )


def test_prompt_slice_of_short_clips_and_in_evaluation():
    assert prompt_slice(200_000, 5, AUDIO, training=False) == (0, 99225)
    assert prompt_slice(50_001, 5, AUDIO, training=False) == (0, 25_000)
    start, length = prompt_slice(11_025, 2**64 - 1, AUDIO, training=True)
    assert length == 5512
    assert 0 <= start <= 11_025 - 5512
    tiny = SIZES["tiny"].audio
    assert prompt_slice(33_024, 0, tiny, training=False) == (0, 33_024)
    with pytest.raises(ValueError, match="1 samples"):
        prompt_slice(1, 0, AUDIO, training=True)


@pytest.mark.parametrize(("name", "mel"), [("dvae", DvaeMel), ("cond", CondMel)])
def test_golden_mels_of_torchaudio(name, mel):
    golden = np.load(GOLDEN)
    got = mel(golden["mel_norms"], AUDIO)(golden["wav"]).numpy()
    assert np.abs(got - golden[f"{name}_mel"]).max() < 5e-5


@pytest.mark.parametrize("rate", [48000, 44100, 24000])
def test_golden_resampling_of_torchaudio(rate):
    golden = np.load(GOLDEN)
    got = resample(golden[f"resample_in_{rate}"], rate, 22050).numpy()
    assert got.shape == golden[f"resample_out_{rate}"].shape
    assert np.abs(got - golden[f"resample_out_{rate}"]).max() < 1e-4
