"""Recordings changed while they are trained on, as a room, a noise, a telephone or another distance
would have changed them.

What is done to a row's recording is a pure function of the row's seed, which follows from the run's
seed and the batch's number, and of the utterance: whoever makes the batch, and however often, makes
the same bytes. Waves are float32[n] at 22 050 Hz within [-1, 1].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from common.data import stateless_random
from common.run.sections import Augment

RATE = 22050
MOST_HZ = 10000.0  # a band limit above is not heard
MORE_DB = 25.0  # a noise is at most so much softer than the loudest that is allowed
DIRECT_DB = (0.0, 12.0)  # the direct sound against the room's, from afar to near
LEAST_ROOM_S = 0.1
FIRST_ECHO_S = (0.002, 0.012)
_PURPOSE = 0x617567  # apart from all else that is drawn with a row's seed
_NOISE, _ROOM = 1, 2


@dataclass(frozen=True)
class Change:
    """What is done to one recording, in this order: room, noise, band limit, gain.

    `seed`: of the noise and of the room's echoes. `room_s`: time in which these fall by 60 dB.
    `noise_db`: the speech's level above the noise's; `slope`: of the noise's power over frequency,
    0 for white, 1 for pink, 2 for brown. None: not done.
    """

    seed: int
    gain_db: float = 0.0
    band_hz: float | None = None
    noise_db: float | None = None
    slope: float = 0.0
    room_s: float | None = None
    direct_db: float = 0.0
    echo_s: float = 0.0

    def __call__(self, wave: np.ndarray) -> np.ndarray:
        """float32[n] of float32[n]; a peak above 1 is scaled to 1."""
        out = wave.astype(np.float64)
        if self.room_s or self.noise_db is not None or self.band_hz:
            out = self._filtered(out)
        gain, peak = 10 ** (self.gain_db / 20), float(np.abs(out).max(initial=0))
        if peak * gain > 1:
            gain = 1 / peak
        return np.clip(out * gain, -1, 1).astype(np.float32)

    def _filtered(self, wave: np.ndarray) -> np.ndarray:
        echoes = self._echoes() if self.room_s else np.ones(1)
        n = _fast_length(len(wave) + len(echoes))
        spectrum = np.fft.rfft(wave, n)
        if self.room_s:
            power = _power(spectrum)
            spectrum = spectrum * np.fft.rfft(echoes, n)
            spectrum *= np.sqrt(power / max(_power(spectrum), 1e-30))
        hz = np.arange(len(spectrum)) * (RATE / n)
        if self.noise_db is not None:
            noise = np.fft.rfft(_gaussian(self.seed, _NOISE, len(wave)), n)
            noise *= np.maximum(hz, 50.0) ** (-self.slope / 2)
            noise[hz < 20.0] = 0
            wanted = _power(spectrum) / 10 ** (self.noise_db / 10)
            spectrum = spectrum + noise * np.sqrt(wanted / _power(noise))
        if self.band_hz:
            width = 0.1 * self.band_hz
            over = np.clip((hz - self.band_hz + width) / width, 0, 1)
            spectrum = spectrum * (0.5 + 0.5 * np.cos(np.pi * over))
        return np.fft.irfft(spectrum, n)[: len(wave)]

    def _echoes(self) -> np.ndarray:
        """The impulse response of a room: the direct sound, then noise that dies away."""
        n = round(self.room_s * RATE)
        tail = _gaussian(self.seed, _ROOM, n) * 10 ** (-3 * np.arange(n) / n)
        tail[: round(self.echo_s * RATE)] = 0
        tail *= np.sqrt(10 ** (-self.direct_db / 10) / max(float(np.square(tail).sum()), 1e-30))
        tail[0] = 1.0
        return tail


def change_of(augment: Augment, row_seed: int, utterance: int) -> Change | None:
    """What is done to an utterance's recording in a row; None: nothing.

    Of a row that is changed, each effect that the settings have is as likely to be there as not,
    and one is there at least. A row's seed decides all but the noise and the room's echoes: a
    recording that lends its voice to the row is changed as the row's own is.
    """
    if not augment.share:
        return None
    key = stateless_random.key(row_seed, _PURPOSE)
    u = stateless_random.uniform(stateless_random.draws(key, np.arange(16))).tolist()
    has = {
        "gain": augment.gain_db > 0,
        "band": augment.band_hz is not None,
        "noise": augment.noise_db is not None,
        "room": augment.room_s is not None,
    }
    there = [name for name, yes in has.items() if yes]
    if u[0] >= augment.share or not there:
        return None
    chosen = {name for name, draw in zip(has, u[1:5], strict=True) if has[name] and draw < 0.5}
    chosen = chosen or {there[int(u[5] * len(there))]}
    values: dict[str, float] = {}
    if "gain" in chosen:
        values["gain_db"] = augment.gain_db * (2 * u[6] - 1)
    if "band" in chosen:
        values["band_hz"] = augment.band_hz + u[7] * max(0.0, MOST_HZ - augment.band_hz)
    if "noise" in chosen:
        values |= {"noise_db": augment.noise_db + MORE_DB * u[8], "slope": 2 * u[9]}
    if "room" in chosen:
        room_s = LEAST_ROOM_S + u[10] * max(0.0, augment.room_s - LEAST_ROOM_S)
        values |= {"room_s": room_s, "direct_db": _between(DIRECT_DB, u[11])}
        values["echo_s"] = _between(FIRST_ECHO_S, u[12])
    return Change(int(stateless_random.key(row_seed, _PURPOSE, utterance)), **values)


def probe_change() -> Change:
    """One of everything, for the digest by which producers are compared."""
    return Change(1, -3.0, 5000.0, 15.0, 1.0, 0.3, 3.0, 0.005)


def _between(ends: tuple[float, float], share: float) -> float:
    return ends[0] + share * (ends[1] - ends[0])


def _power(spectrum: np.ndarray) -> float:
    # No BLAS, whose threads would decide the order of the sum.
    return float((np.square(spectrum.real) + np.square(spectrum.imag)).sum())


def _gaussian(seed: int, purpose: int, n: int) -> np.ndarray:
    """float64[n], nearly normal with variance 1: sums of the four parts of a 64-bit draw."""
    bits = stateless_random.draws(stateless_random.key(seed, purpose), np.arange(n))
    sums = bits.view(np.uint16).reshape(n, 4).sum(1, dtype=np.int64)
    return (sums - 2 * 65535) / (65536 / np.sqrt(3))


def _fast_length(n: int) -> int:
    """The least of 2^k, 3 · 2^k and 5 · 2^k from n on: a transform of it is cheap."""
    power = 1 << max(3, (n - 1).bit_length())
    return min(m for m in (power, power * 3 // 4, power * 5 // 8) if m >= n)
