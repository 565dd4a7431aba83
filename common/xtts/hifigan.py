"""HiFi-GAN on GPT latents: XTTS's vocoder, 24 kHz, conditioned on a speaker embedding.

Inference only.

Shapes: B clips, n codes, L steps after the two interpolations, N = 256 L samples; channels last.
Weight norm is folded into plain weights when a checkpoint is read (`fold_weight_norm`) and unfolded
when one is written: nothing here trains them. Source: coqui-tts,
TTS/tts/layers/xtts/hifigan_decoder.py (HifiDecoder).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from common.xtts.layers import Conv1d, Module, Window, uniform

SLOPE = 0.1
LAST_SLOPE = 0.01  # the original calls leaky_relu with its default before the last convolution

_WEIGHT_NORM = re.compile(r"(.*)\.(parametrizations\.weight\.original0|weight_g)")


@dataclass(frozen=True)
class HifiganDims:
    """Sizes of the vocoder; defaults are XTTS's."""

    in_channels: int = 1024  # GPT width
    speaker_dim: int = 512
    channels: int = 512  # halved by each upsampling
    upsample_rates: tuple[int, ...] = (8, 8, 2, 2)
    upsample_kernels: tuple[int, ...] = (16, 16, 4, 4)
    resblock_kernels: tuple[int, ...] = (3, 7, 11)
    resblock_dilations: tuple[int, ...] = (1, 3, 5)
    samples_per_code: int = 1024  # at input_rate
    input_rate: int = 22050
    output_rate: int = 24000

    @property
    def hop(self) -> int:
        """Output samples per step of the first convolution: 256."""
        return math.prod(self.upsample_rates)


class ConvTranspose1d(Module):
    """Torch's ConvTranspose1d with padding (kernel - stride) / 2: [B, T, in] -> [B, stride T, out].

    Torch keeps [in, out, k], we keep [k, out, in].
    """

    def __init__(
        self,
        num_in: int,
        num_out: int,
        kernel: int,
        stride: int,
        *,
        name: str,
        dtype: str | None = None,
    ):
        super().__init__(name, dtype)
        self.stride, self.num_out = stride, num_out
        bound = 1 / math.sqrt(num_out * kernel)
        self.weight = self.tensor(
            "weight", (kernel, num_out, num_in), uniform(bound), to_torch=(2, 1, 0), decay="yes"
        )
        self.bias = self.tensor("bias", (num_out,), uniform(bound))

    def call(self, x):
        """x [B, T, in] -> [B, stride T, out]."""
        shape = [tf.shape(x)[0], tf.shape(x)[1] * self.stride, self.num_out]
        # "SAME" cuts (kernel - stride) / 2 on each side, which is what the original's padding does.
        y = tf.nn.conv1d_transpose(x, tf.convert_to_tensor(self.weight), shape, self.stride, "SAME")
        return tf.nn.bias_add(y, tf.convert_to_tensor(self.bias))


class ResBlock1(Module):
    """Three times x + Conv(lrelu(dilated Conv(lrelu(x))))."""

    def __init__(
        self,
        channels: int,
        kernel: int,
        dilations: tuple[int, ...],
        *,
        name: str,
        dtype: str | None = None,
    ):
        super().__init__(name, dtype)
        half = (kernel - 1) // 2
        self.convs1, self.convs2 = [], []
        for i, d in enumerate(dilations):
            self.convs1.append(
                Conv1d(
                    channels,
                    channels,
                    Window(kernel, padding=half * d, dilation=d),
                    name=f"convs1.{i}",
                    dtype=dtype,
                )
            )
            self.convs2.append(
                Conv1d(
                    channels,
                    channels,
                    Window(kernel, padding=half),
                    name=f"convs2.{i}",
                    dtype=dtype,
                )
            )

    def call(self, x):
        """[B, T, C] -> [B, T, C]."""
        for first, second in zip(self.convs1, self.convs2, strict=True):
            x = x + second(tf.nn.leaky_relu(first(tf.nn.leaky_relu(x, SLOPE)), SLOPE))
        return x


