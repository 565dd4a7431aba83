"""Steps that several trainers make: whatever their number, the ledger is the plan and the weights
those of one trainer.
"""

from __future__ import annotations

import pytest

from common.run.folder import RunFolder
from tests.support import tiny_runs, together
from tests.support.arithmetic_runs import assert_exact
from tests.support.chaos import Driver
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


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_trainers_of_networks_are_one_to_the_bit(tmp_path, corpus):
    """A step of two batches: a + b has no order. Gradients travel over tf.distribute's rings."""
    results = []
    for trainers in (1, 2):
        folder = tmp_path / f"n{trainers}"
        tree = tiny_runs.tiny_tree(folder, corpus) | {"trainers": {"count": trainers}}
        driver = Driver.create(folder, tree, 0, 0)
        try:
            driver.launch()
            driver.finish()
        finally:
            driver.kill_everything()
        results.append(tiny_runs.result(RunFolder(driver.run)))
    tiny_runs.assert_equal(results[1], results[0])
