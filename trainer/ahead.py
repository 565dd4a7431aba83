"""Before step 1: compile what the first steps need, several programs in parallel, and prove that
the largest step fits.

All of it runs on batches of padding and changes no weight and no ledger line, while the producers
make the first batches. What later steps and evaluations need is compiled during training, in the
order in which the plan will need it; a step whose programs are not ready waits for them.
"""

from __future__ import annotations

import gc
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from common.gpu.memory import LEAST_FREE_MB
from common.system.cores import cores
from common.system.errors import Hopeless, RunError, is_out_of_memory
from common.system.lifecycle import Stop
from trainer.aside import POLL_S, Function, Workers, run_aside
from trainer.ranks.share import every
from trainer.report.observe import Observer
from trainer.tried import Tried, key_of

if TYPE_CHECKING:
    from common.data.buckets import Bucket
    from trainer.history.schedule import Position
    from trainer.stages import Stage
    from trainer.step.gpt import Step

log = logging.getLogger(__name__)

MOST_AT_ONCE = 12  # compilations: each holds some 100 MB on the host
# Functions under way beside training: tracing one takes a third of the time of its compilation, and
# more of them would hold up, in Python, those that a step already waits for.
_AT_ONCE = 4
_LEFT_FOR_TRAINING = 3  # cores, while it goes on beside them
_LOOK_AHEAD = 4000  # batches: how far ahead the plan is asked for the order

_TRACED = {"training": ("update", "micro"), "evaluation": ("evaluate",)}  # as in a step's counts


def prepare(
    stage: Stage,
    position: Position,
    observer: Observer,
    stop: Stop,
    *,
    own: Callable[[str, int], bool] = every,
    all_first: bool = False,
) -> Compiled:
    """Compile and try what the steps from `position` on need; the rest of the stage follows
    during training, or now if `all_first`: where steps are to be timed.

    Does nothing if the step compiles nothing. `own(plan, g)`: whether this trainer computes that
    batch.

    Raises:
        Hopeless: the largest step does not fit the device's memory. Whatever a compilation raises.
    """
    compiled = Compiled(stage, stop)
    if not stage.step.compiles:
        return compiled
    from trainer.step.snapshot import ROOM  # TensorFlow, as such a step has

    grouped, largest = stage.schedule.accumulate > 1, largest_bucket(stage)
    order = list(buckets_in_order(stage, position, own))
    tried, key = Tried.of_process(), key_of(stage.step, stage.schedule, largest)
    tried.forget_if_hopeless(stop)
    known = ROOM.remember(tried.needed(key))
    if stage.step.options.jit:
        first = order if all_first else order[:1]
        now = dict.fromkeys([*([] if known else [("training", largest)]), *first])
        workers = Workers(min(MOST_AT_ONCE, cores()), compiled.given)
        run_aside(lambda: [compiled.trace(workers, wanted) for wanted in now], stop)
        workers.wait(stop, observer)
    if known:
        log.info("the largest step was tried on this card before, and is not tried again")
    else:
        bucket = stage.schedule.train.buckets[largest]
        observer.trying(
            f"the largest step is tried on padding ({bucket.batch_size} rows x {bucket.row_len})"
        )
        run_aside(lambda: dry_step(stage, largest), stop)
        run_aside(
            lambda: tried.note(
                key, ROOM.measure(lambda: stage.step.dry_run(largest, grouped=grouped))
            ),
            stop,
        )
    tell_memory(stage, largest)
    if stage.step.options.jit:
        compiled.later([wanted for wanted in order if wanted not in now])
    return compiled


