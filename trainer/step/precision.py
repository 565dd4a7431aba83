"""How the networks compute on this process's device: what the settings ask for, as far as a check
finds the device able.

The choice is logged once; nothing falls back silently.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import tensorflow as tf

from common.run.settings import Config
from common.xtts.fast_operations import fast_but
from common.xtts.operations import PLAIN, Operations

log = logging.getLogger(__name__)

_BF16_FROM = (8, 0)  # compute capability: Ampere


@dataclass(frozen=True)
class Precision:
    """What a step is built with: a Keras dtype policy and the operations."""

    compute_dtype: str
    operations: Operations


def allow_tf32(config: Config) -> None:
    """Let float32 products run in TF32 on the GPU, unless the settings ask for float32.

    Before anything is traced.
    """
    tf.config.experimental.enable_tensor_float_32_execution(config.train.precision != "fp32")


def choose(config: Config, why_not: Callable[[], str | None]) -> Precision:
    """Decide for the GPT, before anything is traced.

    Args:
        config: the run's resolved settings.
        why_not: why the fused attention cannot be used here; None: it can.
    """
    wanted, gpu = config.train.precision, bool(tf.config.list_logical_devices("GPU"))
    precision = wanted
    if wanted == "bf16" and not (gpu and config.jit):
        # Without XLA, TensorFlow adds up the gradients of biases in bfloat16: they come out a third
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
    return Precision("mixed_bfloat16", _fast(config, why_not))


def _fast(config: Config, why_not: Callable[[], str | None]) -> Operations:
    # The fast lookup's gradient adds up in no fixed order.
    plain = ("lookup",) if config.deterministic else ()
    reason = why_not()
    if reason is not None:
        log.warning("precision bf16, plain attention: %s", reason)
        return fast_but(*plain, "attention", "causal_attention")
    rate = config.train.attention_dropout
    if rate:
        log.info(
            "precision bf16, plain attention in the GPT: train.attention_dropout is %g, and the"
            " fused kernel drops nothing",
            rate,
        )
    else:
        log.info("precision bf16, fused attention (cuDNN), no attention dropout")
    return fast_but(*plain)


def _capability() -> tuple[int, int]:
    details = tf.config.experimental.get_device_details(tf.config.list_physical_devices("GPU")[0])
    return details.get("compute_capability") or (0, 0)
