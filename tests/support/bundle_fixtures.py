"""A run that can be bundled, its bundle, and what a producer on another host is started with.

A test file takes them with

    run, file, corpus = bundle_fixtures.run, bundle_fixtures.file, bundle_fixtures.corpus
"""

import shutil
from pathlib import Path

import pytest

from common.launcher import remote
from common.run import bundle
from common.run.folder import RunFolder
from common.transport.keys import run_keys
from tests.support.arithmetic_runs import arithmetic_run

ROOT = Path(__file__).parents[2]
BIND = "tcp://0.0.0.0:5555"
AT = "tcp://127.0.0.1:5555"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunFolder:
    """A run whose trainer has listened once."""
    folder = arithmetic_run(tmp_path_factory.mktemp("run"), 12, transport__bind=BIND)
    run_keys(folder.path)
    return folder


@pytest.fixture
def file(run, tmp_path) -> Path:
    """Its bundle."""
    bundle.write(run, tmp_path / "a.bundle")
    return tmp_path / "a.bundle"


@pytest.fixture
def corpus(run, tmp_path) -> Path:
    """The other host's copy of the corpus."""
    return Path(shutil.copytree(run.manifest.roots[0], tmp_path / "clips"))


def asked(file: Path, corpus: Path | str, *more: str) -> remote.Remote:
    """What `launch.py producer` finds out before it starts anything."""
    import launch

    argv = ["--bundle", str(file), "--connect", AT, "--data-root", str(corpus), *more]
    return remote.open_bundle(launch.flags.parse(launch._parser("producer"), argv))
