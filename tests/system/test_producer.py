"""`python -m producer` as a process: its trainer, the successor, and how it leaves."""

import contextlib
import subprocess
import sys
from pathlib import Path

from common.system import status
from common.transport.address import Endpoint
from common.transport.server import LeaseServer
from tests.support import channel_fixtures
from tests.support.producer_runs import RUN_ID, make_run
from tests.support.serving import LATER_S, open_stage, take_all, wait_for

short_folder = channel_fixtures.short_folder
ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def spawned(run, name):
    """A producer process that has got as far as looking for its trainer."""
    argv = [sys.executable, "-m", "producer", "--run", str(run.path), "--name", name]
    p = subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: (s := status.read(run.path, name)) and s.phase != "starting")
        yield p
    finally:
        p.kill()
        p.communicate()


def test_the_process_serves_a_trainer_and_its_successor_and_leaves_with_the_run(
    tmp_path, short_folder
):
    run = make_run(tmp_path / "run", [1.0] * 23, size="arithmetic")
    addresses = [f"ipc://{short_folder}/{k}" for k in range(2)]
    with spawned(run, "p0") as p, spawned(run, "p1") as other:
        for gen, address in enumerate(addresses, 1):  # the second listens elsewhere
            server = LeaseServer(address, RUN_ID, 4)
            Endpoint(address).write(run.endpoint_file)
            open_stage(server, run, gen, [("train", g) for g in range(5)])
            assert [d[1] for d in take_all(server)] == list(range(5))
            if gen == 1:
                other.terminate()
                assert other.wait(LATER_S) == 143
                server.close(stop_producers=False)
        server.close(drain_s=LATER_S)
        assert p.wait(LATER_S) == 0
        log = p.stderr.read()
    assert "leaving: the run is over" in log
    assert status.read(run.path, "p0").batches >= 5
    assert status.read(run.path, "p0").exit_code == 0


def test_a_folder_that_is_no_run_is_bad_input(tmp_path):
    p = subprocess.run(
        [sys.executable, "-m", "producer", "--run", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LATER_S,
    )
    assert p.returncode == 2
    assert "is not a run folder" in p.stderr
