"""`launch.py split FOLDER`: cuts recordings with subtitles or segments beside them at pauses into a
corpus.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import soundfile

from common.audio.errors import DecodeError
from common.audio.reading import open_audio
from common.data.manifest import Reject
from common.system.counted import counted
from common.system.errors import OK, BadInput
from common.system.files import write_atomically
from producer.corpus.readers import sidecar
from producer.corpus.recordings import work
from producer.corpus.recordings.cutting import Piece, cut, frame_levels
from producer.corpus.recordings.segments import find, read_segments
from producer.corpus.report import write_rejects

VERSION = 1  # version of the way of cutting: clips of another version are cut again
COLUMNS = ("file_name", "text", "speaker_name", "source", "start_s", "end_s")
FLAGS: dict[str, dict] = {
    "folder": {
        "metavar": "FOLDER",
        "help": "recordings, each with x.srt, x.vtt or x.json beside it",
    },
    "--out": {"metavar": "DIR", "help": "the corpus to make (default: FOLDER-clips)"},
    "--max-seconds": {
        "metavar": "S",
        "type": float,
        "default": 11.6,
        "help": "longest clip (11.6, as data.max_audio_s)",
    },
}


@work.disk_faults()
def run(args: argparse.Namespace, tell: Callable[[str], None]) -> int:
    """Cut what is not cut yet, write metadata.csv and rejects.tsv; return the exit code.

    BadInput: no recordings, none of them with segments, the corpus is inside FOLDER, or the disk
    refuses.
    """
    folder = Path(args.folder).expanduser().absolute()
    out = Path(args.out).expanduser().absolute() if args.out else Path(f"{folder}-clips")
    if args.settings:
        raise BadInput(f"split takes no settings: {' '.join(args.settings)}")
    if out.is_relative_to(folder):
        raise BadInput(f"--out {out} lies in {folder}, whose recordings are read; name another")
    if not args.max_seconds > 0:
        raise BadInput(f"--max-seconds must be positive, not {args.max_seconds}")
    with_text = sidecar.with_text(folder)
    found = [(r, s) for r in work.recordings(folder) if (s := find(r)) or r not in with_text]
    if not any(s for _, s in found):
        none = counted(len(found), "[the one recording in it|none of {n} recordings]")
        raise BadInput(
            f"{folder}: {none} has x.srt, x.vtt or x.json beside it;"
            " launch.py transcribe makes them"
        )
    rows, rejects, again = [], [], 0
    with work.bar("split", len(found)) as bar:
        for recording, segments in found:
            bar.update(bar.task_ids[0], name=recording.name)
            name = str(recording.relative_to(folder))
            if segments is None:
                reason = "no subtitles or segments beside it"
                rejects.append(Reject(str(recording), 0, name, reason, "no segments"))
            else:
                part, known = _part(recording, segments, name, out, args.max_seconds)
                rows += part["rows"]
                rejects += [Reject(*r) for r in part["rejects"]]
                again += known
            bar.advance(bar.task_ids[0])
    _write(out, rows, rejects)
    hours = sum(float(r[5]) - float(r[4]) for r in rows) / 3600
    clips = counted(len(rows), "{n} [clip|clips]")
    sources = counted(len(found), "{n} [recording|recordings]")
    tell(f"{clips}, {hours:.2f} h, from {sources}, {again} known already")
    if rejects:
        kinds = ", ".join(f"{k} {n}" for k, n in Counter(r.kind for r in rejects).most_common())
        tell(f"left out: {kinds} ({out / 'rejects.tsv'})")
    tell(f"corpus: {out} (launch.py scan data.train={out})")
    return OK


def _part(
    recording: Path, segments: Path, name: str, out: Path, most_s: float
) -> tuple[dict, bool]:
    """What one recording yielded, and whether an earlier call had done it."""
    at = out / "parts" / f"{name}.json"
    stamps = [work.stamp(recording), work.stamp(segments)]
    key = {"version": VERSION, "most_s": most_s, "files": stamps, "segments": segments.name}
    known = work.load(at, key)
    if known is not None and all((out / r[0]).is_file() for r in known["rows"]):
        return known, True
    try:
        said, errors = read_segments(segments)
    except BadInput as e:  # one bad file of many is no reason to stop
        return {"rows": [], "rejects": [[str(segments), 0, name, str(e), "not read"]]}, False
    rejects = [[e.file, e.line, name, e.reason, e.kind] for e in errors]
    rows: list[list[str]] = []
    try:
        rate, levels = _levels(recording)
        pieces = cut(said, levels, most_s)
        rejects += [[str(segments), p.line, name, p.fault, p.kind] for p in pieces if p.fault]
        whole = [p for p in pieces if not p.fault]
        for number, (piece, wave) in enumerate(_clips(recording, whole, rate), 1):
            clip = Path("wavs") / f"{name}.{number:05d}.flac"
            (out / clip).parent.mkdir(parents=True, exist_ok=True)
            held = io.BytesIO()
            soundfile.write(held, wave, rate, format="FLAC", subtype="PCM_16")
            write_atomically(out / clip, held.getvalue())
            times = (f"{piece.start_s:.2f}", f"{piece.end_s:.2f}")
            rows.append([clip.as_posix(), piece.text, piece.speaker, name, *times])
    except DecodeError as e:
        rows, rejects = [], [[str(recording), 0, name, e.reason, e.kind]]
    part = {"key": key, "rows": rows, "rejects": rejects}
    work.save(at, part)
    _remove_stale(out / "wavs" / name, {Path(r[0]).name for r in rows})
    return part, False


def _remove_stale(stem: Path, made: set[str]) -> None:
    """Remove what earlier calls left of a recording: clips that it no longer has, and an
    unfinished one from a call that was killed.
    """
    clip = re.compile(rf"(\.?){re.escape(stem.name)}\.\d{{5,}}\.flac(?:\.(\d+))?")
    for path in stem.parent.iterdir() if stem.parent.is_dir() else ():
        found = clip.fullmatch(path.name)
        if found and path.name not in made and bool(found[1]) == bool(found[2]):
            if not found[2] or not psutil.pid_exists(int(found[2])):
                path.unlink(missing_ok=True)


def _levels(recording: Path) -> tuple[int, np.ndarray]:
    with open_audio(recording) as f:
        rate = f.samplerate
    return rate, frame_levels((wave for wave, _ in work.blocks(recording)), rate)


def _clips(recording: Path, pieces: list[Piece], rate: int) -> Iterator[tuple[Piece, np.ndarray]]:
    """Each piece with its samples; reads the recording once, in blocks."""
    left, at = np.zeros(0, np.float32), 0  # the samples in memory, and where they begin
    waves = work.blocks(recording)
    for piece in pieces:
        start, end = round(piece.start_s * rate), round(piece.end_s * rate)
        while at + len(left) < end and (block := next(waves, None)) is not None:
            drop = min(max(0, start - at), len(left))
            left, at = np.concatenate([left[drop:], block[0]]), at + drop
        yield piece, left[max(0, start - at) : end - at]


def _write(out: Path, rows: list[list[str]], rejects: list[Reject]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    speakers = any(r[2] for r in rows)
    keep = [i for i, c in enumerate(COLUMNS) if speakers or c != "speaker_name"]
    held = io.StringIO()
    table = csv.writer(held, quoting=csv.QUOTE_ALL, lineterminator="\n")
    table.writerow([COLUMNS[i] for i in keep])
    table.writerows([row[i] for i in keep] for row in rows)
    write_atomically(out / "metadata.csv", held.getvalue())
    write_rejects(rejects, out / "rejects.tsv")
