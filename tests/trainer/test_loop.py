"""The real loop, feed, ledger, checkpoints and lease protocol in one process, against a plain loop
over the plan.
"""

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from common.run.folder import RunFolder
from common.system import status as status_module
from common.system.errors import BadInput, Hopeless, RunError, Stopped
from common.system.lifecycle import Stop
from tests.support import loop_runs
from tests.support.arithmetic_maker import ArithmeticMaker
from tests.support.arithmetic_runs import (
    arithmetic_run,
    assert_exact,
    edit_identity,
    outcome,
    replay,
)
from tests.support.arithmetic_step import ArithmeticStep
from tests.support.loop_runs import newest, train
from trainer import readback, session
from trainer.history import ledger
from trainer.history.schedule import schedule_of

stop_at = loop_runs.stop_at


def test_both_stages_come_to_what_the_plan_says(tmp_path):
    run = arithmetic_run(tmp_path)
    train(run)
    assert_exact(run)
    # Evaluations: in stage 2 at multiples of 7, at each epoch's end and at the end.
    schedule = schedule_of(run, "gpt")
    records = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    evaluated = [r["step"] for r in records if "eval_audio" in r]
    assert evaluated == [
        s
        for s in range(1, 61)
        if s % 7 == 0 or s % schedule.train.steps_per_epoch(3) == 0 or s == 60
    ]


def test_the_number_of_batches_asked_for_changes_no_bit_and_is_shown(tmp_path):
    class Uneven(ArithmeticMaker):
        def make(self, planned, clips, decoded):
            if planned.g % 10 == 9:
                time.sleep(0.03)
            return super().make(planned, clips, decoded)

    run = arithmetic_run(tmp_path)
    train(run, make=Uneven, num_producers=1, start=1)
    assert_exact(run)
    records = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    targets = [r["target"] for r in records if "target" in r]
    assert len(targets) == 60
    assert targets[0] >= 1
    assert targets[-1] == 8, "it grew to the mark"
    last = status_module.read(run.path, "trainer")
    assert (last.target, last.window) == (8, 8)


def test_each_steps_metrics_are_asked_for_before_the_step_before_has_ended(tmp_path, monkeypatch):
    """A copy from a GPU waits for all that was begun before the asking.

    Asked for one after the other, every second step's would wait for
    the next step, too. Here step k ends only once those of step k + 1 were asked for."""
    changed, asked, alone = threading.Condition(), set(), []
    issue, read = ArithmeticStep.apply, ArithmeticStep.read

    def apply(self):
        return {**issue(self), "number": self.t}

    def asks(self, scalars):
        number = int(scalars["number"])
        with changed:
            asked.add(number)
            changed.notify_all()
            if 20 <= number < 30 and not changed.wait_for(lambda: number + 1 in asked, 60):
                alone.append(number)
        return read(self, scalars)

    monkeypatch.setattr(ArithmeticStep, "apply", apply)
    monkeypatch.setattr(ArithmeticStep, "read", asks)
    off = {"train__eval_every": 0, "train__eval_at_epoch_end": False, "train__save_every": 100}
    train(arithmetic_run(tmp_path, train__max_steps=40, batching__buckets=1, **off))
    assert not alone


def test_no_step_is_begun_before_the_metrics_of_the_one_before_were_asked_for(
    tmp_path, monkeypatch
):
    """Else several steps' copies, asked for together, end together, and the device stands still
    until the next several are begun. Threads
    that are slow to start must change nothing."""
    asked, early = set(), []
    issue, read = ArithmeticStep.apply, ArithmeticStep.read

    def apply(self):
        if self.t == 0:  # another stage
            asked.clear()
        early.extend(n for n in range(1, self.t + 1) if n not in asked)
        return {**issue(self), "number": self.t}

    def asks(self, scalars):
        asked.add(int(scalars["number"]))
        return read(self, scalars)

    class Slow(ThreadPoolExecutor):
        def submit(self, function):
            return super().submit(lambda: (time.sleep(0.005), function())[1])

    monkeypatch.setattr(ArithmeticStep, "apply", apply)
    monkeypatch.setattr(ArithmeticStep, "read", asks)
    monkeypatch.setattr(readback, "ThreadPoolExecutor", Slow)
    off = {"train__eval_every": 0, "train__eval_at_epoch_end": False, "train__save_every": 100}
    train(arithmetic_run(tmp_path, train__max_steps=40, batching__buckets=1, **off))
    assert len(asked) == 40
    assert not early


