"""Cuts a corpus into buckets: edges on the row's length that leave the fewest padded positions.

A row has `(l + 1) + (n + 4)` positions after the conditioning latents, for l text tokens and n
codes (see `RowLayout`). Buckets are one-dimensional on that length; two-dimensional ones need about
five times as many for the same padding.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Bucket:
    """A static shape, shared by every batch of the bucket.

    `row_len` counts positions after the conditioning latents; `text_len` is the longest text part
    (tokens and START); `num_codes` the longest code part. The DVAE stage has one bucket whose
    `row_len` counts mel frames.
    """

    batch_size: int
    row_len: int
    text_len: int
    num_codes: int

    @property
    def num_samples(self) -> int:
        """Samples of the longest wav, rounded up to whole codes of 1024 samples."""
        return self.num_codes * 1024

    def to_dict(self) -> dict:
        """The fields as plain values."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class RowLayout:
    """What surrounds tokens and codes: START t1..tl [STOP] | START c1..cn and `stop_labels` - 1
    STOPs. Default: XTTS's, in training.
    """

    text_stop_input: bool = False
    stop_labels: int = 4

    @property
    def num_text(self) -> int:
        """Text positions besides the tokens."""
        return 1 + self.text_stop_input

    @property
    def num_audio(self) -> int:
        """Audio positions besides the codes."""
        return self.stop_labels


XTTS_ROW = RowLayout()


def row_lengths(
    num_tokens: np.ndarray, num_codes: np.ndarray, layout: RowLayout = XTTS_ROW
) -> np.ndarray:
    """Positions of each utterance's row after the conditioning latents."""
    return (
        num_tokens.astype(np.int64)
        + layout.num_text
        + num_codes.astype(np.int64)
        + layout.num_audio
    )


def cut(lengths: np.ndarray, num_buckets: int) -> list[int]:
    """At most `num_buckets` upper edges (inclusive, ascending) that minimise the sum of edge −
    length, exactly.

    Dynamic programming over the distinct lengths, O(buckets x distinct²) in NumPy: under 0.1 s for
    600 lengths.
    """
    values, counts = np.unique(np.asarray(lengths, np.int64), return_counts=True)
    m = len(values)
    if m == 0:
        return []
    k = min(num_buckets, m)
    total = np.concatenate([[0], np.cumsum(counts)]).astype(
        np.float64
    )  # utterances among the first i lengths
    best = (
        values * total[1:]
    )  # cost of the first j+1 lengths in one bucket: each padded up to the last
    back = np.zeros((k, m), np.int64)
    for b in range(1, k):
        new = best.copy()
        for j in range(1, m):
            # lengths i..j go into the last bucket, 0..i-1 into the b before it
            cost = best[:j] + values[j] * (total[j + 1] - total[1 : j + 1])
            i = int(np.argmin(cost))
            if cost[i] < new[j]:
                new[j], back[b, j] = cost[i], i + 1
        best = new
    edges, j, b = [], m - 1, k - 1
    while j >= 0:
        edges.append(int(values[j]))
        i = int(back[b, j]) if b > 0 else 0
        j, b = i - 1, b - 1
    return edges[::-1]


def padded_share(lengths: np.ndarray, edges: list[int]) -> float:
    """Padded positions as a share of all positions, for whole batches."""
    edges = np.asarray(edges)
    padded = edges[np.searchsorted(edges, lengths)]
    return float(1.0 - lengths.sum() / padded.sum())


def make_buckets(
    num_tokens: np.ndarray,
    num_codes: np.ndarray,
    *,
    num_buckets: int,
    batch_size: int,
    positions_per_batch: int | None,
    num_latents: int,
    layout: RowLayout = XTTS_ROW,
) -> tuple[list[Bucket], np.ndarray]:
    """Buckets for a corpus and each utterance's bucket number (int16[N]).

    A bucket costs a compilation and a short batch per epoch, so there is at most one per four
    batches of data.
    """
    lengths = row_lengths(num_tokens, num_codes, layout)
    if positions_per_batch is None:
        num_batches = -(-len(lengths) // batch_size)
    else:
        num_batches = -(-int(lengths.sum() + num_latents * len(lengths)) // positions_per_batch)
    edges = cut(lengths, max(1, min(num_buckets, num_batches // 4)))
    of = np.searchsorted(np.asarray(edges), lengths).astype(np.int16)
    buckets = []
    for b, edge in enumerate(edges):
        rows = (
            batch_size
            if positions_per_batch is None
            else max(1, positions_per_batch // (edge + num_latents))
        )
        buckets.append(
            Bucket(rows, edge, int(num_tokens[of == b].max()) + 1, int(num_codes[of == b].max()))
        )
    return buckets, of
