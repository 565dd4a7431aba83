"""The operations that networks are made of, in two sets: plain ones here, those for bfloat16 on
GPUs in `fast_operations`.

The plain set is the definition. The fast one computes the same functions and differs in what they
cost. A set is chosen once (`trainer.step.precision`) and is in force while a function is traced
(`with use(operations):`), so no constructor has to pass it on. Layers call
`current().layer_norm(...)` and do not ask which set that is.

Shapes: B batch, T time, S key time, H heads, D head width, C channels, G groups, V classes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

from common.xtts.shaping import Packing, dims_of


def statistics_dtype(x: tf.Tensor) -> tf.DType:
    """The dtype for means, variances, norms and softmax of `x`: float64 stays, all else
    is float32.
    """
    return tf.float64 if x.dtype == tf.float64 else tf.float32


@dataclass(frozen=True)
class Operations:
    """The plain operations.

    Args:
        jit: whether XLA compiles what is traced with them.
        products: whether convolutions are matrix products. cuDNN's kernels for one are compiled and
            timed against each other for seconds per shape, and its untimed choice is slow (stage
            1's step: 886 ms for 67 on an H200).
    """

    jit: bool = False
    products: bool = False
    # Heads pad their classes to a multiple of this.
    class_tile: ClassVar[int] = 1

    # -- order and identity, as XLA sees them ------------------------------------------------------

    def after(self, x: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
        """`x`, computed only after `other`."""
        if self.jit:
            return gen_xla_ops.xla_optimization_barrier([x, other])[0]
        with tf.control_dependencies([other]):
            return tf.identity(x)

    def again(self, x: tf.Tensor) -> tf.Tensor:
        """`x`, as a value that XLA takes for another.

        Keeps XLA from merging what the backward pass recomputes from it with values of the forward
        pass, which would then stay in memory, often wider than `x`.
        """
        return gen_xla_ops.xla_optimization_barrier([x])[0] if self.jit else x

    def together(self, *xs: tf.Tensor) -> list[tf.Tensor]:
        """`xs`, none of which can be used before all are computed."""
        return gen_xla_ops.xla_optimization_barrier(list(xs)) if self.jit else list(xs)

    def for_each_row(self, x_LC: tf.Tensor, num_rows) -> tf.Tensor:
        """[L, C] -> [B, L, C], the same for each of B = `num_rows` rows."""
        if not self.jit:
            return tf.broadcast_to(x_LC, [num_rows, *x_LC.shape])
        # An exact product with stacked identities. From a broadcast, XLA concludes that the batch
        # should be innermost in memory, here and in the rest of the network, and every matrix
        # product then needs a transpose.
        length, width = x_LC.shape
        copies = tf.tile(tf.eye(length, dtype=x_LC.dtype), [num_rows, 1])
        return tf.reshape(tf.matmul(copies, x_LC), [num_rows, length, width])

    # -- norms, activation, dropout ----------------------------------------------------------------

    def layer_norm(
        self, x: tf.Tensor, weight: tf.Tensor, bias: tf.Tensor, eps: float, dtype: tf.DType
    ) -> tf.Tensor:
        """Normalise x [..., C] of any float dtype over its last axis; weight, bias [C] -> `dtype`.

        Statistics are at least float32.
        """
        wide = tf.cast(x, statistics_dtype(x))
        centred = wide - tf.reduce_mean(wide, -1, keepdims=True)
        scale = tf.math.rsqrt(tf.reduce_mean(tf.square(centred), -1, keepdims=True) + eps)
        return tf.cast(centred * scale * weight + bias, dtype)

    def group_norm(
        self, x: tf.Tensor, weight: tf.Tensor, bias: tf.Tensor, groups: int, eps: float
    ) -> tf.Tensor:
        """Normalise x [B, T, C] over (all T, C/groups neighbouring channels); weight, bias [C]."""
        shape = dims_of(x)
        wide = tf.cast(x, statistics_dtype(x))
        wide = tf.reshape(wide, [*shape[:-1], groups, shape[-1] // groups])
        centred = wide - tf.reduce_mean(wide, [1, 3], keepdims=True)
        scale = tf.math.rsqrt(tf.reduce_mean(tf.square(centred), [1, 3], keepdims=True) + eps)
        return tf.cast(tf.reshape(centred * scale, shape) * weight + bias, x.dtype)

    def gelu_tanh(self, x: tf.Tensor) -> tf.Tensor:
        """GELU in the tanh approximation."""
        return tf.nn.gelu(x, approximate=True)

    def dropout(self, x: tf.Tensor, rate: float, seed: tf.Tensor | None) -> tf.Tensor:
        """Zero a fraction `rate` of `x` and scale the rest by 1/(1 - rate); the mask depends on
        `seed` int32[2] and the shape alone. None: no dropout.
        """
        if seed is None or rate == 0.0:
            return x
        kept = tf.random.stateless_uniform(tf.shape(x), seed, dtype=tf.float32) >= rate
        return tf.where(kept, x * tf.cast(1 / (1 - rate), x.dtype), tf.zeros([], x.dtype))

    def residual_dtype(self, x: tf.Tensor | tf.TensorSpec) -> tf.DType:
        """The dtype of the residual stream of blocks whose input is `x`."""
        return x.dtype

    # -- products ----------------------------------------------------------------------------------

    def add_bias(self, y_RC: tf.Tensor, bias_C: tf.Tensor, widened: bool) -> tf.Tensor:
        """y + bias; `widened`: the product that made y has more outputs than inputs."""
        del widened
        return tf.nn.bias_add(y_RC, bias_C)

    def column_sum(self, x_RC: tf.Tensor) -> tf.Tensor:
        """Sum over the rows, [C] in x's dtype."""
        return tf.reduce_sum(x_RC, 0)

    def column_max(self, x_RC: tf.Tensor) -> tf.Tensor:
        """The largest magnitude over the rows, [C] in x's dtype."""
        return tf.reduce_max(tf.abs(x_RC), 0)

    def project(self, x: tf.Tensor, projection) -> tf.Tensor:
        """x [..., in] by the layer `projection` (`HFConv1D`) -> [..., out]."""
        return projection.product(x)

    def conv1d(self, x: tf.Tensor, weight: tf.Tensor, stride: int, dilation: int) -> tf.Tensor:
        """Convolve x [B, T, in] with weight [k, in, out] where it lies inside of x, every `stride`
        positions -> [B, T', out].
        """
        if not self.products:
            return tf.nn.conv1d(x, weight, stride, "VALID", dilations=dilation)
        kernel, num_in, num_out = weight.shape
        batch, length, _ = dims_of(x)
        span = (length - dilation * (kernel - 1) - 1) // stride * stride + 1
        seen = [x[:, k * dilation : k * dilation + span : stride] for k in range(kernel)]
        rows = tf.reshape(tf.concat(seen, -1), [-1, kernel * num_in])
        y = tf.matmul(rows, tf.reshape(weight, [kernel * num_in, num_out]))
        return tf.reshape(y, [batch, -1, num_out])

    def qkv(self, x: tf.Tensor, projection, packing: Packing) -> list[tf.Tensor]:
        """Queries, keys and values of x [B, T, C], each [B, T, H, D], by the layer `projection`
        with 3·C outputs (`HFConv1D`, or a `Conv1d` of one position).
        """
        return packing.apart(projection(x))

    # -- attention ---------------------------------------------------------------------------------

    def attention(
        self,
        q_BTHD: tf.Tensor,
        k_BSHD: tf.Tensor,
        v_BSHD: tf.Tensor,
        *,
        mask: tf.Tensor | None = None,
        dropout_rate: float = 0.0,
        seed: tf.Tensor | None = None,
        normalised: bool = False,
    ) -> tf.Tensor:
        """softmax(q kᵀ / √D) v -> [B, T, H, D]; scores and softmax are at least float32.

        `mask` is bool, broadcastable to [B, H, T, S], True where a key may be seen. Masked scores
        become the lowest finite number, not -inf: a query that sees no key gets an even mixture
        instead of NaN. `normalised`: q and k are linear in the output of a norm, so that scores
        stay moderate.
        """
        del normalised
        scores = tf.einsum("bthd,bshd->bhts", q_BTHD, k_BSHD) * tf.cast(
            q_BTHD.shape[-1] ** -0.5, q_BTHD.dtype
        )
        scores = tf.cast(scores, statistics_dtype(scores))
        if mask is not None:
            scores = tf.where(mask, scores, scores.dtype.min)
        probabilities = tf.cast(tf.nn.softmax(scores), v_BSHD.dtype)
        probabilities = current().dropout(probabilities, dropout_rate, seed)
        return tf.einsum("bhts,bshd->bthd", probabilities, v_BSHD)

    def causal_attention(
        self,
        q_BTHD: tf.Tensor,
        k_BTHD: tf.Tensor,
        v_BTHD: tf.Tensor,
        *,
        dropout_rate: float = 0.0,
        seed: tf.Tensor | None = None,
        key_mask_BT: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Attention in which position t sees positions 0..t -> [B, T, H, D].

        Contiguous rows need no key mask; `key_mask_BT` (True = visible) exists for the original's
        layout, which masks text in the middle.
        """
        position = tf.range(dims_of(q_BTHD)[1])
        mask = position[:, tf.newaxis] >= position[tf.newaxis, :]
        if key_mask_BT is not None:
            mask = mask & tf.cast(key_mask_BT, tf.bool)[:, tf.newaxis, tf.newaxis, :]
        return Operations.attention(
            self, q_BTHD, k_BTHD, v_BTHD, mask=mask, dropout_rate=dropout_rate, seed=seed
        )

    # -- embedding, cross-entropy ------------------------------------------------------------------

    def lookup(self, table_VC: tf.Tensor, ids: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """Rows of `table_VC` at `ids` [...] -> [..., C], in `dtype` or in the table's, whichever
        costs less. Ids must be in [0, V).

        The gradient is a product with the one-hot ids, not a scatter: a scatter-add's order, and so
        its bits, vary on GPUs. In `dtype` it costs less than a head's weight gradient.
        """
        return _lookup(tf.cast(table_VC, dtype), ids)

    def cross_entropy_sum(
        self, logits: tf.Tensor, targets: tf.Tensor, weights: tf.Tensor, num_classes: int
    ) -> tf.Tensor:
        """Σ weights · −log softmax(logits)[targets], a scalar in the weights' dtype, which is
        `statistics_dtype(logits)`.

        logits [..., V] of any float dtype, of which the first `num_classes` are classes; targets
        int32[...] in [0, num_classes), weights [...].
        """
        classes = tf.cast(logits[..., :num_classes], weights.dtype)
        ce = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, classes)
        return tf.reduce_sum(ce * weights)


@tf.custom_gradient
def _lookup(table_VC: tf.Tensor, ids: tf.Tensor):

    def grad(d_out):
        num_ids, width = table_VC.shape
        one_hot = tf.one_hot(tf.reshape(ids, [-1]), num_ids, dtype=d_out.dtype)
        return tf.matmul(one_hot, tf.reshape(d_out, [-1, width]), transpose_a=True), None

    return tf.gather(table_VC, ids), grad


PLAIN = Operations()

_current: ContextVar[Operations] = ContextVar("operations", default=PLAIN)


def current() -> Operations:
    """The set in force."""
    return _current.get()


@contextlib.contextmanager
def use(operations: Operations) -> Iterator[None]:
    """Trace with `operations` inside the block.

    Gradients call `again` and `column_sum` of the set in force where they are taken.
    """
    token = _current.set(operations)
    try:
        yield
    finally:
        _current.reset(token)


@functools.cache
def mixed(base: type[Operations], other: type[Operations], *names: str) -> type[Operations]:
    """The set `base`, but with the named operations of `other`; AttributeError for unknown names.

    The same arguments give the same class, so that sets can be compared.
    """
    name = f"{base.__name__}With{other.__name__}{''.join(n.title() for n in names)}"
    return type(name, (base,), {n: getattr(other, n) for n in names})
