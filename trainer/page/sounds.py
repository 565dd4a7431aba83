"""A recording on a page: a player's sound, and its mel in Hz as a small picture."""

from __future__ import annotations

import base64
import io
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
import soxr
from PIL import Image

from common.audio.errors import DecodeError
from common.audio.reading import mono, open_audio, read
from common.xtts.filterbank import hz_to_mel, log_mel_numpy

MEL_RATE, FFT, HOP, TOP_HZ = 22050, 1024, 256, 8000.0
NUM_MELS = 80
OPUS_RATE = 24000  # one of the five rates that Opus has
LONGEST_S = 30.0  # of what a page plays
SECOND_PX, HEIGHT_PX = 90, 112  # of a mel on the page
SHOWN_HZ = (500, 1000, 2000, 4000)
QUIETEST_NATS = 9.0  # below the loudest, in log power: what is quieter is black
# Magma, at equal distances (matplotlib's colour map of that name).
_MAGMA = (
    *("000004", "140e36", "3b0f70", "641a80", "8c2981"),
    *("b73779", "de4968", "f7705c", "fe9f6d", "fecf92", "fcfdbf"),
)


@dataclass(frozen=True)
class Sound:
    """Samples float32[n], mono, and their rate; `path`: the file they came from."""

    path: Path
    samples: np.ndarray
    rate: int

    @property
    def seconds(self) -> float:
        """Its length in seconds."""
        return len(self.samples) / self.rate

    @property
    def log_mel(self) -> np.ndarray:
        """[frames, 80], log power, 0 to 8000 Hz; no frames where it is too short for one."""
        wav = soxr.resample(self.samples, self.rate, MEL_RATE).astype(np.float32)
        if len(wav) <= FFT:
            return np.zeros((0, NUM_MELS), np.float32)
        return log_mel_numpy(wav, FFT, FFT, HOP, NUM_MELS, MEL_RATE, TOP_HZ)


@dataclass(frozen=True)
class Scale:
    """Which log power is black and which is white, for every mel of a page."""

    low: float
    high: float

    @classmethod
    def of(cls, mels: list[np.ndarray]) -> Scale:
        """From the loudest that occurs in these, without single peaks. Give the recordings: the
        noise of a bad sample must not set the scale of the others.
        """
        values = np.concatenate([m.ravel() for m in mels]) if mels else np.zeros(0)
        high = float(np.percentile(values, 99.8)) if len(values) else 0.0
        return cls(high - QUIETEST_NATS, high)


def load(path: str | Path) -> Sound | None:
    """A sound file, the first 30 s of it; None: there is none, or it cannot be read."""
    try:
        with open_audio(path) as f:
            samples = read(f, path, 0, min(f.frames, int(LONGEST_S * f.samplerate)))
            return Sound(Path(path), mono(samples), f.samplerate)
    except (DecodeError, OSError):
        return None


def opus(sound: Sound) -> str:
    """A `data:` address that every browser of today plays: Opus in Ogg, some 5 kB a second."""
    samples = soxr.resample(np.clip(sound.samples, -1, 1), sound.rate, OPUS_RATE)
    out = io.BytesIO()
    soundfile.write(out, samples, OPUS_RATE, format="OGG", subtype="OPUS")
    return "data:audio/ogg;base64," + base64.b64encode(out.getvalue()).decode()


def picture(log_mel: np.ndarray, scale: Scale) -> str:
    """A `data:` address of a WebP picture [80 high, a pixel per frame], low frequencies below."""
    share = np.clip((log_mel - scale.low) / (scale.high - scale.low), 0, 1)
    pixels = np.round(255 * share).astype(np.uint8).T[::-1]
    out = io.BytesIO()
    Image.fromarray(_colours()[pixels]).save(out, "WEBP", quality=60)
    return "data:image/webp;base64," + base64.b64encode(out.getvalue()).decode()


def shrunk(path: Path) -> str:
    """A picture file as a `data:` address of WebP; "" where it cannot be read."""
    out = io.BytesIO()
    try:
        with Image.open(path) as found:
            found.convert("RGB").save(out, "WEBP", quality=55)
    except (OSError, ValueError):
        return ""
    return "data:image/webp;base64," + base64.b64encode(out.getvalue()).decode()


def _colours() -> np.ndarray:
    """uint8[256, 3]."""
    known = np.array([[int(c[i : i + 2], 16) for i in (0, 2, 4)] for c in _MAGMA], np.float64)
    at = np.linspace(0, len(known) - 1, 256)
    parts = [np.interp(at, np.arange(len(known)), known[:, i]) for i in range(3)]
    return np.round(np.stack(parts, 1)).astype(np.uint8)


def height_of(hz: float) -> float:
    """A frequency's place in a picture: 0 at the top (8000 Hz), 1 at the bottom (0 Hz)."""
    return 1.0 - float(hz_to_mel(hz)) / float(hz_to_mel(TOP_HZ))


def width_of(seconds: float) -> int:
    """Pixels for so many seconds on a page: the same scale for every mel."""
    return max(1, math.ceil(seconds * SECOND_PX))
