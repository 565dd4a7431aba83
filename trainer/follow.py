"""The second of several trainers, and the third and so on: takes its part of each step's batches
from the first, and makes every update that the first makes.

It writes only its log and its status. If it or the first trainer is lost, all start again from the
newest checkpoint.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from common.run.folder import RunFolder
from common.system import logs
from common.system.errors import FAILED, OK, REPLACED, Stopped
from common.system.lifecycle import Stop
from common.system.status import StatusFile
from trainer import ahead, stages
from trainer.feed import FedBatch, Feed, Quarantine
from trainer.history.checkpoint import load_folder, name_of
from trainer.history.schedule import Position
from trainer.joining import WAITING, Joining
from trainer.opening import Check, Connected, device_in_words, set_up_device
from trainer.ranks.follower import Ended, Follower
from trainer.ranks.leader import COMPILING
from trainer.ranks.share import Share
from trainer.ranks.words import RankLost
from trainer.stages import Stage

log = logging.getLogger(__name__)

# At a stop the first trainer may ask for the weights' digests before it tells all to leave.
_LEAVES_S = 2.0
_DIGESTS_S = 60.0
_POLL_S = 0.02


def main(folder: Path, rank: int, stop: Stop) -> int | None:
    """Every step of a follower's life."""
    name = f"trainer-{rank}"
    logs.setup(name)
    status = StatusFile(folder, name, "follower")
    stop.at_exit(status.finish)
    follower = None
    try:
        follower = Joining(folder, rank, status, stop).join()
        Following(folder, follower, status, stop).run()
    except Ended as e:
        log.info("the first trainer ends: %s", e)
        if RunFolder(folder).config.trainers.bind is None:
            return OK  # the launcher of both knows how the first one ended
        return FAILED if e.code == REPLACED else e.code  # FAILED: to be started again
    finally:
        if follower is not None:
            follower.close()
    return None


