"""Bugs planted into the product, to show that the chaos tests catch them.

CHAOS_PLANT=NAME plants one in every process that a test starts (`interpreter/sitecustomize.py`);
`plant` does so in this one.

    arrival      batches are delivered as they arrive
    fetched      a checkpoint holds the position of what was fetched, not of what was trained
    no-strikes   a lease that expires costs its producer nothing
    anyone       a batch is taken from anyone, whatever lease it names
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

PLANT = "CHAOS_PLANT"
Patch = tuple[Any, str, Callable]


def _arrival() -> list[Patch]:
    from common.transport.lease_records import READY
    from common.transport.leases import LeaseBook

    take = LeaseBook.take

    def first_come(self):
        head, at = self.head(), self._items
        if head is not None and head.state != READY:
            for other in list(at.values()):
                if other.state == READY and other.position > head.position:
                    at[head.position], at[other.position] = other, head
                    head.position, other.position = other.position, head.position
                    break
        return take(self)

    return [(LeaseBook, "take", first_come)]


def _fetched() -> list[Patch]:
    from trainer.saves import Saves

    begin = Saves.begin

    def ahead(self, position):
        per_step = max(1, position.next_g // max(1, position.step))
        begin(self, replace(position, step=position.step + 1, next_g=position.next_g + per_step))

    return [(Saves, "begin", ahead)]


def _no_strikes() -> list[Patch]:
    from common.transport.leases import LeaseBook

    def fail(self, record, outcome, why):
        self._close(record, outcome, why)

    return [(LeaseBook, "_strike", lambda self, peer, why: None), (LeaseBook, "_fail", fail)]


def _anyone() -> list[Patch]:
    from common.transport.leases import LeaseBook

    def answered(self, peer, answer):
        named = self._records.get(answer.lease)
        return named or next(
            (
                r
                for r in reversed(self._records.values())
                if (r.item.plan, r.item.g) == (answer.plan, answer.g)
            ),
            None,
        )

    return [(LeaseBook, "_answered", answered)]


PLANTS = {
    "arrival": _arrival,
    "fetched": _fetched,
    "no-strikes": _no_strikes,
    "anyone": _anyone,
}


def patches(name: str) -> list[Patch]:
    """(class, attribute, what takes its place) of a planted bug."""
    return PLANTS[name]()


def plant_from_environment() -> None:
    """Plant what CHAOS_PLANT names, if it is set."""
    name = os.environ.get(PLANT)
    for owner, attribute, other in patches(name) if name else []:
        setattr(owner, attribute, other)
