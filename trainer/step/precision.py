"""How the networks compute on this process's device: what the settings ask for, and what a check
finds that the device can do.

What was found is said in the log once; nothing falls back in silence.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import tensorflow as tf

from common.run.settings import Config
from common.xtts.attention_check import why_not
from common.xtts.kernels import FAST, PLAIN, Kernels

log = logging.getLogger(__name__)

_BF16_FROM = (8, 0)  # compute capability: Ampere


@dataclass(frozen=True)
class Precision:
    """What a step is built with: a Keras dtype policy and the kernels."""

    compute_dtype: str
    kernels: Kernels


def allow_tf32(config: Config) -> None:
    """Let float32 products run in TF32 on the GPU, unless the run is to be in float32.

    Before anything is traced.
    """
    tf.config.experimental.enable_tensor_float_32_execution(config.train.precision != "fp32")


def choose(config: Config) -> Precision:
    """Decide for the GPT, before anything is traced. `config` is a run's resolved one."""
    wanted, gpu = config.train.precision, bool(tf.config.list_logical_devices("GPU"))
    precision = wanted
    if wanted == "bf16" and not (gpu and config.jit):
        # Without XLA, TensorFlow adds the gradients of biases up in bfloat16: they come out a third
        # wrong.
        precision = "fp32"
        log.warning("train.precision bf16 needs a GPU and jit: fp32")
    elif wanted == "bf16" and (capability := _capability()) < _BF16_FROM:
        precision = "fp32"
        log.warning(
            "train.precision bf16 needs compute capability 8.0, this card has %d.%d: fp32",
            *capability,
        )
    if precision != "bf16":
        log.info("precision %s, plain attention", precision)
        return Precision("float32", PLAIN)
    return Precision("mixed_bfloat16", _fast(config))


def _fast(config: Config) -> Kernels:
    kernels = replace(FAST, embedding_grad="matmul") if config.deterministic else FAST
    reason = why_not()
    if reason is not None:
        log.warning("precision bf16, plain attention: %s", reason)
        return replace(kernels, attention="plain")
    rate = config.train.attention_dropout
    if rate:
        log.info(
            "precision bf16, plain attention in the GPT: train.attention_dropout is %g, and the"
            " fused kernel drops nothing",
            rate,
        )
    else:
        log.info("precision bf16, fused attention (cuDNN), no attention dropout")
    return kernels


def _capability() -> tuple[int, int]:
    details = tf.config.experimental.get_device_details(tf.config.list_physical_devices("GPU")[0])
    return details.get("compute_capability") or (0, 0)
