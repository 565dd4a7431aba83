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

from common.xtts.dims import GptDims
from common.xtts.layers import (
    Conv1d,
    GroupNorm,
    Linear,
    Module,
    normal,
    ones,
    zeros,
)
from common.xtts.operations import current, statistics_dtype
from common.xtts.shaping import HeadsOutside, dims_of, merge_heads, split_heads


class ConditioningBlock(Module):
    """Self-attention over the frames whose residual is the *normalised* input (the weights were
    trained so).
    """

    def __init__(self, dims: GptDims, *, name: str, dtype: str | None = None):
        super().__init__(name, dtype)
        self.packing = HeadsOutside(dims.heads)
        self.norm = GroupNorm(dims.cond_groups, dims.width, name="norm", dtype=dtype)
        self.qkv = Conv1d(dims.width, 3 * dims.width, 1, name="qkv", dtype=dtype)
        # Zero at first: the block starts as its normalisation alone.
        self.proj_out = Conv1d(
            dims.width, dims.width, 1, name="proj_out", dtype=dtype, init=zeros, bias_init=zeros
        )

    def call(self, x):
        """x [B, S, C] -> [B, S, C]."""
        normed = self.norm(x)
        ops = current()
        q, k, v = ops.qkv(normed, self.qkv, self.packing)
        return normed + self.proj_out(merge_heads(ops.attention(q, k, v, normalised=True)))


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
        z = z + self.to_out(merge_heads(current().attention(q, k, v)))
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
        z = current().for_each_row(latents, dims_of(context)[0])
        for layer in self.layers:
            z = layer(z, context)
        return self.norm(z)
