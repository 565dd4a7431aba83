"""Runs whose steps several trainers make, in real processes on arithmetic."""

from __future__ import annotations

import signal
from pathlib import Path

from common.run.folder import RunFolder
from tests.support.arithmetic_runs import settings
from tests.support.chaos import EVENTS, Driver, hurt

STEPS = 60
RANK_EVENTS = ("trainer-1", "trainer-2", "trainers", *EVENTS)


def tree(folder: Path, corpus: Path, trainers: int, producers: int = 1, **more) -> dict:
    """Settings: 60 steps of 6 batches, the last of an epoch shorter."""
    given = {
        "trainers__count": trainers,
        "producers__count": producers,
        "producers__lease_ttl_s": 8.0,
        "train__accumulate": 6,
        "train__max_steps": STEPS,
        **more,
    }
    return settings(folder / "run", corpus, **given)


def trained(folder: Path, corpus: Path, trainers: int, producers: int = 1, **more) -> RunFolder:
    """A run, undisturbed, to its end."""
    driver = Driver.create(folder, tree(folder, corpus, trainers, producers, **more), 0, 0)
    try:
        driver.launch()
        driver.finish()
    finally:
        driver.kill_everything()
    return RunFolder(driver.run)


def hurt_ranks(driver: Driver, event: str) -> None:
    """One of RANK_EVENTS."""
    if event == "trainers":
        for name in ("trainer", "trainer-1", "trainer-2"):
            driver.signal(name, signal.SIGKILL)
    elif event.startswith("trainer-"):
        driver.signal(event, signal.SIGKILL)
    else:
        hurt(driver, event)
