"""The plan: batch number → bucket, utterances, crop and dropout seeds.

It is a pure function, the same in every process.

`plan.batch(g)` needs no history: each row costs O(log) of the sizes, and no memory beyond
memory-mapped arrays of ids.

Sampling `epoch`: every utterance exactly once per epoch, reshuffled each epoch; a bucket's last,
short batch is padded with rows of weight 0, so shapes stay static and the loss exact. `balanced`:
with replacement, every language equally often (XTTS's own recipe): the bucket is drawn with weight
p_b / B_b, p_b = Σ_lang s_lang n(lang, b) / n_lang with s_lang = 1 / L, then each row's language
within it, then the utterance: the marginal distribution of "language uniformly, then utterance
uniformly". Groups with their own shares s may replace the languages. `fixed`: evaluation, in
order, no crops.

A row's conditioning clip is cut from its own utterance or, if the plan has `Prompts`, from another
one of the same speaker.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from common.data import stateless_random
from common.data.buckets import Bucket
from common.system.documents import read_json

# Purposes of the counter streams. Changing a number changes every run.
_ORDER, _ROWS, _CROP, _DROPOUT, _BUCKET, _LANGUAGE, _PICK, _PROMPT = range(8)
_NAMES = {"train": 0, "eval": 1}
_PROMPT_FILES = ("prompt_speakers", "prompt_pool", "prompt_offsets")  # of `Prompts`, in its order


@dataclass(frozen=True)
class PlannedBatch:
    """The contents of batch `g` of a plan; B = the bucket's batch size."""

    plan: str  # "train" or "eval"
    g: int
    epoch: int
    bucket: int
    utterances: np.ndarray  # int64[B], -1 in padding rows
    prompts: (
        np.ndarray
    )  # int64[B], the utterance that the conditioning clip is cut from; -1 in padding rows
    weights: np.ndarray  # float32[B], 0 in padding rows
    row_seeds: np.ndarray  # uint64[B], for crops
    seed: tuple[int, int]  # int32 pair, for dropout

    @property
    def num_rows(self) -> int:
        """Number of rows with an utterance."""
        return int((self.utterances >= 0).sum())


@dataclass(frozen=True)
class PlannedStep:
    """Step `step` (1-based): `count` batches from `first_g` on, in one epoch."""

    step: int
    epoch: int
    first_g: int
    count: int


@dataclass(frozen=True)
class Prompts:
    """Which utterances a conditioning clip may be cut from for another one: those of the same
    speaker. S speakers.
    """

    speakers: np.ndarray  # int32[N], speakers of the utterances in the plan's order
    pool: np.ndarray  # int32[P], utterance ids by speaker, then id
    offsets: np.ndarray  # int64[S + 1], where each speaker begins in `pool`

    def draw(self, positions: np.ndarray, utterances: np.ndarray, bits: np.ndarray) -> np.ndarray:
        """int64[n]: for each utterance (its position in the order, its id, uint64 random bits)
        another one of its speaker from the pool, drawn uniformly; itself if there is none.
        """
        if not len(self.pool):
            return utterances.copy()
        speakers, last = self.speakers[positions], len(self.pool) - 1
        first, end = self.offsets[speakers], self.offsets[speakers + 1]
        at, beyond = first.copy(), end.copy()
        while (search := at < beyond).any():  # for the own id, by halves, in each speaker's part
            middle = (at + beyond) >> 1
            later = self.pool[np.minimum(middle, last)] < utterances
            at = np.where(search & later, middle + 1, at)
            beyond = np.where(search & ~later, middle, beyond)
        inside = (at < end) & (self.pool[np.minimum(at, last)] == utterances)
        others = end - first - inside
        k = (stateless_random.uniform(bits) * others).astype(np.int64)
        drawn = first + k + (inside & (k >= at - first))
        return np.where(others > 0, self.pool[np.minimum(drawn, last)], utterances)


