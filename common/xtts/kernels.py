"""Which implementation of an operation a network is traced with: the plain ones everywhere, or the
ones made for XLA on a GPU.

The plain ones are the definition. The others compute the same function and differ in what they
cost: they keep for the backward pass only what it cannot recompute inside a fusion, and reduce in
an order that XLA has fast code for. Their gradients are written out. The choice is in force while a
function is traced (`with use(kernels):`), so that no constructor has to hand it down.

Shapes: B batch, T time, C channels, G groups.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops


@dataclass(frozen=True)
class Kernels:
    """`PLAIN` is the default; `FAST` is for bfloat16 on GPUs."""

    attention: Literal["plain", "cudnn"] = "plain"
    dropout: Literal["stateless", "hash"] = (
        "stateless"  # TensorFlow's generator, or a hash of each element's index
    )
    # norms, GELU and cross-entropy with written-out gradients; heads padded to whole tiles
    lean: bool = False
    embedding_grad: Literal["matmul", "scatter"] = (
        "matmul"  # a scatter's order, and so its bits, vary on GPUs
    )
    # gradients of biases and norms summed in as many pieces as a GPU runs at once, not in XLA's
    # many short ones
    long_sums: bool = False
    # queries, keys and values by three products forward: fused attention wants them apart in memory
    split_qkv: bool = False
    wide_residual: bool = (
        False  # the residual stream and its gradient in float32, as PyTorch's autocast leaves them
    )
    jit: bool = False  # the function is compiled by XLA


PLAIN = Kernels()
FAST = Kernels(
    attention="cudnn",
    dropout="hash",
    lean=True,
    embedding_grad="scatter",
    long_sums=True,
    split_qkv=True,
    wide_residual=True,
    jit=True,
)

_current: ContextVar[Kernels] = ContextVar("kernels", default=PLAIN)


def current() -> Kernels:
    """The choice in force."""
    return _current.get()


@contextlib.contextmanager
def use(kernels: Kernels) -> Iterator[None]:
    """Trace with `kernels` inside the block; gradients taken inside it too."""
    token = _current.set(kernels)
    try:
        yield
    finally:
        _current.reset(token)


def after(x: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """`x`, as a value that is not there before `other` is."""
    if current().jit:
        return gen_xla_ops.xla_optimization_barrier([x, other])[0]
    with tf.control_dependencies([other]):
        return tf.identity(x)


def again(x: tf.Tensor) -> tf.Tensor:
    """`x`, as another value in XLA's eyes.

    What the backward pass computes again from it is not merged with what the forward pass had,
    which would be kept, often wider than `x`, in memory between them.
    """
    return gen_xla_ops.xla_optimization_barrier([x])[0] if current().jit else x


def together(*xs: tf.Tensor) -> list[tf.Tensor]:
    """`xs`, none of which is there before all are."""
    return gen_xla_ops.xla_optimization_barrier(list(xs)) if current().jit else list(xs)


# -- dropout ---------------------------------------------------------------------------------------


def kept(shape: tuple[int, ...], rate: float, seed: tf.Tensor) -> tf.Tensor:
    """A bool mask of a static shape, True with probability 1 - rate: a pure function of `seed`
    int32[2] and the shape, in integer
    arithmetic alone, so the same bits on every device and in every compile mode.

    Each element hashes its own index (the mixer `triple32` of Wellons' hash prospector, one key
    before and one between its rounds): XLA computes it where the mask is used and stores nothing,
    while a counter-based generator writes its numbers to memory first.
    """
    size = 1
    for dim in shape:
        size *= dim
    if size >= 2**32:
        raise ValueError(f"dropout mask of {size} elements: the hash tells only 2^32 apart")
    row_len = shape[-1]
    rows = tf.range(size // row_len, dtype=tf.int32)[:, tf.newaxis] * row_len
    # Two short ranges, broadcast: one long one would be folded into a constant of the mask's size.
    x = tf.bitcast(rows + tf.range(row_len, dtype=tf.int32)[tf.newaxis, :], tf.uint32)
    first, second = tf.unstack(tf.bitcast(seed, tf.uint32))
    x = _mix(x + first, 17, 0xED5AD4BB)
    x = _mix(x, 11, 0xAC4C1B51)
    x = _mix(x ^ second, 15, 0x31848BAB)
    x = tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, tf.constant(14, tf.uint32)))
    return tf.reshape(x >= tf.constant(min(round(rate * 2**32), 2**32 - 1), tf.uint32), shape)


def _mix(x: tf.Tensor, shift: int, factor: int) -> tf.Tensor:
    return tf.bitwise.bitwise_xor(
        x, tf.bitwise.right_shift(x, tf.constant(shift, tf.uint32))
    ) * tf.constant(factor, tf.uint32)


def hash_dropout(x: tf.Tensor, rate: float, seed: tf.Tensor) -> tf.Tensor:
    """Dropout whose mask is computed again in the backward pass."""
    shape = tuple(x.shape)

    @tf.custom_gradient
    def apply(x):
        def masked(y):
            return tf.where(
                kept(shape, rate, seed), y * tf.cast(1 / (1 - rate), y.dtype), tf.zeros([], y.dtype)
            )

        return masked(x), masked

    return apply(x)


# -- norms, activation -----------------------------------------------------------------------------


def layer_norm(
    x: tf.Tensor, weight: tf.Tensor, bias: tf.Tensor, eps: float, dtype: tf.DType
) -> tf.Tensor:
    """As `layers.LayerNorm`: x [..., C] any float dtype, weight and bias float32 [C] -> `dtype`.

    Keeps x and two numbers per position.
    """
    # A closure: custom_gradient would turn a Python number among its arguments into a tensor. Two
    # axes: over more leading ones, XLA transposes before it sums up the gradients of weight and
    # bias.
    rows = tf.reshape(x, [-1, x.shape[-1]])
    normed = tf.custom_gradient(lambda x, weight, bias: _layer_norm(x, weight, bias, eps, dtype))(
        rows, weight, bias
    )
    return tf.reshape(normed, tf.shape(x))


def _layer_norm(x, weight, bias, eps, dtype):
    wide = tf.cast(x, tf.float32)
    # Both sums in one pass over x. What cancels between them is small: the mean over channels is,
    # beside their spread.
    mean, square = (
        tf.reduce_mean(wide, -1, keepdims=True),
        tf.reduce_mean(tf.square(wide), -1, keepdims=True),
    )
    scale = tf.math.rsqrt(tf.maximum(square - tf.square(mean), 0.0) + eps)
    y, kept = tf.cast((wide - mean) * scale * weight + bias, dtype), x
    if dtype.size < x.dtype.size:
        # Half of a wide residual stream is enough here: what is rounded away does not reach the
        # stream's own gradient. Behind one barrier, as XLA would keep all of it and round in the
        # backward pass.
        y, kept = together(y, tf.cast(x, dtype))

    def grad(dy):
        normed = (tf.cast(again(kept), tf.float32) - mean) * scale
        g = tf.cast(dy, tf.float32)
        gw = g * weight
        dx = scale * (
            gw
            - tf.reduce_mean(gw, -1, keepdims=True)
            - normed * tf.reduce_mean(gw * normed, -1, keepdims=True)
        )
        return tf.cast(dx, x.dtype), column_sum(g * normed), column_sum(g)

    return y, grad


def group_norm(
    x: tf.Tensor, weight: tf.Tensor, bias: tf.Tensor, groups: int, eps: float
) -> tf.Tensor:
    """As `layers.GroupNorm`: x [B, T, C], weight and bias float32 [C].

    Sums go over time first, per channel, then over a group's few channels: XLA has no fast code for
    both axes at once.
    """
    return tf.custom_gradient(lambda x, weight, bias: _group_norm(x, weight, bias, groups, eps))(
        x, weight, bias
    )


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
        normed = (tf.cast(again(x), tf.float32) - mean) * scale
        g = tf.cast(dy, tf.float32)
        # Behind a barrier: from a sum of sums XLA makes one sum over both axes, and reads
        # everything once more for it.
        sum_g, sum_gx = again(tf.reduce_sum(g, 1)), again(tf.reduce_sum(g * normed, 1))  # [B, C]
        dx = scale * (g * weight - spread(sum_g * weight) - normed * spread(sum_gx * weight))
        return tf.cast(dx, x.dtype), tf.reduce_sum(sum_gx, 0), tf.reduce_sum(sum_g, 0)

    return tf.cast((wide - mean) * scale * weight + bias, x.dtype), grad


_GELU_A, _GELU_B = 0.7978845608028654, 0.044715  # sqrt(2 / pi)


@tf.custom_gradient
def gelu_tanh(x: tf.Tensor):
    """GELU in the tanh approximation; its slope in float32. Keeps x alone.

    Written in x's dtype, over two axes and in this very order of operations: so XLA sees it, and
    computes it, in float32, at the end of the matrix product that made x. (Over three, cuBLASLt's
    product would run twice, once for x and once for its GELU.)
    """
    rows = tf.reshape(x, [-1, x.shape[-1]])
    half, one, a, b = (tf.constant(value, x.dtype) for value in (0.5, 1.0, _GELU_A, _GELU_B))

    def grad(dy):
        wide = tf.cast(again(x), tf.float32)
        square = tf.square(wide)
        tanh = tf.tanh(_GELU_A * wide * (1 + _GELU_B * square))
        slope = 0.5 * (1 + tanh) + 0.5 * wide * (1 - tf.square(tanh)) * _GELU_A * (
            1 + 3 * _GELU_B * square
        )
        return tf.cast(tf.cast(dy, tf.float32) * slope, x.dtype)

    y = rows * (half * (one + tf.tanh(a * (rows + b * (rows * (rows * rows))))))
    return tf.reshape(y, tf.shape(x)), grad


# -- sums over rows --------------------------------------------------------------------------------

_BLOCKS, _BLOCK_COLUMNS, _BLOCK_ROWS = (
    256,
    128,
    4096,
)  # two blocks per multiprocessor of an H100; what XLA lets one of them add up


def column_sum(x_RC: tf.Tensor) -> tf.Tensor:
    """Sum over the rows, [C] in x's dtype, added up in float32 at least; with `long_sums` first
    each piece of rows, then their sums.

    XLA alone cuts R rows into about √R pieces: 864 blocks of 120 rows for 12960 x 1024, which read
    1.9 TB/s on an H200 where the 256 blocks of 517 rows of a group norm's sums read 3.0.
    """
    num_rows, num_columns = x_RC.shape
    pieces = (
        _pieces(num_rows, num_columns)
        if current().long_sums and x_RC.shape.is_fully_defined()
        else 1
    )
    if pieces == 1:
        return tf.reduce_sum(x_RC, 0)
    wide = tf.cast(x_RC, tf.float32) if x_RC.dtype == tf.bfloat16 else x_RC
    # Behind a barrier: XLA makes one sum of two.
    of_pieces = again(tf.reduce_sum(tf.reshape(wide, [pieces, num_rows // pieces, num_columns]), 1))
    return tf.cast(tf.reduce_sum(of_pieces, 0), x_RC.dtype)


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


def add_bias(y_RC: tf.Tensor, bias_C: tf.Tensor) -> tf.Tensor:
    """y + bias; the bias' gradient by `column_sum`."""

    @tf.custom_gradient
    def apply(y, bias):
        return tf.nn.bias_add(y, bias), lambda d: (d, column_sum(d))

    return apply(y_RC, bias_C)


