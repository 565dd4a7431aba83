"""A benchmark's child is gone when the benchmark is SIGKILLed."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
OWNER = """
import subprocess, sys, time
from tests.bench.owned import dies_with_me
sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(sleeper, preexec_fn=dies_with_me())
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_a_child_does_not_outlive_its_owner():
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    child = psutil.Process(int(owner.stdout.readline()))
    try:
        assert child.is_running()
        owner.kill()
        owner.wait(60)
        psutil.wait_procs([child], timeout=60)
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    finally:
        owner.kill()
        owner.stdout.close()
        if child.is_running():
            child.kill()
