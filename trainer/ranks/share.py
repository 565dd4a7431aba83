"""Which batch of a step is whose."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.history.schedule import Schedule


def every(plan: str, g: int) -> bool:
    """Whether a trainer that is alone computes a batch: yes."""
    return True


@dataclass(frozen=True)
class Share:
    """Batch i of a step, counted from 0, belongs to rank i mod count; evaluations to rank 0."""

    schedule: Schedule
    count: int

    def rank_of(self, plan: str, g: int) -> int:
        """Who computes a batch."""
        if plan != "train":
            return 0
        per_epoch, group = self.schedule.train.batches_per_epoch, self.schedule.accumulate
        return g % per_epoch % group % self.count
