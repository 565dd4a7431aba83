"""Speaking: text and conditioning latents to audio codes, one code at a time, in one compiled loop
over a cache of fixed size.

Shapes: B rows (texts), L latents, T prefix positions (padded), N most codes, S = L + T + N cache
positions, V audio ids, C width. Source: coqui-tts, TTS/tts/models/xtts.py (Xtts.inference),
TTS/tts/layers/xtts/gpt_inference.py; the processors of transformers.

A prefix is padded at its end to a multiple of 32 positions, and the room for codes to a multiple of
128: one compilation serves all texts of such a size. Padding cannot be seen: a row's codes begin
right after its own text, over the padding's keys in the cache, and attention ends at the position
being computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from common.xtts.dims import GptDims
from common.xtts.gpt import Cache, Gpt
from common.xtts.prefixes import pack_prefixes, round_up

CODES_MULTIPLE = 128
FAKE_ID = 1


def max_codes(dims: GptDims) -> int:
    """Most codes of one utterance, STOP included: the position table less START and what follows a
    STOP; 602 for XTTS.
    """
    return dims.max_audio_tokens - 3


@dataclass(frozen=True)
class SamplingOptions:
    """How the next code is drawn. The defaults are those of the published XTTS v2.

    Attributes:
        greedy: take the most likely code. Only the repetition penalty still applies, as in the
        original. repetition_penalty: scores of ids already in the history are divided by it where
        positive, multiplied where negative. temperature: divides the scores.
        top_k: only the k highest scores may be drawn (ties with the k-th too); 0: all.
        top_p: of those, the smallest set with this probability or more; 1: all.
        fake_history: the original's history begins with copies of id 1 in the prefix's place, so
        that code 1 is penalised from the
            first step. Without it the history begins with START alone.
        max_codes: most codes, STOP included; None, or more than the model's positions: as many as
        it has positions for. text_stop_input: the text's STOP is an input, as in the original's
        inference. Imported XTTS weights want it. Rows trained here
            end their text without it, so models trained from nothing here never saw it: leave it
            out (the default).
    """

    greedy: bool = False
    repetition_penalty: float = 5.0
    temperature: float = 0.75
    top_k: int = 50
    top_p: float = 0.85
    fake_history: bool = True
    max_codes: int | None = None
    text_stop_input: bool = False

    def __post_init__(self):
        faults = {
            f"repetition_penalty must be positive, not {self.repetition_penalty}": (
                not self.repetition_penalty > 0
            ),
            f"temperature must be positive, not {self.temperature} (greedy: true takes the"
            " likeliest code)": not self.temperature > 0,
            f"top_k must be 0 (off) or more, not {self.top_k}": self.top_k < 0,
            f"top_p must be in (0, 1], not {self.top_p}": not 0 < self.top_p <= 1,
            f"max_codes must be at least 1, not {self.max_codes}": (
                self.max_codes is not None and self.max_codes < 1
            ),
        }
        wrong = [message for message, is_wrong in faults.items() if is_wrong]
        if wrong:
            raise ValueError("; ".join(wrong))


@dataclass(frozen=True)
class Generated:
    """One text's codes.

    Attributes:
        codes: int32[n], without STOP; all below START.
        stopped: STOP was reached; False: the limit was.
        states: [n (+ 1 with STOP), C], the final states that predicted each code and STOP: the
        vocoder's latents (`latents_pass`).
    """

    codes: np.ndarray
    stopped: bool
    states: np.ndarray


class Controls(NamedTuple):
    """What steers a loop without another compilation."""

    repetition_penalty: tf.Tensor  # float32 []
    temperature: tf.Tensor  # float32 []
    top_k: tf.Tensor  # int32 []
    top_p: tf.Tensor  # float32 []
    limits: tf.Tensor  # int32 [B], most codes of each row, STOP included
    seeds: tf.Tensor  # int32 [B, 2]


class State(NamedTuple):
    """Where a loop stands, between two codes."""

    step: tf.Tensor  # int32 [], codes drawn so far
    cache: Cache  # per block: keys, values [B, S, H, D]
    prefix: tf.Tensor  # int32 [B], positions before START
    last: tf.Tensor  # int32 [B], the id to be read next: START at first
    seen: tf.Tensor  # bool [B, V], the history that the repetition penalty looks at
    done: tf.Tensor  # bool [B]
    lengths: tf.Tensor  # int32 [B], ids drawn, STOP included
    codes: tf.Tensor  # int32 [B, N], STOP after the end
    states: tf.Tensor  # float [B, N, C]


def speakable(logits_BV: tf.Tensor, dims: GptDims) -> tf.Tensor:
    """The logits, -inf for every id that is neither a code nor STOP: START.

    No target of training is START, and no codebook has a vector for it. The original does not
    forbid it.
    """
    ids = np.arange(dims.num_audio_tokens)
    return tf.where((ids < dims.start_audio) | (ids == dims.stop_audio), logits_BV, -np.inf)


def processed_scores(
    logits_BV: tf.Tensor, seen_BV: tf.Tensor, controls: Controls, greedy: bool
) -> tf.Tensor:
    """float32 [B, V] in the original's order: repetition penalty, then, unless greedy, temperature,
    top-k, top-p; -inf = not to be drawn.

    Equal scores are kept or dropped together.
    """
    penalty = controls.repetition_penalty
    scores = tf.where(
        seen_BV, tf.where(logits_BV < 0, logits_BV * penalty, logits_BV / penalty), logits_BV
    )
    if greedy:
        return scores
    scores = scores / controls.temperature
    ascending = tf.sort(scores, axis=-1)
    num_ids = scores.shape[-1]
    kept = tf.where(controls.top_k > 0, tf.minimum(controls.top_k, num_ids), num_ids)
    floor = tf.gather(ascending, num_ids - kept, axis=-1)[:, tf.newaxis]
    scores = tf.where(scores < floor, -np.inf, scores)
    ascending = tf.where(ascending < floor, -np.inf, ascending)
    # The tail whose probability is at most 1 - top_p goes, but never the last one.
    cumulative = tf.cumsum(tf.nn.softmax(ascending), axis=-1)
    dropped = tf.reduce_sum(tf.cast(cumulative <= 1 - controls.top_p, tf.int32), axis=-1)
    dropped = tf.where(controls.top_p < 1, tf.minimum(dropped, num_ids - 1), 0)
    floor = tf.gather(ascending, dropped[:, tf.newaxis], batch_dims=1)
    return tf.where(scores < floor, -np.inf, scores)


class Sampler:
    """Draws codes and STOP from a GPT, never START.

    Holds the compiled functions, so keep one per model.

    Randomness is a pure function of a row's seed: its codes do not depend on the rows beside it. A
    draw is a race of exponentials, argmax(p / q) with q ~ Exp(1), which is what `torch.multinomial`
    computes for one sample; `noise` gives the q.

    Args:
        jit: compile with XLA; faster on GPUs, slower on the CPU.
    """

    def __init__(self, gpt: Gpt, jit: bool = False):
        self.gpt, self.dims = gpt, gpt.dims
        self.max_codes = max_codes(gpt.dims)
        self.trace_counts: Counter[str] = Counter()
        self._start = tf.function(self._traced_start, jit_compile=jit, autograph=False)
        self._advance = tf.function(self._traced_advance, jit_compile=jit, autograph=False)

    def generate(
        self,
        latents,
        text_ids: Sequence[int],
        options: SamplingOptions,
        seed: int | tuple[int, int] = 0,
        noise: np.ndarray | None = None,
    ) -> Generated:
        """Codes of one text.

        Args:
            latents: [1, L, C], conditioning latents of the voice.
            text_ids: int[l], language tag and text as `Tokenizer.encode` gives them: no START, no
            STOP. seed: one int32 or a pair; the same seed gives the same codes on the same kind of
            device and in the same
                compile mode (XLA's generator gives other bits).
            noise: float32 [steps, V], Exp(1) draws to use instead of the seed's; at least
            `max_codes` steps.

        Raises ValueError: the text is empty or too long, or a shape does not fit.
        """
        noise = None if noise is None else np.asarray(noise, np.float32)[:, np.newaxis]
        return self.generate_batch(latents, [text_ids], options, [seed], noise=noise)[0]

    def generate_batch(
        self,
        latents,
        texts: Sequence[Sequence[int]],
        options: SamplingOptions,
        seeds: Sequence[int | tuple[int, int]],
        limits: Sequence[int] | None = None,
        noise: np.ndarray | None = None,
    ) -> list[Generated]:
        """Codes of several texts at once: latents [B, L, C], a seed per row, and per row the most
        codes (default: options.max_codes).

        `noise` is float32 [steps, B, V]. ValueError as in `generate`.
        """
        state, controls, most = self._begin(latents, texts, options, seeds, limits, noise)
        noise = None if noise is None else tf.constant(noise[:most], tf.float32)
        return self._results(
            self._advance(state, controls, tf.constant(most), options.greedy, noise)
        )

    def generate_best(
        self,
        latents,
        text_ids: Sequence[int],
        options: SamplingOptions,
        seeds: Sequence[int | tuple[int, int]],
    ) -> Generated:
        """Codes of one text, drawn once per seed, all at once: of the draws that ended by
        themselves (of all, if none did) the one that
        the model finds likeliest (`log_likelihood`). One seed: as `generate`.
        """
        if len(seeds) == 1:
            return self.generate(latents, text_ids, options, seeds[0])
        drawn = self.generate_batch(
            tf.repeat(latents, len(seeds), axis=0), [text_ids] * len(seeds), options, seeds
        )
        return likeliest(self.gpt, drawn)

    def stream(
        self,
        latents,
        text_ids: Sequence[int],
        options: SamplingOptions,
        seed: int | tuple[int, int] = 0,
        every: int = 20,
    ) -> Iterator[Generated]:
        """Like `generate`, but gives what there is after each `every` codes, and at the end the
        whole.
        """
        if every < 1:
            raise ValueError(f"a stream needs at least 1 code per chunk, not {every}")
        state, controls, most = self._begin(latents, [text_ids], options, [seed], None, None)
        until = 0
        while until < most and not bool(tf.reduce_all(state.done)):
            until = min(until + every, most)
            state = self._advance(state, controls, tf.constant(until), options.greedy, None)
            yield self._results(state)[0]

    def _begin(self, latents, texts, options, seeds, limits, noise) -> tuple[State, Controls, int]:
        """Check, pad, run the prefix -> (state before the first code, controls, most codes of any
        row).
        """
        ids, positions, lengths = pack_prefixes(texts, self.dims, options.text_stop_input)
        rows = len(texts)
        limit = min(options.max_codes or self.max_codes, self.max_codes)
        limits = [min(limit, n) for n in limits] if limits is not None else [limit] * rows
        most = max(limits)
        wanted = [rows, self.dims.num_latents, self.dims.width]
        if list(latents.shape) != wanted:
            raise ValueError(f"latents are {list(latents.shape)}, {rows} texts need {wanted}")
        if not len(seeds) == len(limits) == rows or min(limits) < 1:
            raise ValueError(
                f"{rows} texts need as many seeds and limits of at least 1, got {len(seeds)} and"
                f" {limits}"
            )
        if noise is not None and (
            noise.shape[0] < most or list(noise.shape[1:]) != [rows, self.dims.num_audio_tokens]
        ):
            raise ValueError(
                f"noise is {list(noise.shape)}, needs at least"
                f" {[most, rows, self.dims.num_audio_tokens]}"
            )
        capacity = min(round_up(most, CODES_MULTIPLE), self.max_codes)
        state = self._start(
            tf.convert_to_tensor(latents),
            tf.constant(ids),
            tf.constant(positions),
            tf.constant(lengths),
            options.fake_history,
            capacity,
        )
        controls = Controls(
            tf.constant(options.repetition_penalty, tf.float32),
            tf.constant(options.temperature, tf.float32),
            tf.constant(options.top_k, tf.int32),
            tf.constant(options.top_p, tf.float32),
            tf.constant(limits, tf.int32),
            tf.constant([s if isinstance(s, tuple) else (s, 0) for s in seeds], tf.int32),
        )
        return state, controls, most

    def _traced_start(
        self, latents, ids, positions, lengths, fake_history: bool, capacity: int
    ) -> State:
        rows, num_ids = ids.shape[0], self.dims.num_audio_tokens
        num_latents, num_positions = latents.shape[1], ids.shape[1]
        self.trace_counts[f"start/{rows}x{num_positions}+{capacity}"] += 1
        states, cache = self.gpt.prefill(
            latents, ids, positions, num_latents + num_positions + capacity
        )
        history = [self.dims.start_audio, FAKE_ID] if fake_history else [self.dims.start_audio]
        seen = np.isin(np.arange(num_ids), history)
        return State(
            step=tf.constant(0),
            cache=cache,
            prefix=num_latents + lengths,
            last=tf.fill([rows], self.dims.start_audio),
            seen=tf.tile(tf.constant(seen)[tf.newaxis], [rows, 1]),
            done=tf.zeros([rows], tf.bool),
            lengths=tf.zeros([rows], tf.int32),
            codes=tf.fill([rows, capacity], self.dims.stop_audio),
            states=tf.zeros([rows, capacity, self.dims.width], states.dtype),
        )

    def _traced_advance(
        self, state: State, controls: Controls, until, greedy: bool, noise
    ) -> State:
        """Draw codes until `until` of them are there or every row has ended."""
        self.trace_counts[f"advance/{state.codes.shape[0]}x{state.cache[0][0].shape[1]}"] += 1

        def body(*parts):
            return tuple(self._draw(State(*parts), controls, greedy, noise))

        def goes_on(*parts):
            s = State(*parts)
            return (s.step < until) & ~tf.reduce_all(s.done)

        return State(*tf.while_loop(goes_on, body, tuple(state)))

    def _draw(self, s: State, controls: Controls, greedy: bool, noise) -> State:
        dims = self.dims
        rows = s.codes.shape[0]
        positions = tf.fill([rows, 1], dims.num_text_positions + s.step)
        hidden, cache = self.gpt.decode_step(
            dims.num_text_tokens + s.last[:, tf.newaxis], positions, s.cache, s.prefix + s.step
        )
        logits = speakable(tf.cast(self.gpt.audio_logits(hidden[:, 0]), tf.float32), dims)
        scores = processed_scores(logits, s.seen, controls, greedy)
        if not greedy:
            q = self._noise(controls.seeds, s.step) if noise is None else noise[s.step]
            scores = scores - tf.math.log(q)  # argmax(p / q), in logarithms
        drawn = tf.where(s.done, dims.stop_audio, tf.argmax(scores, -1, output_type=tf.int32))
        at_BN = (tf.range(s.codes.shape[1])[tf.newaxis] == s.step) & ~s.done[:, tf.newaxis]
        lengths = s.lengths + tf.cast(~s.done, tf.int32)
        return State(
            step=s.step + 1,
            cache=cache,
            prefix=s.prefix,
            last=drawn,
            seen=s.seen | tf.one_hot(drawn, dims.num_audio_tokens, True, False, dtype=tf.bool),
            done=s.done | (drawn == dims.stop_audio) | (lengths >= controls.limits),
            lengths=lengths,
            codes=tf.where(at_BN, drawn[:, tf.newaxis], s.codes),
            states=tf.where(at_BN[:, :, tf.newaxis], hidden, s.states),
        )

    def _noise(self, seeds_B2, step):
        """float32 [B, V] of Exp(1): each row from its own seed and the step."""
        folded = [
            tf.random.experimental.stateless_fold_in(seed, step) for seed in tf.unstack(seeds_B2)
        ]
        uniform = [
            tf.random.stateless_uniform([self.dims.num_audio_tokens], seed, 1e-20, 1.0)
            for seed in folded
        ]
        return -tf.math.log(tf.stack(uniform))

    def _results(self, state: State) -> list[Generated]:
        codes, lengths, states = (
            state.codes.numpy(),
            state.lengths.numpy(),
            tf.cast(state.states, tf.float32).numpy(),
        )
        out = []
        for row, n in enumerate(lengths):
            stopped = bool(n and codes[row, n - 1] == self.dims.stop_audio)
            out.append(Generated(codes[row, : n - stopped].copy(), stopped, states[row, :n].copy()))
        return out


def log_likelihood(gpt: Gpt, generated: Generated) -> float:
    """Mean of log p over the codes and STOP, in nats: as the model itself sees them, without
    temperature, penalty or cuts; -inf of none.
    """
    ids = np.append(generated.codes, gpt.dims.stop_audio)[: len(generated.states)]
    if not len(ids):
        return float("-inf")
    logits = tf.cast(gpt.audio_logits(tf.constant(generated.states)), tf.float32)
    return -float(
        tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(ids.astype(np.int32), logits))
    )


def likeliest(gpt: Gpt, drawn: Sequence[Generated]) -> Generated:
    """Of several draws of one text the likeliest of those that ended by themselves; of all, if none
    did.
    """
    return max(
        [g for g in drawn if g.stopped and len(g.codes)] or drawn,
        key=lambda g: log_likelihood(gpt, g),
    )


def latents_pass(
    gpt: Gpt, latents, text_ids: Sequence[int], codes: Sequence[int], text_stop_input: bool = False
) -> tf.Tensor:
    """The vocoder's input for given codes: [1, L, C], int[l], int[n] -> states [1, n, C] that
    predict c1..cn, from one full pass.

    `codes` usually end with STOP, whose frame belongs to the sound. For codes that `Sampler` drew,
    `Generated.states` are these already. The original appends four STOPs and drops their states,
    which causality makes the same.
    """
    dims = gpt.dims
    text = [dims.start_text, *text_ids, *([dims.stop_text] if text_stop_input else [])]
    audio = np.array([dims.start_audio, *codes[:-1]])
    ids = np.concatenate([text, dims.num_text_tokens + audio])[np.newaxis]
    positions = np.concatenate(
        [np.arange(len(text)), dims.num_text_positions + np.arange(len(audio))]
    )[np.newaxis]
    hidden = gpt.hidden(
        tf.convert_to_tensor(latents), tf.constant(ids, tf.int32), tf.constant(positions, tf.int32)
    )
    return hidden[:, dims.num_latents + len(text) :]
