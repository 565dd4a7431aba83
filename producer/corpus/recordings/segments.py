"""What a recording says, and when: SubRip (`.srt`), WebVTT (`.vtt`), and JSON as Whisper and
similar tools write it.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from common.system.documents import parse_json
from common.system.errors import BadInput
from common.system.files import open_plain
from producer.corpus.readers.row import RowError

SUFFIXES = (".srt", ".vtt", ".json")
_MOST_BYTES, _MOST_SEGMENTS = 16 << 20, 200_000
OVERLAP_S = 0.05  # overlap of two texts, above which they are spoken at the same time
_TIME = r"(?:(\d{1,4}):)?(\d{1,2}):(\d{1,2})[.,](\d{1,3})"
_TIMES = re.compile(rf"^\s*{_TIME}\s*-->\s*{_TIME}")
_TAG = re.compile(
    r"</?(?:[bius]|c|v|lang|ruby|rt|font)(?:[.\s][^>]*)?>|<\d[\d:.]*>|\{\\[^}]*\}", re.I
)
_VOICE = re.compile(r"<v(?:\.[^\s>]*)?\s+([^>]+)>", re.I)
_SOUND = re.compile(r"[\[(（【][^\[(（【\])）】]*[\])）】]|[♪♫]+")


@dataclass(frozen=True)
class Segment:
    """A text and when it is spoken, in seconds. `line`: where its text is.

    `fault`: why it cannot be used; it still shows that something else is heard there.
    """

    start_s: float
    end_s: float
    text: str
    line: int
    speaker: str = ""
    fault: str = ""
    kind: str = ""


def find(recording: Path) -> Path | None:
    """The file of segments beside a recording: `x.srt`, or `x.fa.srt` if that is the only one.

    BadInput: several languages.
    """
    for suffix in SUFFIXES:
        exact = recording.with_suffix(suffix)
        if exact.is_file():
            return exact
    found = [
        p
        for p in sorted(recording.parent.iterdir())
        if p.suffix.lower() in SUFFIXES
        and re.fullmatch(r"\.[A-Za-z]{2,3}(?:-\w+)?", p.name[len(recording.stem) : -len(p.suffix)])
        and p.name.startswith(f"{recording.stem}.")
    ]
    if len(found) > 1:
        names = ", ".join(p.name for p in found)
        raise BadInput(f"{recording}: several files say what is said in it ({names}); keep one")
    return found[0] if found else None


def read_segments(path: Path) -> tuple[list[Segment], list[RowError]]:
    """Segments in order of time, and the lines that are not segments, with the reason.

    BadInput: unreadable as a whole.
    """
    try:
        with open_plain(path) as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise BadInput(f"{path}: more than {_MOST_BYTES >> 20} MiB; no recording has that many")
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise BadInput(f"{path}: not UTF-8 (byte {e.start}); convert it") from e
    except OSError as e:
        raise BadInput(f"{path}: cannot be opened ({e.strerror})") from e
    items = _of_json(path, text) if path.suffix.lower() == ".json" else _of_cues(path, text)
    errors, segments = [], []
    for item in items:
        (segments if isinstance(item, Segment) else errors).append(item)
    segments.sort(key=lambda s: s.start_s)
    judged: list[Segment] = []
    for s in map(_judged, segments):
        if judged and s.start_s < judged[-1].end_s - OVERLAP_S:
            both = f"{judged[-1].start_s:.2f} s and {s.start_s:.2f} s"
            fault = {"fault": f"two texts at a time, from {both}", "kind": "overlaps"}
            judged[-1], s = replace(judged[-1], **fault), replace(s, **fault)
        judged.append(s)
    return judged, errors


def _judged(s: Segment) -> Segment:
    spoken = _SOUND.sub(" ", s.text).strip()
    if s.end_s <= s.start_s:
        fault = f"ends at {s.end_s:.2f} s, before it begins"
        return replace(s, end_s=s.start_s, fault=fault, kind="times out of order")
    if not any(c.isalnum() for c in spoken):
        return replace(s, fault=f"no words in {s.text!r}", kind="no words")
    if spoken != s.text:
        return replace(s, fault=f"contains more than speech: {s.text!r}", kind="sounds described")
    return s


def _of_cues(path: Path, text: str) -> Iterator[Segment | RowError]:
    """Cues of SubRip and WebVTT: a line of times, then lines of text up to an empty one."""
    lines = text.splitlines()
    i = 0
    while i < len(lines):
        times = _TIMES.match(lines[i])
        if not times:
            if "-->" in lines[i]:
                yield RowError(str(path), i + 1, "", f"no times: {lines[i]!r}", "no times")
            i += 1
            continue
        first = i + 1
        i = first
        while i < len(lines) and lines[i].strip() and not _TIMES.match(lines[i]):
            i += 1
        said = lines[first:i]
        if i < len(lines) and said and _TIMES.match(lines[i]) and said[-1].strip().isdigit():
            said = said[:-1]  # the number of the next cue, without an empty line before it
        t = times.groups()
        raw = " ".join(said)
        voice = _VOICE.search(raw)
        clean = " ".join(html.unescape(_TAG.sub("", raw)).split())
        yield Segment(
            _seconds(*t[:4]), _seconds(*t[4:]), clean, first + 1, voice[1].strip() if voice else ""
        )


def _seconds(hours: str | None, minutes: str, seconds: str, fraction: str) -> float:
    whole = int(hours or 0) * 3600 + int(minutes) * 60 + int(seconds)
    return whole + int(fraction) / 10 ** len(fraction)


def _of_json(path: Path, text: str) -> Iterator[Segment | RowError]:
    """`{"segments": [{"start": …, "end": …, "text": …}, …]}`, or the list alone."""
    try:
        found = parse_json(text)
    except ValueError as e:
        raise BadInput(f"{path}: not JSON ({e})") from e
    items = found.get("segments") if isinstance(found, dict) else found
    if not isinstance(items, list):
        raise BadInput(f'{path}: no list of segments; {{"segments": [{{"start", "end", "text"}}]}}')
    if len(items) > _MOST_SEGMENTS:
        raise BadInput(f"{path}: more than {_MOST_SEGMENTS} segments; no recording has that many")
    for number, item in enumerate(items, 1):
        try:
            start, end, said = float(item["start"]), float(item["end"]), item["text"]
            speaker = item.get("speaker") or ""
            if (
                not isinstance(said, str)
                or not isinstance(speaker, str)
                or not (start < 1e7 and end < 1e7)
            ):
                raise TypeError
        except (KeyError, TypeError, ValueError, OverflowError):
            reason = f"segment {number} lacks start, end or text"
            yield RowError(str(path), number, "", reason, "no times")
            continue
        yield Segment(start, end, " ".join(said.split()), number, speaker)
