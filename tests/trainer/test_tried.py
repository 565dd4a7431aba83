"""A restart on the same card does not try the largest step again."""

import dataclasses

import pytest

from common.gpu.listing import Gpu
from common.gpu.memory import Account
from common.gpu.xla_env import CACHE
from common.system.errors import FAILED, HOPELESS
from common.system.lifecycle import Stop
from common.xtts.fast_operations import fast_but
from tests.support.ahead_stages import Noting, Seen, a_planned_stage
from trainer import ahead, tried
from trainer.history.schedule import Position
from trainer.step.snapshot import Room

NEEDED = 10 << 30
CARD = Gpu(0, "00:01.0", "GPU-1", "a card", memory_mb=24_000)


@pytest.fixture
def card(tmp_path, monkeypatch):
    """A GPU of 24 GB, of which a step needs 10; `limit_mb` may be set lower."""
    account = Account(card_mb=24_000, free_mb=3_900, limit_mb=16_600, step_mb=0, state_mb=5_400)
    held = {"account": account, "card": CARD}

    def measure(room, step):
        step()
        room._needed = NEEDED
        return NEEDED

    monkeypatch.setenv(CACHE, str(tmp_path / "run"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setattr(tried, "this_card", lambda: held["card"])
    monkeypatch.setattr(Room, "account", lambda room: held["account"])
    monkeypatch.setattr(Room, "measure", measure)
    monkeypatch.setattr(Room, "_forget_peak", lambda room: None)
    return held


def begin(change=lambda stage: None):
    """A start of the stage; its step, and the process's stop."""
    step, stop = Noting(), Stop()
    stage = a_planned_stage(step)
    change(stage)
    compiled = ahead.prepare(stage, Position(), Seen(), stop)
    before = list(step.compiled)
    for function in (("training", 2), ("evaluation", 3)):
        compiled.wait(*function)
    return step, before, stop


def test_the_largest_step_is_tried_once_and_compiled_later_after_a_restart(card, caplog):
    caplog.set_level("INFO")
    first, before, _ = begin()
    assert first.ran == [(2, False), (2, False)]  # tried, and measured
    assert sorted(before[:3]) == ["training 1", "training 2", "update"]
    again, before, _ = begin()
    assert again.ran == []
    assert sorted(before[:2]) == ["training 1", "update"]
    assert "training 2" in again.compiled
    assert "is not tried again" in caplog.text


def test_a_resumed_run_may_draw_nothing_and_train_longer(card):
    begin()

    def resumed(stage):
        options = stage.step.options
        stage.step.options = dataclasses.replace(
            options, init_seed=None, total_steps=9, learning_rate=1.0
        )

    again, _, _ = begin(resumed)
    assert again.ran == []


def test_another_run_of_the_same_user_tries_nothing_again(card, tmp_path, monkeypatch):
    flag = "--xla_gpu_per_fusion_autotune_cache_dir"
    for name, xla in (
        ("a run", f'{flag}="{tmp_path}/a \\"run\\"" --x=1'),
        ("b", f"--x=1 {flag}=/b"),
    ):
        monkeypatch.setenv(CACHE, str(tmp_path / name))
        monkeypatch.setenv("XLA_FLAGS", xla)
        step, _, _ = begin()
    assert step.ran == []


def test_the_notes_stay_small_and_keep_the_newest(tmp_path):
    notes = tried.Tried(tmp_path / "not there yet")
    for i in range(14_000):
        notes.note(f"{i:080}", i)
    assert (tmp_path / "not there yet" / tried.FILE).stat().st_size < 1.1 * 2**20
    assert notes.needed(f"{13_999:080}") == 13_999
    assert notes.needed(f"{9_000:080}") == 9_000
    assert notes.needed(f"{0:080}") is None


def test_attention_that_works_is_tried_once_and_what_does_not_again(card):
    asked = []

    def answer(reason):
        return lambda: asked.append(reason) or reason

    assert tried.Tried.of_process().attention(answer("does not run here")) == "does not run here"
    assert tried.Tried.of_process().attention(answer(None)) is None
    assert tried.Tried.of_process().attention(answer("never asked")) is None
    card["card"] = dataclasses.replace(CARD, uuid="GPU-2")
    assert tried.Tried.of_process().attention(answer("another card")) == "another card"
    assert asked == ["does not run here", None, "another card"]


@pytest.mark.parametrize(
    "change",
    [
        *("options", "operations", "bucket", "card", "flags", "TensorFlow", "memory"),
        *("a line cut off", "no GPU"),
    ],
)
def test_what_is_not_the_same_is_tried_again(card, tmp_path, monkeypatch, change):
    begin()
    of_stage = lambda stage: None  # noqa: E731
    if change == "options":

        def of_stage(stage):
            stage.step.options = dataclasses.replace(stage.step.options, dropout=0.2)

    elif change == "operations":  # as where fused attention works no more

        def of_stage(stage):
            options = dataclasses.replace(stage.step.options, operations=fast_but("attention"))
            stage.step.options = options

    elif change == "bucket":

        def of_stage(stage):
            stage.schedule.train.buckets[0] = dataclasses.replace(
                stage.schedule.train.buckets[0], batch_size=7, row_len=3
            )
            stage.schedule.train.buckets[2] = dataclasses.replace(
                stage.schedule.train.buckets[2], batch_size=9
            )

    elif change == "card":
        card["card"] = dataclasses.replace(CARD, uuid="GPU-2")
    elif change == "memory":
        card["account"] = dataclasses.replace(card["account"], limit_mb=10 * 1024)
    elif change == "a line cut off":
        file = tmp_path / "user" / "xtts-trainer" / tried.FILE
        file.write_text(file.read_text()[:-5])
    elif change == "flags":
        monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    elif change == "TensorFlow":
        monkeypatch.setattr(tried, "tensorflow_version", lambda: "2.99")
    else:
        card["card"] = None
    step, _, _ = begin(of_stage)
    assert step.ran == [(2, False), (2, False)]


def test_an_end_that_a_restart_would_not_mend_forgets(card):
    _, _, stop = begin()
    stop.run_hooks(FAILED)
    step, _, stop = begin()
    assert step.ran == []
    stop.run_hooks(HOPELESS)
    step, _, _ = begin()
    assert step.ran == [(2, False), (2, False)]


def test_nothing_is_noted_where_xla_keeps_nothing(card, tmp_path, monkeypatch):
    monkeypatch.delenv(CACHE)
    begin()
    step, _, _ = begin()
    assert step.ran == [(2, False), (2, False)]
    assert list(tmp_path.iterdir()) == []


def test_a_note_that_cannot_be_removed_changes_no_exit(tmp_path, caplog):
    (tmp_path / tried.FILE).mkdir()  # a folder cannot be unlinked
    stop, codes = Stop(), []
    tried.Tried(tmp_path).forget_if_hopeless(stop)
    stop.at_exit(codes.append)
    stop.run_hooks(HOPELESS)
    assert codes == [HOPELESS]
    assert "cannot be removed" in caplog.text
