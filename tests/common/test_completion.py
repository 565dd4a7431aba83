"""What the shell is offered where a line is completed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import launch
from common.launcher.completion import parts, settings
from common.run import describe

ROOT = Path(__file__).resolve().parents[2]


def offered(line: str, tmp_path: Path, first: int = 1) -> list[str]:
    """By launch.py itself, asked as argcomplete's shell function asks.

    `first`: the number of words before the program's arguments.
    """
    out = tmp_path / "out"
    env = os.environ | {
        "_ARGCOMPLETE": str(first),
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_SHELL": "bash",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(out),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "PYTHONPATH": str(ROOT),
    }
    program = [sys.executable, str(ROOT / "launch.py")]
    done = subprocess.run(program, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [word.strip() for word in out.read_text().split("\n")]


def test_commands_settings_flags_and_folders(tmp_path):
    for name in ("سلام", "other"):
        (tmp_path / name).mkdir()
    assert offered("launch.py fine", tmp_path) == ["finetune"]
    assert offered("python launch.py train.optim.learn", tmp_path, 2) == [
        "train.optim.learning_rate="
    ]
    assert offered("launch.py finetune --lang", tmp_path) == ["--language"]
    assert offered("launch.py finetune س", tmp_path) == ["سلام/"]


@pytest.mark.parametrize(
    ("line", "command", "rest", "begins"),
    [
        ("launch.py ", None, "launch.py ", True),
        ("launch.py sc", None, "launch.py sc", True),
        ("launch.py scan", None, "launch.py scan", True),
        ("launch.py scan da", "scan", "launch.py da", False),
        ("python ./launch.py stop  --run r", "stop", "python ./launch.py --run r", False),
        ("launch.py seed=1 ", None, "launch.py seed=1 ", False),
        ("launch.py run=scan x", None, "launch.py run=scan x", False),
    ],
)
def test_the_command_of_a_line(line, command, rest, begins):
    assert parts(line, launch.COMMANDS) == (command, rest, begins)


def test_settings_and_their_values():
    assert settings("train.best_by=") == [
        f"train.best_by={v}" for v in ("audio_ce", "cer", "similarity")
    ]
    assert settings("train.recompute=t") == ["train.recompute=true"]
    assert settings("deterministic=") == [f"deterministic={v}" for v in ("true", "false", "null")]
    assert settings("seed=") == settings("no.such=") == []
    keys = {f"{e.key}=" for e in describe.entries() if not e.section}
    assert set(settings("")) == {k for k in keys if "[]" not in k}
