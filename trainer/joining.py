"""Where a run's trainers meet, and how one of another host finds the first."""

from __future__ import annotations

import logging
import socket
import time
from dataclasses import replace
from pathlib import Path

from common.run.folder import RunFolder
from common.system import status
from common.system.errors import BadInput, Hopeless, Stopped
from common.system.lifecycle import Stop
from common.system.status import StatusFile
from common.transport.address import (
    ChannelError,
    Endpoint,
    ipc_address,
    number_of,
    number_towards,
    numeric,
)
from common.transport.keys import KeyFileError, KeyPair, ServerKeys, run_keys
from trainer.ranks.follower import Far, Follower
from trainer.ranks.ports import Port

log = logging.getLogger(__name__)

WAITING = "waiting for the first trainer"
_POLL_S = 0.5


def meeting_place(run: RunFolder) -> tuple[str, ServerKeys | None]:
    """Where the first trainer binds, and with which keys (None: only this host gets there).

    BadInput: it cannot be there.
    """
    try:
        bind = run.config.trainers.bind
        if bind is None:
            return ipc_address(run.path.resolve() / "trainers"), None
        return numeric(bind), run_keys(run.path)[0]
    except ChannelError as e:
        raise BadInput(f"trainers.bind: {e}" if bind else str(e)) from e


def host_of(address: str) -> str:
    """The number of the host at which the trainers' collective servers are found."""
    return number_of(address) if address.startswith("tcp://") else "127.0.0.1"


class Joining:
    """A follower on its way to the first trainer."""

    def __init__(self, folder: Path, rank: int, status_file: StatusFile, stop: Stop):
        self._folder, self._rank, self._status, self._stop = folder, rank, status_file, stop
        self._port: Port | None = None
        self._seen: object = None
        self._seen_at = time.monotonic()

    def join(self) -> Follower:
        """A follower: on the first trainer's host at once, elsewhere once all have come.

        Raises:
            Hopeless: the first trainer has shown no sign for `trainers.join_s`.
            BadInput: the run's keys are others there.
            RankLost, Ended, Stopped: as of `Follower.wait`.
        """
        run = RunFolder(self._folder)
        t = run.config.trainers
        if t.bind is None:
            return Follower(meeting_place(run)[0], self._rank, t.count, t.timeout_s)
        self._status.update(phase=WAITING)
        while True:
            endpoint, trouble = self._endpoint(run), "it has not said yet where it listens"
            if endpoint is not None:
                try:
                    follower = self._follower(run, endpoint, number_towards(endpoint.address))
                    if self._has_come(run, follower, endpoint):
                        self._port.give_up()
                        return follower
                    follower.close()
                except ChannelError as e:  # the network between the hosts may come back
                    trouble = str(e)
            self._go_on(run, trouble)
            time.sleep(_POLL_S)

    def _has_come(self, run: RunFolder, follower: Follower, endpoint: Endpoint) -> bool:
        """Wait until all trainers have come. False: the first one listens elsewhere by now."""
        looked_at, moved = time.monotonic(), False

        def stopping() -> bool:
            nonlocal looked_at, moved
            if time.monotonic() - looked_at > _POLL_S:
                looked_at = time.monotonic()
                self._go_on(run, follower.trouble or f"at {endpoint.address}")
                moved = self._endpoint(run) not in (None, endpoint)
            return moved

        try:
            follower.await_word("set_up", stopping)
        except BaseException as e:
            if moved and isinstance(e, Stopped):
                return False
            follower.close()
            raise
        return True

    def _follower(self, run: RunFolder, endpoint: Endpoint, number: str) -> Follower:
        t = run.config.trainers
        try:
            keys = KeyPair.load(run.path / "keys" / "client.json")
        except KeyFileError as e:
            raise BadInput(str(e)) from e
        if self._port is not None:
            self._port.give_up()
        self._port = Port(number)
        log.info("the first trainer is at %s; looking for it", endpoint.address)
        far = Far(endpoint.public_key, keys, socket.gethostname(), self._port.address)
        return Follower(endpoint.address, self._rank, t.count, t.timeout_s, far)

    def _endpoint(self, run: RunFolder) -> Endpoint | None:
        try:
            found = Endpoint.read(run.trainers_file)
        except ChannelError as e:
            raise BadInput(str(e)) from e
        if found is None or found.public_key is None:
            return None
        return replace(found, pid=None)  # one that is started again has moved nowhere

    def _go_on(self, run: RunFolder, where: str) -> None:
        """Raises Stopped, and Hopeless once the first trainer has shown no sign for too long: its
        status changes while it waits, and while it trains stage 1 alone.
        """
        self._stop.check()
        self._status.update(phase=WAITING, message=where)
        first, now = status.read(run.path, "trainer"), time.monotonic()
        if first != self._seen:
            self._seen, self._seen_at = first, now
        limit_s = run.config.trainers.join_s
        if now - self._seen_at > limit_s:
            raise Hopeless(
                f"the first trainer (rank 0) has shown no sign for {limit_s:.0f} s ({where}): is it"
                " running, and does a firewall let this host through? trainers.join_s allows more"
            )
