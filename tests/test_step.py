"""The training step of stage 2: learning, accumulation, non-finite groups, determinism, and Coqui's own loss curve."""

import math

import numpy as np
import pytest
import tensorflow as tf
from gpt_cases import FRAMES, MICRO, load_golden, make_batch, model_dims, without_dropout
from tensorflow.python.framework import config as framework_config

from common.buckets import Bucket
from common.xtts import weights
from trainer.step import GptStep, StepOptions

BUCKETS = [Bucket(batch_size=2, row_len=20, text_len=7, num_codes=8), Bucket(batch_size=2, row_len=26, text_len=9, num_codes=12)]
FAST = StepOptions(learning_rate=1e-2)


def numpy(scalars):
    return {name: value.numpy() for name, value in scalars.items()}


def snapshot(step):
    """Every bit of weights, moments and t."""
    return {f"{part}/{key}": array.tobytes() for part, arrays in step.state_dict().items() for key, array in arrays.items()}


def train_on(step, batch, bucket=0, seed=(0, 0)):
    step.micro(bucket, batch, seed, 1.0)
    return numpy(step.apply())


@pytest.fixture(scope="module")
def shared():
    """A step for the tests that leave it usable; they may move its weights."""
    return GptStep(model_dims(), FAST, BUCKETS)


def test_untrained_cross_entropies_are_those_of_guessing(shared):
    step = GptStep(model_dims(), FAST, BUCKETS[:1])
    out = numpy(step.micro(0, make_batch(BUCKETS[0]), (0, 0), 1.0))
    assert out["text_ce"] == pytest.approx(math.log(MICRO.num_text_tokens), abs=0.5)
    assert out["audio_ce"] == pytest.approx(math.log(MICRO.num_audio_tokens), abs=0.5)
    assert out["finite"]


def test_one_batch_is_learnt_by_heart():
    step = GptStep(model_dims(), FAST, BUCKETS[:1])
    batch = make_batch(BUCKETS[0])
    for i in range(120):
        step.micro(0, batch, (0, i), 1.0)
        last = step.apply()
    assert last["audio_ce"].numpy() < 0.5
    out = numpy(step.evaluate(0, batch))
    assert out["audio_sum"] / out["audio_count"] < 0.5


def test_two_micro_batches_equal_one_of_both():
    """Rows of equal lengths, so that the mean of two means is the mean over all."""
    big = Bucket(batch_size=4, row_len=20, text_len=7, num_codes=8)
    batch = make_batch(big, lengths=([5] * 4, [6] * 4))
    halves = [{name: array[rows] for name, array in batch.items()} for rows in (slice(0, 2), slice(2, 4))]
    dims = model_dims(without_dropout())
    whole, parts = GptStep(dims, FAST, [big]), GptStep(dims, FAST, BUCKETS[:1])
    for _ in range(3):
        expected = train_on(whole, batch)
        for half in halves:
            parts.micro(0, half, (0, 0), 0.5)
        got = numpy(parts.apply())
        for name in ("loss", "audio_ce", "text_ce", "grad_norm"):
            assert got[name] == pytest.approx(expected[name], rel=1e-4)
    for key, array in parts.state_dict()["optimizer"].items():
        np.testing.assert_allclose(array, whole.state_dict()["optimizer"][key], rtol=1e-3, atol=1e-5, err_msg=key)


def test_rows_of_weight_zero_leave_no_trace():
    """A batch with a padding row trains like the batch without it: loss, gradient norm, and not a bit of the row's content."""
    dims = model_dims(without_dropout())
    wide = Bucket(batch_size=3, row_len=20, text_len=7, num_codes=8)
    batch = make_batch(BUCKETS[0])
    padded = {name: np.concatenate([a, np.zeros_like(a[:1])]) for name, a in batch.items()}
    filled = {name: np.concatenate([a, a[:1]]) for name, a in batch.items()}
    filled["weights"] = padded["weights"]
    expected = train_on(GptStep(dims, FAST, BUCKETS[:1]), batch)
    for other in (padded, filled):
        got = train_on(GptStep(dims, FAST, [wide]), other)
        for name in ("loss", "text_ce", "audio_ce", "grad_norm"):
            assert got[name] == pytest.approx(expected[name], rel=1e-5), name


def test_a_non_finite_group_changes_no_bit_and_is_dropped(shared):
    good, bad = make_batch(BUCKETS[0]), make_batch(BUCKETS[0], seed=1)
    bad["cond_mel"][0, 3, 5] = np.nan
    train_on(shared, good)
    before = snapshot(shared)
    assert numpy(shared.micro(0, good, (0, 0), 0.5))["finite"]
    assert not numpy(shared.micro(0, bad, (0, 0), 0.5))["finite"]
    out = numpy(shared.apply())
    assert not out["finite"]
    assert snapshot(shared) == before
    out = train_on(shared, good)
    assert out["finite"]
    assert np.isfinite(out["loss"])
    assert shared.state_dict()["optimizer"]["step"] == np.frombuffer(before["optimizer/step"], np.int64)[0] + 1


def test_an_infinite_gradient_under_a_finite_loss_is_dropped_too(shared):
    before = snapshot(shared)
    assert numpy(shared.micro(0, make_batch(BUCKETS[0]), (0, 0), 1e38))["finite"]
    shared.micro(0, make_batch(BUCKETS[0]), (0, 0), 1e38)
    assert not numpy(shared.apply())["finite"]
    assert snapshot(shared) == before


