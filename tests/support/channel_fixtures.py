"""Fixtures of the channel's tests:

`channel` over real sockets and in one process, `ipc` over real sockets alone.

Apart from `channels`, which also runs as a process that needs no pytest. A test file takes them by
name:
    channel, ipc = channel_fixtures.channel, channel_fixtures.ipc
"""

from __future__ import annotations

import pytest

from tests.support import channels as cb


@pytest.fixture(params=["ipc", "local"])
def channel(request, tmp_path):
    c = cb.Channel(request.param, tmp_path)
    yield c
    c.close()


@pytest.fixture
def ipc(tmp_path):
    c = cb.Channel("ipc", tmp_path)
    yield c
    c.close()
