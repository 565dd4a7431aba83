"""Stage 1's crops: which mel frames of a clip a row shows, and the samples that they are computed
from.
"""

from __future__ import annotations

import numpy as np

from common.xtts.audio import counter_hash
from common.xtts.dims import AudioDims
from common.xtts.filterbank import num_frames


def crop_frames(
    num_samples: int, row_seed: int, frames: int, audio: AudioDims, training: bool
) -> tuple[int, int]:
    """Stage 1's crop of an utterance: (first frame, number of frames <= `frames`).

    Training: uniform (hash counter 0 of the row's seed); evaluation: the middle. A shorter
    utterance is taken whole.
    """
    total = num_frames(num_samples, audio.hop_samples)
    n = min(frames, total)
    first = (counter_hash(row_seed, 0) * (total - n + 1)) >> 64 if training else (total - n) // 2
    return first, n


def crop_span(first: int, n: int, num_samples: int, audio: AudioDims) -> tuple[int, int]:
    """The samples [start, end) of the clip from which frames first .. first + n - 1 are computed,
    including reflections at its borders.
    """
    half = audio.win_samples // 2
    start, end = first * audio.hop_samples - half, (first + n - 1) * audio.hop_samples + half
    # np.pad reflects at most all but one of the samples it has.
    return max(0, min(start, num_samples - half - 1)), min(num_samples, max(end, half + 1))


def crop_samples(
    part: np.ndarray, span: tuple[int, int], first: int, n: int, audio: AudioDims
) -> np.ndarray:
    """float32[(n + 3) · hop]: what the windows of frames first .. first + n - 1 see, from `part` =
    the clip's samples of `span`.

    Beyond the clip's ends it is reflected, as the centred STFT of the whole clip does.
    """
    half = audio.win_samples // 2
    start, end = first * audio.hop_samples - half, (first + n - 1) * audio.hop_samples + half
    left, right = max(0, -start), max(0, end - span[1])
    padded = np.pad(part, (left, right), mode="reflect")
    offset = start - (span[0] - left)
    return padded[offset : offset + end - start]
