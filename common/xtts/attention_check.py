"""Try cuDNN's flash attention on this process's device against the plain attention."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

import tensorflow as tf

from common.xtts.fused_attention import fused_attention
from common.xtts.operations import PLAIN

_TOLERANCE = 0.03  # of the gradients' norms, against the plain implementation in bfloat16


def why_not() -> str | None:
    """Try the fused kernel on this process's device, forward and backward, causal and not, against
    plain attention.

    None if it may be used, else the reason in one line.
    """
    if not tf.config.list_logical_devices("GPU"):
        return "no GPU"
    try:
        with ThreadPoolExecutor(2) as pool:  # nearly all of the time is compilation
            worst = max(pool.map(_error, (True, False)))
    except (tf.errors.OpError, NotImplementedError) as e:
        return f"cuDNN's fused attention does not run here: {str(e).splitlines()[0][:200]}"
    return None if worst <= _TOLERANCE else f"cuDNN's fused attention is off by {worst:.1%} here"


def _error(causal: bool) -> float:
    """Largest relative error of the output and the three gradients, on 2 x 67 positions and 2 heads
    of width 64; infinite if anything is not finite, also with scores a thousand times as large.
    """

    def gradients(attend, *qkv):
        with tf.GradientTape() as tape:
            tape.watch(qkv)
            out = attend(*qkv)
            loss = tf.reduce_sum(tf.cast(out, tf.float32) * tf.sin(tf.range(64.0)))
        return [tf.cast(x, tf.float32) for x in (out, *tape.gradient(loss, qkv))]

    @tf.function(jit_compile=True, autograph=False)
    def errors():
        qkv = [
            tf.cast(x, tf.bfloat16)
            for x in tf.unstack(tf.random.stateless_normal([3, 2, 67, 2, 64], [1, 2]))
        ]
        plain = gradients(PLAIN.causal_attention if causal else PLAIN.attention, *qkv)
        attend = functools.partial(fused_attention, causal=causal)
        fused = gradients(attend, *qkv)
        large = gradients(attend, qkv[0] * 32, qkv[1] * 32, qkv[2])
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(x)) for x in large])
        errors = tf.stack([tf.norm(f - p) / tf.norm(p) for f, p in zip(fused, plain, strict=True)])
        return tf.where(finite, errors, float("inf"))

    worst = float(tf.reduce_max(errors()))
    return worst if worst == worst else float("inf")
