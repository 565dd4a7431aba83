"""The operations made for bfloat16 on GPUs, compiled by XLA: the same functions as the plain ones.

They keep for the backward pass only what it cannot recompute inside a fusion, and reduce in an
order that XLA has fast code for. Their gradients are written out.

Shapes: B batch, T time, C channels, G groups, R rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from common.xtts.dropout_mask import kept
from common.xtts.fused_attention import fits, fused_attention
from common.xtts.operations import Operations, current, mixed, statistics_dtype
from common.xtts.shaping import Packing, split_heads


@dataclass(frozen=True)
class FastOperations(Operations):
    """See `Operations` for what each computes."""

    # Matrix products over 1026 or 6681 classes run on kernels for odd sizes.
    class_tile = 64

    # -- norms, activation, dropout ----------------------------------------------------------------

    def layer_norm(self, x, weight, bias, eps, dtype):
        """Keeps x and two numbers per position."""

        # A closure: custom_gradient would turn a Python number among its arguments into a tensor.
        # Two axes: over more leading ones, XLA transposes before it sums up the gradients of weight
        # and bias.
        @tf.custom_gradient
        def apply(rows, weight, bias):
            return _layer_norm(rows, weight, bias, eps, tf.as_dtype(dtype))

        normed = apply(tf.reshape(x, [-1, x.shape[-1]]), weight, bias)
        return tf.reshape(normed, tf.shape(x))

    def group_norm(self, x, weight, bias, groups, eps):
        """Sums go over time first, per channel, then over a group's few channels: XLA has no fast
        code for both axes at once.
        """

        @tf.custom_gradient
        def apply(x, weight, bias):
            return _group_norm(x, weight, bias, groups, eps)

        return apply(x, weight, bias)

    def gelu_tanh(self, x):
        """Its slope in float32. Keeps x alone."""
        return _gelu_tanh(x)

    def dropout(self, x, rate, seed):
        """The mask is a hash of each element's index, computed again in the backward pass."""
        if seed is None or rate == 0.0:
            return x
        shape = tuple(x.shape)

        @tf.custom_gradient
        def apply(x):
            def masked(y):
                return tf.where(
                    kept(shape, rate, seed),
                    y * tf.cast(1 / (1 - rate), y.dtype),
                    tf.zeros([], y.dtype),
                )

            return masked(x), masked

        return apply(x)

    def residual_dtype(self, x):
        """float32, for its gradient too, as PyTorch's autocast leaves them."""
        return statistics_dtype(x)

    # -- products ----------------------------------------------------------------------------------

    def add_bias(self, y_RC, bias_C, widened):
        """The bias' gradient by `column_sum`.

        What does not widen is followed by dropout in the GPT: XLA sums the gradient up where it
        applies the mask, but not by pieces.
        """
        if not widened:
            return tf.nn.bias_add(y_RC, bias_C)

        @tf.custom_gradient
        def apply(y, bias):
            return tf.nn.bias_add(y, bias), lambda d: (d, current().column_sum(d))

        return apply(y_RC, bias_C)

    def column_sum(self, x_RC):
        """Added up in float32 at least: first each piece of rows, then their sums.

        XLA alone cuts R rows into about √R pieces: 864 blocks of 120 rows for 12960 x 1024, which
        read 1.9 TB/s on an H200 where the 256 blocks of 517 rows of a group norm's sums read 3.0.
        """
        num_rows, num_columns = x_RC.shape
        pieces = _pieces(num_rows, num_columns) if x_RC.shape.is_fully_defined() else 1
        if pieces == 1:
            return tf.reduce_sum(x_RC, 0)
        wide = tf.cast(x_RC, tf.float32) if x_RC.dtype == tf.bfloat16 else x_RC
        # Behind a barrier: XLA makes one sum of two.
        of_pieces = current().again(
            tf.reduce_sum(tf.reshape(wide, [pieces, num_rows // pieces, num_columns]), 1)
        )
        return tf.cast(tf.reduce_sum(of_pieces, 0), x_RC.dtype)

    def column_max(self, x_RC):
        """By the same pieces as `column_sum`: XLA then makes both in one pass."""
        num_rows, num_columns = x_RC.shape
        pieces = _pieces(num_rows, num_columns) if x_RC.shape.is_fully_defined() else 1
        if pieces == 1:
            return tf.reduce_max(tf.abs(x_RC), 0)
        cut = tf.reshape(tf.abs(x_RC), [pieces, num_rows // pieces, num_columns])
        return tf.reduce_max(current().again(tf.reduce_max(cut, 1)), 0)

    def qkv(self, x, projection, packing: Packing):
        """Three products forward, as fused attention wants its operands apart in memory; the
        gradients by one product for all three.
        """
        weight, bias = projection.matrix_and_bias()
        parts = _affine_parts(x, weight, bias, packing)
        return [split_heads(part, packing.heads) for part in parts]

    # -- attention ---------------------------------------------------------------------------------

    def attention(
        self, q_BTHD, k_BSHD, v_BSHD, *, mask=None, dropout_rate=0.0, seed=None, normalised=False
    ):
        """cuDNN's fused kernel where it fits and nothing is masked or dropped.

        Only for `normalised` operands: its backward pass computes the scores again, and has no
        answer to huge ones.
        """
        drops = seed is not None and dropout_rate != 0.0
        if normalised and mask is None and not drops and fits(q_BTHD, k_BSHD):
            return fused_attention(q_BTHD, k_BSHD, v_BSHD, causal=False)
        return Operations.attention(
            self, q_BTHD, k_BSHD, v_BSHD, mask=mask, dropout_rate=dropout_rate, seed=seed
        )

    def causal_attention(
        self, q_BTHD, k_BTHD, v_BTHD, *, dropout_rate=0.0, seed=None, key_mask_BT=None
    ):
        """cuDNN's fused kernel where it fits and nothing but causality masks or drops."""
        drops = seed is not None and dropout_rate != 0.0
        if key_mask_BT is None and not drops and fits(q_BTHD, k_BTHD):
            return fused_attention(q_BTHD, k_BTHD, v_BTHD, causal=True)
        return Operations.causal_attention(
            self,
            q_BTHD,
            k_BTHD,
            v_BTHD,
            dropout_rate=dropout_rate,
            seed=seed,
            key_mask_BT=key_mask_BT,
        )

    # -- embedding, cross-entropy ------------------------------------------------------------------

    def lookup(self, table_VC, ids, dtype):
        """In the table's dtype; the gradient adds rows up in float32, in no fixed order."""
        return _lookup(table_VC, ids)

    def cross_entropy_sum(self, logits, targets, weights, num_classes):
        """One number per position is kept beside the logits, and the gradient comes in their
        dtype.
        """

        @tf.custom_gradient
        def summed(logits):
            return _cross_entropy_sum(logits, targets, weights, num_classes)

        return summed(logits)


def _layer_norm(x, weight, bias, eps, dtype):
    wide = tf.cast(x, tf.float32)
    # Both sums in one pass over x. What cancels between them is small: the mean over channels is,
    # beside their spread.
    mean, square = (
        tf.reduce_mean(wide, -1, keepdims=True),
        tf.reduce_mean(tf.square(wide), -1, keepdims=True),
    )
    scale = tf.math.rsqrt(tf.maximum(square - tf.square(mean), 0.0) + eps)
    y, stored = tf.cast((wide - mean) * scale * weight + bias, dtype), x
    if dtype.size < x.dtype.size:
        # Half of a wide residual stream is enough here: what is rounded away does not reach the
        # stream's own gradient. Behind one barrier, as XLA would keep all of it and round in the
        # backward pass.
        y, stored = current().together(y, tf.cast(x, dtype))

    def grad(dy):
        normed = (tf.cast(current().again(stored), tf.float32) - mean) * scale
        g = tf.cast(dy, tf.float32)
        gw = g * weight
        dx = scale * (
            gw
            - tf.reduce_mean(gw, -1, keepdims=True)
            - normed * tf.reduce_mean(gw * normed, -1, keepdims=True)
        )
        column_sum = current().column_sum
        return tf.cast(dx, x.dtype), column_sum(g * normed), column_sum(g)

    return y, grad


def _group_norm(x, weight, bias, groups, eps):
    _, num_frames, num_channels = x.shape

    def spread(per_channel_BC):
        """Means over (time, a group's channels) of what was summed over time, handed back to each
        channel: [B, C] -> [B, 1, C].
        """
        grouped = tf.reshape(per_channel_BC, [-1, groups, num_channels // groups])
        means = tf.reduce_sum(grouped, -1, keepdims=True) / (num_frames * num_channels // groups)
        return tf.reshape(tf.broadcast_to(means, tf.shape(grouped)), [-1, 1, num_channels])

    wide = tf.cast(x, tf.float32)
    mean, square = spread(tf.reduce_sum(wide, 1)), spread(tf.reduce_sum(tf.square(wide), 1))
    scale = tf.math.rsqrt(tf.maximum(square - tf.square(mean), 0.0) + eps)

    def grad(dy):
        normed = (tf.cast(current().again(x), tf.float32) - mean) * scale
        g = tf.cast(dy, tf.float32)
        # Behind a barrier: from a sum of sums XLA makes one sum over both axes, and reads
        # everything once more for it.
        again = current().again
        sum_g, sum_gx = again(tf.reduce_sum(g, 1)), again(tf.reduce_sum(g * normed, 1))  # [B, C]
        dx = scale * (g * weight - spread(sum_g * weight) - normed * spread(sum_gx * weight))
        return tf.cast(dx, x.dtype), tf.reduce_sum(sum_gx, 0), tf.reduce_sum(sum_g, 0)

    return tf.cast((wide - mean) * scale * weight + bias, x.dtype), grad


_GELU_A, _GELU_B = 0.7978845608028654, 0.044715  # sqrt(2 / pi)


@tf.custom_gradient
def _gelu_tanh(x: tf.Tensor):
    # Written in x's dtype, over two axes and in this very order of operations: so XLA sees it, and
    # computes it, in float32, at the end of the matrix product that made x. (Over three,
    # cuBLASLt's product would run twice, once for x and once for its GELU.)
    rows = tf.reshape(x, [-1, x.shape[-1]])
    half, one, a, b = (tf.constant(value, x.dtype) for value in (0.5, 1.0, _GELU_A, _GELU_B))

    def grad(dy):
        wide = tf.cast(current().again(x), tf.float32)
        square = tf.square(wide)
        tanh = tf.tanh(_GELU_A * wide * (1 + _GELU_B * square))
        slope = 0.5 * (1 + tanh) + 0.5 * wide * (1 - tf.square(tanh)) * _GELU_A * (
            1 + 3 * _GELU_B * square
        )
        return tf.cast(tf.cast(dy, tf.float32) * slope, x.dtype)

    y = rows * (half * (one + tf.tanh(a * (rows + b * (rows * (rows * rows))))))
    return tf.reshape(y, tf.shape(x)), grad


# Two blocks per multiprocessor of an H100; what XLA lets one of them add up.
_BLOCKS, _BLOCK_COLUMNS, _BLOCK_ROWS = 256, 128, 4096


def _pieces(num_rows: int, num_columns: int) -> int:
    """The divisor of `num_rows` that comes closest, as a ratio, to one wave of blocks; 1 where none
    is near.
    """
    wanted = max(1.0, _BLOCKS * _BLOCK_COLUMNS / num_columns)
    near = [
        n
        for n in range(1, int(4 * wanted) + 1)
        if num_rows % n == 0 and num_rows <= n * _BLOCK_ROWS
    ]
    return min(near, key=lambda n: abs(math.log(n / wanted)), default=1)


def _affine_parts(x, weight, bias, packing: Packing) -> list[tf.Tensor]:
    """The channels of q, k and v, each [..., C], from x [..., in], weight [in, 3·C]."""

    @tf.custom_gradient
    def apply(rows, weight, bias):
        def grad(*d_parts: Sequence[tf.Tensor]):
            d = packing.join(d_parts)
            return (
                tf.matmul(d, weight, transpose_b=True),
                tf.matmul(rows, d, transpose_a=True),
                current().column_sum(d),
            )

        # `after`: XLA would merge products that share an operand.
        return [
            tf.nn.bias_add(tf.matmul(current().after(rows, w), w), b)
            for w, b in zip(packing.split(weight), packing.split(bias), strict=True)
        ], grad

    parts = apply(tf.reshape(x, [-1, x.shape[-1]]), weight, bias)
    return [tf.reshape(part, [*x.shape[:-1], part.shape[-1]]) for part in parts]


@tf.custom_gradient
def _lookup(table_VC: tf.Tensor, ids: tf.Tensor):

    def grad(d_out):
        num_ids, width = table_VC.shape
        rows = tf.reshape(tf.cast(d_out, tf.float32), [-1, width])
        return (
            tf.cast(
                tf.math.unsorted_segment_sum(rows, tf.reshape(ids, [-1]), num_ids), table_VC.dtype
            ),
            None,
        )

    return tf.gather(table_VC, ids), grad


def _cross_entropy_sum(logits, targets, weights, num_classes):
    classes = tf.range(logits.shape[-1])
    is_target = classes == targets[..., tf.newaxis]

    def wide(logits):
        x = tf.cast(logits, tf.float32)
        return x if num_classes == logits.shape[-1] else tf.where(classes < num_classes, x, -1e30)

    x = wide(logits)
    top = tf.reduce_max(x, -1, keepdims=True)
    log_sum = tf.math.log(tf.reduce_sum(tf.exp(x - top), -1, keepdims=True)) + top
    picked = tf.reduce_sum(tf.where(is_target, x, 0.0), -1)

    def grad(d_sum):
        p = tf.exp(wide(current().again(logits)) - log_sum)
        return tf.cast(
            (p - tf.cast(is_target, tf.float32)) * (weights * d_sum)[..., tf.newaxis],
            logits.dtype,
        )

    return tf.reduce_sum((log_sum[..., 0] - picked) * weights), grad


FAST = FastOperations(jit=True)


def fast_but(*plain: str) -> FastOperations:
    """`FAST` with the plain form of the named operations."""
    return mixed(FastOperations, Operations, *plain)(jit=True) if plain else FAST
