"""The demo corpus: about 13 minutes of speech in five languages, spoken by eSpeak NG in seconds.

Needs no download and no account.

    python -m producer.corpus.demo DIR

makes an ordinary folder with `metadata.csv` (audio_file|text|speaker_name|language) and `wavs/`,
the same bytes every time. It leaves an existing one as it is: that may contain the user's own
recordings by now.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import wave
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.system.cores import cores
from common.system.errors import BadInput, RunError
from producer.corpus.demo_texts import TEXTS

SAMPLE_RATE = 22050
_PAIRS = 8  # utterances of two sentences in each language, for longer clips
_END_SAMPLES = 1323  # 60 ms of silence after the last sound
_TIMEOUT_S = 120
# From eSpeak NG's speak_lib.h.
_AUDIO_OUTPUT_SYNCHRONOUS, _POS_CHARACTER, _CHARS_UTF8, _RATE, _VOLUME, _PITCH = 2, 1, 1, 1, 2, 3


@dataclass(frozen=True)
class Speaker:
    """A voice of eSpeak NG.

    Only variants without breath noise, which comes from a generator seeded by the clock.
    """

    name: str
    voice: str
    pitch: int  # 0 to 100
    rate: int  # words per minute


SPEAKERS: dict[str, tuple[Speaker, Speaker]] = {
    "en": (Speaker("emma", "en-us+f4", 50, 165), Speaker("jack", "en-us+m3", 45, 155)),
    "es": (Speaker("lucia", "es+belinda", 55, 165), Speaker("pablo", "es+m1", 45, 160)),
    "de": (Speaker("lena", "de+f1", 50, 160), Speaker("karl", "de+m4", 40, 150)),
    "fa": (Speaker("sara", "fa+linda", 52, 165), Speaker("reza", "fa+m7", 45, 160)),
    "ar": (Speaker("layla", "ar+Annie", 50, 165), Speaker("omar", "ar+m5", 40, 160)),
}

_README = """This folder was made by `python -m producer.corpus.demo`: synthetic speech by
eSpeak NG, texts written for this project.

metadata.csv   audio_file|text|speaker_name|language, UTF-8, one line per recording, the columns
               named in the first line
wavs/          the recordings, 22 050 Hz, 16 bit, mono

