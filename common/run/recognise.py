"""What a recogniser hears in speech, and how much of it is wrong.

`samples.recogniser` names one: `pocketsphinx` (English, with the model of its wheel), or a folder
with a faster-whisper model (any language that the model knows). Downloads nothing.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.system.errors import BadInput

SPHINX = "pocketsphinx"
RATE = 16000  # Hz, the input rate of both recognisers
_INSTALL = "pip install 'xtts-trainer[recogniser]'"
_EDGE_S = 0.25  # silence around a clip; without it a recogniser loses words at the edges
_NOISE = 3e-4  # -70 dB: pocketsphinx divides by the level of the silence


@dataclass(frozen=True)
class Rates:
    """Shares of characters and words heard wrongly; above 1 if more was heard than said."""

    cer: float
    wer: float


def check(named: str | None, setting: str = "samples.recogniser") -> None:
    """BadInput: no such recogniser here; says what to install. Loads nothing."""
    if named is None:
        return
    needed = ["jiwer", SPHINX if named == SPHINX else "faster_whisper"]
    if named != SPHINX and not (Path(named) / "model.bin").is_file():
        raise BadInput(
            f"{setting}={named}: neither {SPHINX} nor a folder with a faster-whisper model"
            " (model.bin)"
        )
    lacking = [name for name in needed if importlib.util.find_spec(name) is None]
    if lacking:
        extra = _INSTALL if named == SPHINX else _INSTALL.replace("recogniser", "whisper")
        raise BadInput(f"{setting}={named} needs {' and '.join(lacking)}: {extra}")


def recogniser(named: str) -> Callable[[np.ndarray, int, str], str | None]:
    """(float32[N], Hz, language) → the text heard; None: it does not know the language."""
    check(named)
    return _Sphinx() if named == SPHINX else _Whisper(named)


def rates(said: list[str], heard: list[str], clean: Callable[[str], str]) -> Rates:
    """Rates over all texts together, both sides cleaned alike. ValueError: nothing was said."""
    import jiwer

    pairs = [(_words(clean(s)), _words(clean(h)) if h.strip() else "") for s, h in
             zip(said, heard, strict=True)]  # fmt: skip
    pairs = [(s, h) for s, h in pairs if s]
    if not pairs:
        raise ValueError("no text to compare with")
    said, heard = map(list, zip(*pairs, strict=True))
    return Rates(float(jiwer.cer(said, heard)), float(jiwer.wer(said, heard)))


def _words(text: str) -> str:
    """Letters, digits and apostrophes in lower case, separated by single spaces."""
    return " ".join(re.sub(r"[^\w' ]+|_", " ", text.lower()).split())


def _prepared(wav: np.ndarray, rate: int) -> np.ndarray:
    """float32[N] at `RATE`, peak 0.8, with silence around it."""
    import soxr

    wav = np.pad(soxr.resample(wav.astype(np.float64), rate, RATE), round(_EDGE_S * RATE))
    return (wav * (0.8 / max(np.abs(wav).max(initial=0.0), 1e-9))).astype(np.float32)


class _Sphinx:
    """pocketsphinx with the English model of its wheel, at its defaults."""

    def __init__(self):
        from pocketsphinx import Decoder

        self._decoder = Decoder(samprate=RATE, loglevel="FATAL")

    def __call__(self, wav: np.ndarray, rate: int, language: str) -> str | None:
        if language != "en":
            return None
        wav = _prepared(wav, rate)
        wav = wav + np.random.default_rng(0).normal(size=len(wav)) * _NOISE
        pcm = (np.clip(wav, -1, 1) * 32767).astype("<i2").tobytes()
        self._decoder.start_utt()
        self._decoder.process_raw(pcm, full_utt=True)
        self._decoder.end_utt()
        found = self._decoder.hyp()
        return "" if found is None else found.hypstr


class _Whisper:
    """faster-whisper with a model in a folder, on the CPU: the GPU is for the networks."""

    def __init__(self, folder: str):
        from faster_whisper import WhisperModel

        self._model = WhisperModel(folder, device="cpu", local_files_only=True)

    def __call__(self, wav: np.ndarray, rate: int, language: str) -> str | None:
        if language not in self._model.supported_languages:
            return None
        # No text from before as a hint: each clip is judged by itself.
        segments, _ = self._model.transcribe(
            _prepared(wav, rate),
            language=language,
            beam_size=5,
            temperature=0.0,
            condition_on_previous_text=False,
        )
        return " ".join(s.text.strip() for s in segments)
