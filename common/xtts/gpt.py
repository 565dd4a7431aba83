"""The GPT stack of XTTS v2: conditioning latents, text and audio codes in one causal sequence.

Source: coqui-tts, TTS/tts/layers/xtts/gpt.py (GPT).

A row is [latents | START text | START codes STOP STOP STOP | padding]: contiguous, so causality
alone is the mask. Text and audio share one id space and one position space here: audio ids are
offset by `num_text_tokens`, audio positions by `num_text_positions`. Padding comes last, where
nothing before it can see it; its ids and positions must be valid and its targets -1.

Shapes: B batch, T row length without the latents, L latents, P = L + T, S cache length, H heads, D
head width, C width.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import tensorflow as tf

from common.xtts.dims import GptDims
from common.xtts.dropout_mask import kept
from common.xtts.layers import (
    DropoutSeeds,
    Embedding,
    HFConv1D,
    LayerNorm,
    Linear,
    Module,
)
from common.xtts.operations import current
from common.xtts.options import GptOptions
from common.xtts.perceiver import ConditioningEncoder, PerceiverResampler
from common.xtts.shaping import KindsOutside, dims_of, merge_heads

# Keys and values of every block, each [B, S, H, D]. A tuple per block, so that a step rewrites no
# other block's.
Cache = tuple[tuple[tf.Tensor, tf.Tensor], ...]

_SITES_PER_BLOCK = 3  # attention probabilities, attention output, MLP output


class GptBlock(Module):
    """GPT-2's pre-norm block with tanh GELU: x += c_proj(attention(ln_1 x)); x += mlp(ln_2 x)."""

    def __init__(
        self,
        dims: GptDims,
        *,
        name: str,
        dtype: str | None = None,
        attention_dropout: float | None = None,
    ):
        super().__init__(name, dtype)
        width = dims.width
        self._convert_input_args = False  # the residual stream may be wider than the compute dtype
        self.packing, self.dropout = KindsOutside(dims.heads), dims.dropout
        self.attention_dropout = dims.dropout if attention_dropout is None else attention_dropout
        # GPT-2 shrinks what is added to the residual stream by its number of additions.
        residual_std = 0.02 / math.sqrt(2 * dims.layers)
        self.ln_1 = LayerNorm(width, name="ln_1", dtype=dtype)
        self.c_attn = HFConv1D(width, 3 * width, name="attn.c_attn", dtype=dtype)
        self.c_proj = HFConv1D(width, width, std=residual_std, name="attn.c_proj", dtype=dtype)
        self.ln_2 = LayerNorm(width, name="ln_2", dtype=dtype)
        self.c_fc = HFConv1D(width, 4 * width, name="mlp.c_fc", dtype=dtype)
        self.mlp_proj = HFConv1D(4 * width, width, std=residual_std, name="mlp.c_proj", dtype=dtype)

    @property
    def projections(self) -> dict[str, HFConv1D]:
        """The block's products by name."""
        return {
            "qkv": self.c_attn,
            "attention": self.c_proj,
            "up": self.c_fc,
            "down": self.mlp_proj,
        }

    def call(self, x, seeds=(None, None, None), key_mask=None):
        """x [B, P, C] -> [B, P, C]; `seeds`: one int32[2] (or None) per dropout site; `key_mask` as
        in `causal_attention`.
        """
        return self.with_keys(x, seeds, key_mask)[0]

    def with_keys(self, x, seeds=(None, None, None), key_mask=None):
        """Like `call`, and also this block's keys and values, [B, P, H, D] each."""
        q, k, v = self._qkv(x)
        attended = current().causal_attention(
            q, k, v, dropout_rate=self.attention_dropout, seed=seeds[0], key_mask_BT=key_mask
        )
        return self._add(x, attended, seeds), (k, v)

    def step(self, x, cache, index):
        """x [B, 1, C], the block's cache, index int32[B] -> x, cache: writes position `index` and
        attends to 0..index.
        """
        q, k, v = self._qkv(x)
        slot_BS = tf.range(cache[0].shape[1])[tf.newaxis, :]
        # A select over the cache, not a scatter: it reads what attention reads anyway, and takes an
        # index per row.
        written = (slot_BS == index[:, tf.newaxis])[:, :, tf.newaxis, tf.newaxis]
        keys, values = tf.where(written, k, cache[0]), tf.where(written, v, cache[1])
        seen = (slot_BS <= index[:, tf.newaxis])[:, tf.newaxis, tf.newaxis, :]
        attended = current().attention(q, keys, values, mask=seen)
        return self._add(x, attended, (None, None, None)), (keys, values)

    def _qkv(self, x):
        return current().qkv(self.ln_1(x), self.c_attn, self.packing)

    def _add(self, x, attended, seeds):
        ops = current()
        projected = ops.dropout(self.c_proj(merge_heads(attended)), self.dropout, seeds[1])
        x = x + tf.cast(projected, x.dtype)
        hidden = ops.gelu_tanh(self.c_fc(self.ln_2(x)))
        return x + tf.cast(ops.dropout(self.mlp_proj(hidden), self.dropout, seeds[2]), x.dtype)


