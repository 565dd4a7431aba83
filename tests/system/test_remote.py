"""Producers on another host, as processes: a bundle, a copy of the corpus, a tcp address, and
whatever is killed on the way.
"""

import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import numpy as np
import pytest

from common.run import bundle
from common.run import settings as config
from common.run.folder import RunFolder
from common.system import status
from common.transport.keys import KeyPair, run_keys
from common.transport.messages import Offer
from common.transport.server import LeaseServer
from producer.creation.prepare import prepare_run
from tests.support import channels as cb
from tests.support.arithmetic_runs import arithmetic_run, assert_exact, settings
from tests.support.chaos import LAUNCH, Driver
from tests.support.corpora import make_corpus
from tests.support.gates import LAG
from tests.support.serving import open_stage, take_all, wait_for
from trainer.history import ledger


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as s:
        return f"tcp://127.0.0.1:{s.getsockname()[1]}"


def made(work: Path) -> int:
    """Batches that the other host's producer has made since it started; 0 if it is not alive."""
    return sum(s.batches for s in status.read_all(work) if s.alive)


@pytest.mark.timeout(600)
def test_a_remote_producer_is_killed_the_trainer_is_killed_and_nothing_is_lost(tmp_path):
    """It is the only producer until both were killed, and the trainer stands at a gate: whatever
    comes, comes from its successor.
    """
    make_corpus(tmp_path / "corpus", 41, seconds=lambda i: 0.6 + 0.05 * (i % 9))
    at, there, here = free_address(), tmp_path / "there", "producer-extra-0"
    more = {"producers__count": 0, "producers__lease_ttl_s": 8.0, "transport__bind": at}
    driver = Driver.create(
        tmp_path, settings(tmp_path / "run", tmp_path / "corpus", **more), step_ms=1, make_ms=5
    )
    driver.gate.limit(1, 2)
    driver.launch()
    try:
        driver.wait_for(
            lambda: (tmp_path / "run" / "endpoint.json").exists(), "the trainer to listen"
        )
        there.mkdir()
        shutil.copytree(tmp_path / "corpus", there / "clips")
        bundling = [*LAUNCH, "bundle", "--run", str(driver.run), "--out", str(there / "f")]
        assert subprocess.run(bundling, capture_output=True, timeout=cb.LATER_S).returncode == 0
        (tmp_path / "corpus").rename(tmp_path / "out_of_reach")
        far = [
            "--bundle",
            str(there / "f"),
            "--connect",
            at,
            "--data-root",
            str(there / "clips"),
            "--work",
            str(there / "work"),
        ]
        driver.extra.append(driver._spawn("producer", *far))
        driver.wait_for(lambda: made(there / "work") > 5, "the remote producer's batches")
        (name,) = [s.name for s in status.read_all(there / "work")]
        first = status.read(there / "work", name).pid
        driver.say(f"SIGKILL {name}")
        os.kill(first, signal.SIGKILL)
        driver.gate.limit(2, 10 + LAG)

        def remote():
            return status.read(there / "work", name)

        driver.wait_for(
            lambda: remote().pid != first and made(there / "work") > 5,
            "the batches of its successor",
        )
        second = remote()
        driver.wait_for(lambda: driver.trained(2) >= 10, "step 10 of stage 2")
        trainer, before = driver.pid("trainer"), made(there / "work")
        driver.signal("trainer", signal.SIGKILL)
        driver.wait_for(lambda: driver.pid("trainer") not in (None, trainer), "another trainer")
        driver.gate.limit(2, 30)
        driver.wait_for(lambda: made(there / "work") > before + 20, "batches for the new trainer")
        assert remote().pid == second.pid, driver.story(
            "the remote producer did not survive its trainer"
        )
        driver.add_producer()
        driver.wait_for(
            lambda: (s := status.read(driver.run, here)) is not None and s.phase == "blocked",
            "a producer on this host",
        )
        driver.finish()
        assert driver.extra[0].returncode == 0, driver.story("the remote producer")
        assert_exact(RunFolder(driver.run))
    finally:
        driver.kill_everything()
    who = {
        p for line in ledger.read(driver.run / "ledger.jsonl") for p in line.get("producers", [])
    }
    assert who == {here, name}
    assert name == f"producer-{socket.gethostname()}-0"
    assert status.read(there / "work", name).exit_code == 0
    assert (there / "work" / "logs" / f"{name}.log").exists()


