"""The fused attention's seam on the CPU: what XLA is told, and when the plain implementation is
used. The kernel itself: on GPUs.
"""

import functools
import json
import re

import numpy as np
import pytest
import tensorflow as tf

from common.xtts import fast_operations
from common.xtts import fused_attention as fused
from common.xtts.attention_check import why_not
from common.xtts.operations import PLAIN, current, use

B, T, S, H, D = 2, 6, 9, 3, 16


def attention(*operands, **options):
    return current().attention(*operands, **options)


def causal_attention(*operands, **options):
    return current().causal_attention(*operands, **options)


free = functools.partial(attention, normalised=True)


def operands(dtype=tf.bfloat16, keys=T, width=D, seed=0):
    shapes = [(B, T, H, width), (B, keys, H, width), (B, keys, H, width)]
    return [
        tf.cast(tf.random.stateless_normal(shape, [seed, i]), dtype)
        for i, shape in enumerate(shapes)
    ]


def program(function, *args) -> str:
    """XLA's program of a function with its gradients, before it is compiled for any device."""

    @tf.function(jit_compile=True, autograph=False)
    def run(*args):
        with use(fast_operations.FAST), tf.GradientTape() as tape:
            tape.watch(args)
            out = function(*args)
            return out, tape.gradient(out, args)

    return run.experimental_get_compiler_ir(*args)(stage="hlo")


def calls(text: str) -> list[tuple[str, str]]:
    """(target, line) of each custom call."""
    return [
        (m.group(1), line)
        for line in text.splitlines()
        if (m := re.search(r'custom_call_target="(__cudnn[^"]*)"', line))
    ]


@pytest.mark.parametrize(
    ("function", "keys", "mask"),
    [(causal_attention, T, "CAUSAL"), (free, T, "NO_MASK"), (free, S, "NO_MASK")],
)
def test_xla_is_asked_for_one_forward_and_one_backward_call(function, keys, mask):
    found = calls(program(function, *operands(keys=keys)))
    assert [target for target, _ in found] == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
    forward, backward = (line for _, line in found)
    # Results with time outside heads in memory: the transposes to [B, T, H, D] are then none.
    assert (
        f"(bf16[{B},{H},{T},{D}]{{3,1,2,0}}, f32[{B},{H},{T}]{{2,1,0}}, u8[0]{{0}}) custom-call"
        in forward
    )
    for shape in (f"bf16[{B},{H},{T},{D}]{{3,1,2,0}}", f"bf16[{B},{H},{keys},{D}]{{3,1,2,0}}"):
        assert shape in backward.split(" custom-call")[0]
    for line in (forward, backward):
        config = json.loads(re.search(r"backend_config=(\{.*\})", line).group(1))[
            "cudnn_fmha_backend_config"
        ]
        assert (config["mask_type"], config["fmha_scale"], config["dropout_rate"]) == (
            mask,
            D**-0.5,
            0.0,
        )
        assert config["intermediate_tensor_shape"]["dimensions"] == [
            str(n) for n in (B, H, T, keys)
        ]


def test_products_are_numbered_as_jax_numbers_them():
    """Of `jax.nn.dot_product_attention(implementation="cudnn")` on [B, T, H, D]: contracted axes,
    and where heads are.
    """
    config = fused._backend_config(2, 3, 6, 6, 0.25, True, backward=True)[
        "cudnn_fmha_backend_config"
    ]
    axes = {
        name[:15]: [
            config[name][k]
            for k in (
                "lhs_contracting_dimensions",
                "rhs_contracting_dimensions",
                "lhs_batch_dimensions",
            )
        ]
        for name in config
        if name.endswith("dot_dimension_numbers")
    }
    assert axes == {
        "bmm1_grad_gemm1": [["2"], ["1"], ["0", "1"]],
        "bmm1_grad_gemm2": [["3"], ["1"], ["0", "1"]],
        "bmm2_grad_gemm1": [["2"], ["1"], ["0", "1"]],
        "bmm2_grad_gemm2": [["3"], ["3"], ["0", "2"]],
    }


def test_plain_where_the_fused_kernel_cannot_be_right(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the fused kernel was chosen")

    monkeypatch.setattr(fast_operations, "fused_attention", refuse)
    seed = tf.constant([1, 2])
    with use(fast_operations.FAST):
        causal_attention(*operands(tf.float32))
        causal_attention(*operands(width=12))  # no multiple of 8
        causal_attention(*operands(), dropout_rate=0.1, seed=seed)
        causal_attention(*operands(), key_mask_BT=tf.ones([B, T], tf.bool))
        free(*operands(), mask=tf.ones([1, 1, T, T], tf.bool))
        attention(*operands())  # the perceiver's queries and keys come from no norm
        for not_dropping in ({"dropout_rate": 0.1}, {"dropout_rate": 0.0, "seed": seed}):
            with pytest.raises(AssertionError, match="chosen"):
                causal_attention(*operands(), **not_dropping)
    causal_attention(*operands())  # and without being asked for


def test_the_check_at_start_says_why_not():
    if not tf.config.list_logical_devices("GPU"):
        assert why_not() == "no GPU"


@pytest.mark.gpu
@pytest.mark.skipif(not tf.config.list_physical_devices("GPU"), reason="needs a GPU")
@pytest.mark.parametrize("keys", [67, 405])
@pytest.mark.parametrize("causal", [True, False])
def test_on_a_gpu_it_agrees_with_plain_attention(causal, keys):
    assert why_not() is None
    q, k, v = (
        tf.cast(tf.random.stateless_normal([2, keys, 16, 64], [i, 1]), tf.bfloat16)
        for i in range(3)
    )

    @tf.function(jit_compile=True)
    def both():
        plain = (PLAIN.causal_attention if causal else PLAIN.attention)(q, k, v)
        return plain, fused.fused_attention(q, k, v, causal)

    plain, got = (tf.cast(x, tf.float32).numpy() for x in both())
    assert np.linalg.norm(got - plain) <= 0.01 * np.linalg.norm(plain)
