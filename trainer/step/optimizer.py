"""AdamW with torch's arithmetic, over the tensors of a network, inside the caller's compiled
function.

Torch's and not Keras's: epsilon is added after the bias-corrected root, the decay is lr ·
weight_decay · p, and bias corrections are computed in float64. State is in tf.Variables; it leaves
and enters as NumPy arrays in torch's layout under torch's names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
import tensorflow as tf

from common.xtts.layers import Tensor
from common.xtts.operations import current
from common.xtts.weights import check, from_torch, to_torch

# The learning rate (float64 scalar) of update t = 1, 2, … (int64 scalar).
Schedule = Callable[[tf.Tensor], tf.Tensor]


def schedule(
    kind: Literal["constant", "cosine"],
    learning_rate: float,
    warmup_steps: int = 0,
    total_steps: int = 0,
    final_ratio: float = 0.1,
) -> Schedule:
    """Linear warm-up to `learning_rate` over `warmup_steps` updates, then constant, or a half
    cosine that reaches final_ratio · learning_rate at `total_steps` and stays there. ValueError on
    an unknown kind, or a cosine without room to fall.
    """
    if kind not in ("constant", "cosine"):
        raise ValueError(f"schedule: unknown kind {kind!r}; choose constant or cosine")
    if kind == "cosine" and total_steps <= warmup_steps:
        raise ValueError(
            f"schedule: cosine needs total_steps ({total_steps}) greater than warmup_steps"
            f" ({warmup_steps})"
        )

    def at(t: tf.Tensor) -> tf.Tensor:
        t = tf.cast(t, tf.float64)
        lr = tf.constant(learning_rate, tf.float64)
        if kind == "cosine":
            progress = tf.clip_by_value((t - warmup_steps) / (total_steps - warmup_steps), 0.0, 1.0)
            lr *= final_ratio + (1 - final_ratio) * 0.5 * (1 + tf.cos(math.pi * progress))
        return lr * tf.minimum(t / warmup_steps, 1.0) if warmup_steps else lr

    return at


class AdamW:
    """Adam with decoupled weight decay on the tensors whose `decay` says so ("parity" ones too, if
    `decay_latents`).
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        learning_rate: Schedule,
        *,
        betas: tuple[float, float] = (0.9, 0.96),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        decay_latents: bool = False,
    ):
        self.tensors = [t for t in tensors if t.trainable]
        self.learning_rate, self.betas, self.eps, self.weight_decay = (
            learning_rate,
            betas,
            eps,
            weight_decay,
        )
        groups = ("yes", "parity") if decay_latents else ("yes",)
        self.decayed = [t.decay in groups for t in self.tensors]
        # Updates done. int64, because TensorFlow keeps int32 variables in host memory.
        self.t = tf.Variable(0, dtype=tf.int64, trainable=False, name="t")
        self.exp_avg = [_zeros_like(t, "exp_avg") for t in self.tensors]
        self.exp_avg_sq = [_zeros_like(t, "exp_avg_sq") for t in self.tensors]

    @property
    def parameters(self) -> list[tf.Variable]:
        """The variables that `update` changes, in the order in which it takes their gradients."""
        return [t.variable.value for t in self.tensors]

    def update(self, gradients: Sequence[tf.Tensor], enabled: tf.Tensor) -> tf.Tensor:
        """One update in place; returns the learning rate used (float32).

        Where `enabled` (bool scalar) is false, the weights, the moments and t keep every bit,
        whatever the gradients hold.
        """
        lr, scalars = self.begin(enabled)
        for dtype in {p.dtype for p in self.parameters}:
            chosen = [i for i, p in enumerate(self.parameters) if p.dtype == dtype]
            own = [
                [values[i] for i in chosen]
                for values in (
                    self.parameters,
                    self.exp_avg,
                    self.exp_avg_sq,
                    gradients,
                    self.decayed,
                )
            ]
            self.change(*own, scalars[dtype], enabled)
        return lr

    def begin(self, enabled: tf.Tensor) -> tuple[tf.Tensor, dict[tf.DType, tf.Tensor]]:
        """Count the update; (its learning rate in float32, for each dtype of the weights the
        `num_scalars` numbers of `change`).
        """
        t = self.t + 1
        lr = self.learning_rate(t)
        scalars = {
            dtype: tf.stack(self._scalars(t, lr, dtype))
            for dtype in {p.dtype for p in self.parameters}
        }
        self.t.assign(tf.where(enabled, t, self.t))
        return tf.cast(lr, tf.float32), scalars

    num_scalars = 7

    def change(
        self,
        parameters,
        exp_avg,
        exp_avg_sq,
        gradients,
        decayed,
        scalars: tf.Tensor,
        enabled: tf.Tensor,
    ) -> None:
        """Update some tensors of one dtype by the scalars of `begin`; the lists are parallel."""
        one_minus_beta1, beta2, one_minus_beta2, root_correction, step_size, kept, eps = tf.unstack(
            scalars
        )
        for p, m, v, gradient, decays in zip(
            parameters, exp_avg, exp_avg_sq, gradients, decayed, strict=True
        ):
            new_m = m + (gradient - m) * one_minus_beta1
            new_v = v * beta2 + tf.square(gradient) * one_minus_beta2
            shrunk = p * kept if decays else p
            new = shrunk - step_size * (new_m / (tf.sqrt(new_v) / root_correction + eps))
            # Selects rather than a branch: they fuse into the update, and a branch would keep a
            # second copy of everything.
            p.assign(tf.where(enabled, new, p))
            m.assign(tf.where(enabled, new_m, m))
            v.assign(tf.where(enabled, new_v, v))

    def state_dict(self) -> dict[str, np.ndarray]:
        """`step` (int64 scalar) and `exp_avg.<key>`, `exp_avg_sq.<key>` of every trained tensor,
        copies in torch's layout.
        """
        state = {"step": np.asarray(self.t.numpy(), np.int64)}
        for name, slots in self.slots():
            state.update(
                {
                    f"{name}.{t.key}": to_torch(t, slot.numpy())
                    for t, slot in zip(self.tensors, slots, strict=True)
                }
            )
        return state

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Inverse of `state_dict`; WeightsError, and nothing changed, if names or shapes differ."""
        shapes = {
            f"{name}.{t.key}": t.torch_shape for name, _ in self.slots() for t in self.tensors
        }
        check("optimizer", {"step": (), **shapes}, state)
        for name, slots in self.slots():
            for t, slot in zip(self.tensors, slots, strict=True):
                slot.assign(from_torch(t, np.asarray(state[f"{name}.{t.key}"])))
        self.t.assign(int(state["step"]))

    def _scalars(self, t: tf.Tensor, lr: tf.Tensor, dtype: tf.DType) -> list[tf.Tensor]:
        """The scalars that all tensors of one dtype share, computed in float64 and rounded once."""
        beta1, beta2 = (tf.constant(beta, tf.float64) for beta in self.betas)
        t = tf.cast(t, tf.float64)
        step_size, root_correction = lr / (1 - tf.pow(beta1, t)), tf.sqrt(1 - tf.pow(beta2, t))
        kept = 1 - lr * self.weight_decay
        return [
            tf.cast(x, dtype)
            for x in (1 - beta1, beta2, 1 - beta2, root_correction, step_size, kept, self.eps)
        ]

    def slots(self) -> tuple[tuple[str, list[tf.Variable]], ...]:
        """The moments by name, in the order of `tensors`."""
        return ("exp_avg", self.exp_avg), ("exp_avg_sq", self.exp_avg_sq)


def global_norm(gradients: Sequence[tf.Tensor]) -> tf.Tensor:
    """√ of the sum of squares over all gradients, scalar; not finite if any of them is not."""
    return tf.sqrt(sum_of_squares(gradients))


def sum_of_squares(gradients: Sequence[tf.Tensor]) -> tf.Tensor:
    """Over all gradients, scalar."""
    return tf.add_n([tf.reduce_sum(tf.square(g)) for g in gradients])


def packed_squares(gradients: Sequence[tf.Tensor]) -> tf.Tensor:
    """The sum of squares over all gradients in few kernels: one per large tensor and one for all
    the rest. XLA would launch two for each of hundreds.
    """
    sums, small = [], []
    for g in gradients:
        flat = tf.reshape(tf.cast(g, tf.float32), [-1])
        if (columns := _columns(flat.shape[0])) > 1:
            sums.append(tf.reduce_sum(tf.square(tf.reshape(flat, [-1, columns])), 1))
        else:
            small.append(tf.square(flat))
    # Behind a barrier: XLA turns a sum over a concatenation back into sums over its parts.
    return tf.reduce_sum(current().again(tf.concat([*sums, *small], 0)))


def _columns(size: int) -> int:
    """Length of the rows into which a tensor of `size` numbers is cut for its sum; 1 for small
    ones.
    """
    columns = 1
    while columns < 1024 and size >= 2**15 and size % (2 * columns) == 0:
        columns *= 2
    return columns


def clip_coefficient(norm: tf.Tensor, clip_norm: float) -> tf.Tensor:
    """The factor of torch's clip_grad_norm_ for gradients of this global norm: min(1, clip_norm /
    (norm + 1e-6)).
    """
    return tf.minimum(clip_norm / (norm + 1e-6), 1.0)


def _zeros_like(t: Tensor, name: str) -> tf.Variable:
    return tf.Variable(
        tf.zeros(t.variable.shape, t.variable.dtype), trainable=False, name=f"{name}.{t.key}"
    )
