"""`launch.py transcribe FOLDER`: a recogniser writes down recordings, with confidences."""

from __future__ import annotations

import argparse
import csv
import io
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import soxr
from rich.progress import Progress

from common.audio.errors import DecodeError
from common.system.counted import counted
from common.system.errors import OK, BadInput
from common.system.files import open_plain, write_atomically
from common.xtts.text.clean import UnknownLanguage, normalize_language
from producer.corpus.readers import sidecar
from producer.corpus.readers.row import Row
from producer.corpus.recordings import work
from producer.corpus.recordings.segments import find

_MOST_HOURS = 4.0  # of one recording: 0.9 GB in the recogniser's format
MARK = "recognised_by"  # a key of the files of this command
RATE = 16000  # Whisper's
COLUMNS = ["file_name", "text", "language", "confidence", "seconds"]
FLAGS: dict[str, dict] = {
    "folder": {"metavar": "FOLDER", "help": "recordings, in any depth of folders"},
    "--model": {
        "metavar": "DIR",
        "required": True,
        "help": "a folder with a Whisper model for CTranslate2 (model.bin, config.json)",
    },
    "--language": {"metavar": "L", "help": "language spoken, e.g. fa (default: detected)"},
    "--device": {
        "choices": ["auto", "cpu", "cuda"],
        "default": "auto",
        "help": "device for the recogniser",
    },
    "--max-seconds": {
        "metavar": "S",
        "type": float,
        "default": 11.6,
        "help": "longest recording to use as one clip (11.6); cut longer ones with launch.py split",
    },
}


@dataclass(frozen=True)
class Said:
    """A text, when it is spoken (seconds), and how sure the recogniser is (0 to 1)."""

    start: float
    end: float
    text: str
    confidence: float


class Recogniser(Protocol):
    """What writes down speech."""

    def __call__(self, wave: np.ndarray, language: str | None) -> tuple[str, Iterable[Said]]:
        """(the language, the texts) of float32[n] at 16 kHz."""


def faster_whisper(folder: Path, device: str) -> Recogniser:
    """The model in a folder. BadInput: not installed, no model there, or it cannot be loaded."""
    if not (folder / "model.bin").is_file():
        raise BadInput(
            f"--model {folder}: no model.bin there; give a folder with a Whisper model for"
            " CTranslate2, downloaded beforehand"
        )
    try:
        import faster_whisper as package
    except ImportError as e:
        raise BadInput(
            f"transcribe needs faster-whisper ({e}); pip install 'xtts-trainer[transcribe]'"
        ) from e
    try:
        model = package.WhisperModel(str(folder), device=device, local_files_only=True)
    except (RuntimeError, ValueError, OSError) as e:
        raise BadInput(f"--model {folder}: cannot be loaded ({e})") from e

    def recognise(wave: np.ndarray, language: str | None) -> tuple[str, Iterable[Said]]:
        found, info = model.transcribe(wave, language=language, vad_filter=False)
        said = (Said(s.start, s.end, s.text.strip(), math.exp(s.avg_logprob)) for s in found)
        return info.language, said

    return recognise


@work.disk_faults()
def run(
    args: argparse.Namespace,
    tell: Callable[[str], None],
    load: Callable[[Path, str], Recogniser] = faster_whisper,
) -> int:
    """Write x.json beside each recording x, then metadata.csv and review.csv; return the exit
    code. Existing transcripts stay as they are, with all corrections.

    BadInput: no recordings, an unknown language, no model, a metadata.csv from another source, or
    the disk refuses.
    """
    folder, model = Path(args.folder).expanduser(), Path(args.model).expanduser()
    if args.settings:
        raise BadInput(f"transcribe takes no settings: {' '.join(args.settings)}")
    if not args.max_seconds > 0:
        raise BadInput(f"--max-seconds must be positive, not {args.max_seconds}")
    language = None if args.language is None else language_of(args.language)
    _check_own(folder / "metadata.csv")
    found, with_text = work.recordings(folder), sidecar.with_text(folder)
    left = [r for r in found if r not in with_text and find(r) is None]
    recognise = load(model, args.device) if left else None
    failed = []
    with work.bar("transcribe", len(left)) as bar:
        for recording in left:
            bar.update(bar.task_ids[0], name=recording.name)
            try:
                _write_down(recording, recognise, language, model, bar)
            except DecodeError as e:
                failed.append(str(e))
            bar.advance(bar.task_ids[0], 0)
    rows, review = _collect(folder, found, args.max_seconds)
    own = {row[0] for row in rows}
    given = [r for r in _given(folder, language) if r[0] not in own] if with_text else []
    rows = sorted(rows + given)
    _write(folder / "metadata.csv", COLUMNS, rows)
    _write(folder / "review.csv", ["confidence", "file", "start_s", "end_s", "text"], review)
    done = counted(len(left) - len(failed), "{n} [recording|recordings] transcribed")
    before = len(found) - len(left) - len(given)
    tell(f"{done}, {counted(before, '{n} [was|were] before')}")
    if given:
        tell(counted(len(given), "{n} more [has|have] a text beside [it|them] (.txt, .lab)"))
    for line in failed:
        tell(f"left out: {line}")
    texts = counted(len(review), "{n} [text|texts, the least certain first]")
    tell(f"review: {folder / 'review.csv'} ({texts})")
    tell(f"clips up to {args.max_seconds:g} s: {len(rows)} in {folder / 'metadata.csv'}")
    tell(f"longer ones: launch.py split {folder}")
    return OK


