"""From the channel to the device, ahead of the step: receive in order, check the batch against its
spec, set aside clips that failed, transfer.

Runs in a thread of its own: while step k computes, batch k+1 is already on the device (a queue of
two). On a GPU the loop gets batch k only once the copy of k + 1 has been issued, if k + 1 is
there: see `trainer.step.upload`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from common.data.batch import check_batch
from common.data.plan import PlannedBatch
from common.system import trace
from common.system.errors import Hopeless, RunError, Stopped
from common.system.stopwatch import Stopwatch
from common.transport.delivery import StopAsked
from common.transport.messages import Notes
from common.transport.server import BatchFailed, NoData
from trainer.history.differing import Differing
from trainer.report.watch import FedRecord, Watch

if TYPE_CHECKING:
    from trainer.step.upload import Upload

log = logging.getLogger(__name__)

_GATE_S = 0.05  # the loop waits for a copy to be issued, which takes milliseconds
_AT_ONCE_S = 1e-3  # a batch that came faster had been waiting here


@dataclass
class FedBatch:
    """A batch on the device, with where it came from."""

    planned: PlannedBatch
    arrays: dict
    digest: str
    producer: str
    num_bytes: int
    notes: Notes = field(default_factory=Notes, repr=False)
    feed_s: float = 0.0  # the feed's own work on it
    transit_s: float | None = None  # from the producer to the feed; None: it had to wait here
    elsewhere: bool = False  # another trainer computes it: no arrays here


def _trace(row: str, name: str, began: float, ended: float, planned: PlannedBatch) -> None:
    trace.span(row, name, began, ended, plan=planned.plan, g=planned.g)


class HostCopy:
    """Replaces `trainer.step.upload.Upload` if there is no device: NumPy arrays, copied
    once.
    """

    waits_for_steps = False

    def to_host(self, arrays: dict, seed: tuple[int, int]) -> tuple[dict, tuple[int, int]]:
        """Copy the arrays."""
        return {k: np.array(v) for k, v in arrays.items()}, seed

    def to_device(
        self, on_host: tuple, issuing: Callable[[], None]
    ) -> tuple[dict, tuple[int, int]]:
        """Nothing to do: they are there."""
        issuing()
        return on_host


class Others(Protocol):
    """The other trainers, as a feed sees them (`trainer.ranks`)."""

    def check(self) -> None:
        """Raise if one of them is lost."""

    def hand_on(self, planned: PlannedBatch, arrays: dict[str, np.ndarray]) -> bool:
        """Give a batch to the trainer that computes it; False: that is this one."""


class Ahead:
    """Whether the feed's next copy is about to be issued: the copy would wait for a step issued
    before it (see step/upload.py).
    """

    def __init__(self):
        self._changed = threading.Condition()
        self._soon = False

    def set(self, soon: bool) -> None:
        """Called by the feed's thread: a batch is there, or it was issued, or there is none."""
        with self._changed:
            self._soon = soon
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Called by the loop's thread: wait until no copy is about to be issued."""
        with self._changed:
            self._changed.wait_for(lambda: not self._soon, timeout_s)


class Quarantine:
    """Clips that could not be decoded: rows of weight 0 from the batch in which that was found.

    The feed's thread writes it; the channel's thread reads it at each lease.

    Args:
        entries: from a checkpoint.
        limit: how many clips may be set aside in all; None: any number.
    """

    def __init__(self, entries: list[dict], limit: int | None = None):
        self._by_id: dict[int, dict] = {e["id"]: dict(e) for e in entries}
        self._limit = limit

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, utterance: int, planned: PlannedBatch, reason: str) -> bool:
        """Remember a clip; False if it was known."""
        if utterance in self._by_id:
            return False
        entry = {"id": utterance, "plan": planned.plan, "g": planned.g, "reason": reason}
        self._by_id = {
            **self._by_id,
            utterance: entry,
        }  # readers in other threads see the old dict or the new one
        return True

    def check_room(self, bad: list[tuple[int, str]]) -> None:
        """Hopeless: these clips would exceed the limit. Then none of them is set aside."""
        new = list(
            {u: reason for u, reason in bad if u not in self._by_id}.items()
        )  # a clip in several rows is named for each
        if new and self._limit is not None and len(self._by_id) + len(new) > self._limit:
            raise Hopeless(
                f"{len(self._by_id) + len(new)} clips that were scanned can no longer be used; at"
                f" most {self._limit} may be set aside (train.max_set_aside): the corpus has"
                f" changed, or cannot be read. The newest ones: utterance {new[0][0]}: {new[0][1]}"
                + (f" and {len(new) - 1} more" if len(new) > 1 else "")
                + ". With the files back in their place, the same command goes on"
            )

    def of(self, planned: PlannedBatch) -> list[int]:
        """The batch's utterances, including those of conditioning clips, that it must be made
        without (`producer.batches.maker.without`).
        """
        known = self._by_id
        if not known:
            return []
        needed = dict.fromkeys([*planned.utterances.tolist(), *planned.prompts.tolist()])
        return [u for u in needed if u in known and self._holds(known[u], planned)]

    @staticmethod
    def _holds(entry: dict, planned: PlannedBatch) -> bool:
        # An evaluation meets the same clip repeatedly, in any order relative to its own numbers.
        return planned.plan != "train" or entry["plan"] != "train" or entry["g"] <= planned.g

    def before(self, next_g: int) -> list[dict]:
        """The entries for a checkpoint at batch `next_g`."""
        return [e for e in self._by_id.values() if e["plan"] != "train" or e["g"] < next_g]


