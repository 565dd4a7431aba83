"""The producer's event loop: leases in, batches out.

Three things run at once: threads decode the clips of the next batches, this one packs and sends,
and the device's thread computes one batch after the other.

Between leases it remembers only the open stage: a lease that is revoked or dropped costs only the
work in progress. Clips of at most `leases` batches are in memory. Without a trainer the loop waits,
warm, for as long as it takes.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.audio.errors import DecodeError
from common.data.plan import PlannedBatch
from common.system import trace
from common.system.errors import BadInput
from common.system.stopwatch import Stopwatch
from common.transport.client import Lease, LeaseClient, Refused, Stop, Welcome
from common.transport.messages import MAX_REASON, Notes, printable
from producer.batches.absence import why_away
from producer.batches.decode import DecodePool
from producer.batches.maker import BatchError, Clip, Made, Maker, Work, without
from producer.meter import Meter

log = logging.getLogger(__name__)

POLL_S = 0.2  # how late a stop may be noticed
WAIT_SLICE_S = 0.05  # how late an event may be noticed while work is in progress
ON_DEVICE = 2  # batches: the one being computed, and the next one, packed
DEVICE_S = 600.0  # a batch takes milliseconds, a function to compile up to minutes
TRAINER_SILENT_S = 5.0  # without a sign of the trainer for so long, waiting counts as idle
REASONS_BYTES = (
    24_000  # of all bad clips of a batch: they travel in DATA's header, which holds 64 kB
)
GOOD_FOLDERS = 16
AWAY_SAID_S = 30.0  # between log lines about data that is away


@dataclass
class Job:
    """A leased batch on its way."""

    lease: Lease
    planned: PlannedBatch
    clips: list[Clip]
    futures: list[Future]
    began: float  # decoding, by time.perf_counter
    work: Work | None = None
    compiles: bool = False
    computed: Future | None = None  # from when it is packed
    waited_s: float = 0.0  # for it alone

    def decoded(self) -> list[np.ndarray | DecodeError]:
        """The clips' samples; raises whatever is not the file's fault."""
        results = []
        for future in self.futures:
            error = future.exception()
            if error is not None and not isinstance(error, DecodeError):
                raise error
            results.append(future.result() if error is None else error)
        return results

    def span(self, row: str, name: str, began: float, ended: float) -> None:
        """Note what was done for it, where a trace is written."""
        trace.span(row, name, began, ended, plan=self.lease.plan, g=self.lease.g)

    def compute(self) -> Any:
        """In the device's thread."""
        began = time.perf_counter()
        try:
            return self.work.compute()
        finally:
            self.span("device", "features", began, time.perf_counter())

    def drop(self) -> None:
        """Drop the job: nobody needs it any more."""
        for future in self.futures:
            future.cancel()
        if self.computed is not None:
            self.computed.cancel()


def _ignore(phase: str, batches: int) -> None:
    """`report` for a service that nobody watches."""


def _never() -> str:
    """`over` for a service that waits for a trainer for as long as it takes."""
    return ""


