"""A strict reader of the Trace Event Format: what Perfetto would drop or misplace is an error."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

KINDS = {"X", "M", "i", "b", "e"}


@dataclass(frozen=True)
class Span:
    """Times in nanoseconds from the trace's begin; `inside`: names of the spans it lies in."""

    process: str
    row: str
    name: str
    start: int
    end: int
    args: dict
    inside: tuple[str, ...] = ()


def read_trace(path: Path) -> list[Span]:
    """All spans of a file. AssertionError: it breaks a rule."""
    document = json.loads(path.read_text(encoding="utf-8"))
    events = document["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len(set(processes.values())) == len(processes), "two processes of one name"
    assert {e["ph"] for e in events} <= KINDS
    for e in events:
        assert e["pid"] in processes, f"a process without a name: {e}"
        assert e["ts"] >= 0, f"before the trace begins: {e}"
    spans = []
    for e in (e for e in events if e["ph"] == "X"):
        start, end = round(1e3 * e["ts"]), round(1e3 * (e["ts"] + e["dur"]))
        assert end > start, f"no duration: {e}"
        row = rows[e["pid"], e["tid"]]
        spans.append(Span(processes[e["pid"]], row, e["name"], start, end, e["args"]))
    return [*_nested(spans), *_asynchronous(events, processes)]


def _nested(spans: list[Span]) -> list[Span]:
    """The spans of each row, one inside the other or one after the other."""
    found, open_now = [], {}
    for s in sorted(spans, key=lambda s: (s.start, -s.end)):
        stack = open_now.setdefault((s.process, s.row), [])
        while stack and stack[-1].end <= s.start:
            stack.pop()
        assert not stack or s.end <= stack[-1].end, f"{s} reaches out of {stack[-1]}"
        inside = tuple(outer.name for outer in stack)
        stack.append(Span(**{**vars(s), "inside": inside}))
        found.append(stack[-1])
    return found


def _asynchronous(events: list[dict], processes: dict[int, str]) -> list[Span]:
    """Spans by begin and end, in the order of the file; each `id` is a row."""
    found, stacks, last = [], {}, {}
    for e in (e for e in events if e["ph"] in ("b", "e")):
        key = (e["pid"], e["cat"], e["id"])
        assert e["ts"] >= last.get(key, 0.0), f"time goes back: {e}"
        last[key] = e["ts"]
        stack = stacks.setdefault(key, [])
        if e["ph"] == "b":
            stack.append(e)
            continue
        began = stack.pop()
        assert began["name"] == e["name"], f"{e} ends {began}"
        start, end = round(1e3 * began["ts"]), round(1e3 * e["ts"])
        assert end > start, f"no duration: {began}"
        inside = tuple(outer["name"] for outer in stack)
        found.append(Span(processes[e["pid"]], e["id"], e["name"], start, end, {}, inside))
    assert not any(stacks.values()), f"never ended: {stacks}"
    return found
