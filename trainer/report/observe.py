"""Reports a running stage: to metrics.jsonl, TensorBoard, the status file that the console reads,
and the log.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from pathlib import Path

from common.system import trace
from common.system.status import StatusFile
from common.system.stopwatch import Stopwatch
from trainer.report.tensorboard import EventWriter
from trainer.report.watch import RECENT_STEPS, Watch, spare

log = logging.getLogger(__name__)

_REMIND_S = 10.0
_IN_WORDS = {"training": "the training step", "evaluation": "the evaluation"}


class Observer:
    """Receives what the loop measures.

    Args:
        folder: gets metrics.jsonl and tensorboard/.
        stage: (number, name), for the status.
        step: the stage's current step, by its newest checkpoint.
        watch: measures where the time goes; None: only the loop's own clock.
    """

    def __init__(
        self,
        folder: Path,
        status: StatusFile,
        *,
        stage: tuple[int, str],
        total_steps: int,
        log_every: int,
        window: int,
        step: int,
        watch: Watch | None = None,
    ):
        self._watch, self._reminder = watch, Reminder(_REMIND_S)
        self._metrics = open(folder / "metrics.jsonl", "a", encoding="utf-8", buffering=1)
        self._events = EventWriter(folder / "tensorboard")
        self._status, self._total, self._log_every = status, total_steps, log_every
        self._recent: deque[tuple[float, int, float, float]] = deque(
            maxlen=RECENT_STEPS
        )  # end time, rows, seconds, waited
        self._began = time.monotonic()
        self._disk_said = False
        at = {"step": step, "saved_step": step}
        status.update(
            phase="starting",
            stage=stage[0],
            stage_name=stage[1],
            max_steps=total_steps,
            window=window,
            **at,
        )

    def begin(self, settings: dict, run: str) -> None:
        """What TensorBoard shows of a run besides its curves."""
        try:
            self._events.front_page(settings, run)
        except OSError as e:
            self._disk_fails(e)

    def waiting(self, ready: int, wanted: int, peers: int) -> None:
        """Before step 1: the buffer fills."""
        producers = f"{peers} producer{'' if peers == 1 else 's'}"
        self._status.update(
            phase="waiting for data",
            ready=ready,
            message=f"{ready} of {wanted} batches, {producers}",
        )

    def ready(self) -> None:
        """The wait is over; the first step may take a while."""
        self._status.update(phase="training", message="")

    def compiling(self, what: str, bucket: int, num_buckets: int, shape) -> None:
        """A bucket's first batch: its function is compiled now.

        `what`: "training" or "evaluation".
        """
        text = (
            f"compiling {_IN_WORDS[what]} for bucket {bucket + 1} of {num_buckets}"
            f" ({shape.batch_size} rows x {shape.row_len})"
        )
        log.info("%s", text)
        self._interrupted()
        self._reminder.start(text)
        self._status.update(phase="compiling", message=text)

    def beside_compiling(self) -> None:
        """A step is made while programs are compiled for others."""
        if self._watch is not None:
            self._watch.beside_compiling()

    def compiling_programs(self, number: int, total: int, left_s: float | None) -> None:
        """Before step 1, `number` - 1 of `total` programs are compiled; the rest takes about
        `left_s`.
        """
        text = f"program {number} of {total}" + (
            f", about {left_s:.0f} s left" if left_s is not None else ""
        )
        if number == 1:
            log.info("compiling %d programs", total)
        self._status.update(phase="compiling", message=text)

    def trying(self, what: str) -> None:
        """Before step 1: the largest step is tried on padding."""
        self._status.update(phase="compiling", message=what)

    def _interrupted(self) -> None:
        self._reminder.stop()
        if self._watch is not None:
            self._watch.interrupted()

    def step(self, line: dict, values: dict, *, rows: int, num_bytes: int, server) -> None:
        """A finished step: `line` is its ledger line, `values` the step's scalars."""
        own = Stopwatch()
        with own.part("logging"):
            self._step(
                line,
                values,
                rows=rows,
                num_bytes=num_bytes,
                ready=server.ready_count(),
                target=server.target(),
            )
        now, seconds = time.perf_counter(), own.spent_s["logging"]
        trace.span("loop", "logging", now - seconds, now, step=line["step"])
        if self._watch is not None:
            self._watch.logged_s.append(seconds)

    def times(self, line: dict, rows: int) -> dict[str, float]:
        """`step_ms` and `wait_ms` (without data) of a finished step: by the device's clock where
        there is one, else the loop's own.
        """
        self._reminder.stop()
        record = None
        if self._watch is not None:
            record = self._watch.step(line["g"], line["count"])
        seconds, waited = (
            (record.total_s, record.wait_s)
            if record
            else (line["step_ms"] / 1e3, line["wait_ms"] / 1e3)
        )
        if self._watch is None or (record and not record.interrupted):
            self._recent.append((time.monotonic(), rows, seconds, waited))
        return {"step_ms": round(1e3 * seconds, 2), "wait_ms": round(1e3 * waited, 2)}

    def _step(
        self, line: dict, values: dict, *, rows: int, num_bytes: int, ready: int, target: int
    ) -> None:
        rate, wait = self.rates()
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
            "target": target,
        }
        if line.get("skipped"):
            record["skipped"] = True
        self._write(record)
        scalars = {f"train/{k}": v for k, v in values.items()}
        self._draw(
            line["step"],
            scalars | {f"speed/{k}": record[k] for k in ("step_ms", "wait_ms", "ready", "target")},
        )
        known = bool(self._recent)  # not after the first steps, which compile
        mean_s = sum(r[2] for r in self._recent) / max(1, len(self._recent))
        self._status.update(
            phase="training",
            step=line["step"],
            epoch=line["epoch"],
            loss=line["loss"],
            utterances_per_s=rate if known else None,
            wait_percent=100 * wait if known else None,
            ready=ready,
            target=target,
            eta_s=left * mean_s if known else None,
            message="",
        )
        self._tell(line, values, f"{ready}/{target}", last=left == 0)

    def _tell(self, line: dict, values: dict, queue: str, last: bool) -> None:
        """The line in the log every `log_every` steps; every RECENT_STEPS and at the end the
        speed's record, and warnings.
        """
        shown, summed = (
            line["step"] % self._log_every == 0 or last,
            line["step"] % RECENT_STEPS == 0 or last,
        )
        if self._watch is None or not (shown or summed):
            speed = None
        else:
            self._watch.look()
            speed = self._watch.speed()
        if shown:
            rate, wait = self.rates()
            how = f"wait_data={100 * wait:.1f}% utterances/s={rate:.1f} queue={queue}"
            what = " ".join(f"{k}={v:.4g}" for k, v in values.items())
            log.info(
                "step %d epoch %d %s %s",
                line["step"],
                line["epoch"],
                what,
                speed.line(queue) if speed else how,
            )
        if summed and speed is not None:
            record = speed.record()
            self._write(
                {
                    "time": round(time.time(), 3),
                    "step": line["step"],
                    "speed": record,
                    "bottleneck": speed.verdict.sentence,
                }
            )
            self._draw(
                line["step"],
                {f"speed/{k}": v for k, v in record.items() if k not in ("step_ms", "wait_ms")},
            )
            for text in self._watch.warnings(speed):
                log.warning("%s", text)
            if last:
                log.info("%s", "; ".join(filter(None, (speed.verdict.sentence, spare(speed.gpus)))))

    def _write(self, record: dict) -> None:
        try:
            self._metrics.write(
                json.dumps(record).replace("NaN", "null").replace("Infinity", "null") + "\n"
            )
        except OSError as e:
            self._disk_fails(e)

    def _draw(self, step: int, values: dict) -> None:
        try:
            self._events.scalars(step, values)
        except OSError as e:
            self._disk_fails(e)

    def _disk_fails(self, error: OSError) -> None:
        """Log the loss: gaps in curves are no reason to end a run; a failing save would be one."""
        if not self._disk_said:
            log.error("metrics are being lost: %s", error.strerror or error)
        self._disk_said = True

    def rates(self) -> tuple[float, float]:
        """(utterances/s, share of the time spent waiting for data) over the last steps."""
        total = sum(r[2] for r in self._recent)
        if not total:
            return 0.0, 0.0
        return sum(r[1] for r in self._recent) / total, sum(r[3] for r in self._recent) / total

    def evaluating(self, step: int, num_batches: int) -> None:
        """An evaluation begins."""
        self._interrupted()
        self._status.update(phase="evaluating", step=step, message=f"{num_batches} batches")

    def evaluation(self, step: int, losses: dict, better: bool, seconds: float) -> None:
        """An evaluation's mean losses."""
        self._interrupted()
        record = {
            "time": round(time.time(), 3),
            "step": step,
            **{f"eval_{k}": round(v, 6) for k, v in losses.items()},
            "seconds": round(seconds, 3),
        }
        self._write(record)
        self._draw(step, {f"eval/{k}": v for k, v in losses.items()})
        shown = " ".join(f"{k}={v:.4f}" for k, v in losses.items())
        log.info(
            "evaluation after step %d: %s%s (%.1f s)",
            step,
            shown,
            ", the best so far" if better else "",
            seconds,
        )
        self._status.update(phase="training", message=f"evaluation {shown}")

    def saving(self) -> None:
        """A checkpoint begins: at a stop, the supervisor waits for this phase to end."""
        self._interrupted()
        self._status.update(phase="saving", message="")

    def saved(self, step: int, seconds: float, pause_s: float) -> None:
        """A checkpoint is on disk, `seconds` after it was begun; training waited
        `pause_s` of them.
        """
        self._interrupted()
        if self._watch is not None:
            self._watch.saved_s.append(pause_s)
        log.info(
            "checkpoint step %d saved in %.2f s, training paused for %.2f s", step, seconds, pause_s
        )
        self._status.update(phase="training", saved_step=step)

    def traces(self, counts: dict[str, int]) -> None:
        """How often each compiled function was traced: once, or a shape leaked and costs a
        compilation at every change.
        """
        self._write({"time": round(time.time(), 3), "traces": dict(sorted(counts.items()))})
        again = {k: n for k, n in counts.items() if n > 1}
        if again:
            log.warning("retraced: %s; every shape should come from the bucket table", again)
        else:
            log.info("%d functions compiled, none twice", len(counts))

    def close(self) -> None:
        """Flush and close the files, end the threads."""
        self._reminder.stop()
        if self._watch is not None:
            self._watch.close()
        for end in (self._metrics.close, self._events.close):
            try:
                end()
            except OSError as e:
                self._disk_fails(e)


class Reminder:
    """Repeats a text every `every_s` seconds until it is stopped: what takes a minute should not
    look like a hang.
    """

    def __init__(self, every_s: float):
        self._every_s = every_s
        self._stop: threading.Event | None = None

    def start(self, text: str) -> None:
        """Start with a text, in place of an earlier one."""
        self.stop()
        self._stop = threading.Event()
        threading.Thread(
            target=self._run, args=(text, self._stop), name="reminder", daemon=True
        ).start()

    def stop(self) -> None:
        """Stop: it is done."""
        if self._stop is not None:
            self._stop.set()
            self._stop = None

    def _run(self, text: str, stop: threading.Event) -> None:
        began = time.monotonic()
        while not stop.wait(self._every_s):
            log.info("%s: %.0f s so far", text, time.monotonic() - began)
