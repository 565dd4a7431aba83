"""Saving in the background, and the file format that it streams into."""

import threading
from contextlib import contextmanager

import numpy as np
import pytest
from safetensors.numpy import load_file

from common.system.files import file_digest
from trainer.history import checkpoint
from trainer.history.checkpoint import Checkpoints, SaveFailed
from trainer.history.saver import Saver
from trainer.history.tensor_file import save_file


def state(x=1.0):
    return {
        "model": {"w": np.full((4, 3), x, np.float32)},
        "optimizer": {"m": np.zeros(5, np.float32)},
    }


@pytest.fixture
def saving():
    """How many saves are under way, and how many there were."""

    class Count:
        now = total = 0

        @contextmanager
        def __call__(self):
            self.now, self.total = self.now + 1, self.total + 1
            yield
            self.now -= 1

    return Count()


@pytest.fixture
def saver(tmp_path, saving):
    return Saver(Checkpoints(tmp_path, 3), saving)


@pytest.fixture
def slow(monkeypatch):
    """Writing waits until `slow.set()`."""
    gate, real = threading.Event(), checkpoint.save_file

    def wait(*args):
        assert gate.wait(90)
        return real(*args)

    monkeypatch.setattr(checkpoint, "save_file", wait)
    return gate


def test_training_goes_on_while_it_is_written_and_one_at_a_time(tmp_path, saver, saving, slow):
    saver.begin(3, state, {"best_step": None})
    assert saver.busy
    assert saver.take(0.0) is None
    assert not (tmp_path / "step-00000003").exists()
    with pytest.raises(RuntimeError, match="in flight"):
        saver.begin(4, state, {"best_step": None})
    assert saving.now == 1  # a stop would wait for it
    slow.set()
    outcome = saver.take(90.0)
    assert (outcome.step, outcome.error) == (3, None)
    assert 0 <= outcome.pause_s <= outcome.seconds
    assert (saving.now, saving.total) == (0, 1)
    assert not saver.busy
    assert saver.take(90.0) is None
    np.testing.assert_array_equal(
        Checkpoints(tmp_path, 3).load(3).tensors["model"]["w"], state()["model"]["w"]
    )


def test_a_failed_save_is_an_outcome_and_a_mistake_is_raised(saver, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    saver.begin(3, state, {"best_step": None})
    assert isinstance(saver.take(90.0).error, SaveFailed)
    saver.begin(4, lambda: {"model": {"w": "no array"}}, {"best_step": None})
    with pytest.raises(AttributeError):
        saver.take(90.0)
    assert not saver.busy


def test_an_abandoned_save_renames_nothing(tmp_path, saver, slow, monkeypatch):
    monkeypatch.setattr(
        "trainer.history.saver._ABANDONED_S", 0.1
    )  # what a stop waits for a save that hangs
    saver.begin(3, state, {"best_step": None})
    saver.abandon()
    assert saver.busy
    slow.set()
    assert isinstance(saver.take(90.0).error, SaveFailed)
    assert Checkpoints(tmp_path, 3).steps() == []


def test_the_file_is_what_the_package_reads_and_digested_on_the_way(tmp_path):
    tensors = {
        "matrix": np.arange(12, dtype=np.float32).reshape(3, 4),
        "transposed": np.arange(12, dtype=np.float32).reshape(3, 4).T,
        "half": np.ones((2, 3), np.float16),
        "count": np.int64(7).reshape(()),
        "empty": np.zeros((0, 3), np.float32),
        "bytes": np.arange(5, dtype=np.uint8),
        "flags": np.array([True, False]),
    }
    given = dict(tensors)
    digest = save_file(given, tmp_path / "x.safetensors")
    assert given == {}  # let go on the way
    assert digest == file_digest(tmp_path / "x.safetensors")
    loaded = load_file(tmp_path / "x.safetensors")
    assert sorted(loaded) == sorted(tensors)
    for name, array in tensors.items():
        assert (loaded[name].dtype, loaded[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(loaded[name], array)
