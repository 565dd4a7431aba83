"""The weights that a run began with are on record: what is lost is found at a start, not when they
are needed, and made anew from where they came.
"""

import shutil

import pytest

from common.run import recorded_settings
from common.run.beginning import LIST
from common.run.folder import RunFolder
from common.system.errors import BadInput
from producer.creation.prepare import prepare_run
from tests.support.coqui_files import imported_run


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    return imported_run(tmp_path_factory.mktemp("begun")).path


@pytest.fixture
def run(begun, tmp_path):
    return RunFolder(shutil.copytree(begun, tmp_path / "run"))


def again(run: RunFolder) -> RunFolder:
    config = recorded_settings.load(run.path / "config.yaml", [f"run={run.path}"])
    return prepare_run(config, on_cpu=True, cores=2, out=lambda line: None)


def test_a_lost_list_is_found_at_the_start_and_made_anew(run):
    path = run.path / LIST
    whole = path.read_bytes()
    for damaged in (None, whole[:-9]):
        path.unlink()  # it is the same file as where the weights came from
        if damaged is not None:
            path.write_bytes(damaged)
        with pytest.raises(BadInput, match=r"pretrained/dims\.json: (missing|damaged)"):
            RunFolder(run.path).prove(trains=True)
        RunFolder(run.path).prove()  # producers do not read it
        assert not again(RunFolder(run.path)).damaged
        assert path.read_bytes() == whole


def test_a_list_of_other_weights_is_not_taken(run, begun):
    path, source = run.path / LIST, begun.parent / "pretrained" / "dims.json"
    path.unlink()
    before = source.read_text()
    source.unlink()  # the begun run shares its bytes
    source.write_text(before.replace('"dvae": "', '"dvae": "0'))
    try:
        with pytest.raises(BadInput, match=r"dims\.json: missing|the file that was imported"):
            again(run)
    finally:
        source.unlink()
        source.write_text(before)


def test_what_nothing_is_trained_by_any_more_may_go(run):
    (run.path / LIST).unlink()
    (run.path / "checkpoints" / "step-00000001").mkdir(parents=True)
    RunFolder(run.path).prove(trains=True)
