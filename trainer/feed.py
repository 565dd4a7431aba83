"""From the channel to the device, ahead of the step: receive in order, hold the batch to its spec, set aside clips that failed, transfer.

Runs in a thread of its own: while step k computes, batch k+1 is already on the device (a queue of two).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from common.batch import check_batch
from common.channel import BatchFailed, NoData
from common.channel import Stopped as ChannelStopped
from common.errors import RunError, Stopped
from common.plan import PlannedBatch

log = logging.getLogger(__name__)


@dataclass
class FedBatch:
    """A batch on the device, with where it came from."""

    planned: PlannedBatch
    arrays: dict
    digest: str
    producer: str
    num_bytes: int


class Quarantine:
    """Clips that could not be made: rows of weight 0 from the batch on in which that was seen.

    Written by the feed's thread; the channel's thread asks for it at each lease.
    """

    def __init__(self, entries: list[dict]):
        self._by_id: dict[int, dict] = {e["id"]: dict(e) for e in entries}

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, utterance: int, planned: PlannedBatch, reason: str) -> bool:
        """Remember a clip; False if it was known."""
        if utterance in self._by_id:
            return False
        entry = {"id": utterance, "plan": planned.plan, "g": planned.g, "reason": reason}
        self._by_id = {**self._by_id, utterance: entry}  # readers in other threads see the old dict or the new one
        return True

    def of(self, planned: PlannedBatch) -> list[int]:
        """The batch's utterances that have to be rows of weight 0."""
        known = self._by_id
        if not known:
            return []
        return [u for u in planned.utterances.tolist() if u in known and self._holds(known[u], planned)]

    @staticmethod
    def _holds(entry: dict, planned: PlannedBatch) -> bool:
        # An evaluation meets the same clip again and again, in any order relative to its own numbers.
        return planned.plan != "train" or entry["plan"] != "train" or entry["g"] <= planned.g

    def before(self, next_g: int) -> list[dict]:
        """The entries that a checkpoint at batch `next_g` has to carry."""
        return [e for e in self._by_id.values() if e["plan"] != "train" or e["g"] < next_g]


class Feed:
    """Batches for the step, in schedule order.

    Args:
        server: the channel's end (`LeaseServer` or its twin), already opened on the schedule.
        plan_of: (plan, g) → PlannedBatch.
        spec_of: PlannedBatch → the arrays' dtypes and shapes.
        to_device: puts a dict of arrays where the step wants it; must copy, since the frames are dropped.
        data_timeout_s: how long to wait for one batch before giving up.
    """

    def __init__(
        self,
        server,
        *,
        plan_of: Callable[[str, int], PlannedBatch],
        spec_of: Callable[[PlannedBatch], dict],
        to_device: Callable[[dict], dict],
        quarantine: Quarantine,
        data_timeout_s: float,
        should_stop: Callable[[], bool],
    ):
        self._server, self._plan_of, self._spec_of, self._to_device = server, plan_of, spec_of, to_device
        self._quarantine, self._timeout, self._should_stop = quarantine, data_timeout_s, should_stop
        self._queue: queue.Queue = queue.Queue(maxsize=2)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)
        self._thread.start()

    def next(self) -> tuple[FedBatch, float]:
        """The next batch and the seconds spent waiting for it.

        Raises:
            RunError: no data within the deadline, a batch that no producer can make, or a stop was asked for.
        """
        start = time.perf_counter()
        while True:
            if self._should_stop():
                raise Stopped("stop was asked for")
            try:
                item = self._queue.get(timeout=0.1)
            except queue.Empty:
                continue
            if isinstance(item, Exception):
                raise item
            return item, time.perf_counter() - start

    def close(self) -> None:
        """Stop receiving; the thread ends within its next deadline slice."""
        self._closed.set()
        while not self._queue.empty():
            self._queue.get_nowait()
        self._thread.join(timeout=5)

    def _stopping(self) -> bool:
        return self._closed.is_set() or self._should_stop()

    def _run(self) -> None:
        try:
            while not self._stopping():
                delivery = self._server.next(self._timeout, self._stopping)
                if delivery is None:
                    return
                fed = self._accept(delivery)
                if fed is not None:
                    self._put(fed)
        except (NoData, BatchFailed) as e:
            self._put(RunError(str(e)))
        except ChannelStopped:
            return
        except Exception as e:  # noqa: BLE001 - the edge of a thread: the step's thread raises it
            self._put(e)

    def _put(self, item) -> None:
        while not self._closed.is_set():
            try:
                return self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue

    def _accept(self, delivery) -> FedBatch | None:
        """Check and transfer one delivery; None if it has to be made again."""
        planned = self._plan_of(delivery.plan, delivery.g)
        try:
            check_batch(delivery.arrays, self._spec_of(planned))
        except ValueError as e:
            self._server.reject(delivery, f"{delivery.producer} sent a batch of another shape: {e}", strike=True)
            return None
        weights = delivery.arrays["weights"]
        for row, u in enumerate(planned.utterances.tolist()):
            # Set aside after this batch was leased: made again without the clip, so that a replay makes the same bytes.
            if weights[row] != 0 and u in self._quarantine.of(planned):
                self._server.reject(delivery, f"utterance {u} was set aside meanwhile", strike=False)
                return None
        for utterance, reason in delivery.meta.get("bad", []):
            if self._quarantine.add(utterance, planned, reason):
                log.warning("utterance %d set aside from batch %d on: %s", utterance, planned.g, reason)
        num_bytes = sum(a.nbytes for a in delivery.arrays.values())
        return FedBatch(planned, self._to_device(delivery.arrays), delivery.digest, delivery.producer, num_bytes)
