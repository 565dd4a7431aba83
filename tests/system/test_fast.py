"""`make test-fast` runs no test that loads TensorFlow, starts a process or prepares a run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

CASES = """
import subprocess, sys, threading
import pytest

def test_plain():
    assert not {"tensorflow", "keras"} & set(sys.modules)

def test_loads_tensorflow():
    import tensorflow

def test_loads_keras_where_errors_are_swallowed():
    try:
        import keras.layers
    except Exception:
        pass

def test_starts_a_process():
    subprocess.run(["true"])

@pytest.fixture
def process():
    return subprocess.Popen(["true"])

def test_a_fixture_starts_one(process):
    pass

def test_a_thread_starts_one():
    thread = threading.Thread(target=subprocess.run, args=(["true"],))
    thread.start()
    threading.Event().wait(60)

def test_prepares_a_run(tmp_path):
    from tests.support.arithmetic_runs import arithmetic_run
    arithmetic_run(tmp_path)
"""


@pytest.mark.parametrize("workers", [[], ["-n", "1"]], ids=["alone", "xdist"])
def test_what_loads_tensorflow_or_starts_a_process_is_skipped(tmp_path, workers):
    (tmp_path / "test_cases.py").write_text(CASES)
    (tmp_path / "test_heavy.py").write_text("import tensorflow\n\ndef test_never(): assert False\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.support.fast",
        "-rs",
        *workers,
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^=+ 1 passed, 7 skipped", done.stdout, re.M), done.stdout
    reasons = re.findall(r"^SKIPPED \[(\d)\] .*: (\w.*); `make test` runs it$", done.stdout, re.M)
    assert sum(int(n) for n, _ in reasons) == 7
    assert {why for _, why in reasons} == {
        "loads tensorflow",
        "loads keras",
        "starts a process",
        "prepares a run",
    }


def test_the_makefile_runs_them_so():
    recipe = re.search(r"^test-fast: .*\n\t(.*)$", (ROOT / "Makefile").read_text(), re.M)[1]
    assert "-p tests.support.fast" in recipe
    assert {"tests/common", "tests/producer", "tests/trainer"} <= set(recipe.split())
