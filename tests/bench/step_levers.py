"""Levers of the training step that are tried on a card and are no part of the product: cuDNN's
layer norm, and XLA's flags switched while a process runs.

A custom call of cuBLASLt cannot come from outside: XLA's layout assignment ends the process where
it meets one (`!IsCublasGemm(*instruction)`). `cublaslt_product` is there to show it.

Shapes: R rows, C channels, I inputs, O outputs.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

from common.xtts.operations import Operations, current

_WORDS = {tf.float32: "f32", tf.bfloat16: "bf16"}
# XLA's own bound of the scratch space of a norm on Hopper: 2 · 32 · 144 · (4 + 256) bytes, 8 a row.
_NORM_SCRATCH, _NORM_SCRATCH_ROW = 2 * 32 * 144 * (4 + 256) + 64, 8
_LT_SCRATCH = 32 << 20


# -- custom calls ----------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def module(target: str, config: str, operands: tuple[str, ...], results: tuple[str, ...]) -> str:
    """The StableHLO module of one call with row-major operands and results; its last result is
    scratch space and is dropped.
    """
    returned = results[:-1]
    arguments = ", ".join(f"%arg{i}: {kind}" for i, kind in enumerate(operands))
    names = ", ".join(f"%arg{i}" for i in range(len(operands)))
    values = ", ".join(f"%0#{i}" for i in range(len(returned)))
    one = "mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 1 : i32"
    return f"""module @lever attributes {{{one}}} {{
  func.func public @main({arguments}) -> ({", ".join(returned)}) {{
    %0:{len(results)} = stablehlo.custom_call @{target}({names}) {{
      api_version = 2 : i32, backend_config = "{config}",
      operand_layouts = [{", ".join(map(_row_major, operands))}],
      result_layouts = [{", ".join(map(_row_major, results))}]
    }} : ({", ".join(operands)}) -> ({", ".join(results)})
    return {values} : {", ".join(returned)}
  }}
}}"""


def _row_major(kind: str) -> str:
    rank = kind.count("x") - kind.count("index")
    return f"dense<{list(range(rank))[::-1]}> : tensor<{rank}xindex>"


def _kind(shape: Sequence[int], dtype: tf.DType) -> str:
    return f"tensor<{'x'.join(str(n) for n in shape)}x{_WORDS[dtype]}>"


def _call(
    target: str,
    config: dict,
    operands: Sequence[tf.Tensor],
    results: Sequence[tuple[Sequence[int], tf.DType]],
    scratch: str,
) -> list[tf.Tensor]:
    text = module(
        target,
        json.dumps({"operation_queue_id": "0", **config}).replace('"', "\\22"),
        tuple(_kind(x.shape, x.dtype) for x in operands),
        (*(_kind(*result) for result in results), scratch),
    )
    return gen_xla_ops.xla_call_module(
        list(operands),
        version=9,
        module=text,
        Sout=[list(shape) for shape, _ in results],
        Tout=[dtype for _, dtype in results],
        platforms=["CUDA"],
        disabled_checks=["platform"],
    )


# -- cuDNN's layer norm ----------------------------------------------------------------------------


def norm_forward(
    x_RC: tf.Tensor, weight_C: tf.Tensor, bias_C: tf.Tensor, eps: float, dtype: tf.DType
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """y [R, C] in `dtype`; mean and 1/std [R, 1], float32."""
    rows, channels = x_RC.shape
    operands = [
        tf.reshape(x_RC, [rows, channels, 1, 1]),
        *(tf.reshape(p, [1, channels, 1, 1]) for p in (weight_C, bias_C)),
    ]
    statistic = ([rows, 1, 1, 1], tf.float32)
    y, mean, scale = _norm(
        "LAYER_FWD_TRAIN", eps, operands, [([rows, channels, 1, 1], dtype), statistic, statistic]
    )
    return tf.reshape(y, [rows, channels]), tf.reshape(mean, [-1, 1]), tf.reshape(scale, [-1, 1])


def norm_backward(
    x_RC: tf.Tensor,
    weight_C: tf.Tensor,
    dy_RC: tf.Tensor,
    mean_R1: tf.Tensor,
    scale_R1: tf.Tensor,
    eps: float,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Gradients of x in x's dtype, of weight and bias in the weight's."""
    rows, channels = x_RC.shape
    of_rows, of_channels = [rows, channels, 1, 1], [1, channels, 1, 1]
    operands = [
        tf.reshape(x_RC, of_rows),
        tf.reshape(weight_C, of_channels),
        tf.reshape(dy_RC, of_rows),
        *(tf.reshape(s, [rows, 1, 1, 1]) for s in (mean_R1, scale_R1)),
    ]
    results = [(of_rows, x_RC.dtype), *[(of_channels, weight_C.dtype)] * 2]
    dx, d_weight, d_bias = _norm("LAYER_BWD", eps, operands, results)
    return tf.reshape(dx, [rows, channels]), tf.reshape(d_weight, [-1]), tf.reshape(d_bias, [-1])


def _norm(kind: str, eps: float, operands: Sequence[tf.Tensor], results: Sequence) -> list:
    scratch = _NORM_SCRATCH + _NORM_SCRATCH_ROW * operands[0].shape[0]
    algorithm = {
        "algo_id": "0",
        "math_type": "TENSOR_OP_MATH",
        "tuning_knobs": {},
        "is_cudnn_frontend": True,
        "workspace_size": str(scratch),
    }
    config = {"epsilon": eps, "algorithm": algorithm, "kind": kind}
    return _call(
        "__cudnn$norm",
        {"cudnn_norm_backend_config": config},
        operands,
        results,
        f"tensor<{scratch}xui8>",
    )


