"""`launch.py status` for people and for programs."""

import json
import subprocess
import sys

import pytest

import launch
from common.system.errors import BadInput
from common.system.status import StatusFile


@pytest.fixture
def run(tmp_path):
    """A process that trains, as this one, and one that is gone."""
    trainer = StatusFile(tmp_path, "trainer", "trainer")
    trainer.update(phase="training", stage_name="gpt", step=7, max_steps=20, epoch=3, eta_s=3725.0)
    StatusFile(tmp_path, "producer-0", "producer").finish(3)
    return tmp_path


def status(*argv):
    return launch.COMMANDS["status"].run(launch.flags.parse(launch._parser("status"), list(argv)))


def test_json(run, capsys):
    assert status("--run", str(run), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    trainer, producer = found["processes"]
    assert (found["run"], trainer["alive"], producer["alive"]) == (str(run), True, False)
    assert (trainer["step"], trainer["epoch"], trainer["eta_s"]) == (7, 3, 3725.0)
    assert producer["exit_code"] == 3


def test_the_table_has_epoch_and_eta(run, capsys):
    assert status("--run", str(run)) == 0
    line = next(t for t in capsys.readouterr().out.splitlines() if t.startswith("trainer"))
    assert line[: line.index("1:02:05")].split()[-1] == "3"
    assert "gpt 7/20" in line


@pytest.mark.parametrize(
    ("code", "said"), [(0, "done"), (130, "stopped"), (143, "stopped"), (1, "exit 1")]
)
def test_how_a_process_ended_is_said(run, capsys, code, said):
    StatusFile(run, "producer-1", "producer").finish(code)
    assert status("--run", str(run), "--json") == 0
    doing = {p["name"]: p["doing"] for p in json.loads(capsys.readouterr().out)["processes"]}
    assert doing == {"trainer": "training", "producer-0": "exit 3", "producer-1": said}
    assert status("--run", str(run)) == 0
    line = next(t for t in capsys.readouterr().out.splitlines() if t.startswith("producer-1"))
    assert said in line


def test_watch_ends_with_the_run(run):
    """In a process of its own: the run's only process is then gone."""
    code = f"from common.system.status import StatusFile; StatusFile({str(run)!r}, 'trainer', 'a')"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=launch.ROOT)
    assert status("--run", str(run), "--watch", "--every", "0.01") == 0


@pytest.mark.parametrize("wrong", [("--json", "--watch"), ("--watch", "--every", "0")])
def test_what_excludes_each_other(run, wrong):
    with pytest.raises(BadInput):
        status("--run", str(run), *wrong)
