"""What a stage shows while it runs: metrics.jsonl, TensorBoard, the status file that the console reads, and the log."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from pathlib import Path

from common.board import Board
from common.status import StatusFile

log = logging.getLogger(__name__)

_RECENT_STEPS = 50


class Observer:
    """Receives what the loop measures.

    Args:
        folder: gets metrics.jsonl and tensorboard/.
        stage: (number, name), for the status.
    """

    def __init__(self, folder: Path, status: StatusFile, *, stage: tuple[int, str], total_steps: int, log_every: int, window: int):
        self._metrics = open(folder / "metrics.jsonl", "a", encoding="utf-8", buffering=1)
        self._board = Board(folder / "tensorboard")
        self._status, self._total, self._log_every, self._window = status, total_steps, log_every, window
        self._recent: deque[tuple[float, int, float, float]] = deque(maxlen=_RECENT_STEPS)  # end time, rows, seconds, waited
        self._began = time.monotonic()
        status.update(phase="starting", stage=stage[0], stage_name=stage[1], max_steps=total_steps, step=0, window=window)

    def waiting(self, ready: int, wanted: int, peers: int) -> None:
        """Before step 1: the buffer fills."""
        self._status.update(phase="waiting for data", ready=ready, message=f"{ready} of {wanted} batches, {peers} producers")

    def compiling(self, what: str, bucket: int, num_buckets: int, shape) -> None:
        """A bucket's first batch: its function is compiled now."""
        text = f"compiling {what} for bucket {bucket + 1} of {num_buckets} ({shape.batch_size} rows x {shape.row_len})"
        log.info("%s", text)
        self._status.update(phase="compiling", message=text)

    def step(self, line: dict, values: dict, *, rows: int, num_bytes: int, server) -> None:
        """A finished step: `line` is its ledger line, `values` the step's scalars."""
        seconds, waited = line["step_ms"] / 1e3, line["wait_ms"] / 1e3
        self._recent.append((time.monotonic(), rows, seconds, waited))
        rate, wait = self.rates()
        ready = server.ready_count()
        left = self._total - line["step"]
        record = {
            "time": round(time.time(), 3),
            "step": line["step"],
            "epoch": line["epoch"],
            **{k: round(v, 6) for k, v in values.items()},
            "rows": rows,
            "bytes": num_bytes,
            "step_ms": line["step_ms"],
            "wait_ms": line["wait_ms"],
            "ready": ready,
        }
        if line.get("skipped"):
            record["skipped"] = True
        self._metrics.write(json.dumps(record).replace("NaN", "null").replace("Infinity", "null") + "\n")
        self._board.scalars(
            line["step"],
            {f"train/{k}": v for k, v in values.items()} | {"speed/step_ms": line["step_ms"], "speed/wait_ms": line["wait_ms"]},
        )
        mean_s = sum(r[2] for r in self._recent) / len(self._recent)
        self._status.update(
            phase="training",
            step=line["step"],
            epoch=line["epoch"],
            loss=line["loss"],
            utterances_per_s=rate,
            wait_percent=100 * wait,
            ready=ready,
            eta_s=left * mean_s,
            message="",
        )
        if line["step"] % self._log_every == 0 or left == 0:
            shown = " ".join(f"{k}={v:.4g}" for k, v in values.items())
            log.info(
                "step %d epoch %d %s utterances/s=%.1f data-wait=%.1f%% buffer=%d/%d",
                line["step"],
                line["epoch"],
                shown,
                rate,
                100 * wait,
                ready,
                self._window,
            )

    def rates(self) -> tuple[float, float]:
        """(utterances/s, share of the time spent waiting for data) over the last steps."""
        total = sum(r[2] for r in self._recent)
        if not total:
            return 0.0, 0.0
        return sum(r[1] for r in self._recent) / total, sum(r[3] for r in self._recent) / total

    def evaluating(self, step: int, num_batches: int) -> None:
        """An evaluation begins."""
        self._status.update(phase="evaluating", step=step, message=f"{num_batches} batches")

    def evaluation(self, step: int, losses: dict, better: bool, seconds: float) -> None:
        """An evaluation's mean losses."""
        record = {
            "time": round(time.time(), 3),
            "step": step,
            **{f"eval_{k}": round(v, 6) for k, v in losses.items()},
            "seconds": round(seconds, 3),
        }
        self._metrics.write(json.dumps(record).replace("NaN", "null") + "\n")
        self._board.scalars(step, {f"eval/{k}": v for k, v in losses.items()})
        shown = " ".join(f"{k}={v:.4f}" for k, v in losses.items())
        log.info("evaluation after step %d: %s%s (%.1f s)", step, shown, ", the best so far" if better else "", seconds)
        self._status.update(phase="training", message=f"evaluation {shown}")

    def saving(self) -> None:
        """A checkpoint begins: at a stop, the supervisor waits for this phase to end."""
        self._status.update(phase="saving")

    def saved(self, step: int, seconds: float) -> None:
        """A checkpoint is on disk."""
        log.info("checkpoint step %d saved in %.2f s", step, seconds)
        self._status.update(phase="training", saved_step=step)

    def traces(self, counts: dict[str, int]) -> None:
        """How often each compiled function was traced: once, or a shape leaked and costs a compilation at every change."""
        self._metrics.write(json.dumps({"time": round(time.time(), 3), "traces": dict(sorted(counts.items()))}) + "\n")
        again = {k: n for k, n in counts.items() if n > 1}
        if again:
            log.warning("retraced: %s; every shape should come from the bucket table", again)
        else:
            log.info("%d functions compiled, none twice", len(counts))

    def close(self) -> None:
        """Flush and close the files."""
        self._metrics.flush()
        os.fsync(self._metrics.fileno())
        self._metrics.close()
        self._board.close()
