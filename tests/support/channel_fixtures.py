"""Fixtures of the channel's tests:

`channel` over real sockets and in one process, `ipc` over real sockets alone; `short_folder` for
sockets of a test's own: the path of one ends at 107 bytes, and pytest's folders can be longer.

Apart from `channels`, which also runs as a process that needs no pytest. A test file takes them by
name:
    channel, ipc = channel_fixtures.channel, channel_fixtures.ipc
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import channels as cb


@contextmanager
def _channel(kind: str) -> Iterator[cb.Channel]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        c = cb.Channel(kind, Path(folder))
        yield c
        c.close()


@pytest.fixture(params=["ipc", "local"])
def channel(request):
    with _channel(request.param) as c:
        yield c


@pytest.fixture
def ipc():
    with _channel("ipc") as c:
        yield c


@pytest.fixture
def short_folder():
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)
