"""The loop's checkpoints: saves that take long or fail, which one is the best, and what a stop
leaves on disk.
"""

import errno
import threading
import time
from types import SimpleNamespace

import pytest

from common.system import status as status_module
from common.system.errors import FAILED, Hopeless, Replaced, RunError, Stopped
from common.system.lifecycle import Stop
from tests.support import loop_runs
from tests.support.arithmetic_runs import arithmetic_run, assert_exact
from tests.support.arithmetic_step import ArithmeticStep
from tests.support.loop_runs import newest, train
from trainer import stages
from trainer.history import checkpoint, ledger
from trainer.history.checkpoint import Checkpoints, SaveFailed
from trainer.patience import Patience

stop_at = loop_runs.stop_at


@pytest.mark.parametrize("cause", ["stop", "replace"])
def test_a_stop_saves_even_where_saves_take_long(tmp_path, stop_at, monkeypatch, cause):
    """Full size takes 13 s per save; what was trained since the last one must not be dropped."""
    monkeypatch.setattr(Patience, "left_for_another", False)
    run = arithmetic_run(tmp_path, dvae__max_steps=1, train__save_every=20)
    stop = Stop(saves=True)
    stop_at(stop, 1 + 37, cause)
    with pytest.raises((Stopped, Replaced)):
        train(run, stop)
    assert newest(run)["step"] == 37


def failing_saves(monkeypatch, steps, cause=None):
    """Saves of stage 2's `steps` fail as on a full disk, or for another cause."""
    save = Checkpoints.save

    def maybe(self, step, *args, **kwargs):
        if step in steps and self.folder.parent.name != "dvae":
            raise SaveFailed("No space left on device" if cause is None else str(cause)) from cause
        return save(self, step, *args, **kwargs)

    monkeypatch.setattr(Checkpoints, "save", maybe)


def test_a_last_checkpoint_that_fails_is_a_failure(tmp_path, monkeypatch):
    failing_saves(monkeypatch, {25})
    run = arithmetic_run(
        tmp_path, train__max_steps=25, train__eval_every=0, train__eval_at_epoch_end=False
    )
    with pytest.raises(
        Hopeless, match="step 25, could not be written; on disk is step 20; make room"
    ):
        train(run)
    monkeypatch.undo()
    train(run)
    assert_exact(run)


def test_a_disk_that_is_full_just_after_a_checkpoint_ends_nothing(tmp_path, monkeypatch):
    """The checkpoint is there; the ledger's line about it, and that of the step after it, follow
    once there is room.
    """
    run = arithmetic_run(tmp_path, train__max_steps=40, train__accumulate=1, dvae__max_steps=1)
    left, write_out, save = [], ledger.Ledger._write_out, checkpoint.Checkpoints.save

    def refuse(self):
        if left and left[0] > 0:
            left[0] -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        write_out(self)

    def then_full(self, *args, **options):
        path = save(self, *args, **options)
        if self.folder.parent == run.path and not left:
            left.append(4)  # the line is appended, flushed; two more tries
        return path

    monkeypatch.setattr(ledger.Ledger, "_write_out", refuse)
    monkeypatch.setattr(checkpoint.Checkpoints, "save", then_full)
    train(run)
    assert left == [0]
    assert_exact(run)
    lines = ledger.read(run.path / "ledger.jsonl")
    saved = [line["checkpoint"] for line in lines if "checkpoint" in line]
    assert len(saved) == len(set(saved))
    assert saved[-1] == 40


