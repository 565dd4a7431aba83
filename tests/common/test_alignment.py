"""Attention over the text, of a head whose weights say where it looks, and scores of attention with
known answers.
"""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from scipy.linalg import hadamard

from common.xtts.alignment import align, attention_over_text, path_scores
from common.xtts.gpt import Gpt
from common.xtts.sampling import latents_pass
from tests.support.gpt_cases import MICRO

DIMS = dataclasses.replace(MICRO, dropout=0.0)
TEXT, CODES = [5, 6, 7, 8, 9, 10], [1, 2, 3, 4, 5, 6]
SIGNS = hadamard(8)[1:].astype(np.float32)  # seven rows, each orthogonal to the others


def latents() -> tf.Tensor:
    return tf.zeros([1, DIMS.num_latents, DIMS.width])


def reading(order: list[int]) -> Gpt:
    """A GPT whose first head, at code i, looks at token `order[i]` of the text and nowhere else.

    Positions are the only input. A text position is [s, s], an audio position [s, -s]; keys are the
    sum of the halves (0 at audio positions), queries the first half, both long.
    """
    gpt = Gpt(DIMS, seed=1)
    for table in (gpt.text_embedding, gpt.mel_embedding, gpt.text_positions, gpt.mel_positions):
        table.weight.assign(tf.zeros_like(table.weight))
    text, audio = gpt.text_positions.weight.numpy(), gpt.mel_positions.weight.numpy()
    text[0] = np.tile(SIGNS[6], 2)  # START
    for i in range(6):
        text[1 + i] = np.tile(SIGNS[i], 2)
        audio[i] = np.concatenate([SIGNS[order[i]], -SIGNS[order[i]]])
    gpt.text_positions.weight.assign(text)
    gpt.mel_positions.weight.assign(audio)
    weight = gpt.blocks[0].c_attn.weight.numpy() * 0
    weight[:8, :8] = 10 * np.eye(8)
    weight[:8, 16:24] = weight[8:, 16:24] = np.eye(8)
    gpt.blocks[0].c_attn.weight.assign(weight)
    gpt.blocks[0].c_attn.bias.assign(tf.zeros_like(gpt.blocks[0].c_attn.bias))
    return gpt


def test_what_a_head_reads_is_what_its_weights_say():
    order = [0, 0, 1, 3, 4, 5]
    found = align(attention_over_text(reading(order), latents(), TEXT, CODES))
    assert (found.layer, found.head) == (0, 0)
    assert np.allclose(found.best, np.eye(6)[order], atol=1e-3)
    assert found.mean.shape == (6, 6)


@pytest.mark.parametrize("stop", [False, True])
def test_heads_without_a_preference_share_their_attention_out(stop):
    """Queries of nothing: every position that is seen gets as much, whichever it is."""
    gpt = Gpt(DIMS, seed=2)
    for block in gpt.blocks:
        block.c_attn.weight.assign(tf.zeros_like(block.c_attn.weight))
        block.c_attn.bias.assign(tf.zeros_like(block.c_attn.bias))
    attention = attention_over_text(gpt, latents(), TEXT, CODES[:3], stop)
    assert attention.shape == (DIMS.layers, DIMS.heads, 3, len(TEXT))
    before = DIMS.num_latents + 1 + len(TEXT) + stop  # latents, START, text, STOP
    for i in range(3):  # itself included
        assert np.allclose(attention[:, :, i], 1 / (before + 1 + i), atol=1e-6)


def test_watching_changes_nothing():
    gpt = Gpt(DIMS, seed=3)
    before = latents_pass(gpt, latents(), TEXT, CODES).numpy()
    attention_over_text(gpt, latents(), TEXT, CODES)
    assert np.array_equal(latents_pass(gpt, latents(), TEXT, CODES).numpy(), before)
    with pytest.raises(ValueError, match="no codes"):
        attention_over_text(gpt, latents(), TEXT, [])


@pytest.mark.parametrize(
    ("attention", "score"),
    [
        (np.eye(8), 1 - 1 / 8),
        (np.repeat(np.eye(4), 5, 0), 1 - 1 / 4),  # five codes a token
        (0.5 * np.eye(8), 0.5 * (1 - 1 / 8)),  # the other half looks elsewhere
        (np.full((9, 4), 0.25), 0.0),
        (np.tile(np.eye(6)[2], (9, 1)), 0.0),  # always the same token
        (np.eye(6)[::-1], 0.0),  # backwards: one token's gain is what it loses by staying there
        (np.zeros((3, 5)), 0.0),
    ],
)
def test_scores(attention, score):
    assert path_scores(attention) == pytest.approx(score)
    together = np.stack([np.zeros_like(attention), attention])[:, np.newaxis]
    assert path_scores(together) == pytest.approx(np.array([[0.0], [score]]))
    if score:
        found = align(together.astype(np.float32))
        assert (found.layer, found.head) == (1, 0)
        assert np.allclose(found.mean, attention / 2)
