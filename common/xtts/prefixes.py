"""What a text is before its first code: ids and positions of several texts, padded to one shape."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from common.xtts.dims import GptDims

PREFIX_MULTIPLE = 32


def pack_prefixes(
    texts: Sequence[Sequence[int]], dims: GptDims, text_stop_input: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """START t1..tl (STOP) per row, then zeros -> ids, positions int32 [B, T], lengths int32 [B]; T
    a multiple of 32 if the table allows.

    Raises ValueError: no text, an empty one, one of `max_text_tokens` or more, or an id outside the
    vocabulary.
    """
    if not texts:
        raise ValueError("no text to speak")
    rows = [
        [dims.start_text, *map(int, text), *([dims.stop_text] if text_stop_input else [])]
        for text in texts
    ]
    for text in texts:
        if not 0 < len(text) < dims.max_text_tokens:
            raise ValueError(
                f"a text of {len(text)} tokens; the model takes 1 to {dims.max_text_tokens - 1}:"
                " split it into sentences"
            )
        if min(text) < 0 or max(text) >= dims.num_text_tokens:
            raise ValueError(
                f"text id {max(text)} is outside the model's {dims.num_text_tokens} ids: is this"
                " its vocabulary?"
            )
    lengths = np.array([len(row) for row in rows], np.int32)
    num_positions = min(round_up(int(lengths.max()), PREFIX_MULTIPLE), dims.num_text_positions)
    ids, positions = np.zeros((2, len(rows), num_positions), np.int32)
    for row, text in enumerate(rows):
        ids[row, : len(text)] = text
        positions[row, : len(text)] = np.arange(len(text))
    return ids, positions, lengths


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