def language_of(code: str) -> str:
    """The project's code. BadInput: no language of that name."""
    try:
        return normalize_language(code)
    except UnknownLanguage as e:
        raise BadInput(f"--language {code}: {e}") from e


def is_own(path: Path) -> bool:
    """Whether this command wrote the metadata.csv."""
    wanted = _line(COLUMNS).encode()
    if not path.exists():
        return False
    with open_plain(path) as file:
        return file.read(len(wanted)) == wanted


def _check_own(path: Path) -> None:
    if path.exists() and not is_own(path):
        raise BadInput(f"{path} exists, and this command did not write it; move it away")


def _whole(recording: Path) -> np.ndarray:
    """float32[n] at the recogniser's rate; the recogniser needs a whole recording at once.

    DecodeError: longer than `_MOST_HOURS`, by its header, or it cannot be read.
    """
    parts, stream = [], None
    for block, rate in work.blocks(recording, _MOST_HOURS * 3600):
        stream = stream or soxr.ResampleStream(rate, RATE, 1)
        parts.append(stream.resample_chunk(block))
    parts.append(stream.resample_chunk(np.zeros(0, np.float32), last=True))
    return np.concatenate(parts)


def _write_down(
    recording: Path, recognise: Recogniser, language: str | None, model: Path, bar: Progress
) -> None:
    wave = _whole(recording)
    spoken, texts = recognise(wave, language)
    seconds, said = len(wave) / RATE, []
    done = 0.0
    for text in texts:
        said.append({**vars(text), "confidence": round(text.confidence, 4)})
        share = min(1.0, text.end / seconds)
        bar.advance(bar.task_ids[0], max(0.0, share - done))
        done = max(done, share)
    bar.advance(bar.task_ids[0], 1 - done)
    found = {MARK: model.name, "language": spoken, "seconds": seconds, "segments": said}
    work.save(recording.with_suffix(".json"), found)


def _collect(
    folder: Path, found: list[Path], most_s: float
) -> tuple[list[list[str]], list[list[str]]]:
    """Rows of metadata.csv and of review.csv, from the files beside the recordings."""
    rows, review = [], []
    for recording in found:
        made, name = _made(recording), recording.relative_to(folder).as_posix()
        if made is None:
            continue
        for s in made["segments"]:
            times = (f"{s['start']:.2f}", f"{s['end']:.2f}")
            review.append([f"{s['confidence']:.4f}", name, *times, s["text"]])
        if made["segments"] and made["seconds"] <= most_s:
            text = " ".join(s["text"] for s in made["segments"])
            least = min(s["confidence"] for s in made["segments"])
            seconds = f"{made['seconds']:.2f}"
            rows.append([name, text, made["language"], f"{least:.4f}", seconds])
    return rows, sorted(review, key=lambda r: float(r[0]))


def _given(folder: Path, language: str | None) -> list[list[str]]:
    """Rows of the recordings with a text beside them: a corpus with a metadata.csv is what that
    file says, and without these they would be left out of it.
    """
    found = (r for r in sidecar.read(folder) if isinstance(r, Row))
    return [
        [Path(r.candidates[0]).relative_to(folder).as_posix(), r.text, language or "", "", ""]
        for r in found
    ]


def _made(recording: Path) -> dict | None:
    """What this command wrote beside a recording. BadInput: it no longer has the right form."""
    at = recording.with_suffix(".json")
    if find(recording) != at:
        return None
    try:
        made = work.parse(at)
        if not isinstance(made, dict) or MARK not in made:
            return None
        for s in made["segments"]:
            float(s["start"]), float(s["end"]), float(s["confidence"]), str(s["text"])
        float(made["seconds"]), str(made["language"])
    except (ValueError, KeyError, TypeError) as e:
        raise BadInput(f"{at}: not as transcribe wrote it ({e}); mend or delete it") from e
    return made


def _line(values: list[str]) -> str:
    held = io.StringIO()
    csv.writer(held, quoting=csv.QUOTE_ALL, lineterminator="\n").writerow(values)
    return held.getvalue()


def _write(path: Path, heading: list[str], rows: list[list[str]]) -> None:
    write_atomically(path, "".join(map(_line, [heading, *rows])))
