"""Reads a text aloud piece by piece, into a file or onto standard output: logs a line for each
piece, and keeps finished ones on disk.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common.system.errors import BadInput
from common.system.lock import lock
from common.xtts.pace import Pace
from trainer.commands.piece_files import PieceFiles

if TYPE_CHECKING:
    from common.xtts.sampling import SamplingOptions
    from common.xtts.synthesize import Synthesizer, Voice
    from common.xtts.text.split import Piece

log = logging.getLogger(__name__)

_SEEN = 400  # recordings, spread over the corpus, that give a language's pace
_SAID_NOTHING = "the model stopped at once and said nothing: try another --seed, or train longer"


@dataclass(frozen=True)
class Reading:
    """A text to read. `asked`: the command's options."""

    synthesizer: Synthesizer
    pieces: list[Piece]
    voice: Voice
    options: SamplingOptions
    pace: Pace
    asked: dict

    def pauses(self) -> list[float]:
        """Seconds of silence after each piece: none inside a sentence, none at the end."""
        pause = self.asked["pause"]
        return [pause * piece.ends_sentence for piece in self.pieces[:-1]] + [0.0]

    def seed(self, number: int) -> tuple[int, int]:
        """The seconds of a piece."""
        return (self.asked["seed"], number)


def pace_of(asked: dict) -> Pace:
    """Seconds per character in the run's recordings of the language; without a run, or if it has
    too few, a value for any speech.
    """
    import numpy as np

    from common.data.manifest import TRAIN
    from common.run.folder import RunFolder
    from common.xtts.text.clean import normalize_language

    if asked["run"] is None:
        return Pace()
    run = RunFolder(asked["run"])
    language, columns = normalize_language(asked["language"]), run.manifest.columns()
    if language not in run.manifest.languages:
        return Pace()
    of_language = columns["language"] == run.manifest.languages.index(language)
    ids = np.flatnonzero(of_language & (columns["split"] == TRAIN))
    ids = ids[np.unique(np.linspace(0, max(0, len(ids) - 1), min(_SEEN, len(ids)), dtype=int))]
    seen = run.manifest.utterances(ids.tolist())
    rate = run.dims.audio.sample_rate
    pace = Pace.seen([len(u.clean) for u in seen], [u.num_samples / rate for u in seen])
    return pace or Pace()


def deciding(reading: Reading, sources) -> dict:
    """All that decides the sound of a text's pieces, JSON-able: files by path, size and time."""
    asked = reading.asked
    paths = [sources.gpt, sources.dvae, sources.vocab, sources.mel_stats]
    paths += asked["reference"] or []
    if asked["run"] is not None:  # its speakers' recordings
        paths.append(Path(asked["run"]) / "manifest.sqlite")
    if sources.pretrained is not None:
        paths += sorted(Path(sources.pretrained).glob("*.safetensors"))
    files = []
    for path in (Path(p).absolute() for p in paths if p is not None):
        found = os.stat(path) if path.exists() else None
        files.append([str(path), *((found.st_size, found.st_mtime_ns) if found else ())])
    names = ("language", "voice", "seed", "speed", "candidates")
    return {
        "files": files,
        "options": dataclasses.asdict(reading.options),
        "pace": dataclasses.asdict(reading.pace),
        "treatment": repr(sources.treatment),
        **{name: asked[name] for name in names},
    }


def write(reading: Reading, out: Path, decides: dict) -> None:
    """Say a text into a WAV file, one piece at a time; pieces that an earlier command finished are
    kept.

    BadInput: nothing was said, or another command is writing this file. NotFinite: as in
    `Synthesizer.say`.
    """
    held = lock(out.with_name(f".{out.name}.lock"), "synthesize", "name another --out")
    try:
        _write(reading, out, decides)
    finally:
        held.release(unlink=True)


def _write(reading: Reading, out: Path, decides: dict) -> None:
    rate, count = reading.synthesizer.sample_rate, len(reading.pieces)
    files = PieceFiles(out, rate, decides)
    paths = [files.path(i, piece.ids) for i, piece in enumerate(reading.pieces)]
    samples = [files.samples(path) for path in paths]
    there = sum(n is not None for n in samples)
    if there:
        log.info("%d of %d pieces are there already, in %s", there, count, files.folder)
    began, made_s = time.perf_counter(), 0.0
    for i, piece in enumerate(reading.pieces):
        if samples[i] is not None:
            continue
        spoken = reading.synthesizer.say(
            piece,
            reading.voice,
            reading.options,
            reading.seed(i),
            reading.asked["speed"],
            reading.asked["candidates"],
            reading.pace,
        )
        _tell(i, count, len(spoken.wav) / rate, spoken.spent_s, spoken.draws)
        if spoken.fault:
            log.warning("piece %d %s: %s", i + 1, spoken.fault, piece.text)
        files.keep(paths[i], spoken.wav)
        samples[i] = len(spoken.wav)
        made_s += len(spoken.wav) / rate
    if not any(samples):
        files.remove()
        raise BadInput(_SAID_NOTHING)
    seconds, spent = files.join(paths, reading.pauses()), time.perf_counter() - began
    plural = "s" * (count != 1)
    log.info("%s: %.2f s at %d Hz, %d piece%s", out, seconds, rate, count, plural)
    if made_s:
        log.info("real-time factor %.2f (%.1f s for %.1f s)", spent / made_s, spent, made_s)


def stream(reading: Reading) -> None:
    """Say a text onto standard output, as 16-bit samples. BadInput, NotFinite: as for `write`."""
    from common.xtts.synthesize import pcm16

    rate, count = reading.synthesizer.sample_rate, len(reading.pieces)
    began, first, total = time.perf_counter(), None, 0
    log.info("16-bit little-endian mono at %d Hz", rate)
    for i, (piece, pause) in enumerate(zip(reading.pieces, reading.pauses(), strict=True)):
        at, so_far = time.perf_counter(), total
        for part in reading.synthesizer.stream(
            piece,
            reading.voice,
            reading.options,
            reading.seed(i),
            reading.asked["speed"],
            pace=reading.pace,
        ):
            first = first if first is not None else time.perf_counter() - began
            total += len(part)
            if not _heard(pcm16(part)):
                return
        _tell(i, count, (total - so_far) / rate, time.perf_counter() - at)
        if pause and not _heard(bytes(2 * round(pause * rate))):
            return
    if first is None:
        raise BadInput(_SAID_NOTHING)
    spent, seconds = time.perf_counter() - began, total / rate
    log.info(
        "first sound after %.2f s; %.2f s of sound in all, real-time factor %.2f",
        first,
        seconds,
        spent / seconds,
    )


def _tell(number: int, count: int, seconds: float, spent_s: float, draws: int = 1) -> None:
    factor = f"real-time factor {spent_s / seconds:.2f}" if seconds else "nothing said"
    drawn = f", drawn {draws} times" if draws > 1 else ""
    log.info("piece %d of %d: %.1f s, %s%s", number + 1, count, seconds, factor, drawn)


def _heard(data: bytes) -> bool:
    """Write it all; return whether there is still a listener."""
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        # No second error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True