def test_a_device_that_never_ends_a_step_is_told_and_not_waited_for_for_ever(
    tmp_path, monkeypatch, caplog
):
    hang, read = threading.Event(), ArithmeticStep.read

    def hangs(self, scalars):
        if self.t >= 12:
            hang.wait(200)
        return read(self, scalars)

    run = arithmetic_run(
        tmp_path, train__accumulate=1, train__eval_every=0, train__save_every=5, dvae__max_steps=1
    )
    monkeypatch.setattr(ArithmeticStep, "read", hangs)
    monkeypatch.setattr(readback, "_STEP_SAY_S", 1.0)
    monkeypatch.setattr(readback, "_MAX_STEP_S", 2.0)
    with pytest.raises(RuntimeError, match=r"the device has not ended step 1[0-3] for 2 s"):
        train(run)
    hang.set()
    assert "is being computed for 1 s" in caplog.text
    monkeypatch.undo()
    train(run)
    assert_exact(run)


def test_evaluation_changes_no_weight(tmp_path):
    a = arithmetic_run(tmp_path, train__max_steps=24)
    train(a)
    b_dir = tmp_path / "b"
    b_dir.mkdir()
    b = arithmetic_run(b_dir, train__max_steps=24, train__eval_every=1, dvae__eval_every=0)
    # Another folder, another run id: the plan and its digests are the same all the same.
    train(b)
    for stage in ("dvae", "gpt"):
        assert outcome(a, stage).weights == outcome(b, stage).weights
        assert outcome(a, stage).steps == outcome(b, stage).steps


@pytest.mark.parametrize("update", [1, 6, 7, 13, 33])
@pytest.mark.parametrize("cause", ["stop", "orphan"])
def test_c41_stop_and_resume_anywhere(tmp_path, stop_at, update, cause):
    run = arithmetic_run(tmp_path, train__max_steps=30)
    stop = Stop(saves=True)
    stop_at(stop, update, cause)
    with pytest.raises(Stopped):
        train(run, stop)
    train(run, num_producers=1)
    assert_exact(run)


def test_resume_says_so_in_the_ledger_and_goes_on_after_the_checkpoint(
    tmp_path, stop_at, monkeypatch
):
    run = arithmetic_run(tmp_path, dvae__max_steps=1)
    stop = Stop()
    saved = run.path / "checkpoints" / "step-00000030"
    stop_at(stop, 1 + 33, "orphan", saved)  # no save: step 30 is the newest checkpoint
    with pytest.raises(Stopped):
        train(run, stop)
    train(run)
    lines = ledger.read(run.path / "ledger.jsonl")
    at = next(i for i, line in enumerate(lines) if "resumed_from" in line)
    assert lines[at]["resumed_from"] == 30
    assert lines[at + 1]["step"] == lines[at]["resumed_from"] + 1
    assert_exact(run)


def test_longer_training_is_the_same_run(tmp_path):
    run = arithmetic_run(tmp_path, train__max_steps=20)
    train(run)
    longer = arithmetic_run(tmp_path, train__max_steps=40, train__optim__learning_rate=1e-3)
    assert longer.run_id == run.run_id
    train(longer)
    assert_exact(longer)


