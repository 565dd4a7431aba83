"""`python -m trainer --run RUN`: takes the run's lock, binds, leases batches, trains every stage from where it stands, and leaves."""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from pathlib import Path

from common import logs
from common.address import ChannelError, Endpoint, ipc_address
from common.channel import LeaseServer
from common.errors import BadInput, RunError
from common.keys import KeyFileError, run_keys
from common.lifecycle import Stop, run_main
from common.lock import lock
from common.run import RunFolder
from common.status import StatusFile
from trainer import stages
from trainer.feed import Feed, Quarantine
from trainer.loop import Loop, restore
from trainer.observe import Observer

log = logging.getLogger(__name__)


def parse() -> argparse.Namespace:
    """The command line."""
    p = argparse.ArgumentParser(prog="python -m trainer", description=__doc__)
    p.add_argument("--run", required=True, type=Path)
    return p.parse_args()


def main(stop: Stop) -> None:
    """Every step of a trainer's life."""
    args = parse()
    logs.setup("trainer")
    run = RunFolder(args.run)
    held = lock(args.run / "lock", "trainer", advice=f"`launch.py trainer --run {args.run} --replace` takes over from it")
    status = StatusFile(args.run, "trainer", "trainer")
    stop.at_exit(status.finish)
    try:
        _set_up_device(run, status)
        server = _bind(run)
        try:
            for name in run.stages:
                if name == "dvae" and run.dvae_weights.is_file():
                    continue
                train_stage(run, name, server, status, stop)
            _samples(run, status, stop)
        except BaseException:
            server.close(drain_s=0.0, stop_producers=False)  # they stay warm for the next trainer
            raise
        status.update(phase="done")
        server.close(drain_s=3.0)
    finally:
        held.release()


def _set_up_device(run: RunFolder, status: StatusFile) -> None:
    """Threads, memory and determinism before TensorFlow does any work; prove the device with real operations."""
    if run.arithmetic:
        return
    from common.device import prove_device

    t = run.config.threads
    status.update(phase="opening the device")
    info = prove_device(intra_threads=t.trainer_intra, inter_threads=t.trainer_inter)
    import tensorflow as tf

    if run.config.deterministic:
        tf.config.experimental.enable_op_determinism()
    log.info("training on %s", info.label)
    status.update(device=info.label)


def _bind(run: RunFolder) -> LeaseServer:
    """The channel's end, with its address in RUN/endpoint.json."""
    t = run.config.transport
    curve = t.bind != "ipc"
    try:
        keys = run_keys(run.path)[0] if curve else None
        address = t.bind if curve else ipc_address(run.path)
        events = _events(run.path) if os.environ.get("XTTS_CHANNEL_LOG") else {}
        server = LeaseServer(
            address,
            run.run_id,
            t.high_water_mark,
            capacity=run.config.producers.leases,
            lease_ttl_s=run.config.producers.lease_ttl_s,
            keys=keys,
            **events,
        )
    except (ChannelError, KeyFileError) as e:
        raise BadInput(str(e)) from e
    Endpoint(server.endpoint, server.public_key, os.getpid()).write(run.endpoint_file)
    log.info("listening at %s, window %d", server.endpoint, t.high_water_mark)
    return server


def _events(folder: Path) -> dict:
    """Every lease, delivery and release as a line of RUN/channel.jsonl (XTTS_CHANNEL_LOG=1): what the invariants are checked from."""
    out = open(folder / "channel.jsonl", "a", buffering=1)

    def on_event(kind: str, **fields) -> None:
        out.write(json.dumps({"kind": kind, "time": time.time(), **fields}, default=str) + "\n")

    return {"on_event": on_event}


