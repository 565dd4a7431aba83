"""Reference clips: recordings of a voice, read from files, without TensorFlow.

Formats, levels and channels are those of a corpus' clips (`common.audio`): what the scan would
refuse is no reference either.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import soundfile
import soxr

from common.audio.containers import check_whole
from common.audio.errors import DecodeError
from common.audio.levels import louder_channel, measure, require_sound, shape
from common.audio.reading import MAX_VALUES, is_converted, mono, open_audio, read
from common.audio.treatment import Portion, Treatment

MIN_SECONDS = 0.33  # less is no voice
MAX_SECONDS = 600.0  # more is read of no recording as a whole clip
MOST_S = 30.0  # of a reference; a model takes no more
SILENT_BELOW = 1e-3  # of full scale, the level of what is used: -60 dBFS
_LOOKED_AT_S = 120.0  # up to here a file is looked at whole, above it at 60 places of half a second
_PROBES, _PROBE_S, _FRAME_S = 60, 0.5, 0.1
_QUIET = 0.02  # of the loudest frame: -34 dB is a pause
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


def load_clip(
    path: str | os.PathLike, sample_rate: int = 22050, portion: Portion | None = None
) -> np.ndarray:
    """A recording as a clip: float32 mono at `sample_rate` in [-1, 1]; of a long one the first ten
    minutes. `portion`: what of it is used, as in training.

    ReferenceClipError: what the scan would refuse: unreadable, empty, cut, silent, or with samples
    that are not finite.
    """
    with _opened(path) as f:
        rate = f.samplerate
        if not is_converted(f):
            check_whole(path, os.path.getsize(path), f.format, thorough=True)
        samples = read(
            f, path, 0, min(f.frames, round(MAX_SECONDS * rate), MAX_VALUES // f.channels)
        )
        level = measure(path, samples, rate)
    wave = mono(samples, level.channel) / np.float32(max(level.peak, 1.0))
    return _resampled(wave if portion is None else portion.of(wave), rate, sample_rate)


def load_reference(
    path: str | os.PathLike, sample_rate: int = 22050, treatment: Treatment | None = None
) -> Reference:
    """What a voice is made of: of a long recording the 30 s with the most sound, without long
    silence before and after. `treatment`: what a run does to its recordings; done to this part.

    Forty minutes cost what half a minute costs. ReferenceClipError as of `load_clip`, and where
    what is used is quieter than -60 dBFS.
    """
    with _opened(path) as file:
        rate, frames = file.samplerate, file.frames
        first = _loudest_part(file, path)
        samples = _read(file, path, first, min(frames - first, round(MOST_S * rate)))
        require_sound(path, samples, rate)
    channel = louder_channel(samples)
    wav, cancelled = mono(samples, channel), channel is not None
    begin, end, sound_s = _without_silence(wav, rate)
    wav = wav[begin:end]
    level = float(np.sqrt(np.mean(np.square(wav, dtype=np.float64)))) if len(wav) else 0.0
    if level < SILENT_BELOW:
        said = "silent" if level == 0 else f"at {20 * math.log10(level):.0f} dBFS as good as silent"
        raise ReferenceClipError(f"reference {path}: {said}; give a recording that can be heard")
    if treatment is not None and treatment.changes:
        portion = _portion_of(wav, rate, treatment)
        wav, begin = portion.of(wav), begin + portion.first
    notes = []
    if cancelled:
        notes.append(f"{path}: its channels cancel each other; the louder one is used")
    at, seconds = (first + begin) / rate, len(wav) / rate
    if frames / rate - seconds > _LONG_PAUSE_S:
        notes.append(
            f"{path}: {seconds:.1f} s from {at:.1f} s on are used, of {frames / rate:.1f} s"
        )
    return Reference(_resampled(wav, rate, sample_rate), seconds, sound_s, tuple(notes))


def _portion_of(wav: np.ndarray, rate: int, treatment: Treatment) -> Portion:
    """Of a part that is used as if it were the whole recording."""
    found, peak = shape(wav[:, np.newaxis], rate), float(np.abs(wav).max())
    return treatment.portion(len(wav), rate, peak, found.level_db, (found.lead_s, found.tail_s))


@contextmanager
def _opened(path: str | os.PathLike) -> Iterator[soundfile.SoundFile]:
    try:
        file = open_audio(path)
    except DecodeError as e:
        raise ReferenceClipError(f"reference {path}: cannot be read as audio: {e.reason}") from e
    try:
        with file:
            yield file
    except DecodeError as e:
        raise ReferenceClipError(f"reference {path}: {e.reason}") from e


def _read(file: soundfile.SoundFile, path, first: int, count: int) -> np.ndarray:
    """float32[count, channels] in [-1, 1], louder recordings made as loud as that."""
    samples = read(file, path, first, count)
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
        levels = _levels(_voice(_read(file, path, 0, file.frames)), round(_FRAME_S * rate))
        starts = np.arange(len(levels)) * round(_FRAME_S * rate)
    else:
        starts = np.linspace(0, file.frames - round(_PROBE_S * rate), _PROBES).astype(np.int64)
        probes = (_voice(_read(file, path, int(s), round(_PROBE_S * rate))) for s in starts)
        levels = np.array([np.sqrt(np.mean(np.square(p, dtype=np.float64))) for p in probes])
    heard = levels > _QUIET * levels.max()
    counts = [int(heard[(starts >= s) & (starts < s + wanted)].sum()) for s in starts]
    best = starts[int(np.argmax(counts))]
    sound = starts[heard & (starts >= best) & (starts < best + wanted)]
    middle = (
        int(sound[0] + sound[-1]) // 2 if len(sound) else 0
    )  # between the places looked at there may be more of it
    return min(max(0, middle - wanted // 2), file.frames - wanted)


def _voice(samples: np.ndarray) -> np.ndarray:
    return mono(samples, louder_channel(samples))


def _levels(wav: np.ndarray, size: int) -> np.ndarray:
    """Root mean square of each `size` samples; the last part may be shorter."""
    sums = np.add.reduceat(np.square(wav, dtype=np.float64), np.arange(0, len(wav), size))
    return np.sqrt(sums / np.minimum(size, len(wav) - np.arange(0, len(wav), size)))


def _without_silence(wav: np.ndarray, rate: int) -> tuple[int, int, float]:
    """Where the sound begins and ends, long silence left out, and how many seconds of it are no
    pause.
    """
    size = round(_FRAME_S * rate)
    levels = _levels(wav, size)
    heard = np.flatnonzero(levels > max(_QUIET * levels.max(), SILENT_BELOW / 10))
    if not len(heard):
        return 0, len(wav), 0.0
    begin, end, pause, margin = (
        heard[0] * size,
        min((heard[-1] + 1) * size, len(wav)),
        _LONG_PAUSE_S * rate,
        round(_MARGIN_S * rate),
    )
    begin = max(0, begin - margin) if begin > pause else 0
    end = min(len(wav), end + margin) if len(wav) - end > pause else len(wav)
    return int(begin), int(end), float(min(len(heard) * size, len(wav)) / rate)


def _resampled(wav: np.ndarray, rate: int, sample_rate: int) -> np.ndarray:
    wav = soxr.resample(wav, rate, sample_rate) if rate != sample_rate else wav
    return np.clip(wav, -1.0, 1.0).astype(np.float32)
