"""Speaker embedding of a reference clip: ResNet with squeeze-and-excitation ("H/ASP").

The embedding comes from attentive statistics. Inference only.

Shapes: B clips, N samples at 16 kHz, T = 1 + N // 160 frames, M = 64 mels; images are [B, M, T, C],
channels last. Batch norm uses its stored statistics and comes after the ReLU of the first
convolution of a block. Source: coqui-tts, TTS/encoder/models/resnet.py (ResNetSpeakerEncoder).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from common.xtts.audio import power_spectrogram
from common.xtts.filterbank import hamming, mel_filterbank
from common.xtts.layers import Conv1d, Linear, Module, normal, ones, zeros

EPS = 1e-5
LOG_EPS = 1e-6


@dataclass(frozen=True)
class SpeakerEncoderDims:
    """Sizes of the speaker encoder; defaults are XTTS's."""

    layers: tuple[int, ...] = (3, 4, 6, 3)
    filters: tuple[int, ...] = (32, 64, 128, 256)
    bottleneck: int = 128
    embedding: int = 512
    reduction: int = 8
    sample_rate: int = 16000
    fft: int = 512
    win_samples: int = 400
    hop_samples: int = 160
    num_mels: int = 64
    preemphasis: float = 0.97


class BatchNorm(Module):
    """Normalisation over the last axis with stored statistics, eps 1e-5."""

    def __init__(self, channels: int, *, name: str):
        super().__init__(name, "float32")
        self.weight = self.tensor("weight", (channels,), ones)
        self.bias = self.tensor("bias", (channels,), zeros)
        self.mean = self.tensor("running_mean", (channels,), zeros, trainable=False)
        self.variance = self.tensor("running_var", (channels,), ones, trainable=False)
        self.tensor(
            "num_batches_tracked", (), zeros, trainable=False, dtype="int64"
        )  # unused here, but part of the checkpoint

    def call(self, x):
        """[..., C] -> [..., C]."""
        return (x - self.mean) * (tf.math.rsqrt(self.variance + EPS) * self.weight) + self.bias


class Conv2d(Module):
    """Torch's Conv2d with symmetric padding: [B, H, W, in] -> [B, H', W', out].

    Torch keeps [out, in, h, w], we [h, w, in, out].
    """

    def __init__(
        self,
        num_in: int,
        num_out: int,
        kernel: int,
        stride: int = 1,
        padding: int = 0,
        bias: bool = False,
        *,
        name: str,
    ):
        super().__init__(name, "float32")
        self.stride, self.padding = stride, padding
        std = math.sqrt(2 / (num_out * kernel * kernel))
        self.weight = self.tensor(
            "weight",
            (kernel, kernel, num_in, num_out),
            normal(std),
            to_torch=(3, 2, 0, 1),
            decay="yes",
        )
        self.bias = self.tensor("bias", (num_out,), zeros) if bias else None

    def call(self, x):
        """[B, H, W, in] -> [B, H', W', out]."""
        p = self.padding
        y = tf.nn.conv2d(
            tf.pad(x, [[0, 0], [p, p], [p, p], [0, 0]]),
            tf.convert_to_tensor(self.weight),
            self.stride,
            "VALID",
        )
        return y if self.bias is None else tf.nn.bias_add(y, tf.convert_to_tensor(self.bias))


