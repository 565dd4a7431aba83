"""cuDNN's flash attention as two XLA custom calls, forward and backward, for bfloat16 on GPUs
inside a jit-compiled function.

TensorFlow has no op for it; XLA's GPU compiler has the calls `__cudnn$fmhaSoftmax` and
`__cudnn$fmhaSoftmaxBackward`. They are written here as small StableHLO modules, because only there
can a result's layout be named: cuDNN writes [B, H, T, D] with time outside heads in memory, so the
transposes to [B, T, H, D] cost nothing. Seen working with TensorFlow 2.21 and cuDNN 9.19 on H100
and H200.

cuDNN's dropout is not used: XLA fixes its seed when it compiles and advances an offset at each
call, so the masks would depend on how often a process has called it, and a resumed run would repeat
them.

Shapes: B batch, T query time, S key time, H heads, D head width (a multiple of 8, at most 128); all
static.
"""

from __future__ import annotations

import functools
import json

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

_MODULE_VERSION = 9  # of the XlaCallModule op's calling convention


def fused_attention(
    q_BTHD: tf.Tensor, k_BSHD: tf.Tensor, v_BSHD: tf.Tensor, causal: bool
) -> tf.Tensor:
    """softmax(q kᵀ / √D) v -> [B, T, H, D]; `causal`: position t sees 0..t, and S = T."""
    return tf.custom_gradient(lambda q, k, v: _attend(q, k, v, causal))(q_BTHD, k_BSHD, v_BSHD)


def _attend(q_BTHD, k_BSHD, v_BSHD, causal):
    dims = (*q_BTHD.shape, k_BSHD.shape[1])
    operands = [q_BTHD, k_BSHD, v_BSHD]
    out_BHTD, stats_BHT = _call(
        operands,
        _module(*dims, causal, backward=False),
        [_bhtd(dims), _bhtd(dims)[:3]],
        [tf.bfloat16, tf.float32],
    )
    out = tf.transpose(out_BHTD, [0, 2, 1, 3])

    def grad(d_out):
        b, _, h, d, s = dims
        shapes = [_bhtd(dims), [b, h, s, d], [b, h, s, d]]
        grads = _call(
            [*operands, stats_BHT, d_out, out],
            _module(*dims, causal, backward=True),
            shapes,
            [tf.bfloat16] * 3,
        )
        return [tf.transpose(g, [0, 2, 1, 3]) for g in grads]

    return out, grad


def fits(q: tf.Tensor, k: tf.Tensor) -> bool:
    """Whether the fused kernel can take these operands: bfloat16, static shapes, a head width that
    cuDNN knows.
    """
    static = q.shape.is_fully_defined() and k.shape.is_fully_defined()
    return static and q.dtype == tf.bfloat16 and q.shape[-1] % 8 == 0 and q.shape[-1] <= 128


def _bhtd(dims) -> list[int]:
    b, t, h, d, _ = dims
    return [b, h, t, d]


def _call(
    operands: list[tf.Tensor], module: str, shapes: list[list[int]], dtypes: list[tf.DType]
) -> list[tf.Tensor]:
    return gen_xla_ops.xla_call_module(
        operands,
        version=_MODULE_VERSION,
        module=module,
        Sout=shapes,
        Tout=dtypes,
        platforms=["CUDA"],
        disabled_checks=["platform"],
    )