class Service:
    """One producer's loop.

    Args:
        client: the channel's end.
        make_stage: stage name → its maker; called at the first Welcome of a stage and whenever the
            features have changed.
        pool: decodes; must take `leases` batches' clips without blocking.
        should_stop: checked several times a second.
        data_roots: folders of the corpus; if one is away, batches are put off and their clips are
        not set aside.
        report: called with the phase and the number of batches made.
        over: why no trainer will come any more, "" while one may; called while there is none.
        log_every_s: seconds between the log lines about where the time goes.
    """

    def __init__(
        self,
        client: LeaseClient,
        make_stage: Callable[[str], Maker],
        pool: DecodePool | None,
        should_stop: Callable[[], bool],
        *,
        data_roots: tuple[str, ...] = (),
        report: Callable[[str, int], None] = _ignore,
        over: Callable[[], str] = _never,
        log_every_s: float = 10.0,
    ):
        self._client, self._make_stage, self._pool, self._should_stop = (
            client,
            make_stage,
            pool,
            should_stop,
        )
        self._data_roots, self._report, self._over = data_roots, report, over
        self.meter = Meter(log_every_s)
        self.stage, self.maker, self._probe = "", None, ""
        self._jobs: list[Job] = []  # in the order in which they are needed
        self._on_device: list[Job] = []  # in the order in which they were given to its thread
        self._device = ThreadPoolExecutor(1, "device")
        self._watch = Stopwatch()  # of this thread, since the last batch left
        self._cpu_s = time.process_time()
        self._away_said = -AWAY_SAID_S
        self._good: dict[
            str, str
        ] = {}  # folder → a recording of it that was read, of the last few folders

    def run(self) -> str:
        """Serve until the run is over or must stop; send BYE and return the reason.

        Raises:
            BadInput: the trainer refuses this producer (other features, another version, a key it
                does not know).
        """
        reason = "stop was asked for"
        while not self._should_stop():
            self._tell()
            event = self._poll()
            if isinstance(event, Stop):
                reason = event.reason or "the run is over"
                break
            if isinstance(event, Refused):
                self._client.bye()
                raise BadInput(f"the trainer refuses this producer: {event.reason}")
            if isinstance(event, Welcome):
                self._open(event)
            elif isinstance(event, Lease):
                self._take(event)
            elif self._jobs or self._on_device:
                self._advance()
            else:
                self._waited()
                if not self._needed() and (over := self._over()):
                    reason = over
                    break
        self._drop_all()
        self._client.bye()
        self._device.shutdown(wait=False)
        return reason

    def _poll(self):
        if self._jobs or self._on_device:
            return self._client.poll(0.0)
        start = time.perf_counter()
        event = self._client.poll(POLL_S)
        # Not "lease_wait" while there is no trainer, or before its first lease: nobody waits for
        # this producer then.
        what, end = "lease_wait" if self._needed() else "idle", time.perf_counter()
        self._watch.add(what, end - start)
        trace.span("loop", what, start, end)
        return event

    def _needed(self) -> bool:
        return self.maker is not None and self._client.trainer_silent_s < TRAINER_SILENT_S

    def _tell(self) -> None:
        line = self.meter.line(time.monotonic())
        if line:
            log.info("%s", line)

    def _status(self, text: str) -> None:
        self._client.set_status(text)
        self._report(text, self.meter.total)

    def _waited(self) -> None:
        """POLL_S without leases: blocked if the trainer is there and needs none, idle
        if it is not.
        """
        what = "blocked" if self._needed() else "idle"
        self.meter.spend(what, POLL_S)
        self._status(what)

    def _open(self, welcome: Welcome) -> None:
        """Answer a generation; keep the maker, with what it has compiled, if stage and features are
        the same.
        """
        running = self._drop_all()
        stage, wanted = welcome.offer.stage, welcome.offer.feature_hash
        if self.maker is None or stage != self.stage or self.maker.feature_hash != wanted:
            self._status(f"opening stage {stage}")
            if wait(running, DEVICE_S).not_done:
                raise RuntimeError(f"the device has not finished a batch for {DEVICE_S:.0f} s")
            self.maker = (
                None  # before the next one is built: both would not fit into a small device
            )
            self.stage, self.maker = stage, self._make_stage(stage)
            self._probe = self.maker.probe()
            log.info("stage %s, features %s, probe %s", stage, self.maker.feature_hash, self._probe)
        self._client.ready(welcome.gen, self.maker.feature_hash, self._probe)
        self._status("ready")

    def _take(self, lease: Lease) -> None:
        """Find out what the batch needs and start decoding it."""
        if self.maker is None or not self._client.is_current(lease):
            return
        try:
            with self._part("read", lease):
                planned = without(self.maker.plan(lease.plan, lease.g), lease.set_aside)
                clips = self.maker.clips(planned)
        except (BatchError, IndexError, KeyError) as e:
            self._refuse(lease, f"{type(e).__name__}: {e}")
            return
        futures = [
            self._pool.submit(
                c.utterance.path, c.start, c.num_samples, change=c.change, **_as_scanned(c)
            )
            for c in clips
        ]
        self._jobs.append(Job(lease, planned, clips, futures, time.perf_counter()))
        self._jobs.sort(key=lambda job: job.lease.position)

    def _drop_all(self) -> list[Future]:
        """Drop all work in progress; return the jobs that the device's thread will finish
        anyway.
        """
        jobs = [*self._jobs, *self._on_device]
        self._jobs.clear()
        self._on_device.clear()
        for job in jobs:
            job.drop()
        return [
            job.computed for job in jobs if job.computed is not None and not job.computed.done()
        ]

    def _advance(self) -> None:
        """Do what is possible at once: pack the next batch for the device, or send the one that it
        has finished; else wait for either.
        """
        if self._jobs and not self._client.is_current(self._jobs[0].lease):
            self._jobs.pop(0).drop()
        elif (
            self._jobs
            and len(self._on_device) < ON_DEVICE
            and all(f.done() for f in self._jobs[0].futures)
        ):
            self._pack(self._jobs.pop(0))
        elif self._on_device and self._on_device[0].computed.done():
            self._send(self._on_device.pop(0))
        elif self._on_device:
            first, since = self._on_device[0], time.monotonic()
            if first.waited_s > DEVICE_S:  # a new process may get its device to work
                raise RuntimeError(f"the device has not finished a batch for {DEVICE_S:.0f} s")
            self._status(self._phase())
            ahead = self._jobs[0].futures if self._jobs and len(self._on_device) < ON_DEVICE else ()
            with self._part("device_wait"):
                wait(
                    [first.computed, *(f for f in ahead if not f.done())],
                    WAIT_SLICE_S,
                    FIRST_COMPLETED,
                )
            first.waited_s += min(
                time.monotonic() - since, 1.0
            )  # not counted as this process's standstill
        else:
            self._status("working")
            with self._part("decode_wait"):
                wait(self._jobs[0].futures, WAIT_SLICE_S)

    def _phase(self) -> str:
        """The phase to report to the trainer: during a compilation, leases do not expire."""
        compiling = [
            job.planned.bucket
            for job in self._on_device
            if job.compiles and not job.computed.done()
        ]
        return f"compiling(bucket {compiling[0]})" if compiling else "working"

    def _pack(self, job: Job) -> None:
        decoded, began = job.decoded(), time.perf_counter()
        ended = max([job.began, *(getattr(f, "ended", 0.0) for f in job.futures)])
        job.span("batch", "decode", job.began, ended)
        try:
            self._remember(job, decoded)
            away = why_away(
                [d for d in decoded if isinstance(d, DecodeError)],
                self._data_roots,
                self._good.values(),
            )
            if away:
                self._postpone(job.lease, away)
                return
            job.work = self.maker.begin(job.planned, job.clips, decoded)
        except BatchError as e:
            self._refuse(job.lease, str(e))
            return
        job.compiles = self.maker.compiles(job.planned)
        if job.compiles:
            self._status(f"compiling(bucket {job.planned.bucket})")
        job.span("loop", "pack", began, time.perf_counter())
        job.computed = self._device.submit(job.compute)
        self._on_device.append(job)

    def _send(self, job: Job) -> None:
        try:
            made = job.work.finish(job.computed.result())
        except BatchError as e:
            self._refuse(job.lease, str(e))
            return
        if not self._client.is_current(job.lease):
            return
        for utterance, reason in made.bad:
            log.warning(
                "%s %d: utterance %d is left out: %s",
                job.planned.plan,
                job.planned.g,
                utterance,
                reason,
            )
        notes = self._notes(job, made)
        with self._part(
            "serialise", job.lease
        ):  # belongs to the next batch's timings: this one's are on their way
            self._client.send(job.lease, made.arrays, notes)
        self.meter.batch(made)
        self._status(self._phase())

    @contextmanager
    def _part(self, name: str, lease: Lease | None = None) -> Iterator[None]:
        start = time.perf_counter()
        with self._watch.part(name):
            yield
        end = time.perf_counter()
        self.meter.spend(name, end - start)
        about = {} if lease is None else {"plan": lease.plan, "g": lease.g}
        trace.span("loop", name, start, end, **about)

    def _notes(self, job: Job, made: Made) -> Notes:
        """DATA's notes on the batch, and on the time since the last one left: ms by part; `decode`
        and `resample` are summed over threads.
        """
        spent = Counter(self._watch.take())
        spent.update(made.spent_s)
        for future in job.futures:
            spent.update(getattr(future, "spent_s", {}))
        cpu_s, self._cpu_s = time.process_time() - self._cpu_s, time.process_time()
        room = min(MAX_REASON, REASONS_BYTES // max(1, len(made.bad)))
        return Notes(
            bad=tuple((utterance, _cut(reason, room)) for utterance, reason in made.bad),
            spent_ms={part: round(1e3 * s, 3) for part, s in spent.items()},
            threads=self._pool.num_threads if self._pool is not None else 0,
            clips=len(job.clips),
            cached=made.num_cached,
            cpu_ms=round(1e3 * cpu_s, 3),
            sent=time.time(),
        )

    def _refuse(self, lease: Lease, why: str) -> None:
        log.warning("%s %d cannot be made: %s", lease.plan, lease.g, why)
        self._client.nack(lease, why)

    def _remember(self, job: Job, decoded: list) -> None:
        for clip, d in zip(job.clips, decoded, strict=True):
            if not isinstance(d, DecodeError):
                path = str(clip.utterance.path)
                folder = os.path.dirname(path)
                self._good.pop(folder, None)
                self._good[folder] = path
        while len(self._good) > GOOD_FOLDERS:
            self._good.pop(next(iter(self._good)))

    def _postpone(self, lease: Lease, why: str) -> None:
        """Put off a batch whose data is away for now; no clip is set
        aside.
        """
        now = time.monotonic()
        if now >= self._away_said + AWAY_SAID_S:
            self._away_said = now
            log.warning("%s %d is put off: %s; trying again", lease.plan, lease.g, why)
        self._client.nack(lease, why, later=True)


def _cut(reason: str, num_bytes: int) -> str:
    return printable(reason.encode(errors="replace")[:num_bytes].decode(errors="ignore"))


def _as_scanned(clip: Clip) -> dict:
    """What the manifest knows about the file, for `decode` to compare and use."""
    return {
        "source_rate": clip.utterance.source_rate,
        "source_frames": clip.utterance.source_frames,
        "portion": clip.utterance.portion,
    }
