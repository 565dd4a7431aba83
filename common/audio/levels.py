"""Whether the samples of a recording can be used: one judgement for the scan, for training and for
reference clips.

Sound is what exceeds -60 dBFS once a constant offset is removed, counted in frames of 20 ms.
Speech is far above that (peaks from -40 dBFS up), the noise of a converter below. Shapes: samples
float32[n, channels].
"""

from __future__ import annotations

import functools
import math
import os
from dataclasses import dataclass

import numpy as np

from common.audio.errors import DecodeError
from common.audio.reading import mono

MAX_PEAK = 2.0**31  # integers of 32 bits stored as floats still scale to speech; above: garbage
MIN_MEAN = (
    5e-4  # mean magnitude at a peak of 1; below: spikes drown the speech (it has 0.02 to 0.1)
)
CLIPPED = 0.99  # of full scale
FLOOR_DB = -60.0
MIN_SOUND_S = 0.15  # of a recording that is longer than twice that; a short word has 0.2 s
FRAME_S = 0.02
CANCELLED = 0.1  # power of the mean of two channels, against the louder one's
DEAD = 1e-4  # power of the softer of two channels, against the louder one's

BAND_HZ = 5000.0  # a telephone ends at 3400, an s begins there
NOTHING = 1e-6  # of the vowels' power
VOICED = 1e-4  # power from 1 to 3 kHz, against that below: a voice has more, a tone less
HUM = 100.0  # 20 dB above its neighbours
HUM_FLOOR = 1e-5  # -50 dBFS
_HUM_BIN_HZ = 1.0  # wider bins do not part mains from a low voice
SILENCE_DB = (
    -35.0
)  # a frame so far below the loud ones is a pause; soft consonants are 30 dB below vowels
_LOUD = 0.95  # quantile of the frames' level that counts as loud

_FLOOR = 10 ** (FLOOR_DB / 20)
_STRIDE = 97  # every so many samples are looked at first
_OFFSET_SAMPLES = 512  # that an offset is taken from
_CHANNEL_SAMPLES = 4096  # that the powers of channels are taken from


@dataclass(frozen=True)
class Level:
    """Levels of a whole recording.

    `peak` as stored; `clipped`: share of samples at full scale; `channel`: the one to use if the
    others cancel it.
    """

    peak: float
    clipped: float
    channel: int | None = None


@dataclass(frozen=True)
class Shape:
    """Where a recording has sound: `level_db` of those frames, dBFS; seconds of silence before,
    after, and at most in between.
    """

    level_db: float
    lead_s: float
    tail_s: float
    pause_s: float
    offset: float = 0.0  # the largest constant offset of a channel
    dead: bool = False  # one of two channels holds nothing
    band_hz: int = 0  # above which there is nothing, where that is less than a voice has
    hum_hz: int = 0  # 50 or 60, where the mains are heard


def decibels(amplitude: float) -> float:
    """dBFS of an amplitude; -inf of 0."""
    return 20 * math.log10(amplitude) if amplitude > 0 else -math.inf


def measure(path: str | os.PathLike, samples: np.ndarray, rate: int) -> Level:
    """The level of a whole recording. DecodeError: non-finite, absurd or without sound."""
    high, low = float(samples.max()), float(samples.min())
    peak = max(high, -low)
    if not math.isfinite(peak):
        bad = int(np.count_nonzero(~np.isfinite(samples)))
        raise DecodeError(path, f"non-finite: {bad}", "non-finite samples")
    if peak > MAX_PEAK:
        raise DecodeError(path, f"absurd level: peak {peak:.3g}", "absurd level")
    if peak > 1:
        mean = float(np.abs(samples).mean(dtype=np.float64))
        if mean < MIN_MEAN * peak:
            reason = f"absurd level: peak {peak:.3g} over a signal of {mean:.3g} on average"
            raise DecodeError(path, reason, "absurd level")
    require_sound(path, samples, rate)
    full = np.count_nonzero(np.abs(samples) >= CLIPPED) if CLIPPED <= peak <= 1 else 0
    return Level(peak, full / samples.size, louder_channel(samples))


