"""Arithmetic in place of the networks, so that the loop, the channel, the ledger and the
checkpoints can be put through hundreds of crashes in seconds. The state depends on every value, on
the order of the batches, on how they are grouped, and on the seeds.

`ARITHMETIC_STEP_MS` makes each micro-step take that long, for tests of slow trainers and for kills
at random points. `ARITHMETIC_FAULT` names a file `UPDATE TEXT`: the update fails, as on a GPU that
does; the file is gone then.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from common.run.folder import RunFolder
from common.xtts.dims import SIZES
from trainer.feed import HostCopy
from trainer.history.schedule import Schedule
from trainer.step.contract import StepOptions

_PRIME = 2**31 - 1
STEP_MS = "ARITHMETIC_STEP_MS"
FAULT = "ARITHMETIC_FAULT"


def make(run: RunFolder, schedule: Schedule) -> tuple[ArithmeticStep, HostCopy]:
    """A stage's step, and how batches reach it."""
    del run, schedule
    return ArithmeticStep(), HostCopy()


class ArithmeticStep:
    """Implements `trainer.step.contract.Step`. The weights are eight integers below 2^31 − 1; an
    update is w ← 31 w + gradient (mod p).
    """

    compiles = False
    model = None
    dims, options = SIZES["tiny"], StepOptions()  # what the networks would have

    def __init__(self):
        self.weights = np.arange(1, 9, dtype=np.int64)
        self.moment = np.zeros(8, np.int64)
        self.t = 0
        self._parts: list[int] = []
        self._ranks = None
        self._seconds = float(os.environ.get(STEP_MS, "0")) / 1e3
        self.trace_counts: Counter[str] = Counter()

    def micro(
        self, bucket: int, batch: Mapping[str, np.ndarray], seed: tuple[int, int], scale: float
    ) -> dict:
        """Fold a batch into the group; the order within the group matters."""
        time.sleep(self._seconds)
        live = np.asarray(batch["weights"]) > 0
        value = np.where(live, np.asarray(batch["value"]), 0) % _PRIME
        salt = np.where(live, np.asarray(batch["seed"]), 0) % _PRIME
        row = np.arange(1, len(value) + 1, dtype=np.int64)
        total = (
            ((value * row) % _PRIME).sum()
            + salt.sum()
            + seed[0]
            + seed[1]
            + bucket
            + round(scale * 1e6)
        )
        self._parts.append(int(total) % _PRIME)
        return {"loss": float(total % 997), "finite": True}

    def apply(self) -> dict:
        """Update from the group."""
        _fail_at(self.t + 1)
        group, powers = np.zeros(8, np.int64), np.arange(1, 9, dtype=np.int64)
        for part in self._all_parts():
            group = (group * 7 + part * powers) % _PRIME
        self.moment = (self.moment * 3 + group) % _PRIME
        self.weights = (self.weights * 31 + self.moment) % _PRIME
        self.t += 1
        self._parts = []
        return {
            "loss": float(self.weights[0] % 997) / 997,
            "grad_norm": 1.0,
            "learning_rate": 1.0,
            "finite": True,
        }

    def share(self, ranks) -> None:
        """See `SharedStep.share`."""
        self._ranks = ranks

    def _all_parts(self) -> list[int]:
        """The group's batches in order, whoever computed them: batch i by rank i mod count."""
        if self._ranks is None:
            return self._parts
        own = np.array(self._parts, np.int64).tobytes()
        given = [np.frombuffer(part, np.int64) for part in self._ranks.meet(own)]
        count = sum(len(part) for part in given)
        return [int(given[i % len(given)][i // len(given)]) for i in range(count)]

    def digests(self) -> dict[str, str]:
        """See `SharedStep.digests`."""
        state = self.state_dict()
        return {f"{part}/{k}": v.tobytes().hex() for part in state for k, v in state[part].items()}

    def update(self, bucket: int, batch: Mapping[str, np.ndarray], seed: tuple[int, int]) -> dict:
        """`micro` with scale 1, and `apply`."""
        self.micro(bucket, batch, seed, 1.0)
        return self.apply()

    def read(self, scalars: dict) -> dict[str, float]:
        """Floats."""
        return {k: float(v) for k, v in scalars.items()}

    def evaluate(self, bucket: int, batch: Mapping[str, np.ndarray]) -> dict:
        """A sum over the live rows that depends on the weights and changes none."""
        time.sleep(self._seconds)
        live = np.asarray(batch["weights"]) > 0
        total = float(
            (np.where(live, np.asarray(batch["value"]), 0) % 101).sum() + self.weights[0] % 89
        )
        return {"audio_sum": total, "audio_count": float(live.sum())}

    def dry_run(self, bucket: int, grouped: bool) -> None:
        """Nothing to compile."""

    def dry_evaluate(self, bucket: int) -> None:
        """Nothing to compile."""

    def programs(self, bucket: int, grouped: bool, training: bool) -> list:
        """None."""
        return []

    def state_dict(self) -> dict:
        """Weights and moments."""
        return {
            "model": {"weights": self.weights.copy()},
            "optimizer": {"moment": self.moment.copy(), "t": np.array(self.t, np.int64)},
        }

    def snapshot(self) -> dict:
        """`state_dict`, which copies."""
        return self.state_dict()

    def load_state_dict(self, state: dict) -> None:
        """Inverse of `state_dict`; drops a group begun."""
        self.weights = state["model"]["weights"].copy()
        self.moment = state["optimizer"]["moment"].copy()
        self.t = int(state["optimizer"]["t"])
        self._parts = []


def _fail_at(update: int) -> None:
    file = Path(os.environ.get(FAULT, os.devnull))
    if not file.is_file():
        return
    due, text = file.read_text().split(" ", 1)
    if update == int(due):
        file.unlink()
        raise RuntimeError(text)
