"""Steps that several trainers make: whatever their number, the ledger is the plan and the weights
those of one trainer.
"""

from __future__ import annotations

import pytest

from tests.support import together
from tests.support.arithmetic_runs import assert_exact
from tests.support.corpora import make_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(
        tmp_path_factory.mktemp("together") / "corpus", 41, seconds=lambda i: 0.6 + 0.05 * (i % 9)
    )


@pytest.mark.parametrize(("trainers", "producers"), [(2, 1), (3, 2)])
def test_the_ledger_is_the_plan_and_the_weights_are_those_of_one_trainer(
    tmp_path, corpus, trainers, producers
):
    assert_exact(together.trained(tmp_path, corpus, trainers, producers))