class Hifigan(Module):
    """GPT latents to sound; keys are those below `hifigan_decoder.waveform_decoder.`, weight norm
    folded.
    """

    def __init__(
        self,
        dims: HifiganDims | None = None,
        name: str = "waveform_decoder",
        dtype: str | None = None,
    ):
        super().__init__(name, dtype)
        self.dims = d = dims or HifiganDims()
        sizes = [d.channels >> (i + 1) for i in range(len(d.upsample_rates))]
        self.conv_pre = Conv1d(
            d.in_channels, d.channels, Window(7, padding=3), name="conv_pre", dtype=dtype
        )
        self.cond_layer = Conv1d(d.speaker_dim, d.channels, 1, name="cond_layer", dtype=dtype)
        self.ups = [
            ConvTranspose1d(2 * size, size, kernel, rate, name=f"ups.{i}", dtype=dtype)
            for i, (size, kernel, rate) in enumerate(
                zip(sizes, d.upsample_kernels, d.upsample_rates, strict=True)
            )
        ]
        self.conds = [
            Conv1d(d.speaker_dim, size, 1, name=f"conds.{i}", dtype=dtype)
            for i, size in enumerate(sizes)
        ]
        self.resblocks = [
            ResBlock1(
                size,
                kernel,
                d.resblock_dilations,
                name=f"resblocks.{i * len(d.resblock_kernels) + j}",
                dtype=dtype,
            )
            for i, size in enumerate(sizes)
            for j, kernel in enumerate(d.resblock_kernels)
        ]
        self.conv_post = Conv1d(
            sizes[-1], 1, Window(7, padding=3), bias=False, name="conv_post", dtype=dtype
        )

    def call(self, latents, speaker):
        """latents [B, n, in_channels], speaker embedding [B, speaker_dim] -> wav [B,
        num_samples(n)] in (-1, 1) at output_rate.
        """
        d = self.dims
        x = interpolate(latents, d.samples_per_code / d.hop)
        if d.output_rate != d.input_rate:
            x = interpolate(x, d.output_rate / d.input_rate)
        return self.generate(x, speaker)

    def generate(self, x, speaker):
        """The network without the interpolations: x [B, L, in_channels] -> wav [B, hop · L]."""
        g = speaker[:, None, :]
        x = self.conv_pre(x) + self.cond_layer(g)
        per_stage = len(self.dims.resblock_kernels)
        for i, (up, cond) in enumerate(zip(self.ups, self.conds, strict=True)):
            x = up(tf.nn.leaky_relu(x, SLOPE)) + cond(g)
            x = (
                tf.add_n(
                    [block(x) for block in self.resblocks[i * per_stage : (i + 1) * per_stage]]
                )
                / per_stage
            )
        return tf.tanh(self.conv_post(tf.nn.leaky_relu(x, LAST_SLOPE)))[:, :, 0]

    def num_samples(self, num_codes: int) -> int:
        """How many samples of sound `num_codes` latents give: about 1114.56 each."""
        d = self.dims
        steps = math.floor(num_codes * (d.samples_per_code / d.hop))
        return d.hop * (
            math.floor(steps * (d.output_rate / d.input_rate))
            if d.output_rate != d.input_rate
            else steps
        )


def interpolate(x: tf.Tensor, scale: float) -> tf.Tensor:
    """Linear interpolation in time as torch's `interpolate(scale_factor=scale)`: [B, T, C] -> [B,
    floor(scale T), C].

    Source positions follow the scale asked for, not the ratio of the lengths, and are computed in
    float32 as torch does.
    """
    length = tf.shape(x)[1]
    out_length = tf.cast(tf.floor(tf.cast(length, tf.float64) * scale), tf.int32)
    position = (tf.cast(tf.range(out_length), tf.float32) + 0.5) * np.float32(1.0 / scale) - 0.5
    position = tf.maximum(position, 0.0)
    left = tf.minimum(tf.cast(position, tf.int32), length - 1)
    right = tf.minimum(left + 1, length - 1)
    weight = tf.cast(position - tf.cast(left, tf.float32), x.dtype)[None, :, None]
    y = tf.gather(x, left, axis=1) * (1 - weight) + tf.gather(x, right, axis=1) * weight
    return (
        y
        if x.shape[1] is None
        else tf.ensure_shape(y, [x.shape[0], math.floor(x.shape[1] * scale), x.shape[2]])
    )


def fold_weight_norm(state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """`….weight` = g · v / ‖v‖ in place of each pair (`parametrizations.weight.original0/1` or the
    older `weight_g/weight_v`).

    The norm runs over all axes but the first, of transposed convolutions too (there the first axis
    is the input's).
    """
    folded = dict(state)
    for key in state:
        match = _WEIGHT_NORM.fullmatch(key)
        if not match:
            continue
        layer, g_name = match.groups()
        v_key = f"{layer}.{g_name[:-1]}{'1' if g_name.endswith('0') else 'v'}"
        if v_key not in state:
            raise ValueError(
                f"weight norm: {key} has no {v_key} beside it; the checkpoint is incomplete"
            )
        g, v = (np.asarray(folded.pop(k), np.float64) for k in (key, v_key))
        folded[f"{layer}.weight"] = (g * v / _norm(v)).astype(np.float32)
    return folded


def unfold_weight_norm(state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Inverse of `fold_weight_norm` up to rounding, for `ups` and `resblocks`: v is the weight
    itself and g its norm.
    """
    unfolded = {}
    for key, array in state.items():
        layer, _, last = key.rpartition(".")
        if last == "weight" and layer.split(".")[0] in ("ups", "resblocks"):
            unfolded[f"{layer}.parametrizations.weight.original0"] = _norm(
                np.asarray(array, np.float64)
            ).astype(np.float32)
            unfolded[f"{layer}.parametrizations.weight.original1"] = array
        else:
            unfolded[key] = array
    return unfolded


def _norm(v: np.ndarray) -> np.ndarray:
    return np.sqrt(np.sum(v**2, axis=tuple(range(1, v.ndim)), keepdims=True))
