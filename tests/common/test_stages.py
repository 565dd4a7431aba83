"""The table of stages: what it says is there, and nothing else compares names."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tests.support.arithmetic  # noqa: F401 - registers the size
from common.data.batch import FIELDS
from common.gpu.choose import CPU
from common.launcher.program import environment
from common.run import settings
from common.run.stages import NETWORKS, STAGES, family_of, load, register, stages_of
from common.system.errors import BadInput
from common.xtts.dims import SIZES

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("size", ["tiny", "arithmetic"])
def test_what_a_stage_names_is_there(size):
    for spec in stages_of(size):
        assert spec.kind in FIELDS
        assert hasattr(settings.Config(), spec.section)
        assert all(callable(load(r)) for r in (spec.maker, spec.step, spec.figures, spec.panels))
    assert sum(s.publishes for s in stages_of(size)) == 1


def test_a_size_that_is_registered_is_one_like_others():
    assert [family_of(s) for s in ("tiny", "xtts", "arithmetic")] == ["xtts", "xtts", "arithmetic"]
    assert settings.parse({"model": {"size": "arithmetic"}}).sample_every == 0
    assert settings.parse({"model": {"size": "tiny"}}).sample_every == 1000
    with pytest.raises(
        BadInput, match=r"model.size: Input should be 'tiny', 'small', .* \(got 'large'\)"
    ):
        settings.parse({"model": {"size": "large"}})
    with pytest.raises(ValueError, match=r"the stages of odd are \['gpt'\]"):
        register("odd", SIZES["tiny"], NETWORKS[1:])


def test_no_file_but_the_table_compares_names_of_stages():
    """What depends on a stage is a field of its spec."""
    found = []
    for path in (p for d in ("common", "producer", "trainer") for p in (ROOT / d).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                sides = [
                    s.value for s in (node.left, *node.comparators) if isinstance(s, ast.Constant)
                ]
                found += [
                    f"{path.name}:{node.lineno}" for s in sides if s in (*STAGES, "arithmetic")
                ]
    assert not found


def test_the_product_has_no_switches_for_tests():
    names = [p for d in ("common", "producer", "trainer") for p in (ROOT / d).rglob("*.py")]
    words = {
        p.name: [w for w in ("XTTS_TEST_", '"arithmetic"') if w in p.read_text()]
        for p in names
        if p.name != "gate.py"
    }
    assert not {name: w for name, w in words.items() if w}


def test_child_processes_know_of_it():
    """Also in a run's own environment, which keeps what PYTHONPATH says."""
    code = "from common.run.stages import family_of; print(family_of('arithmetic'))"
    options = {"cwd": "/", "capture_output": True, "text": True, "check": True}
    assert subprocess.run([sys.executable, "-c", code], **options).stdout == "arithmetic\n"
    env = {
        **os.environ,
        **{k: v for k, v in environment(CPU).items() if v is not None},
    }
    assert subprocess.run([sys.executable, "-c", code], env=env, **options).stdout == "arithmetic\n"