class SEBlock(Module):
    """relu(x' + SE(BN(Conv(BN(relu(Conv(x))))))), where x' is x or its strided projection."""

    def __init__(self, num_in: int, num_out: int, stride: int, reduction: int, *, name: str):
        super().__init__(name, "float32")
        self.conv1 = Conv2d(num_in, num_out, 3, stride, 1, name="conv1")
        self.bn1 = BatchNorm(num_out, name="bn1")
        self.conv2 = Conv2d(num_out, num_out, 3, 1, 1, name="conv2")
        self.bn2 = BatchNorm(num_out, name="bn2")
        self.squeeze = Linear(num_out, num_out // reduction, name="se.fc.0")
        self.excite = Linear(num_out // reduction, num_out, name="se.fc.2")
        self.project, self.project_bn = None, None
        if stride != 1 or num_in != num_out:
            self.project = Conv2d(num_in, num_out, 1, stride, name="downsample.0")
            self.project_bn = BatchNorm(num_out, name="downsample.1")

    def call(self, x):
        """[B, H, W, in] -> [B, ceil(H / stride), ceil(W / stride), out]."""
        y = self.bn2(self.conv2(self.bn1(tf.nn.relu(self.conv1(x)))))
        gate = tf.sigmoid(self.excite(tf.nn.relu(self.squeeze(tf.reduce_mean(y, [1, 2])))))
        residual = x if self.project is None else self.project_bn(self.project(x))
        return tf.nn.relu(y * gate[:, None, None, :] + residual)


class SpeakerEncoder(Module):
    """Clips at 16 kHz to unit vectors; keys are those below `hifigan_decoder.speaker_encoder.`."""

    def __init__(self, dims: SpeakerEncoderDims | None = None, name: str = "speaker_encoder"):
        super().__init__(name, "float32")
        self.dims = d = dims or SpeakerEncoderDims()
        self.conv1 = Conv2d(1, d.filters[0], 3, 1, 1, bias=True, name="conv1")
        self.bn1 = BatchNorm(d.filters[0], name="bn1")
        self.blocks, num_in = [], d.filters[0]
        for stage, (depth, num_out) in enumerate(zip(d.layers, d.filters, strict=True), start=1):
            for b in range(depth):
                stride = 2 if stage > 1 and b == 0 else 1
                self.blocks.append(
                    SEBlock(num_in, num_out, stride, d.reduction, name=f"layer{stage}.{b}")
                )
                num_in = num_out
        # The checkpoint carries the front end's constants; they are used as they come.
        bank = mel_filterbank(
            d.fft, d.num_mels, d.sample_rate, 0.0, d.sample_rate / 2, area_norm=False
        )
        self.filter = self._constant("torch_spec.0.filter", np.array([[[-d.preemphasis, 1.0]]]))
        self.window = self._constant("torch_spec.1.spectrogram.window", hamming(d.win_samples))
        self.bank = self._constant("torch_spec.1.mel_scale.fb", bank)
        flat = num_in * (d.num_mels // 8)
        self.attention1 = Conv1d(flat, d.bottleneck, 1, name="attention.0")
        self.attention_bn = BatchNorm(d.bottleneck, name="attention.2")
        self.attention2 = Conv1d(d.bottleneck, flat, 1, name="attention.3")
        self.fc = Linear(2 * flat, d.embedding, name="fc")

    def _constant(self, key: str, value: np.ndarray):
        value = value.astype(np.float32)
        variable = self.tensor(key, value.shape, lambda rng, shape: value, trainable=False)
        variable.assign(value)
        return variable

    def log_mel(self, wav):
        """Normalised log-mel: float32 [B, N] at 16 kHz, N > 200 -> [B, M, T], mean 0 and variance 1
        per mel over time.
        """
        d = self.dims
        kernel = tf.convert_to_tensor(self.filter)[0, 0]
        before = tf.concat([wav[:, 1:2], wav[:, :-1]], 1)  # x[-1] is reflected: x[1]
        emphasised = kernel[1] * wav + kernel[0] * before
        power = power_spectrogram(
            emphasised, d.fft, d.win_samples, d.hop_samples, tf.convert_to_tensor(self.window)
        )
        mel = tf.math.log(tf.tensordot(power, tf.convert_to_tensor(self.bank), 1) + LOG_EPS)
        mean, variance = tf.nn.moments(mel, [1], keepdims=True)
        return tf.transpose((mel - mean) * tf.math.rsqrt(variance + EPS), [0, 2, 1])

    def call(self, wav):
        """float32 [B, N] at 16 kHz -> unit vectors [B, embedding].

        Clips of one batch have equal length: padding would be heard.
        """
        x = self.bn1(tf.nn.relu(self.conv1(self.log_mel(wav)[..., None])))
        for block in self.blocks:
            x = block(x)
        # [B, M/8, T', C] -> [B, T', C · M/8], mel within channel, as torch flattens [B, C, M/8,
        # T'].
        x = tf.transpose(x, [0, 2, 3, 1])
        x = tf.reshape(x, [tf.shape(x)[0], tf.shape(x)[1], self.attention2.weight.shape[-1]])
        weight = tf.nn.softmax(
            self.attention2(self.attention_bn(tf.nn.relu(self.attention1(x)))), axis=1
        )
        mean = tf.reduce_sum(x * weight, 1)
        deviation = tf.sqrt(tf.maximum(tf.reduce_sum(x**2 * weight, 1) - mean**2, 1e-5))
        return tf.math.l2_normalize(self.fc(tf.concat([mean, deviation], 1)), -1, epsilon=1e-24)
