"""How long a stop waits for a save, and what the supervisor hears about it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from common.system import lifecycle, status
from common.system.lifecycle import SAVE_S, Stop
from common.system.status import StatusFile
from trainer.patience import Patience


@pytest.mark.parametrize(
    ("most_s", "took", "waits_s"),
    [
        (600.0, [], 600.0),  # nothing is known of the first save
        (600.0, [0.5], SAVE_S),
        (600.0, [28.0, 5.0], 84.0),  # the longest counts
        (600.0, [400.0], 600.0),
        (20.0, [28.0], 20.0),  # a cluster that kills after 20 s
    ],
)
def test_s7_the_time_that_saves_took_decides_within_the_setting(tmp_path, most_s, took, waits_s):
    stop = Stop(saves=True)
    patience = Patience(stop, StatusFile(tmp_path, "trainer", "trainer"), most_s)
    for seconds in took:
        patience.took(seconds)
    assert stop.save_s == waits_s
    told = status.read(tmp_path, "trainer").save_grace_s
    assert waits_s < told < waits_s + 1, "the supervisor waits a little longer"


@pytest.mark.parametrize(
    ("took_s", "in_flight_s", "another"),
    [(28.0, 28.0, True), (28.0, 60.0, False), (5.0, 20.0, True)],
)
def test_s7_another_save_is_begun_where_it_can_end(
    tmp_path, monkeypatch, took_s, in_flight_s, another
):
    now = [1000.0]
    monkeypatch.setattr(lifecycle, "time", SimpleNamespace(monotonic=lambda: now[0]))
    stop = Stop(saves=True)
    patience = Patience(stop, StatusFile(tmp_path, "trainer", "trainer"), 600.0)
    patience.took(took_s)
    assert patience.left_for_another
    stop.request("stop", "SIGTERM", 143)
    with patience.saving():
        now[0] += in_flight_s
        assert patience.left_for_another == another
