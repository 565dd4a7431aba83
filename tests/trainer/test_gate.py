"""The gate that kill tests hold a run at: what it holds, and what it lets through."""

import pytest

from tests.support.arithmetic_step import ArithmeticStep
from tests.support.gates import Gate
from trainer import gate


class Counted(ArithmeticStep):
    """Notes its calls."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def micro(self, bucket, batch, seed, scale):
        self.calls.append("micro")

    def apply(self):
        self.calls.append("apply")

    def evaluate(self, bucket, batch):
        self.calls.append("evaluate")

    def snapshot(self):
        self.calls.append("snapshot")


@pytest.fixture
def closed(tmp_path, monkeypatch):
    """A gate whose patience is short: what it holds raises at once."""
    monkeypatch.setattr(gate, "_MAX_S", 0.02)
    own = Gate(tmp_path / "gate")
    monkeypatch.setenv(gate.GATE, own.env[gate.GATE])
    return own


def held(stage=1, position=0, stopping=lambda: False):
    return gate.held(Counted(), stage, position, stopping)


def train(step, groups):
    for _ in range(groups):
        step.micro(0, {}, (0, 0), 0.5)
        step.micro(0, {}, (0, 0), 0.5)
        step.apply()


def test_without_a_folder_the_step_is_its_own(monkeypatch):
    monkeypatch.delenv(gate.GATE, raising=False)
    step = Counted()
    assert gate.held(step, 1, 0, lambda: False) is step


@pytest.mark.parametrize(
    ("stage", "limit", "position", "groups"),
    [(1, (1, 3), 0, 3), (2, (2, 12), 10, 2), (2, (1, 30), 0, 0)],
)
def test_no_step_begins_beyond_the_limit(closed, stage, limit, position, groups):
    closed.limit(*limit)
    step = held(stage, position)
    train(step, groups)
    with pytest.raises(
        RuntimeError,
        match=rf"held step {position + groups + 1} of stage {stage}: \S+/limit for 0 s",
    ):
        train(step, 1)
    assert step.calls == ["micro", "micro", "apply"] * groups
    closed.limit(limit[0], limit[1] + 1) if groups else closed.open()
    train(step, 1)
    assert len(step.calls) == 3 * (groups + 1)


def test_a_step_that_began_is_ended(closed):
    step = held()
    step.micro(0, {}, (0, 0), 0.5)
    closed.limit(1, 0)
    step.micro(0, {}, (0, 0), 0.5)
    step.apply()
    assert step.calls == ["micro", "micro", "apply"]


def test_an_evaluation_and_a_save_are_held_and_say_so(closed):
    step = held()
    for phase, call in (("evaluating", lambda: step.evaluate(0, {})), ("saving", step.snapshot)):
        closed.hold(phase)
        assert not closed.holds(phase)
        with pytest.raises(RuntimeError, match=f"held {phase}"):
            call()
        assert closed.holds(phase)
        closed.release(phase)
        call()
    assert step.calls == ["evaluate", "snapshot"]


def test_a_stop_is_not_kept_waiting(closed):
    closed.limit(1, 0)
    step = held(stopping=lambda: True)
    train(step, 1)
    assert step.calls == ["micro", "micro", "apply"]
