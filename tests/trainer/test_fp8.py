"""Products in FP8: the formats against tables, scales against arithmetic by hand, gradients within
what rounding allows, and a step that goes on to the bit.
"""

from __future__ import annotations

import dataclasses
import types

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from common.xtts.fast_operations import FastOperations
from common.xtts.gpt import GptBlock
from common.xtts.layers import HFConv1D
from common.xtts.operations import PLAIN, use
from common.xtts.weights import WeightsError
from tests.support.gpt_cases import MICRO, SMALL, SMALL_BUCKETS, make_batch, model_dims
from trainer.step.contract import PRODUCTS, Fp8
from trainer.step.fp8 import E4M3, E5M2, Scaled, dequantised, in_fp8, quantised, scaled
from trainer.step.gpt import GptStep, StepOptions
from trainer.step.scaling import HISTORY, UPDATES, Scaling, scales_of

FORMATS = [(E4M3, ml_dtypes.float8_e4m3fn, 448.0), (E5M2, ml_dtypes.float8_e5m2, 57344.0)]


def nearest(x: np.ndarray, kind) -> np.ndarray:
    """The nearest finite number of the format, by search in the table of all; of two, the even."""
    table = np.arange(128, dtype=np.uint8).view(kind).astype(np.float64)
    table = table[np.isfinite(table)]  # in the order of their bits
    distance = np.abs(np.abs(x)[:, np.newaxis] - table)
    best = distance == distance.min(1, keepdims=True)
    even = best & (np.arange(len(table)) % 2 == 0)
    index = np.where(even.any(1), even.argmax(1), best.argmax(1))
    return np.copysign(table[index], x)


@pytest.mark.parametrize(("dtype", "kind", "largest"), FORMATS)
def test_rounding_is_to_the_nearest_of_the_table_and_saturates(dtype, kind, largest):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(2000) * 2.0 ** rng.integers(-20, 12, 2000)).astype(np.float32)
    ties = np.arange(1, 120, dtype=np.uint8).view(kind).astype(np.float32)
    ties = (ties[:-1] + ties[1:]) / 2
    x = np.concatenate([x, ties, [0, largest, -3e38, 3e38, np.inf]]).astype(np.float32)
    run = tf.function(lambda x: dequantised(quantised(x, 4.0, dtype), 4.0, x.dtype))
    expected = nearest(np.clip(x.astype(np.float64) * 4, -largest, largest), kind) / 4
    np.testing.assert_array_equal(run(x).numpy(), expected)
    assert np.isnan(run(np.array([np.nan], np.float32)).numpy()).all()


def test_scales_are_the_largest_powers_of_two_that_fit():
    seen = np.array(
        [[448, 448, 57344], [448.1, 224, 57345], [1, 0.02, 1e-6], [0, 0, 0], [2e-38, 3e38, 2e-38]],
        np.float32,
    )
    expected = [
        [1, 1, 1],
        [0.5, 2, 0.5],
        [2.0**8, 2.0**14, 2.0**35],  # 1 · 256; 0.02 · 16384 = 328; 1e-6 · 2^35 = 34360
        [16, 256, 2.0**17],  # nothing seen
        [2.0**100, 2.0**-100, 2.0**100],
    ]
    np.testing.assert_array_equal(scales_of(tf.constant(seen)).numpy(), np.float32(expected))


def test_an_accident_is_forgotten_and_what_is_not_allowed_leaves_no_trace():
    scaling = Scaling([1, 2], Fp8())

    def update(largest, allowed=True):
        given = [np.full([n, len(PRODUCTS), 3], largest, np.float32) for n in (1, 2)]
        scaling.roll([tf.constant(g) for g in given], tf.constant(allowed))
        return [float(s.numpy()[-1, -1, 0]) for s in scaling.scales]

    assert update(1.0) == [256.0] * 2
    assert update(1e6, allowed=False) == [256.0] * 2
    assert update(1e6) == [2.0**-12] * 2  # 1e6 / 4096 = 244
    for _ in range(UPDATES - 1):
        assert update(2.0) == [2.0**-12] * 2
    assert update(2.0) == [128.0] * 2
    inf, nan = (tf.constant([1.0, bad, 2.0]) for bad in (np.inf, np.nan))
    assert [bool(scaling.finite([x])) for x in (inf, nan, tf.constant([1.0]))] == [
        False,
        False,
        True,
    ]
    again = Scaling([3], Fp8())
    again.load(scaling.state_dict()[HISTORY])
    assert float(again.scales[0].numpy()[2, 0, 0]) == 128.0
    with pytest.raises(WeightsError, match=HISTORY):
        again.load(np.zeros([UPDATES, 2, 4, 3], np.float32))


