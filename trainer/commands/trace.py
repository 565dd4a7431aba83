"""`launch.py profile --trace FILE`: what every process of the profile noted, as one file in the
Trace Event Format, which https://ui.perfetto.dev and chrome://tracing open.

Each process has its rows, a thread or a device each. Above them, under "batches", each batch has
a row of its own: everything that happened to it, in whichever process.
Source: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from common.system import trace
from common.system.errors import BadInput, RunError
from common.system.files import write_atomically
from trainer.history import ledger

_BATCHES = 1  # the process number of the batches' rows
_OF_LEDGER = ("step", "epoch", "loss", "step_ms", "wait_ms")

Batch = tuple[str, int]  # plan, number
Spans = dict[tuple[Batch, str], dict]  # the newest of each name


def check(path: Path) -> None:
    """BadInput: a trace cannot be made on this system, or not written there."""
    if not trace.one_clock():
        raise BadInput("--trace needs Linux, whose clock is the same in all processes")
    if path.is_dir() or not path.parent.is_dir():
        raise BadInput(f"--trace {path}: name a file in a folder that is there")


def write(run: Path, path: Path) -> int:
    """Write the trace of a run's processes, from where its last stage begins; the number of
    events.

    Raises:
        RunError: no process has noted anything. BadInput: `path` cannot be written.
    """
    noted = {p.stem: list(_lines(p)) for p in sorted((run / trace.FOLDER).glob("*.jsonl"))}
    if "trainer" not in noted:
        raise RunError(f"{run / trace.FOLDER} holds nothing of the trainer: no trace")
    zero = max((s["from"] for s in noted["trainer"] if s["name"] == "open"), default=0.0)
    # Before: of another stage, whose batches have the same numbers.
    noted = {process: [s for s in of if s["from"] >= zero] for process, of in noted.items()}
    folded = ledger.fold(ledger.read(run / "ledger.jsonl"))
    lines = {line["g"]: line for line in folded if "g" in line}
    events = [*_of_processes(noted, lines, zero), *_of_batches(noted, zero)]
    document = {"traceEvents": events, "displayTimeUnit": "ms"}
    try:
        write_atomically(path, json.dumps(document))
    except OSError as e:
        raise BadInput(f"--trace {path}: {e.strerror}") from e
    return len(events)


def _lines(path: Path) -> Iterator[dict]:
    """A process's spans. The last line of one that was killed may be torn, and lead into the first
    of the one in its place.
    """
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(text)
        except json.JSONDecodeError:
            continue


def _ns(seconds: float, zero: float) -> int:
    return round(1e9 * seconds) - round(1e9 * zero)


def _of_processes(noted: dict[str, list[dict]], lines: dict, zero: float) -> Iterator[dict]:
    """Every span under its process and row. A step has the figures of its ledger line."""
    for pid, (process, spans) in enumerate(noted.items(), _BATCHES + 1):
        yield _meta(pid, 0, "process_name", name=process)
        yield _meta(pid, 0, "process_sort_index", sort_index=pid)
        rows = list(dict.fromkeys(s["row"] for s in spans if s["row"] != "batch"))
        for tid, row in enumerate(sorted(rows), 1):
            yield _meta(pid, tid, "thread_name", name=row)
        for s in sorted(spans, key=lambda s: (s["from"], -s["to"])):
            if s["row"] == "batch":  # of no thread alone
                continue
            about = {k: v for k, v in s.items() if k not in ("row", "name", "from", "to")}
            if s["name"] == "step" and s["g"] in lines:
                about |= {k: lines[s["g"]].get(k) for k in _OF_LEDGER}
            start, end = _ns(s["from"], zero), _ns(s["to"], zero)
            at = {"pid": pid, "tid": 1 + sorted(rows).index(s["row"]), "ts": start / 1e3}
            kind = {"ph": "X", "dur": (end - start) / 1e3} if end > start else {"ph": "i", "s": "t"}
            yield {"name": s["name"], "cat": process, **kind, **at, "args": about}


def _of_batches(noted: dict[str, list[dict]], zero: float) -> Iterator[dict]:
    """A row for each batch that was trained, its phases inside a span of their own."""
    yield _meta(_BATCHES, 0, "process_name", name="batches")
    yield _meta(_BATCHES, 0, "process_sort_index", sort_index=_BATCHES)
    made = {process: _by_batch(spans) for process, spans in noted.items()}
    steps: dict[Batch, dict] = {}
    for s in noted["trainer"]:
        if s["name"] == "compute":
            steps |= {("train", g): s for g in range(s["g"], s["g"] + s["count"])}
    for batch, compute in sorted(steps.items()):
        phases = _phases(batch, compute, made)
        if not phases:
            continue
        whole, at = f"{batch[0]} {batch[1]}", {"cat": "batch", "pid": _BATCHES, "tid": 0}
        at["id"] = whole
        first, last = _ns(phases[0][1], zero), _ns(phases[-1][2], zero)
        yield {"name": whole, "ph": "b", "ts": first / 1e3, **at}
        # In the order of time: a phase begins where the one before it ends.
        for name, start, end in ((n, _ns(s, zero), _ns(e, zero)) for n, s, e in phases):
            if end != start:
                yield {"name": name, "ph": "b", "ts": start / 1e3, **at}
                yield {"name": name, "ph": "e", "ts": end / 1e3, **at}
        yield {"name": whole, "ph": "e", "ts": last / 1e3, **at}


def _phases(batch: Batch, compute: dict, made: dict[str, Spans]) -> list[tuple[str, float, float]]:
    """(what, from, to) of a batch from its lease to the end of its step; [] where a part of it is
    unknown, as of a producer that was killed.
    """
    of, come = made["trainer"], made["trainer"].get((batch, "data"))
    his = made.get(come["peer"], {}) if come else {}
    names = (("lease", of), ("read", his), ("decode", his), ("pack", his), ("features", his))
    names += (("serialise", his), ("deliver", of), ("upload", of), ("next batch", of))
    found = {name: spans.get((batch, name)) for name, spans in names}
    if come is None or not all(found.values()):
        return []
    arrived = come["from"]
    # The channel's thread may have sent it, and it may have come, before the call has returned.
    sent = min(found["serialise"]["to"], arrived)
    step = max(found["next batch"]["to"], compute["from"])
    phases = [("lease", found["lease"]["from"], found["read"]["from"])]
    phases += [
        (n, found[n]["from"], found[n]["to"]) for n in ("read", "decode", "pack", "features")
    ]
    return [
        *phases,
        ("serialise", found["serialise"]["from"], sent),
        ("wire", sent, arrived),
        ("ready", arrived, found["deliver"]["from"]),
        ("upload", found["upload"]["from"], found["upload"]["to"]),
        ("queue", found["upload"]["to"], step),
        ("step", step, compute["to"]),
    ]


def _meta(pid: int, tid: int, what: str, **args) -> dict:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "ts": 0, "args": args}


def _by_batch(spans: list[dict]) -> Spans:
    return {((s["plan"], s["g"]), s["name"]): s for s in spans if "plan" in s}
