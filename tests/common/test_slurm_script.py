"""The scripts in docs/slurm, with stand-ins for Slurm and the launcher: what they do with Slurm's
signal and with the launcher's exit codes.
"""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "docs" / "slurm"
COMMANDS = {
    "train": "python launch.py run=runs/fa train.save_grace_s=100 data.train=x y",
    "train_nodes": (
        "python launch.py trainer --slurm run=runs/fa train.save_grace_s=100 trainers.count=2"
        " trainers.bind=tcp://node3:5556 data.train=x y"
    ),
}


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def started(tmp_path):
    """Starts the script where `python` is the given text; (process, lines of what was called)."""
    (tmp_path / "bin").mkdir()
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").write_text("")
    say = f'echo "$(basename "$0") $*" >> {tmp_path}/called'
    names = '[ "$1" != show ] || printf "node3\\nnode5\\n"'
    program(tmp_path / "bin/scontrol", f"{say}; {names}")
    # As Slurm: srun leaves its children alone where it is told to, and scancel signals them.
    program(tmp_path / "bin/srun", f'{say}; echo $$ > {tmp_path}/task; shift; exec "$@"')
    program(tmp_path / "bin/scancel", f'{say}; kill -TERM "$(cat {tmp_path}/task)"')
    running = []

    def start(script: str, python: str, **env):
        program(tmp_path / "bin/python", f'echo "python $*" >> {tmp_path}/called; {python}')
        env = {
            "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
            "SLURM_SUBMIT_DIR": str(tmp_path),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "node[3,5]",
            "SLURM_NTASKS": "2",
            **env,
        }
        argv = [str(SCRIPTS / f"{script}.sbatch"), "runs/fa", "data.train=x y"]
        running.append(subprocess.Popen(argv, env=env))
        return running[-1]

    yield start, lambda: (tmp_path / "called").read_text().splitlines()
    for p in running:
        p.kill()
        p.wait()


@pytest.mark.parametrize("script", COMMANDS)
@pytest.mark.parametrize("code", [0, 1, 2])
def test_the_launchers_code_is_the_jobs(started, script, code):
    start, called = started
    assert start(script, f"exit {code}").wait(60) == code
    assert called()[-1] == COMMANDS[script]
    if script == "train_nodes":
        assert called()[-2] == f"srun --kill-on-bad-exit=0 {COMMANDS[script]}"


@pytest.mark.parametrize("script", COMMANDS)
@pytest.mark.parametrize(("env", "again"), [({}, True), ({"NO_REQUEUE": "1"}, False)])
def test_slurms_warning_stops_the_run_and_puts_the_job_back(started, tmp_path, script, env, again):
    """The launcher takes a moment to save after SIGTERM: its code counts, not the trap's."""
    start, called = started
    wait = 'trap "sleep 0.3; exit 143" TERM; touch ready; while :; do sleep 0.05; done'
    job = start(script, wait, **env)
    end = time.monotonic() + 60
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(60) == 143
    assert ("scontrol requeue 7" in called()) == again
    assert ("scancel --signal=TERM 7" in called()) == (script == "train_nodes")
