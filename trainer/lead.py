"""The first of several trainers leads the others through stage 2: gathers them, passes on their
batches, meets them before each update.

It does everything else in a run itself (plan, leases, ledger, checkpoints, evaluation, console), as
with one trainer.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import numpy as np

from common.data.plan import PlannedBatch
from common.run.folder import RunFolder
from common.system.errors import FAILED, OK, BadInput
from common.system.lifecycle import Stop
from common.system.status import StatusFile
from common.system.stopwatch import Stopwatch
from common.transport.address import ChannelError, Endpoint
from trainer.joining import host_of, meeting_place
from trainer.opening import Connected
from trainer.ranks.leader import Leader
from trainer.ranks.ports import free_addresses
from trainer.ranks.share import Share
from trainer.stages import Stage
from trainer.sum_cost import SumCost

log = logging.getLogger(__name__)


class Lead:
    """The other trainers. A step's `Ranks`, a feed's `Others`."""

    rank = 0

    def __init__(self, run: RunFolder, stage: str, status: StatusFile, stop: Stop):
        trainers = run.config.trainers
        self._run = run
        self.count, self._status, self._stop = trainers.count, status, stop
        address, keys = meeting_place(run)
        try:
            limits_s = trainers.timeout_s, trainers.compiling_s
            self._leader = Leader(address, run.run_id, self.count, *limits_s, keys)
        except ChannelError as e:
            raise BadInput(str(e)) from e
        self._spent, self._log_every = Stopwatch(), run.config.train.log_every
        self._steps = 0
        self._share: Share | None = None
        self._stage: Stage | None = None
        try:
            status.update(phase="waiting for the other trainers")
            if keys is None:
                self._leader.join(stop.is_set)
            else:
                Endpoint(address, keys.pair.public, os.getpid()).write(run.trainers_file)
                start = f"launch.py trainer --run {run.path} --rank"
                last = f" to {self.count - 1}" if self.count > 2 else ""
                log.info("waiting at %s for `%s 1`%s on their hosts", address, start, last)
                self._leader.join(stop.is_set, trainers.join_s, self._tell_who)
                status.update(message="")
            addresses = self._addresses(host_of(address)) if run.trains_networks else []
            self._connected = Connected(run, 0, addresses)
            self._leader.set_up(stage, addresses)
        except BaseException as e:
            self._leader.end(str(e), code_of(e))
            self._leader.close()
            raise
        self._leader.on_lost = self._connected.abort

    @classmethod
    def of(cls, run: RunFolder, stage: str, status: StatusFile, stop: Stop) -> Lead | None:
        """Gather the others; None if one trainer makes the stage's steps.

        The first trainer alone trains stage 1, whose steps have one batch. RankLost: one trainer
        did not come.
        """
        if run.config.trainers.count == 1 or run.spec(stage).publishes:
            return None
        return cls(run, stage, status, stop)

    def connect(self) -> None:
        """Connect the collectives, before TensorFlow's first operation."""

        def check() -> None:
            self._stop.check()
            self._leader.check()

        self._connected.connect(check, self._stop)

    def begin(self, stage: Stage, step: int, used: Callable[[], None]) -> None:
        """Make all load `step`'s checkpoint. `used`: called for each batch another has used."""
        self._stage, self._share = stage, Share(stage.schedule, self.count)
        self._leader.on_used = used
        self._leader.begin(step)
        stage.step.share(self)
        log.info(
            "%d trainers make each step; batch i of a step belongs to trainer i mod %d",
            self.count,
            self.count,
        )

    def wait_ready(self) -> None:
        """Wait until all have compiled and loaded what they need; then time a sum."""

        self._leader.wait_ready(self._stop.is_set, self._tell_who)
        if self._run.trains_networks:
            self._status.update(phase="adding up gradients, to time it", message="")
            elements, seconds = self._stage.step.time_sum()
            dtype = self._run.config.train.reduce_dtype
            size = {"float32": 4, "bfloat16": 2}[dtype]
            cost = SumCost(self.count, dtype, elements * size, seconds)
            cost.write(self._run.path)
            log.info("%s", cost)

    def _tell_who(self, who: str) -> None:
        self._status.update(phase="waiting for the other trainers", message=who)

    def _addresses(self, host: str) -> list[str]:
        """Of every trainer's collective server, by rank. Those of other hosts chose theirs."""
        own, *free = free_addresses(self.count, host)
        told = self._leader.addresses()
        return [own, *(a or b for a, b in zip(told, free, strict=True))]

    def computes(self, plan: str, g: int) -> bool:
        """Whether this trainer computes a batch. Call `begin` first."""
        return self._share.rank_of(plan, g) == self.rank

    def check(self) -> None:
        """Raise RankLost if one is lost."""
        self._leader.check()

    def hand_on(self, planned: PlannedBatch, arrays: dict[str, np.ndarray]) -> bool:
        """See `trainer.feed.Others`."""
        rank = self._share.rank_of(planned.plan, planned.g)
        if rank:
            self._leader.hand_on(rank, planned.plan, planned.g, arrays)
        return rank > 0

    def meet(self, payload: bytes = b"") -> list[bytes]:
        """See `Ranks.meet`."""
        with self._spent.part("meet"):
            said = self._leader.meet(payload, self._stop.is_set)
        self._steps += 1
        if self._steps % self._log_every == 0:
            self._tell_time()
        return said

    def add_up(self, gradients, losses) -> None:
        """See `Ranks.add_up`."""
        with self._spent.part("sum"):
            self._connected.add_up(gradients, losses)

    def _tell_time(self) -> None:
        """Log how much of a step's time went into waiting for the others, and into the sum, which
        waits for the device.
        """
        meet, total = (
            1e3 * self._spent.spent_s.get(part, 0.0) / self._steps for part in ("meet", "sum")
        )
        log.info(
            "the sum took %.1f ms per step, and the wait for the other trainers %.1f ms",
            total,
            meet,
        )

    def agree(self, step: int) -> None:
        """Raise RanksDiffer if the trainers' weights after `step` differ."""
        self._leader.agree(step, self._stage.step.digests())

    def end(self, why: str, error: BaseException | None = None) -> None:
        """Tell the others to leave; this object is of no more use."""
        if self._steps:
            self._tell_time()
        self._leader.end(why, OK if error is None else code_of(error))
        self._leader.close()


def code_of(error: BaseException) -> int:
    """The exit code with which an error ends this process."""
    return getattr(error, "exit_code", FAILED)