def test_a_disk_without_room_for_one_checkpoint_is_told_before_the_first_step(
    tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(stages.shutil, "disk_usage", lambda folder: SimpleNamespace(free=6_000_000))
    stages.check_room(tmp_path / "run" / "checkpoints", 5_999_999)
    assert not caplog.text
    stages.check_room(tmp_path / "run" / "checkpoints", 19_000_000)
    assert f"a checkpoint needs 19 MB, and {tmp_path} has 6 MB free" in caplog.text


def test_three_failed_saves_in_a_row_end_the_run_and_two_do_not(tmp_path, monkeypatch):
    failing_saves(monkeypatch, {15, 20})
    run = arithmetic_run(tmp_path, train__max_steps=30, data__eval_fraction=0.0)
    train(run)
    assert newest(run)["step"] == 30
    (tmp_path / "b").mkdir()
    failing_saves(monkeypatch, {15, 20, 25})
    run = arithmetic_run(tmp_path / "b", train__max_steps=40, data__eval_fraction=0.0)
    with pytest.raises(
        Hopeless, match="3 saves in a row failed; the newest checkpoint is of step 10; make room"
    ):
        train(run)
    assert newest(run)["step"] >= 25, (
        "what was trained until then is tried once more on the way out"
    )


def test_too_many_open_files_are_no_full_disk(tmp_path, monkeypatch):
    """The end asks for no room, and a restart, which begins with none open, is not hopeless."""
    failing_saves(monkeypatch, {15, 20, 25}, OSError(errno.EMFILE, "Too many open files"))
    run = arithmetic_run(tmp_path, train__max_steps=40, data__eval_fraction=0.0)
    with pytest.raises(RunError, match="step 10: too many files were open") as caught:
        train(run)
    assert caught.value.exit_code == FAILED


def test_the_best_is_one_that_is_on_disk(tmp_path, monkeypatch):
    """A better evaluation whose save fails does not cost the best checkpoint that there is."""
    scores = iter([9.0, 5.0, 7.0, 3.0, 8.0])
    monkeypatch.setattr("trainer.loop.mean_losses", lambda results: {"audio": next(scores)})
    failing_saves(monkeypatch, {30})
    run = arithmetic_run(
        tmp_path,
        dvae__max_steps=1,
        dvae__eval_every=0,
        train__max_steps=40,
        train__eval_every=10,
        train__eval_at_epoch_end=False,
        train__save_every=10,
        train__keep=1,
    )
    # The first evaluation is stage 1's last.
    train(run)
    state = newest(run)
    assert state["step"] == 40
    assert (state["position"]["best_step"], state["position"]["best_score"]) == (10, 5.0)
    assert Checkpoints(stages.files_of(run, "gpt").checkpoints, 1).steps() == [10, 40]


def test_training_does_not_wait_for_the_disk_at_each_evaluation_that_is_the_best(
    tmp_path, monkeypatch, caplog
):
    """Every evaluation is better than the last one, and the save of the first does not end before
    step 30 was trained.
    """
    caplog.set_level("INFO", "trainer.saves")
    scores = iter(range(100, 0, -1))
    monkeypatch.setattr("trainer.loop.mean_losses", lambda results: {"audio": float(next(scores))})
    monkeypatch.setattr("trainer.saves._BEST_WAIT_S", 0.01)
    trained, update, save = threading.Event(), ArithmeticStep.apply, Checkpoints.save
    in_time = []

    def apply(self):
        if self.t == 30:
            trained.set()
        return update(self)

    def slow(self, step, *args, **kwargs):
        if step == 5:
            in_time.append(trained.wait(200))
        save(self, step, *args, **kwargs)

    off = {
        "train__eval_at_epoch_end": False,
        "train__save_every": 100,
        "train__accumulate": 1,
        "dvae__max_steps": 1,
        "dvae__eval_every": 0,
    }
    run = arithmetic_run(tmp_path, train__max_steps=60, train__eval_every=5, **off)
    monkeypatch.setattr(ArithmeticStep, "apply", apply)
    monkeypatch.setattr(Checkpoints, "save", slow)
    train(run)
    assert in_time == [True]
    assert (
        caplog.messages.count(
            "the best so far is not kept: the checkpoint of step 5 is still being written"
        )
        >= 4
    )
    position = newest(run)["position"]
    assert (position["step"], position["best_step"], position["best_score"]) == (60, 60, 100.0 - 12)


def test_an_evaluation_made_up_for_after_a_stop_is_kept(tmp_path, stop_at):
    run = arithmetic_run(
        tmp_path,
        dvae__max_steps=1,
        train__max_steps=20,
        train__eval_every=0,
        train__eval_at_epoch_end=False,
    )
    stop = Stop()
    stop_at(stop, 1 + 20)  # during the last step: its evaluation does not happen
    with pytest.raises(Stopped):
        train(run, stop)
    assert newest(run)["position"]["evaluated"] == 0
    train(run)
    position = newest(run)["position"]
    assert (position["evaluated"], position["best_step"]) == (20, 20)


def test_status_says_what_is_saved(tmp_path, stop_at):
    run = arithmetic_run(tmp_path, dvae__max_steps=6)
    stop = Stop()
    stop_at(stop, 6 + 2)
    with pytest.raises(Stopped):
        train(run, stop)
    assert (
        status_module.read(run.path, "trainer").stage_name,
        status_module.read(run.path, "trainer").saved_step,
    ) == ("gpt", 2)


def test_the_ledger_has_the_devices_times_also_after_saves_and_evaluations(tmp_path, monkeypatch):
    """A device that takes 30 ms for each update, and calls that return at once."""
    free, update, read = [0.0], ArithmeticStep.update, ArithmeticStep.read

    def issue(self, bucket, batch, seed):
        free[0] = max(time.perf_counter(), free[0]) + 0.03
        return {**update(self, bucket, batch, seed), "end": free[0]}

    def wait(self, scalars):
        time.sleep(max(0.0, scalars.get("end", 0.0) - time.perf_counter()))
        return read(self, {k: v for k, v in scalars.items() if k != "end"})

    monkeypatch.setattr(ArithmeticStep, "update", issue)
    monkeypatch.setattr(ArithmeticStep, "read", wait)
    once = {
        "train__accumulate": 1,
        "train__save_every": 5,
        "train__eval_every": 5,
        "train__eval_at_epoch_end": False,
        "dvae__max_steps": 1,
    }
    run = arithmetic_run(tmp_path, train__max_steps=40, **once)
    train(run)
    times = [line["step_ms"] for line in ledger.fold(ledger.read(run.path / "ledger.jsonl"))]
    assert sum(times) > 0.95 * 40 * 30, (
        "an end that is noticed late makes the next step shorter, and nothing else does"
    )