class Gpt(Module):
    """All 426 tensors of XTTS's `gpt.` at size xtts: conditioning encoder, perceiver, embeddings,
    blocks, norms and heads.

    `seed` initialises the weights (as the original's, except that the token embeddings are N(0,
    0.02): N(0, 1) is torch's default left standing by accident, and `options.parity_init` restores
    it). Without a seed the weights are zeros, to be loaded.

    `options.code_dropout` hides codes, which the model must infer from the text and the codes
    before. With `options.recompute`, only each block's input is kept for the backward pass, which
    computes the block again: a third more work, and activations of one block instead of all.
    """

    # Left by inference runs, by v1 and by old transformers releases.
    ignored_keys = (r"gpt_inference\..*", r"gpt\.wte\..*", r"gpt\.h\.\d+\.attn\.(bias|masked_bias)")

    def __init__(
        self,
        dims: GptDims,
        options: GptOptions | None = None,
        *,
        name: str = "gpt",
        dtype: str | None = None,
        seed: int | None = None,
    ):
        super().__init__(name, dtype)
        options = options or GptOptions()
        if options.dropout is not None:
            dims = dataclasses.replace(dims, dropout=options.dropout)
        self.dims, self.code_dropout, self.recompute = dims, options.code_dropout, options.recompute
        width, token_std = dims.width, 1.0 if options.parity_init else 0.02
        self.conditioning_encoder = ConditioningEncoder(dims, dtype=dtype)
        self.conditioning_perceiver = PerceiverResampler(dims, dtype=dtype)
        self.text_embedding = Embedding(
            dims.num_text_tokens, width, std=token_std, name="text_embedding", dtype=dtype
        )
        self.mel_embedding = Embedding(
            dims.num_audio_tokens, width, std=token_std, name="mel_embedding", dtype=dtype
        )
        self.text_positions = Embedding(
            dims.num_text_positions, width, name="text_pos_embedding.emb", dtype=dtype
        )
        self.mel_positions = Embedding(
            dims.num_audio_positions, width, name="mel_pos_embedding.emb", dtype=dtype
        )
        self.blocks = [
            GptBlock(
                dims, name=f"gpt.h.{i}", dtype=dtype, attention_dropout=options.attention_dropout
            )
            for i in range(dims.layers)
        ]
        # Two norms in a row, as trained: GPT2Model's own and the original's.
        self.ln_f = LayerNorm(width, name="gpt.ln_f", dtype=dtype)
        self.final_norm = LayerNorm(width, name="final_norm", dtype=dtype)
        self.text_head = Linear(width, dims.num_text_tokens, name="text_head", dtype=dtype)
        self.mel_head = Linear(width, dims.num_audio_tokens, name="mel_head", dtype=dtype)
        if seed is not None:
            self.initialise(seed)

    def style_latents(self, cond_mel, training: bool = False):
        """Normalised log-mel [B, S, 80] of the reference clip -> [B, L, C].

        `training` changes nothing: there is no dropout here.
        """
        del training
        return self.conditioning_perceiver(self.conditioning_encoder(cond_mel))

    def hidden(self, latents, ids, positions, seed=None, attention_mask=None):
        """latents [B, L, C], ids and positions int32[B, T] -> states [B, L + T, C], after both
        final norms.

        `seed` int32[2]: dropout, a pure function of it; None: no dropout. `attention_mask` [B, L +
        T] (nonzero = visible key) is only needed for layouts with padding in the middle.
        """
        if attention_mask is not None:
            attention_mask = tf.convert_to_tensor(attention_mask)
        x, seeds = self.stem(latents, ids, positions, seed)
        for block, of_block in zip(self.blocks, seeds, strict=True):
            x = self.through(block, x, of_block, attention_mask)
        return self.normed(x)

    def stem(self, latents, ids, positions, seed=None):
        """Input of the first block, [B, L + T, C], and for each block the seeds of its dropout
        sites: three int32[2], or None.
        """
        num_blocks = self.dims.layers
        last = 1 + _SITES_PER_BLOCK * num_blocks
        seeds = DropoutSeeds(seed, last + 1)
        ops = current()
        x = self._inputs(latents, ids, positions, seeds[last])
        x = ops.dropout(x, self.dims.dropout, seeds[0])
        x = tf.cast(x, ops.residual_dtype(x))
        sites = [
            range(1 + _SITES_PER_BLOCK * i, 1 + _SITES_PER_BLOCK * (i + 1))
            for i in range(num_blocks)
        ]
        return x, [tuple(seeds[site] for site in of_block) for of_block in sites]

    def through(self, block, x, seeds, key_mask=None):
        """`block`, one of `blocks`, as training runs it."""
        run = recomputed(block) if self.recompute and seeds[0] is not None else block
        return run(x, seeds, key_mask)

    def normed(self, x):
        """Apply both final norms to the last block's output."""
        return self.final_norm(self.ln_f(x))

    def text_logits(self, hidden):
        """States [..., C] -> [..., V], V at least num_text_tokens: classes of padding follow up
        to a whole `class_tile`.
        """
        return self._logits(self.text_head, hidden)

    def audio_logits(self, hidden):
        """States [..., C] -> [..., V], V at least num_audio_tokens as in `text_logits`; class k is
        audio code k (no offset).
        """
        return self._logits(self.mel_head, hidden)

    def _logits(self, head, hidden):
        return head(hidden, pad_to=current().class_tile)

    def prefill(self, latents, ids, positions, cache_len: int):
        """Run a prefix once -> (states [B, L + T, C], cache of `cache_len` >= L + T positions,
        zeros where not yet written).

        Rows may have different lengths: pad at the end, and let `decode_step` start each row at its
        own length.
        """
        x = self._inputs(latents, ids, positions)
        padding = cache_len - dims_of(x)[1]
        cache = []
        for block in self.blocks:
            x, keys_values = block.with_keys(x)
            cache.append(tuple(_pad_time(part, padding, cache_len) for part in keys_values))
        return self.final_norm(self.ln_f(x)), tuple(cache)

    def decode_step(self, ids, positions, cache: Cache, index):
        """One more position: ids, positions int32[B, 1] -> (states [B, 1, C], cache).

        Made for the body of a `tf.while_loop`.

        `index` int32, scalar or [B], is where the position goes, counted from the first latent;
        keys after it are not seen.
        """
        x = self._embed(ids, positions)
        index = tf.broadcast_to(tf.cast(index, tf.int32), dims_of(x)[:1])
        new_cache = []
        for block, keys_values in zip(self.blocks, cache, strict=True):
            x, keys_values = block.step(x, keys_values, index)
            new_cache.append(keys_values)
        return self.final_norm(self.ln_f(x)), tuple(new_cache)

    def _inputs(self, latents, ids, positions, seed=None):
        return tf.concat(
            [tf.cast(latents, self.compute_dtype), self._embed(ids, positions, seed)], 1
        )

    def _embed(self, ids, positions, seed=None):
        """`seed` decides which codes are dropped; None: none."""
        tokens = tf.concat([self.text_embedding.weight, self.mel_embedding.weight], 0)
        places = tf.concat([self.text_positions.weight, self.mel_positions.weight], 0)
        ops, dtype = current(), self.compute_dtype
        embedded = ops.lookup(tokens, ids, dtype)
        if self.code_dropout and seed is not None:
            code = ids - self.dims.num_text_tokens
            hidden = (
                (code >= 0)
                & (code < self.dims.start_audio)
                & ~kept(tuple(ids.shape), self.code_dropout, seed)
            )
            embedded = tf.where(hidden[..., tf.newaxis], tf.zeros([], embedded.dtype), embedded)
        return tf.cast(embedded + ops.lookup(places, positions, dtype), dtype)


def recomputed(block: Callable) -> Callable:
    """`block(x, seeds, key_mask)` that keeps only its inputs for the backward pass and runs again
    there.
    """

    def run(x, seeds, key_mask):
        def apply(x):
            def grad(d_out, variables):
                # The second run must wait for the gradient: XLA would merge two equal computations
                # and keep the values of the first.
                later = current().after(x, d_out)
                with tf.GradientTape(watch_accessed_variables=False) as tape:
                    tape.watch([later, *variables])
                    out = block(later, seeds, key_mask)
                gradients = tape.gradient(out, [later, *variables], d_out)
                return gradients[0], gradients[1:]

            return block(x, seeds, key_mask), grad

        return tf.custom_gradient(apply)(x)

    return run


def _pad_time(x_BTHD, padding, cache_len):
    padded = tf.pad(x_BTHD, [[0, 0], [0, padding], [0, 0], [0, 0]])
    # Static again even after a prefix of unknown length, as the loop's shape invariants need it.
    return tf.ensure_shape(padded, [x_BTHD.shape[0], cache_len, *x_BTHD.shape[2:]])
