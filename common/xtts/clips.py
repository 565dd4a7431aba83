"""Reference clips: recordings of a voice, read from files. TensorFlow-free, so that a clip can be tried before anything is started."""

from __future__ import annotations

import os

import numpy as np
import soxr

from common.audio.containers import check_whole
from common.audio.errors import DecodeError
from common.audio.levels import measure
from common.audio.reading import MAX_VALUES, is_converted, mono, open_audio, read

MIN_SECONDS = 0.33  # less is no voice
MAX_SECONDS = 600.0  # more is read of no recording: minutes of a voice are more than a model takes


class ReferenceClipError(ValueError):
    """A reference clip that no voice can be made of; says which and why."""


def load_clip(path: str | os.PathLike, sample_rate: int = 22050) -> np.ndarray:
    """A recording as a clip: float32 mono at `sample_rate` in [-1, 1]; of a long one the first ten minutes.

    Formats, levels and channels are those of a corpus' clips (`audio_file.py`, `levels.py`).
    ReferenceClipError: what the scan would refuse: unreadable, empty, cut, silent, or with samples that are not finite.
    """
    try:
        f = open_audio(path)
    except DecodeError as e:
        raise ReferenceClipError(f"reference {path}: cannot be read as audio: {e.reason}") from e
    try:
        with f:
            rate = f.samplerate
            if not is_converted(f):
                check_whole(path, os.path.getsize(path), f.format, thorough=True)
            samples = read(f, path, 0, min(f.frames, round(MAX_SECONDS * rate), MAX_VALUES // f.channels))
        level = measure(path, samples, rate)
    except DecodeError as e:
        raise ReferenceClipError(f"reference {path}: {e.reason}") from e
    wave = mono(samples, level.channel) / np.float32(max(level.peak, 1.0))
    if rate != sample_rate:
        wave = soxr.resample(wave, rate, sample_rate)
    return np.clip(wave, -1.0, 1.0).astype(np.float32)
