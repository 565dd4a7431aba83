"""Before step 1: prove that the largest bucket fits, then compile the other buckets side by side.

All of it with batches of padding, changing no weight and no ledger line, while the producers make the first batches.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from common.system.cores import cores
from common.system.errors import Hopeless, is_out_of_memory
from trainer.report.observe import Observer

if TYPE_CHECKING:
    from trainer.stages import Stage

log = logging.getLogger(__name__)

_MOST_AT_ONCE = 4  # compilations: each holds a few GB on the host


def prepare(stage: Stage, observer: Observer, should_stop: Callable[[], bool] = lambda: False) -> None:
    """`dry_step`; then, where XLA compiles, every function that the stage will need. Nothing where the step has no dry run."""
    if not hasattr(stage.step, "dry_run"):
        return
    from trainer.step.snapshot import ROOM  # TensorFlow, as such a step has

    first = dry_step(stage, observer)
    if stage.step.options.jit:
        compile_others(stage, first, should_stop)
    ROOM.measure(lambda: stage.step.dry_run(first, grouped=stage.schedule.accumulate > 1))


def dry_step(stage: Stage, observer: Observer) -> int:
    """Run the step of the bucket with the most positions on padding: what does not fit shows now, not hours later. Returns the bucket.

    Hopeless: it does not fit; names the bucket and what to set.
    """
    buckets = stage.schedule.train.buckets
    number = max(range(len(buckets)), key=lambda b: buckets[b].batch_size * (buckets[b].row_len + stage.step.dims.gpt.num_latents))
    observer.compiling("the training step, tried on padding first,", number, len(buckets), buckets[number])
    try:
        stage.step.dry_run(number, grouped=stage.schedule.accumulate > 1)
    except Exception as e:
        if not is_out_of_memory(e):
            raise
        rows = buckets[number].batch_size
        smaller = f"--batch-size {rows // 2}" if rows > 1 else "fewer model.layers"
        raise Hopeless(
            f"out of memory in the dry step, before step 1: bucket {number} ({rows} rows x {buckets[number].row_len} positions); "
            f"try {smaller}, or train.recompute=true. Checkpoints are as they were"
        ) from e
    return number


def compile_others(stage: Stage, done: int, should_stop: Callable[[], bool]) -> None:
    """Compile the training function of every bucket but `done`, and the evaluation's of those it has, several at a time."""
    step, schedule = stage.step, stage.schedule
    evaluated = {schedule.eval.batch(g).bucket for g in range(schedule.num_eval_batches)}
    jobs = [("training", b) for b in range(len(schedule.train.buckets)) if b != done] + [("evaluation", b) for b in sorted(evaluated)]
    workers = max(1, min(_MOST_AT_ONCE, cores() // 2, len(jobs)))

    def run(job: tuple[str, int]) -> None:
        what, bucket = job
        if should_stop():
            return
        began = time.monotonic()
        try:
            if what == "training":
                step.dry_run(bucket, grouped=schedule.accumulate > 1)
            else:
                step.dry_evaluate(bucket)
        except Exception as e:
            if is_out_of_memory(e):
                # Side by side they need more than one alone does: it is compiled when its first batch comes.
                log.info("no memory to compile %s of bucket %d ahead", what, bucket)
                return
            raise
        log.info("compiled %s of bucket %d in %.0f s", what, bucket, time.monotonic() - began)

    if jobs:
        log.info("compiling %d more functions, %d at a time", len(jobs), workers)
        with ThreadPoolExecutor(workers, "compile") as pool:
            for future in [pool.submit(run, job) for job in jobs]:
                future.result()