class Compiled:
    """Which functions of a stage are compiled, and the thread that compiles the others during
    training, once the first step is under way.
    """

    def __init__(self, stage: Stage, stop: Stop):
        self._stage, self._stop = stage, stop
        self.given: set = set()
        self._later: list[Function] = []
        self._coming: set[Function] = set()
        self._changed = threading.Condition()

    def trace(self, workers: Workers, function: Function) -> int:
        """Trace a function, and have each of its programs compiled from the time it is traced on;
        return how many there are that were not given to any workers before.
        """
        from trainer.step.regions import each_program  # TensorFlow, as such a step has

        what, bucket = function
        new: list[int] = []
        with each_program(lambda p: new.append(workers.add([(p.name, p.compile)], function))):
            found = self._stage.step.programs(
                bucket, self._stage.schedule.accumulate > 1, training=what == "training"
            )
        return sum(new) + workers.add([(p.name, p.compile) for p in found], function)

    def later(self, wanted: list[Function]) -> None:
        """Compile these too, in this order, once `go_on` is called or a step waits for one."""
        self._later, self._coming = wanted, set(wanted)

    def go_on(self) -> None:
        """Compile what is left, in a thread."""
        wanted, self._later = self._later, []
        if wanted:
            threading.Thread(target=self._run, args=(wanted,), name="compile", daemon=True).start()

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The stage's."""
        return self._stage.schedule.train.buckets

    @property
    def under_way(self) -> bool:
        """Whether anything is left to compile."""
        return bool(self._coming)

    def is_coming(self, what: str, bucket: int) -> bool:
        """Whether a function is being compiled, or is waiting for it."""
        return (what, bucket) in self._coming

    def wait(self, what: str, bucket: int) -> None:
        """Wait until a function is compiled, or has failed, so that its first call fails. Raises
        the stop's error.
        """
        if (what, bucket) in self._coming:
            self.go_on()
        with self._changed:
            while (what, bucket) in self._coming:
                self._stop.check()
                self._changed.wait(POLL_S)

    def watch(self, step: Step, observer: Observer | None = None) -> WaitingStep:
        """`step`, with calls that wait for their programs: they notice a stop, which a compilation
        does not. `observer` is told which of them wait, and which are made beside a compilation.
        """
        return WaitingStep(step, self, observer)

    def _run(self, wanted: list[Function]) -> None:
        began, threads = time.monotonic(), max(1, min(MOST_AT_ONCE, cores() - _LEFT_FOR_TRAINING))
        workers, left = Workers(threads, self.given), dict[Function, int]()
        try:
            for function in wanted:
                self._stop.check()
                left[function] = self.trace(workers, function)
                self._collect(workers, left, wait=False)
                while len(left) >= _AT_ONCE:
                    self._collect(workers, left, wait=True)
            while left:
                self._collect(workers, left, wait=True)
            log.info(
                "all programs are compiled, %.0f s after the first steps could begin",
                time.monotonic() - began,
            )
            gc.freeze()  # what was traced stays, as before the first step (`trainer.session`)
        except RunError:  # a stop, or a follower's end: the loop notices by itself
            pass
        finally:
            workers.end()
            with self._changed:
                if (
                    not self._stop.is_set()
                ):  # else whoever waits leaves instead of compiling by itself
                    self._coming.clear()
                self._changed.notify_all()

    def _collect(self, workers: Workers, left: dict[Function, int], wait: bool) -> None:
        """Count what has been compiled; a function with nothing left is ready."""
        for function in [f for f, n in left.items() if n == 0]:
            del left[function]
            self._is_there(function)
        if not left:
            return
        ended = workers.take(self._stop) if wait else workers.poll()
        if ended is None:
            return
        function, error = ended
        if error is not None:  # the step that needs it fails in the same way, and reports it
            said = (str(error) or type(error).__name__).splitlines()[0][:200]
            log.info("%s of bucket %d is not compiled ahead: %s", *function, said)
        if function in left:
            left[function] -= 1
        self._collect(workers, left, wait=False)

    def _is_there(self, function: Function) -> None:
        with self._changed:
            self._coming.discard(function)
            self._changed.notify_all()


