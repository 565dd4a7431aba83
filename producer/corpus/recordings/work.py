"""Shared by the commands that work through a folder of recordings: the list of recordings, the
progress, and what is done already.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from common.audio import notes
from common.audio.errors import DecodeError
from common.audio.reading import mono, open_audio, read
from common.system.documents import read_json
from common.system.errors import BadInput
from common.system.files import write_atomically
from producer.corpus.readers.paths import has_audio_suffix

BLOCK_S = 20.0


def recordings(folder: Path) -> list[Path]:
    """The recordings of a folder, and of those in it. BadInput: there are none."""
    if not folder.is_dir():
        raise BadInput(f"{folder}: no such folder")
    found = sorted(p for p in folder.rglob("*") if has_audio_suffix(p.name) and p.is_file())
    if not found:
        raise BadInput(f"{folder}: no recordings (.wav, .flac, .mp3, .m4a and others) in it")
    return found


def blocks(path: Path, most_s: float | None = None) -> Iterator[tuple[np.ndarray, int]]:
    """(float32[n] mono, its rate) of 20 s at a time.

    DecodeError: it cannot be read, or is longer than `most_s`.
    """
    with open_audio(path) as f:
        if most_s is not None and f.frames > most_s * f.samplerate:
            reason = f"longer than {most_s / 3600:g} h; cut it into parts"
            raise DecodeError(path, reason, "too long")
        size = round(BLOCK_S * f.samplerate)
        for at in range(0, f.frames, size):
            yield mono(read(f, path, 0, min(size, f.frames - at))), f.samplerate


def stamp(path: Path) -> list:
    """A file's size and mtime, which change with it."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]


def parse(path: Path) -> object:
    """The content of a JSON file. OSError, ValueError: there is none."""
    return read_json(path)


def load(path: Path, key: dict) -> dict | None:
    """What an earlier call saved at `path` for the same `key`; None: nothing, or other work."""
    try:
        found = parse(path)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("key") == key else None


def save(path: Path, found: dict) -> None:
    """Save a result for `load`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(found, ensure_ascii=False, indent=1))


@contextmanager
def disk_faults() -> Iterator[None]:
    """Raise BadInput with the file's name if the disk refuses to read or write."""
    try:
        yield
    except OSError as e:
        raise BadInput(
            f"{e.filename or 'the disk'}: {e.strerror or e}; mend that and run the command again:"
            " finished work is kept"
        ) from e


@contextmanager
def bar(what: str, total: float) -> Iterator[Progress]:
    """A bar on stderr if that is a terminal; its one task counts recordings."""
    columns = (
        TextColumn(what),
        BarColumn(),
        TextColumn("{task.fields[name]}"),
        TextColumn("{task.percentage:.0f} %"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    shown = Progress(*columns, console=console, disable=not sys.stderr.isatty(), transient=True)
    with notes.dropped(), shown:
        shown.add_task(what, total=total, name="")
        yield shown
