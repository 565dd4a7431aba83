"""Cross-entropies of stage 2, as GPT.forward of coqui-tts computes them.

Shapes: B rows, T positions, V classes.
"""

from __future__ import annotations

import tensorflow as tf

from common.xtts.operations import current, statistics_dtype

IGNORED = -1  # a target without a loss


def cross_entropy(
    logits: tf.Tensor, targets: tf.Tensor, row_weights: tf.Tensor, num_classes: int | None = None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Weighted sum of -log p(target) and the weight it sums over, both scalar float32 (float64 for
    float64 logits).

    logits [B, T, V], of which the first `num_classes` (default: all) are classes; targets int32[B,
    T] with -1 ignored, row_weights [B] (0: a padding row). The mean is sum / count. An ignored
    target adds exactly 0 to both, and its gradient is exactly 0, as long as the logits there are
    finite.
    """
    dtype = statistics_dtype(logits)
    weights = tf.cast(targets != IGNORED, dtype) * tf.cast(row_weights, dtype)[:, tf.newaxis]
    ce_sum = current().cross_entropy_sum(
        logits, tf.maximum(targets, 0), weights, num_classes or logits.shape[-1]
    )
    return ce_sum, tf.reduce_sum(weights)


def gpt_losses(
    text_logits: tf.Tensor,
    audio_logits: tf.Tensor,
    text_targets: tf.Tensor,
    audio_targets: tf.Tensor,
    row_weights: tf.Tensor,
    text_loss_weight: float = 0.01,
    num_classes: tuple[int | None, int | None] = (None, None),
) -> dict[str, tf.Tensor]:
    """Losses of one micro-batch, all scalars:

    `loss` = text_loss_weight · text_ce + audio_ce, the two means over all its tokens that
    are not ignored, and their sums and counts (`text_sum`, `text_count`, `audio_sum`,
    `audio_count`).

    text_logits [B, Lt, V], audio_logits [B, T, V'], targets, weights and `num_classes` (text,
    audio) as in `cross_entropy`. Without any target a mean is 0.
    """
    text_sum, text_count = cross_entropy(text_logits, text_targets, row_weights, num_classes[0])
    audio_sum, audio_count = cross_entropy(audio_logits, audio_targets, row_weights, num_classes[1])
    text_ce, audio_ce = (
        tf.math.divide_no_nan(text_sum, text_count),
        tf.math.divide_no_nan(audio_sum, audio_count),
    )
    return {
        "loss": text_loss_weight * text_ce + audio_ce,
        "text_ce": text_ce,
        "audio_ce": audio_ce,
        "text_sum": text_sum,
        "text_count": text_count,
        "audio_sum": audio_sum,
        "audio_count": audio_count,
    }
