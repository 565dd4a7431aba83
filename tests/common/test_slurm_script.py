"""docs/slurm/train.sbatch, with stand-ins for Slurm and the launcher: what it does with Slurm's
signal and with the launcher's exit codes.
"""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "slurm" / "train.sbatch"


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def started(tmp_path):
    """Starts the script where `python` is the given text; (process, lines of what was called)."""
    (tmp_path / "bin").mkdir()
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").write_text("")
    program(tmp_path / "bin/scontrol", f'echo "scontrol $*" >> {tmp_path}/called')
    running = []

    def start(python: str, **env):
        program(tmp_path / "bin/python", f'echo "python $*" >> {tmp_path}/called; {python}')
        env = {
            "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
            "SLURM_SUBMIT_DIR": str(tmp_path),
            "SLURM_JOB_ID": "7",
            **env,
        }
        running.append(subprocess.Popen([str(SCRIPT), "runs/fa", "data.train=x y"], env=env))
        return running[-1]

    yield start, lambda: (tmp_path / "called").read_text().splitlines()
    for p in running:
        p.kill()
        p.wait()


@pytest.mark.parametrize("code", [0, 1, 2])
def test_the_launchers_code_is_the_jobs(started, code):
    start, called = started
    assert start(f"exit {code}").wait(60) == code
    assert called() == ["python launch.py run=runs/fa train.save_grace_s=100 data.train=x y"]


@pytest.mark.parametrize(("env", "again"), [({}, True), ({"NO_REQUEUE": "1"}, False)])
def test_slurms_warning_stops_the_run_and_puts_the_job_back(started, tmp_path, env, again):
    """The launcher takes a moment to save after SIGTERM: its code counts, not the trap's."""
    start, called = started
    wait = 'trap "sleep 0.3; exit 143" TERM; touch ready; while :; do sleep 0.05; done'
    job = start(wait, **env)
    end = time.monotonic() + 60
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(60) == 143
    assert ("scontrol requeue 7" in called()) == again
