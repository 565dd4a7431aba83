"""Mel filter bank, windows and the log-mel reference in NumPy alone, so that preparing a corpus
needs no TensorFlow.

The bank is the one XTTS was trained with: corner frequencies evenly spaced on the HTK mel scale,
triangles linear in Hz, each scaled to unit area ("slaney"). Neither librosa's default nor
`tf.signal.linear_to_mel_weight_matrix` is that bank. Source: torchaudio.functional.melscale_fbanks,
as coqui-tts calls it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

LOG_FLOOR = 1e-5  # mel power below this is silence: log 1e-5 = -11.513
# mels are divided by their stats; a channel whose |log-mel| averages 0 must not divide by 0
MIN_MEL_STAT = 1e-3


def hann(win_samples: int) -> np.ndarray:
    """Periodic Hann window, float64 [win]."""
    return 0.5 - 0.5 * np.cos(2.0 * np.pi * np.arange(win_samples) / win_samples)


def hamming(win_samples: int) -> np.ndarray:
    """Periodic Hamming window (0.54 / 0.46), float64 [win]."""
    return 0.54 - 0.46 * np.cos(2.0 * np.pi * np.arange(win_samples) / win_samples)


def hz_to_mel(hz: np.ndarray | float) -> np.ndarray | float:
    """HTK mel scale."""
    return 2595.0 * np.log10(1.0 + np.asarray(hz, np.float64) / 700.0)


def mel_to_hz(mel: np.ndarray | float) -> np.ndarray | float:
    """Inverse of `hz_to_mel`."""
    return 700.0 * (10.0 ** (np.asarray(mel, np.float64) / 2595.0) - 1.0)


def mel_filterbank(
    fft: int,
    num_mels: int = 80,
    sample_rate: int = 22050,
    fmin_hz: float = 0.0,
    fmax_hz: float = 8000.0,
    area_norm: bool = True,
) -> np.ndarray:
    """Weights from power spectrum to mel power, float64 [fft/2 + 1, num_mels].

    `area_norm` scales each triangle by 2 / (upper - lower corner in Hz); without it every triangle
    peaks at 1 (the speaker encoder's bank).
    """
    bins_hz = np.linspace(0.0, sample_rate // 2, fft // 2 + 1)
    corners_hz = mel_to_hz(np.linspace(hz_to_mel(fmin_hz), hz_to_mel(fmax_hz), num_mels + 2))
    widths = np.diff(corners_hz)
    slopes = corners_hz[None, :] - bins_hz[:, None]
    rising = -slopes[:, :-2] / widths[:-1]
    falling = slopes[:, 2:] / widths[1:]
    bank = np.maximum(0.0, np.minimum(rising, falling))
    if area_norm:
        bank *= 2.0 / (corners_hz[2:] - corners_hz[:-2])
    return bank


def num_frames(num_samples: int, hop: int = 256) -> int:
    """Frames of a centred STFT of `num_samples` samples."""
    return 1 + num_samples // hop


def power_spectrogram(wav: np.ndarray, fft: int, win: int = 1024, hop: int = 256) -> np.ndarray:
    """|STFT|^2 of one clip, centred with reflect padding: [N] -> [1 + N // hop, fft/2 + 1].

    The clip is padded by win/2 and cut into frames of `win` samples, zero-extended to `fft` at
    their end. A window centred in the longer FFT (what torch does) only shifts the phase, which the
    power forgets.
    """
    wav = np.asarray(wav)
    if wav.ndim != 1:
        raise ValueError(f"power_spectrogram takes one clip [samples], got shape {wav.shape}")
    if len(wav) <= win // 2:
        raise ValueError(
            f"clip of {len(wav)} samples is too short to reflect-pad by {win // 2}; need at least"
            f" {win // 2 + 1}"
        )
    padded = np.pad(wav, win // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, win)[::hop]
    spectrum = np.fft.rfft(frames * hann(win).astype(wav.dtype), n=fft, axis=-1)
    return spectrum.real**2 + spectrum.imag**2


def log_mel_numpy(
    wav: np.ndarray,
    fft: int,
    win: int = 1024,
    hop: int = 256,
    num_mels: int = 80,
    sample_rate: int = 22050,
    fmax_hz: float = 8000.0,
) -> np.ndarray:
    """Log-mel of one clip before the division by the mel stats: float [N] -> same float type [1 + N
    // hop, num_mels].

    Raises ValueError for a clip that is not one-dimensional or is shorter than the reflect padding.
    """
    wav = np.asarray(wav)
    dtype = np.float64 if wav.dtype == np.float64 else np.float32
    power = power_spectrogram(wav.astype(dtype, copy=False), fft, win, hop)
    bank = mel_filterbank(fft, num_mels, sample_rate, 0.0, fmax_hz).astype(power.dtype)
    return np.log(np.maximum(power @ bank, LOG_FLOOR)).astype(dtype)


def mel_stats(
    wavs: Iterable[np.ndarray], fft: int = 1024, num_mels: int = 80, sample_rate: int = 22050
) -> np.ndarray:
    """Divisor of the mels of a corpus: per-channel mean of |log-mel| (DVAE mel) over all frames,
    float32 [num_mels], > 0.

    `wavs`: clips [samples] at `sample_rate`, in a fixed order (the sum is in float64, so order
    moves only its last bits). Raises ValueError when there is no clip or a clip is not finite.
    """
    total = np.zeros(num_mels, np.float64)
    count = 0
    for index, wav in enumerate(wavs):
        mel = log_mel_numpy(wav, fft, num_mels=num_mels, sample_rate=sample_rate)
        if not np.isfinite(mel).all():
            raise ValueError(
                f"mel stats: clip {index} of the sample is not finite; drop clips with NaN or Inf"
                " before"
            )
        total += np.abs(mel).sum(axis=0, dtype=np.float64)
        count += len(mel)
    if not count:
        raise ValueError("mel stats need at least one clip, got none")
    return np.maximum(total / count, MIN_MEL_STAT).astype(np.float32)