To train on your own voice, put your recordings (WAV, FLAC, MP3 or OGG, 0.5 to 11.6 s each) and a
metadata.csv like this one into a folder of your own and give that folder as data.train=DIR, or
replace what is in here; an existing folder is never overwritten.
`python launch.py scan data.train=DIR` says which rows can be used, and why the others cannot.
"""


@dataclass(frozen=True)
class Line:
    """One utterance to be spoken."""

    file: str  # relative to the corpus
    text: str
    speaker: Speaker
    language: str


def script(language: str) -> list[Line]:
    """What to say in a language, in order: every sentence once, the speakers in turn, then some
    pairs of sentences.
    """
    texts, speakers = TEXTS[language], SPEAKERS[language]
    said = [(text, speakers[i % 2]) for i, text in enumerate(texts)]
    step = len(texts) // _PAIRS
    # The pair's speaker is the one who did not say its first sentence alone.
    said += [
        (f"{texts[i]} {texts[i + 1]}", speakers[(i + 1) % 2]) for i in range(0, _PAIRS * step, step)
    ]
    return [
        Line(f"wavs/{language}_{s.name}_{i:03d}.wav", text, s, language)
        for i, (text, s) in enumerate(said)
    ]


class _Espeak:
    """eSpeak NG through its C interface.

    One per process: the library's state is global, and its sounds depend on what it said before.
    """

    def __init__(self):
        try:
            import espeakng_loader

            self._lib = ctypes.CDLL(espeakng_loader.get_library_path())
            data = espeakng_loader.get_data_path()
        except (ImportError, OSError) as e:
            raise BadInput(
                f"eSpeak NG cannot be loaded ({e}); pip install espeakng-loader, or give"
                " data.train=DIR"
            ) from e
        rate = self._lib.espeak_Initialize(_AUDIO_OUTPUT_SYNCHRONOUS, 0, os.fsencode(data), 0)
        if rate != SAMPLE_RATE:
            raise BadInput(
                f"eSpeak NG does not start (rate {rate}, data in {data}); reinstall"
                " espeakng-loader, or give data.train=DIR"
            )
        self._chunks: list[np.ndarray] = []
        callback = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p
        )
        self._callback = callback(self._receive)  # kept alive: the library stores only its address
        self._lib.espeak_SetSynthCallback(self._callback)

    def _receive(self, samples, count: int, _events) -> int:
        if samples and count > 0:
            self._chunks.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    def say(self, text: str, speaker: Speaker) -> np.ndarray:
        """int16[n] at 22 050 Hz. BadInput: the library lacks the voice or refuses the text."""
        if self._lib.espeak_SetVoiceByName(speaker.voice.encode()) != 0:
            raise BadInput(f"eSpeak NG has no voice {speaker.voice}; reinstall espeakng-loader")
        for parameter, value in ((_RATE, speaker.rate), (_VOLUME, 80), (_PITCH, speaker.pitch)):
            self._lib.espeak_SetParameter(parameter, value, 0)
        self._chunks.clear()
        data = text.encode()
        if (
            self._lib.espeak_Synth(
                data, len(data) + 1, 0, _POS_CHARACTER, 0, _CHARS_UTF8, None, None
            )
            != 0
            or not self._chunks
        ):
            raise BadInput(f"eSpeak NG could not say {text!r}")
        return np.concatenate([*self._chunks, np.zeros(_END_SAMPLES, np.int16)])


def speak(language: str, folder: Path) -> None:
    """Say everything of one language into `folder`, in this process. See `make_demo_corpus`."""
    espeak = _Espeak()
    for line in script(language):
        with wave.open(str(folder / line.file), "wb") as f:
            f.setnchannels(1)
            f.setsampwidth(2)
            f.setframerate(SAMPLE_RATE)
            f.writeframes(espeak.say(line.text, line.speaker).astype("<i2").tobytes())


def _speak_apart(language: str, folder: Path) -> None:
    """`speak` in a fresh process, so that the bytes do not depend on what this one did before."""
    command = [sys.executable, "-m", "producer.corpus.demo", "--speak", language, str(folder)]
    try:
        done = subprocess.run(
            command,
            cwd=Path(__file__).resolve().parents[2],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as e:
        raise BadInput(
            f"eSpeak NG did not finish {language} within {_TIMEOUT_S} s; give data.train=DIR"
        ) from e
    if done.returncode != 0:
        why = done.stderr.strip().splitlines() or [f"exit {done.returncode}"]
        raise BadInput(f"the demo corpus cannot be made: {why[-1]}")


def make_demo_corpus(folder: str | os.PathLike) -> Path:
    """Make the demo corpus at `folder` if there is nothing yet; keep it as it is if there is a
    metadata.csv. Takes a few seconds.

    It appears whole or not at all.

    Raises:
        BadInput: the folder contains something else or cannot be written, or eSpeak NG does not
        work here.
    """
    folder = Path(folder).absolute()
    if (folder / "metadata.csv").is_file():
        return folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(
            f"{folder} exists and holds no metadata.csv; the demo corpus is not made over it:"
            " remove it or name another folder"
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as aside:
            made = Path(aside) / "made"
            (made / "wavs").mkdir(parents=True)
            with ThreadPoolExecutor(cores()) as pool:
                list(pool.map(lambda language: _speak_apart(language, made), TEXTS))
            rows = ["audio_file|text|speaker_name|language"]
            rows += [
                f"{x.file}|{x.text}|{x.speaker.name}|{x.language}"
                for language in TEXTS
                for x in script(language)
            ]
            (made / "metadata.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
            (made / "README.txt").write_text(_README, encoding="utf-8")
            _move(made, folder)
    except OSError as e:
        raise BadInput(
            f"cannot write the demo corpus to {folder}: {e.strerror or e}; give data.train=DIR"
        ) from e
    return folder


def _move(made: Path, folder: Path) -> None:
    try:
        os.rename(made, folder)  # replaces an empty folder
    except OSError:
        if not (
            folder / "metadata.csv"
        ).is_file():  # else another process was faster, with the same bytes
            raise


def main(arguments: list[str]) -> int:
    """The command line: DIR, or --speak LANGUAGE FOLDER for the processes that speak."""
    try:
        if len(arguments) == 3 and arguments[0] == "--speak":
            speak(arguments[1], Path(arguments[2]))
        elif len(arguments) == 1 and not arguments[0].startswith("-"):
            sys.stdout.write(f"{make_demo_corpus(arguments[0])}\n")
        else:
            raise BadInput("usage: python -m producer.corpus.demo DIR")
    except RunError as e:
        sys.stderr.write(f"{e}\n")
        return e.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
