"""Curves sent elsewhere: read from the files from where one was, by a service that may fail at any
time.
"""

import json
import logging
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from common.launcher import program
from common.run import settings
from common.run.folder import RunFolder
from common.system.errors import BadInput
from tests.support import page_runs
from trainer.loggers import services
from trainer.loggers.__main__ import Sender
from trainer.loggers.follow import Follower, Record, record_of

page_run = page_runs.page_run


def write(path: Path, *lines: dict, end: str = "\n") -> None:
    with open(path, "a") as f:
        f.write("\n".join(map(json.dumps, lines)) + end)


def step(s: int, loss: float | None = 2.0) -> dict:
    return {"time": 100.0 + s, "step": s, "epoch": 0, "loss": loss, "step_ms": 5.0}


def test_a_line_becomes_figures_by_name():
    assert record_of("gpt", json.dumps(step(3)).encode()) == Record(
        "gpt", 3, 103.0, {"train/loss": 2.0, "speed/step_ms": 5.0}
    )
    line = {"time": 1, "step": 4, "eval_audio": 3.5, "seconds": 2.0, "speed": {"wait": 0.1}}
    assert record_of("gpt", json.dumps(line).encode()).values == {
        "eval/audio": 3.5, "train/seconds": 2.0, "speed/wait": 0.1,
    }  # fmt: skip
    for bad in (b"", b"{", b"[]", b'{"time": 1}', b'{"time": 1, "step": 2, "traces": {"a": 1}}'):
        assert record_of("gpt", bad) is None
    assert "train/loss" not in record_of("gpt", json.dumps(step(3, None)).encode()).values


def test_every_line_is_read_once_though_the_process_is_another(tmp_path):
    files = {"dvae": tmp_path / "d.jsonl", "gpt": tmp_path / "g.jsonl"}
    memory = tmp_path / "loggers" / "x.json"
    first = Follower(files, memory)
    assert first.read() == []
    write(files["dvae"], step(1), step(2))
    write(files["gpt"], step(1), end="")  # not a whole line yet
    assert [(r.stage, r.step) for r in first.read()] == [("dvae", 1), ("dvae", 2)]
    assert len(first.read()) == 2, "not sent yet"
    first.sent()
    first.known["run"] = "abc"
    first.keep()
    with open(files["gpt"], "a") as f:
        f.write("\n")
    second = Follower(files, memory)
    assert second.known == {"run": "abc"}
    assert [(r.stage, r.step) for r in second.read()] == [("gpt", 1)]
    memory.write_text("{")
    assert len(Follower(files, memory).read()) == 3


class Service:
    """Fails a given number of times, and keeps what it accepted."""

    def __init__(self, faults: list):
        self.faults, self.took, self.closed = faults, [], False

    def _maybe(self):
        if self.faults and (fault := self.faults.pop(0)) is not None:
            raise fault

    def send(self, records):
        self._maybe()
        self.took += [r.step for r in records]

    def close(self):
        self._maybe()
        self.closed = True


def test_what_holds_nothing_is_passed_over(tmp_path, monkeypatch):
    """More than is read at a time without a figure, and without a line's end."""
    monkeypatch.setattr("trainer.loggers.follow.MOST_BYTES", 1000)
    file = tmp_path / "g.jsonl"
    file.write_bytes(b"{}\n" * 900 + bytes(5000) + b"\n")
    write(file, step(7))
    follower = Follower({"gpt": file}, tmp_path / "x.json")
    assert [r.step for r in follower.read()] == [7]


def test_a_service_that_fails_is_told_once_and_misses_nothing(tmp_path, caplog):
    files = {"gpt": tmp_path / "g.jsonl"}
    follower = Follower(files, tmp_path / "x.json")
    service = Service([OSError("no route"), None, ValueError("its own"), None])
    tries = iter([RuntimeError("cannot log in"), None])

    def connect(known):
        if (fault := next(tries)) is not None:
            raise fault
        return service

    sender = Sender(follower, connect)
    caplog.set_level(logging.INFO)
    write(files["gpt"], step(1))
    assert [sender.round(), sender.round(), sender.round()] == [False, False, True]
    write(files["gpt"], step(2))
    assert [sender.round(), sender.round()] == [False, True]
    write(files["gpt"], step(3))
    service.faults = []
    sender.close()
    assert service.took == [1, 2, 3]
    assert service.closed
    levels = [r.levelname for r in caplog.records if "trying again" in r.message]
    assert levels == ["WARNING", "INFO", "INFO"]


