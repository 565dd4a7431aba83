"""The tests of `make test-fast`: a pytest plugin that skips a test as soon as it loads TensorFlow,
starts a process or prepares a whole run.

    python -m pytest -p tests.support.fast tests/trainer tests/producer tests/common

So no list has to be kept: a new test belongs to the fast ones if it needs none of these.
"""

import signal
import subprocess
import sys
import threading
from importlib.abc import MetaPathFinder
from typing import NoReturn

import pytest

HEAVY = ("tensorflow", "keras", "numba")  # numba: by librosa, seconds of a core
_SKIP = signal.SIGRTMIN + 1  # to the main thread, from another one that does what is not fast
_in_a_test = threading.Event()
_why = ""


def not_fast(why: str) -> NoReturn:
    """Skip the test, or the file that is being collected.

    A BaseException: no `except Exception` of the code under test hides it. In another thread it may
    only end that thread, and the test would wait for it: a signal skips the test as well.
    """
    global _why
    if threading.current_thread() is not threading.main_thread():
        _why = why
        signal.pthread_kill(threading.main_thread().ident, _SKIP)
        raise SystemExit(why)  # ends the thread without a word
    raise pytest.skip.Exception(f"{why}; `make test` runs it", allow_module_level=True)


class NoHeavyImports(MetaPathFinder):
    """An import hook that answers HEAVY by a skip."""

    def find_spec(self, fullname, path, target=None):
        if fullname in HEAVY:
            not_fast(f"loads {fullname}")
        return None


def pytest_configure(config):
    sys.meta_path.insert(0, NoHeavyImports())
    signal.signal(_SKIP, lambda *_: not_fast(_why) if _in_a_test.is_set() else None)


@pytest.hookimpl(hookwrapper=True)
def pytest_pyfunc_call():
    _in_a_test.set()
    yield
    _in_a_test.clear()


@pytest.fixture(autouse=True, scope="session")
def _no_processes_and_no_runs():
    from producer.creation import prepare

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", lambda *_, **__: not_fast("starts a process"))
        patch.setattr(prepare, "_make", lambda *_, **__: not_fast("prepares a run"))
        yield