def no_batch(e: NoData | BatchFailed) -> RunError:
    """The error for a user.

    Hopeless if there is no producer: a restarted trainer would wait as long again for nothing.
    """
    kind = Hopeless if isinstance(e, NoData) and not e.connected else RunError
    return kind(
        f"{e}; see RUN/logs/producer-*.log, or start one with `launch.py producer --run RUN`"
    )


@dataclass(frozen=True)
class Listeners:
    """Callbacks for what the feed brings.

    inspect: gets every accepted batch as it arrived, before the transfer.
    watch: called for every training batch that is taken.
    differing: called for batches that were made twice with different bytes.
    """

    inspect: Callable[[PlannedBatch, dict], None] | None = None
    watch: Watch | None = None
    differing: Differing | None = None


class Feed:
    """Batches for the step, in schedule order.

    Args:
        server: the channel's end (`LeaseServer` or its twin), already opened on the schedule.
        planned: (plan, g) → the batch that is due, and the dtypes and shapes of its arrays.
        upload: puts a batch where the step needs it (`trainer.step.upload.Upload`, `HostCopy`);
        must copy, since the frames are dropped.
        others: the trainers that compute batches besides this one; None: there are none.
        data_timeout_s: how long to wait for one batch before giving up.
    """

    def __init__(
        self,
        server,
        *,
        planned: Callable[[str, int], tuple[PlannedBatch, dict]],
        upload: Upload | HostCopy,
        quarantine: Quarantine,
        data_timeout_s: float,
        should_stop: Callable[[], bool],
        listeners: Listeners = Listeners(),  # noqa: B008 - frozen
        others: Others | None = None,
    ):
        self._others = others
        self._watch, self._differing = listeners.watch, listeners.differing
        self._inspect = listeners.inspect
        self._server, self._planned, self._upload = server, planned, upload
        self._quarantine, self._timeout, self._should_stop = quarantine, data_timeout_s, should_stop
        self._queue: queue.Queue = queue.Queue(maxsize=2)
        self._closed = threading.Event()
        self._ahead, self._best_copy_s_per_byte = Ahead(), float("inf")
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)
        self._thread.start()

    def next(self) -> tuple[FedBatch, float]:
        """The next batch and the seconds spent waiting for it.

        Raises:
            RunError: no data within the deadline, a batch that no producer can make, or a stop.
            BytesDiffer: a batch was made twice with different bytes, and the run is deterministic.
        """
        start = time.perf_counter()
        while True:
            if self._should_stop():
                raise Stopped("stop was asked for")
            if self._differing is not None:
                self._differing.look(self._server)
            if self._others is not None:
                self._others.check()
            try:
                item = self._queue.get(timeout=0.1)
            except queue.Empty:
                continue
            if isinstance(item, Exception):
                raise item
            if self._upload.waits_for_steps and self._queue.empty():
                self._ahead.wait(_GATE_S)
            got = time.perf_counter()
            _trace("loop", "next batch", start, got, item.planned)
            if self._watch is not None and item.planned.plan == "train":
                p = item.planned
                self._watch.fed(
                    p.g,
                    FedRecord(
                        p.bucket,
                        p.num_rows,
                        item.producer,
                        start,
                        got,
                        item.feed_s,
                        item.transit_s,
                        item.notes,
                    ),
                )
            return item, got - start

    def release(self) -> None:
        """Release the oldest batch that `next` gave: the channel may lease another one. A batch
        that another trainer computes is released by that trainer.
        """
        self._server.release()

    def ready_count(self) -> int:
        """Batches waiting in the channel."""
        return self._server.ready_count()

    def target(self) -> int:
        """Batches that the channel requests at a time."""
        return self._server.target()

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
                self._ahead.set(self._server.ready_count() > 0)
                delivery = self._server.next(self._timeout, self._stopping)
                if delivery is None:
                    return
                self._ahead.set(True)
                fed = self._accept(delivery)
                if fed is not None:
                    self._ahead.set(
                        True
                    )  # before the loop can take it: the next batch may be there
                    self._put(fed)
        except (NoData, BatchFailed) as e:
            self._put(no_batch(e))
        except StopAsked:
            return
        except Exception as e:  # noqa: BLE001 - the edge of a thread: the step's thread raises it
            self._put(e)
        finally:
            self._ahead.set(False)

    def _put(self, item) -> None:
        while not self._closed.is_set():
            try:
                return self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue

    def _accept(self, delivery) -> FedBatch | None:
        """Check and transfer one delivery; None if it must be made again."""
        began = time.perf_counter()
        planned, spec = self._planned(delivery.plan, delivery.g)
        try:
            check_batch(delivery.arrays, spec)
        except ValueError as e:
            self._server.reject(
                delivery, f"{delivery.producer} sent a batch of another shape: {e}", strike=True
            )
            return None
        bad = delivery.notes.bad
        foreign = {u for u, _ in bad}.difference(
            planned.utterances.tolist(), planned.prompts.tolist()
        )
        if foreign:
            reason = (
                f"{delivery.producer} reports utterance {min(foreign)} as bad, which is not in the"
                " batch"
            )
            self._server.reject(delivery, reason, strike=True)
            return None
        self._quarantine.check_room(bad)
        for utterance, reason in bad:
            if self._quarantine.add(utterance, planned, reason):
                log.warning(
                    "utterance %d set aside from batch %d on: %s", utterance, planned.g, reason
                )
        stale = self._stale(delivery, planned)
        if stale is not None:
            self._server.reject(
                delivery, f"utterance {stale} was set aside in the meantime", strike=False
            )
            return None
        if self._inspect is not None:
            self._inspect(planned, delivery.arrays)
        if self._others is not None and self._others.hand_on(planned, delivery.arrays):
            return self._elsewhere(delivery, planned, time.perf_counter() - began)
        return self._transfer(delivery, planned, time.perf_counter() - began)

    def _elsewhere(self, delivery, planned: PlannedBatch, spent_s: float) -> FedBatch:
        self._ahead.set(False)
        num_bytes = sum(a.nbytes for a in delivery.arrays.values())
        return FedBatch(
            planned,
            None,
            delivery.digest,
            delivery.producer,
            num_bytes,
            delivery.notes,
            feed_s=spent_s,
            elsewhere=True,
        )

    def _stale(self, delivery, planned: PlannedBatch) -> int | None:
        """An utterance that is set aside but still in this batch; the batch must be made again, so
        that a replay makes the same bytes.

        A row whose own clip failed gets weight 0 at once. If the clip lent by another utterance
        failed, the row must use its own.
        """
        out, weights = set(self._quarantine.of(planned)), delivery.arrays["weights"]
        done_without = set(delivery.set_aside)
        for row, (own, prompt) in enumerate(
            zip(planned.utterances.tolist(), planned.prompts.tolist(), strict=True)
        ):
            if own in out:
                if weights[row] != 0:
                    return own
            elif prompt in out and prompt not in done_without:
                return prompt
        return None

    def _transfer(self, delivery, planned: PlannedBatch, spent_s: float) -> FedBatch:
        """Copy to the device. `spent_s`: the seconds that the batch has cost so far."""
        began = time.perf_counter() - spent_s
        # Two hosts' clocks differ: do not believe such a transit time.
        transit_s = time.time() - spent_s - delivery.notes.sent
        believed = delivery.wait_s > _AT_ONCE_S and 0 <= transit_s < self._timeout
        num_bytes, watch = sum(a.nbytes for a in delivery.arrays.values()), Stopwatch()
        with watch.part("transfer"):
            on_host = self._upload.to_host(delivery.arrays, planned.seed)
        start = time.perf_counter()
        arrays, seed = self._upload.to_device(on_host, lambda: self._ahead.set(False))
        _trace("feed", "upload", began, time.perf_counter(), planned)
        # Most of this may be the wait for a step; the fastest copy so far shows what a copy alone
        # takes.
        self._best_copy_s_per_byte = min(
            self._best_copy_s_per_byte, (time.perf_counter() - start) / num_bytes
        )
        return FedBatch(
            replace(planned, seed=seed),
            arrays,
            delivery.digest,
            delivery.producer,
            num_bytes,
            delivery.notes,
            feed_s=spent_s + watch.spent_s["transfer"] + self._best_copy_s_per_byte * num_bytes,
            transit_s=transit_s if believed else None,
        )
