"""Attention, in the one form that every network here uses.

Shapes: B batch, T query time, S key time, H heads, D head width. Scores and softmax are at least
float32 whatever the compute dtype. Without a mask, or with causality alone, and without dropout,
`Kernels.attention` may put cuDNN's fused kernel in their place.
"""

from __future__ import annotations

import tensorflow as tf

from common.xtts import kernels
from common.xtts.fused_attention import fits, fused_attention
from common.xtts.layers import dims_of, dropout, statistics_dtype


def split_heads(x_BTC: tf.Tensor, heads: int) -> tf.Tensor:
    """[B, T, H·D] -> [B, T, H, D]; heads are contiguous slices of the channels."""
    *leading, num_channels = dims_of(x_BTC)
    return tf.reshape(x_BTC, [*leading, heads, num_channels // heads])


def merge_heads(x_BTHD: tf.Tensor) -> tf.Tensor:
    """[B, T, H, D] -> [B, T, H·D]."""
    *leading, heads, head_dim = dims_of(x_BTHD)
    return tf.reshape(x_BTHD, [*leading, heads * head_dim])


def attention(
    q_BTHD: tf.Tensor,
    k_BSHD: tf.Tensor,
    v_BSHD: tf.Tensor,
    *,
    mask: tf.Tensor | None = None,
    dropout_rate: float = 0.0,
    seed: tf.Tensor | None = None,
    normalised: bool = False,
) -> tf.Tensor:
    """softmax(q kᵀ / √D) v -> [B, T, H, D].

    `mask` is bool, broadcastable to [B, H, T, S], True where a key may be seen.

    Masked scores become the lowest finite number, not -inf: a query that sees no key gets an even
    mixture instead of NaN. `normalised`: q and k are linear in the output of a norm, so that scores
    stay moderate. Only then may a fused kernel be used: its backward pass computes the scores
    again, and has no answer to huge ones.
    """
    if normalised and mask is None and _fused(q_BTHD, k_BSHD, dropout_rate, seed):
        return fused_attention(q_BTHD, k_BSHD, v_BSHD, causal=False)
    scores = tf.einsum("bthd,bshd->bhts", q_BTHD, k_BSHD) * tf.cast(
        q_BTHD.shape[-1] ** -0.5, q_BTHD.dtype
    )
    scores = tf.cast(scores, statistics_dtype(scores))
    if mask is not None:
        scores = tf.where(mask, scores, scores.dtype.min)
    probabilities = dropout(tf.cast(tf.nn.softmax(scores), v_BSHD.dtype), dropout_rate, seed)
    return tf.einsum("bhts,bshd->bthd", probabilities, v_BSHD)


def causal_attention(
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
    if key_mask_BT is None and _fused(q_BTHD, k_BTHD, dropout_rate, seed):
        return fused_attention(q_BTHD, k_BTHD, v_BTHD, causal=True)
    num_positions = dims_of(q_BTHD)[1]
    position = tf.range(num_positions)
    mask = position[:, tf.newaxis] >= position[tf.newaxis, :]
    if key_mask_BT is not None:
        mask = mask & tf.cast(key_mask_BT, tf.bool)[:, tf.newaxis, tf.newaxis, :]
    return attention(q_BTHD, k_BTHD, v_BTHD, mask=mask, dropout_rate=dropout_rate, seed=seed)


def _fused(q: tf.Tensor, k: tf.Tensor, dropout_rate: float, seed: tf.Tensor | None) -> bool:
    without_dropout = seed is None or dropout_rate == 0.0
    return kernels.current().attention == "cudnn" and without_dropout and fits(q, k)
