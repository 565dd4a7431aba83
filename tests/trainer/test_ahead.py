"""Programs compiled ahead of the steps that need them, and the dry step before step 1."""

import threading
import types

import pytest
import tensorflow as tf

from common.system.errors import Hopeless, Stopped
from common.system.lifecycle import Stop
from tests.support.ahead_stages import Noting, Seen, a_planned_stage, a_stage
from tests.support.gpt_cases import SMALL, model_dims
from trainer import ahead
from trainer.history.schedule import Position


class Full:
    """A step that does not fit."""

    dims = model_dims(SMALL)

    def __init__(self, error):
        self.error, self.asked = error, []

    def dry_run(self, bucket, grouped):
        self.asked.append((bucket, grouped))
        raise self.error


def a_stopped() -> Stop:
    stop = Stop()
    stop.request("stop", "SIGINT", 130)
    return stop


@pytest.mark.parametrize(
    "error",
    [
        tf.errors.ResourceExhaustedError(None, None, "OOM"),
        tf.errors.InternalError(None, None, "RESOURCE_EXHAUSTED: Out of memory"),
        MemoryError(),
    ],
    ids=lambda e: type(e).__name__,
)
def test_out_of_memory_shows_before_step_1_with_advice(error):
    step = Full(error)
    stage = a_stage(step, accumulate=2)
    assert ahead.largest_bucket(stage) == 1
    with pytest.raises(
        Hopeless,
        match=r"bucket 1 \(3 rows x 26 positions\); try --batch-size 1, or train.recompute=true",
    ) as raised:
        ahead.dry_step(stage, 1)
    assert raised.value.exit_code == 3
    assert step.asked == [(1, True)]


def test_other_errors_of_the_dry_step_are_not_called_memory():
    with pytest.raises(ZeroDivisionError):
        ahead.dry_step(a_stage(Full(ZeroDivisionError())), 0)
    compiles_nothing = types.SimpleNamespace(compiles=False)
    ahead.prepare(a_stage(compiles_nothing), Position(), Seen(), Stop())


def test_the_first_steps_programs_are_compiled_before_the_others(caplog):
    caplog.set_level("INFO")
    step, seen = Noting(broken=("training 0",)), Seen()
    stage = a_planned_stage(step)
    compiled = ahead.prepare(stage, Position(), seen, Stop())
    # Before step 1: the largest, the first that the plan asks for, and what they share, once.
    assert sorted(step.compiled[:3]) == ["training 1", "training 2", "update"]
    assert seen.programs == [(1, 3, False), (2, 3, True), (3, 3, True)]
    assert step.ran[0] == (2, False)
    for function in (
        ("evaluation", 3),
        ("training", 3),
        ("training", 0),
    ):  # what failed is no reason to wait, either
        compiled.wait(*function)
    assert sorted(step.compiled[3:]) == ["evaluation 0", "evaluation 3", "training 0", "training 3"]
    assert "training of bucket 0 is not compiled ahead: training 0" in caplog.text


def test_the_first_step_goes_before_what_is_left_to_compile():
    step, stepped, late = Noting(), threading.Event(), []
    programs_of = step.programs
    step.update = lambda *args: stepped.set()

    def programs(bucket, grouped, training):
        if threading.current_thread().name == "compile":
            late.append(stepped.is_set())
        return programs_of(bucket, grouped, training)

    step.programs = programs
    compiled = ahead.prepare(a_planned_stage(step), Position(), Seen(), Stop())
    assert len(step.compiled) == 3
    compiled.watch(step).update(1, {}, (0, 0))
    compiled.wait("evaluation", 3)
    assert late
    assert all(late)


