"""Small layers whose variables know their names and layouts in Coqui's checkpoints.

A network is a tree of `Module`s. A module's `name` is its path below its parent in the torch module
tree (it may contain dots: `name="layers.0.1.2"`), and each variable is declared with the last part
of its key, the axis order that turns it into torch's layout, its initialisation and its
weight-decay group. So the network's own source is the mapping to the checkpoint: `Module.tensors()`
lists it, and `weights.py` and the optimiser read nothing else.

Everything is channels-last: [B, T, C]. Shapes in names: B batch, T time, C channels, G groups.
`dtype` is a Keras dtype policy: "float32" (default), "float64" (exact tests), "mixed_bfloat16"
(float32 variables, bfloat16 compute; statistics and softmax stay in float32).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import keras
import numpy as np
import tensorflow as tf

from common.xtts.operations import current
from common.xtts.shaping import dims_of

_DRAWN_AT_ONCE = 8

# An initialiser fills a shape from a generator. The distributions used are i.i.d., so layout does
# not matter.
Init = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
# "parity": decayed by Coqui's grouping only (perceiver latents and gamma, by accident of their
# names).
Decay = Literal["no", "yes", "parity"]


def zeros(_: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """All zeros."""
    return np.zeros(shape, np.float32)


def ones(_: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """All ones."""
    return np.ones(shape, np.float32)


def normal(std: float) -> Init:
    """N(0, std)."""
    return lambda rng, shape: rng.standard_normal(shape, np.float32) * np.float32(std)


def uniform(bound: float) -> Init:
    """U(-bound, bound); torch's default for linear and convolution layers has bound
    1/sqrt(fan_in).
    """
    return lambda rng, shape: rng.uniform(-bound, bound, shape).astype(np.float32)


@dataclass(frozen=True)
class Tensor:
    """One variable and what a checkpoint or an optimiser must know of it."""

    key: str  # full name in the torch state dict, without the model's own prefix
    variable: keras.Variable
    to_torch: tuple[int, ...]  # transpose(variable, to_torch) has torch's axis order
    init: Init
    decay: Decay
    trainable: bool

    @property
    def torch_shape(self) -> tuple[int, ...]:
        """The shape in torch's layout."""
        return tuple(int(self.variable.shape[axis]) for axis in self.to_torch)

    @property
    def from_torch(self) -> tuple[int, ...]:
        """The inverse permutation: transpose(array, from_torch) has this variable's axis order."""
        return tuple(int(axis) for axis in np.argsort(self.to_torch))


class Module(keras.layers.Layer):
    """Base of every network here: a Keras layer with named submodules (plain attributes or lists)
    and declared tensors.
    """

    # Regular expressions of checkpoint keys to skip when this model is loaded (leftovers of other
    # versions). Root modules set it.
    ignored_keys: tuple[str, ...] = ()

    def __init__(self, name: str, dtype: str | None = None):
        super().__init__(name=name, dtype=dtype)
        self._tensors: list[Tensor] = []
        # Variables are made in constructors, from explicit sizes: nothing is left for Keras to
        # build.
        self.built = True

    def tensor(
        self,
        key: str,
        shape: tuple[int, ...],
        init: Init = zeros,
        *,
        to_torch: tuple[int, ...] | None = None,
        decay: Decay = "no",
        trainable: bool = True,
        dtype: str | None = None,
        autocast: bool = True,
    ) -> keras.Variable:
        """Declare a variable; it holds zeros until `initialise` or `weights.load_state_dict`.

        `key` is the end of its torch name ("weight"); `to_torch` as in `Tensor` (default: same
        layout); `autocast=False` keeps the variable's own dtype under a mixed policy. TensorFlow's
        shape errors surface unchanged.
        """
        variable = self.add_weight(
            shape=shape,
            initializer="zeros",
            name=key,
            trainable=trainable,
            dtype=dtype or self.variable_dtype,
            autocast=autocast,
        )
        self._tensors.append(
            Tensor(key, variable, to_torch or tuple(range(len(shape))), init, decay, trainable)
        )
        return variable

    def tensors(self, prefix: str = "") -> Iterator[Tensor]:
        """All tensors of this module and those below it, with full keys, in order of
        construction.
        """
        for t in self._tensors:
            yield Tensor(prefix + t.key, t.variable, t.to_torch, t.init, t.decay, t.trainable)
        # Keras's own list of a layer's sub-layers, found in attributes and in lists, in order of
        # assignment.
        for module in self._flatten_layers(include_self=False, recursive=False):
            yield from module.tensors(f"{prefix}{module.name}.")

    def initialise(self, seed: int) -> None:
        """Draw every tensor from its own generator, seeded by (seed, key): equal on every machine
        and in any order.
        """

        def drawn(t: Tensor) -> np.ndarray:
            return t.init(
                np.random.default_rng([seed, zlib.crc32(t.key.encode())]), tuple(t.variable.shape)
            )

        # NumPy's generators release the GIL. Only a few at a time: drawn values wait in memory
        # until they are assigned.
        with ThreadPoolExecutor(_DRAWN_AT_ONCE) as pool:
            tensors = list(self.tensors())
            for t, values in zip(tensors, pool.map(drawn, tensors), strict=True):
                t.variable.assign(values)


