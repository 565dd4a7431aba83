"""Small corpora with arithmetic answers, for every test that needs a folder of clips.

`make_corpus(dir, 5)` makes `metadata.csv` (`id|raw text|normalised text`) and `wavs/<id>.wav`,
clips of 2.0 s, 440 Hz sine, amplitude 0.5, 22 050 Hz, mono, 16-bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import soundfile

WORDS = (
    "one two three four five six seven eight nine ten red green blue small large river house garden"
    " window bread".split()
)


def sine(
    num_samples: int, freq: float = 440.0, rate: int = 22050, amplitude: float = 0.5
) -> np.ndarray:
    """float32[num_samples]: a sine that starts at 0."""
    return (amplitude * np.sin(2 * np.pi * freq * np.arange(num_samples) / rate)).astype(np.float32)


def sentence(i: int, num_words: int = 6) -> str:
    """A lower-case text of letters and spaces, another one for each i below 20**num_words."""
    words = []
    for k in range(num_words):
        words.append(WORDS[(i + 7 * k) % len(WORDS)])
        i //= len(WORDS)
    return " ".join(words)


def write_wav(
    path: Path, samples: np.ndarray, rate: int = 22050, subtype: str | None = None
) -> Path:
    """Write float samples [n] or [n, channels]; the format follows the suffix (.wav: 16-bit unless
    `subtype` says otherwise).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(
        path,
        samples,
        rate,
        subtype=subtype or ("PCM_16" if path.suffix in (".wav", ".flac") else None),
    )
    return path


def write_metadata(
    root: Path, rows: Iterable[str], name: str = "metadata.csv", end: str = "\n"
) -> Path:
    """Write lines as UTF-8, byte for byte (no newline translation)."""
    root.mkdir(parents=True, exist_ok=True)
    path = root / name
    path.write_bytes("".join(row + end for row in rows).encode())
    return path


def make_corpus(
    root: Path | str,
    n: int,
    seconds: float | Callable[[int], float] = 2.0,
    freq: float | Callable[[int], float] = 440.0,
    *,
    rate: int = 22050,
    amplitude: float = 0.5,
    text: str | Callable[[int], str] | None = None,
    suffix: str = ".wav",
    prefix: str = "c",
) -> Path:
    """An LJSpeech-style folder of n sines named c0001, c0002, …; returns `root`.

    `seconds`, `freq` and `text` may be functions of the index (from 0). A clip has round(seconds *
    rate) samples.
    """
    root = Path(root)
    rows = []
    for i in range(n):
        clip = f"{prefix}{i + 1:04d}"
        length = round((seconds(i) if callable(seconds) else seconds) * rate)
        tone = sine(length, freq(i) if callable(freq) else freq, rate, amplitude)
        write_wav(root / "wavs" / f"{clip}{suffix}", tone, rate)
        words = text(i) if callable(text) else text if text is not None else sentence(i)
        rows.append(f"{clip}|{words}|{words}")
    write_metadata(root, rows)
    return root
