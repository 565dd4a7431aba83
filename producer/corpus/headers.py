"""What a scan knows about one audio file: its header, and on request facts of its samples.

Facts are remembered by path, size and mtime.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, fields, replace
from typing import Protocol

import xxhash

from common.audio import vorbis
from common.audio.containers import check_whole
from common.audio.errors import DecodeError
from common.audio.levels import measure, shape
from common.audio.reading import is_converted, open_audio, read
from common.audio.treatment import Portion, Treatment
from common.system.files import why_irregular
from producer.batches.decode import num_output_samples

MAX_DEEP_S = 120  # longer files exceed every limit: their samples are not worth the memory
FACTS = 4  # facts of another version are not taken from an earlier manifest
AMBIGUOUS = "several files of that name"
_SHOWN = 5
_VORBIS = vorbis.Headers()  # that files opened by this process have confirmed


class Place(Protocol):
    """Where a recording may be (`producer/corpus/readers/paths.py`)."""

    def candidates(self) -> tuple[str, ...]:
        """Paths, the likeliest first."""

    def elsewhere(self) -> list[str]:
        """Paths with its name, if no candidate is a file."""

    @property
    def moved(self) -> bool:
        """Whether the candidates are not the path as written, but have the same name."""


class Known(Protocol):
    """A source of known facts about recordings: a manifest, or a scan's journal."""

    def file_facts(self, path: str, size: int, mtime_ns: int) -> dict | None:
        """What was found in exactly this file; None: nothing, or it has changed since."""


@dataclass(frozen=True)
class AudioFacts:
    """A file's header, or why it cannot be used.

    Facts that need the samples are None, or 0, if those were not read.

    `doubt`: what is odd about the container, in words. `level_db`: dBFS where it sounds. `lead_s`,
    `tail_s`, `pause_s`: silence before, after and (the longest) between sounds. `band_hz`,
    `hum_hz`: as in `levels.Shape`. `searched`: found by its name alone. `portion`: the part in use,
    unless that is all of it, unchanged.
    """

    path: str
    size: int
    mtime_ns: int
    rate: int = 0
    frames: int = 0
    error: str = ""
    kind: str = ""
    doubt: str = ""
    peak: float | None = None
    clipped: float = 0.0
    offset: float = 0.0
    channel: int | None = None
    dead: bool = False
    level_db: float | None = None
    lead_s: float = 0.0
    tail_s: float = 0.0
    pause_s: float = 0.0
    band_hz: int = 0
    hum_hz: int = 0
    content: str = ""  # a digest of the samples
    deep: bool = False  # whether the samples were asked for
    searched: bool = False
    portion: Portion | None = None
    known: bool = False  # whether they come from an earlier scan, without opening the file now

    @property
    def used_s(self) -> float:
        """Seconds in use."""
        return (self.frames if self.portion is None else self.portion.frames) / self.rate

    @property
    def num_samples(self) -> int:
        """Samples in use, at 22 050 Hz."""
        frames = self.frames if self.portion is None else self.portion.frames
        return num_output_samples(frames, self.rate)

    def treated(self, treatment: Treatment) -> AudioFacts:
        """The facts after the treatment: the part in use, and its silence. Unusable ones:
        unchanged.
        """
        if self.error or not treatment.changes:
            return self
        if self.level_db is None:  # too long to be examined
            return replace(self, portion=Portion(0, self.frames, 1.0))
        ends_s = self.lead_s, self.tail_s
        portion = treatment.portion(self.frames, self.rate, self.peak, self.level_db, ends_s)
        cut_s = portion.first / self.rate, (self.frames - portion.frames) / self.rate
        lead_s, tail_s = self.lead_s - cut_s[0], self.tail_s - (cut_s[1] - cut_s[0])
        return replace(self, portion=portion, lead_s=lead_s, tail_s=tail_s)

    def remembered(self) -> dict:
        """The values to store under path, size and mtime, without defaults."""
        values = {name: getattr(self, name) for name in _REMEMBERED}
        return {"facts": FACTS} | {n: v for n, v in values.items() if v != _REMEMBERED[n]}


_NOT_REMEMBERED = ("path", "size", "mtime_ns", "searched", "portion", "known")
_REMEMBERED = {f.name: f.default for f in fields(AudioFacts) if f.name not in _NOT_REMEMBERED}


def _examine(path: str, size: int, mtime_ns: int, deep: bool) -> AudioFacts:
    facts = {"path": path, "size": size, "mtime_ns": mtime_ns, "deep": deep}
    if size == 0:
        return AudioFacts(**facts, error="empty file", kind="empty file")
    brief = None if deep or not vorbis.is_named(path) else vorbis.header(path, size)
    if brief is not None and brief in _VORBIS:
        return AudioFacts(**facts, rate=brief.rate, frames=brief.frames)
    try:
        with open_audio(path) as f:
            facts |= {"rate": f.samplerate, "frames": f.frames}
            deep = deep and f.frames <= MAX_DEEP_S * f.samplerate
            if not is_converted(f):
                facts["doubt"] = check_whole(path, size, f.format, deep)
            if deep:
                samples = read(f, path, 0, f.frames)
                level = measure(path, samples, f.samplerate)
                facts |= vars(level) | vars(shape(samples, f.samplerate, level.channel))
                facts["content"] = xxhash.xxh3_64_hexdigest(samples)
    except DecodeError as e:
        return AudioFacts(**facts, error=e.reason, kind=e.kind)
    if brief is not None:
        _VORBIS.confirm(brief, facts["rate"], facts["frames"])
    return AudioFacts(**facts)


def facts_of(place: Place, deep: bool, previous: Known | None = None) -> AudioFacts | None:
    """Facts of the recording; None if there is none.

    Does not open a file that `previous` knows unchanged, nor anything that is not a file (a named
    pipe, a device).
    """
    irregular = None
    for searched in (False, True):
        paths = place.elsewhere() if searched else place.candidates()
        if searched and len(paths) > 1:
            return AudioFacts(paths[0], 0, 0, error=_ambiguous(paths), kind=AMBIGUOUS)
        for path in paths:
            try:
                found = os.stat(path)
            except (OSError, ValueError):  # ValueError: a null byte in the name
                continue
            if stat.S_ISREG(found.st_mode):
                return _look(path, found, deep, previous, searched or place.moved)
            irregular = irregular or (path, why_irregular(found.st_mode))
        if irregular is not None:
            path, why = irregular
            return AudioFacts(path, 0, 0, error=f"{why} ({path})", kind="not a file")
    return None


def _ambiguous(paths: list[str]) -> str:
    shown = ", ".join(paths[:_SHOWN]) + (
        f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    )
    return (
        f"{len(paths)} files have that name ({shown}); write the path relative to the metadata file"
    )


def _look(
    path: str, found: os.stat_result, deep: bool, previous: Known | None, searched: bool
) -> AudioFacts:
    known = (
        None if previous is None else previous.file_facts(path, found.st_size, found.st_mtime_ns)
    )
    if known is not None and known.pop("facts", 0) == FACTS and (known.get("deep") or not deep):
        facts = AudioFacts(path, found.st_size, found.st_mtime_ns, known=True, **known)
    else:
        facts = _examine(path, found.st_size, found.st_mtime_ns, deep)
    if searched:
        facts = replace(facts, searched=True)
    return facts
