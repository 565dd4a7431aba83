"""Reshaping: dims that only a running graph knows, attention heads, and queries, keys and values
that share one axis.

Shapes: B batch, T time, H heads, D head width, C = H·D channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import tensorflow as tf


def dims_of(x: tf.Tensor) -> list:
    """The dims of `x`: ints where static, scalar tensors where not (lengths in synthesis); for
    `tf.reshape`.
    """
    dynamic = tf.shape(x)
    return [dynamic[axis] if size is None else size for axis, size in enumerate(x.shape)]


def split_heads(x_BTC: tf.Tensor, heads: int) -> tf.Tensor:
    """[B, T, H·D] -> [B, T, H, D]; heads are contiguous slices of the channels."""
    *leading, num_channels = dims_of(x_BTC)
    return tf.reshape(x_BTC, [*leading, heads, num_channels // heads])


def merge_heads(x_BTHD: tf.Tensor) -> tf.Tensor:
    """[B, T, H, D] -> [B, T, H·D]."""
    *leading, heads, head_dim = dims_of(x_BTHD)
    return tf.reshape(x_BTHD, [*leading, heads * head_dim])


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


class Packing(Protocol):
    """How queries, keys and values share the last axis of one projection."""

    heads: int

    def apart(self, y_BTC: tf.Tensor) -> list[tf.Tensor]:
        """[B, T, 3·C] -> q, k, v, each [B, T, H, D]."""

    def split(self, y: tf.Tensor) -> list[tf.Tensor]:
        """[..., 3·C] -> the channels of q, k, v, each [..., C]."""

    def join(self, parts: list[tf.Tensor]) -> tf.Tensor:
        """The inverse of `split` on [rows, C]."""


@dataclass(frozen=True)
class KindsOutside:
    """Channels are (q|k|v, head, head width), as in GPT-2."""

    heads: int

    def apart(self, y_BTC):
        """See `Packing`."""
        return [split_heads(part, self.heads) for part in tf.split(y_BTC, 3, axis=-1)]

    def split(self, y):
        """See `Packing`."""
        return tf.split(y, 3, -1)

    def join(self, parts):
        """See `Packing`."""
        return padded_sum(parts, 1)


@dataclass(frozen=True)
class HeadsOutside:
    """Channels are (head, q|k|v, head width), as in the conditioning encoder."""

    heads: int

    def apart(self, y_BTC):
        """See `Packing`."""
        return tf.split(split_heads(y_BTC, self.heads), 3, axis=-1)

    def split(self, y):
        """See `Packing`."""
        by_head = tf.reshape(y, [*y.shape[:-1], self.heads, 3, -1])
        return [tf.reshape(by_head[..., i, :], [*y.shape[:-1], -1]) for i in range(3)]

    def join(self, parts):
        """See `Packing`."""
        by_head = [
            tf.reshape(part, [*part.shape[:-1], self.heads, 1, part.shape[-1] // self.heads])
            for part in parts
        ]
        return tf.reshape(padded_sum(by_head, 2), [*parts[0].shape[:-1], 3 * parts[0].shape[-1]])
