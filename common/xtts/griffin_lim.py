"""DVAE mel to sound without a vocoder: inverse filter bank, then Griffin-Lim.

Deterministic, and NumPy alone: librosa's compiled loops need seconds at their first use, and a
folder to keep them in, which not every user has.

Speech stays intelligible but metallic; with imported weights the HiFi-GAN decoder takes its place.
"""

from __future__ import annotations

import numpy as np

from common.xtts.filterbank import LOG_FLOOR, hann, mel_filterbank

FFT = 1024
NNLS_ITERATIONS = 60
MIN_FRAMES = 4
_MOMENTUM = 0.99
_TINY = np.float32(1e-20)


def mel_to_magnitude(
    log_mel: np.ndarray, sample_rate: int = 22050, fmax_hz: float = 8000.0
) -> np.ndarray:
    """Magnitude spectrogram whose mels are nearly those given: log-mel [F, num_mels] -> float32
    [FFT/2 + 1, F], >= 0.

    Non-negative least squares on the power by multiplicative updates (Lee and Seung 2001): the
    pseudo-inverse alone gives negative power between the harmonics. Bins that no filter sees are 0.
    """
    bank = mel_filterbank(FFT, log_mel.shape[1], sample_rate, 0.0, fmax_hz).astype(np.float32)
    mel = np.exp(np.maximum(log_mel, np.log(LOG_FLOOR))).astype(np.float32)
    target = mel @ bank.T
    power = target / np.maximum(bank.sum(axis=1) ** 2, 1e-12)
    for _ in range(NNLS_ITERATIONS):
        power *= target / np.maximum(power @ bank @ bank.T, 1e-20)
    return np.sqrt(power).T


def griffin_lim(
    mel_normalised: np.ndarray,
    mel_stats: np.ndarray,
    iterations: int = 32,
    hop: int = 256,
    win: int = 1024,
    sample_rate: int = 22050,
    fmax_hz: float = 8000.0,
) -> np.ndarray:
    """Sound of a normalised DVAE mel: [F, num_mels] -> float32 [hop · (F - 1)] at `sample_rate`,
    |x| <= 1, same bits each time.

    `mel_stats` [num_mels]: the divisor that normalised the mel. Raises ValueError on another shape,
    fewer than 4 frames, or a value that is not finite.
    """
    mel = np.asarray(mel_normalised, np.float32)
    stats = np.asarray(mel_stats, np.float32)
    if mel.ndim != 2 or stats.shape != mel.shape[1:] or len(mel) < MIN_FRAMES:
        raise ValueError(
            f"griffin_lim takes a mel [frames >= {MIN_FRAMES}, {len(stats)}], got shape {mel.shape}"
        )
    if not np.isfinite(mel).all():
        raise ValueError("griffin_lim: the mel has values that are not finite")
    # An untrained decoder can ask for absurd power; exp(12) is already beyond any full-scale clip.
    magnitude = mel_to_magnitude(np.minimum(mel * stats, 12.0), sample_rate, fmax_hz)
    wav = with_phases(magnitude.T, iterations, hop, win)
    peak = float(np.abs(wav).max(initial=0.0))
    return (wav / max(peak, 1.0)).astype(np.float32)


def with_phases(magnitude: np.ndarray, iterations: int, hop: int, win: int) -> np.ndarray:
    """Sound whose spectrogram has nearly these magnitudes: float32 [F, FFT/2 + 1] -> [hop · (F -
    1)].

    Source: Perraudin, Balazs and Søndergaard 2013, "A fast Griffin-Lim algorithm".
    """
    turns = np.random.default_rng(0).random(magnitude.shape, np.float32)
    phases = np.exp(np.complex64(2j * np.pi) * turns)
    before = np.zeros_like(phases)
    for _ in range(iterations):
        now = stft(inverse_stft(magnitude * phases, hop, win), hop, win)
        phases = now - np.float32(_MOMENTUM / (1 + _MOMENTUM)) * before
        phases /= np.maximum(np.abs(phases), _TINY)
        before = now
    return inverse_stft(magnitude * phases, hop, win)


def stft(wav: np.ndarray, hop: int, win: int) -> np.ndarray:
    """float32 [hop · (F - 1)] -> complex64 [F, FFT/2 + 1]; frames are centred, with zeros beyond
    the ends.
    """
    padded = np.pad(wav, FFT // 2)
    frames = np.lib.stride_tricks.sliding_window_view(padded, FFT)[::hop]
    return np.fft.rfft(frames * _window(win)).astype(np.complex64, copy=False)


def inverse_stft(spectrum: np.ndarray, hop: int, win: int) -> np.ndarray:
    """complex64 [F, FFT/2 + 1] -> the float32 [hop · (F - 1)] whose `stft` is nearest."""
    window = _window(win)
    frames = np.fft.irfft(spectrum, FFT).astype(np.float32, copy=False) * window
    wav = _overlapped(frames, hop)
    weight = _overlapped(np.broadcast_to(np.square(window), frames.shape), hop)
    inside = slice(FFT // 2, FFT // 2 + hop * (len(spectrum) - 1))
    return wav[inside] / np.maximum(weight[inside], np.float32(1e-8))


def _overlapped(frames: np.ndarray, hop: int) -> np.ndarray:
    """The sum of float32 [F, FFT] frames, each `hop` samples after the one before."""
    count, parts = len(frames), -(-FFT // hop)
    frames = np.pad(frames, ((0, 0), (0, parts * hop - FFT)))
    out = np.zeros((count + parts, hop), np.float32)
    for i in range(parts):
        out[i : i + count] += frames[:, i * hop : (i + 1) * hop]
    return out.reshape(-1)


def _window(win: int) -> np.ndarray:
    """A Hann window of `win` samples in the middle of FFT."""
    before = (FFT - win) // 2
    return np.pad(hann(win).astype(np.float32), (before, FFT - win - before))
