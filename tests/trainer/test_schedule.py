import itertools

import pytest

from tests.support.plans import small_plan
from trainer.history.schedule import Position, Schedule


def make(tmp_path, total=20, accumulate=3, eval_every=7, save_every=5, n=50, num_eval=9):
    train, evaluation = (
        small_plan(tmp_path / "t", n, batch_size=4),
        small_plan(tmp_path / "e", num_eval, batch_size=4, name="eval"),
    )
    return Schedule(train, evaluation, accumulate, total, eval_every, save_every)


def test_training_batches_are_consecutive_and_evaluations_stand_where_they_are_due(tmp_path):
    s = make(tmp_path)
    items = list(s.batches(Position()))
    train = [g for plan, g in items if plan == "train"]
    last = s.step(20)
    assert train == list(range(last.first_g + last.count))
    m, per_epoch = s.train.batches_per_epoch, s.train.steps_per_epoch(3)
    done, due = 0, []
    for plan, group in itertools.groupby(items, key=lambda i: i[0]):
        group = list(group)
        if plan == "eval":
            assert [g for _, g in group] == list(range(s.num_eval_batches))
            due.append(done)
        else:
            done += len(group)
    steps = [x for x in range(1, 21) if x % 7 == 0 or x % per_epoch == 0 or x == 20]
    assert due == [s.step(x).first_g + s.step(x).count for x in steps]
    assert m % 3, "the epoch's last group must be short for the test to mean anything"


@pytest.mark.parametrize("at", range(21))
def test_from_any_position_the_rest_is_the_same(tmp_path, at):
    s = make(tmp_path)
    everything = list(s.batches(Position()))
    next_g = s.step(at + 1).first_g
    rest = list(s.batches(Position(step=at, next_g=next_g, evaluated=at)))
    assert rest == everything[len(everything) - len(rest) :]
    if s.eval_due(at):
        again = list(s.batches(Position(step=at, next_g=next_g, evaluated=0)))
        assert again == [("eval", g) for g in range(s.num_eval_batches)] + rest
    assert [i for i in rest if i[0] == "train"][:1] == ([("train", next_g)] if at < 20 else [])


def test_no_evaluation_set_means_no_evaluation(tmp_path):
    s = make(tmp_path, num_eval=0)
    assert not any(s.eval_due(x) for x in range(30))
    assert {plan for plan, _ in s.batches(Position())} == {"train"}
