"""A full disk is reported in one line, whichever library hits it first."""

import errno
import sqlite3
from types import SimpleNamespace

import pytest
from safetensors import SafetensorError

import launch
from common.system.errors import FAILED, HOPELESS, disk_refuses
from common.system.lifecycle import Stop, _outcome

FULL = [
    OSError(errno.ENOSPC, "No space left on device", "/r/run_id"),
    OSError(errno.EDQUOT, "Disk quota exceeded"),
    sqlite3.OperationalError("database or disk is full"),
    sqlite3.OperationalError("unable to open database file"),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
]
OTHERS = [OSError(errno.EMFILE, "Too many open files"), sqlite3.OperationalError("no such table")]


def failing(error):
    def run(*args):
        raise error

    return run


@pytest.mark.parametrize("error", FULL, ids=repr)
def test_launch_and_its_children_say_what_to_do_and_show_no_traceback(
    error, monkeypatch, capsys, caplog
):
    monkeypatch.setitem(launch.COMMANDS, "status", SimpleNamespace(run=failing(error)))
    monkeypatch.setattr(launch.flags, "parse", lambda parser, rest: None)
    monkeypatch.setattr(launch, "_parser", lambda name: None)
    monkeypatch.setattr(launch.signal, "signal", lambda *args: None)
    assert launch.main(["status"]) == FAILED
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "the disk takes nothing more" in said
    assert "make room" in said
    assert _outcome(failing(error), Stop()) == HOPELESS
    assert "make room" in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("error", OTHERS, ids=repr)
def test_other_errors_are_not_a_full_disks(error):
    assert disk_refuses(error) is None
