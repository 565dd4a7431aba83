"""Flite's voices through its C interface, in several processes.

It needs `apt install libflite1`, or a folder with its libraries.

eSpeak NG's voices are too hard for pocketsphinx (WER 0.4 on the sentences of `speech_texts`);
Flite's are built from recordings of people.
"""

from __future__ import annotations

import ctypes
import functools
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import soundfile
import soxr

SAMPLE_RATE = 22050
END_SAMPLES = 1102  # 50 ms of silence after the last sound
BATCH = 50


@dataclass(frozen=True)
class Speaker:
    """A voice of Flite: slt, rms, awb or kal16.

    `stretch` 1.3 speaks 1.3 times as long. `libraries`: a folder, "" for the system's.
    """

    voice: str
    stretch: float
    libraries: str


class _Wave(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_char_p),
        ("sample_rate", ctypes.c_int),
        ("num_samples", ctypes.c_int),
        ("num_channels", ctypes.c_int),
        ("samples", ctypes.POINTER(ctypes.c_short)),
    ]


class _Voice(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("features", ctypes.c_void_p)]


class Flite:
    """One voice. OSError: a library is missing."""

    def __init__(self, speaker: Speaker):
        def library(name: str, needed: bool = True) -> ctypes.CDLL | None:
            own = Path(speaker.libraries, name)
            if speaker.libraries and own.exists():
                return ctypes.CDLL(str(own), mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL) if needed else None

        # In the order in which they need one another; libasound travels along where a host has
        # none.
        library("libasound.so.2", needed=False)
        self._flite = flite = library("libflite.so.1")
        library("libflite_cmulex.so.1")
        library("libflite_usenglish.so.1")
        register = getattr(
            library(f"libflite_cmu_us_{speaker.voice}.so.1"), f"register_cmu_us_{speaker.voice}"
        )
        register.restype, register.argtypes = ctypes.POINTER(_Voice), [ctypes.c_char_p]
        flite.feat_set_float.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_float]
        flite.flite_text_to_wave.restype = ctypes.POINTER(_Wave)
        flite.flite_text_to_wave.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
        flite.delete_wave.argtypes = [ctypes.c_void_p]
        flite.flite_init()
        self._voice = register(None)
        flite.feat_set_float(self._voice.contents.features, b"duration_stretch", speaker.stretch)

    def say(self, text: str) -> np.ndarray:
        """float32[n] at 22 050 Hz, |x| <= 1."""
        wave = self._flite.flite_text_to_wave(text.encode(), self._voice)
        if not wave:
            raise RuntimeError(f"Flite could not say {text!r}")
        w = wave.contents
        samples = np.ctypeslib.as_array(w.samples, (w.num_samples,)).astype(np.float32) / 32768
        rate = w.sample_rate
        self._flite.delete_wave(wave)
        return np.clip(np.pad(soxr.resample(samples, rate, SAMPLE_RATE), (0, END_SAMPLES)), -1, 1)


@functools.cache
def _flite(speaker: Speaker) -> Flite:
    return Flite(speaker)


def _record_some(speaker: Speaker, lines: list[tuple[Path, str]]) -> float:
    seconds = 0.0
    for path, text in lines:
        if path.exists():
            seconds += soundfile.info(path).duration
            continue
        samples = _flite(speaker).say(text)
        aside = path.with_name(f".{path.name}.wav")
        soundfile.write(aside, samples, SAMPLE_RATE, subtype="PCM_16")
        os.replace(aside, path)
        seconds += len(samples) / SAMPLE_RATE
    return seconds


def record(speaker: Speaker, folder: Path, texts: list[str], prefix: str, processes: int) -> float:
    """An LJSpeech-style corpus in `folder`: metadata.csv and wavs/.

    Recordings that are there stay. Returns its seconds.
    """
    (folder / "wavs").mkdir(parents=True, exist_ok=True)
    lines = [(folder / "wavs" / f"{prefix}{i:04d}.wav", text) for i, text in enumerate(texts)]
    parts = [lines[i : i + BATCH] for i in range(0, len(lines), BATCH)]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        seconds = sum(pool.map(functools.partial(_record_some, speaker), parts))
    (folder / "metadata.csv").write_text("".join(f"{path.stem}|{text}\n" for path, text in lines))
    return seconds
