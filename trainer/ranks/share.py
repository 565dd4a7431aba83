"""Which batch of a step is whose."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.history.schedule import Schedule


@dataclass(frozen=True)
class Share:
    """Batch i of a step, counted from 0, belongs to rank i mod count."""

    schedule: Schedule
    count: int

    def rank_of(self, g: int) -> int:
        """Who computes training batch `g`."""
        per_epoch, group = self.schedule.train.batches_per_epoch, self.schedule.accumulate
        return g % per_epoch % group % self.count
