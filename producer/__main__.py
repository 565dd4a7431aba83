"""`python -m producer --run RUN`: files to batches, for as long as a trainer asks for them."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

from common.data.manifest import Manifest
from common.gpu.faults import in_words
from common.run.folder import RunFolder
from common.run.settings import Config
from common.run.stages import STAGES, load
from common.system import logs, trace
from common.system.cores import cores
from common.system.errors import BadInput, RunError, Stopped
from common.system.lifecycle import Stop, run_main
from common.system.status import StatusFile, run_is_over
from common.transport.address import (
    ChannelError,
    Endpoint,
    connectable,
    listening_address,
)
from common.transport.client import LeaseClient
from common.transport.keys import KeyFileError, KeyPair
from producer.batches.decode import DecodePool
from producer.batches.maker import Maker
from producer.serve import Service

MAX_DECODE_THREADS = 8
ASK_S = 1.0  # between two checks for the trainer's end
KEYS_WAIT_S = 600.0  # a trainer that waits for its card takes minutes to listen
DECODE_QUEUE = 1 << 16  # files waiting; the leases bound them, this only must not

log = logging.getLogger(__name__)


def parse_args() -> argparse.Namespace:
    """The command line; the device comes by the environment (common/gpu/choose.py)."""
    p = argparse.ArgumentParser(prog="python -m producer", description=__doc__)
    p.add_argument("--run", type=Path, required=True, help="the run folder")
    p.add_argument("--name", default=f"producer-{os.getpid()}", help="in logs, status and ledger")
    p.add_argument(
        "--connect",
        metavar="tcp://HOST:PORT",
        help="where the trainer listens, instead of what RUN/endpoint.json says",
    )
    p.add_argument(
        "--data-root",
        action="append",
        metavar="DIR",
        help="where a source's clips lie on this machine; once per source",
    )
    return p.parse_args()


def main(stop: Stop) -> None:
    """Open the run, prove the device, serve batches."""
    args = parse_args()
    logs.setup(args.name)
    run = RunFolder(args.run)
    run.prove()
    status = StatusFile(run.path, args.name, "producer")
    stop.at_exit(status.finish)
    trace.begin(run.path, args.name, stop)
    if args.data_root:
        run.manifest = Manifest.open(run.path / "manifest.sqlite", args.data_root)
    with stop.at_once():
        device = open_device(run.config) if run.trains_networks else "none"
    status.update(device=device, phase="connecting")

    client = LeaseClient(
        endpoint_of(run, args.connect),
        run.run_id,
        args.name,
        run.config.producers.leases,
        keys=client_keys(run, args.connect, stop),
    )
    pool = DecodePool(decode_threads(run.config), DECODE_QUEUE, stop.is_set)
    service = Service(
        client,
        lambda stage: make_stage(run, stage),
        pool,
        stop.is_set,
        data_roots=tuple(map(str, run.manifest.roots)) if run.trains_networks else (),
        report=lambda phase, batches: status.update(
            phase=phase, batches=batches, stage_name=service.stage
        ),
        over=Over(run.path),
    )
    try:
        with in_words(lambda: device, lambda: f"after {status.value.batches} batches"):
            log.info("leaving: %s", service.run())
    except ChannelError as e:
        raise BadInput(str(e)) from e
    finally:
        client.close()
        pool.close()


class Over:
    """() → why no trainer will come any more, "" while one may. The reason: the run's trainer has
    reported the end and left, and nobody else is at work there.
    """

    def __init__(self, run: Path, clock: Callable[[], float] = time.monotonic):
        self._run, self._clock, self._asked_at = run, clock, -math.inf

    def __call__(self) -> str:
        now = self._clock()
        if now - self._asked_at < ASK_S:
            return ""
        self._asked_at = now
        return "the run is over" if run_is_over(self._run) else ""


def open_device(config: Config) -> str:
    """Take and prove the environment's device; return its label. Imports TensorFlow."""
    from common.gpu.device import prove_device
    from producer.batches.features import configure_tensorflow

    info = prove_device(
        intra_threads=config.threads.producer_intra, inter_threads=config.threads.producer_inter
    )
    configure_tensorflow(config)
    return info.label


def make_stage(run: RunFolder, stage: str) -> Maker:
    """The maker of a stage's batches. BadInput: no such stage, or its inputs are missing."""
    if stage not in STAGES:
        raise BadInput(
            f"the trainer asks for stage '{stage}', this producer knows {', '.join(STAGES)}; both"
            " must have the same version"
        )
    return load(run.spec(stage).maker)(run)


def endpoint_of(run: RunFolder, connect: str | None):
    """() → the trainer's endpoint, None while there is none.

    A damaged file is no reason to end: on the trainer's host its content follows from the run, and
    the next trainer writes it again.
    """
    told = False

    def read() -> Endpoint | None:
        nonlocal told
        try:
            return Endpoint.read(run.endpoint_file)
        except ChannelError as e:
            if not told:
                log.warning("%s", e)
            told = True
            return expected(run)

    def look() -> Endpoint | None:
        found = read()
        if connect is None:
            return found
        return Endpoint(connect) if found is None else dataclasses.replace(found, address=connect)

    return look


def expected(run: RunFolder) -> Endpoint | None:
    """The endpoint that the run's settings and keys imply; None: they do not tell."""
    try:
        address = listening_address(run.config.transport.bind, run.path)
        if address.startswith("ipc://"):
            return Endpoint(address)
        if address.endswith(":*"):
            return None
        server = KeyPair.load(run.path / "keys" / "server.json")
        return Endpoint(connectable(address), server.public)
    except ChannelError:
        return None


def client_keys(
    run: RunFolder, connect: str | None, stop: Stop, wait_s: float = KEYS_WAIT_S
) -> KeyPair | None:
    """The producers' key pair; None on one host.

    The trainer writes it before it listens, so wait for a missing one.

    Raises:
        RunError: there is none after `wait_s`. BadInput: it is not a key pair. Stopped.
    """
    path = run.path / "keys" / "client.json"
    if (connect or run.config.transport.bind).startswith("ipc"):
        return None
    began, told = time.monotonic(), False
    while not os.path.lexists(path):
        if stop.is_set():
            raise Stopped(f"stopped while waiting for {path}")
        if time.monotonic() - began > wait_s:
            raise RunError(
                f"{path} is not there after {wait_s:g} s: the trainer writes it when it first"
                f" listens; start the trainer, or see {run.path / 'logs' / 'trainer.log'}"
            )
        if not told:
            log.info("waiting %g s at most for %s, which the trainer writes", wait_s, path)
        told = True
        time.sleep(min(0.2, wait_s))
    try:
        return KeyPair.load(path)
    except KeyFileError as e:
        raise BadInput(str(e)) from e


def decode_threads(config: Config) -> int:
    """Number of threads that read files: as set, else this producer's share of the cores."""
    return config.producers.decode_threads or min(
        MAX_DECODE_THREADS, max(1, cores() // max(1, config.producers.count))
    )


if __name__ == "__main__":
    run_main(main)
