"""DVAE mel to sound without a vocoder: inverse filter bank, then Griffin-Lim.

Deterministic; NumPy, SciPy and librosa only.

Speech stays intelligible but metallic; with imported weights the HiFi-GAN decoder takes its place.
"""

from __future__ import annotations

import librosa
import numpy as np
from scipy.sparse import csr_array

from common.xtts.filterbank import LOG_FLOOR, mel_filterbank

FFT = 1024
NNLS_ITERATIONS = 60
MIN_FRAMES = 4


def mel_to_magnitude(
    log_mel: np.ndarray, sample_rate: int = 22050, fmax_hz: float = 8000.0
) -> np.ndarray:
    """Magnitude spectrogram whose mels are nearly those given: log-mel [F, num_mels] -> float32
    [FFT/2 + 1, F], >= 0.

    Non-negative least squares on the power by multiplicative updates (Lee and Seung 2001): the
    pseudo-inverse alone gives negative power between the harmonics. Bins that no filter sees are 0.

    The bank is sparse (729 of 41 040 weights): dense products, of which BLAS makes threads, took
    half of the time of speech without a vocoder.
    """
    dense = mel_filterbank(FFT, log_mel.shape[1], sample_rate, 0.0, fmax_hz).astype(np.float32)
    bank, transposed = csr_array(dense), csr_array(dense.T)
    mel = np.exp(np.maximum(log_mel, np.log(LOG_FLOOR))).astype(np.float32).T
    target = bank @ mel
    power = target / np.maximum(dense.sum(axis=1) ** 2, 1e-12)[:, np.newaxis]
    for _ in range(NNLS_ITERATIONS):
        power *= target / np.maximum(bank @ (transposed @ power), 1e-20)
    return np.sqrt(power)


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
    wav = librosa.griffinlim(
        magnitude, n_iter=iterations, hop_length=hop, win_length=win, n_fft=FFT, random_state=0
    )
    peak = float(np.abs(wav).max(initial=0.0))
    return (wav / max(peak, 1.0)).astype(np.float32)
