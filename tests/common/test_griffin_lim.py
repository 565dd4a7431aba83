"""Griffin-Lim on DVAE mels: the sound has the mel it was made from."""

from __future__ import annotations

import numpy as np
import pytest

from common.xtts.filterbank import log_mel_numpy, mel_filterbank, mel_stats
from common.xtts.griffin_lim import griffin_lim, mel_to_magnitude
from tests.support import speech


@pytest.fixture(scope="module")
def clip():
    wavs = speech.clips()
    return wavs[0], mel_stats(wavs)


def test_the_sound_has_the_mel_it_was_made_from(clip):
    wav, stats = clip
    mel = log_mel_numpy(wav, 1024)
    sound = griffin_lim(mel / stats, stats)
    assert sound.dtype == np.float32
    assert len(sound) == 256 * (len(mel) - 1)
    assert 0.05 < np.abs(sound).max() <= 1.0
    again = log_mel_numpy(sound, 1024)
    assert np.corrcoef(again.ravel(), mel.ravel())[0, 1] > 0.97
    loud = mel > mel.max() - 7
    assert np.abs(again - mel)[loud].mean() < 0.25  # 0.25 in log power: 1.1 dB
    assert (griffin_lim(mel / stats, stats) == sound).all()


def test_inverse_filter_bank_reproduces_the_mel(clip):
    mel = log_mel_numpy(clip[0], 1024)
    magnitude = mel_to_magnitude(mel)
    assert magnitude.shape == (513, len(mel))
    assert (magnitude >= 0).all()
    assert magnitude[373:].max() == 0  # above 8 kHz
    back = np.log(np.maximum((magnitude.T.astype(np.float64) ** 2) @ mel_filterbank(1024), 1e-5))
    assert np.abs(back - mel).mean() < 0.1


def test_a_tone_keeps_its_pitch():
    tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(22050) / 22050).astype(np.float32)
    sound = griffin_lim(log_mel_numpy(tone, 1024), np.ones(80))
    spectrum = np.abs(np.fft.rfft(sound * np.hanning(len(sound))))
    assert np.argmax(spectrum) * 22050 / len(sound) == pytest.approx(
        440, abs=25
    )  # one mel channel is 44 Hz wide there


def test_silence_and_absurd_mels_stay_in_range():
    assert np.abs(griffin_lim(np.full((20, 80), np.log(1e-5)), np.ones(80))).max() < 0.01
    absurd = griffin_lim(np.full((20, 80), 500.0), np.ones(80))
    assert np.isfinite(absurd).all()
    assert np.abs(absurd).max() <= 1.0


@pytest.mark.parametrize(
    "bad", [np.zeros((20, 79)), np.zeros((3, 80)), np.zeros(80), np.full((20, 80), np.nan)]
)
def test_unusable_mels_are_refused(bad):
    with pytest.raises(ValueError, match="griffin_lim"):
        griffin_lim(bad, np.ones(80))


def test_the_sparse_bank_computes_what_the_dense_one_does():
    """Lee and Seung's updates, written out with dense matrices in float64."""
    log_mel = np.random.default_rng(0).normal(-3, 1, (7, 80))
    bank = mel_filterbank(1024).T.astype(np.float64)
    target = np.exp(log_mel) @ bank
    power = target / np.maximum(bank.sum(axis=0) ** 2, 1e-12)
    for _ in range(60):
        power = power * target / np.maximum(power @ bank.T @ bank, 1e-20)
    found = mel_to_magnitude(log_mel)
    np.testing.assert_allclose(found, np.sqrt(power).T, rtol=1e-3, atol=1e-5 * found.max())
