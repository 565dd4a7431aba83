"""Opens a trainer's device: threads, memory and determinism, and the collectives that connect
several trainers.
"""

from __future__ import annotations

import faulthandler
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from common.gpu.faults import in_words
from common.run.folder import RunFolder
from common.system.errors import RunError
from common.system.lifecycle import Stop, hear
from common.system.status import StatusFile
from trainer import ahead
from trainer.aside import run_aside
from trainer.history.checkpoint import step_of
from trainer.ranks.words import RankLost

log = logging.getLogger(__name__)

CONNECT_S = 300.0  # for the collectives of all trainers to find each other
LEAVE_S = 15.0  # to leave when they do not


def set_up_device(
    run: RunFolder, status: StatusFile, join: Callable[[], None] = lambda: None
) -> None:
    """Set threads, memory and determinism before TensorFlow does any work; prove the device with
    real operations.

    `join`: as for `common.gpu.device.prove_device`.
    """
    if not run.trains_networks:
        return
    from common.gpu.device import prove_device

    t = run.config.threads
    status.update(phase="opening the device")
    # TensorFlow's inter-op threads compile XLA's programs: with as few threads as equal bits on
    # the CPU need, they would be compiled one after the other, and training would wait.
    inter = max(t.trainer_inter, ahead.MOST_AT_ONCE + 4) if run.config.jit else t.trainer_inter
    info = prove_device(
        intra_threads=t.trainer_intra, inter_threads=inter, whole_card=True, join=join
    )
    import tensorflow as tf

    if run.config.deterministic:
        tf.config.experimental.enable_op_determinism()
    log.info("training on %s", info.label)
    status.update(device=info.label)


def device_in_words(status: StatusFile, checkpoints: Path) -> AbstractContextManager[None]:
    """A GPU that is lost, or full, ends a trainer's stage with one line."""

    def at() -> str:
        s = status.value
        return f"after step {s.step} of {s.stage_name}" if s.step else f"before step 1 ({s.phase})"

    def saved() -> str:
        step = max((step_of(p) or 0 for p in checkpoints.glob("step-*")), default=0)
        return f"; the same command goes on from step {step}, the newest saved"

    return in_words(lambda: status.value.device, at, saved)


class Connected:
    """The collectives of this process, once `connect` has made them."""

    def __init__(self, run: RunFolder, rank: int, addresses: list[str]):
        self._run, self._rank, self._addresses = run, rank, addresses
        self._collectives = None

    def connect(self, check: Callable[[], None], stop: Stop) -> None:
        """Wait for all trainers. `check` is called meanwhile, and raises to end the wait.

        RankLost: they are not connected within CONNECT_S. Where TensorFlow keeps the interpreter
        from raising that, the process ends with 1 and every thread's stack.
        """
        import tensorflow as tf

        from trainer.ranks.collectives import Collectives

        config = self._run.config
        on_gpu = bool(tf.config.get_visible_devices("GPU"))
        made = []

        def make() -> None:
            made.append(
                Collectives(
                    self._rank,
                    self._addresses,
                    on_gpu=on_gpu,
                    dtype=config.train.reduce_dtype,
                    timeout_s=config.trainers.timeout_s,
                )
            )

        deadline = time.monotonic() + CONNECT_S

        def check_in_time() -> None:
            check()
            if time.monotonic() > deadline:
                raise RankLost(
                    f"the trainers were not connected within {CONNECT_S:.0f} s, at"
                    f" {', '.join(self._addresses)}: a firewall may hold these ports"
                )

        # TensorFlow's server holds the interpreter's lock while it waits for those of the others:
        # no thread of Python runs then, and nothing else ends a wait for one that is lost.
        log.info("connecting the collectives of %s", ", ".join(self._addresses))
        faulthandler.dump_traceback_later(CONNECT_S + LEAVE_S, exit=True)
        left_s = LEAVE_S
        try:
            run_aside(make, Check(check_in_time, stop))
            left_s = 0.0
        except (tf.errors.OpError, RuntimeError) as e:
            said = str(e).splitlines()[0][:200]
            raise RankLost(f"the trainers could not be connected: {said}") from e
        finally:  # whoever leaves, leaves TensorFlow's thread behind
            faulthandler.cancel_dump_traceback_later()
            if left_s:
                faulthandler.dump_traceback_later(left_s, exit=True)
        self._collectives = made[0]
        hear()

    def add_up(self, gradients, losses) -> None:
        """See `Ranks.add_up`."""
        self._collectives.add_up(gradients, losses)

    def abort(self) -> None:
        """End a sum that waits for a dead trainer."""
        if self._collectives is not None:
            self._collectives.abort()


class Check:
    """A stop as `ahead` uses one, backed by a function that raises."""

    def __init__(self, check: Callable[[], None], stop: Stop):
        self.check, self.at_exit = check, stop.at_exit

    def is_set(self) -> bool:
        """Whether `check` raises."""
        try:
            self.check()
        except RunError:
            return True
        return False