class WaitingStep:
    """A step (`trainer.step.gpt.Step`) whose calls wait until their programs are compiled.

    The first one goes before the compilations that are left: tracing holds Python, which issuing a
    step needs.
    """

    def __init__(self, step: Step, compiled: Compiled, observer: Observer | None):
        self._step, self._compiled, self._observer = step, compiled, observer

    def __getattr__(self, name: str):
        return getattr(self._step, name)

    def micro(self, bucket: int, *args):
        """See `Step.micro`."""
        return self._called("training", self._step.micro, bucket, *args)

    def update(self, bucket: int, *args):
        """See `Step.update`."""
        return self._called("training", self._step.update, bucket, *args)

    def evaluate(self, bucket: int, *args):
        """See `Step.evaluate`."""
        return self._called("evaluation", self._step.evaluate, bucket, *args)

    def _called(self, what: str, call: Callable, bucket: int, *args):
        if self._observer is not None and self._compiled.under_way:
            self._tell(what, bucket)
        self._compiled.wait(what, bucket)
        try:
            return call(bucket, *args)
        finally:
            self._compiled.go_on()

    def _tell(self, what: str, bucket: int) -> None:
        self._observer.beside_compiling()
        # Of what was not traced yet, the loop has told.
        traced = any(self._step.trace_counts.get(f"{name}/{bucket}") for name in _TRACED[what])
        if traced and self._compiled.is_coming(what, bucket):
            buckets = self._compiled.buckets
            self._observer.compiling(what, bucket, len(buckets), buckets[bucket])


def largest_bucket(stage: Stage) -> int:
    """The bucket with the most positions."""
    buckets = stage.schedule.train.buckets
    return max(
        range(len(buckets)),
        key=lambda b: (
            buckets[b].batch_size * (buckets[b].row_len + stage.step.dims.gpt.num_latents)
        ),
    )


def buckets_in_order(
    stage: Stage, position: Position, own: Callable[[str, int], bool] = every
) -> Iterator[Function]:
    """("training" or "evaluation", bucket), each once, in the order in which the plan needs them
    from `position` on, for the batches that are `own`. Of the training's, those that no such batch
    needs soon come last.
    """
    schedule = stage.schedule
    wanted = [("training", b) for b in range(len(schedule.train.buckets))]
    wanted += [
        ("evaluation", b)
        for b in dict.fromkeys(
            schedule.eval.batch(g).bucket
            for g in range(schedule.num_eval_batches)
            if own("eval", g)
        )
    ]
    seen: dict[Function, None] = {}
    for plan, g in itertools.islice(schedule.batches(position), _LOOK_AHEAD):
        if not own(plan, g):
            continue
        batch = (schedule.train if plan == "train" else schedule.eval).batch(g)
        if (key := ("training" if plan == "train" else "evaluation", batch.bucket)) not in seen:
            seen[key] = None
            yield key
        if len(seen) == len(wanted):
            return
    yield from (key for key in wanted if key not in seen)


def dry_step(stage: Stage, number: int) -> None:
    """Run the step of a bucket on padding, so that a step that does not fit fails now, not hours
    later.

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
            f"out of memory in the dry step, before step 1: bucket {number} ({rows} rows x"
            f" {bucket.row_len} positions); try {smaller}, or train.recompute=true. Checkpoints are"
            " as they were"
        ) from e


def tell_memory(stage: Stage, largest: int) -> None:
    """Log the card memory that the largest step takes, and how many rows of its length would fit:
    measured, if there is a GPU.
    """
    from trainer.step.snapshot import ROOM

    bucket, account = stage.schedule.train.buckets[largest], ROOM.account()
    if account is None:
        return
    rows = account.rows(bucket.batch_size)
    log.info(
        "%s. About %d rows of %d positions would fit, %d are asked for",
        account,
        rows,
        bucket.row_len,
        bucket.batch_size,
    )
    if account.free_mb < LEAST_FREE_MB:
        log.warning(
            "only %d MB of the card are left for the driver: a smaller batch is safer",
            account.free_mb,
        )