def require_sound(path: str | os.PathLike, samples: np.ndarray, rate: int) -> None:
    """DecodeError: less than 0.15 s of a recording leave -60 dBFS (of a short one, half of it).

    A few samples settle it for nearly all recordings; otherwise every sample is checked. The few
    can only say yes where all of them would.
    """
    frame = max(1, round(FRAME_S * rate))
    needed = min(MIN_SOUND_S, len(samples) / rate / 2)
    offset = _offsets(samples)
    heard = np.flatnonzero((np.abs(samples[::_STRIDE] - offset) > _FLOOR).any(1)) * _STRIDE // frame
    if len(heard) and (1 + np.count_nonzero(np.diff(heard))) * FRAME_S >= needed:
        return
    count = np.count_nonzero(_frame_peaks(samples, frame, offset) > _FLOOR)
    if count * FRAME_S >= needed:
        return
    if not samples.any():
        raise DecodeError(path, "silent: every sample is 0", "silent")
    moving = samples - samples.mean(0, dtype=np.float64)
    level = decibels(math.sqrt(float(np.square(moving, dtype=np.float64).mean())))
    if not count:
        held = (
            f", a constant offset of {float(np.abs(offset).max()):.2g}"
            if np.abs(offset).max() > _FLOOR
            else ""
        )
        raise DecodeError(path, f"silent: {level:.1f} dBFS{held}", "silent")
    total = f"{count * FRAME_S:.2f} s of sound in {len(samples) / rate:.2f} s"
    raise DecodeError(
        path,
        f"almost silent: {total}, {level:.1f} dBFS; the rest is below {FLOOR_DB:.0f} dBFS",
        "almost silent",
    )