def train_stage(run: RunFolder, name: str, server: LeaseServer, status: StatusFile, stop: Stop) -> None:
    """Train one stage from its newest checkpoint to its end."""
    folder = run.stage_folder(name)
    folder.mkdir(exist_ok=True)
    stage = stages.build(run, name)
    checkpoints, book, position = restore(stage.files, run.config.train.keep, stage.step, run.identity, run.dims.to_dict())
    schedule = stage.schedule
    window = run.config.transport.high_water_mark
    observer = Observer(
        folder, status, stage=(stage.number, name), total_steps=schedule.total_steps, log_every=run.config.train.log_every, window=window
    )
    quarantine = Quarantine(position.quarantine)
    plans = {"train": schedule.train, "eval": schedule.eval}

    def planned(plan: str, g: int):
        return plans[plan].batch(g)

    def extra(plan: str, g: int) -> dict:
        if not len(quarantine):
            return {}
        ids = quarantine.of(planned(plan, g))
        return {"quarantined": ids} if ids else {}

    feature_hash = run.feature_hash(name)
    generation = run.next_generation()
    welcome = {"stage": name, "feature_hash": feature_hash}
    server.open(generation, welcome, schedule.batches(position), Acceptance(feature_hash, bool(run.config.deterministic)), extra)
    log.info("stage %s, generation %d: steps %d to %d", name, generation, position.step + 1, schedule.total_steps)
    feed = None
    try:
        if position.step < schedule.total_steps:
            wait_ready(server, run, schedule, observer, stop)
        feed = Feed(
            server,
            plan_of=planned,
            spec_of=stages.spec_of(run, stage),
            to_device=stage.to_device,
            quarantine=quarantine,
            data_timeout_s=run.config.transport.data_timeout_s,
            should_stop=stop.is_set,
        )
        loop = Loop(
            stage.step,
            schedule,
            position,
            feed,
            server,
            checkpoints=checkpoints,
            book=book,
            quarantine=quarantine,
            quarantine_file=stage.files.quarantine,
            observer=observer,
            identity=run.identity,
            dims=run.dims.to_dict(),
            stop=lambda: stop.cause or None if stop.is_set() else None,
            max_bad_steps=run.config.train.max_bad_steps,
            score=stages.SCORES[stage.kind],
            saving=stop.saving,
        )
        loop.run()
        if name == "dvae":
            stages.publish_dvae(run, stage.step.state_dict()["model"])
    finally:
        if feed is not None:
            feed.close()
        book.close()
        observer.close()


class Acceptance:
    """Which producers may make batches: those with the run's features and, where bits must be equal, the same device arithmetic."""

    def __init__(self, feature_hash: str, deterministic: bool):
        self.feature_hash, self.deterministic = feature_hash, deterministic
        self._probe: str | None = None
        self._warned = False

    def __call__(self, info: dict) -> str | None:
        """None, or why the producer is refused."""
        if info.get("feature_hash") != self.feature_hash:
            return "its features are not this run's (config, vocabulary, statistics, DVAE or code differ): start it from this run's folder"
        probe = info.get("probe")
        if self._probe is None:
            self._probe = probe
        if probe == self._probe:
            return None
        if self.deterministic:
            return "its device computes other bits than the first producer's, and the run is deterministic: use the same kind of device"
        if not self._warned:
            log.warning(
                "producer %s computes slightly other features than the first one: ids and crops match, bits do not", info.get("name")
            )
            self._warned = True
        return None


def wait_ready(server: LeaseServer, run: RunFolder, schedule, observer: Observer, stop: Stop) -> None:
    """Step 1 begins when `min_ready` batches wait. RunError: none came within `data_timeout_s`."""
    wanted = min(run.config.transport.min_ready, run.config.transport.high_water_mark, schedule.train.batches_per_epoch)
    deadline = time.monotonic() + run.config.transport.data_timeout_s
    while (ready := server.ready_count()) < wanted:
        if stop.is_set():
            raise stop.error()
        peers = len(server.stats()["peers"])
        if time.monotonic() > deadline:
            raise RunError(
                f"no data for {run.config.transport.data_timeout_s:.0f} s, {peers} producers connected at {server.endpoint}; "
                f"see RUN/logs/producer-*.log, or start one with `launch.py producer --run {run.path}`"
            )
        observer.waiting(ready, wanted, peers)
        time.sleep(0.02)


def _samples(run: RunFolder, status: StatusFile, stop: Stop) -> None:
    """Sound and pictures of what was learnt."""
    if run.arithmetic or stop.is_set():
        return


if __name__ == "__main__":
    run_main(main, saves=True)
