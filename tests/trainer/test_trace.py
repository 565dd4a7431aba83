"""The trace of a profile, from spans written by hand: what stands where, and for how long."""

import json
import time

import pytest

from common.system import trace as spans
from common.system.errors import BadInput, RunError
from common.system.lifecycle import Stop
from tests.support.traces import read_trace
from trainer.commands import trace

ABOUT = {"plan": "train", "g": 4}
T0 = 40000.125  # seconds since the machine was started


def at(row, name, began, ended=None, **about):
    """Milliseconds after T0."""
    ended = began if ended is None else ended
    return {"row": row, "name": name, "from": T0 + began / 1e3, "to": T0 + ended / 1e3, **about}


TRAINER = [
    at("device", "compute", -30, -20, g=4, count=1),  # of the stage before
    at("device", "step", -31, -20, g=4, count=1),
    at("channel", "open", 0),
    at("channel", "lease", 0, peer="producer-1", **ABOUT),
    at("channel", "data", 30, peer="producer-1", **ABOUT),
    at("channel", "deliver", 32, peer="producer-1", **ABOUT),
    at("feed", "upload", 32, 35, **ABOUT),
    at("loop", "next batch", 20, 36, **ABOUT),
    at("device", "step", 25, 90, g=4, count=1),
    at("device", "compute", 37, 90, g=4, count=1),
    at("device", "wait", 25, 36, g=4, count=1),
    at("loop", "issue", 37, 38, g=4, count=1),
]
PRODUCER = [
    at("loop", "read", -50, -49, **ABOUT),
    at("loop", "read", 2, 3, **ABOUT),
    at("decode-0", "a.wav", 3, 7),
    at("decode-1", "b.wav", 4, 9),
    at("batch", "decode", 3, 9, **ABOUT),
    at("loop", "pack", 10, 11, **ABOUT),
    at("device", "features", 12, 24, **ABOUT),
    at("loop", "serialise", 25, 31, **ABOUT),  # the batch had come before the call returned
]
PHASES = {
    "lease": (0, 2),
    "read": (2, 3),
    "decode": (3, 9),
    "pack": (10, 11),
    "features": (12, 24),
    "serialise": (25, 30),
    "ready": (30, 32),
    "upload": (32, 35),
    "queue": (35, 37),
    "step": (37, 90),
}


def put(run, process, lines, torn=""):
    (run / "trace").mkdir(exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines) + torn
    (run / "trace" / f"{process}.jsonl").write_text(text)


@pytest.fixture
def run(tmp_path):
    """Batch 4 by producer-1; producer-0 was killed in the middle of a line."""
    put(tmp_path, "trainer", TRAINER)
    put(tmp_path, "producer-1", PRODUCER)
    put(tmp_path, "producer-0", PRODUCER[1:2], torn='{"row": "lo')
    line = {"step": 1, "epoch": 0, "g": 4, "count": 1, "loss": 2.5, "wait_ms": 11.0}
    (tmp_path / "ledger.jsonl").write_text(json.dumps(line) + "\n")
    return tmp_path


def test_a_batch_is_followed_through_all_processes(run):
    trace.write(run, run / "t.json")
    found = read_trace(run / "t.json")
    batch = {s.name: s for s in found if s.process == "batches"}
    whole = batch.pop("train 4")
    assert (whole.start, whole.end, whole.inside) == (0, 90_000_000, ())
    assert {n: (s.start / 1e6, s.end / 1e6) for n, s in batch.items()} == PHASES
    assert {s.inside for s in batch.values()} == {("train 4",)}


def test_every_span_is_under_its_process_and_thread(run):
    trace.write(run, run / "t.json")
    found = [s for s in read_trace(run / "t.json") if s.process == "producer-1"]
    assert [(s.row, s.name) for s in found] == [
        ("loop", "read"),
        ("decode-0", "a.wav"),
        ("decode-1", "b.wav"),
        ("loop", "pack"),
        ("device", "features"),
        ("loop", "serialise"),
    ]
    events = json.loads((run / "t.json").read_text())["traceEvents"]
    lease = next(e for e in events if e["name"] == "lease" and e["ph"] == "i")
    assert lease["args"] == {"peer": "producer-1", **ABOUT}


def test_a_step_has_its_waits_and_its_ledger_line(run):
    trace.write(run, run / "t.json")
    device = [s for s in read_trace(run / "t.json") if (s.process, s.row) == ("trainer", "device")]
    assert [(s.name, s.inside) for s in device] == [
        ("step", ()),
        ("wait", ("step",)),
        ("compute", ("step",)),
    ]
    step, wait, _ = device
    assert step.args["wait_ms"] == (wait.end - wait.start) / 1e6 == 11.0
    assert (step.args["step"], step.args["loss"], step.args["g"]) == (1, 2.5, 4)


def test_a_batch_whose_producer_tells_nothing_has_no_row(run):
    put(run, "producer-1", PRODUCER[:4])
    trace.write(run, run / "t.json")
    assert not [s for s in read_trace(run / "t.json") if s.process == "batches"]


def test_what_cannot_be_written(run, tmp_path):
    with pytest.raises(BadInput, match="--trace"):
        trace.check(tmp_path)
    with pytest.raises(BadInput, match="--trace"):
        trace.check(tmp_path / "nowhere" / "t.json")
    (run / "trace" / "trainer.jsonl").unlink()
    with pytest.raises(RunError, match="nothing of the trainer"):
        trace.write(run, run / "t.json")


def test_spans_are_written_only_where_they_are_asked_for(tmp_path, monkeypatch):
    stop = Stop()
    spans.begin(tmp_path, "a", stop)
    spans.span("loop", "x", 1.0, 2.0)
    stop.run_hooks(0)
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv(spans.ASKED, "1")
    before = time.perf_counter()
    spans.begin(tmp_path, "a", stop)
    spans.span("loop", "x", before, before + 1, g=3)
    stop.run_hooks(0)
    spans.span("loop", "late", before, before)
    (line,) = (tmp_path / "trace" / "a.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "row": "loop",
        "name": "x",
        "from": before,
        "to": before + 1,
        "g": 3,
    }
    assert spans.one_clock()
    assert abs(time.monotonic() - time.perf_counter()) < 1


def test_a_torn_line_costs_no_later_ones(run):
    file = run / "trace" / "producer-1.jsonl"
    lines = [json.dumps(line) for line in PRODUCER]
    file.write_text("\n".join([lines[0], '{"row": "lo' + lines[0], *lines[1:]]) + "\n")
    trace.write(run, run / "t.json")
    assert [s for s in read_trace(run / "t.json") if s.process == "batches"]


def test_a_full_disk_ends_the_trace_and_nothing_else(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(spans.ASKED, "1")
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "a.jsonl").symlink_to("/dev/full")
    stop, codes = Stop(), []
    spans.begin(tmp_path, "a", stop)
    stop.at_exit(codes.append)
    spans.span("loop", "x", 1.0, 2.0)
    stop.run_hooks(7)  # what is in memory is written
    assert codes == [7]
    monkeypatch.setattr(spans, "_BUFFER", 1)
    spans.begin(tmp_path, "a", Stop())
    for _ in range(1000):  # more than any buffer holds
        spans.span("loop", "x" * 100, 1.0, 2.0)
    spans.end()
    assert [r.message for r in caplog.records] == [
        f"the trace ends here: {tmp_path / 'trace' / 'a.jsonl'}: No space left on device"
    ] * 2
