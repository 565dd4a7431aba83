"""Precision, the single-call update, recomputation, the dry step and snapshots: what they may
and may not change.
"""

import dataclasses
import types

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import config as framework_config

from common.run import settings as config_module
from common.system.errors import BadInput
from common.xtts.fast_operations import FAST, FastOperations, fast_but
from common.xtts.operations import PLAIN, Operations, mixed, use
from tests.support.gpt_cases import (
    SMALL,
    SMALL_BUCKETS,
    make_batch,
    model_dims,
    without_dropout,
)
from trainer.step import precision, programs
from trainer.step.contract import Fp8
from trainer.step.gpt import GptStep, StepOptions


@pytest.fixture
def deterministic():
    tf.config.experimental.enable_op_determinism()
    yield
    framework_config.disable_op_determinism()


@pytest.fixture
def tf32():
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    yield tf.config.experimental.tensor_float_32_execution_enabled
    tf.config.experimental.enable_tensor_float_32_execution(before)


def small_step(buckets=SMALL_BUCKETS, **options):
    return GptStep(model_dims(SMALL), StepOptions(learning_rate=1e-2, **options), buckets)


def bits(state):
    return {
        f"{part}/{key}": np.asarray(array).tobytes()
        for part, arrays in state.items()
        for key, array in arrays.items()
    }


def gradients_of(step, batch, seed=None, jit=False):
    @tf.function(jit_compile=jit, autograph=False)
    def run():
        with use(step.operations):
            _, losses, gradients = step.gradients(
                {k: tf.constant(v) for k, v in batch.items()}, seed
            )
        return losses, gradients

    losses, gradients = run()
    return losses.numpy(), {
        t.key: g.numpy() for t, g in zip(step.optimizer.tensors, gradients, strict=True)
    }


# -- the update in one call ------------------------------------------------------------------------


@pytest.mark.usefixtures("deterministic")
def test_update_is_micro_and_apply_to_the_bit():
    one, other = small_step(SMALL_BUCKETS[:1]), small_step(SMALL_BUCKETS[:1])
    for i in range(3):
        batch = make_batch(SMALL_BUCKETS[0], seed=i)
        one.micro(0, batch, (7, i), 1.0)
        left, right = one.read(one.apply()), other.read(other.update(0, batch, (7, i)))
        # TensorFlow adds the squares up in another order in another graph; it is a report, and
        # without clipping nothing depends on it.
        assert left.pop("grad_norm") == pytest.approx(right.pop("grad_norm"), rel=1e-6)
        assert left == right
    assert bits(one.state_dict()) == bits(other.state_dict())
    assert dict(other.trace_counts) == {"update/0": 1}
    assert other._group.gradients == []  # as large as the weights, and not needed


def test_update_skips_what_is_not_finite():
    step, batch = small_step(), make_batch(SMALL_BUCKETS[0])
    batch["cond_mel"][0, 3, 5] = np.nan
    before = bits(step.state_dict())
    assert not step.read(step.update(0, batch, (0, 0)))["finite"]
    assert bits(step.state_dict()) == before


def test_xlas_programs_compute_what_one_graph_does(monkeypatch):
    """Updates, groups and evaluations as a chain of programs, blocks one by one, against one graph
    of the same operations.
    """
    monkeypatch.setattr(programs, "BLOCKS_PER_PROGRAM", 1)
    dims = model_dims(dataclasses.replace(SMALL, layers=2))
    options = StepOptions(
        learning_rate=1e-2,
        clip_norm=0.5,
        code_dropout=0.2,
        operations=FastOperations(),
    )
    one, chain = (
        GptStep(dims, dataclasses.replace(options, jit=jit), SMALL_BUCKETS[:1])
        for jit in (False, True)
    )
    for i in range(2):
        batch = make_batch(SMALL_BUCKETS[0], seed=i)
        left, right = (
            one.read(one.update(0, batch, (7, i))),
            chain.read(chain.update(0, batch, (7, i))),
        )
        assert right == pytest.approx(left, rel=1e-4)
    bad = make_batch(SMALL_BUCKETS[0])
    bad["cond_mel"][0, 3, 5] = np.nan
    before = bits(chain.state_dict())
    assert not chain.read(chain.update(0, bad, (0, 0)))["finite"]
    assert bits(chain.state_dict()) == before
    for step in (one, chain):
        step.micro(0, make_batch(SMALL_BUCKETS[0], seed=5), (1, 2), 0.25)
        step.micro(0, make_batch(SMALL_BUCKETS[0], seed=6), (1, 3), 0.75)
    assert chain.read(chain.apply()) == pytest.approx(one.read(one.apply()), rel=1e-4)
    left, right = ({k: float(v) for k, v in s.evaluate(0, batch).items()} for s in (one, chain))
    assert right == pytest.approx(left, rel=1e-4)
    want, got = one.state_dict(), chain.state_dict()
    for key, value in want["model"].items():
        np.testing.assert_allclose(
            got["model"][key], value, atol=5e-4, err_msg=key
        )  # Adam makes much of small gradients
    assert dict(chain.trace_counts) == {"update/0": 1, "micro/0": 1, "apply": 1, "evaluate/0": 1}
    blocks = [
        p for p in chain.programs(0, grouped=False, training=True) if p.name.startswith("1 blocks")
    ]
    assert len(blocks) == 2  # forward and backward, for both blocks