# -- products --------------------------------------------------------------------------------------


def padded_sum(parts: list[tf.Tensor], axis: int) -> tf.Tensor:
    """`tf.concat`, as a sum of padded parts: XLA can fuse it with a sum over rows of the same."""
    sizes = [part.shape[axis] for part in parts]
    out = None
    for i, part in enumerate(parts):
        padding = [[0, 0]] * part.shape.rank
        padding[axis] = [sum(sizes[:i]), sum(sizes[i + 1 :])]
        padded = tf.pad(part, padding)
        out = padded if out is None else out + padded
    return out


def affine_parts(
    x: tf.Tensor, weight: tf.Tensor, bias: tf.Tensor, split: Callable, join: Callable
) -> list[tf.Tensor]:
    """`split(x weight + bias)` along the last axis, each part by a product of its own; the
    gradients by one product for all of them.

    x [..., in]; weight [in, out]; `split` takes [..., out] to a list, `join` is its inverse.
    """

    @tf.custom_gradient
    def apply(rows, weight, bias):
        def grad(*d_parts):
            d = join(d_parts)
            return (
                tf.matmul(d, weight, transpose_b=True),
                tf.matmul(rows, d, transpose_a=True),
                column_sum(d),
            )

        # `after`: XLA would merge products that share an operand.
        return [
            tf.nn.bias_add(tf.matmul(after(rows, w), w), b)
            for w, b in zip(split(weight), split(bias), strict=True)
        ], grad

    parts = apply(tf.reshape(x, [-1, x.shape[-1]]), weight, bias)
    return [tf.reshape(part, [*x.shape[:-1], part.shape[-1]]) for part in parts]