class Plan:
    """One plan of one stage. Build with `write_plan`, open with `Plan.open`.

    Args:
        name: "train" or "eval".
        seed: the run's seed, already mixed with the stage.
        sampling: "epoch", "balanced" or "fixed".
        buckets: the static shapes, shared by both plans of a stage.
        order: int32[N], utterance ids sorted by bucket, then language, then id.
        offsets: int64[buckets, languages + 1], where each (bucket, language) begins in `order`.
        prompts: where conditioning clips come from; None: every utterance from itself.
        shares: float[G], of the groups that replace the languages; None: all alike.
    """

    def __init__(
        self,
        name: str,
        seed: int,
        sampling: str,
        buckets: list[Bucket],
        order: np.ndarray,
        offsets: np.ndarray,
        prompts: Prompts | None = None,
        shares: Sequence[float] | None = None,
    ):
        self.prompts = prompts
        self.name, self.seed, self.sampling, self.buckets, self.order, self.offsets = (
            name,
            seed,
            sampling,
            buckets,
            order,
            offsets,
        )
        self.num_utterances = len(order)
        sizes = offsets[:, -1] - offsets[:, 0]
        per_bucket = np.array(
            [-(-int(n) // b.batch_size) for n, b in zip(sizes, buckets, strict=True)], np.int64
        )
        self._sizes, self._starts = sizes, np.concatenate([[0], np.cumsum(per_bucket)])
        self.batches_per_epoch = int(self._starts[-1])
        if sampling == "balanced" and self.num_utterances:
            self._prepare_balanced(shares)

    def _prepare_balanced(self, shares: Sequence[float] | None) -> None:
        counts = np.diff(self.offsets, axis=1).astype(np.float64)  # [buckets, languages]
        per_language = counts.sum(0)
        share = counts / np.where(per_language > 0, per_language, 1)
        if shares is None:
            share /= max(1, (per_language > 0).sum())
        else:
            share *= np.asarray(shares, np.float64)
        rows = np.array([b.batch_size for b in self.buckets], np.float64)
        weight = share.sum(1) / rows
        weight /= weight.sum()
        self._bucket_cdf = np.cumsum(weight)
        self._language_cdf = np.cumsum(
            share / np.where(share.sum(1, keepdims=True) > 0, share.sum(1, keepdims=True), 1),
            axis=1,
        )
        # An epoch has as many rows as there are utterances, in expectation.
        self.batches_per_epoch = max(1, round(self.num_utterances / float((weight * rows).sum())))

    @classmethod
    def open(cls, folder: str | os.PathLike, name: str) -> Plan:
        """Memory-map a plan that `write_plan` wrote. OSError where it is missing."""
        folder = Path(folder)
        meta = read_json(folder / f"{name}.json")
        order = (
            np.load(folder / f"{name}.order.npy", mmap_mode="r")
            if meta["num_utterances"]
            else np.zeros(0, np.int32)
        )
        offsets = np.load(folder / f"{name}.offsets.npy")
        prompts = None
        if meta["prompts"] and meta["num_utterances"]:
            # As plain arrays over the mapped files: slices of np.memmap cost 10 µs each, and a row
            # takes two.
            prompts = Prompts(
                *(
                    np.asarray(np.load(folder / f"{name}.{part}.npy", mmap_mode="r"))
                    for part in _PROMPT_FILES
                )
            )
        return cls(
            name,
            meta["seed"],
            meta["sampling"],
            [Bucket(**b) for b in meta["buckets"]],
            order,
            offsets,
            prompts,
            meta.get("shares"),
        )

    # -- batches -----------------------------------------------------------------------------------

    def _key(self, purpose: int, *parts: int) -> np.uint64:
        return stateless_random.key(self.seed, _NAMES[self.name], purpose, *parts)

    def _locate(self, g: int) -> tuple[int, int, int]:
        """(epoch, bucket, number of the batch within its bucket)."""
        epoch, i = divmod(g, self.batches_per_epoch)
        if self.sampling == "balanced":
            u = float(stateless_random.uniform(stateless_random.draws(self._key(_BUCKET), g)))
            return (
                epoch,
                min(int(np.searchsorted(self._bucket_cdf, u, "right")), len(self.buckets) - 1),
                0,
            )
        if self.sampling == "epoch":
            i = int(stateless_random.permute(self.batches_per_epoch, self._key(_ORDER, epoch), i))
        bucket = int(np.searchsorted(self._starts, i, "right")) - 1
        return epoch, bucket, i - int(self._starts[bucket])

    def num_rows(self, g: int) -> int:
        """Number of rows of batch g with an utterance, without building the batch."""
        _, bucket, k = self._locate(g)
        rows = self.buckets[bucket].batch_size
        return (
            rows if self.sampling == "balanced" else int(min(rows, self._sizes[bucket] - k * rows))
        )

    def bucket_of(self, g: int) -> int:
        """The bucket of batch g."""
        return self._locate(g)[1]

    def batch(self, g: int) -> PlannedBatch:
        """Batch number g.

        IndexError: g is negative, the plan is empty, or g is past the end of a fixed plan.
        """
        if (
            g < 0
            or not self.num_utterances
            or (self.sampling == "fixed" and g >= self.batches_per_epoch)
        ):
            raise IndexError(
                f"batch {g} of plan {self.name}: it has {self.batches_per_epoch} per epoch"
            )
        epoch, bucket, k = self._locate(g)
        rows = self.buckets[bucket].batch_size
        if self.sampling == "balanced":
            picks = self._pick_balanced(g, bucket, rows)
        else:
            index = np.arange(k * rows, min((k + 1) * rows, int(self._sizes[bucket])))
            if self.sampling == "epoch":
                index = stateless_random.permute(
                    int(self._sizes[bucket]), self._key(_ROWS, epoch, bucket), index
                )
            picks = self.offsets[bucket, 0] + index
        utterances = np.full(rows, -1, np.int64)
        utterances[: len(picks)] = self.order[picks]
        prompts = utterances.copy()
        if self.prompts is not None:
            bits = stateless_random.draws(self._key(_PROMPT, g), np.arange(len(picks)))
            prompts[: len(picks)] = self.prompts.draw(picks, utterances[: len(picks)], bits)
        weights = (utterances >= 0).astype(np.float32)
        dropout = stateless_random.draws(self._key(_DROPOUT, g), np.arange(2)) >> np.uint64(
            33
        )  # 31 bits: non-negative int32
        row_seeds = stateless_random.draws(self._key(_CROP, g), np.arange(rows))
        return PlannedBatch(
            self.name,
            g,
            epoch,
            bucket,
            utterances,
            prompts,
            weights,
            row_seeds,
            (int(dropout[0]), int(dropout[1])),
        )

    def _pick_balanced(self, g: int, bucket: int, rows: int) -> np.ndarray:
        u = stateless_random.uniform(
            stateless_random.draws(self._key(_LANGUAGE, g), np.arange(rows))
        )
        language = np.minimum(
            np.searchsorted(self._language_cdf[bucket], u, "right"), self.offsets.shape[1] - 2
        )
        begin, end = self.offsets[bucket, language], self.offsets[bucket, language + 1]
        v = stateless_random.uniform(stateless_random.draws(self._key(_PICK, g), np.arange(rows)))
        return begin + (v * (end - begin)).astype(np.int64)

    # -- steps -------------------------------------------------------------------------------------

    def steps_per_epoch(self, accumulate: int) -> int:
        """Optimizer updates per epoch; the last may have fewer batches."""
        return -(-self.batches_per_epoch // accumulate)

    def step(self, s: int, accumulate: int) -> PlannedStep:
        """Step s (1-based): the batches it consumes. A step never crosses an epoch's end."""
        epoch, i = divmod(s - 1, self.steps_per_epoch(accumulate))
        first = epoch * self.batches_per_epoch + i * accumulate
        return PlannedStep(
            s, epoch, first, min(accumulate, (epoch + 1) * self.batches_per_epoch - first)
        )


@dataclass(frozen=True)
class PlanRows:
    """The utterances of a plan, int[N]; the fields after `ids` belong to them, elementwise.

    `pool`: (ids, speakers), int[P] each: the utterances from which conditioning clips of others may
    be cut. None: every utterance's clip is cut from itself.
    `shares`: (int[N], float[G]), groups in place of the languages, and how much of balanced
    training each is. None: languages, all alike.
    """

    ids: np.ndarray
    bucket_of: np.ndarray
    language: np.ndarray
    speaker: np.ndarray | None = None
    pool: tuple[np.ndarray, np.ndarray] | None = None
    shares: tuple[np.ndarray, np.ndarray] | None = None


def write_plan(
    folder: Path, name: str, rows: PlanRows, *, seed: int, sampling: str, buckets: list[Bucket]
) -> str:
    """Write a plan's arrays; return the digest of its content."""
    ids, bucket_of, language = rows.ids, rows.bucket_of, rows.language
    folder.mkdir(parents=True, exist_ok=True)
    if rows.shares is not None:
        language = rows.shares[0]
    num_languages = int(language.max()) + 1 if len(language) else 1
    rank = np.lexsort((ids, language, bucket_of))
    order = np.ascontiguousarray(ids[rank], np.int32)
    cell = bucket_of[rank].astype(np.int64) * num_languages + language[rank]
    bounds = np.searchsorted(cell, np.arange(len(buckets) * num_languages + 1))
    offsets = np.stack(
        [bounds[b * num_languages : (b + 1) * num_languages + 1] for b in range(len(buckets))]
    ).astype(np.int64)
    meta = {
        "seed": seed,
        "sampling": sampling,
        "num_utterances": len(ids),
        "prompts": rows.pool is not None,
    }
    meta |= {"buckets": [b.to_dict() for b in buckets]}
    if rows.shares is not None:
        meta["shares"] = rows.shares[1][:num_languages].tolist()
    text = json.dumps(meta, indent=1)
    arrays = {"order": order, "offsets": offsets}
    if rows.pool is not None:
        arrays |= dict(
            zip(_PROMPT_FILES, _prompt_arrays(rows.speaker[rank], *rows.pool), strict=True)
        )
    h = xxhash.xxh3_128(text.encode())
    for part, array in arrays.items():
        np.save(folder / f"{name}.{part}.npy", array)
        h.update(array.tobytes())
    (folder / f"{name}.json").write_text(text)
    return h.hexdigest()


def _prompt_arrays(
    speakers: np.ndarray, ids: np.ndarray, of: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The arrays of `Prompts` for utterances of these speakers, from the pool's ids and their
    speakers.
    """
    rank = np.lexsort((ids, of))
    num_speakers = 1 + max(int(speakers.max(initial=-1)), int(of.max(initial=-1)))
    offsets = np.searchsorted(of[rank], np.arange(num_speakers + 1)).astype(np.int64)
    return (
        np.ascontiguousarray(speakers, np.int32),
        np.ascontiguousarray(ids[rank], np.int32),
        offsets,
    )
