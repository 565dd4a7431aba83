"""Decide who may stay connected to a tcp socket: strangers stay few and brief, and block no
producer.

libzmq takes every connection and lets it send one frame, up to the largest that the socket allows,
before it has proved a key. So unproven connections are bounded in number, and thus in memory.
When one too many arrives, the oldest goes, not the newest: a producer proves its key within
milliseconds, a stranger never does. ZeroMQ's own deadline for the handshake ends the rest.

A connection is known by its descriptor: the socket's monitor reports it when one is accepted or
closed, and each received message carries its sender's.
"""

from __future__ import annotations

import logging
import resource
import socket
import time

HANDSHAKE_S = 10.0  # a trainer that compiles may take seconds to look at a key
MAX_UNPROVED = 64
UNPROVED_BYTES = 256 << 20  # that these may hold together if frames are large
FEWEST_UNPROVED = 4
MAX_CONNECTIONS = 512
WANTED_FILES = 16384
SAY_S = 60.0

log = logging.getLogger(__name__)


def raise_file_limit(wanted: int = WANTED_FILES) -> int:
    """Raise this process's soft limit of open files as far as the hard one allows; returns it.

    The usual soft limit of 1 024 is for programs that use select(); a connection takes a file.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return soft


class Doorkeeper:
    """Follows the connections of one listening port and closes surplus ones.

    Not thread-safe: it belongs to the thread that reads the socket's monitor.
    """

    def __init__(self, port: int, max_frame_bytes: int):
        self.port = port
        fit = UNPROVED_BYTES // max(1, max_frame_bytes)
        self.max_unproved = max(FEWEST_UNPROVED, min(MAX_UNPROVED, fit))
        self.turned_away = 0
        self._open: dict[int, bool] = {}  # descriptor → has proved its key; the oldest first
        self._said = -SAY_S

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._open)

    @property
    def unproved(self) -> int:
        """How many of them have not said anything that the run's key vouches for."""
        return list(self._open.values()).count(False)

    def accepted(self, descriptor: int) -> None:
        """A connection was made."""
        self._open.pop(descriptor, None)
        self._open[descriptor] = False

    def closed(self, descriptor: int) -> None:
        """It has ended."""
        self._open.pop(descriptor, None)

    def heard(self, descriptor: int) -> None:
        """Note a message from it, which it could not send without the key."""
        if descriptor in self._open:
            self._open[descriptor] = True

    def keep_order(self) -> None:
        """Close surplus connections. Call it after reporting everything known about connections."""
        unproved = [d for d, proved in self._open.items() if not proved]
        for descriptor in unproved[: max(0, len(unproved) - self.max_unproved)]:
            self._turn_away(descriptor)
        for descriptor in list(self._open)[MAX_CONNECTIONS:]:  # the run's own key, then: the newest
            self._turn_away(descriptor)

    def _turn_away(self, descriptor: int) -> None:
        """Shut it down; libzmq sees the end and closes it. Another port's socket is left alone."""
        del self._open[descriptor]
        self.turned_away += 1
        now = time.monotonic()
        if now >= self._said + SAY_S:
            self._said = now
            log.warning(
                "port %d: connections that prove no key are turned away, %d so far: "
                "something other than this run's producers connects to it; see `ss -tn`",
                self.port,
                self.turned_away,
            )
        try:
            end = socket.socket(fileno=descriptor)
        except OSError:  # it has ended meanwhile
            return
        try:
            if end.getsockname()[1] == self.port:
                end.shutdown(socket.SHUT_RDWR)
        except (OSError, IndexError, TypeError):
            pass
        finally:
            end.detach()
