"""Each file of a run folder, damaged in each way: the run comes to the same weights, or is refused
in one line. Never other weights, never a traceback. `tests/bench/damage.py` flips more bits.
"""

import json
from collections import Counter

import pytest

from common.run.folder import RunFolder
from common.system.errors import BadInput
from tests.support import damaged_runs
from tests.support.arithmetic_runs import edit_identity
from tests.support.damaged_runs import damages, fate, make_case


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return make_case(tmp_path_factory.mktemp("damaged"))


def test_an_undamaged_run_comes_to_the_known_weights(case):
    for mode in damaged_runs.MODES:
        case.restore()
        assert fate(case, mode) == "same weights"


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("plan/gpt/train.order.npy", "bit"),
        ("plan/gpt/train.json", "truncated"),
        ("vocab.json", "emptied"),
        ("mel_stats.safetensors", "bit"),
        ("manifest.sqlite", "bit"),
        ("manifest.sqlite", "deleted"),
        ("config.yaml", "emptied"),
        ("dvae/model.safetensors", "bit"),
        ("generation", "emptied"),
        ("endpoint.json", "bit"),
    ],
)
def test_a_start_makes_derived_files_anew(case, name, what):
    case.restore()
    next(hurt for damage, hurt in damages(case, name, 1) if damage.startswith(what))()
    assert fate(case, "launch") == "same weights"


def go_through(case, every: int) -> Counter:
    """Every `every`th damage of all files, for the three ways to go on in turn."""
    tries = [hurt for name in case.files() for _, hurt in damages(case, name, 1)]
    modes, seen = list(damaged_runs.MODES), Counter()
    for i, hurt in enumerate(tries[::every]):
        case.restore()
        hurt()
        seen["same" if fate(case, modes[i % 3]) == "same weights" else "refused"] += 1
    return seen


def test_no_other_weights_and_no_traceback(case):
    seen = go_through(case, every=8)
    assert seen["same"] >= 10
    assert seen["refused"] >= 3


@pytest.mark.slow
def test_no_other_weights_and_no_traceback_whatever_is_damaged(case):
    seen = go_through(case, every=1)
    assert seen["same"] > 40
    assert seen["refused"] > 40


@pytest.mark.parametrize("name", ["plan/gpt/train.order.npy", "plan/dvae/train.json", "vocab.json",
                                  "mel_stats.safetensors", "manifest.sqlite"])  # fmt: skip
@pytest.mark.parametrize("mode", ["trainer", "producer"])
def test_the_trainer_and_producers_refuse_a_flipped_bit(case, name, mode):
    case.restore()
    damaged_runs.flip(case.run / name, 8 * ((case.run / name).stat().st_size // 2) + 3)
    assert fate(case, mode).startswith(f"{case.run / name}: damaged: its digest differs; ")


def test_an_edited_setting_is_refused_by_name(case):
    case.restore()
    path = case.run / "config.yaml"
    path.write_text(path.read_text().replace("accumulate: 3", "accumulate: 2"))
    for mode in damaged_runs.MODES:
        assert "train.accumulate: 3 → 2" in fate(case, mode)


def test_an_emptied_config_keeps_determinism(case):
    case.restore()
    assert RunFolder(case.run).config.deterministic is True
    (case.run / "config.yaml").write_text("")
    assert RunFolder(case.run).config.deterministic is True


@pytest.mark.parametrize("ledger", ["ledger.jsonl", "dvae/ledger.jsonl"])
def test_a_cut_ledger_is_noticed_at_the_start(case, ledger):
    case.restore()
    lines = (case.run / ledger).read_text().splitlines(keepends=True)
    (case.run / ledger).write_text("".join(lines[:-3]))
    assert "it is lost or cut; restore the file" in fate(case, "trainer")
    (case.run / ledger).write_text("".join(lines).replace('"loss":', '"lost":', 1))
    assert "are not those that were there when step-" in fate(case, "trainer")


def test_a_run_without_a_record_resumes_and_gets_one(case):
    case.restore()
    edit_identity(case.run)
    assert RunFolder(case.run).proof.files is None
    assert fate(case, "trainer") == "same weights"
    case.restore()
    edit_identity(case.run)
    assert fate(case, "launch") == "same weights"
    assert "plan/gpt/train.order.npy" in RunFolder(case.run).proof.files


def test_a_changed_identity_is_refused(case):
    case.restore()
    path = case.run / "identity.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "seed": 2}))
    with pytest.raises(BadInput, match="does not match its own digest"):
        RunFolder(case.run)
