"""The results of trained steps: reads their metrics late, writes their ledger lines in order, and
ends a run whose steps are not finite.

Metrics are read some steps late, so that the device always has a step waiting. A copy from the
device waits for all work issued before it: so each step's copy is requested by a thread of its own,
before the next step is issued. Otherwise the copies of several steps would end together, with the
last of these steps, and the device would stand still until the next ones are issued.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.system.errors import Hopeless
from trainer.feed import FedBatch, Feed
from trainer.history.ledger import Ledger
from trainer.report.observe import Observer

if TYPE_CHECKING:
    from trainer.step.contract import Scalars

log = logging.getLogger(__name__)

LAG = 2  # steps
_ASK_S = 0.05  # a thread takes a fraction of a millisecond to ask
_STEP_SAY_S, _MAX_STEP_S = 60.0, 900.0  # a step takes seconds, with many batches a minute


@dataclass(frozen=True)
class TrainedStep:
    """A step that the device may still be computing."""

    line: dict  # of the ledger, without the loss
    metrics: Future[dict[str, float]]
    batches: list[FedBatch]
    rows: int


class Readback:
    """Steps whose metrics have not been read, the oldest first.

    Args:
        read: waits for a step's scalars (`Step.read`); called in threads.
        max_bad_steps: how many steps in a row that are not finite end the run.
    """

    def __init__(
        self,
        read: Callable[[Scalars], dict[str, float]],
        ledger: Ledger,
        observer: Observer,
        feed: Feed,
        max_bad_steps: int,
    ):
        self._read, self._ledger, self._observer, self._feed = read, ledger, observer, feed
        self._max_bad_steps, self._bad_in_a_row = max_bad_steps, 0
        self._unread: deque[TrainedStep] = deque()
        self._threads = ThreadPoolExecutor(LAG + 1, "metrics")

    def ask(self, result: Scalars) -> Future[dict[str, float]]:
        """Have a step's metrics read; on return, the copy has been requested."""
        asking = threading.Event()

        def read() -> dict[str, float]:
            asking.set()
            return self._read(result)

        values = self._threads.submit(read)
        asking.wait(_ASK_S)
        return values

    def add(self, trained: TrainedStep) -> None:
        """The newest step."""
        self._unread.append(trained)

    def write(self, keep: int = 0) -> None:
        """Read the metrics of all steps but the newest `keep`, and write their ledger lines.

        Raises:
            Hopeless: too many steps in a row were not finite.
            RuntimeError: the device does not end a step.
        """
        while len(self._unread) > keep:
            trained = self._unread.popleft()
            self._write(trained, self._values(trained))

    def close(self) -> None:
        """Wait for nothing more."""
        self._threads.shutdown(wait=False)

    def _write(self, trained: TrainedStep, values: dict[str, float]) -> None:
        line, rows = trained.line, trained.rows
        finite = bool(values.pop("finite"))
        line["loss"] = values["loss"] if finite else None
        if not finite:
            line["skipped"] = True
        line |= self._observer.times(line, rows)
        self._ledger.append(line)
        self._observer.step(
            line,
            values,
            rows=rows,
            num_bytes=sum(b.num_bytes for b in trained.batches),
            server=self._feed,
        )
        self._bad_in_a_row = 0 if finite else self._bad_in_a_row + 1
        if not finite:
            self._report_bad(trained, values)

    def _values(self, trained: TrainedStep) -> dict[str, float]:
        """A step's metrics, once the device has finished it. RuntimeError: it does not finish; its
        state cannot be saved, and a restart may help.
        """
        waited_s, step = 0.0, trained.line["step"]
        while not wait([trained.metrics], _STEP_SAY_S).done:
            waited_s += _STEP_SAY_S
            if waited_s >= _MAX_STEP_S:
                raise RuntimeError(
                    f"the device has not ended step {step} for {waited_s:.0f} s: see `nvidia-smi`"
                    " and the system's log"
                )
            log.warning("step %d is being computed for %.0f s", step, waited_s)
        return trained.metrics.result()

    def _report_bad(self, trained: TrainedStep, values: dict[str, float]) -> None:
        step, ids = (
            trained.line["step"],
            [int(u) for b in trained.batches for u in b.planned.utterances if u >= 0],
        )
        shown = values["loss"], values.get("grad_norm")
        log.warning(
            "step %d skipped: loss %s, gradient norm %s; weights unchanged; utterances %s",
            step,
            *shown,
            ids,
        )
        if self._bad_in_a_row >= self._max_bad_steps:
            count, self._bad_in_a_row = (
                self._bad_in_a_row,
                0,
            )  # the steps issued since are reported, and end nothing
            raise Hopeless(
                f"{count} steps in a row were not finite, the last one step {step} (utterances"
                f" {ids}); they changed no weight, and the weights before them are saved. Lower the"
                " learning rate, set a clip_norm, or look at these recordings"
            )
