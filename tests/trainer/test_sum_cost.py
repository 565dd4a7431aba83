"""What a sum of gradients costs: shares by hand, and a file that may be damaged."""

from __future__ import annotations

import dataclasses

import pytest

from common.system.errors import BadInput
from trainer.commands.profile import sum_in_words
from trainer.sum_cost import FILE, SumCost

COST = SumCost(trainers=2, dtype="float32", num_bytes=1_000_000_000, seconds=0.01)


@pytest.mark.parametrize(
    ("accumulate", "batch_s", "update_s", "share", "enough"),
    [
        (2, 0.09, 0.0, 0.1, 6),  # 10 of 100 ms; of 190 and 280 with 4 and 6
        (8, 0.09, 0.0, 10 / 370, 6),
        (2, 0.09, 0.09, 10 / 190, 4),  # 10 of 280 ms with 4
        (2, 1.0, 0.0, 10 / 1010, 2),
    ],
)
def test_shares_of_a_step(accumulate, batch_s, update_s, share, enough):
    assert COST.share(accumulate, batch_s, update_s) == pytest.approx(share)
    assert COST.enough(batch_s, update_s) == enough


def test_what_is_written_is_read(tmp_path):
    assert SumCost.read(tmp_path) is None
    COST.write(tmp_path)
    assert SumCost.read(tmp_path) == COST
    assert str(COST) == "2 trainers add up 1.00 GB of gradients (float32) in 10.0 ms: 100.0 GB/s"
    assert "add up 4.4 MB of gradients" in str(dataclasses.replace(COST, num_bytes=4_360_000))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"trainers": 2}',
        '{"trainers": 2, "dtype": "float32", "num_bytes": 4, "seconds": 0}',
        '{"trainers": "two", "dtype": "float32", "num_bytes": 4, "seconds": 1}',
        '{"trainers": 2, "dtype": "float32", "num_bytes": 4, "seconds": 1, "more": 1}',
    ],
)
def test_a_damaged_file_is_named(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(BadInput, match=f"{FILE}.*delete it"):
        SumCost.read(tmp_path)


def test_a_profile_tells_what_several_trainers_pay():
    """Eight batches a step, 90 ms each in the profile's one trainer; 20 ms for the update."""
    document = {
        "steps": {"compute": {"mean": 0.72}, "optimizer": {"mean": 0.02}},
        "batches_per_step": 8,
    }
    said = sum_in_words(document, COST, 8)
    assert "2.6 % of a step of train.accumulate=8" in said  # 10 of 390 ms
    assert "less than 5 % from train.accumulate=4 on" in said  # 10 of 210; 10 of 120 with 2
    assert "start the run with them once" in sum_in_words(document, None, 8)
