"""Where to cut a recording: segments are joined to sentences, and each cut is moved into the
nearest pause.

Subtitles say when to read a text, not when it is spoken, so their times are near a pause and seldom
in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from producer.corpus.recordings.segments import Segment

FRAME_S = 0.01
REACH_S = 0.6  # how far a cut may move
LEAST_PAUSE_S = 0.08
BELOW_DB = 25.0  # so far below the recording's speech, a frame is a pause
EDGE_S = 0.1  # of a pause to keep beside the words
JOIN_S = 1.0  # a longer pause ends a clip, even within a sentence
_ENDS = tuple(".!?…。！？؟۔।")
_CLOSING = "\"'”’»)）」』"


@dataclass(frozen=True)
class Piece:
    """A clip to cut: from `start_s` to `end_s`, or why it cannot be one."""

    start_s: float
    end_s: float
    text: str
    line: int
    speaker: str = ""
    fault: str = ""
    kind: str = ""


def frame_levels(blocks: Iterable[np.ndarray], rate: int) -> np.ndarray:
    """float32[frames]: dB of each 10 ms of consecutive float32[n] blocks.

    Frames start at whole hundredths of a second at any rate: at 22 050 Hz they have 220 or 221
    samples in turn.
    """
    left, at, found = np.zeros(0, np.float32), 0, [np.zeros(0)]  # `at`: where `left` begins
    num_frames = 0
    for block in blocks:
        left = np.concatenate([left, block])
        most = int((at + len(left)) / (rate * FRAME_S)) + 2
        edges = np.round(np.arange(num_frames, most) * (rate * FRAME_S)).astype(np.int64) - at
        edges = edges[edges <= len(left)]
        if len(edges) < 2:
            continue
        power = np.add.reduceat(np.square(left[: edges[-1]], dtype=np.float64), edges[:-1])
        found.append(10 * np.log10(power / np.diff(edges) + 1e-12))
        num_frames += len(edges) - 1
        left, at = left[edges[-1] :], at + int(edges[-1])
    return np.concatenate(found).astype(np.float32)


def cut(segments: list[Segment], levels: np.ndarray, most_s: float) -> list[Piece]:
    """Pieces in order of time; no two overlap. `levels`: from `frame_levels`."""
    if not segments or not len(levels):
        return []
    quiet = levels < float(np.percentile(levels, 95)) - BELOW_DB
    # Two segments without a pause between them cannot be separated: they are one piece.
    pieces: list[list[Segment]] = []
    for s in segments:
        last = pieces[-1] if pieces else None
        if last and not (s.fault or last[-1].fault) and s.speaker == last[0].speaker:
            apart = s.start_s - last[-1].end_s >= JOIN_S
            goes_on = not apart and (_goes_on(last[-1]) or _between(last[-1], s, quiet) is None)
            if goes_on and s.end_s - last[0].start_s <= most_s:
                last.append(s)
                continue
        pieces.append([s])
    return [_placed(pieces, i, quiet, most_s) for i in range(len(pieces))]


def _goes_on(s: Segment) -> bool:
    """Whether the sentence goes on after this segment."""
    return not s.text.rstrip(_CLOSING).endswith(_ENDS)


def _between(a: Segment, b: Segment, quiet: np.ndarray) -> tuple[float, float] | None:
    """The pause between two segments, or None."""
    low = max(a.end_s - REACH_S, (a.start_s + a.end_s) / 2)
    high = min(b.start_s + REACH_S, (b.start_s + b.end_s) / 2)
    return _pause(quiet, low, high, (a.end_s + b.start_s) / 2)


def _placed(pieces: list[list[Segment]], i: int, quiet: np.ndarray, most_s: float) -> Piece:
    said, total = pieces[i], len(quiet) * FRAME_S
    start, end = said[0].start_s, said[-1].end_s
    text = " ".join(s.text for s in said)
    piece = Piece(start, end, text, said[0].line, said[0].speaker)
    if end > total + REACH_S:
        fault = f"ends at {end:.1f} s, and the recording at {total:.1f} s"
        return replace(piece, fault=fault, kind="beyond the recording")
    if said[0].fault:
        return replace(piece, fault=said[0].fault, kind=said[0].kind)
    if i and start - pieces[i - 1][-1].end_s < 2 * REACH_S:
        before = _between(pieces[i - 1][-1], said[0], quiet)
    else:
        before = _pause(quiet, start - REACH_S, start + REACH_S, start)
        before = (0.0, 0.0) if before is None and start < REACH_S else before
    if i + 1 < len(pieces) and pieces[i + 1][0].start_s - end < 2 * REACH_S:
        after = _between(said[-1], pieces[i + 1][0], quiet)
    else:
        after = _pause(quiet, end - REACH_S, end + REACH_S, end)
        after = (total, total) if after is None and total - end < REACH_S else after
    if before is None or after is None:
        where = start if before is None else end
        fault = f"no pause near {where:.2f} s to cut at"
        return replace(piece, fault=fault, kind="no pause")
    start = max(sum(before) / 2, before[1] - EDGE_S)
    end = min(sum(after) / 2, after[0] + EDGE_S)
    if end - start > most_s:
        fault = f"{end - start:.1f} s without an end of a sentence or a pause (--max-seconds)"
        return replace(piece, fault=fault, kind="too long")
    return replace(piece, start_s=start, end_s=end)


def _pause(quiet: np.ndarray, low: float, high: float, near: float) -> tuple[float, float] | None:
    """The pause within [low, high] that is nearest to `near`, as much of it as is in there."""
    first, last = max(0, round(low / FRAME_S)), min(len(quiet), round(high / FRAME_S))
    if last <= first:
        return None
    padded = np.concatenate([[False], quiet[first:last], [False]]).astype(np.int8)
    change = np.diff(padded)
    starts, ends = np.flatnonzero(change == 1), np.flatnonzero(change == -1)
    long = (ends - starts) * FRAME_S >= LEAST_PAUSE_S - 1e-9
    if not long.any():
        return None
    starts, ends = (starts[long] + first) * FRAME_S, (ends[long] + first) * FRAME_S
    distance = np.maximum(np.maximum(starts - near, near - ends), 0)
    i = int(np.argmin(distance))
    return float(starts[i]), float(ends[i])
