"""Mels, resampling and the choice of the conditioning clip: one feature code for training and
synthesis.

Shapes: B clips, N samples, F = 1 + N // hop frames. All shapes are static where N is. The matmul
with the filter bank must run in true fp32: a process that makes features on a GPU switches
TensorFloat-32 off, else log-mels are off by 1e-3. Source: coqui-tts,
TTS/tts/layers/tortoise/arch_utils.py (TorchMelSpectrogram), TTS/tts/layers/xtts/trainer/dataset.py
(clip); torchaudio.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import tensorflow as tf

from common.xtts.dims import AudioDims
from common.xtts.filterbank import LOG_FLOOR, hann, mel_filterbank

LOWPASS_WIDTH = 6  # zero crossings of the sinc on each side
ROLLOFF = 0.99

_MASK64 = (1 << 64) - 1


def power_spectrogram(wav: tf.Tensor, fft: int, win: int, hop: int, window: tf.Tensor) -> tf.Tensor:
    """|STFT|^2, centred with reflect padding: float32 [B,N] -> float32 [B, 1 + N // hop, fft / 2 +
    1]; `window` [win], N > win / 2.

    The padding is win / 2 and frames are zero-extended to `fft` at their end: a window centred in a
    longer FFT, as torch has it, differs from this in phase alone.
    """
    padded = tf.pad(wav, [[0, 0], [win // 2, win // 2]], mode="REFLECT")
    spectrum = tf.signal.stft(
        padded, win, hop, fft_length=fft, window_fn=lambda length, dtype: tf.cast(window, dtype)
    )
    return tf.math.real(spectrum) ** 2 + tf.math.imag(spectrum) ** 2


def log_mel(
    wav: tf.Tensor,
    fft: int,
    win: int = 1024,
    hop: int = 256,
    num_mels: int = 80,
    sample_rate: int = 22050,
    fmax_hz: float = 8000.0,
) -> tf.Tensor:
    """Log-mel before the division by the mel stats: float32 [B,N] -> float32 [B, 1 + N // hop,
    num_mels]; N > win / 2.
    """
    power = power_spectrogram(wav, fft, win, hop, tf.constant(hann(win).astype(np.float32)))
    bank = mel_filterbank(fft, num_mels, sample_rate, 0.0, fmax_hz).astype(np.float32)
    return tf.math.log(tf.maximum(tf.tensordot(power, tf.constant(bank), 1), LOG_FLOOR))


class _Mel:
    """Normalised log-mel: float32 [B,N] -> float32 [B,F,num_mels].

    `by_clip`: one clip after the other, as many at once as there are inter-op threads. On a CPU
    that is a quarter faster than a whole batch, whose frames (4 × the samples) and spectra do not
    fit into its caches.
    """

    def __init__(self, mel_stats: np.ndarray, dims: AudioDims, fft: int, by_clip: bool = False):
        stats = np.asarray(mel_stats, np.float32)
        if (
            stats.shape != (dims.num_mels,)
            or not np.isfinite(stats).all()
            or not (np.abs(stats) > 0).all()
        ):
            raise ValueError(
                f"mel stats must be {dims.num_mels} finite non-zero numbers, got shape"
                f" {stats.shape}: {stats[:8]} …"
            )
        self.mel_stats, self.dims, self.fft, self.by_clip = stats, dims, fft, by_clip

    def __call__(self, wav: tf.Tensor) -> tf.Tensor:
        if not self.by_clip:
            return self._batch(wav)
        return tf.map_fn(
            lambda clip: self._batch(clip[None])[0],
            wav,
            parallel_iterations=8,
            fn_output_signature=tf.float32,
        )

    def _batch(self, wav: tf.Tensor) -> tf.Tensor:
        d = self.dims
        return (
            log_mel(
                wav, self.fft, d.win_samples, d.hop_samples, d.num_mels, d.sample_rate, d.fmax_hz
            )
            / self.mel_stats
        )


class DvaeMel(_Mel):
    """Input of the DVAE: fft 1024, divided by the mel stats."""

    def __init__(self, mel_stats: np.ndarray, dims: AudioDims, by_clip: bool = False):
        super().__init__(mel_stats, dims, dims.dvae_fft, by_clip)


class CondMel(_Mel):
    """Input of the conditioning encoder: fft 2048 with the same 1024-sample window, divided by the
    mel stats.
    """

    def __init__(self, mel_stats: np.ndarray, dims: AudioDims, by_clip: bool = False):
        super().__init__(mel_stats, dims, dims.cond_fft, by_clip)


@functools.lru_cache(maxsize=32)
def _resample_kernel(orig: int, new: int) -> tuple[np.ndarray, int]:
    """Taps float32 [2·width + orig, 1, new] of the polyphase filter for coprime rates,
    and width.
    """
    base = ROLLOFF * min(orig, new)
    width = math.ceil(LOWPASS_WIDTH * orig / base)
    m = np.arange(-width, width + orig, dtype=np.float64)[:, None]
    j = np.arange(new, dtype=np.float64)[None, :]
    t = np.clip(base * (m / orig - j / new), -LOWPASS_WIDTH, LOWPASS_WIDTH)
    taps = np.sinc(t) * np.cos(np.pi * t / LOWPASS_WIDTH / 2) ** 2 * base / orig
    return taps[:, None, :].astype(np.float32), width


def resampled_length(num_samples: int, orig_rate: int, new_rate: int) -> int:
    """Samples after `resample`: ceil(new · N / orig)."""
    return -(-new_rate * num_samples // orig_rate)


def resample(wav: tf.Tensor, orig_rate: int, new_rate: int) -> tf.Tensor:
    """Sinc resampling with a Hann-windowed kernel: float32 [B,N] -> float32 [B, ceil(new · N /
    orig)]; N static.

    Computes what torchaudio's `resample` does with its defaults (6 zero crossings, rolloff 0.99),
    with exact taps where torchaudio rounds them to fp32 early (differences up to 1e-4 of full
    scale).
    """
    if orig_rate <= 0 or new_rate <= 0:
        raise ValueError(f"sample rates must be positive, got {orig_rate} and {new_rate}")
    if orig_rate == new_rate:
        return wav
    gcd = math.gcd(orig_rate, new_rate)
    orig, new = orig_rate // gcd, new_rate // gcd
    taps, width = _resample_kernel(orig, new)
    batch, length = tf.shape(wav)[0], wav.shape[1]
    padded = tf.pad(wav, [[0, 0], [width, width + orig]])[:, :, None]
    phases = tf.nn.conv1d(
        padded, tf.constant(taps), stride=orig, padding="VALID"
    )  # [B, ceil-ish(N / orig), new]
    return tf.reshape(phases, [batch, phases.shape[1] * new])[
        :, : resampled_length(length, orig, new)
    ]


def counter_hash(seed: int, counter: int) -> int:
    """The `counter`-th output (from 0) of the splitmix64 generator seeded with the 64-bit `seed`:
    an integer in [0, 2^64).
    """
    x = (int(seed) + (counter + 1) * 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _uniform(seed: int, counter: int, low: int, high: int) -> int:
    """Integer in [low, high], both included: the hash scaled by multiplication, biased by less than
    (high - low) / 2^64.
    """
    return low + ((counter_hash(seed, counter) * (high - low + 1)) >> 64)


def lead_samples(row_seed: int, phases: int, audio: AudioDims, training: bool) -> int:
    """How many samples of silence precede an utterance, so that its sounds meet other code
    boundaries: a pure function of its arguments.

    Training: 0 to `phases` - 1 mel frames, each as likely (hash counter 2); a code spans four.
    Evaluation: none.
    """
    return _uniform(row_seed, 2, 0, phases - 1) * audio.hop_samples if training else 0


def prompt_slice(
    num_samples: int, row_seed: int, audio: AudioDims, training: bool, whole: bool = False
) -> tuple[int, int]:
    """Where the conditioning clip lies in its utterance: (start, length) in samples; a pure
    function of its arguments.

    Training: length uniform in [cond_min, cond_max] (hash counter 0), start uniform (hash counter
    1). Evaluation: cond_eval samples from 0. An utterance shorter than the drawn length gives half
    of itself, or all of itself if `whole` (for the row of another utterance, where it gives nothing
    away). The clip is zero-padded to cond_max by the caller, as XTTSDataset does. Raises ValueError
    below 2 samples.
    """
    if num_samples < 2:
        raise ValueError(f"no conditioning clip can be cut from {num_samples} samples")
    length = (
        _uniform(row_seed, 0, audio.cond_min_samples, audio.cond_max_samples)
        if training
        else audio.cond_eval_samples
    )
    if num_samples < length:
        length = num_samples if whole else num_samples // 2
    start = _uniform(row_seed, 1, 0, num_samples - length) if training else 0
    return start, length
