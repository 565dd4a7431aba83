"""Before step 1: compile what the first steps need, several programs side by side, and prove that the largest step fits.

All of it on batches of padding, changing no weight and no ledger line, while the producers make the first batches. What later steps and
evaluations need is compiled while training goes on, in the order in which the plan will ask for it; a step whose programs are not
ready waits for them.

Compilations cannot be interrupted. They run in daemon threads, so that a stop does not wait for them: the process leaves under them.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from common.gpu.memory import LEAST_FREE_MB
from common.system.cores import cores
from common.system.errors import Hopeless, is_out_of_memory
from common.system.lifecycle import Stop
from trainer.report.observe import Observer

if TYPE_CHECKING:
    from trainer.history.schedule import Position
    from trainer.stages import Stage

log = logging.getLogger(__name__)

_MOST_AT_ONCE = 8  # compilations before step 1: each holds some 100 MB on the host
_BESIDE_TRAINING = 4
_POLL_S = 0.1
_LOOK_AHEAD = 4000  # batches: the plan beyond them is not asked what comes first

Job = tuple[str, Callable[[], object]]


def prepare(stage: Stage, position: Position, observer: Observer, stop: Stop) -> None:
    """Compile and try what the steps from `position` on need. Nothing where the step has no dry run, or compiles nothing.

    Raises:
        Hopeless: the largest step does not fit the device's memory.
        Whatever a compilation raises.
    """
    if not hasattr(stage.step, "dry_run"):
        return
    from trainer.step.snapshot import ROOM  # TensorFlow, as such a step has

    grouped, largest = stage.schedule.accumulate > 1, largest_bucket(stage)
    order = list(buckets_in_order(stage, position))
    if stage.step.options.jit:
        now = [largest, *(b for what, b in order[:1] if what == "training" and b != largest)]
        jobs = _programs(stage, [("training", b) for b in now])
        Workers(jobs, min(_MOST_AT_ONCE, cores()), observer).wait(stop)
    bucket = stage.schedule.train.buckets[largest]
    observer.trying(f"the largest step is tried on padding ({bucket.batch_size} rows x {bucket.row_len})")
    run_aside(lambda: dry_step(stage, largest), stop)
    run_aside(lambda: ROOM.measure(lambda: stage.step.dry_run(largest, grouped=grouped)), stop)
    tell_memory(stage, largest)
    if stage.step.options.jit:
        later = [(what, b) for what, b in order if (what, b) not in {("training", b) for b in now}]
        threading.Thread(target=_compile_later, args=(stage, later, stop), name="compile", daemon=True).start()


def largest_bucket(stage: Stage) -> int:
    """The bucket with the most positions."""
    buckets = stage.schedule.train.buckets
    return max(range(len(buckets)), key=lambda b: buckets[b].batch_size * (buckets[b].row_len + stage.step.dims.gpt.num_latents))


def buckets_in_order(stage: Stage, position: Position) -> Iterator[tuple[str, int]]:
    """("training" or "evaluation", bucket), each once, as the plan asks for them from `position` on."""
    schedule = stage.schedule
    wanted = [("training", b) for b in range(len(schedule.train.buckets))]
    wanted += [("evaluation", b) for b in dict.fromkeys(schedule.eval.batch(g).bucket for g in range(schedule.num_eval_batches))]
    seen: dict[tuple[str, int], None] = {}
    for plan, g in itertools.islice(schedule.batches(position), _LOOK_AHEAD):
        batch = (schedule.train if plan == "train" else schedule.eval).batch(g)
        if (key := ("training" if plan == "train" else "evaluation", batch.bucket)) not in seen:
            seen[key] = None
            yield key
        if len(seen) == len(wanted):
            return
    yield from (key for key in wanted if key not in seen)


def dry_step(stage: Stage, number: int) -> None:
    """Run the step of a bucket on padding: what does not fit shows now, not hours later.

    Hopeless: it does not fit; names the bucket and what to set.
    """
    try:
        stage.step.dry_run(number, grouped=stage.schedule.accumulate > 1)
    except Exception as e:
        if not is_out_of_memory(e):
            raise
        bucket = stage.schedule.train.buckets[number]
        rows = bucket.batch_size
        smaller = f"--batch-size {rows // 2}" if rows > 1 else "fewer model.layers"
        raise Hopeless(
            f"out of memory in the dry step, before step 1: bucket {number} ({rows} rows x {bucket.row_len} positions); "
            f"try {smaller}, or train.recompute=true. Checkpoints are as they were"
        ) from e


def tell_memory(stage: Stage, largest: int) -> None:
    """What the largest step takes of the card, and how many rows of its length would fit: measured, where there is a GPU."""
    from trainer.step.snapshot import ROOM

    bucket, account = stage.schedule.train.buckets[largest], ROOM.account()
    if account is None:
        return
    rows = account.rows(bucket.batch_size)
    log.info("%s. About %d rows of %d positions would fit, %d are asked for", account, rows, bucket.row_len, bucket.batch_size)
    if account.free_mb < LEAST_FREE_MB:
        log.warning("only %d MB of the card are left for the driver: a smaller batch is safer", account.free_mb)


def _programs(stage: Stage, wanted: list[tuple[str, int]]) -> list[Job]:
    """The programs of some functions, each once, traced now."""
    grouped, found = stage.schedule.accumulate > 1, {}
    for what, bucket in wanted:
        for program in stage.step.programs(bucket, grouped, training=what == "training"):
            found.setdefault(id(program), (program.name, program.compile))
    return list(found.values())


def _compile_later(stage: Stage, wanted: list[tuple[str, int]], stop: Stop) -> None:
    """The thread beside training: bucket after bucket, so that the next one is ready first."""
    began = time.monotonic()
    for what, bucket in wanted:
        if stop.is_set():
            return
        try:
            Workers(_programs(stage, [(what, bucket)]), max(1, min(_BESIDE_TRAINING, cores() // 2)), None).wait(stop)
        except Exception as e:  # noqa: BLE001 - the edge of a thread; the step that needs it says why it fails
            log.info(
                "%s of bucket %d is not compiled ahead: %s", what, bucket, str(e).splitlines()[0][:200] if str(e) else type(e).__name__
            )
    if wanted and not stop.is_set():
        log.info("all programs are compiled, %.0f s after the first steps could begin", time.monotonic() - began)


class Workers:
    """Threads that compile; `observer`, if any, shows how far they are.

    Args:
        jobs: (what, compile), the slowest first.
    """

    def __init__(self, jobs: list[Job], threads: int, observer: Observer | None):
        self._jobs, self._observer, self._began = jobs, observer, time.monotonic()
        self._waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[tuple[str, float, Exception | None]] = queue.SimpleQueue()
        for job in jobs:
            self._waiting.put(job)
        for i in range(min(threads, len(jobs))):
            threading.Thread(target=self._run, name=f"compile-{i}", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                name, compile_ = self._waiting.get_nowait()
            except queue.Empty:
                return
            began, error = time.monotonic(), None
            try:
                compile_()
            except Exception as e:  # noqa: BLE001 - raised by whoever waits
                error = e
            self._ended.put((name, time.monotonic() - began, error))

    def wait(self, stop: Stop) -> None:
        """Until all are compiled. Raises what one of them raised, and the stop's error."""
        done, total = 0, len(self._jobs)
        while done < total:
            if self._observer is not None:
                self._observer.compiling_programs(done + 1, total, self._left_s(done, total))
            name, seconds, error = take(self._ended, stop)
            done += 1
            if error is not None:
                raise error
            log.debug("compiled %s in %.1f s", name, seconds)
        if total and self._observer is not None:
            log.info("compiled %d programs in %.0f s", total, time.monotonic() - self._began)

    def _left_s(self, done: int, total: int) -> float | None:
        return (time.monotonic() - self._began) / done * (total - done) if done else None


def run_aside(function: Callable[[], object], stop: Stop) -> None:
    """Run something that cannot be interrupted, in a daemon thread. Raises what it raised, and the stop's error."""
    ended: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            function()
        except Exception as e:  # noqa: BLE001 - raised by whoever waits
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
            return results.get(timeout=_POLL_S)
        except queue.Empty:
            continue