def test_all_trainers_see_what_any_has_seen():
    """Sums are made in NumPy, of what each trainer gave."""
    own = np.arange(12, dtype=np.float32).reshape(1, 4, 3)
    magnitudes = [own, own[:, ::-1].copy()]

    def gave(rank: int, total: np.ndarray | None) -> tuple[np.ndarray, ...]:
        scaling, losses, sent = Scaling([1], Fp8()), tf.Variable([1.0, 2.0, 3.0 + rank]), []

        def add_up(gradients, variable):
            assert gradients == []
            sent.append(variable.numpy())
            variable.assign(variable if total is None else total)

        scaling.note([tf.constant(magnitudes[rank])])
        scaling.add_up(types.SimpleNamespace(rank=rank, count=2, add_up=add_up), [], losses)
        return sent[0], scaling.seen()[0].numpy(), losses.numpy()

    total = gave(0, None)[0] + gave(1, None)[0]
    for rank in range(2):
        _, seen, losses = gave(rank, total)
        np.testing.assert_array_equal(seen, np.maximum(*magnitudes))
        np.testing.assert_array_equal(losses, [2, 4, 7])


@pytest.mark.parametrize("wgrad", [False, True])
def test_a_product_and_its_gradients_are_within_what_rounding_allows(wgrad):
    """Each operand is off by at most 2^-4 (e4m3) or 2^-3 (e5m2) of itself, or by half the smallest
    step of its format.
    """
    rng = np.random.default_rng(1)
    x, dy = (rng.standard_normal(s).astype(np.float32) for s in ((24, 16), (24, 32)))
    layer = HFConv1D(16, 32, name="layer")
    layer.weight.assign(rng.standard_normal((16, 32)).astype(np.float32) * 0.02)
    layer.bias.assign(rng.standard_normal(32).astype(np.float32))
    w, b = layer.weight.numpy(), layer.bias.numpy()
    scales = np.float32([64, 4096, 8192])

    def run(x, dy, w, scales):
        of = Scaled(w, scales, Fp8(wgrad=wgrad))
        with use(in_fp8(type(PLAIN))(jit=True)), tf.GradientTape() as tape, scaled({id(layer): of}):
            tape.watch([x, w, scales])
            y = layer(x)
        return y, *tape.gradient(y, [x, w, scales], dy)

    compiled = tf.function(run, jit_compile=True, autograph=False)
    y, dx, dw, largest = (t.numpy() for t in compiled(*map(tf.constant, (x, dy, w, scales))))
    np.testing.assert_array_equal(largest, [np.abs(a).max() for a in (x, w, dy)])

    def within(got, left, right, errors):
        """|Σ ab - Σ a'b'| <= Σ |a||δb| + |δa||b| + |δa||δb|, and what float32 adds."""
        exact = left.astype(np.float64) @ right
        off = [
            np.abs(a) * share + step for a, (share, step) in zip((left, right), errors, strict=True)
        ]
        bound = np.abs(left) @ off[1] + off[0] @ np.abs(right) + off[0] @ off[1]
        bound = bound + 1e-5 * (np.abs(left) @ np.abs(right))
        assert (np.abs(got - exact) <= bound).all()
        assert np.abs(got - exact).max() > 1e-4 * np.abs(exact).max() or errors[0] == (0, 0)

    of_x, of_w, of_d = (2**-4, 2**-10 / 64), (2**-4, 2**-10 / 4096), (2**-3, 2**-17 / 8192)
    within(y - b, x, w, (of_x, of_w))
    within(dx, dy, w.T, (of_d, of_w))
    within(dw, x.T, dy, (of_x, of_d) if wgrad else ((0, 0), (0, 0)))