def test_another_corpus_seed_or_batch_is_another_run(tmp_path):
    arithmetic_run(tmp_path)
    with pytest.raises(BadInput, match=r"holds another run: .*batching.batch_size: 4 there, 8 now"):
        arithmetic_run(tmp_path, batching__batch_size=8)
    with pytest.raises(BadInput, match=r"seed: 1 there, 2 now"):
        arithmetic_run(tmp_path, seed=2)
    metadata = tmp_path / "corpus" / "metadata.csv"
    metadata.write_text(re.sub(r"(?m)^(c0003\|.*)$", r"\1 indeed", metadata.read_text()))
    with pytest.raises(
        BadInput,
        match=(
            r"manifest, plan differ \(the files of the corpus changed; clips .*changed: 1"
            r" \(.*c0003.wav\)"
        ),
    ):
        arithmetic_run(tmp_path)


class BadClip(ArithmeticMaker):
    """Cannot make utterance 7."""

    def make(self, planned, clips, decoded):
        made = super().make(planned, clips, decoded)
        hit = planned.utterances == 7
        if hit.any():
            for name in ("value", "seed", "weights"):
                made.arrays[name][hit] = 0
            made.bad.append((7, "no audio in it"))
        return made


def test_a_clip_that_cannot_be_made_is_weight_zero_from_there_on(tmp_path, stop_at):
    run = arithmetic_run(tmp_path, train__eval_every=0)
    stop = Stop()
    stop_at(stop, 6 + 31)
    with pytest.raises(Stopped):
        train(run, stop, make=BadClip)
    train(run, make=BadClip)
    assert 7 in run.plan("gpt", "train").order
    for stage in run.stages:
        want, got = replay(run, stage, {7: 0}), outcome(run, stage)
        assert got.steps == want.steps
        assert got.weights == want.weights
    entries = [json.loads(x) for x in (run.path / "quarantine.jsonl").read_text().splitlines()]
    assert [(e["id"], e["reason"]) for e in entries] == [(7, "no audio in it")]
    # Repaired later: the run still goes on without it, as the checkpoint says.
    longer = arithmetic_run(tmp_path, train__eval_every=0, train__max_steps=70)
    train(longer)
    assert outcome(longer, "gpt").weights == replay(longer, "gpt", {7: 0}).weights


class BadVoice(BadClip):
    """Cannot make utterance 7, and no row that wants its conditioning clip from it."""

    def make(self, planned, clips, decoded):
        made = super().make(planned, clips, decoded)
        hit = (planned.prompts == 7) & (planned.utterances != 7)
        if hit.any():
            for name in ("value", "seed", "weights"):
                made.arrays[name][hit] = 0
            made.bad.append((7, "no audio in it"))
        return made


def test_a_row_whose_lent_clip_cannot_be_made_is_made_again_with_its_own(tmp_path, stop_at):
    run = arithmetic_run(tmp_path, train__eval_every=9, batching__prompt="speaker")
    plan = run.plan("gpt", "train")
    lent = [
        g
        for g in range(3 * 60)
        if ((b := plan.batch(g)).prompts == 7).any() and 7 not in b.utterances
    ]
    assert lent, "a batch needs utterance 7 for its voice alone"
    stop = Stop()
    stop_at(stop, 6 + 31)
    with pytest.raises(Stopped):
        train(run, stop, make=BadVoice)
    train(run, make=BadVoice)
    want, got = replay(run, "gpt", {7: 0}), outcome(run, "gpt")
    assert got.steps == want.steps, "every row but those of utterance 7 itself is trained on"
    assert got.weights == want.weights
    entries = [json.loads(x) for x in (run.path / "quarantine.jsonl").read_text().splitlines()]
    assert [(e["id"], e["reason"]) for e in entries] == [(7, "no audio in it")]


