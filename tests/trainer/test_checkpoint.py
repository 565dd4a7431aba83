import gc
import json
import os
import shutil
import threading
import types
import weakref

import numpy as np
import pytest

from common.system.errors import BadInput, RunError
from trainer.history import checkpoint, tensor_file
from trainer.history.checkpoint import Checkpoints, SaveFailed


def tensors(x=1.0):
    return {
        "model": {"w": np.full((4, 3), x, np.float32), "t": np.int64(7).reshape(())},
        "optimizer": {"m": np.zeros(5, np.float32)},
    }


def filled(tmp_path, steps=(20, 40, 60), keep=3, best=None):
    ckpt = Checkpoints(tmp_path / "checkpoints", keep)
    for s in steps:
        ckpt.save(s, tensors(s), {"next_g": s, "best_step": best})
    return ckpt


def test_round_trip_to_the_bit_and_no_temporary_left(tmp_path):
    ckpt = filled(tmp_path)
    found = ckpt.load_latest(60)
    assert found.step == 60
    assert found.state["next_g"] == 60
    for part, arrays in tensors(60).items():
        for k, v in arrays.items():
            assert (found.tensors[part][k].dtype, found.tensors[part][k].shape) == (
                v.dtype,
                v.shape,
            )
            assert found.tensors[part][k].tobytes() == v.tobytes()
    assert sorted(p.name for p in ckpt.folder.iterdir()) == [
        "step-00000020",
        "step-00000040",
        "step-00000060",
    ]


def test_what_was_read_early_is_taken_once_and_only_if_it_is_that_checkpoint(tmp_path, monkeypatch):
    filled(tmp_path, steps=(20, 40))
    early = checkpoint.ReadEarly(tmp_path / "checkpoints")
    early._thread.join()
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000040")  # so it must be what was read before
    folder = tmp_path / "checkpoints" / "step-00000040"
    assert early.load_folder(folder, 40).tensors["model"]["w"][0, 0] == 40
    with pytest.raises(ValueError, match="No such file"):
        early.load_folder(folder, 40)
    nothing = checkpoint.ReadEarly(tmp_path / "none")
    with pytest.raises(ValueError, match="No such file"):
        nothing.load_folder(tmp_path / "none" / "step-00000001", 1)


@pytest.mark.parametrize("when", ["read", "being read"])
def test_what_was_read_early_and_is_not_the_newest_any_more_is_freed(tmp_path, monkeypatch, when):
    kept = filled(tmp_path, steps=(20,))
    gate, made, load = threading.Event(), [], checkpoint.load_folder

    def load_noted(folder, step):
        assert gate.wait(60)
        found = load(folder, step)
        made.append((step, weakref.ref(found)))
        return found

    monkeypatch.setattr(checkpoint, "load_folder", load_noted)
    early = checkpoint.ReadEarly(kept.folder)
    kept.save(40, tensors(40), {"next_g": 40, "best_step": None})
    if when == "read":
        gate.set()
        early._thread.join()
    else:
        threading.Timer(0.05, gate.set).start()
    found = Checkpoints(kept.folder, 3, early.load_folder).load_latest(40)
    gc.collect()
    assert [(step, made() is None) for step, made in made] == [(20, True), (40, False)]
    assert found.tensors["model"]["w"][0, 0] == 40
    assert early.load_folder(kept.path(20), 20).step == 20


def test_a_checkpoint_that_was_found_damaged_early_is_set_aside_like_any_other(tmp_path, caplog):
    kept = filled(tmp_path, steps=(20, 40))
    cut_half(kept.path(40))
    early = checkpoint.ReadEarly(kept.folder)
    assert Checkpoints(kept.folder, 3, early.load_folder).load_latest(40).step == 20
    assert "checkpoint step 40 is damaged" in caplog.text


def test_too_little_memory_sets_nothing_aside_and_what_could_not_be_read_early_is_read_later(
    tmp_path, monkeypatch
):
    kept = filled(tmp_path, steps=(20, 40))
    with monkeypatch.context() as m:
        m.setattr(tensor_file.cgroup, "memory_limit", lambda: 100)
        early = checkpoint.ReadEarly(kept.folder)
        early._thread.join()
        with pytest.raises(RunError, match=r"safetensors has 0\.0 GB, and 0\.0 GB of memory"):
            kept.load_latest(40)
    assert kept.steps() == [20, 40]
    assert Checkpoints(kept.folder, 3, early.load_folder).load_latest(40).step == 40


