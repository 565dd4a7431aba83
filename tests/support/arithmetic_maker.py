"""Batches without audio and without TensorFlow, for tests of the transport: arithmetic stands in
for the features.

    value int64[B]     3 · utterance id + 7; 0 in rows of weight 0
    seed int64[B]      the row's seed without its lowest bit; 0 in rows of weight 0
    weights float32[B]

So order, loss and duplication can be told from a sum (`arithmetic.ROW_BYTES` adds a load of zeros).
For chaos tests the environment variable ARITHMETIC_MAKE_MS gives the milliseconds that each batch
takes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import numpy as np
import xxhash

from common.data.batch import empty_batch
from common.data.plan import PlannedBatch
from common.run.folder import RunFolder
from producer.batches.maker import Clip, Made, Work

SLEEP_MS = "ARITHMETIC_MAKE_MS"


def value_of(utterances: np.ndarray) -> np.ndarray:
    """int64[B]: what `ArithmeticMaker` sends for utterance ids int64[B]; -1 (padding) gives 0."""
    return np.where(utterances >= 0, 3 * utterances + 7, 0)


def dvae_maker(run: RunFolder) -> ArithmeticMaker:
    """Of stage 1."""
    return ArithmeticMaker(run, "dvae")


def gpt_maker(run: RunFolder) -> ArithmeticMaker:
    """Of stage 2."""
    return ArithmeticMaker(run, "gpt")


class ArithmeticMaker:
    """Makes batches of kind "arithmetic" (see `producer.batches.maker.Maker`)."""

    num_traces = 0

    def __init__(self, run: RunFolder, stage: str):
        self._run, self.stage = run, stage
        self.feature_hash = run.feature_hash(stage)
        self._plans = {name: run.plan(stage, name) for name in ("train", "eval")}
        self._sleep_s = float(os.environ.get(SLEEP_MS, 0)) / 1000

    def plan(self, name: str, g: int) -> PlannedBatch:
        """Batch `g` of plan `name`. IndexError: there is none; KeyError: no such plan."""
        return self._plans[name].batch(g)

    def clips(self, planned: PlannedBatch) -> list[Clip]:
        """Nothing to decode."""
        return []

    def compiles(self, planned: PlannedBatch) -> bool:
        """Nothing to compile."""
        return False

    def begin(
        self,
        planned: PlannedBatch,
        clips: Sequence[Clip],
        decoded: Sequence[np.ndarray | Exception],
    ) -> Work:
        """All of it counts as the device's."""
        return Work(lambda: self.make(planned, clips, decoded), lambda made: made)

    def make(
        self,
        planned: PlannedBatch,
        clips: Sequence[Clip],
        decoded: Sequence[np.ndarray | Exception],
    ) -> Made:
        """The batch's numbers (module docstring)."""
        start = time.perf_counter()
        time.sleep(self._sleep_s)
        bucket = self._plans[planned.plan].buckets[planned.bucket]
        arrays = empty_batch(
            "arithmetic", bucket, self._run.dims, self._run.config.transport.mel_dtype
        )
        arrays["value"][:] = value_of(planned.utterances)
        arrays["seed"][:] = np.where(
            planned.weights > 0, planned.row_seeds >> np.uint64(1), 0
        ).astype(np.int64)
        arrays["weights"][:] = planned.weights
        return Made(arrays, [], {"make": time.perf_counter() - start})

    def probe(self) -> str:
        """The same everywhere."""
        return xxhash.xxh3_128(value_of(np.arange(-1, 16)).tobytes()).hexdigest()
