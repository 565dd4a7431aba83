"""What importing TensorFlow leaves out."""

import importlib
import subprocess
import sys

import pytest

from common.gpu.device import absent


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package that can be imported, and is not."""
    (tmp_path / "some_plots").mkdir()
    (tmp_path / "some_plots" / "__init__.py").write_text("VALUE = 3\n")
    (tmp_path / "some_plots" / "part.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    yield "some_plots"
    for name in ("some_plots", "some_plots.part"):
        sys.modules.pop(name, None)


def test_a_package_is_absent_inside_and_there_again_afterwards(package):
    with absent((package, "no_such_package")):
        for name in (package, f"{package}.part"):
            with pytest.raises(ImportError):
                importlib.import_module(name)
    assert importlib.import_module(package).VALUE == 3
    assert "no_such_package" not in sys.modules


def test_what_is_loaded_stays(package):
    loaded = importlib.import_module(package)
    with absent((package,)):
        assert importlib.import_module(package) is loaded
        importlib.import_module(f"{package}.part")
    assert sys.modules[package] is loaded


def test_it_ends_with_an_error_too(package):
    with pytest.raises(RuntimeError), absent((package,)):
        raise RuntimeError
    importlib.import_module(package)


def test_a_process_that_computes_has_none_of_them_and_may_still_import_them():
    code = (
        "import sys\nfrom common.gpu.device import _NOT_NEEDED,"
        " prove_device\nprint(prove_device('cpu'))\nassert 'keras' in sys.modules\nassert not"
        " set(_NOT_NEEDED) & set(sys.modules)\nimport matplotlib.pyplot, sklearn.base\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "CPU\n"
