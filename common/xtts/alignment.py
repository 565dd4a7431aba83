"""Which text a model reads while it speaks: the GPT's attention from its codes to the text's
tokens.

Shapes: B batch, T time, H heads, D head width, L layers, n codes, l text tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

from common.xtts.gpt import Gpt
from common.xtts.operations import Operations, statistics_dtype, use
from common.xtts.sampling import latents_pass
from common.xtts.shaping import dims_of


@dataclass(frozen=True)
class Alignment:
    """Attention over a text, of the head that follows it best and of all heads.

    Attributes:
        best: float32[n, l]: what of its attention each code's prediction gives to each token, in
            one head.
        mean: float32[n, l]: the same, averaged over the heads of all layers.
        layer, head: of `best`, from 0.
        score: `path_scores` of `best`.
    """

    best: np.ndarray
    mean: np.ndarray
    layer: int
    head: int
    score: float


@dataclass(frozen=True)
class _Watched(Operations):
    """The plain operations, which keep what the positions `queries` attend to at `keys`. They run
    op by op: nothing is compiled for the length of one text.
    """

    queries: slice = field(kw_only=True)
    keys: slice = field(kw_only=True)
    seen: list = field(default_factory=list, compare=False)  # [H, n, l] of each layer

    def causal_attention(self, q_BTHD, k_BTHD, v_BTHD, **options):
        """As the plain one, of one row."""
        q = q_BTHD[:, self.queries]
        scores = tf.einsum("bthd,bshd->bhts", q, k_BTHD) * tf.cast(q.shape[-1] ** -0.5, q.dtype)
        scores = tf.cast(scores, statistics_dtype(scores))
        position = tf.range(dims_of(k_BTHD)[1])
        seen = position[self.queries, tf.newaxis] >= position[tf.newaxis, :]
        probabilities = tf.nn.softmax(tf.where(seen, scores, scores.dtype.min))
        self.seen.append(probabilities[0, :, :, self.keys].numpy().astype(np.float32))
        return super().causal_attention(q_BTHD, k_BTHD, v_BTHD, **options)


def attention_over_text(
    gpt: Gpt, latents, text_ids: Sequence[int], codes: Sequence[int], text_stop_input: bool = False
) -> np.ndarray:
    """[1, L, C], int[l], int[n] -> float32[layers, H, n, l]: what of the attention of the position
    that predicts each code goes to each token of the text. The rest goes to the voice, to START and
    to the codes before.

    ValueError: no codes.
    """
    if not len(codes):
        raise ValueError("no codes: nothing attends to the text")
    first = gpt.dims.num_latents + 1  # after START
    begin = first + len(text_ids) + int(text_stop_input)
    watched = _Watched(queries=slice(begin, None), keys=slice(first, first + len(text_ids)))
    with use(watched):
        latents_pass(gpt, latents, text_ids, codes, text_stop_input)
    return np.stack(watched.seen)


def align(attention: np.ndarray) -> Alignment:
    """What to look at of float32[layers, H, n, l]."""
    # Layer by layer: of 30 layers and a long text, a copy of all takes half a gigabyte.
    scores = np.stack([path_scores(of_layer) for of_layer in attention])
    layer, head = np.unravel_index(int(np.argmax(scores)), scores.shape)
    best, mean = attention[layer, head], attention.mean((0, 1))
    return Alignment(best, mean, int(layer), int(head), float(scores[layer, head]))


def path_scores(attention: np.ndarray) -> np.ndarray:
    """float32[..., n, l] -> float[...]: how well attention follows the text from its beginning to
    its end, 0 to 1.

    The largest mean over the codes of what lies on a path that never goes back, each token's mean
    over all codes taken off. So attention that is the same for all codes, spread out or on a single
    token, scores 0, and a diagonal over l tokens 1 - 1/l.
    """
    gain = attention - attention.mean(-2, keepdims=True)
    best = np.zeros(gain.shape[:-2] + gain.shape[-1:])
    for n in range(gain.shape[-2]):
        best = np.maximum.accumulate(best, -1) + gain[..., n, :]
    return np.maximum(best.max(-1) / gain.shape[-2], 0.0)
