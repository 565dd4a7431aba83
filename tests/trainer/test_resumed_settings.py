"""Changes at a resume are reported and recorded in the ledger; impossible ones are named."""

from __future__ import annotations

import logging
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from common.launcher import ownership
from common.system.errors import BadInput
from tests.support.arithmetic_runs import arithmetic_run
from tests.support.loop_runs import newest, train
from trainer import stages
from trainer.history import ledger

SHORT = {
    "train__accumulate": 3,
    "train__eval_every": 0,
    "train__eval_at_epoch_end": False,
    "dvae__max_steps": 1,
}


def notes(run) -> list[dict]:
    lines = ledger.read(stages.files_of(run, "gpt").ledger)
    return [line["settings"] for line in lines if "settings" in line]


def test_s8_what_a_resume_changes_is_said_and_in_the_ledger(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    run = arithmetic_run(tmp_path, train__max_steps=5, train__optim__schedule="cosine", **SHORT)
    train(run)
    (first,) = notes(run)
    rate = repr(run.config.train.optim.learning_rate)
    assert (first["train.max_steps"], first["train.optim.learning_rate"]) == ("5", rate)
    assert "run" not in first
    said = []
    changed = {"train__max_steps": 8, "train__optim__learning_rate": 0.25, "train__keep": 2}
    run = arithmetic_run(
        tmp_path, out=said.append, train__optim__schedule="cosine", **changed, **SHORT
    )
    assert "changed: train.max_steps: 5 → 8" in said
    assert f"changed: train.optim.learning_rate: {rate} → 0.25" in said
    assert "changed: train.keep: 3 → 2" in said
    assert any("the cosine of train.optim ends with the run" in line for line in said)
    train(run)
    assert newest(run)["step"] == 8
    assert notes(run)[1:] == [
        {"train.max_steps": "8", "train.keep": "2", "train.optim.learning_rate": "0.25"}
    ]
    assert "from step 6 on: train.max_steps: 5 → 8" in caplog.text
    said = []
    run = arithmetic_run(
        tmp_path, out=said.append, train__optim__schedule="cosine", **changed, **SHORT
    )
    assert not [line for line in said if "changed:" in line or "cosine" in line]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("train__accumulate", 2, "train.accumulate: 3 there, 2 now"),
        ("transport__mel_dtype", "float16", "transport.mel_dtype: 'float32' there, 'float16' now"),
        ("dvae__batch_size", 6, "dvae.batch_size: 5 there, 6 now"),
        ("dvae__crop_frames", 32, "dvae.crop_frames: 64 there, 32 now"),
    ],
)
def test_s9_a_refused_resume_names_the_setting(tmp_path, key, value, words):
    arithmetic_run(tmp_path, 12, transport__mel_dtype="float32")
    with pytest.raises(BadInput, match=words) as e:
        arithmetic_run(tmp_path, 12, **{"transport__mel_dtype": "float32", key: value})
    assert "the files of the corpus changed" not in str(e.value)


def test_s10_a_run_that_is_further_than_asked_for_says_so(tmp_path, caplog):
    train(arithmetic_run(tmp_path, train__max_steps=5, **SHORT))
    for steps in (3, 5):
        caplog.clear()
        train(arithmetic_run(tmp_path, train__max_steps=steps, **SHORT))
        (said,) = [r.getMessage() for r in caplog.records if "already" in r.getMessage()]
        assert f"stage gpt is at step 5 already, of {steps} that are asked for" in said
        assert "--max-steps" in said


@contextmanager
def small_disk(num_bytes: int) -> Iterator[None]:
    """No file may become longer than so many bytes, pytest's own output included; the nearest to a
    full disk that needs no mount.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("num_bytes", [0, 300, 3000, 9000, 20000])
def test_s12_a_full_disk_at_creation_is_one_line_and_leaves_no_half_run(tmp_path, num_bytes):
    arithmetic_run(tmp_path / "whole", 12)  # what must not fail is loaded
    arithmetic_run_of = {"out": lambda line: None}
    (tmp_path / "b").mkdir()
    (tmp_path / "whole" / "corpus").rename(tmp_path / "b" / "corpus")
    said = f"cannot write the run folder {tmp_path}/b/run: .*Make room"
    with small_disk(num_bytes), pytest.raises(BadInput, match=said):
        arithmetic_run(tmp_path / "b", 12, **arithmetic_run_of)
    assert not (tmp_path / "b" / "run" / "identity.json").exists()
    assert not (tmp_path / "b" / "run" / ".new").exists()
    assert arithmetic_run(tmp_path / "b", 12).run_id


@pytest.mark.parametrize("num_bytes", [0, 3000])
def test_s12_a_full_disk_at_a_resume_changes_nothing(tmp_path, num_bytes):
    run = arithmetic_run(tmp_path, 12)
    before = (run.path / "config.yaml").read_bytes(), (run.path / "manifest.sqlite").read_bytes()
    said = "cannot write the run folder .*Make room"
    with small_disk(num_bytes), pytest.raises(BadInput, match=said):
        arithmetic_run(tmp_path, 12, train__max_steps=7)
    after = (run.path / "config.yaml").read_bytes(), (run.path / "manifest.sqlite").read_bytes()
    assert after == before
    assert arithmetic_run(tmp_path, 12).run_id == run.run_id


def test_s12_a_disk_without_room_for_a_lock_is_one_line(tmp_path):
    (tmp_path / "r").mkdir()
    with (
        small_disk(0),
        pytest.raises(BadInput, match=r"cannot write .*/r/prepare.lock: .*; make room"),
        ownership.preparing(tmp_path / "r"),
    ):
        pass
