"""What the trainer's end of the channel hands over, and the reasons why it cannot."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from common.transport.messages import Notes


class NoData(RuntimeError):
    """No batch within the deadline; the message names the cause.

    `connected`: how many producers there are.
    """

    def __init__(self, why: str, connected: int):
        super().__init__(why)
        self.connected = connected


class StopAsked(RuntimeError):
    """should_stop() said so while waiting."""


class BatchFailed(RuntimeError):
    """Every producer says that it cannot make this batch."""

    def __init__(self, plan: str, g: int, why: str):
        super().__init__(f"batch {plan} {g} cannot be made: {why}")
        self.plan, self.g, self.why = plan, g, why


@dataclass(frozen=True)
class Delivery:
    """A batch. arrays: read-only, views of the received frames (drop them to free the memory).

    notes: what the producer says of it; set_aside: the clips that it was to be made without;
    wait_s: how long next() waited.
    """

    plan: str
    g: int
    arrays: dict[str, np.ndarray] = field(repr=False)
    notes: Notes
    set_aside: tuple[int, ...]
    producer: str
    digest: str
    wait_s: float
    position: int


@dataclass(frozen=True)
class Difference:
    """One batch that was made twice, with different bytes. makers, digests: of the first copy and
    of the other one.
    """

    plan: str
    g: int
    makers: tuple[str, str]
    digests: tuple[str, str]
