"""What is done to every recording before it is used, where the settings ask for it: silence at its
ends is cut down, and its level is made that of the others.

Decided once, by the levels of the whole recording (`levels.py`); from then on it is three numbers,
the same for training, samples and references.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Portion:
    """What of a recording is used, in its own samples, and by what it is multiplied."""

    first: int
    frames: int
    gain: float

    def of(self, wave: np.ndarray) -> np.ndarray:
        """float32[frames] within [-1, 1] of the recording's float32[n] within [-1, 1]."""
        return self.scaled(wave[self.first : self.first + self.frames])

    def scaled(self, wave: np.ndarray) -> np.ndarray:
        """Any part of it, with its gain, within [-1, 1]."""
        if self.gain == 1:
            return wave
        return np.clip(wave * np.float32(self.gain), -1.0, 1.0)


@dataclass(frozen=True)
class Treatment:
    """The settings.

    `trim_s`: seconds of silence that stay before and after the sound; None: all.
    `level_db`: dBFS of what sounds in a recording; None: as it is.
    """

    trim_s: float | None = None
    level_db: float | None = None

    @property
    def changes(self) -> bool:
        """Whether anything is done."""
        return self.trim_s is not None or self.level_db is not None

    def portion(
        self, frames: int, rate: int, peak: float, level_db: float, ends_s: tuple[float, float]
    ) -> Portion:
        """Of a recording of `frames` samples, as `levels.measure` and `levels.shape` found it.

        `peak`, `level_db`: as stored, before a peak above 1 is scaled to 1. `ends_s`: seconds of
        silence before and after. The gain never lifts the peak above full scale.
        """
        first, last = 0, frames
        if self.trim_s is not None:
            before, after = (max(0, round((s - self.trim_s) * rate)) for s in ends_s)
            first, last = min(before, frames - 1), max(frames - after, before + 1)
        gain = 1.0
        if self.level_db is not None:
            scaled_to_1 = max(peak, 1.0)
            wanted = 10 ** ((self.level_db - level_db) / 20) * scaled_to_1
            gain = float(np.float32(min(wanted, scaled_to_1 / peak)))
        return Portion(first, last - first, gain)
