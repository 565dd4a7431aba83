"""`python -m trainer.loggers --run RUN --to wandb`: sends a run's figures to a service while it
trains.

Each service has a process of its own: whatever happens to it, training neither waits nor ends. A
failing service is reported once and tried again; what it missed is sent when it answers, at the
latest in a later start of the run.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable
from pathlib import Path

from common.run.folder import RunFolder
from common.system import lock, logs, status
from common.system.errors import OK
from common.system.lifecycle import Stop, run_main
from common.system.status import StatusFile
from trainer.loggers.follow import Follower
from trainer.loggers.services import SERVICES, Service
from trainer.previews.sampler import NICE, pause, take_place

log = logging.getLogger(__name__)

POLL_S = 2.0
AGAIN_S = 30.0  # after a failure


class Sender:
    """Moves records from the files to a service that may fail at any time.

    Args:
        connect: makes the service; raises what its package raises.
    """

    def __init__(self, follower: Follower, connect: Callable[[dict], Service]):
        self._follower, self._connect = follower, connect
        self._service: Service | None = None
        self._said = False

    def round(self) -> bool:
        """Send what is there; return whether the service took it."""
        try:
            if self._service is None:
                self._service = self._connect(self._follower.known)
                self._follower.keep()
            while records := self._follower.read():
                self._service.send(records)
                self._follower.sent()
        except Exception as e:  # noqa: BLE001 - the edge of somebody else's package
            self._fails(e)
            return False
        return True

    def close(self) -> None:
        """Send the last records and end."""
        if self.round():
            try:
                self._service.close()
            except Exception as e:  # noqa: BLE001 - the edge, as above
                self._fails(e)

    def _fails(self, error: Exception) -> None:
        level = logging.INFO if self._said else logging.WARNING
        log.log(level, "%s: %s; trying again", type(error).__name__, error)
        self._said = True


def main(stop: Stop) -> int:
    """Take the place, send, leave with the trainer."""
    p = argparse.ArgumentParser(prog="python -m trainer.loggers", description=__doc__)
    p.add_argument("--run", required=True, type=Path)
    p.add_argument("--to", required=True, choices=SERVICES)
    args = p.parse_args()
    logs.setup(args.to)
    os.nice(NICE)
    began = lock.program_began()

    def done() -> bool:
        return status.trainer_is_done(args.run, began)

    held = take_place(args.run, stop, done, args.to)
    if held is None:
        return OK
    report = StatusFile(args.run, args.to, "logger")
    stop.at_exit(report.finish)
    run = RunFolder(args.run)
    files = {s: run.stage_folder(s) / "metrics.jsonl" for s in run.stages}
    follower = Follower(files, args.run / "loggers" / f"{args.to}.json")
    (args.run / "loggers").mkdir(exist_ok=True)
    sender = Sender(follower, lambda known: SERVICES[args.to](run, known))
    try:
        while not done():
            took = sender.round()
            report.update(phase="sending" if took else "waiting for the service")
            pause(stop, POLL_S if took else AGAIN_S)
    finally:  # also after a stop: a service may keep its data in a process of its own
        sender.close()
    held.release()
    return OK


if __name__ == "__main__":
    run_main(main)
