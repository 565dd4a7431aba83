"""`python -m trainer --run RUN`: takes the run's lock, binds, leases batches, trains every stage
from its last step on, and leaves.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from common.run import published, recorded_settings
from common.run.folder import RunFolder
from common.system import logs, trace
from common.system.errors import BadInput, Stopped
from common.system.lifecycle import Stop, begin_anew, run_main
from common.system.lock import Lock, lock
from common.system.status import StatusFile
from common.transport.address import ChannelError, Endpoint, listening_address
from common.transport.doorkeeper import raise_file_limit
from common.transport.keys import KeyFileError, run_keys
from common.transport.lease_records import Rules
from common.transport.server import LeaseServer
from trainer import follow, profile, stages
from trainer.finale import finish, leave_summary
from trainer.history.checkpoint import ReadEarly
from trainer.history.stage_history import check_ended
from trainer.lead import Lead
from trainer.opening import device_in_words, set_up_device
from trainer.session import train_stage

log = logging.getLogger(__name__)

_TRACED = ("open", "lease", "data", "deliver")  # events of the channel that a trace tells of


def parse() -> argparse.Namespace:
    """The command line."""
    p = argparse.ArgumentParser(prog="python -m trainer", description=__doc__)
    p.add_argument("--run", required=True, type=Path)
    p.add_argument("--rank", default=0, type=int)
    return p.parse_args()


def main(stop: Stop) -> int | None:
    """Every step of a trainer's life."""
    args = parse()
    if args.rank:
        return follow.main(args.run, args.rank, stop)
    logs.setup("trainer")
    raise_file_limit()
    run = RunFolder(args.run)
    # Repair nothing before this process is the run's only trainer.
    held = lock(
        args.run / "lock",
        "trainer",
        advice=f"`launch.py trainer --run {args.run} --replace` takes over from it",
    )
    status = StatusFile(args.run, "trainer", "trainer")
    stop.at_exit(status.finish)
    try:
        early = ReadEarly(stages.files_of(run, _next_stage(run)).checkpoints)
        prove(run)
        lead = Lead.of(run, _next_stage(run), status, stop)
        # Several trainers tell each other why they leave.
        with stop.at_once() if lead is None else nullcontext():
            set_up_device(run, status, lead.connect if lead else lambda: None)
        server = _bind(run, stop)
        try:
            for name in run.stages:
                if _has_ended(run, name):
                    continue
                lead = lead or Lead.of(run, name, status, stop)
                try:
                    with device_in_words(status, stages.files_of(run, name).checkpoints):
                        stage = train_stage(
                            run, name, server, status, stop, lead, early.load_folder
                        )
                except Stopped:
                    if stop.cause == "stop" and profile.free_steps() is None:
                        leave_summary(run, status, stop)
                    raise
                if lead is not None:
                    lead = lead.end("all steps are trained")
                if name != run.stages[-1] and run.trains_networks:
                    server.close(drain_s=0.0, stop_producers=False)
                    _begin_next_stage(args.run, held, stop)
            if profile.free_steps() is None:
                finish(run, stage, status, stop)
        except BaseException as e:
            if lead is not None:
                lead.end(str(e), e)
            server.close(drain_s=0.0, stop_producers=False)  # they stay warm for the next trainer
            raise
        status.update(phase="done")
        server.close(drain_s=3.0)
        return None
    finally:
        held.release()


def _has_ended(run: RunFolder, name: str) -> bool:
    """Whether a stage's result is there. A profile run makes one up."""
    if not run.spec(name).publishes:
        return False
    if profile.free_steps() is not None and not run.dvae_weights.is_file():
        profile.untrained_dvae(run)
    if run.dvae_weights.is_file():
        log.info(
            "stage 1 has ended: %s stays as it is, whatever dvae.max_steps says now",
            run.dvae_weights,
        )
        return True
    return False


def _next_stage(run: RunFolder) -> str:
    """The first stage that has not ended."""
    ended = {n for n in run.stages if run.spec(n).publishes and run.dvae_weights.is_file()}
    return next(n for n in run.stages if n not in ended)


def prove(run: RunFolder) -> None:
    """Check that every file that decides what is trained is as it was written, or restore it; and
    that the ledger of an ended stage is complete.

    BadInput: a check fails.
    """
    recorded_settings.mend(run.proof, run.config)
    published.mend(run)
    run.prove(trains=True)
    for name in run.stages:
        ended = run.spec(name).publishes and run.dvae_weights.is_file()
        if ended and profile.free_steps() is None:
            check_ended(stages.files_of(run, name))


def _begin_next_stage(run: Path, held: Lock, stop: Stop) -> None:
    """Restart in the same process: while it compiled this stage, TensorFlow took device memory that
    it does not give back.
    """
    stop.check()
    log.info("the next stage begins in a fresh process, with all of the device's memory")
    begin_anew(stop, ["-m", "trainer", "--run", str(run)], held.keep())


def _bind(run: RunFolder, stop: Stop) -> LeaseServer:
    """Open the trainer's end of the channel, with its address in RUN/endpoint.json."""
    trace.begin(run.path, "trainer", stop)
    t = run.config.transport
    told = _listener(run.path)
    mine: list[Endpoint] = []

    def on_event(kind: str, **fields) -> None:
        if kind == "peer_lost" and mine:  # a producer that comes in its place reads the file
            _keep(mine[0], run.endpoint_file)
        told(kind, **fields)

    try:
        keys = run_keys(run.path)[0] if t.bind.startswith("tcp://") else None
        address = listening_address(t.bind, run.path)
        server = LeaseServer(
            address,
            run.run_id,
            t.high_water_mark,
            rules=Rules(
                lease_ttl_s=run.config.producers.lease_ttl_s,
                start=max(t.min_ready, t.high_water_mark // 2),
            ),
            keys=keys,
            max_frame_bytes=stages.largest_array(run),
            on_event=on_event,
        )
    except (ChannelError, KeyFileError) as e:
        raise BadInput(str(e)) from e
    mine.append(Endpoint(server.endpoint, server.public_key, os.getpid()))
    mine[0].write(run.endpoint_file)
    log.info("listening at %s, window %d", server.endpoint, t.high_water_mark)
    return server


def _keep(mine: Endpoint, file: Path) -> None:
    """Make sure that `file` says where we listen, whatever has happened to it."""
    try:
        if Endpoint.read(file) == mine:
            return
    except (ChannelError, OSError) as e:
        log.warning("%s; written anew", e)
    try:
        mine.write(file)
    except OSError as e:
        log.warning("%s cannot be written: %s", file, e.strerror)


def _listener(folder: Path) -> Callable[..., None]:
    """With XTTS_CHANNEL_LOG=1, writes every lease, delivery and release as a line of
    RUN/channel.jsonl, to check the channel's invariants; any other value names the file.
    """
    wanted = os.environ.get("XTTS_CHANNEL_LOG")
    file = folder / "channel.jsonl" if wanted == "1" else wanted
    out = open(file, "a", buffering=1) if file else None

    def on_event(kind: str, **fields) -> None:
        if kind in _TRACED:
            at, about = fields["t"], {k: fields[k] for k in ("plan", "g", "peer") if k in fields}
            trace.span("channel", kind, at, at, **about)
        if out is not None:
            out.write(json.dumps({"kind": kind, "time": time.time(), **fields}, default=str) + "\n")

    return on_event


if __name__ == "__main__":
    run_main(main, saves=True)