# -- the dry step ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("deterministic")
def test_a_dry_run_compiles_what_training_uses_and_changes_nothing():
    dims, batch = model_dims(without_dropout(SMALL)), make_batch(SMALL_BUCKETS[1])
    step = GptStep(dims, StepOptions(), SMALL_BUCKETS[1:])
    step.dry_run(0, grouped=False)
    step.dry_run(0, grouped=True)
    assert bits(step.state_dict()) == bits(GptStep(dims, StepOptions(), []).state_dict())
    assert step.optimizer.t.numpy() == 0
    once = {
        t.key: 0.1 * g
        for t, g in zip(step.optimizer.tensors, gradients_of(step, batch)[1].values(), strict=True)
    }
    step.micro(0, batch, (0, 2), 1.0)
    step.apply()
    for t, m in zip(
        step.optimizer.tensors, step.optimizer.exp_avg, strict=True
    ):  # a group begun by the dry run would show here
        np.testing.assert_allclose(m.numpy(), once[t.key], rtol=1e-3, atol=1e-6, err_msg=t.key)
    assert dict(step.trace_counts) == {"update/0": 1, "micro/0": 1, "apply": 1}


# -- recomputation, snapshots ----------------------------------------------------------------------


def test_recomputed_blocks_have_the_same_gradients():
    seed, chosen = tf.constant([3, 4]), mixed(Operations, FastOperations, "dropout")()
    plain = gradients_of(small_step([], operations=chosen), make_batch(SMALL_BUCKETS[0]), seed)
    again = gradients_of(
        small_step([], operations=chosen, recompute=True, jit=True),
        make_batch(SMALL_BUCKETS[0]),
        seed,
        jit=True,
    )
    np.testing.assert_allclose(again[0], plain[0], rtol=1e-6)
    for key, gradient in plain[1].items():
        np.testing.assert_allclose(
            again[1][key], gradient, atol=1e-5 * np.abs(gradient).max() + 1e-9, err_msg=key
        )


def test_a_snapshot_is_of_its_moment_whatever_follows():
    step = small_step(SMALL_BUCKETS[:1])
    step.update(0, make_batch(SMALL_BUCKETS[0]), (0, 1))
    want, held = step.state_dict(), step.snapshot()
    step.update(0, make_batch(SMALL_BUCKETS[0]), (0, 2))
    assert bits(step.state_dict()) != bits(want)
    assert bits(held) == bits(want)
    for part, arrays in want.items():
        for key, array in arrays.items():
            assert (held[part][key].shape, held[part][key].dtype, held[part][key].nbytes) == (
                array.shape,
                array.dtype,
                array.nbytes,
            )


# -- bfloat16 --------------------------------------------------------------------------------------


def test_bfloat16_gradients_are_those_of_float32_but_for_rounding():
    """At most 2 % of a tensor's norm, with the operations used on GPUs but fused attention."""
    dims, batch = model_dims(without_dropout(SMALL)), make_batch(SMALL_BUCKETS[0])
    fast = fast_but("attention", "causal_attention")
    steps = [
        GptStep(dims, o, [])
        for o in (
            StepOptions(),
            StepOptions(compute_dtype="mixed_bfloat16", operations=fast, jit=True),
        )
    ]
    (loss, want), (rounded, got) = (gradients_of(s, batch, jit=s.options.jit) for s in steps)
    np.testing.assert_allclose(rounded, loss, rtol=2e-3)
    for key, gradient in want.items():
        assert got[key].dtype == np.float32
        assert np.linalg.norm(got[key] - gradient) <= 0.03 * np.linalg.norm(gradient), key
    together = [np.concatenate([g[key].ravel() for key in want]) for g in (got, want)]
    assert np.linalg.norm(together[0] - together[1]) <= 0.01 * np.linalg.norm(together[1])