def test_evaluation_changes_nothing_and_knows_no_dropout(shared):
    batch = make_batch(BUCKETS[1])
    before = snapshot(shared)
    first, second = numpy(shared.evaluate(1, batch)), numpy(shared.evaluate(1, batch))
    assert first == second
    assert first["text_count"] == (batch["text_targets"] >= 0).sum()
    assert first["audio_count"] == (batch["audio_targets"] >= 0).sum()
    assert snapshot(shared) == before


def test_each_function_is_traced_once(shared):
    for i in range(3):
        for bucket in (0, 1):
            shared.micro(bucket, make_batch(BUCKETS[bucket], seed=i), (i, bucket), 0.25 * (i + 1))
            shared.evaluate(bucket, {k: tf.constant(v) for k, v in make_batch(BUCKETS[bucket], seed=i).items()})
        shared.apply()
    assert dict(shared.trace_counts) == {f"{kind}/{bucket}": 1 for kind in ("micro", "evaluate") for bucket in (0, 1)} | {"apply": 1}


def test_a_batch_of_another_bucket_is_refused(shared):
    with pytest.raises(ValueError, match=r"bucket 0: ids is int32\[2, 26\], the bucket's is int32\[2, 20\]"):
        shared.micro(0, make_batch(BUCKETS[1]), (0, 0), 1.0)
    batch = make_batch(BUCKETS[0])
    batch["weights"] = batch["weights"].astype(np.float64)
    with pytest.raises(ValueError, match=r"weights is float64\[2\]"):
        shared.micro(0, batch, (0, 0), 1.0)
    del batch["weights"]
    with pytest.raises(ValueError, match="no field weights"):
        shared.micro(0, batch, (0, 0), 1.0)


@pytest.fixture
def deterministic():
    tf.config.experimental.enable_op_determinism()
    yield
    framework_config.disable_op_determinism()


@pytest.mark.usefixtures("deterministic")
def test_the_same_batches_give_the_same_bits_also_after_a_resume():
    def train(step, steps):
        for i in steps:
            for bucket in (0, 1):
                step.micro(bucket, make_batch(BUCKETS[bucket], seed=i), (7, 2 * i + bucket), 0.5)
            step.apply()
        return step

    through = snapshot(train(GptStep(model_dims(), FAST, BUCKETS), range(4)))
    state = train(GptStep(model_dims(), FAST, BUCKETS), range(2)).state_dict()
    resumed = GptStep(model_dims(), StepOptions(learning_rate=1e-2, init_seed=None), BUCKETS)
    resumed.load_state_dict(state)
    assert snapshot(train(resumed, range(2, 4))) == through


def test_clipping_bounds_the_update_not_the_report():
    dims, batch = model_dims(without_dropout()), make_batch(BUCKETS[0])
    free, clipped = (GptStep(dims, StepOptions(learning_rate=1e-2, clip_norm=c), BUCKETS[:1]) for c in (0.0, 0.1))
    reports = [train_on(step, batch) for step in (free, clipped)]
    assert reports[0]["grad_norm"] == pytest.approx(reports[1]["grad_norm"], rel=1e-6)
    m_free, m_clipped = (
        np.sqrt(sum((a**2).sum() for k, a in s.state_dict()["optimizer"].items() if k.startswith("exp_avg."))) for s in (free, clipped)
    )
    assert m_free == pytest.approx(0.1 * reports[0]["grad_norm"], rel=1e-4)
    assert m_clipped == pytest.approx(0.1 * 0.1, rel=1e-4)


@pytest.fixture(scope="module")
def golden():
    return load_golden()


def golden_step(golden):
    options = StepOptions(learning_rate=golden.meta["learning_rate"], parity="coqui", init_seed=None)
    step = GptStep(model_dims(golden.gpt, golden.meta["frames"]), options, [golden.bucket])
    weights.load_state_dict(step.model, golden.weights)
    return step


def test_losses_are_coquis_with_and_without_the_masked_prompt(golden):
    step, batch = golden_step(golden), golden.batch(0)

    def losses(batch):
        out = numpy(step.evaluate(0, batch))
        return [out["text_sum"] / out["text_count"], out["audio_sum"] / out["audio_count"]]

    np.testing.assert_allclose(losses(batch), golden.arrays["losses_first"], rtol=1e-5)
    # The original masks the last row alone, and takes mel frames (256 samples) for codes.
    start, end = golden.arrays["cond_idxs"][-1] // 256
    first = len(golden.part("batch0")["text"][-1][: golden.part("batch0")["text_lengths"][-1]]) + 1
    batch["audio_targets"][-1, first + start : first + end] = -1
    np.testing.assert_allclose(losses(batch), golden.arrays["losses_masked"], rtol=1e-5)
    assert golden.arrays["losses_first"][1] != golden.arrays["losses_masked"][1]


def test_twenty_steps_follow_coquis(golden):
    """The same batches, no dropout: losses, then weights and moments, against torch's autograd and AdamW."""
    step = golden_step(golden)
    curve = []
    for i in range(golden.meta["steps"]):
        out = train_on(step, golden.batch(i % 2))
        curve.append([out["text_ce"], out["audio_ce"]])
    np.testing.assert_allclose(curve, golden.arrays["train/losses"], atol=1e-4)
    state = step.state_dict()
    for kind, part in (("parameter", state["model"]), ("exp_avg", None), ("exp_avg_sq", None)):
        for key, want in golden.part(f"train/{kind}").items():
            array = part[key] if part else state["optimizer"][f"{kind}.{key}"]
            got = array.reshape(-1)[np.linspace(0, array.size - 1, min(array.size, 64)).astype(np.int64)]
            print(kind, key, np.abs(got-want).max(), np.abs(want).max())