# -- embedding, cross-entropy ----------------------------------------------------------------------


@tf.custom_gradient
def lookup_scatter(table_VC: tf.Tensor, ids: tf.Tensor):
    """As `layers.lookup`; the gradient adds rows up in float32, in no fixed order."""

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


def cross_entropy_sum(
    logits: tf.Tensor, targets: tf.Tensor, weights: tf.Tensor, num_classes: int
) -> tf.Tensor:
    """Σ weights · −log softmax(logits)[targets], scalar float32, over logits [..., V] of any float
    dtype.

    targets int32[...] in [0, num_classes), weights float32[...]; classes from num_classes to V are
    padding. One number per position is kept beside the logits, and the gradient comes in their
    dtype.
    """

    @tf.custom_gradient
    def summed(logits):
        classes = tf.range(logits.shape[-1])
        is_target = classes == targets[..., tf.newaxis]

        def wide(logits):
            x = tf.cast(logits, tf.float32)
            return (
                x if num_classes == logits.shape[-1] else tf.where(classes < num_classes, x, -1e30)
            )

        x = wide(logits)
        top = tf.reduce_max(x, -1, keepdims=True)
        log_sum = tf.math.log(tf.reduce_sum(tf.exp(x - top), -1, keepdims=True)) + top
        picked = tf.reduce_sum(tf.where(is_target, x, 0.0), -1)

        def grad(d_sum):
            p = tf.exp(wide(again(logits)) - log_sum)
            return tf.cast(
                (p - tf.cast(is_target, tf.float32)) * (weights * d_sum)[..., tf.newaxis],
                logits.dtype,
            )

        return tf.reduce_sum((log_sum[..., 0] - picked) * weights), grad

    return summed(logits)
