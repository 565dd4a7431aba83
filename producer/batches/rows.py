"""Turn text tokens and audio codes into rows of a stage-2 batch: ids, positions and targets, in
NumPy.

Shapes: B rows, T row positions, Lt text-head positions, n codes, l text tokens.
A row: START t1..tl | START c1..cn STOP STOP STOP | padding, contiguous, so that a plain causal mask
is right. The target at a position is what the next one holds: t1..tl STOP under the text, c1..cn
STOP STOP STOP STOP under the audio. `RowLayout` has a STOP as input after the text (without a
target), and fewer STOPs at the end, as options. Source: coqui-tts, TTS/tts/layers/xtts/gpt.py
(GPT.forward), whose padding in the middle of a row is left out here.
"""

from __future__ import annotations

import numpy as np

from common.data.buckets import XTTS_ROW, RowLayout
from common.run.settings import Config
from common.xtts.dims import AudioDims, GptDims
from producer.batches.maker import BatchError

NO_TARGET = -1
FRAME_SAMPLES = 256


def layout_of(config: Config) -> RowLayout:
    """The rows of a run."""
    return RowLayout(config.batching.text_stop_input, config.batching.stop_labels)


def num_codes(num_samples: int, samples_per_code: int = 1024) -> int:
    """Codes of an utterance: ceil(samples / 1024), the last one partly silence."""
    return -(-num_samples // samples_per_code)


def most_codes(num_samples: np.ndarray, phases: int, audio: AudioDims) -> np.ndarray:
    """Codes of utterances of int[N] samples when they begin latest (`batching.code_phases`): a
    bucket must have room for these.
    """
    return num_codes(
        num_samples.astype(np.int64) + (phases - 1) * audio.hop_samples, audio.samples_per_code
    )


def prompt_codes(start: int, length: int, n: int, samples_per_code: int = 1024) -> tuple[int, int]:
    """Code indices [first, end) hidden from the loss because the conditioning clip `[start, start +
    length)` shows them; samples count from where the codes begin.

    Both ends are floored. A clip that covers all n codes leaves the last one: a row without a code
    target would teach STOP alone. GPT.forward intends the same; `prompt_targets_of_coqui` is what
    it does.
    """
    first, end = start // samples_per_code, min((start + length) // samples_per_code, n)
    if first == 0 and end >= n:
        end = n - 1
    return first, max(first, end)


def hidden_share(num_samples: np.ndarray, audio: AudioDims) -> float:
    """The expected share of all codes hidden in training if each of these utterances (int[N]
    samples, N > 0) gives its own conditioning clip (`common.xtts.audio.prompt_slice`).
    """
    lengths = np.linspace(audio.cond_min_samples, audio.cond_max_samples, 33)
    shown = sum(
        np.where(num_samples < length, num_samples / 2, length).sum() for length in lengths
    ) / len(lengths)
    return float(shown / num_samples.sum())


def prompt_targets_of_coqui(start: int, length: int) -> tuple[int, int]:
    """The targets [first, end) that XTTS's trainer ignores, in the last row of a batch only.

    It counts mel frames of 256 samples where the targets are codes of 1024, so these may include
    STOPs, even all of them. Source: GPT.forward.
    """
    return start // FRAME_SAMPLES, (start + length) // FRAME_SAMPLES


def pack_row(
    arrays: dict[str, np.ndarray],
    row: int,
    tokens: np.ndarray,
    codes: np.ndarray,
    hidden: tuple[int, int] | None,
    gpt: GptDims,
    layout: RowLayout = XTTS_ROW,
) -> None:
    """Write one utterance into row `row` of a batch; a row that is never written stays padding.

    Args:
        arrays: ids, positions, audio_targets int32[B,T] and text_targets int32[B,Lt], as
            `common.data.batch.empty_batch` makes them.
        row: index of a row that is still padding.
        tokens: int[l] text ids, language tag included, without START and STOP.
        codes: int[n] DVAE codes.
        hidden: audio targets [first, end) that are left out (`prompt_codes`), or None. Index i is
            code i, the STOPs follow.
        gpt: ids and offsets; audio ids follow the text ids, audio positions the text positions.

    Raises BatchError when the utterance is longer than the row.
    """
    num_labels, n = len(tokens) + 1, len(codes)
    num_text, num_audio = len(tokens) + layout.num_text, n + layout.num_audio
    end = num_text + num_audio
    row_len, text_len = arrays["ids"].shape[1], arrays["text_targets"].shape[1]
    if end > row_len or num_labels > text_len:
        raise BatchError(
            f"{len(tokens)} text tokens and {n} codes need {end} positions ({num_labels} of text),"
            f" bucket has {row_len} ({text_len})"
        )
    ids, positions = arrays["ids"][row], arrays["positions"][row]
    ids[0] = gpt.start_text
    ids[1:num_labels] = tokens
    ids[num_labels:num_text] = gpt.stop_text
    ids[num_text] = gpt.num_text_tokens + gpt.start_audio
    ids[num_text + 1 : num_text + 1 + n] = codes
    ids[num_text + 1 : num_text + 1 + n] += gpt.num_text_tokens
    ids[num_text + 1 + n : end] = gpt.num_text_tokens + gpt.stop_audio
    positions[:num_text] = np.arange(num_text)
    positions[num_text:end] = np.arange(gpt.num_text_positions, gpt.num_text_positions + num_audio)
    text = arrays["text_targets"][row]
    text[: num_labels - 1] = tokens
    text[num_labels - 1] = gpt.stop_text
    audio = arrays["audio_targets"][row, num_text:end]
    audio[:n] = codes
    audio[n:] = gpt.stop_audio
    if hidden is not None:
        audio[hidden[0] : hidden[1]] = NO_TARGET