def _offsets(samples: np.ndarray) -> np.ndarray:
    """The constant offset of each channel, float32[channels]: a median, which no click moves."""
    some = samples[:: max(1, len(samples) // _OFFSET_SAMPLES)]
    return np.partition(some, len(some) // 2, axis=0)[len(some) // 2]


def _frame_peaks(samples: np.ndarray, frame: int, offset: np.ndarray) -> np.ndarray:
    """The largest magnitude of each frame and channel, without the offset; the last frame may be
    short.
    """
    starts = np.arange(0, len(samples), frame)
    high, low = np.maximum.reduceat(samples, starts), np.minimum.reduceat(samples, starts)
    return np.maximum(high - offset, offset - low).max(1)


def _powers(samples: np.ndarray) -> tuple[np.ndarray, float]:
    """Power of each channel, and of their mean, without constant offsets; of samples
    spread evenly.
    """
    probe = np.ascontiguousarray(samples[:: max(1, len(samples) // _CHANNEL_SAMPLES)].T, np.float64)
    probe -= probe.mean(1, keepdims=True)
    mixed = probe.mean(0)
    return np.einsum("cn,cn->c", probe, probe) / len(mixed), float(mixed @ mixed) / len(mixed)


def louder_channel(samples: np.ndarray) -> int | None:
    """The channel to take alone if the mean of all would cancel it; None if the mean is right.

    Two channels cancel where their mean is 10 dB below the louder one, as right = -0.9 left makes
    it (26 dB). Empty channels do not count: the mean is only softer.
    """
    channels = samples.shape[1]
    if channels == 1:
        return None
    powers, mixed = _powers(samples)
    best = int(powers.argmax())
    return best if mixed < CANCELLED * powers[best] * (2 / channels) ** 2 else None


def _has_dead(samples: np.ndarray) -> bool:
    if samples.shape[1] != 2:
        return False
    powers, _ = _powers(samples)
    return bool(powers.min() < DEAD * powers.max())


def shape(samples: np.ndarray, rate: int, channel: int | None = None) -> Shape:
    """Where a recording that passed `measure` has sound; `channel` alone if the others cancel."""
    offsets = samples.mean(0, dtype=np.float64)
    wave = mono(samples, channel)
    wave = wave - np.float32(offsets.mean() if channel is None else offsets[channel])
    frame = max(1, round(FRAME_S * rate))
    starts = np.arange(0, len(wave), frame)
    power = np.add.reduceat(np.square(wave), starts) / np.minimum(frame, len(wave) - starts)
    loud = float(np.quantile(power, _LOUD)) or float(power.max())
    sounding = np.flatnonzero(power > max(loud * 10 ** (SILENCE_DB / 10), _FLOOR**2 / 2))
    if not len(sounding):
        return Shape(decibels(math.sqrt(float(power.max()))), 0.0, 0.0, 0.0)
    level = decibels(math.sqrt(float(power[sounding].mean())))
    pause = int(np.diff(sounding).max(initial=1)) - 1
    lead, tail = int(sounding[0]), len(power) - 1 - int(sounding[-1])
    spectrum, hz = _spectrum(wave, rate, sounding, frame)
    seconds = (round(n * frame / rate, 2) for n in (lead, tail, pause))
    offset = float(np.abs(offsets).max())
    return Shape(
        round(level, 1),
        *seconds,
        offset,
        _has_dead(samples),
        _band(spectrum, hz),
        _hum(spectrum, hz),
    )


@functools.lru_cache(maxsize=16)
def _window(n: int) -> np.ndarray:
    return np.hanning(n).astype(np.float32)


def _spectrum(
    wave: np.ndarray, rate: int, sounding: np.ndarray, frame: int
) -> tuple[np.ndarray, float]:
    """Power of each bin of the part of a recording that sounds most, the middle if all does, a
    full-scale sine being 1; and a bin's width in Hz. `sounding`: frames of `frame` samples.
    """
    most = 1 << rate.bit_length()  # 1 to 2 s: bins of 0.5 to 1 Hz
    n = min(most, 1 << (len(wave).bit_length() - 1))
    starts = np.arange(0, len(wave) - n + 1, frame)
    begin, end = (np.searchsorted(sounding, x) for x in (starts // frame, (starts + n) // frame))
    fullest = starts[end - begin == (end - begin).max()]
    first = fullest[np.abs(fullest - (len(wave) - n) // 2).argmin()]
    window = _window(n)
    spectrum = np.abs(np.fft.rfft(wave[first : first + n] * window)) * (2 / (window.sum() or 1.0))
    return np.square(spectrum), rate / n


def _band(spectrum: np.ndarray, hz: float) -> int:
    """The frequency above which a voice has nothing, 60 dB below its vowels; 0 if it has consonants
    above 5 kHz or is no voice.
    """
    total = np.cumsum(spectrum)
    vowels, voiced = (_between(total, hz, low, high) for low, high in ((100, 1000), (1000, 3000)))
    if (
        voiced <= VOICED * vowels
        or len(spectrum) * hz <= BAND_HZ
        or _between(total, hz, BAND_HZ, len(spectrum) * hz) > NOTHING * vowels
    ):
        return 0
    return round(float(np.searchsorted(total, total[-1] * (1 - NOTHING))) * hz)


def _between(total: np.ndarray, hz: float, low: float, high: float) -> float:
    at = [min(len(total) - 1, round(f / hz)) for f in (low, high)]
    return float(total[at[1]] - total[at[0]])


def _hum(spectrum: np.ndarray, hz: float) -> int:
    """The frequency of audible mains hum, 0 if there is none: a line 20 dB above its neighbours."""
    if hz > _HUM_BIN_HZ:
        return 0
    for mains in (50, 60):
        at, wide, near = round(mains / hz), max(1, round(1 / hz)), round(8 / hz)
        line = float(spectrum[at - wide : at + wide + 1].max())
        beside = np.r_[
            spectrum[max(1, at - near) : at - 2 * wide], spectrum[at + 2 * wide + 1 : at + near]
        ]
        if len(beside) and line > HUM * float(np.median(beside)) and line > HUM_FLOOR:
            return mains
    return 0
