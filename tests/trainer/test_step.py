"""The training step of stage 2: learning, accumulation, non-finite groups, determinism, and Coqui's
own loss curve.
"""

import dataclasses
import math

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import config as framework_config

from common.data.buckets import Bucket
from common.xtts import weights
from tests.support.gpt_cases import MICRO, load_golden, make_batch, model_dims, without_dropout
from trainer.step.gpt import GptStep, StepOptions

# One layer of each kind: compiling is most of these tests' time.
SMALL = dataclasses.replace(MICRO, layers=1, cond_blocks=1)
BUCKETS = [
    Bucket(batch_size=2, row_len=20, text_len=7, num_codes=8),
    Bucket(batch_size=2, row_len=26, text_len=9, num_codes=12),
]
FAST = StepOptions(learning_rate=1e-2)


def numpy(scalars):
    return {name: value.numpy() for name, value in scalars.items()}


def snapshot(step):
    """Every bit of weights, moments and t."""
    return {
        f"{part}/{key}": array.tobytes()
        for part, arrays in step.state_dict().items()
        for key, array in arrays.items()
    }


def train_on(step, batch, bucket=0, seed=(0, 0)):
    step.micro(bucket, batch, seed, 1.0)
    return numpy(step.apply())


def gradients_of(step, batch, seed=None):
    """Losses and gradients of one batch by key, outside the compiled step."""
    with tf.GradientTape() as tape:
        out = step.losses({name: tf.constant(array) for name, array in batch.items()}, seed)
    gradients = tape.gradient(out["loss"], step.optimizer.parameters)
    return numpy(out), {
        t.key: g.numpy() for t, g in zip(step.optimizer.tensors, gradients, strict=True)
    }


def norm_of(gradients):
    return math.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in gradients.values()))


@pytest.fixture(scope="module")
def shared():
    """A step for the tests that leave it usable; they may move its weights."""
    return GptStep(model_dims(SMALL), FAST, BUCKETS)


def test_untrained_cross_entropies_are_those_of_guessing():
    out, _ = gradients_of(GptStep(model_dims(SMALL), FAST, []), make_batch(BUCKETS[0]))
    assert out["text_ce"] == pytest.approx(math.log(MICRO.num_text_tokens), abs=0.3)
    assert out["audio_ce"] == pytest.approx(math.log(MICRO.num_audio_tokens), abs=0.3)


def test_c50_twice_the_padding_changes_no_loss(shared):
    small, lengths = BUCKETS[0], ([4, 6], [8, 5])
    large = dataclasses.replace(small, row_len=2 * small.row_len, text_len=2 * small.text_len)
    before, _ = gradients_of(shared, make_batch(small, lengths=lengths))
    after, _ = gradients_of(shared, make_batch(large, lengths=lengths))
    for name in ("loss", "text_ce", "audio_ce"):
        assert after[name] == pytest.approx(before[name], rel=1e-5), name


def test_one_batch_is_learnt_by_heart():
    step = GptStep(model_dims(SMALL), FAST, BUCKETS[:1])
    batch = make_batch(BUCKETS[0])
    for i in range(120):
        step.micro(0, batch, (0, i), 1.0)
        last = step.apply()
    assert last["audio_ce"].numpy() < 0.5
    out, _ = gradients_of(step, batch)
    assert out["audio_ce"] < 0.5


def test_two_micro_batches_equal_one_of_both():
    """Rows of equal lengths, so that the mean of two means is the mean over all.

    After one update, exp_avg is a tenth of the gradient.
    """
    big = Bucket(batch_size=4, row_len=20, text_len=7, num_codes=8)
    batch = make_batch(big, lengths=([5] * 4, [6] * 4))
    step = GptStep(model_dims(without_dropout(SMALL)), FAST, BUCKETS[:1])
    whole, gradients = gradients_of(step, batch)
    for rows in (slice(0, 2), slice(2, 4)):
        step.micro(0, {name: array[rows] for name, array in batch.items()}, (0, 0), 0.5)
    out = numpy(step.apply())
    for name in ("loss", "audio_ce", "text_ce"):
        assert out[name] == pytest.approx(whole[name], rel=1e-5)
    assert out["grad_norm"] == pytest.approx(norm_of(gradients), rel=1e-4)
    for t, m in zip(step.optimizer.tensors, step.optimizer.exp_avg, strict=True):
        np.testing.assert_allclose(
            m.numpy(), 0.1 * gradients[t.key], rtol=1e-3, atol=1e-6, err_msg=t.key
        )


def test_rows_of_weight_zero_leave_no_trace():
    """A row of weight 0 changes neither loss nor gradients, whatever it contains."""
    step = GptStep(model_dims(without_dropout(SMALL)), FAST, [])
    batch = make_batch(BUCKETS[0])
    empty = {name: np.concatenate([a, np.zeros_like(a[:1])]) for name, a in batch.items()}
    filled = {name: np.concatenate([a, a[:1]]) for name, a in batch.items()} | {
        "weights": empty["weights"]
    }
    expected, gradients = gradients_of(step, batch)
    for other in (empty, filled):
        out, others = gradients_of(step, other)
        assert out == pytest.approx(expected, rel=1e-5)
        for key, gradient in gradients.items():
            np.testing.assert_allclose(others[key], gradient, rtol=1e-3, atol=1e-6, err_msg=key)


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
    assert (
        shared.state_dict()["optimizer"]["step"]
        == np.frombuffer(before["optimizer/step"], np.int64)[0] + 1
    )


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
            shared.evaluate(
                bucket, {k: tf.constant(v) for k, v in make_batch(BUCKETS[bucket], seed=i).items()}
            )
        shared.apply()
    assert dict(shared.trace_counts) == {
        f"{kind}/{bucket}": 1 for kind in ("micro", "evaluate") for bucket in (0, 1)
    } | {"apply": 1}


