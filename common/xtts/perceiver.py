"""The conditioning path: mel of a reference clip -> conditioning encoder -> perceiver resampler ->
latents.

Source: coqui-tts, TTS/tts/layers/xtts/latent_encoder.py (ConditioningEncoder), perceiver_encoder.py
(PerceiverResampler).

Shapes: B batch, S mel frames, C width, L latents. Frames of padding are part of the clip: nothing
is masked.
"""

from __future__ import annotations

import math

import tensorflow as tf

from common.xtts import kernels
from common.xtts.attention import attention, merge_heads, split_heads
from common.xtts.dims import GptDims
from common.xtts.layers import (
    Conv1d,
    GroupNorm,
    Linear,
    Module,
    dims_of,
    normal,
    ones,
    statistics_dtype,
    zeros,
)


class ConditioningBlock(Module):
    """Self-attention over the frames whose residual is the *normalised* input (the weights were
    trained so).
    """

    def __init__(self, dims: GptDims, *, name: str, dtype: str | None = None):
        super().__init__(name, dtype)
        self.heads = dims.heads
        self.norm = GroupNorm(dims.cond_groups, dims.width, name="norm", dtype=dtype)
        self.qkv = Conv1d(dims.width, 3 * dims.width, 1, name="qkv", dtype=dtype)
        # Zero at birth: the block starts as its normalisation alone.
        self.proj_out = Conv1d(
            dims.width, dims.width, 1, name="proj_out", dtype=dtype, init=zeros, bias_init=zeros
        )

    def call(self, x):
        """x [B, S, C] -> [B, S, C]."""
        normed = self.norm(x)
        q, k, v = self._qkv(normed)
        return normed + self.proj_out(merge_heads(attention(q, k, v, normalised=True)))

    def _qkv(self, normed):
        # Channels are (head, q|k|v, head_dim), unlike the GPT's (q|k|v, head, head_dim).
        if not kernels.current().split_qkv:
            return tf.split(split_heads(self.qkv(normed), self.heads), 3, axis=-1)

        def split(y):
            apart = tf.reshape(y, [*y.shape[:-1], self.heads, 3, -1])
            return [tf.reshape(apart[..., i, :], [*y.shape[:-1], -1]) for i in range(3)]

        def join(parts):
            apart = [
                tf.reshape(part, [*part.shape[:-1], self.heads, 1, part.shape[-1] // self.heads])
                for part in parts
            ]
            return tf.reshape(
                kernels.padded_sum(apart, 2), [*parts[0].shape[:-1], 3 * parts[0].shape[-1]]
            )

        weight, bias = tf.convert_to_tensor(self.qkv.weight)[0], tf.convert_to_tensor(self.qkv.bias)
        return [
            split_heads(part, self.heads)
            for part in kernels.affine_parts(normed, weight, bias, split, join)
        ]


class ConditioningEncoder(Module):
    """Mel [B, S, 80] -> [B, S, C]."""

    def __init__(
        self, dims: GptDims, *, name: str = "conditioning_encoder", dtype: str | None = None
    ):
        super().__init__(name, dtype)
        self.init = Conv1d(dims.num_mels, dims.width, 1, name="init", dtype=dtype)
        self.attn = [
            ConditioningBlock(dims, name=f"attn.{i}", dtype=dtype) for i in range(dims.cond_blocks)
        ]

    def call(self, mel):
        """Mel [B, S, 80] -> [B, S, C]."""
        x = self.init(mel)
        for block in self.attn:
            x = block(x)
        return x


class PerceiverLayer(Module):
    """The latents attend to themselves and to the frames, then a GEGLU feed-forward; both residual,
    nothing normalised.
    """

    def __init__(self, dims: GptDims, *, name: str, dtype: str | None = None):
        super().__init__(name, dtype)
        width, inner = dims.width, dims.perceiver_heads * dims.perceiver_head_dim
        self.heads = dims.perceiver_heads
        self.to_q = Linear(width, inner, bias=False, name="0.to_q", dtype=dtype)
        self.to_kv = Linear(width, 2 * inner, bias=False, name="0.to_kv", dtype=dtype)
        self.to_out = Linear(inner, width, bias=False, name="0.to_out", dtype=dtype)
        hidden = int(width * 4 * 2 / 3)  # 2730 at width 1024
        self.up = Linear(width, 2 * hidden, name="1.0", dtype=dtype)
        self.down = Linear(hidden, width, name="1.2", dtype=dtype)

    def call(self, z, context):
        """Latents z [B, L, C], context [B, S, C] -> [B, L, C]."""
        k, v = tf.split(self.to_kv(tf.concat([z, context], 1)), 2, axis=-1)
        q, k, v = (split_heads(x, self.heads) for x in (self.to_q(z), k, v))
        z = z + self.to_out(merge_heads(attention(q, k, v)))
        value, gate = tf.split(self.up(z), 2, axis=-1)
        return z + self.down(value * tf.nn.gelu(gate, approximate=False))


class RMSNorm(Module):
    """x / max(‖x‖₂, 1e-12) · √C · gamma over the last axis."""

    def __init__(self, num_channels: int, *, name: str, dtype: str | None = None):
        super().__init__(name, dtype)
        self.gamma = self.tensor("gamma", (num_channels,), ones, decay="parity", autocast=False)

    def call(self, x):
        """x [..., C] -> same shape and dtype."""
        wide = tf.cast(x, statistics_dtype(x))
        # max(‖x‖, 1e-12) taken under the root: the same values, and no infinite slope at x = 0.
        scale = tf.math.rsqrt(tf.maximum(tf.reduce_sum(tf.square(wide), -1, keepdims=True), 1e-24))
        return tf.cast(wide * scale * math.sqrt(x.shape[-1]) * self.gamma, x.dtype)


class PerceiverResampler(Module):
    """Any number of frames [B, S, C] -> a fixed number of latents [B, L, C]."""

    def __init__(
        self, dims: GptDims, *, name: str = "conditioning_perceiver", dtype: str | None = None
    ):
        super().__init__(name, dtype)
        self.latents = self.tensor(
            "latents", (dims.num_latents, dims.width), normal(0.02), decay="parity"
        )
        self.layers = [
            PerceiverLayer(dims, name=f"layers.{i}", dtype=dtype)
            for i in range(dims.perceiver_depth)
        ]
        self.norm = RMSNorm(dims.width, name="norm", dtype=dtype)

    def call(self, context):
        """Context [B, S, C] -> [B, L, C]."""
        latents = tf.convert_to_tensor(self.latents)
        z = _for_each_row(latents, dims_of(context)[0])
        for layer in self.layers:
            z = layer(z, context)
        return self.norm(z)


def _for_each_row(latents_LC, num_rows):
    """[L, C] -> [B, L, C]."""
    if not kernels.current().jit:
        return tf.broadcast_to(latents_LC, [num_rows, *latents_LC.shape])
    # A product with stacked identities, exact: from a broadcast XLA takes that the batch be
    # innermost in memory, from here through the whole network, and every matrix product then needs
    # a transpose.
    num_latents, width = latents_LC.shape
    copies = tf.tile(tf.eye(num_latents, dtype=latents_LC.dtype), [num_rows, 1])
    return tf.reshape(tf.matmul(copies, latents_LC), [num_rows, num_latents, width])