class Following:
    """A follower at work. Serves as a step's `Ranks`, and as `trainer.ahead`'s observer."""

    def __init__(self, folder: Path, follower: Follower, status: StatusFile, stop: Stop):
        self.rank, self.count = follower.rank, follower.count
        self._folder, self._follower, self._status, self._stop = folder, follower, status, stop
        self._connected: Connected | None = None
        self._trained = self._batches = 0

    def run(self) -> None:
        """Work until the first trainer ends it. Raises Ended, RankLost, Stopped."""
        self._status.update(phase=WAITING, message="")
        word = self._follower.wait("set_up", self._leaving)
        run = RunFolder(self._folder)  # the first trainer may have mended it
        self._connected = Connected(run, self.rank, word["addresses"])
        self._follower.on_lost = self._connected.abort
        self._doing("opening its device")
        set_up_device(run, self._status, lambda: self._connected.connect(self._check, self._stop))
        checkpoints = stages.files_of(run, word["stage"]).checkpoints
        with device_in_words(self._status, checkpoints):
            self._run_stage(run, word["stage"])

    def _run_stage(self, run: RunFolder, name: str) -> None:
        stage = stages.build(run, name)
        position = self._load(run, stage, self._follower.wait("begin", self._leaving)["step"])
        stage.step.share(self)
        share, check = Share(stage.schedule, self.count), Check(self._check, self._stop)

        def own(plan: str, g: int) -> bool:
            return share.rank_of(plan, g) == self.rank

        compiled = ahead.prepare(stage, position, self, check, own=own)
        self._follower.digests = lambda step: self._digests(stage, step)
        self._doing("ready")
        self.meet()
        if run.trains_networks:
            stage.step.time_sum()
        feed = self._feed(run, stage)
        try:
            self._train(stage, share, compiled, position, feed)
        finally:
            feed.close()
        self._follower.wait("end", self._leaving)

    # -- as `Ranks` --------------------------------------------------------------------------------

    def meet(self, payload: bytes = b"") -> list[bytes]:
        """See `Ranks.meet`."""
        return self._follower.meet(payload, self._leaving)

    def add_up(self, gradients, losses) -> None:
        """See `Ranks.add_up`."""
        self._connected.add_up(gradients, losses)

    # -- as an observer of what is compiled --------------------------------------------------------

    def compiling_programs(self, number: int, total: int, left_s: float | None) -> None:
        """See `trainer.report.observe.Observer`."""
        del left_s
        self._doing(f"{COMPILING} program {number} of {total}")

    def trying(self, what: str) -> None:
        """See `trainer.report.observe.Observer`."""
        self._doing(what)

    # ----------------------------------------------------------------------------------------------

    def _train(
        self,
        stage: Stage,
        share: Share,
        compiled: ahead.Compiled,
        position: Position,
        feed: Feed,
    ) -> None:
        step = compiled.watch(stage.step)
        self._trained = position.step
        for number in range(position.step + 1, stage.schedule.total_steps + 1):
            planned = stage.schedule.step(number)
            numbers = range(planned.first_g, planned.first_g + planned.count)
            for g, scale in zip(numbers, stage.schedule.scales(planned), strict=True):
                if share.rank_of("train", g) == self.rank:
                    fed = self._next(feed, g)
                    bucket = fed.planned.bucket
                    if compiled.is_coming("training", bucket):
                        self._doing(f"{COMPILING} bucket {bucket + 1}")
                    step.micro(bucket, fed.arrays, fed.planned.seed, scale)
                    feed.release()
                    self._batches += 1
            self._doing("training")
            step.apply()
            self._trained = number
            self._status.update(
                phase="training",
                stage=stage.number,
                stage_name=stage.name,
                step=number,
                batches=self._batches,
            )

    def _next(self, feed: Feed, g: int) -> FedBatch:
        """The next of our batches. RankLost: another batch arrived."""
        try:
            fed, _ = feed.next()
        except Stopped:
            self._check()
            raise
        if fed.planned.plan != "train" or fed.planned.g != g:
            raise RankLost(
                f"the first trainer gave {fed.planned.plan} batch {fed.planned.g} where train batch"
                f" {g} was due"
            )
        return fed

    def _feed(self, run: RunFolder, stage: Stage) -> Feed:
        return Feed(
            self._follower,
            planned=stages.planned_batches(run, stage),
            upload=stage.upload,
            quarantine=Quarantine([]),
            data_timeout_s=run.config.transport.data_timeout_s,
            should_stop=lambda: self._leaving() or self._follower.ended,
        )

    def _load(self, run: RunFolder, stage: Stage, step: int) -> Position:
        if step == 0:
            stages.first_weights(run, stage)
            return Position()
        try:
            found = load_folder(stage.files.checkpoints / name_of(step), step)
        except ValueError as e:
            raise RankLost(
                f"checkpoint {step}, which the first trainer has loaded, cannot be read: {e}"
            ) from e
        stage.step.load_state_dict(found.tensors)
        return Position(**found.state["position"])

    def _digests(self, stage: Stage, step: int) -> dict[str, str]:
        deadline = time.monotonic() + _DIGESTS_S
        while self._trained < step:  # its update may still be running
            if time.monotonic() > deadline:
                raise RankLost(f"step {step} was not made here; the newest is {self._trained}")
            time.sleep(_POLL_S)
        if self._trained != step:
            raise RankLost(f"step {self._trained} was made here, and not by the first trainer")
        return stage.step.digests()

    def _doing(self, what: str) -> None:
        self._follower.doing = what
        self._status.update(phase="compiling" if what.startswith(COMPILING) else what)

    def _leaving(self) -> bool:
        """Whether to leave without being told: the first trainer gets a stop too."""
        left_s = self._stop.remaining_s()
        return self._stop.orphaned or (left_s is not None and left_s < _LEAVES_S)

    def _check(self) -> None:
        self._follower.check()
        if self._leaving():
            raise self._stop.error()
