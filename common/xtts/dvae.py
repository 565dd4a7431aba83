"""The DVAE: mel frames to codes at a quarter of the frame rate, and back.

The tokeniser of XTTS's audio.

Shapes: B clips, L mel frames, n = ceil(ceil(L/2)/2) codes, M mel channels, D codebook_dim, K
num_codes; channels last, [B, L, M]. All convolutions are biased, with symmetric zero padding, ReLU,
no normalisation. Names are those of Coqui's dvae.pth. Codes must be computed in float32 (a process
that makes them on a GPU switches TensorFloat-32 off). Source: coqui-tts,
TTS/tts/layers/xtts/dvae.py (DiscreteVAE).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from common.xtts.dims import AudioDims, DvaeDims
from common.xtts.layers import Conv1d, Module, Window, normal, zeros

EMA_DECAY = 0.99
EMA_EPS = 1e-5


def _minus_one(_, shape):
    return np.full(shape, -1.0, np.float32)


def codes_of_frames(num_frames):
    """n of L mel frames, for ints and int tensors alike: ceil(ceil(L/2)/2) = ceil(L/4)."""
    return (num_frames + 3) // 4


class ConvReLU(Module):
    """Conv1d of kernel 3 and ReLU; the convolution is named `<name>.0`."""

    def __init__(
        self, num_in: int, num_out: int, stride: int, *, name: str, dtype: str | None = None
    ):
        super().__init__(name, dtype)
        self.conv = Conv1d(
            num_in, num_out, Window(3, stride=stride, padding=1), name="0", dtype=dtype
        )

    def call(self, x):
        """[B, T, in] -> [B, ceil(T / stride), out]."""
        return tf.nn.relu(self.conv(x))


class UpsampleConvReLU(Module):
    """Nearest neighbour x 2, Conv1d of kernel 3 and ReLU; the convolution is named
    `<name>.0.conv`.
    """

    def __init__(self, num_in: int, num_out: int, *, name: str, dtype: str | None = None):
        super().__init__(name, dtype)
        self.conv = Conv1d(num_in, num_out, Window(3, padding=1), name="0.conv", dtype=dtype)

    def call(self, x):
        """[B, T, in] -> [B, 2T, out]."""
        return tf.nn.relu(self.conv(tf.repeat(x, 2, axis=1)))


class ResBlock(Module):
    """x + Conv3, ReLU, Conv3, ReLU, Conv1 of x."""

    def __init__(self, width: int, *, name: str, dtype: str | None = None):
        super().__init__(name, dtype)
        self.conv0 = Conv1d(width, width, Window(3, padding=1), name="net.0", dtype=dtype)
        self.conv1 = Conv1d(width, width, Window(3, padding=1), name="net.2", dtype=dtype)
        self.conv2 = Conv1d(width, width, 1, name="net.4", dtype=dtype)

    def call(self, x):
        """[B, T, C] -> [B, T, C]."""
        return x + self.conv2(tf.nn.relu(self.conv1(tf.nn.relu(self.conv0(x)))))


class CodebookUse(NamedTuple):
    """What the codebook learns from one batch: the sums behind its moving averages, and vectors to
    restart dead codes with.
    """

    counts: tf.Tensor  # float32 [K], valid positions per code
    sums: tf.Tensor  # float32 [D, K], encoder outputs per code
    candidates: (
        tf.Tensor
    )  # float32 [D, K], encoder outputs drawn at random (0 where the batch has no valid position)


class Codebook(Module):
    """K vectors (columns of `embed` [D, K]), learnt as moving averages of the encoder outputs
    assigned to them.
    """

    def __init__(self, dims: DvaeDims, *, name: str = "codebook"):
        super().__init__(name, "float32")
        shape = (dims.codebook_dim, dims.num_codes)
        self.embed = self.tensor("embed", shape, normal(1.0), trainable=False)
        # Zero use marks every code as dead, so the first update draws the codebook from the first
        # batch.
        self.cluster_size = self.tensor("cluster_size", shape[1:], zeros, trainable=False)
        self.embed_avg = self.tensor("embed_avg", shape, normal(1.0), trainable=False)

    def nearest(self, z):
        """Nearest code of z [B, n, D] -> int32 [B, n]: argmin of |z|² - 2 z·e + |e|² in float32."""
        embed = tf.convert_to_tensor(self.embed)
        flat = tf.reshape(tf.cast(z, tf.float32), [-1, embed.shape[0]])
        distance = (
            tf.reduce_sum(flat**2, 1, keepdims=True)
            - 2.0 * tf.matmul(flat, embed)
            + tf.reduce_sum(embed**2, 0, keepdims=True)
        )
        codes = tf.argmin(distance, 1, output_type=tf.int32)
        return tf.ensure_shape(tf.reshape(codes, tf.shape(z)[:2]), z.shape[:2])

    def lookup(self, codes):
        """int32 [B, n] in [0, K) -> float32 [B, n, D]."""
        return tf.gather(tf.transpose(tf.convert_to_tensor(self.embed)), codes)

    def use(self, z, codes, valid, seed) -> CodebookUse:
        """Statistics of z [B, n, D] with its codes where `valid` bool [B, n]; `seed` int32[2] alone
        decides the candidates.

        Sums are products with one-hot codes, not scatters, whose order varies on GPUs.
        """
        dim, num_codes = self.embed.shape
        flat, valid = tf.reshape(tf.cast(z, tf.float32), [-1, dim]), tf.reshape(valid, [-1])
        one_hot = tf.one_hot(
            tf.where(valid, tf.reshape(codes, [-1]), -1), num_codes, dtype=tf.float32
        )
        # tf.where, not a product: an invalid position may hold anything, and 0 · inf is not 0.
        flat = tf.where(valid[:, None], flat, 0.0)
        keys = tf.random.stateless_uniform(tf.shape(valid), seed) + tf.cast(valid, tf.float32)
        order = tf.argsort(
            keys, direction="DESCENDING", stable=True
        )  # valid positions first, shuffled
        num_valid = tf.maximum(tf.reduce_sum(tf.cast(valid, tf.int32)), 1)
        candidates = tf.gather(flat, tf.gather(order, tf.range(num_codes) % num_valid))
        return CodebookUse(
            tf.reduce_sum(one_hot, 0),
            tf.matmul(flat, one_hot, transpose_a=True),
            tf.transpose(candidates),
        )

    def updated(
        self, use: CodebookUse, decay, dead_below: float, keep_unused: bool = False
    ) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        """The next `cluster_size`, `embed_avg` and `embed`, and which codes restart (bool [K]);
        nothing is assigned.

        Moving averages as in Coqui's Quantize (eps 1e-5). A code whose average use is below
        `dead_below` times the mean use then restarts from its candidate. It is credited with a
        quarter of the mean use, which it must earn or restart once more. A batch without a valid
        position changes nothing. `keep_unused`: a batch changes only the codes that it uses.
        """
        size = decay * self.cluster_size + (1 - decay) * use.counts
        total, num_codes = tf.reduce_sum(size), use.counts.shape[0]
        mean_use = total / num_codes
        average = decay * self.embed_avg + (1 - decay) * use.sums
        some = tf.reduce_sum(use.counts) > 0
        dead = some & ((size < dead_below * mean_use) | (self.cluster_size <= 0))
        if keep_unused:
            dead = tf.zeros_like(dead)
        size = tf.where(dead, 0.25 * mean_use, size)
        average = tf.where(dead, 0.25 * mean_use * use.candidates, average)
        total = tf.reduce_sum(size)
        embed = average / ((size + EMA_EPS) / (total + num_codes * EMA_EPS) * total)
        new = {
            "cluster_size": size,
            "embed_avg": average,
            "embed": tf.where(dead, use.candidates, embed),
        }
        if keep_unused:
            some &= use.counts > 0
        return {
            key: tf.where(some, value, tf.convert_to_tensor(getattr(self, key)))
            for key, value in new.items()
        }, dead


class Dvae(Module):
    """Encoder, codebook and decoder: mel [B, L, M] <-> codes int32 [B, n]."""

    ignored_keys = (r"discrete_loss\..*",)

    def __init__(self, dims: DvaeDims, name: str = "dvae", dtype: str | None = None):
        super().__init__(name, dtype)
        self.dims = dims
        hidden, inner, num = dims.hidden, 2 * dims.hidden, dims.num_resblocks
        self.encoder = [
            ConvReLU(dims.num_mels, hidden, 2, name="encoder.0", dtype=dtype),
            ConvReLU(hidden, inner, 2, name="encoder.1", dtype=dtype),
            *(ResBlock(inner, name=f"encoder.{2 + i}", dtype=dtype) for i in range(num)),
            Conv1d(inner, dims.codebook_dim, 1, name=f"encoder.{2 + num}", dtype=dtype),
        ]
        self.decoder = [
            Conv1d(dims.codebook_dim, inner, 1, name="decoder.0", dtype=dtype),
            *(ResBlock(inner, name=f"decoder.{1 + i}", dtype=dtype) for i in range(num)),
            UpsampleConvReLU(inner, inner, name=f"decoder.{1 + num}", dtype=dtype),
            UpsampleConvReLU(inner, hidden, name=f"decoder.{2 + num}", dtype=dtype),
            # Normalised log-mels average about -1, by the definition of the mel stats: start from
            # there.
            Conv1d(
                hidden,
                dims.num_mels,
                1,
                name=f"decoder.{3 + num}",
                dtype=dtype,
                bias_init=_minus_one,
            ),
        ]
        self.codebook = Codebook(dims)

    def encode(self, mel):
        """Normalised log-mel [B, L, M] -> z [B, ceil(L/4), D], before quantisation."""
        for block in self.encoder:
            mel = block(mel)
        return mel

    def nearest(self, z):
        """z [B, n, D] -> codes int32 [B, n]."""
        return self.codebook.nearest(z)

    def codes(self, mel):
        """Normalised log-mel [B, L, M] -> codes int32 [B, ceil(L/4)]."""
        return self.nearest(self.encode(mel))

    def embed(self, codes):
        """codes int32 [B, n] -> their vectors [B, n, D]."""
        return self.codebook.lookup(codes)

    def decode_vectors(self, vectors):
        """[B, n, D] -> normalised log-mel [B, 4n, M]."""
        for block in self.decoder:
            vectors = block(vectors)
        return vectors

    def decode(self, codes):
        """codes int32 [B, n] -> normalised log-mel [B, 4n, M]."""
        return self.decode_vectors(self.embed(codes))

    def call(self, mel):
        """Mel through codes and back: [B, L, M] -> [B, 4 ceil(L/4), M]."""
        return self.decode(self.codes(mel))


def clip_codes(dvae: Dvae, dvae_mel, wav_padded, audio: AudioDims | None = None):
    """Codes of clips that do not depend on what else is in the batch: wav [B, S + pad] -> int32 [B,
    S / 1024]; S a multiple of 1024.

    `wav_padded`: clips followed by silence up to their bucket's S samples and `audio.pad_samples`
    (8192) more. A clip of w samples owns the first ceil(w / 1024) codes; what follows is silence
    for the caller to drop. The last of its codes sees 27 frames and half a window ahead, 7424
    samples, at full depth; without the extra silence they would see the edge of the batch.
    """
    audio = audio or dvae_mel.dims
    num_samples = wav_padded.shape[1] - audio.pad_samples
    if num_samples <= 0 or num_samples % audio.samples_per_code:
        raise ValueError(
            f"clip_codes takes n x {audio.samples_per_code} samples and {audio.pad_samples} of"
            f" silence, got {wav_padded.shape[1]} samples"
        )
    return dvae.codes(dvae_mel(wav_padded))[:, : num_samples // audio.samples_per_code]
