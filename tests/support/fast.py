"""The tests of `make test-fast`: a pytest plugin that skips a test as soon as it loads TensorFlow
or starts a process.

    python -m pytest -p tests.support.fast tests/trainer tests/producer tests/common

So no list has to be kept: a new test belongs to the fast ones if it needs neither.
"""

import subprocess
import sys
from importlib.abc import MetaPathFinder
from typing import NoReturn

import pytest

HEAVY = ("tensorflow", "keras")


def not_fast(why: str) -> NoReturn:
    """Skip the test, or the file that is being collected.

    A BaseException: no `except Exception` of the code under test hides it.
    """
    raise pytest.skip.Exception(f"{why}; `make test` runs it", allow_module_level=True)


class NoHeavyImports(MetaPathFinder):
    """An import hook that answers HEAVY by a skip."""

    def find_spec(self, fullname, path, target=None):
        if fullname in HEAVY:
            not_fast(f"loads {fullname}")
        return None


def pytest_configure(config):
    sys.meta_path.insert(0, NoHeavyImports())


@pytest.fixture(autouse=True, scope="session")
def _no_processes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", lambda *_, **__: not_fast("starts a process"))
        yield
