"""Reference clips: recordings of a voice, read from files. TensorFlow-free, so that a clip can be tried before anything is started."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field

import numpy as np
import soundfile
import soxr

MIN_SECONDS = 0.33  # less is no voice
MOST_S = 30.0  # of a reference; a model takes no more
# Channels of opposite phase take each other away: a mean so far below the loudest channel is not the recording.
CANCELLED_BELOW = 0.25
SILENT_BELOW = 1e-3  # of full scale, the level of what is used: -60 dBFS
_LOOKED_AT_S = 120.0  # up to here a file is looked at whole, above it at 60 places of half a second
_PROBES, _PROBE_S, _FRAME_S = 60, 0.5, 0.1
_QUIET = 0.02  # of the loudest frame: -34 dB is a pause
_MOST_FRAMES = 1 << 40  # more is what a FLAC that was written to a pipe says
_MARGIN_S, _LONG_PAUSE_S = 0.2, 0.5


class ReferenceClipError(ValueError):
    """A reference clip that no voice can be made of; says which and why."""


@dataclass(frozen=True)
class Reference:
    """What is used of a recording.

    Attributes:
        wav: float32[n], mono, at most 30 s.
        sound_s: seconds of it that are no pause.
        notes: what a user should know, a line each.
    """

    wav: np.ndarray
    seconds: float
    sound_s: float
    notes: tuple[str, ...] = field(default=())


def load_clip(path: str | os.PathLike, sample_rate: int = 22050) -> np.ndarray:
    """A recording (WAV, FLAC, MP3, OGG) as a clip: float32 mono at `sample_rate` in [-1, 1].

    ReferenceClipError: unreadable, empty, silent, or with samples that are not finite.
    """
    with _opened(path) as file:
        samples = _read(file, path, 0, file.frames)
        rate = file.samplerate
    if not np.abs(samples).max() > 0:
        raise ReferenceClipError(f"reference {path}: silent")
    return _resampled(mono(samples)[0], rate, sample_rate)


def load_reference(path: str | os.PathLike, sample_rate: int = 22050) -> Reference:
    """What a voice is made of: of a long recording the 30 s with the most sound, without long silence before and after.

    Forty minutes cost what half a minute costs. ReferenceClipError as of `load_clip`, and where what is used is quieter than -60 dBFS.
    """
    with _opened(path) as file:
        rate, frames = file.samplerate, file.frames
        first = _loudest_part(file, path)
        samples = _read(file, path, first, min(frames - first, round(MOST_S * rate)))
    wav, cancelled = mono(samples)
    begin, end, sound_s = _without_silence(wav, rate)
    wav = wav[begin:end]
    level = float(np.sqrt(np.mean(np.square(wav, dtype=np.float64)))) if len(wav) else 0.0
    if level < SILENT_BELOW:
        said = "silent" if level == 0 else f"at {20 * math.log10(level):.0f} dBFS as good as silent"
        raise ReferenceClipError(f"reference {path}: {said}; give a recording that can be heard")
    notes = []
    if cancelled:
        notes.append(f"{path}: its channels cancel each other; the louder one is used")
    at, seconds = (first + begin) / rate, len(wav) / rate
    if frames / rate - seconds > _LONG_PAUSE_S:
        notes.append(f"{path}: {seconds:.1f} s from {at:.1f} s on are used, of {frames / rate:.1f} s")
    return Reference(_resampled(wav, rate, sample_rate), seconds, sound_s, tuple(notes))


def mono(samples: np.ndarray) -> tuple[np.ndarray, bool]:
    """float32[n, channels] -> the mean of the channels, or where they cancel each other, the loudest; and whether they do."""
    if samples.shape[1] == 1:
        return samples[:, 0], False
    mean, levels = samples.mean(axis=1), np.sqrt(np.mean(np.square(samples, dtype=np.float64), axis=0))
    cancelled = bool(np.sqrt(np.mean(np.square(mean, dtype=np.float64))) < CANCELLED_BELOW * levels.max())
    return (samples[:, int(levels.argmax())] if cancelled else mean), cancelled


def _opened(path: str | os.PathLike) -> soundfile.SoundFile:
    try:
        file = soundfile.SoundFile(os.fspath(path))
    except (soundfile.SoundFileError, OSError) as e:
        raise ReferenceClipError(f"reference {path}: cannot be read as audio ({e})") from e
    unknown = file.frames > _MOST_FRAMES
    if unknown or not file.frames:
        file.close()
        said = "its header does not say how long it is; write it again, as WAV for example" if unknown else "no samples"
        raise ReferenceClipError(f"reference {path}: {said}")
    return file


def _read(file: soundfile.SoundFile, path, first: int, count: int) -> np.ndarray:
    """float32[count, channels] in [-1, 1], louder recordings made as loud as that."""
    try:
        file.seek(first)
        samples = file.read(count, dtype="float32", always_2d=True)
    except (soundfile.SoundFileError, OSError) as e:
        raise ReferenceClipError(f"reference {path}: cannot be read as audio ({e})") from e
    if not len(samples):
        raise ReferenceClipError(f"reference {path}: no samples")
    peak = float(np.abs(samples).max())
    if not math.isfinite(peak):
        raise ReferenceClipError(f"reference {path}: has samples that are not finite")
    return samples / max(peak, 1.0)


def _loudest_part(file: soundfile.SoundFile, path) -> int:
    """Where the 30 s with the most sound begin."""
    rate, wanted = file.samplerate, round(MOST_S * file.samplerate)
    if file.frames <= wanted:
        return 0
    if file.frames <= _LOOKED_AT_S * rate:
        levels = _levels(mono(_read(file, path, 0, file.frames))[0], round(_FRAME_S * rate))
        starts = np.arange(len(levels)) * round(_FRAME_S * rate)
    else:
        starts = np.linspace(0, file.frames - round(_PROBE_S * rate), _PROBES).astype(np.int64)
        probes = (mono(_read(file, path, int(s), round(_PROBE_S * rate)))[0] for s in starts)
        levels = np.array([np.sqrt(np.mean(np.square(p, dtype=np.float64))) for p in probes])
    heard = levels > _QUIET * levels.max()
    counts = [int(heard[(starts >= s) & (starts < s + wanted)].sum()) for s in starts]
    best = starts[int(np.argmax(counts))]
    sound = starts[heard & (starts >= best) & (starts < best + wanted)]
    middle = int(sound[0] + sound[-1]) // 2 if len(sound) else 0  # between the places looked at there may be more of it
    return min(max(0, middle - wanted // 2), file.frames - wanted)


def _levels(wav: np.ndarray, size: int) -> np.ndarray:
    """Root mean square of each `size` samples; the last part may be shorter."""
    sums = np.add.reduceat(np.square(wav, dtype=np.float64), np.arange(0, len(wav), size))
    return np.sqrt(sums / np.minimum(size, len(wav) - np.arange(0, len(wav), size)))


def _without_silence(wav: np.ndarray, rate: int) -> tuple[int, int, float]:
    """Where the sound begins and ends, long silence left out, and how many seconds of it are no pause."""
    size = round(_FRAME_S * rate)
    levels = _levels(wav, size)
    heard = np.flatnonzero(levels > max(_QUIET * levels.max(), SILENT_BELOW / 10))
    if not len(heard):
        return 0, len(wav), 0.0
    begin, end, pause, margin = heard[0] * size, min((heard[-1] + 1) * size, len(wav)), _LONG_PAUSE_S * rate, round(_MARGIN_S * rate)
    begin = max(0, begin - margin) if begin > pause else 0
    end = min(len(wav), end + margin) if len(wav) - end > pause else len(wav)
    return int(begin), int(end), float(min(len(heard) * size, len(wav)) / rate)


def _resampled(wav: np.ndarray, rate: int, sample_rate: int) -> np.ndarray:
    wav = soxr.resample(wav, rate, sample_rate) if rate != sample_rate else wav
    return np.clip(wav, -1.0, 1.0).astype(np.float32)