def test_a_step_waits_for_its_program_and_a_stop_ends_the_wait():
    step, released, stop = Noting(), threading.Event(), Stop()
    programs_of, calls = step.programs, []
    endless = types.SimpleNamespace(name="endless", compile=lambda: released.wait(60))
    step.programs = lambda bucket, grouped, training: (
        [endless] if training and bucket == 3 else programs_of(bucket, grouped, training)
    )
    step.update = lambda bucket, *rest: calls.append(bucket)
    try:
        waiting = ahead.prepare(a_planned_stage(step), Position(), Seen(), stop).watch(step)
        waiting.update(1, {}, (0, 0))
        stop.request("stop", "SIGINT", 130)
        with pytest.raises(Stopped):
            waiting.update(3, {}, (0, 0))
    finally:
        released.set()
    assert calls == [1]


def test_a_step_beside_compilations_says_so_and_one_that_waits_says_for_what():
    step, seen, released = Noting(), Seen(), threading.Event()
    programs_of, told = step.programs, seen.compiling
    held = types.SimpleNamespace(name="held", compile=lambda: released.wait(60))
    step.programs = lambda bucket, grouped, training: (
        [held] if training and bucket == 3 else programs_of(bucket, grouped, training)
    )
    step.update = lambda bucket, *rest: None
    seen.compiling = lambda *what: (told(*what), released.set())
    compiled = ahead.prepare(a_planned_stage(step), Position(), Seen(), Stop())
    waiting = compiled.watch(step, seen)
    waiting.update(1, {}, (0, 0))
    assert (seen.beside, seen.waits) == (1, [])
    step.trace_counts = {"update/3": 1}  # the loop tells only of what was not traced
    waiting.update(3, {}, (0, 0))
    assert (seen.beside, seen.waits) == (2, [("training", 3, 4, 14)])
    for function in ahead.buckets_in_order(a_planned_stage(step), Position()):
        compiled.wait(*function)
    waiting.update(3, {}, (0, 0))
    assert (seen.beside, len(seen.waits)) == (2, 1)


def test_steps_that_are_to_be_timed_wait_for_all_programs():
    step = Noting()
    compiled = ahead.prepare(a_planned_stage(step), Position(), Seen(), Stop(), all_first=True)
    assert not compiled.under_way
    assert len(step.compiled) == 7  # four of training, two of evaluation, and the shared one


def test_the_order_is_the_plans():
    stage = a_planned_stage(Noting())
    training, evaluation = (
        [("training", b) for b in (1, 0, 2, 3)],
        [
            ("evaluation", 0),
            ("evaluation", 3),
        ],
    )
    assert list(ahead.buckets_in_order(stage, Position())) == [
        *training[:2],
        *evaluation,
        *training[2:],
    ]
    resumed = Position(
        next_g=5
    )  # the evaluation's buckets and two of the training's come at some later time
    assert list(ahead.buckets_in_order(stage, resumed)) == [
        *training[2:],
        training[1],
        training[0],
        *evaluation,
    ]


def test_one_of_several_trainers_compiles_for_its_own_batches_first():
    """Its buckets in the order of its own batches; no evaluation, which the first trainer makes."""
    stage = a_planned_stage(Noting())
    second = {("train", 1), ("train", 3)}
    assert list(ahead.buckets_in_order(stage, Position(), lambda *batch: batch in second)) == [
        ("training", 0),
        ("training", 3),
        ("training", 1),
        ("training", 2),
    ]
    step = Noting()
    ahead.prepare(a_planned_stage(step), Position(), Seen(), Stop(), own=lambda *b: b in second)
    assert {"training 0", "training 2"} <= set(step.compiled), "its first and the largest bucket"
    assert "training 1" not in step.compiled


def test_a_stop_does_not_wait_for_a_compilation():
    step, released = Noting(), threading.Event()
    step.programs = lambda *a, **k: [
        types.SimpleNamespace(name="endless", compile=lambda: released.wait(60))
    ]
    try:
        with pytest.raises(Stopped):
            ahead.prepare(a_planned_stage(step), Position(), Seen(), a_stopped())
    finally:
        released.set()
    assert step.ran == []
