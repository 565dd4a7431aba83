"""Cross-entropies against their definition in NumPy."""

import numpy as np
import tensorflow as tf

from trainer.step.losses import cross_entropy, gpt_losses


def reference(logits, targets, weights):
    total = count = 0.0
    for b, t in np.ndindex(targets.shape):
        if targets[b, t] >= 0:
            row = logits[b, t].astype(np.float64)
            total += weights[b] * (np.log(np.exp(row).sum()) - row[targets[b, t]])
            count += weights[b]
    return total, count


def case(seed=0):
    rng = np.random.default_rng(seed)
    logits = (3 * rng.standard_normal((3, 5, 7))).astype(np.float32)
    targets = rng.integers(-1, 7, (3, 5)).astype(np.int32)
    return logits, targets, np.array([1, 0, 1], np.float32)


def test_sum_and_count_by_the_definition():
    for weights in ([1, 1, 1], [1, 0, 1], [0.5, 2, 0]):
        logits, targets, _ = case()
        total, count = cross_entropy(
            tf.constant(logits), tf.constant(targets), tf.constant(weights, tf.float32)
        )
        np.testing.assert_allclose((total, count), reference(logits, targets, weights), rtol=1e-6)


def test_ignored_targets_and_weightless_rows_leave_no_trace():
    """Exactly: not a bit of the loss depends on the logits there, and their gradient is 0."""
    logits, targets, weights = case()
    ignored = (targets < 0) | (weights == 0)[:, None]
    other = np.where(ignored[..., None], np.float32(50) - logits, logits)
    results = []
    for x in (tf.constant(logits), tf.constant(other)):
        with tf.GradientTape() as tape:
            tape.watch(x)
            total, count = cross_entropy(x, tf.constant(targets), tf.constant(weights))
        results.append((total.numpy(), count.numpy(), tape.gradient(total, x).numpy()))
    assert results[0][:2] == results[1][:2]
    for _, _, gradient in results:
        assert not gradient[ignored].any()
    np.testing.assert_array_equal(results[0][2][~ignored], results[1][2][~ignored])


def test_means_run_over_all_tokens_of_the_micro_batch():
    (text, text_targets, weights), (audio, audio_targets, _) = case(1), case(2)
    out = {
        k: v.numpy()
        for k, v in gpt_losses(
            *map(tf.constant, (text, audio, text_targets, audio_targets, weights))
        ).items()
    }
    text_sum, text_count = reference(text, text_targets, weights)
    audio_sum, audio_count = reference(audio, audio_targets, weights)
    expected = {
        "text_sum": text_sum,
        "text_count": text_count,
        "audio_sum": audio_sum,
        "audio_count": audio_count,
        "text_ce": text_sum / text_count,
        "audio_ce": audio_sum / audio_count,
        "loss": 0.01 * text_sum / text_count + audio_sum / audio_count,
    }
    assert out.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(out[key], value, rtol=1e-6, err_msg=key)


def test_a_batch_without_targets_loses_nothing():
    """The original divides 0 by 0 here, when the prompt's segment hides every code of
    the only row.
    """
    logits, targets, weights = case()
    with tf.GradientTape() as tape:
        x = tf.constant(logits)
        tape.watch(x)
        loss = gpt_losses(
            x, x, tf.constant(targets), tf.fill(targets.shape, -1), tf.zeros_like(weights)
        )["loss"]
    assert loss.numpy() == 0
    assert not tape.gradient(loss, x).numpy().any()


def test_bfloat16_logits_are_summed_in_float32():
    logits, targets, weights = case()
    total, count = cross_entropy(
        tf.cast(logits, tf.bfloat16), tf.constant(targets), tf.constant(weights)
    )
    assert (total.dtype, count.dtype) == (tf.float32, tf.float32)
    np.testing.assert_allclose(total, reference(logits, targets, weights)[0], rtol=2e-2)