def bits(state):
    return {(part, k): np.asarray(v).tobytes() for part, of in state.items() for k, v in of.items()}


def test_a_step_in_fp8_goes_on_to_the_bit():
    """History included; compiling ahead and a batch that is not finite change nothing."""
    dims = model_dims(dataclasses.replace(SMALL, layers=1))
    options = StepOptions(
        learning_rate=1e-2, jit=True, operations=FastOperations(), fp8=Fp8(wgrad=True)
    )
    step = GptStep(dims, options, SMALL_BUCKETS[:1])
    fresh = bits(step.state_dict())
    for program in step.programs(0, grouped=False, training=True):
        program.compile()
    assert bits(step.state_dict()) == fresh
    batches = [make_batch(SMALL_BUCKETS[0], seed=i) for i in range(3)]

    def train(steps):
        return [step.read(step.update(0, batches[i], (7, i)))["loss"] for i in steps]

    train([0, 1])
    saved, before = step.state_dict(), step.scaling.scales[0].numpy()
    history = saved["optimizer"][HISTORY]
    assert history.shape == (UPDATES, 1, 4, 3)
    assert (history[:2] > 0).all()
    assert not history[2:].any()
    assert bits(step.snapshot()) == bits(saved)
    bad = {**batches[0], "cond_mel": np.full_like(batches[0]["cond_mel"], np.nan)}
    assert not step.read(step.update(0, bad, (0, 0)))["finite"]
    step.dry_run(0, grouped=False)
    assert bits(step.state_dict()) == bits(saved)
    losses = train([2, 0])
    ended = bits(step.state_dict())
    assert ended[("optimizer", HISTORY)] != history.tobytes()
    step.load_state_dict(saved)
    np.testing.assert_array_equal(step.scaling.scales[0].numpy(), before)
    assert train([2, 0]) == losses
    assert bits(step.state_dict()) == ended
    _loads_into_another_precision(dims, options, saved, step)


def _loads_into_another_precision(dims, options, saved, step):
    other = GptStep(dims, dataclasses.replace(options, fp8=None, jit=False), SMALL_BUCKETS[:1])
    other.load_state_dict(saved)
    state = other.state_dict()
    assert HISTORY not in state["optimizer"]
    step.load_state_dict(state)
    assert not step.state_dict()["optimizer"][HISTORY].any()


@pytest.mark.slow
def test_groups_see_what_any_of_their_batches_does():
    """Two batches as a group: the history takes in the larger magnitude of each tensor, as single
    batches show them from the same scales. Trying a group out leaves no trace.
    """
    dims = model_dims(SMALL)
    options = StepOptions(learning_rate=1e-2, jit=True, fp8=Fp8(wgrad=True))
    step = GptStep(dims, options, SMALL_BUCKETS[:1])
    batches, fresh = [make_batch(SMALL_BUCKETS[0], seed=i) for i in range(2)], step.state_dict()
    seen = []
    for i, batch in enumerate(batches):
        step.load_state_dict(fresh)
        step.update(0, batch, (7, i))
        seen.append(step.state_dict()["optimizer"][HISTORY][0])
    step.load_state_dict(fresh)
    step.dry_run(0, grouped=True)
    for i, batch in enumerate(batches):
        step.micro(0, batch, (7, i), 1.0)
    step.apply()
    found = step.state_dict()["optimizer"][HISTORY]
    np.testing.assert_allclose(found[0], np.maximum(*seen), rtol=1e-5)
    assert not found[1:].any()


def test_the_blocks_products_are_those_that_have_scales():
    assert tuple(GptBlock(MICRO, name="block").projections) == PRODUCTS
    with pytest.raises(ValueError, match="jit"):
        GptStep(model_dims(SMALL), StepOptions(fp8=Fp8()), SMALL_BUCKETS[:1])
