"""A step that several trainers make: bits, and what all of them decide alike. The trainers are
threads here; gradients are added up in NumPy.
"""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest
import tensorflow as tf

from common.data.buckets import Bucket
from tests.support.gpt_cases import SMALL, make_batch, model_dims
from trainer.ranks import collectives
from trainer.step.gpt import GptStep, StepOptions

BUCKET = Bucket(batch_size=2, row_len=20, text_len=7, num_codes=8)
OPTIONS = StepOptions(learning_rate=1e-2)
WAIT_S = 300.0


class Table:
    """Where the trainers of a test meet and add up."""

    def __init__(self, count: int):
        self.count, self.meetings = count, 0
        self._barrier = threading.Barrier(count, timeout=WAIT_S)
        self._given: dict[int, list[np.ndarray]] = {}

    def seat(self, rank: int) -> Seat:
        return Seat(self, rank)

    def meet(self) -> None:
        if self._barrier.wait() == 0:
            self.meetings += 1

    def total(self, rank: int, given: list[np.ndarray]) -> list[np.ndarray]:
        """By rank, from the first to the last."""
        self._given[rank] = given
        self._barrier.wait()
        sums = self._given[0]
        for r in range(1, self.count):
            sums = [a + b for a, b in zip(sums, self._given[r], strict=True)]
        self._barrier.wait()
        return sums


@dataclasses.dataclass
class Seat:
    """`Ranks` of one of them."""

    table: Table
    rank: int

    @property
    def count(self) -> int:
        return self.table.count

    def meet(self, payload: bytes = b"") -> list[bytes]:
        self.table.meet()
        return [payload] * self.count

    def add_up(self, gradients, losses) -> None:
        own = [*gradients, losses]
        sums = self.table.total(self.rank, [v.numpy() for v in own])
        for variable, value in zip(own, sums, strict=True):
            variable.assign(value)


def bits(step: GptStep) -> dict[str, bytes]:
    return {
        f"{part}/{key}": array.tobytes()
        for part, arrays in step.state_dict().items()
        for key, array in arrays.items()
    }


def batches(count: int) -> list[dict]:
    return [make_batch(BUCKET, seed=i) for i in range(count)]


def train(steps: list[GptStep], groups: list[list[dict]]) -> list[list[dict]]:
    """Each group's batch i to step i mod len(steps); what each step's updates came to."""
    reports: list[list[dict]] = [[] for _ in steps]

    def work(rank: int) -> None:
        if len(steps) > 1:  # sums of zeros, which change nothing
            elements, seconds = steps[rank].time_sum()
            sizes = [p.shape.num_elements() for p in steps[rank].optimizer.parameters]
            assert (elements, seconds > 0) == (sum(sizes), True)
        for number, group in enumerate(groups):
            for i, batch in enumerate(group):
                if i % len(steps) == rank:
                    steps[rank].micro(0, batch, (number, i), 1 / len(group))
            reports[rank].append(steps[rank].read(steps[rank].apply()))

    threads = [threading.Thread(target=work, args=(r,)) for r in range(len(steps))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(WAIT_S)
        assert not t.is_alive()
    return reports


def shared(count: int, options: StepOptions = OPTIONS) -> list[GptStep]:
    table = Table(count)
    steps = [GptStep(model_dims(SMALL), options, [BUCKET]) for _ in range(count)]
    for rank, step in enumerate(steps):
        step.share(table.seat(rank))
    return steps


def test_two_trainers_with_two_batches_are_one_to_the_bit():
    """With dropout, whose seed is the batch's; the last group has one batch and leaves rank 1 with
    none. A batch that is not finite is skipped by both.
    """
    data = batches(5)
    bad = {**data[3], "cond_mel": np.full_like(data[3]["cond_mel"], np.nan)}
    groups = [data[0:2], [data[2], bad], data[2:4], data[4:]]
    one = GptStep(model_dims(SMALL), OPTIONS, [BUCKET])
    (expected,) = train([one], groups)
    two = shared(2)
    reports = train(two, groups)
    assert [r["finite"] for r in expected] == [True, False, True, True]
    assert repr(reports) == repr([expected] * 2)
    for step in two:
        assert bits(step) == bits(one)
        assert step.digests() == one.digests()


@pytest.mark.parametrize("jit", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_trainers_clip_by_one_norm_though_each_sums_up_another(jit):
    """GPUs sum squares in no fixed order. A norm of its own would give each trainer a factor of its
    own, and other weights. All take the first trainer's, with the bits of one trainer alone.
    """
    options = dataclasses.replace(OPTIONS, clip_norm=1e-2, jit=jit)
    groups = [batches(4)[:2], batches(4)[2:]]
    one = GptStep(model_dims(SMALL), options, [BUCKET])
    (expected,) = train([one], groups)
    assert all(r["grad_norm"] > options.clip_norm for r in expected)
    steps = shared(3, options)
    for off, step in enumerate(steps):
        step._squares = lambda own=step._squares, off=off: own() * (1 + off * 2.0**-20)
    reports = train(steps, groups)
    assert repr(reports) == repr([expected] * 3)
    for step in steps:
        assert bits(step) == bits(one)


def test_digests_name_the_tensor_that_differs():
    a, b = (GptStep(model_dims(SMALL), OPTIONS, [BUCKET]) for _ in range(2))
    assert a.digests() == b.digests()
    assert len(a.digests()) == len(a.optimizer.tensors)
    changed = b.optimizer.tensors[3]
    value = changed.variable.numpy()
    value.reshape(-1)[0] = np.nextafter(value.reshape(-1)[0], np.float32(1))
    changed.variable.assign(value)
    assert {k for k, v in a.digests().items() if b.digests()[k] != v} == {changed.key}


def test_sums_between_gpus_are_made_on_the_gpus():
    """tf.distribute counts the GPUs that it is told of: of none, it would sum on the host, at 0.2
    GB/s instead of NVLink's speed.
    """
    addresses = ["127.0.0.1:7001", "127.0.0.1:7002"]
    assert collectives.cluster(1, addresses, on_gpu=True).num_accelerators() == {"GPU": 1}
    assert not collectives.cluster(1, addresses, on_gpu=False).num_accelerators()


def test_packs_hold_every_element_once_and_in_order(monkeypatch):
    """Sizes by hand: 24 bytes a pack at least, of variables of 12, 16, 4, 40, 8 bytes."""
    monkeypatch.setattr(collectives, "PACK_BYTES", 24)
    variables = [tf.Variable(tf.zeros(shape)) for shape in ([3], [2, 2], [1], [10], [2])]
    packs = collectives.packs_of(variables)
    assert [[v.shape.num_elements() for v in pack] for pack in packs] == [[3, 4], [1, 10], [2]]
    flat = [tf.range(7.0), tf.range(7.0, 18.0), tf.range(18.0, 20.0)]
    for values, pack in zip(flat, packs, strict=True):
        collectives.unpack(values, *pack)
        assert collectives.packed(tf.float32, *pack).numpy().tolist() == values.numpy().tolist()
    seen = np.concatenate([v.numpy().ravel() for v in variables])
    assert seen.tolist() == list(range(20))
    assert collectives.packed(tf.bfloat16, *packs[0]).dtype == tf.bfloat16
