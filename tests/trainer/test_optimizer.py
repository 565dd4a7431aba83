"""AdamW against torch's update rule, written out in NumPy float64."""

import json
import math

import numpy as np
import pytest
import tensorflow as tf

from common.xtts.gpt import Gpt
from common.xtts.layers import LayerNorm, Linear, Module
from common.xtts.weights import WeightsError
from tests.support.gpt_cases import MICRO, load_golden
from trainer.step.optimizer import AdamW, clip_coefficient, global_norm, schedule


class Net(Module):
    def __init__(self, dtype=None):
        super().__init__("net", dtype)
        self.linear = Linear(4, 3, name="linear", dtype=dtype)
        self.norm = LayerNorm(3, name="norm", dtype=dtype)
        self.initialise(0)


def make(net, lr=1e-2, **kwargs):
    return AdamW(list(net.tensors()), schedule("constant", lr), **kwargs)


def gradients_of(optimizer, step):
    rng = np.random.default_rng(step)
    return [
        rng.standard_normal(p.shape) * 10.0 ** rng.integers(-6, 2) for p in optimizer.parameters
    ]


def torch_adamw(parameters, gradients, lr, betas, eps, decays):
    """torch.optim.AdamW as documented: decay first, then m, v, bias corrections, eps after the
    corrected root.
    """
    m, v = [np.zeros_like(p) for p in parameters], [np.zeros_like(p) for p in parameters]
    for t, step in enumerate(gradients, 1):
        for i, g in enumerate(step):
            parameters[i] = parameters[i] - lr * decays[i] * parameters[i]
            m[i] = betas[0] * m[i] + (1 - betas[0]) * g
            v[i] = betas[1] * v[i] + (1 - betas[1]) * g * g
            m_hat, v_hat = m[i] / (1 - betas[0] ** t), v[i] / (1 - betas[1] ** t)
            parameters[i] = parameters[i] - lr * m_hat / (np.sqrt(v_hat) + eps)
    return parameters, m, v


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 2e-6)])
def test_twenty_steps_are_torchs(dtype, tolerance):
    net = Net(dtype)
    optimizer = make(net, weight_decay=0.1)
    update = tf.function(lambda *g: optimizer.update(g, tf.constant(True)), autograph=False)
    before = [p.numpy().astype(np.float64) for p in optimizer.parameters]
    gradients = [gradients_of(optimizer, step) for step in range(20)]
    for step in gradients:
        update(*[tf.constant(g, dtype) for g in step])
    expected, m, v = torch_adamw(before, gradients, 1e-2, (0.9, 0.96), 1e-8, [0.1, 0, 0, 0])
    for got, want in zip(
        (*optimizer.parameters, *optimizer.exp_avg, *optimizer.exp_avg_sq),
        (*expected, *m, *v),
        strict=True,
    ):
        np.testing.assert_allclose(got.numpy(), want, rtol=tolerance, atol=tolerance)
    assert optimizer.t.numpy() == 20


def test_a_disabled_update_keeps_every_bit():
    optimizer = make(Net())
    optimizer.update(
        [tf.constant(g, tf.float32) for g in gradients_of(optimizer, 0)], tf.constant(True)
    )
    held = [*optimizer.parameters, *optimizer.exp_avg, *optimizer.exp_avg_sq, optimizer.t]
    before = [v.numpy().tobytes() for v in held]
    for poison in (math.nan, math.inf, 1.0):
        optimizer.update(
            [tf.fill(p.shape, poison) for p in optimizer.parameters], tf.constant(False)
        )
        assert [v.numpy().tobytes() for v in held] == before


def test_decay_groups_of_parity_are_coquis():
    golden = load_golden()
    optimizer = AdamW(
        list(Gpt(golden.gpt).tensors()), schedule("constant", 1.0), decay_latents=True
    )
    decayed = [
        t.key for t, decays in zip(optimizer.tensors, optimizer.decayed, strict=True) if decays
    ]
    assert sorted(decayed) == json.loads(str(golden.arrays["train/decayed"]))


def test_by_default_latents_and_gamma_do_not_decay():
    optimizer = AdamW(list(Gpt(MICRO).tensors()), schedule("constant", 1.0))
    decayed = {
        t.key for t, decays in zip(optimizer.tensors, optimizer.decayed, strict=True) if decays
    }
    assert {
        "gpt.h.0.mlp.c_fc.weight",
        "conditioning_encoder.init.weight",
        "mel_head.weight",
    } <= decayed
    assert all(key.endswith(".weight") for key in decayed)
    assert not decayed & {
        "text_embedding.weight",
        "mel_pos_embedding.emb.weight",
        "gpt.ln_f.weight",
    }


def rates(*args, **kwargs):
    at = schedule(*args, **kwargs)
    return [float(at(tf.constant(t, tf.int64))) for t in (1, 5, 10, 60, 110, 500)]


def test_schedules():
    assert rates("constant", 2.0) == [2.0] * 6
    assert rates("constant", 2.0, warmup_steps=10) == pytest.approx([0.2, 1.0, 2.0, 2.0, 2.0, 2.0])
    cosine = rates("cosine", 2.0, warmup_steps=10, total_steps=110, final_ratio=0.1)
    assert cosine == pytest.approx([0.2, 1.0, 2.0, 2.0 * (0.1 + 0.9 / 2), 0.2, 0.2])
    with pytest.raises(ValueError, match="unknown kind 'step'"):
        schedule("step", 1.0)
    with pytest.raises(ValueError, match=r"total_steps \(5\) greater than warmup_steps \(10\)"):
        schedule("cosine", 1.0, warmup_steps=10, total_steps=5)


def test_norm_and_clipping():
    gradients = [tf.constant([3.0, 0.0]), tf.constant([[4.0]])]
    assert global_norm(gradients).numpy() == 5
    assert clip_coefficient(tf.constant(5.0), 2.5).numpy() == pytest.approx(0.5, rel=1e-6)
    assert clip_coefficient(tf.constant(5.0), 7.0).numpy() == 1
    assert not np.isfinite(global_norm([tf.constant([1.0]), tf.constant([math.nan])]))


def test_state_continues_where_it_stopped():
    def train(optimizer, steps):
        for step in steps:
            optimizer.update(
                [tf.constant(g, tf.float32) for g in gradients_of(optimizer, step)],
                tf.constant(True),
            )
        return [p.numpy() for p in optimizer.parameters]

    through = train(make(Net()), range(6))
    first = make(Net())
    train(first, range(3))
    state = first.state_dict()
    assert state["step"] == 3
    assert state["exp_avg.linear.weight"].shape == (3, 4)  # torch's [out, in]
    second = make(Net())
    for p, q in zip(second.parameters, first.parameters, strict=True):
        p.assign(q)
    second.load_state_dict(state)
    for a, b in zip(through, train(second, range(3, 6)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_state_that_does_not_fit_is_refused():
    optimizer = make(Net())
    state = optimizer.state_dict()
    state.pop("exp_avg.norm.bias")
    with pytest.raises(WeightsError, match="1 missing: exp_avg.norm.bias"):
        optimizer.load_state_dict(state)