def produce(file: Path, at: str, corpus: Path, **options) -> subprocess.Popen:
    argv = [
        *LAUNCH,
        "producer",
        "--bundle",
        str(file),
        "--connect",
        at,
        "--data-root",
        str(corpus),
        "--gpu",
        "cpu",
    ]
    return subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )


def bundled(tmp_path: Path) -> tuple[RunFolder, KeyPair]:
    """A run on tcp and its trainer's keys; its bundle is `f`."""
    run = arithmetic_run(tmp_path, 12, transport__bind=free_address())
    keys, _ = run_keys(run.path)
    bundle.write(run, tmp_path / "f")
    return run, keys


def test_a_run_begun_anew_refuses_the_bundle_of_the_old_one(tmp_path):
    """With the same keys: the folder's keys/ outlived the run."""
    run, keys = bundled(tmp_path)
    server = LeaseServer(run.config.transport.bind, cb.RUN, 4, keys=keys)
    try:
        server.open(1, Offer("dvae", run.feature_hash("dvae")), [("train", 0)])
        p = produce(tmp_path / "f", server.endpoint, tmp_path / "corpus")
        text, _ = p.communicate(timeout=cb.LATER_S)
    finally:
        server.close(stop_producers=False)
    assert p.returncode == 2, text
    assert f"this trainer runs {cb.RUN}, the producer belongs to run {run.run_id}" in text


def test_ctrl_c_and_sigterm_end_it_as_any_producer(tmp_path):
    run, keys = bundled(tmp_path)
    server = LeaseServer(run.config.transport.bind, run.run_id, 4, keys=keys)
    try:
        for sig, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
            p = produce(tmp_path / "f", server.endpoint, tmp_path / "corpus")
            work = tmp_path / f"xtts-{run.run_id[:12]}"
            wait_for(
                lambda work=work: any(
                    s.alive and s.phase != "starting" for s in status.read_all(work)
                )
            )
            p.send_signal(sig)
            text, _ = p.communicate(timeout=cb.LATER_S)
            assert p.returncode == code, text
    finally:
        server.close(stop_producers=False)


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_real_features_from_the_copied_corpus_until_stage_2_needs_the_dvae(tmp_path):
    make_corpus(
        tmp_path / "corpus", 12, seconds=lambda i: 1.0 + 0.05 * i, freq=lambda i: 200.0 + 30 * i
    )
    tree = settings(
        tmp_path / "run", tmp_path / "corpus", model__size="tiny", transport__bind=free_address()
    )
    run = prepare_run(config.parse(tree), on_cpu=True, cores=2, out=lambda line: None)
    keys, _ = run_keys(run.path)
    bundle.write(run, tmp_path / "f")
    moved = (tmp_path / "corpus").rename(tmp_path / "copy")
    server = LeaseServer(run.config.transport.bind, run.run_id, 4, keys=keys)
    try:
        open_stage(server, run, 1, [("train", 0), ("eval", 0)], "dvae")
        p = produce(tmp_path / "f", server.endpoint, moved)
        sent = take_all(server)
        assert [(plan, g) for plan, g, *_ in sent] == [("train", 0), ("eval", 0)]
        assert all(
            notes.bad == () and np.abs(arrays["mel"].astype(np.float32)).max() > 0.1
            for _, _, arrays, notes in sent
        )
        server.open(2, Offer("gpt", "0" * 32), [("train", 0)])
        text, _ = p.communicate(timeout=cb.LATER_S)
    finally:
        server.close(stop_producers=False)
    assert p.returncode == 2, text
    assert "stage 2 needs the DVAE, and this bundle was made before stage 1 had ended" in text