def test_each_named_service_is_a_process_that_the_run_can_do_without(tmp_path, monkeypatch):
    monkeypatch.setattr(program.importlib.util, "find_spec", lambda name: object())
    config = settings.parse({"loggers": ["wandb", "mlflow"]})
    specs = list(program.logger_specs(config, tmp_path))
    assert [(s.name, s.optional, s.main) for s in specs] == [
        ("wandb", True, False), ("mlflow", True, False),
    ]  # fmt: skip
    assert specs[0].argv[-4:] == ("--run", str(tmp_path), "--to", "wandb")
    assert not list(program.logger_specs(settings.parse({}), tmp_path))


def test_a_service_without_its_package_is_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(program.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"wandb is not installed; pip install 'xtts-trainer\[wandb"):
        list(program.logger_specs(settings.parse({"loggers": ["wandb"]}), tmp_path))
    with pytest.raises(BadInput, match="loggers"):
        settings.parse({"loggers": ["tensorbord"]})


def test_no_service_is_imported_by_the_others():
    code = "import sys, trainer.loggers.__main__, launch"
    code += "; print({'wandb', 'mlflow'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=program.ROOT,
        env={**os.environ, "PYTHONPATH": str(program.ROOT)},
    )  # fmt: skip
    assert done.stdout.strip() == "set()", done.stderr


def test_who_is_logged_in(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    assert not services.logged_in()
    netrc = tmp_path / ".netrc"
    netrc.write_text("machine api.wandb.ai\n  login user\n  password x\n")
    netrc.chmod(0o600)
    assert services.logged_in()
    monkeypatch.setenv("WANDB_BASE_URL", "https://own.example")
    assert not services.logged_in()
    monkeypatch.setenv("WANDB_API_KEY", "x")
    assert services.logged_in()


# -- the real packages, where they are installed: pip install 'xtts-trainer[wandb,mlflow]' ---------


@pytest.fixture
def sent(page_run, monkeypatch):
    """Sends a run's figures to a service, in two halves with a restart between."""
    (page_run / "loggers").mkdir()
    run = RunFolder(page_run)
    files = {s: run.stage_folder(s) / "metrics.jsonl" for s in run.stages}
    for path in files.values():
        path.write_text("")

    def send(name: str) -> RunFolder:
        for part in (range(1, 31), range(31, 61)):
            write(files["gpt"], *(step(s, 60.0 / s) for s in part))
            follower = Follower(files, page_run / "loggers" / f"{name}.json")
            sender = Sender(follower, lambda known: services.SERVICES[name](run, known))
            assert sender.round()
            sender.close()
        return run

    return send


def leveldb_records(data: bytes):
    """The records of a log in LevelDB's format after W&B's own header of 7 bytes."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # no room for a header: the rest of the block is empty
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts = (b"" if kind in (1, 2) else parts) + data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield parts


@pytest.mark.slow
def test_mlflows_files_hold_the_curves(sent, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run = sent("mlflow")
    client = mlflow.MlflowClient(tracking_uri=(run.path / "loggers/mlruns").resolve().as_uri())
    (experiment,) = [e for e in client.search_experiments() if e.name == "xtts"]
    (found,) = client.search_runs([experiment.experiment_id])
    curve = client.get_metric_history(found.info.run_id, "gpt/train/loss")
    assert [(m.step, m.value) for m in curve] == [(s, 60.0 / s) for s in range(1, 61)]
    assert found.data.params["model.size"] == "tiny"
    assert found.info.status == "FINISHED"


@pytest.mark.slow
def test_wandb_offline_holds_the_curves(sent, monkeypatch):
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    run = sent("wandb")
    curve = {}
    for path in sorted((run.path / "loggers/wandb").glob("offline-run-*/*.wandb")):
        for data in leveldb_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            items = {"/".join(i.nested_key) or i.key: i.value_json for i in record.history.item}
            if "gpt/train/loss" in items:
                curve[int(items["gpt/step"])] = float(items["gpt/train/loss"])
    assert curve == pytest.approx({s: 60.0 / s for s in range(1, 61)})
