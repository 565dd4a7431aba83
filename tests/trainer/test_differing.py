"""The same batch made twice with different bytes: a deterministic run ends and says which;
elsewhere it is counted, once each.
"""

import io
import json

import pytest

from common.system.errors import Hopeless
from common.transport.delivery import Difference
from tests.support import loop_runs
from tests.support.arithmetic_maker import ArithmeticMaker
from tests.support.arithmetic_runs import arithmetic_run, replay
from tests.support.loop_runs import Stop, newest, train
from trainer import stages
from trainer.history import differing, ledger
from trainer.history.differing import BytesDiffer, Differing
from trainer.history.schedule import schedule_of

stop_at = loop_runs.stop_at


class Found:
    """A server that has found these."""

    def __init__(self, *found: Difference):
        self.found = list(found)

    def differing(self):
        found, self.found = self.found, []
        return found


A = Difference("train", 17, ("producer-0", "producer-1"), ("0" * 32, "f" * 32))
B = Difference("eval", 3, ("producer-1", "producer-1"), ("1" * 32, "e" * 32))


def test_differences_are_counted_once_each_also_after_a_restart(tmp_path, caplog):
    seen = Differing(tmp_path, deterministic=False)
    seen.look(Found(A, B, A))
    Differing(tmp_path, deterministic=False).look(Found(B))
    assert [(e["plan"], e["g"]) for e in differing.read(tmp_path)] == [("train", 17), ("eval", 3)]
    said = [r.message for r in caplog.records]
    assert said == [
        "batch train 17 was made twice, with different bytes, by producer-0 and by producer-1",
        "batch eval 3 was made twice, with different bytes, both times by producer-1",
    ]
    with open(tmp_path / differing.FILE, "a") as f:
        f.write('{"plan": "tr')  # what a SIGKILL leaves
    assert len(differing.read(tmp_path)) == 2


def test_a_deterministic_run_ends_with_the_batch_and_its_makers(tmp_path):
    with pytest.raises(
        BytesDiffer,
        match=(
            "batch train 17 was made twice.* by producer-0 and by producer-1: this run is"
            " deterministic"
        ),
    ):
        Differing(tmp_path, deterministic=True).look(Found(A))
    assert issubclass(BytesDiffer, Hopeless)
    assert json.loads((tmp_path / differing.FILE).read_text())["digests"] == ["0" * 32, "f" * 32]


class Twofold(ArithmeticMaker):
    """Every evaluation batch is another one each time that it is made."""

    made = 0

    def make(self, planned, clips, decoded):
        result = super().make(planned, clips, decoded)
        if planned.plan == "eval":
            Twofold.made += 1
            result.arrays["seed"] = result.arrays["seed"] + Twofold.made
        return result


def test_a_run_that_is_not_deterministic_goes_on_and_its_summary_counts(tmp_path):
    from trainer.report import summary

    run = arithmetic_run(tmp_path, train__max_steps=15, deterministic=False)
    train(run, make=Twofold)
    count = schedule_of(run, "gpt").num_eval_batches
    assert count > 0
    figures = summary.finish(run)
    assert figures["stages"]["gpt"]["differing"] == count  # 3 evaluations of them: each counts once
    assert [line.split()[-1] for line in summary.lines(figures) if "made twice" in line] == [
        str(count),
        str(count),
    ]
    both = sum(f["differing"] for f in figures["stages"].values())
    out = io.StringIO()
    assert (
        summary.show(run.path, out)
        == f"; {both} batches were made twice, with different bytes (differing.jsonl)"
    )
    assert "made twice" in out.getvalue()


def test_a_deterministic_run_ends_and_saves_nothing_more(tmp_path):
    run = arithmetic_run(tmp_path, train__max_steps=40, deterministic=True, train__save_every=100)
    with pytest.raises(BytesDiffer, match=r"batch eval \d was made twice"):
        train(run, make=Twofold)
    assert not list(stages.files_of(run, "gpt").checkpoints.glob("step-*"))
    assert not list(stages.files_of(run, "dvae").checkpoints.glob("step-00000006"))


class Changed(ArithmeticMaker):
    """The recordings were others before the restart."""

    salt = 0

    def make(self, planned, clips, decoded):
        result = super().make(planned, clips, decoded)
        if planned.plan == "train" and planned.g == 33:
            result.arrays["seed"] = result.arrays["seed"] + Changed.salt
        return result


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_step_that_is_trained_again_after_a_crash_is_held_to_its_first_bytes(
    tmp_path, stop_at, deterministic
):
    run = arithmetic_run(
        tmp_path, train__max_steps=30, deterministic=deterministic, train__save_every=5
    )
    stop, Changed.salt = Stop(), 1
    steps_of_stage_1 = schedule_of(run, "dvae").total_steps
    # Leaves without saving: step 10 is on disk, batch 33 belongs to step 12.
    saved = stages.files_of(run, "gpt").checkpoints / "step-00000010"
    stop_at(stop, steps_of_stage_1 + 14, "orphan", saved)
    with pytest.raises(Exception, match="stopped"):
        train(run, stop, make=Changed)
    assert newest(run)["position"]["step"] == 10
    again = next(s for s in ledger.read(stages.files_of(run, "gpt").ledger) if s.get("step") == 12)
    assert again["g"] <= 33 < again["g"] + again["count"]
    Changed.salt = 0
    if deterministic:
        with pytest.raises(
            BytesDiffer,
            match=(
                rf"one of the batches train {again['g']} to {again['g'] + 2} \(step 12, before the"
                r" restart"
            ),
        ):
            train(run, make=Changed)
        assert newest(run)["position"]["step"] == 10
    train(run, make=Changed)  # the same command goes on
    [entry] = differing.read(run.stage_folder("gpt"))
    assert (entry["plan"], entry["step"]) == ("train", 12)
    lines = ledger.fold(ledger.read(stages.files_of(run, "gpt").ledger))
    assert [line["digest"] for line in lines] == [
        line["digest"] for line in replay(run, "gpt").steps
    ]
