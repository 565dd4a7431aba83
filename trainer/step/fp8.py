"""Matrix products of the GPT's blocks with FP8 operands, for XLA to hand to cuBLASLt.

Forward x and the weight are e4m3; backward the gradient is e5m2. Each tensor is multiplied by one
scale, a power of two, before it is rounded, and what does not fit saturates: neither format is ever
asked for an infinity, and NaN stays NaN. Scales come from outside (`trainer.step.scaling`), and the
largest magnitudes that they follow leave as the "gradient" of the scales.

XLA finds a product in FP8 where each operand is a conversion from FP8 times a scalar in the same
dtype, and cuBLASLt has kernels for rows · rowsᵀ alone. A power of two is exact in bfloat16, so what
is multiplied is exactly what was rounded. The weights are rounded where they are used: TensorFlow
2.21 keeps no variable of an FP8 type on a GPU.

Shapes: R rows, I inputs, O outputs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

import tensorflow as tf

from common.xtts.operations import Operations, current
from trainer.step.contract import PRODUCTS, Fp8

E4M3 = tf.dtypes.experimental.float8_e4m3fn
E5M2 = tf.dtypes.experimental.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def quantised(x: tf.Tensor, scale: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """x · `scale`, a power of two, rounded to the nearest number of `dtype`; the largest finite one
    for all beyond it.
    """
    scaled = x * tf.cast(scale, x.dtype)
    return tf.cast(tf.clip_by_value(scaled, -LARGEST[dtype], LARGEST[dtype]), dtype)


def dequantised(x8: tf.Tensor, scale: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Inverse of `quantised`, but for what was rounded; exact in bfloat16 and wider."""
    return tf.cast(x8, dtype) * tf.cast(1 / scale, dtype)


@dataclass(frozen=True)
class Scaled:
    """What a product in FP8 needs beside x and the bias.

    Args:
        weight: [I, O] as the optimizer keeps it.
        scales: float32 [3], of x, the weight and the gradient.
    """

    weight: tf.Tensor
    scales: tf.Tensor
    fp8: Fp8


def scaled_layers(
    blocks: Sequence, weights: Mapping[int, tf.Tensor], scales: tf.Tensor, fp8: Fp8
) -> dict[int, Scaled]:
    """What each product in FP8 needs, by the `id` of its layer.

    Args:
        weights: by the `id` of the variable.
        scales: [blocks, products, 3].
    """
    found = {}
    for block, of_block in zip(blocks, tf.unstack(scales), strict=True):
        for name, own in zip(PRODUCTS, tf.unstack(of_block), strict=True):
            layer = block.projections[name]
            if name in fp8.products:
                found[id(layer)] = Scaled(weights[id(layer.weight)], own, fp8)
    return found


_scaled: ContextVar[Mapping[int, Scaled] | None] = ContextVar("scaled", default=None)


@contextlib.contextmanager
def scaled(by_layer: Mapping[int, Scaled]) -> Iterator[None]:
    """Inside the block, the layers of these `id`s compute in FP8 where the operations in force are
    those of `in_fp8`.
    """
    token = _scaled.set(by_layer)
    try:
        yield
    finally:
        _scaled.reset(token)


@functools.cache
def in_fp8(base: type[Operations]) -> type[Operations]:
    """`base`, with the products of `scaled` layers in FP8."""

    class InFp8(base):
        def project(self, x, projection):
            if (of := _of(projection)) is None:
                return super().project(x, projection)
            return _products(x, projection.matrix_and_bias()[1], of)[0]

        def qkv(self, x, projection, packing):
            if (of := _of(projection)) is None:
                return super().qkv(x, projection, packing)
            parts = _products(x, projection.matrix_and_bias()[1], of, packing.split, packing.join)
            return [tf.reshape(p, [*p.shape[:-1], packing.heads, -1]) for p in parts]

    InFp8.__name__ = InFp8.__qualname__ = f"{base.__name__}InFp8"
    return InFp8


def _of(layer) -> Scaled | None:
    return (_scaled.get() or {}).get(id(layer))


def _products(
    x: tf.Tensor,
    bias_O: tf.Tensor,
    of: Scaled,
    split: Callable = lambda y: [y],
    join: Callable = lambda parts: parts[0],
) -> list[tf.Tensor]:
    """x [..., I] · weight + bias, in the parts that `split` makes of the outputs; `join` is its
    inverse.
    """

    @tf.custom_gradient
    def apply(rows_RI, weight_IO, bias_O, scales):
        dtype, (of_x, of_weight, of_gradient) = rows_RI.dtype, tf.unstack(scales)
        rows8 = quantised(rows_RI, of_x, E4M3)
        largest_x = _largest(tf.reduce_max(tf.abs(rows_RI), 1))
        outputs, parts8 = [], split(quantised(weight_IO, of_weight, E4M3))
        for part8, bias in zip(parts8, split(bias_O), strict=True):
            part8_OI = tf.transpose(part8)
            # `after`: XLA would merge products that share an operand.
            own8 = current().after(rows8, part8_OI) if len(parts8) > 1 else rows8
            left, right = dequantised(own8, of_x, dtype), dequantised(part8_OI, of_weight, dtype)
            outputs.append(tf.nn.bias_add(tf.matmul(left, right, transpose_b=True), bias))
        if widened and len(outputs) == 1:
            # Or XLA makes GELU the end of this product: then rounding it is a pass of its own.
            outputs = [current().again(outputs[0])]

        def grad(*d_outputs):
            d_RO = join(d_outputs)
            d_bias, largest_d = _sum_and_largest(d_RO, widened)
            d8 = quantised(d_RO, of_gradient, E5M2)
            d, weight = d_RO, tf.cast(weight_IO, dtype)
            if of.fp8.dgrad:
                weight = dequantised(quantised(weight_IO, of_weight, E4M3), of_weight, dtype)
                d = dequantised(d8, of_gradient, dtype)
            d_rows = tf.matmul(d, weight, transpose_b=True)
            left, right = rows_RI, d_RO
            if of.fp8.wgrad:
                left, right = dequantised(rows8, of_x, dtype), dequantised(d8, of_gradient, dtype)
            d_weight = tf.cast(tf.matmul(left, right, transpose_a=True), weight_IO.dtype)
            largest_weight = _largest(tf.reduce_max(tf.abs(weight_IO), 1))
            return d_rows, d_weight, d_bias, tf.stack([largest_x, largest_weight, largest_d])

        return outputs, grad

    widened = of.weight.shape[1] > of.weight.shape[0]
    rows = tf.reshape(x, [-1, x.shape[-1]])
    parts = apply(rows, of.weight, bias_O, of.scales)
    return [tf.reshape(p, [*x.shape[:-1], p.shape[-1]]) for p in parts]


def _largest(along: tf.Tensor) -> tf.Tensor:
    """The largest of maxima, float32. Behind a barrier: XLA would make one maximum of two, in a
    pass of its own.
    """
    return tf.cast(tf.reduce_max(current().again(along)), tf.float32)


def _sum_and_largest(d_RO: tf.Tensor, widened: bool) -> tuple[tf.Tensor, tf.Tensor]:
    """A bias' gradient and the largest magnitude, cut into the same pieces, so that one pass can
    make both; `widened` as in `Operations.add_bias`.
    """
    if widened:
        ops = current()
        return ops.column_sum(d_RO), _largest(ops.column_max(d_RO))
    return tf.reduce_sum(d_RO, 0), _largest(tf.reduce_max(tf.abs(d_RO), 0))