# -- what is chosen --------------------------------------------------------------------------------


def resolved(on_cpu, **train):
    return config_module.resolve(config_module.parse({"train": train}), on_cpu, cores=2)


def test_precision_is_decided_when_the_run_is_created():
    assert (resolved(True).train.precision, resolved(True).train.attention_dropout) == ("fp32", 0.1)
    assert (resolved(False).train.precision, resolved(False).train.attention_dropout) == (
        "bf16",
        0.0,
    )
    without = config_module.resolve(config_module.parse({"jit": False}), False, cores=2)
    assert (without.train.precision, without.train.attention_dropout) == ("tf32", 0.1)
    asked = resolved(False, precision="tf32")
    assert (asked.train.precision, asked.train.attention_dropout) == ("tf32", 0.1)
    assert resolved(False, attention_dropout=0.2).train.attention_dropout == 0.2


def test_the_cpu_computes_plainly_and_says_so(caplog, tf32):
    caplog.set_level("INFO")
    assert precision.choose(resolved(True), works) == precision.Precision("float32", PLAIN)
    assert "precision fp32, plain attention" in caplog.text
    for name in ("tf32", "fp32", "bf16"):
        precision.allow_tf32(resolved(True, precision=name))
        assert tf32() == (name != "fp32")
    assert precision.choose(resolved(True, precision="bf16"), works).compute_dtype == "float32"
    assert "train.precision bf16 needs a GPU and jit: fp32" in caplog.text


def works():
    """Of fused attention: nothing speaks against it."""


@pytest.fixture
def a_gpu(monkeypatch):
    """A card of some age, as far as this module can tell."""

    def put(capability):
        config = types.SimpleNamespace(
            list_logical_devices=lambda kind: ["GPU:0"],
            list_physical_devices=lambda kind: ["GPU:0"],
            experimental=types.SimpleNamespace(
                get_device_details=lambda device: {"compute_capability": capability},
                enable_tensor_float_32_execution=lambda on: None,
            ),
        )
        monkeypatch.setattr(precision, "tf", types.SimpleNamespace(config=config))

    return put


def test_a_gpu_gets_the_fast_operations_after_a_check(a_gpu, caplog):
    caplog.set_level("INFO")
    a_gpu((9, 0))
    assert precision.choose(resolved(False, precision="bf16"), works) == precision.Precision(
        "mixed_bfloat16", FAST
    )
    assert "fused attention (cuDNN), no attention dropout" in caplog.text
    deterministic = precision.choose(
        resolved(False, precision="bf16").model_copy(update={"deterministic": True}), works
    )
    assert deterministic.operations == fast_but("lookup")
    old = precision.choose(resolved(False, precision="bf16"), lambda: "cuDNN is too old")
    assert old.operations == fast_but("attention", "causal_attention")
    assert "precision bf16, plain attention: cuDNN is too old" in caplog.text


def test_fp8_needs_a_card_that_has_it_and_is_emulated_on_the_cpu(a_gpu, caplog):
    cpu = resolved(True, precision="fp8")
    assert (cpu.jit, cpu.train.attention_dropout) == (True, 0.0)
    assert precision.choose(cpu, works) == precision.Precision("float32", PLAIN, Fp8())
    assert "precision fp8 on the CPU: products are emulated" in caplog.text
    for capability in ((8, 9), (9, 0)):
        a_gpu(capability)
        chosen = precision.choose(resolved(False, precision="fp8"), works)
        assert chosen == precision.Precision("mixed_bfloat16", FAST, Fp8())
    a_gpu((8, 6))
    with pytest.raises(BadInput, match="capability 8.9 or later, this one has 8.6; set train"):
        precision.choose(resolved(False, precision="fp8"), works)


def test_an_old_card_computes_in_float32_and_says_so(a_gpu, caplog):
    a_gpu((7, 5))
    assert precision.choose(resolved(False, precision="bf16"), works) == precision.Precision(
        "float32", PLAIN
    )
    assert "needs compute capability 8.0, this card has 7.5: fp32" in caplog.text