class Linear(Module):
    """x [..., in] -> [..., out]. Torch keeps [out, in], we keep [in, out]."""

    def __init__(
        self,
        num_in: int,
        num_out: int,
        bias: bool = True,
        *,
        name: str,
        dtype: str | None = None,
        init: Init | None = None,
        bias_init: Init | None = None,
    ):
        super().__init__(name, dtype)
        default = uniform(1 / math.sqrt(num_in))
        self.weight = self.tensor(
            "weight", (num_in, num_out), init or default, to_torch=(1, 0), decay="yes"
        )
        self.bias = self.tensor("bias", (num_out,), bias_init or default) if bias else None

    def call(self, x, pad_to: int = 1):
        """x W + b, as one matrix product over the flattened leading axes.

        `pad_to`: add outputs of 0 up to a multiple of it.
        """
        surplus = -self.weight.shape[1] % pad_to
        if surplus == 0:
            return _affine(x, self.weight, self.bias)
        padded = (
            tf.pad(p, [[0, 0]] * (len(p.shape) - 1) + [[0, surplus]])
            for p in (tf.convert_to_tensor(self.weight), self.bias)
        )
        return _affine(x, *padded)


class HFConv1D(Module):
    """GPT-2's linear layer: Hugging Face already keeps [in, out], N(0, std), bias 0."""

    def __init__(
        self, num_in: int, num_out: int, *, name: str, std: float = 0.02, dtype: str | None = None
    ):
        super().__init__(name, dtype)
        self.weight = self.tensor("weight", (num_in, num_out), normal(std), decay="yes")
        self.bias = self.tensor("bias", (num_out,), zeros)

    def call(self, x):
        """x [..., in] -> [..., out]."""
        return current().project(x, self)

    def product(self, x):
        """`call`, in the dtype of the weights at hand."""
        return _affine(x, self.weight, self.bias)

    def matrix_and_bias(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Weight [in, out] and bias [out]."""
        return tf.convert_to_tensor(self.weight), tf.convert_to_tensor(self.bias)


def _affine(x, weight, bias):
    # One two-dimensional product: TensorFlow would broadcast the weight over the batch in a batched
    # one (seen as a tiled copy on CPU).
    weight = tf.convert_to_tensor(weight)
    y = tf.matmul(tf.reshape(x, [-1, weight.shape[0]]), weight)
    if bias is not None:
        widened = weight.shape[1] > weight.shape[0]
        y = current().add_bias(y, tf.convert_to_tensor(bias), widened)
    return tf.reshape(y, [*dims_of(x)[:-1], weight.shape[1]])


@dataclass(frozen=True)
class Window:
    """What a convolution sees of its input: `kernel` positions, `dilation` apart, every
    `stride`.
    """

    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1


class Conv1d(Module):
    """Torch's Conv1d on [B, T, in] -> [B, T', out], T' = floor((T + 2 padding - dilation (kernel -
    1) - 1) / stride) + 1.

    Zeros are padded on both sides and the convolution is "valid": "same" pads a strided convolution
    of even length differently from torch. Torch keeps [out, in, k], we keep [k, in, out].
    """

    def __init__(
        self,
        num_in: int,
        num_out: int,
        window: Window | int,
        *,
        bias: bool = True,
        name: str,
        dtype: str | None = None,
        init: Init | None = None,
        bias_init: Init | None = None,
    ):
        super().__init__(name, dtype)
        self.window = w = window if isinstance(window, Window) else Window(window)
        default = uniform(1 / math.sqrt(num_in * w.kernel))
        self.weight = self.tensor(
            "weight", (w.kernel, num_in, num_out), init or default, to_torch=(2, 1, 0), decay="yes"
        )
        self.bias = self.tensor("bias", (num_out,), bias_init or default) if bias else None

    def call(self, x):
        """x [B, T, in] -> [B, T', out]."""
        weight, w = tf.convert_to_tensor(self.weight), self.window
        if (w.kernel, w.stride, w.padding) == (1, 1, 0):
            return _affine(x, weight[0], self.bias)
        if w.padding:
            x = tf.pad(x, [[0, 0], [w.padding, w.padding], [0, 0]])
        y = current().conv1d(x, weight, w.stride, w.dilation)
        return y if self.bias is None else tf.nn.bias_add(y, tf.convert_to_tensor(self.bias))

    def matrix_and_bias(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Weight [in, out] and bias [out] of a window of one position."""
        return tf.convert_to_tensor(self.weight)[0], tf.convert_to_tensor(self.bias)


class LayerNorm(Module):
    """Affine normalisation over the last axis, eps 1e-5 (Keras's default is 1e-3), statistics in
    float32.
    """

    def __init__(
        self, num_channels: int, *, name: str, eps: float = 1e-5, dtype: str | None = None
    ):
        super().__init__(name, dtype)
        self.eps = eps
        self._convert_input_args = False  # the input may be wider than the output
        self.weight = self.tensor("weight", (num_channels,), ones, autocast=False)
        self.bias = self.tensor("bias", (num_channels,), zeros, autocast=False)

    def call(self, x):
        """x [..., C] of any float dtype -> same shape, in the compute dtype."""
        weight, bias = tf.convert_to_tensor(self.weight), tf.convert_to_tensor(self.bias)
        return current().layer_norm(x, weight, bias, self.eps, self.compute_dtype)


class GroupNorm(Module):
    """Affine normalisation of [B, T, C] over (all T, C/groups neighbouring channels), eps 1e-5,
    statistics in float32.
    """

    def __init__(
        self,
        groups: int,
        num_channels: int,
        *,
        name: str,
        eps: float = 1e-5,
        dtype: str | None = None,
    ):
        super().__init__(name, dtype)
        if num_channels % groups:
            raise ValueError(
                f"{name}: {num_channels} channels do not divide into {groups} groups; change"
                " cond_groups or width"
            )
        self.groups, self.eps = groups, eps
        self.weight = self.tensor("weight", (num_channels,), ones, autocast=False)
        self.bias = self.tensor("bias", (num_channels,), zeros, autocast=False)

    def call(self, x):
        """x [B, T, C] -> same shape and dtype."""
        weight, bias = tf.convert_to_tensor(self.weight), tf.convert_to_tensor(self.bias)
        return current().group_norm(x, weight, bias, self.groups, self.eps)


class Embedding(Module):
    """A table [num_ids, width]; several can be joined into one id space before the lookup."""

    def __init__(
        self, num_ids: int, width: int, *, name: str, std: float = 0.02, dtype: str | None = None
    ):
        super().__init__(name, dtype)
        self.weight = self.tensor("weight", (num_ids, width), normal(std))

    def call(self, ids):
        """ids int[...] -> [..., width]."""
        rows = current().lookup(tf.convert_to_tensor(self.weight), ids, self.compute_dtype)
        return tf.cast(rows, self.compute_dtype)


class DropoutSeeds:
    """A pure function from the step's seed to one seed per dropout site: no state, equal for equal
    (seed, site).

    `seed` is int32[2], or None for no dropout anywhere. Adjacent seeds give unrelated masks: they
    are hashed, not added to.
    """

    def __init__(self, seed: tf.Tensor | None, num_sites: int):
        self._seeds = None
        if seed is not None:
            self._seeds = tf.random.stateless_uniform(
                [num_sites, 2], seed, minval=None, maxval=None, dtype=tf.int32
            )

    def __getitem__(self, site: int) -> tf.Tensor | None:
        return None if self._seeds is None else self._seeds[site]
