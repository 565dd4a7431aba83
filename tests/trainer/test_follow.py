"""A trainer beside the first one, in one process: faults of its own device, and waits that end."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import tensorflow as tf

from common.system.errors import Hopeless, RunError
from common.system.lifecycle import Stop
from trainer import follow, opening
from trainer.opening import Connected
from trainer.ranks import collectives
from trainer.ranks.words import RankLost

LOST = "CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered"
SPOILT = "CUDA_ERROR_ASSERT: device-side assert triggered"
OTHERS = "Collective ops is aborted by: another trainer is gone"


def a_run(folder) -> SimpleNamespace:
    trainers = SimpleNamespace(timeout_s=1.0)
    train = SimpleNamespace(reduce_dtype="float32")
    return SimpleNamespace(path=folder, config=SimpleNamespace(trainers=trainers, train=train))


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        (LOST, Hopeless, r"GPU 1 \(x\) is lost, after step 7 of gpt: .* from step 5, the newest"),
        (SPOILT, RunError, "GPU 1 .* has given up this process's work, after step 7 of gpt"),
        ("another trouble", tf.errors.InternalError, "another trouble"),
    ],
)
def test_its_own_card_is_named_as_the_first_trainers_is(tmp_path, monkeypatch, text, error, says):
    (tmp_path / "checkpoints" / "step-00000005").mkdir(parents=True)

    def build(run, name):
        raise tf.errors.InternalError(None, None, text)

    files = SimpleNamespace(checkpoints=tmp_path / "checkpoints")
    monkeypatch.setattr(follow, "RunFolder", a_run)
    monkeypatch.setattr(follow, "set_up_device", lambda *_: None)
    monkeypatch.setattr(follow.stages, "files_of", lambda run, name: files)
    monkeypatch.setattr(follow.stages, "build", build)
    words = {"set_up": {"stage": "gpt", "addresses": []}}
    follower = SimpleNamespace(rank=1, count=2, wait=lambda kind, stopping: words[kind])
    value = SimpleNamespace(device="GPU 1 (x)", step=7, stage_name="gpt", phase="training")
    status = SimpleNamespace(value=value, update=lambda **_: None)
    with pytest.raises(error, match=says) as raised:
        follow.Following(tmp_path, follower, status, Stop()).run()
    assert type(raised.value) is error


@pytest.mark.parametrize(("text", "error"), [(LOST, tf.errors.InternalError), (OTHERS, RankLost)])
def test_only_faults_of_others_are_faults_of_others(text, error):
    """A sum waits for the device: what the device says comes up there."""

    def fails():
        raise tf.errors.InternalError(None, None, text)

    ours, losses = collectives.Collectives.__new__(collectives.Collectives), object()
    ours._functions = {(id(losses), 0): fails}
    with pytest.raises(error, match=text):
        ours.add_up([], losses)


def test_trainers_that_do_not_find_each_other_are_not_waited_for(tmp_path, monkeypatch):
    held = threading.Event()
    deadlines = []  # of the watchdog, which would end this process
    for name in ("dump_traceback_later", "cancel_dump_traceback_later"):
        monkeypatch.setattr(
            opening.faulthandler, name, lambda *a, name=name, **k: deadlines.append((name[:6], *a))
        )
    monkeypatch.setattr(collectives, "Collectives", lambda *_, **__: held.wait(60))
    monkeypatch.setattr(opening, "CONNECT_S", 0.2)
    try:
        with pytest.raises(RankLost, match=r"not connected within 0 s, at a:1, b:2: a firewall"):
            Connected(a_run(tmp_path), 1, ["a:1", "b:2"]).connect(lambda: None, Stop())
    finally:
        held.set()
    assert deadlines == [("dump_t", 15.2), ("cancel",), ("dump_t", 15.0)]