def test_a_clip_that_is_set_aside_before_the_first_step_is_listed(tmp_path, monkeypatch):
    """The feed works ahead: batch 2 may be there before the loop is."""
    once = {"train__eval_every": 0, "train__eval_at_epoch_end": False, "train__save_every": 100}
    run = arithmetic_run(
        tmp_path, batching__prompt="speaker", train__max_steps=10, dvae__max_steps=1, **once
    )
    made = session._feed

    def feed(run, stage, server, stop, quarantine, *rest):
        begun = made(run, stage, server, stop, quarantine, *rest)
        while stage.files.quarantine.parent == run.path and not len(quarantine):  # in stage 2
            time.sleep(0.01)
        return begun

    monkeypatch.setattr(session, "_feed", feed)
    train(run, make=BadVoice)
    file = run.path / "quarantine.jsonl"
    assert [json.loads(x)["id"] for x in file.read_text().splitlines()] == [7]


def test_a_list_that_was_lost_between_a_checkpoint_and_itself_is_written_again(tmp_path, stop_at):
    run = arithmetic_run(
        tmp_path, batching__prompt="speaker", train__max_steps=20, dvae__max_steps=1
    )
    stop, file = Stop(), run.path / "quarantine.jsonl"
    stop_at(stop, 1 + 12)
    with pytest.raises(Stopped):
        train(run, stop, make=BadVoice)
    file.unlink()
    train(run, make=BadVoice)
    assert [json.loads(x)["id"] for x in file.read_text().splitlines()] == [7]


class SlowNan(ArithmeticStep):
    """Not finite at chosen updates: changes nothing then, as every step must."""

    bad: frozenset = frozenset()

    def apply(self):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls in self.bad:
            self._group = np.zeros(8, np.int64)
            return {
                "loss": float("nan"),
                "grad_norm": float("inf"),
                "learning_rate": 1.0,
                "finite": False,
            }
        return super().apply()


def test_a_step_that_is_not_finite_is_skipped_and_logged_with_its_clips(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(
        "tests.support.arithmetic_step.ArithmeticStep",
        type("S", (SlowNan,), {"bad": frozenset({5})}),
    )
    run = arithmetic_run(tmp_path, train__max_steps=10, dvae__max_steps=1)
    train(run)
    lines = ledger.fold(ledger.read(run.path / "ledger.jsonl"))
    assert [line["step"] for line in lines if line.get("skipped")] == [5]
    assert lines[4]["loss"] is None
    planned = schedule_of(run, "gpt").step(5)
    plan = run.plan("gpt", "train")
    ids = [
        int(u)
        for g in range(planned.first_g, planned.first_g + planned.count)
        for u in plan.batch(g).utterances
        if u >= 0
    ]
    assert f"utterances {ids}" in caplog.text


def test_ten_in_a_row_stop_the_run_and_the_weights_before_them_are_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "tests.support.arithmetic_step.ArithmeticStep",
        type("S", (SlowNan,), {"bad": frozenset(range(12, 40))}),
    )
    run = arithmetic_run(tmp_path, dvae__max_steps=1)
    with pytest.raises(Hopeless, match="10 steps in a row"):
        train(run)
    # The metrics are read two steps late: up to two more steps were begun when step 21 was known to
    # be bad.
    state = newest(run)
    assert 21 <= state["position"]["step"] <= 23
    lines = ledger.fold(ledger.read(run.path / "ledger.jsonl"))
    assert len(lines) == state["position"]["step"]
    assert [line["step"] for line in lines if line.get("skipped")] == list(
        range(12, len(lines) + 1)
    )
    short = arithmetic_run(tmp_path / "short", dvae__max_steps=1, train__max_steps=11)
    monkeypatch.undo()
    train(short)
    assert outcome(run, "gpt").weights == outcome(short, "gpt").weights


def test_no_producer_is_an_error_with_a_cause_within_the_deadline(tmp_path):
    run = arithmetic_run(tmp_path, transport__data_timeout_s=1.0)
    with pytest.raises(
        Hopeless, match="no data for 1 s, 0 producers connected.*`launch.py producer"
    ):
        train(run, num_producers=0)


def test_another_runs_checkpoint_is_refused(tmp_path):
    run = arithmetic_run(tmp_path, train__max_steps=5)
    train(run)
    edit_identity(run.path, run_id="00" * 16)
    with pytest.raises(RunError, match="another run"):
        train(RunFolder(run.path))