def with_cudnn_norm(
    base: type[Operations], forward: bool = True, backward: bool = True, narrow: bool = False
) -> type[Operations]:
    """`base`, with norms from float32 to bfloat16 by cuDNN.

    `narrow`: the backward pass gets x and the weight in bfloat16. Else cuDNN's backward pass gets
    x as it is: twice the bytes, which stay in memory until then.
    """

    class CudnnNorm(base):
        def layer_norm(self, x, weight, bias, eps, dtype):
            known = x.shape.is_fully_defined()
            if not known or x.dtype != tf.float32 or tf.as_dtype(dtype) != tf.bfloat16:
                return super().layer_norm(x, weight, bias, eps, dtype)

            @tf.custom_gradient
            def apply(rows, weight, bias):
                return _layer_norm(rows, weight, bias, eps, forward, backward, narrow)

            normed = apply(tf.reshape(x, [-1, x.shape[-1]]), weight, bias)
            return tf.reshape(normed, tf.shape(x))

    return CudnnNorm


def _layer_norm(x, weight, bias, eps, forward: bool, backward: bool, narrow: bool):
    if forward:
        y, mean, scale = norm_forward(x, weight, bias, eps, tf.bfloat16)
    else:
        mean = tf.reduce_mean(x, -1, keepdims=True)
        square = tf.reduce_mean(tf.square(x), -1, keepdims=True)
        scale = tf.math.rsqrt(tf.maximum(square - tf.square(mean), 0.0) + eps)
        y = tf.cast((x - mean) * scale * weight + bias, tf.bfloat16)
    stored = x
    if narrow or not backward:
        y, stored = current().together(y, tf.cast(x, tf.bfloat16))

    def grad(dy):
        if backward:
            of = tf.cast(weight, stored.dtype)
            dx, d_weight, d_bias = norm_backward(current().again(stored), of, dy, mean, scale, eps)
            return [tf.cast(d, tf.float32) for d in (dx, d_weight, d_bias)]
        normed = (tf.cast(current().again(stored), tf.float32) - mean) * scale
        g = tf.cast(dy, tf.float32)
        gw = g * weight
        dx = scale * (
            gw
            - tf.reduce_mean(gw, -1, keepdims=True)
            - normed * tf.reduce_mean(gw * normed, -1, keepdims=True)
        )
        return dx, current().column_sum(g * normed), current().column_sum(g)

    return y, grad


LEVERS: dict[str, Callable[[type[Operations]], type[Operations]]] = {
    "cudnn norm": with_cudnn_norm,
    "cudnn norm narrow": functools.partial(with_cudnn_norm, narrow=True),
    "cudnn norm forward": functools.partial(with_cudnn_norm, backward=False),
    "cudnn norm backward": functools.partial(with_cudnn_norm, forward=False),
}


# -- cuBLASLt --------------------------------------------------------------------------------------


def switch_flags(flags: str) -> None:
    """Have XLA read `flags` now, for what this process compiles from here on; flags not named stay
    as they are. By XLA's own function, of which TensorFlow has no other name.

    Raises:
        RuntimeError: these libraries do not export it.
    """
    folder = Path(tf.__file__).parent
    for name in ("libtensorflow_framework.so.2", "libtensorflow_cc.so.2"):
        function = getattr(ctypes.CDLL(str(folder / name)), _READ_FLAGS, None)
        if function is not None:
            break
    else:
        raise RuntimeError(f"TensorFlow {tf.__version__} exports no {_READ_FLAGS}")
    before = os.environ.get("XLA_FLAGS")
    os.environ["XLA_FLAGS"] = flags
    try:
        function.argtypes, function.restype = [ctypes.c_bool], None
        function(True)
    finally:
        if before is None:
            del os.environ["XLA_FLAGS"]
        else:
            os.environ["XLA_FLAGS"] = before


_READ_FLAGS = "_ZN3xla28ParseDebugOptionFlagsFromEnvEb"  # xla::ParseDebugOptionFlagsFromEnv(bool)


def cublaslt_product(x_RI: tf.Tensor, weight_IO: tf.Tensor, bias_O: tf.Tensor) -> tf.Tensor:
    """x · weight + bias as the custom call that XLA makes of it under its flag."""
    (rows, inputs), outputs = x_RI.shape, weight_IO.shape[1]
    dimensions = {
        "lhs_contracting_dimensions": ["1"],
        "rhs_contracting_dimensions": ["0"],
        "lhs_batch_dimensions": [],
        "rhs_batch_dimensions": [],
    }
    config = {
        "alpha_real": 1,
        "alpha_imag": 0,
        "beta": 0,
        "dot_dimension_numbers": dimensions,
        "precision_config": {
            "operand_precision": ["DEFAULT", "DEFAULT"],
            "algorithm": "ALG_UNSET",
        },
        "epilogue": "BIAS",
        "lhs_stride": str(rows * inputs),
        "rhs_stride": str(inputs * outputs),
        "grad_x": False,
        "grad_y": False,
        "damax_output": False,
    }
    return _call(
        "__cublas$lt$matmul",
        {"gemm_backend_config": config},
        [x_RI, weight_IO, bias_O],
        [([rows, outputs], x_RI.dtype)],
        f"tensor<{_LT_SCRATCH}xi8>",
    )[0]
