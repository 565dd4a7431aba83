"""Stages whose steps note what is compiled and tried before step 1."""

import dataclasses
import types

from tests.support.gpt_cases import SMALL, SMALL_BUCKETS, model_dims
from trainer.step.contract import StepOptions


def a_stage(step, buckets=SMALL_BUCKETS, accumulate=1):
    schedule = types.SimpleNamespace(
        train=types.SimpleNamespace(buckets=buckets), accumulate=accumulate
    )
    return types.SimpleNamespace(step=step, schedule=schedule)


class Seen:
    """An observer that notes how far the programs are."""

    def __init__(self):
        self.programs, self.tried, self.beside, self.waits = [], [], 0, []

    def compiling_programs(self, number, total, left_s):
        self.programs.append((number, total, left_s is not None))

    def trying(self, what):
        self.tried.append(what)

    def beside_compiling(self):
        self.beside += 1

    def compiling(self, what, bucket, num_buckets, shape):
        self.waits.append((what, bucket, num_buckets, shape.row_len))


class Noting:
    """A step that notes what it is asked to compile.

    Two programs per function; "update" is shared by all buckets' training.
    """

    compiles = True
    dims, options = model_dims(SMALL), StepOptions(jit=True)

    def __init__(self, broken=()):
        self.broken, self.compiled, self.ran = broken, [], []
        self.trace_counts = {}
        self._shared = types.SimpleNamespace(
            name="update", compile=lambda: self.compiled.append("update")
        )

    def dry_run(self, bucket, grouped):
        assert f"training {bucket}" in self.compiled
        self.ran.append((bucket, grouped))

    def programs(self, bucket, grouped, training):
        name = f"{'training' if training else 'evaluation'} {bucket}"

        def compile_():
            self.compiled.append(name)
            if name in self.broken:
                raise MemoryError(name)

        own = types.SimpleNamespace(name=name, compile=compile_)
        return [self._shared, own] if training else [own]


def a_planned_stage(step):
    """Four buckets, the third the largest; the plan asks for 1, 0, an evaluation of 0 and 3, then
    2, 3.
    """
    smaller = [dataclasses.replace(SMALL_BUCKETS[0], row_len=n) for n in (10, 12, 14)]
    stage = a_stage(step, [*smaller[:2], SMALL_BUCKETS[1], smaller[2]])
    of = {"train": [1, 0, 2, 3], "eval": [0, 3, 0]}
    for plan in of:
        held = stage.schedule.train if plan == "train" else types.SimpleNamespace()
        held.batch = lambda g, plan=plan: types.SimpleNamespace(bucket=of[plan][g])
        setattr(stage.schedule, plan, held)
    stage.schedule.num_eval_batches = 3
    order = [
        ("train", 0),
        ("train", 1),
        ("eval", 0),
        ("eval", 1),
        ("eval", 2),
        ("train", 2),
        ("train", 3),
    ]
    stage.schedule.batches = lambda position: iter(order[position.next_g :])
    return stage
