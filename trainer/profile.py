"""Inside the trainer of a profile run (`launch.py profile`): the real loop, first as always, then
waiting for every call.

XTTS_PROFILE=N in the environment: N steps run freely; they give the waits, the rates, and what each
batch cost the producers. The steps after them wait for the device in every call; they give
forward/backward and optimizer. Then the same calls are repeated on batches already on the device:
that gives the ceiling, the rate if data were always there. All results go into RUN/profile.json.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.run.folder import RunFolder
from common.run.published import publish
from common.system.files import write_atomically
from trainer import stages
from trainer.report.clock import ClockedStep
from trainer.report.verdict import OWN_PARTS, Measured, verdict
from trainer.report.watch import FedRecord, Watch, spare

log = logging.getLogger(__name__)

ASKED = "XTTS_PROFILE"
FILE = "profile.json"
CEILING_STEPS, REPEATS = 100, 5
BATCH_PARTS = (
    "read",
    "decode",
    "resample",
    *(p for p in OWN_PARTS if p != "read"),
    "decode_wait",
    "device_wait",
    "lease_wait",
)


def waited_steps(free: int) -> int:
    """Steps that wait for every call, after `free` free ones."""
    return min(30, max(10, free // 4))


def all_steps(free: int) -> int:
    """Steps of a profile run."""
    return free + waited_steps(free)


def free_steps() -> int | None:
    """How many free steps this process must profile; None: it is not a profile run."""
    text = os.environ.get(ASKED)
    return int(text) if text else None


def untrained_dvae(run: RunFolder) -> None:
    """Replace stage 1 by its initial weights, whose codes take as long as trained ones."""
    run.dvae_weights.parent.mkdir(exist_ok=True)
    publish(run, stages.build(run, "dvae").step.state_dict()["model"])


def summary(samples: Sequence[float]) -> dict[str, float]:
    """{"mean", "std", "p95", "n"} of seconds; mean 0 if there are none."""
    if not len(samples):
        return {"mean": 0.0, "std": 0.0, "p95": 0.0, "n": 0}
    values = np.asarray(samples, np.float64)
    return {
        "mean": float(values.mean()),
        "std": float(values.std()),
        "p95": float(np.percentile(values, 95)),
        "n": len(values),
    }


class Profiler:
    """Records the calls of a stage's steps, and measures when they are over.

    Args:
        watch: the stage's watch; it keeps all steps.
        free: how many steps run freely.
    """

    def __init__(self, watch: Watch, free: int):
        self._watch, self._free = watch, free
        watch.clock.sync_from = free
        self._calls: list[tuple] = []  # ("micro", bucket, scale), ("update", bucket), ("apply",)
        self._batches: dict[
            int, tuple[Mapping[str, Any], Any]
        ] = {}  # bucket → a batch on the device and its seed
        self._step: ClockedStep | None = None

    def wrap(self, step: ClockedStep) -> RecordedStep:
        """`step`, recording its calls."""
        self._step = step
        return RecordedStep(step, self)

    def note(self, call: tuple, batch: Mapping[str, Any] | None = None, seed: Any = None) -> None:
        """Note a call."""
        self._calls.append(call)
        if batch is not None:
            self._batches[call[1]] = (batch, seed)

    def finish(self, path: Path, upload, save_every: int) -> None:
        """Measure the ceiling, the transfer and the optimizer alone, and write the file."""
        steps = [s for s in self._watch.steps if s.number < self._free]
        speed = self._watch.speed(steps)
        if speed is None:
            log.warning(
                "too few steps to profile: only %d of %d are usable; ask for more with --steps",
                len(steps),
                self._free,
            )
            return
        samples = dict(self._watch.clock.samples)
        per_step = sum(len(s.batches) for s in steps) / len(
            steps
        )  # an epoch's last step may have fewer
        rows = self._rows(steps, samples, save_every)
        ceiling_s = self._ceiling_s([s.number for s in steps]) / per_step
        rows["transfer"] = summary(self._transfers_s(upload))
        trainer_s = {
            k: rows[k]["mean"] / per_step for k in ("compute", "optimizer", "logging", "checkpoint")
        }
        m = speed.measured
        measured = Measured(
            m.batch_s,
            m.wait_s,
            m.feed_s,
            m.transit_s,
            trainer_s,
            m.producers,
            m.settings,
            ceiling_s,
        )
        document = {
            "steps": rows,
            "batch": _batch_rows(
                [b for s in steps for b in s.batches if s.settled]
                or [b for s in steps for b in s.batches]
            ),
            "batches_per_step": per_step,
            "speed": speed.record(),
            "ceiling_ms": 1e3 * ceiling_s,
            "producers": {
                "count": len(m.producers),
                "could_make_per_s": m.made_per_s,
                "needed": measured.producers_needed,
            },
            "verdict": vars(verdict(measured)),
            "gpus": [vars(u) for u in speed.gpus],
            "spare": spare(speed.gpus),
        }
        write_atomically(path, json.dumps(document, indent=1))

    def _rows(self, steps, samples: dict[str, list[float]], save_every: int) -> dict:
        """Per step: wait, compute, optimizer, logging, checkpoint (its pause spread over
        `save_every`), total.
        """
        compute = samples.get("compute", [])
        optimizer = samples.get("optimizer") or self._optimizer_s()
        if "optimizer" not in samples and optimizer:
            alone = statistics.fmean(optimizer)
            compute = [max(0.0, c - alone) for c in compute]  # one call does both
        return {
            "wait": summary([s.wait_s for s in steps]),
            "compute": summary(compute),
            "optimizer": summary(optimizer),
            "logging": summary(list(self._watch.logged_s)[: len(steps)]),
            "checkpoint": summary([s / save_every for s in self._watch.saved_s]),
            "total": summary([s.total_s for s in steps]),
        }

    def _optimizer_s(self) -> list[float]:
        """Seconds for an update of nothing. Its first call compiles."""
        seconds = []
        for _ in range(1 + REPEATS):
            start = time.perf_counter()
            float(self._step.apply()["loss"])
            seconds.append(time.perf_counter() - start)
        return seconds[1:]

    def _ceiling_s(self, numbers: list[int]) -> float:
        """Seconds per step of these steps' calls, repeated on batches that are there."""
        self._watch.clock.sync_from = None
        steps, calls = [], []
        for call in self._calls:
            calls.append(call)
            if call[0] in ("apply", "update"):
                steps.append(calls)
                calls = []
        chosen = [steps[n] for n in numbers[-CEILING_STEPS:]]
        self._repeat(chosen[0])
        start = time.perf_counter()
        self._repeat([call for calls in chosen for call in calls])
        return (time.perf_counter() - start) / len(chosen)

    def _repeat(self, calls: list[tuple]) -> None:
        result = None
        for kind, *rest in calls:
            if kind == "apply":
                result = self._step.apply()
                continue
            batch, seed = self._batches[rest[0]]
            if kind == "micro":
                result = self._step.micro(rest[0], batch, seed, rest[1])
            else:
                result = self._step.update(rest[0], batch, seed)
        float(result["loss"])

    def _transfers_s(self, upload) -> list[float]:
        """Transfer a batch of each shape to an idle device."""
        seconds = []
        for batch, _ in self._batches.values():
            arrays = {k: np.asarray(v) for k, v in batch.items()}
            for _ in range(REPEATS):
                start = time.perf_counter()
                fields, _ = upload.to_device(upload.to_host(arrays, (0, 0)), lambda: None)
                np.asarray(fields["weights"])
                seconds.append(time.perf_counter() - start)
        return seconds


class RecordedStep:
    """A clocked step whose calls a profiler notes."""

    def __init__(self, step: ClockedStep, profiler: Profiler):
        self._step, self._profiler = step, profiler

    def __getattr__(self, name: str):
        return getattr(self._step, name)

    def micro(self, bucket: int, batch: Mapping[str, Any], seed: Any, scale: float):
        """See `Step.micro`."""
        self._profiler.note(("micro", bucket, scale), batch, seed)
        return self._step.micro(bucket, batch, seed, scale)

    def apply(self):
        """See `Step.apply`."""
        self._profiler.note(("apply",))
        return self._step.apply()

    def update(self, bucket: int, batch: Mapping[str, Any], seed: Any):
        """See `Step.update`."""
        self._profiler.note(("update", bucket), batch, seed)
        return self._step.update(bucket, batch, seed)


def _batch_rows(batches: list[FedRecord]) -> dict[str, dict[str, float]]:
    """Part → summary of its seconds per batch, for the parts that occurred; decode and resample are
    summed over threads.
    """
    rows = {}
    for part in BATCH_PARTS:
        values = [b.notes.spent_ms.get(part, 0.0) / 1e3 for b in batches if b.notes.spent_ms]
        if any(values):
            rows[part] = summary(values)
    return rows
