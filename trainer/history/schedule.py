"""The order in which the trainer consumes batches: training batches with evaluations between them,
as one sequence.

The channel leases along this sequence, so evaluation needs no window, no credit and no order of its
own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from common.data.plan import Plan, PlannedStep
from common.run.folder import RunFolder
from common.run.sections import Train


@dataclass
class Position:
    """Where a stage stands, between two steps; saved inside each checkpoint."""

    step: int = 0  # steps done
    next_g: int = 0  # the first batch that has not been trained
    evaluated: int = 0  # the last step after which an evaluation was finished
    best_step: int | None = None  # the checkpoint with the lowest evaluation score
    best_score: float | None = None
    since_best: int = 0  # evaluations after the best one
    quarantine: list[dict] = field(
        default_factory=list
    )  # {"id", "plan", "g", "reason"}: rows of weight 0 from batch g on

    def stands_as(self, other: Position | None) -> bool:
        """Whether a checkpoint at `other` would hold all that one at this position holds."""
        facts = ("step", "evaluated", "best_step", "best_score")
        return other is not None and all(getattr(self, f) == getattr(other, f) for f in facts)


@dataclass(frozen=True)
class Schedule:
    """The run's length and its pauses, in steps.

    Args:
        total_steps: the last step.
        eval_every: an evaluation after each multiple; 0: none by steps.
        eval_at_epoch_end: an evaluation after each epoch's last step. The last step of all always
            has one.
        save_every: a checkpoint after each multiple.
    """

    train: Plan
    eval: Plan
    accumulate: int
    total_steps: int
    eval_every: int
    save_every: int
    eval_at_epoch_end: bool = True
    eval_batches: int | None = None
    mean_of_means: bool = False  # see `scales`
    patience: int | None = None  # ends after so many evaluations without a better one
    judged: bool = False  # not by the held-out loss, but by judgements of the samples

    def since_best(self, at: Position, judged: int | None) -> int:
        """Evaluations in a row, or judgements of samples, without a better one. Where nothing was
        judged by what decides (None), the held-out loss does.
        """
        return at.since_best if judged is None or not self.judged else judged

    def worn_out(self, at: Position, judged: int | None) -> bool:
        """Whether they are as many as `patience` allows."""
        return self.patience is not None and self.since_best(at, judged) >= self.patience

    @property
    def num_eval_batches(self) -> int:
        """Batches of one evaluation; 0 if there is no evaluation set."""
        n = self.eval.batches_per_epoch if self.eval.num_utterances else 0
        return n if self.eval_batches is None else min(n, self.eval_batches)

    def scales(self, planned: PlannedStep) -> list[float]:
        """The weight of each batch's gradient in a step.

        Every utterance of the step counts alike: a short batch weighs as much as it has rows. With
        `mean_of_means`, as in Coqui's trainer, a batch counts 1 / accumulate, in an epoch's short
        last step too.
        """
        if self.mean_of_means:
            return [1 / self.accumulate] * planned.count
        rows = [
            self.train.num_rows(g) for g in range(planned.first_g, planned.first_g + planned.count)
        ]
        return [n / sum(rows) for n in rows]

    def step(self, s: int) -> PlannedStep:
        """The batches of step s."""
        return self.train.step(s, self.accumulate)

    def ends_epoch(self, s: int) -> bool:
        """True if step s is the last of an epoch."""
        return s % self.train.steps_per_epoch(self.accumulate) == 0

    def eval_due(self, s: int) -> bool:
        """True if an evaluation follows step s."""
        if not self.num_eval_batches or s == 0:
            return False
        if s == self.total_steps or (self.eval_at_epoch_end and self.ends_epoch(s)):
            return True
        return self.eval_every > 0 and s % self.eval_every == 0

    def save_due(self, s: int) -> bool:
        """True if a checkpoint follows step s, whatever the evaluation said."""
        return s % self.save_every == 0 or s == self.total_steps

    def batches(self, at: Position) -> Iterator[tuple[str, int]]:
        """(plan, g) in the order of consumption, from a position to the end of the run."""
        evaluation = [("eval", g) for g in range(self.num_eval_batches)]
        if self.eval_due(at.step) and at.evaluated != at.step:
            yield from evaluation
        for s in range(at.step + 1, self.total_steps + 1):
            planned = self.step(s)
            yield from (
                ("train", g) for g in range(planned.first_g, planned.first_g + planned.count)
            )
            if self.eval_due(s):
                yield from evaluation


def schedule_of(run: RunFolder, stage: str) -> Schedule:
    """A stage's schedule from the run's settings."""
    c, train, evaluation = run.config, run.plan(stage, "train"), run.plan(stage, "eval")
    part = getattr(c, run.spec(stage).section)
    pauses = {
        "eval_every": part.eval_every,
        "save_every": part.save_every,
        "eval_at_epoch_end": part.eval_at_epoch_end,
    }
    if not isinstance(part, Train):
        return Schedule(train, evaluation, 1, part.max_steps, **pauses)
    total = c.train.epochs * train.steps_per_epoch(c.train.accumulate)
    if c.train.max_steps is not None:
        total = min(total, c.train.max_steps)
    return Schedule(
        train,
        evaluation,
        c.train.accumulate,
        total,
        **pauses,
        eval_batches=c.train.eval_batches,
        mean_of_means=c.train.mean_of_means,
        patience=c.train.patience,
        judged=c.train.best_by != "audio_ce",
    )