@functools.lru_cache(maxsize=64)
def _module(b: int, t: int, h: int, d: int, s: int, causal: bool, backward: bool) -> str:
    """The StableHLO module of one call, with cuDNN's scratch space dropped from its results."""
    q, k = f"tensor<{b}x{t}x{h}x{d}xbf16>", f"tensor<{b}x{s}x{h}x{d}xbf16>"
    o, dk, stats = (
        f"tensor<{b}x{h}x{t}x{d}xbf16>",
        f"tensor<{b}x{h}x{s}x{d}xbf16>",
        f"tensor<{b}x{h}x{t}xf32>",
    )
    target = "__cudnn$fmhaSoftmaxBackward" if backward else "__cudnn$fmhaSoftmax"
    operands = [q, k, k, stats, q, q] if backward else [q, k, k]
    results = [o, dk, dk] if backward else [o, stats]
    config = json.dumps(_backend_config(b, h, t, s, d**-0.5, causal, backward)).replace('"', "\\22")
    names = ", ".join(f"%arg{i}" for i in range(len(operands)))
    arguments = ", ".join(f"%arg{i}: {kind}" for i, kind in enumerate(operands))
    returned = ", ".join(f"%0#{i}" for i in range(len(results)))
    outside = ", ".join(_time_outside_heads(r) for r in results)
    one = "mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 1 : i32"
    return f"""module @fmha attributes {{{one}}} {{
  func.func public @main({arguments}) -> ({", ".join(results)}) {{
    %0:{len(results) + 1} = stablehlo.custom_call @{target}({names}) {{
      api_version = 2 : i32, backend_config = "{config}",
      operand_layouts = [{", ".join(map(_row_major, operands))}],
      result_layouts = [{outside}, dense<0> : tensor<1xindex>]
    }} : ({", ".join(operands)}) -> ({", ".join(results)}, tensor<0xui8>)
    return {returned} : {", ".join(results)}
  }}
}}"""


def _row_major(kind: str) -> str:
    rank = kind.count("x")
    return f"dense<{list(range(rank))[::-1]}> : tensor<{rank}xindex>"


def _time_outside_heads(kind: str) -> str:
    return "dense<[3, 1, 2, 0]> : tensor<4xindex>" if kind.count("x") == 4 else _row_major(kind)


def _backend_config(
    b: int, h: int, t: int, s: int, scale: float, causal: bool, backward: bool
) -> dict:
    """What JAX writes for `dot_product_attention(..., implementation="cudnn")` on [B, T, H, D]
    operands.
    """
    no_layout = {
        **{
            "dim_level_types": [],
            "dim_unique": [],
            "dim_ordered": [],
            "minor_to_major": ["3", "2", "1", "0"],
            "tiles": [],
        },
        **{
            "element_size_in_bits": "0",
            "memory_space": "0",
            "dynamic_shape_metadata_prefix_bytes": "0",
        },
        **{
            "index_primitive_type": "PRIMITIVE_TYPE_INVALID",
            "pointer_primitive_type": "PRIMITIVE_TYPE_INVALID",
        },
    }
    scores = {
        "element_type": "BF16",
        "dimensions": [str(x) for x in (b, h, t, s)],
        "tuple_shapes": [],
        "layout": no_layout,
    }
    knobs = {"algo_id": "0", "math_type": "TENSOR_OP_MATH", "tuning_knobs": {"17": "1", "24": "0"}}
    fmha = {
        "algorithm": {**knobs, "is_cudnn_frontend": True, "workspace_size": "0"},
        "fmha_scale": scale,
        "intermediate_tensor_shape": {**scores, "is_dynamic_dimension": [False] * 4},
        "is_flash_attention": True,
        "mask_type": "CAUSAL" if causal else "NO_MASK",
        **(_BACKWARD_PRODUCTS if backward else _FORWARD_PRODUCTS),
        **{
            "dropout_rate": 0.0,
            "seed": 42,
            "sliding_window_length": 0,
            "max_seg_per_batch": 1,
            "is_paged_attention": False,
        },
    }
    return {"operation_queue_id": "0", "cudnn_fmha_backend_config": fmha}


def _product(lhs_contracting: str, rhs_contracting: str, lhs_heads: str) -> dict:
    return {
        "lhs_contracting_dimensions": [lhs_contracting],
        "rhs_contracting_dimensions": [rhs_contracting],
        "lhs_batch_dimensions": ["0", lhs_heads],
        "rhs_batch_dimensions": ["0", "2"],
    }


_FORWARD_PRODUCTS = {
    "bmm1_dot_dimension_numbers": _product("3", "3", "2"),
    "bmm2_dot_dimension_numbers": _product("3", "1", "1"),
}
_BACKWARD_PRODUCTS = {
    "bmm1_grad_gemm1_dot_dimension_numbers": _product("2", "1", "1"),
    "bmm1_grad_gemm2_dot_dimension_numbers": _product("3", "1", "1"),
    "bmm2_grad_gemm1_dot_dimension_numbers": _product("2", "1", "1"),
    "bmm2_grad_gemm2_dot_dimension_numbers": _product("3", "3", "2"),
}