def test_a_batch_of_another_bucket_is_refused(shared):
    with pytest.raises(
        ValueError, match=r"bucket 0: ids is int32\[2, 26\], the bucket's is int32\[2, 20\]"
    ):
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
            for micro in (0, 1):
                step.micro(0, make_batch(BUCKETS[0], seed=2 * i + micro), (7, 2 * i + micro), 0.5)
            step.apply()
        return step

    one, other = (
        GptStep(model_dims(SMALL), StepOptions(learning_rate=1e-2, init_seed=i), BUCKETS[:1])
        for i in (0, None)
    )
    birth = one.state_dict()
    half = train(one, range(2)).state_dict()
    through = snapshot(train(one, range(2, 4)))
    other.load_state_dict(half)
    assert snapshot(train(other, range(2, 4))) == through
    other.micro(0, make_batch(BUCKETS[0]), (1, 1), 1.0)  # a group begun is dropped by loading
    other.load_state_dict(birth)
    assert snapshot(train(other, range(4))) == through


def test_clipping_bounds_the_update_not_the_report():
    step, batch = (
        GptStep(model_dims(without_dropout(SMALL)), StepOptions(clip_norm=0.1), BUCKETS[:1]),
        make_batch(BUCKETS[0]),
    )
    _, gradients = gradients_of(step, batch)
    assert train_on(step, batch)["grad_norm"] == pytest.approx(norm_of(gradients), rel=1e-4)
    m = {
        t.key: m.numpy()
        for t, m in zip(step.optimizer.tensors, step.optimizer.exp_avg, strict=True)
    }
    assert norm_of(m) == pytest.approx(0.1 * 0.1, rel=1e-4)


@pytest.fixture(scope="module")
def golden():
    return load_golden()


@pytest.fixture(scope="module")
def golden_step(golden):
    options = StepOptions(
        learning_rate=golden.meta["learning_rate"], decay_latents=True, init_seed=None
    )
    return GptStep(model_dims(golden.gpt, golden.meta["frames"]), options, [golden.bucket])


def test_losses_are_coquis_with_and_without_the_masked_prompt(golden, golden_step):
    weights.load_state_dict(golden_step.model, golden.weights)
    batch, raw = golden.batch(0), golden.part("batch0")

    def losses(batch):
        out = numpy(golden_step.evaluate(0, batch))
        return [out["text_sum"] / out["text_count"], out["audio_sum"] / out["audio_count"]]

    np.testing.assert_allclose(losses(batch), golden.arrays["losses_first"], rtol=1e-5)
    # The original masks the last row alone, and takes mel frames (256 samples) for codes.
    start, end = golden.arrays["cond_idxs"][-1] // 256
    first_code = raw["text_lengths"][-1] + 1
    batch["audio_targets"][-1, first_code + start : first_code + end] = -1
    np.testing.assert_allclose(losses(batch), golden.arrays["losses_masked"], rtol=1e-5)
    assert golden.arrays["losses_first"][1] != golden.arrays["losses_masked"][1]


def moved_by_noise(key, size):
    """Positions of the keys' biases: softmax ignores them, so their gradient is rounding noise,
    which Adam blows up to whole steps.
    """
    at = np.arange(size)
    if key.endswith("attn.c_attn.bias"):
        return (at >= size // 3) & (at < 2 * size // 3)  # q | k | v
    if key.endswith("qkv.bias"):
        head = size // load_golden().gpt.heads
        return (at % head >= head // 3) & (at % head < 2 * head // 3)  # q | k | v within each head
    return np.zeros(size, bool)


def test_gradients_are_those_of_torch(golden, golden_step):
    weights.load_state_dict(golden_step.model, golden.weights)
    _, gradients = gradients_of(golden_step, golden.batch(0))
    tensors = weights.tensors(golden_step.model)
    for key, want in golden.part("train/gradient").items():
        got = kept(weights.to_torch(tensors[key], gradients[key]))
        np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max() + 1e-8, err_msg=key)


def test_twenty_steps_follow_coquis(golden, golden_step):
    """The same batches, no dropout: losses, then weights and moments, against torch's autograd and
    AdamW.
    """
    weights.load_state_dict(golden_step.model, golden.weights)
    curve = []
    for i in range(golden.meta["steps"]):
        out = train_on(golden_step, golden.batch(i % 2))
        curve.append([out["text_ce"], out["audio_ce"]])
    np.testing.assert_allclose(curve, golden.arrays["train/losses"], atol=1e-5)
    state = golden_step.state_dict()
    for key, array in state["model"].items():
        steady = ~kept(moved_by_noise(key, array.size))
        want = golden.arrays[f"train/parameter/{key}"]
        np.testing.assert_allclose(kept(array)[steady], want[steady], atol=2e-6, err_msg=key)
        for moment in ("exp_avg", "exp_avg_sq"):
            want = golden.arrays[f"train/{moment}/{key}"]
            atol = 2e-5 * np.abs(want).max() + 1e-8
            np.testing.assert_allclose(
                kept(state["optimizer"][f"{moment}.{key}"]),
                want,
                atol=atol,
                err_msg=f"{moment}.{key}",
            )


def kept(array):
    """The entries of a tensor that the golden file holds: at most 64, evenly spread."""
    return array.reshape(-1)[np.linspace(0, array.size - 1, min(array.size, 64)).astype(np.int64)]
