"""Reference clips: recordings of a voice, read from files. TensorFlow-free, so that a clip can be tried before anything is started."""

from __future__ import annotations

import math
import os

import numpy as np
import soundfile
import soxr

MIN_SECONDS = 0.33  # less is no voice


class ReferenceClipError(ValueError):
    """A reference clip that no voice can be made of; says which and why."""


def load_clip(path: str | os.PathLike, sample_rate: int = 22050) -> np.ndarray:
    """A recording (WAV, FLAC, MP3, OGG) as a clip: float32 mono at `sample_rate` in [-1, 1].

    ReferenceClipError: unreadable, empty, silent, or with samples that are not finite.
    """
    try:
        samples, rate = soundfile.read(os.fspath(path), dtype="float32", always_2d=True)
    except (soundfile.SoundFileError, OSError) as e:
        raise ReferenceClipError(f"reference {path}: cannot be read as audio ({e})") from e
    if not len(samples):
        raise ReferenceClipError(f"reference {path}: no samples")
    peak = float(np.abs(samples).max())
    if not math.isfinite(peak):
        raise ReferenceClipError(f"reference {path}: has samples that are not finite")
    if peak == 0:
        raise ReferenceClipError(f"reference {path}: silent")
    mono = samples.mean(axis=1) / max(peak, 1.0)
    if rate != sample_rate:
        mono = soxr.resample(mono, rate, sample_rate)
    return np.clip(mono, -1.0, 1.0).astype(np.float32)
