"""Work that cannot be interrupted, in daemon threads: a stop does not wait for it, the process
exits while it runs.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from common.system.lifecycle import Stop
from trainer.report.observe import Observer

log = logging.getLogger(__name__)

POLL_S = 0.1

Function = tuple[str, int]  # "training" or "evaluation", bucket
Job = tuple[str, Callable[[], object]]  # name, what to call


class Workers:
    """Threads that compile their jobs, except those in `given`, where each is noted: each program
    is compiled once, whoever asks.
    """

    def __init__(self, threads: int, given: set):
        self._threads, self._given, self._began = threads, given, time.monotonic()
        self._waiting: queue.SimpleQueue[tuple[Job, Function] | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[tuple[Function, Exception | None]] = queue.SimpleQueue()
        self._started = self._new = 0

    def add(self, jobs: list[Job], function: Function) -> int:
        """Add jobs for `function`, the slowest first; return how many of them are new."""
        new = [job for job in jobs if job[1] not in self._given]
        for job in new:
            self._given.add(job[1])
            self._new += 1
            self._waiting.put((job, function))
            if self._started < self._threads:
                self._started += 1
                threading.Thread(
                    target=self._run, name=f"compile-{self._started}", daemon=True
                ).start()
        return len(new)

    def end(self) -> None:
        """End the threads: no more jobs will come."""
        for _ in range(self._started):
            self._waiting.put(None)

    def take(self, stop: Stop) -> tuple[Function, Exception | None]:
        """The next finished job. Raises the stop's error."""
        return take(self._ended, stop)

    def poll(self) -> tuple[Function, Exception | None] | None:
        """The next finished job, if any."""
        try:
            return self._ended.get_nowait()
        except queue.Empty:
            return None

    def wait(self, stop: Stop, observer: Observer) -> None:
        """Wait until all are compiled; `observer` shows the progress.

        Raises what a job raised, and the stop's error.
        """
        total = self._new
        self.end()
        for done in range(total):
            left_s = (time.monotonic() - self._began) / done * (total - done) if done else None
            observer.compiling_programs(done + 1, total, left_s)
            _, error = self.take(stop)
            if error is not None:
                raise error
        log.info("compiled %d programs in %.0f s", total, time.monotonic() - self._began)

    def _run(self) -> None:
        while (given := self._waiting.get()) is not None:
            ((name, compile_), function), began, error = given, time.monotonic(), None
            try:
                compile_()
            except Exception as e:  # noqa: BLE001 - the edge of a thread: raised by whoever waits
                error = e
            log.debug("compiled %s in %.1f s", name, time.monotonic() - began)
            self._ended.put((function, error))


def run_aside(function: Callable[[], object], stop: Stop) -> None:
    """Run something that cannot be interrupted, in a daemon thread.

    Raises what the function raised, and the stop's error.
    """
    ended: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            function()
        except Exception as e:  # noqa: BLE001 - the edge of a thread: raised by whoever waits
            ended.put(e)
        else:
            ended.put(None)

    threading.Thread(target=run, name="dry-step", daemon=True).start()
    if (error := take(ended, stop)) is not None:
        raise error


def take(results: queue.SimpleQueue, stop: Stop):
    """The next result; the stop's error once it is set."""
    while True:
        stop.check()
        try:
            return results.get(timeout=POLL_S)
        except queue.Empty:
            continue
