"""A folder of recordings as people have them: texts beside some, subtitles beside a long one, one
with nothing, in folders of their own.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import soundfile

PAUSE_S = 0.8


def cue(number: int, start: float, end: float, text: str) -> str:
    """One of SubRip's."""

    def time(s: float) -> str:
        return f"{int(s // 3600):02d}:{int(s // 60 % 60):02d}:{s % 60:06.3f}".replace(".", ",")

    return f"{number}\n{time(start)} --> {time(end)}\n{text}\n\n"


def unsorted(demo: Path, folder: Path, language: str, number: int = 40) -> Path:
    """`number` recordings of the demo corpus: the last without a text, half of the others joined to
    one long recording with subtitles, the rest as clips with texts.
    """
    with open(demo / "metadata.csv", encoding="utf-8", newline="") as f:
        rows = [r for r in csv.DictReader(f, delimiter="|") if r["language"] == language][:number]
    assert len(rows) == number
    clips, talk, bare = rows[: number // 2], rows[number // 2 : -1], rows[-1]
    for i, row in enumerate(clips):
        place = folder / ("telephone" if i % 3 else "old cassette")
        place.mkdir(parents=True, exist_ok=True)
        name = f"{i:03d}"
        (place / f"{name}.wav").write_bytes((demo / row["audio_file"]).read_bytes())
        (place / f"{name}.txt").write_text(row["text"] + "\n", encoding="utf-8")
    parts, cues, at = [], [], 0.0
    for i, row in enumerate(talk, 1):
        wave, rate = soundfile.read(demo / row["audio_file"], dtype="float32")
        cues.append(cue(i, at, at + len(wave) / rate, row["text"]))
        silence = np.zeros(round(PAUSE_S * rate), np.float32)
        parts += [wave, silence]
        at += (len(wave) + len(silence)) / rate
    soundfile.write(folder / "talk.wav", np.concatenate(parts), rate, subtype="PCM_16")
    (folder / "talk.srt").write_text("".join(cues), encoding="utf-8")
    (folder / "nobody knows.wav").write_bytes((demo / bare["audio_file"]).read_bytes())
    return folder
