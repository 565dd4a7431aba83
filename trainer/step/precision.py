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
from common.system.errors import BadInput
from common.xtts.fast_operations import fast_but
from common.xtts.operations import PLAIN, Operations
from trainer.step.contract import Fp8

log = logging.getLogger(__name__)

_BF16_FROM = (8, 0)  # compute capability: Ampere
_FP8_FROM = (8, 9)  # Ada; Hopper is 9.0


@dataclass(frozen=True)
class Precision:
    """What a step is built with: a Keras dtype policy, the operations, and which products have
    operands in FP8.
    """

    compute_dtype: str
    operations: Operations
    fp8: Fp8 | None = None


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

    Raises:
        BadInput: this card has no products in FP8.
    """
    wanted, gpu = config.train.precision, bool(tf.config.list_logical_devices("GPU"))
    if wanted == "fp8":
        return _fp8(config, why_not, gpu)
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


def _fp8(config: Config, why_not: Callable[[], str | None], gpu: bool) -> Precision:
    if not gpu:
        # The same numbers in the operands, multiplied in float32.
        log.warning("precision fp8 on the CPU: products are emulated, and slower than fp32")
        return Precision("float32", PLAIN, Fp8())
    if (capability := _capability()) < _FP8_FROM:
        raise BadInput(
            f"train.precision=fp8 needs a card of compute capability 8.9 or later, this one has"
            f" {capability[0]}.{capability[1]}; set train.precision=bf16"
        )
    return Precision("mixed_bfloat16", _fast(config, why_not), Fp8())


def _fast(config: Config, why_not: Callable[[], str | None]) -> Operations:
    name = config.train.precision
    # The fast lookup's gradient adds up in no fixed order.
    plain = ("lookup",) if config.deterministic else ()
    reason = why_not()
    if reason is not None:
        log.warning("precision %s, plain attention: %s", name, reason)
        return fast_but(*plain, "attention", "causal_attention")
    rate = config.train.attention_dropout
    if rate:
        log.info(
            "precision %s, plain attention in the GPT: train.attention_dropout is %g, and the"
            " fused kernel drops nothing",
            name,
            rate,
        )
    else:
        log.info("precision %s, fused attention (cuDNN), no attention dropout", name)
    return fast_but(*plain)


def _capability() -> tuple[int, int]:
    details = tf.config.experimental.get_device_details(tf.config.list_physical_devices("GPU")[0])
    return details.get("compute_capability") or (0, 0)
