"""Libraries that keep files in the user's home folder, if there is none."""

import os
import stat
import tempfile

import pytest

from common.system import home


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.parametrize("value", ["/proc/none", "/dev/null", None])
def test_v7_without_a_home_there_is_a_folder_of_our_own(tmp_path, monkeypatch, value):
    monkeypatch.delenv("HOME")
    if value is None:  # nor an entry in the list of users
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    else:
        monkeypatch.setenv("HOME", value)
    found = {"MPLCONFIGDIR": "/as/the/user/says"}
    home.settle(found)
    assert found["MPLCONFIGDIR"] == "/as/the/user/says"
    [folder] = tmp_path.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert found["NUMBA_CACHE_DIR"] == str(folder / "numba_cache_dir")
    again = {}
    home.settle(again)
    assert again["NUMBA_CACHE_DIR"] == found["NUMBA_CACHE_DIR"]


def test_v7_a_home_that_can_be_written_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    found = {}
    home.settle(found)
    assert found == {}


def test_v7_a_folder_that_others_may_write_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/proc/none")
    theirs = tmp_path / f"xtts-{os.getuid()}-home"
    theirs.mkdir()
    theirs.chmod(0o777)
    found = {}
    home.settle(found)
    assert not found["NUMBA_CACHE_DIR"].startswith(f"{theirs}/")


@pytest.mark.parametrize("plant", ["file", "link to nothing"])
def test_v7_what_is_no_folder_yet_is_not_taken_either(tmp_path, monkeypatch, plant):
    """Whoever put it there could make a folder of it later."""
    monkeypatch.setenv("HOME", "/proc/none")
    theirs = tmp_path / f"xtts-{os.getuid()}-home"
    theirs.touch() if plant == "file" else theirs.symlink_to(tmp_path / "nothing")
    found = {}
    home.settle(found)
    assert not found["NUMBA_CACHE_DIR"].startswith(f"{theirs}/")
    assert found["NUMBA_CACHE_DIR"].startswith(f"{theirs}-")
