"""A step's call makes no tensor on the host once its bucket has been used: each would be copied to
the device, behind the step before.
"""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import constant_op

from common.data.batch import empty_batch
from common.data.buckets import Bucket
from common.xtts.dims import SIZES
from tests.support.gpt_cases import MICRO, make_batch, model_dims
from trainer.step.dvae import DvaeStep
from trainer.step.gpt import GptStep, StepOptions
from trainer.step.scalars import Resident, packed, read
from trainer.step.upload import Upload


@pytest.fixture
def made_on_host(monkeypatch):
    """What was turned into a tensor that was none, outside traced functions."""
    values, convert = [], constant_op.convert_to_eager_tensor

    def noting(value, *args, **kwargs):
        if not isinstance(value, tf.Tensor):
            values.append(value)
        return convert(value, *args, **kwargs)

    monkeypatch.setattr(constant_op, "convert_to_eager_tensor", noting)
    return values


def on_device(upload, batch, seed):
    return upload.to_device(upload.to_host(batch, seed), lambda: None)


def gpt():
    bucket = Bucket(batch_size=2, row_len=20, text_len=7, num_codes=8)
    step = GptStep(
        model_dims(dataclasses.replace(MICRO, layers=1, cond_blocks=1)), StepOptions(), [bucket]
    )
    return step, [make_batch(bucket, seed=i) for i in range(3)]


def dvae():
    bucket, rng = Bucket(4, 32, 0, 8), np.random.default_rng(0)
    empty = empty_batch("dvae", bucket, SIZES["tiny"], "float32")
    full = {"num_frames": np.full(4, 32, np.int32), "weights": np.ones(4, np.float32)}
    mels = [rng.normal(size=empty["mel"].shape).astype(np.float32) for _ in range(3)]
    return DvaeStep(SIZES["tiny"], StepOptions(init_seed=0), [bucket]), [
        {**full, "mel": mel} for mel in mels
    ]


@pytest.mark.parametrize("make", [gpt, dvae])
def test_a_call_makes_nothing_on_the_host_once_its_bucket_was_used(make, made_on_host):
    step, batches = make()
    upload = Upload("/device:CPU:0")
    seen = []
    for i, batch in enumerate(batches):
        arrays, seed = on_device(upload, batch, (i, 7))
        made_on_host.clear()
        step.update(0, arrays, seed)
        for scale in (0.25, 0.75):
            step.micro(0, arrays, seed, scale)
        result = step.apply()
        seen.append(list(made_on_host))
        assert set(step.read(result)) == set(result) - {"packed"}
    assert seen[0], "the first call makes the constants: else nothing was watched"
    assert seen[1:] == [[], []]
    assert set(step.trace_counts.values()) == {1}


def test_seeds_and_scales_still_count():
    """What became resident is the value that was asked for: the group's loss is the scaled sum, and
    another seed drops other units.
    """
    step, (batch, *_) = gpt()
    birth = step.state_dict()

    def trained(seed, *scales):
        step.load_state_dict(birth)
        losses = [float(step.micro(0, batch, seed, scale)["loss"]) for scale in scales]
        return losses, step.read(step.apply())["loss"]

    losses, total = trained((1, 2), 0.25, 0.75)
    assert total == pytest.approx(0.25 * losses[0] + 0.75 * losses[1], rel=1e-6)
    losses, total = trained((1, 2), 0.75, 0.25, 0.25)
    assert total == pytest.approx(0.75 * losses[0] + 0.25 * losses[1] + 0.25 * losses[2], rel=1e-6)
    assert trained((1, 3), 1.0)[1] != trained((1, 2), 1.0)[1]


def test_resident_scalars_are_made_once_and_told_apart_by_type():
    resident = Resident("/device:CPU:0")
    a, b, c = resident(1.0, tf.float32), resident(True, tf.bool), resident(0.5, tf.float32)
    assert (a.numpy(), b.numpy(), c.numpy()) == (1.0, True, 0.5)
    assert b.dtype == tf.bool
    assert resident(1.0, tf.float32) is a


def test_packed_scalars_are_read_by_name():
    scalars = {
        "b": tf.constant(2, tf.int32),
        "a": tf.constant(0.5),
        "finite": tf.constant(True),
        "nan": tf.constant(np.nan),
    }
    values = read(packed(scalars))
    assert np.isnan(values.pop("nan"))
    assert values == {"a": 0.5, "b": 2.0, "finite": 1.0}