def test_keep_and_best(tmp_path):
    ckpt = Checkpoints(tmp_path / "c", 2)
    for s in range(1, 7):
        ckpt.save(s, tensors(), {"best_step": 2 if s >= 2 else 1})
    assert ckpt.steps() == [2, 5, 6]


def test_a_hundred_million_steps_are_steps_like_others(tmp_path):
    ckpt = filled(tmp_path, [99_999_990, 100_000_000, 100_000_010], keep=2)
    assert ckpt.steps() == [100_000_000, 100_000_010]
    assert ckpt.load_latest(None).step == 100_000_010


def cut_half(folder):
    f = folder / "model.safetensors"
    os.truncate(f, f.stat().st_size // 2)


def flip_a_byte(folder):
    f = folder / "optimizer.safetensors"
    data = bytearray(f.read_bytes())
    data[-1] ^= 1
    f.write_bytes(data)


def drop_state(folder):
    (folder / "state.json").unlink()


def edit_state(folder):
    state = json.loads((folder / "state.json").read_text())
    state["next_g"] += 1
    (folder / "state.json").write_text(json.dumps(state))


@pytest.mark.parametrize("damage", [cut_half, flip_a_byte, drop_state, edit_state])
def test_c43_a_damaged_newest_is_set_aside_and_the_one_before_used(tmp_path, damage, caplog):
    ckpt = filled(tmp_path)
    damage(ckpt.path(60))
    assert ckpt.load_latest(60).step == 40
    assert "step 60 damaged, using step 40" in caplog.text
    assert (ckpt.folder / "damaged-step-00000060").is_dir()
    assert ckpt.steps() == [20, 40]


def test_the_same_step_may_be_damaged_twice(tmp_path):
    ckpt = filled(tmp_path)
    cut_half(ckpt.path(60))
    ckpt.load_latest(60)
    ckpt.save(60, tensors(), {"best_step": None})  # trained again from 40
    flip_a_byte(ckpt.path(60))
    assert ckpt.load_latest(60).step == 40
    assert sorted(p.name for p in ckpt.folder.glob("damaged-*")) == [
        "damaged-step-00000060",
        "damaged-step-00000060-2",
    ]


def test_never_a_silent_fresh_start(tmp_path):
    assert Checkpoints(tmp_path / "new", 3).load_latest(None) is None
    ckpt = filled(tmp_path, (20,))
    cut_half(ckpt.path(20))
    for _ in range(2):  # also when asked again, with the damaged one set aside
        with pytest.raises(BadInput, match="no whole checkpoint"):
            ckpt.load_latest(None)
    shutil.rmtree(ckpt.folder)
    with pytest.raises(BadInput, match="step 20"):
        Checkpoints(ckpt.folder, 3).load_latest(20)


def test_no_room_says_needed_and_free_and_keeps_the_old(tmp_path, monkeypatch):
    ckpt = filled(tmp_path, (20,))
    monkeypatch.setattr(
        checkpoint.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=5_000_000)
    )
    with pytest.raises(SaveFailed, match=r"needs 17 MB, .* has 5 MB free"):
        ckpt.save(40, tensors(), {"best_step": None})
    assert ckpt.load_latest(20).step == 20


def test_a_failed_write_leaves_nothing_and_keeps_the_old(tmp_path, monkeypatch):
    ckpt = filled(tmp_path, (20,))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(SaveFailed, match="No space left"):
        ckpt.save(40, tensors(), {"best_step": None})
    assert sorted(p.name for p in ckpt.folder.iterdir()) == ["step-00000020"]


def test_leftovers_of_a_killed_save_are_removed_at_the_next_start(tmp_path):
    ckpt = filled(tmp_path, (20,))
    (ckpt.folder / ".tmp-00000040").mkdir()
    (ckpt.folder / ".tmp-00000040" / "model.safetensors").write_bytes(b"half")
    assert Checkpoints(ckpt.folder, 3).steps() == [20]
    assert not list(ckpt.folder.glob(".tmp-*"))


def test_saving_a_step_again_replaces_it(tmp_path):
    ckpt = filled(tmp_path, (20,))
    ckpt.save(20, tensors(99), {"best_step": None})
    assert ckpt.load_latest(20).tensors["model"]["w"][0, 0] == 99
    assert [p.name for p in ckpt.folder.iterdir()] == ["step-00000020"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_folder_is_bad_input(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(BadInput, match="cannot be written"):
        Checkpoints(tmp_path / "c", 3)


def test_a_file_in_the_way_is_bad_input(tmp_path):
    (tmp_path / "c").write_text("")
    with pytest.raises(BadInput, match="cannot be written"):
        Checkpoints(tmp_path / "c", 3)
