"""What serving needs of the code that makes a stage's batches.

`gpt.py` and `dvae.py` implement it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from common.data.manifest import Utterance
from common.data.plan import PlannedBatch


@dataclass(frozen=True)
class Clip:
    """A recording, or a part of it, that a row needs.

    `start` and `num_samples` count at 22 050 Hz; None: to the end.

    `codes`: int32[n], the DVAE codes of the row's utterance where they are known already.
    `row_utterance`: the row's utterance where the recording is another one, of its speaker, that
    only lends its voice.
    `change`: what is done to the samples, once they are decoded (`producer/batches/augment.py`).
    """

    row: int
    utterance: Utterance
    start: int = 0
    num_samples: int | None = None
    codes: np.ndarray | None = field(default=None, repr=False, compare=False)
    row_utterance: Utterance | None = None
    change: Callable[[np.ndarray], np.ndarray] | None = None


@dataclass
class Made:
    """A batch, and what went wrong in it."""

    arrays: dict[str, np.ndarray] = field(repr=False)
    bad: list[tuple[int, str]] = field(
        default_factory=list
    )  # (utterance id, reason): rows of weight 0
    spent_s: dict[str, float] = field(default_factory=dict)  # by part of the work
    num_cached: int = 0  # rows whose codes were known already


@dataclass(frozen=True)
class Work:
    """What is left of a batch whose clips are packed:

    `compute` on the device, in a thread of its own, while the next batch is packed and
    the one before is sent; then `finish`, of what `compute` returned.
    """

    compute: Callable[[], Any]
    finish: Callable[[Any], Made]

    def at_once(self) -> Made:
        """Both."""
        return self.finish(self.compute())


class BatchError(ValueError):
    """A batch cannot be made at all; the trainer is told why (NACK)."""


class Maker(Protocol):
    """Makes the batches of one stage.

    A pure function of the plan and the files: the same batch is the same bytes.
    """

    feature_hash: str
    num_traces: int  # compiled functions so far

    def plan(self, name: str, g: int) -> PlannedBatch:
        """Batch `g` of plan `name`. IndexError: there is none."""

    def clips(self, planned: PlannedBatch) -> list[Clip]:
        """What must be decoded, in order of rows.

        BatchError: the manifest does not know an utterance.
        """

    def begin(
        self,
        planned: PlannedBatch,
        clips: Sequence[Clip],
        decoded: Sequence[np.ndarray | Exception],
    ) -> Work:
        """Work towards the arrays that `common.data.batch` specifies.

        An exception in place of a clip's samples makes its row weight 0.

        BatchError, here or when the work is done: a row does not fit its bucket.
        """

    def compiles(self, planned: PlannedBatch) -> bool:
        """True if making this batch will first compile its bucket's function."""

    def probe(self) -> str:
        """32 hex digits: features of a fixed signal on this device."""


def without(planned: PlannedBatch, utterances: Collection[int]) -> PlannedBatch:
    """The batch with some utterances' rows turned into padding; the other rows stay where they are,
    with their seeds. A row whose
    conditioning clip was to come from one of them takes it from its own utterance.
    """
    set_aside = np.fromiter(utterances, np.int64, len(utterances))
    out = np.isin(planned.utterances, set_aside)
    ids, weights = (
        np.where(out, -1, planned.utterances),
        np.where(out, np.float32(0), planned.weights),
    )
    prompts = np.where(out | np.isin(planned.prompts, set_aside), ids, planned.prompts)
    return dataclasses.replace(planned, utterances=ids, prompts=prompts, weights=weights)
