"""What a recogniser makes of speech, and how many words it gets wrong."""

from __future__ import annotations

import re

import numpy as np


class Recogniser:
    """pocketsphinx with the model and the language model of its wheel, at their defaults."""

    def __init__(self):
        from pocketsphinx import Decoder

        self._decoder = Decoder(samprate=16000, loglevel="FATAL")

    def words(self, wav: np.ndarray, rate: int) -> list[str]:
        """What is said: at 16 kHz, 0.25 s of silence around it, a noise of -70 dB against digital
        silence.
        """
        import soxr

        wav = np.pad(soxr.resample(wav.astype(np.float64), rate, 16000), 4000)
        wav = (
            wav * (0.8 / max(np.abs(wav).max(), 1e-9))
            + np.random.default_rng(0).normal(size=len(wav)) * 3e-4
        )
        self._decoder.start_utt()
        self._decoder.process_raw(
            (np.clip(wav, -1, 1) * 32767).astype("<i2").tobytes(), full_utt=True
        )
        self._decoder.end_utt()
        found = self._decoder.hyp()
        return re.sub(r"[^a-z' ]+", " ", found.hypstr.lower()).split() if found else []


def errors(said: list[str], heard: list[str]) -> int:
    """Fewest substitutions, insertions and deletions of words between the two."""
    row = list(range(len(heard) + 1))
    for i, word in enumerate(said, 1):
        before, row = row, [i]
        for j, other in enumerate(heard, 1):
            row.append(min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (word != other)))
    return row[-1]


def rate(texts: list[str], heard: list[list[str]]) -> float:
    """Word error rate over all sentences."""
    return sum(errors(t.split(), h) for t, h in zip(texts, heard, strict=True)) / sum(
        len(t.split()) for t in texts
    )
