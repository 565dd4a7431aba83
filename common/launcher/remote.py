"""Producers on another host: the command bundle, and what `launch.py producer --bundle` does before
its process starts. Loads no TensorFlow.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common.data.manifest import Manifest
from common.launcher import flags
from common.run import bundle
from common.run.bundle import Bundle
from common.run.folder import RunFolder
from common.run.settings import Config
from common.system.errors import OK, BadInput
from common.transport.address import ChannelError, Endpoint, check_address
from common.transport.keys import KeyFileError, KeyPair
from common.transport.links import DealerLink

BUNDLE_FLAGS: dict[str, dict] = {
    "--out": {"metavar": "F", "help": "the file to write (RUN.bundle)"}
}
PRODUCER_FLAGS: dict[str, dict] = {
    "--gpu": {
        "metavar": "X",
        "help": (
            "index, UUID or cpu (default: as the run's producers; with --bundle: this host's first"
            " GPU)"
        ),
    },
    "--bundle": {
        "metavar": "F",
        "help": "on another host: the file that `launch.py bundle` wrote on the trainer's host",
    },
    "--connect": {"metavar": "tcp://H:P", "help": "with --bundle: where the trainer listens"},
    "--data-root": {
        "metavar": "D",
        "action": "append",
        "help": (
            "with --bundle: the corpus folder on this host; give it once per corpus, or one folder"
            " that holds them all"
        ),
    },
    "--work": {
        "metavar": "DIR",
        "help": (
            "with --bundle: folder for logs and cached codes (default: xtts-<run> beside the"
            " bundle)"
        ),
    },
    "--wait": {
        "metavar": "S",
        "type": float,
        "help": "with --bundle: seconds to wait for the trainer (60)",
    },
}
_ONLY_WITH_BUNDLE = ("connect", "data_root", "work", "wait")
_WAIT_S = 60.0
_CHECKED_CLIPS = 50_000  # each costs a look at the disk, which may be a network's
_HANDSHAKES = 3  # failures before a warning: one may just mean that a trainer leaves


def write_bundle(run_dir: Path, out: str | None, tell: Callable[[str], None]) -> int:
    """The command bundle: write one and say how to use it. BadInput: as `bundle.write`."""
    bundle.refuse_unpacked(run_dir)
    run = RunFolder(run_dir)
    path = Path(out) if out else run_dir.with_name(f"{run_dir.resolve().name}.bundle")
    about = bundle.write(run, path)
    host, _, port = run.config.transport.bind.removeprefix("tcp://").rpartition(":")
    here = socket.gethostname() if host in ("0.0.0.0", "[::]", "*") else host
    tell(
        f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB). Whoever holds it can connect to this"
        " run's trainer: keep it like a key"
    )
    roots = list(dict.fromkeys(about.roots))
    tell(f"the other host needs under D the same audio files as here under {', '.join(roots)}")
    if len(roots) > 1:
        tell(
            "give --data-root once for each of these folders, in this order, or one D that holds"
            " them under their names"
        )
    tell(
        f"there: python launch.py producer --bundle {path.name} --connect tcp://{here}:{port}"
        " --data-root D"
    )
    if host in ("localhost", "[::1]") or host.startswith("127."):
        tell(
            f"transport.bind={run.config.transport.bind} is an address of this host only: others"
            f" need a tunnel, or tcp://0.0.0.0:{port}"
        )
    if not about.has_dvae and any(run.spec(stage).needs_dvae for stage in run.stages):
        tell(
            "stage 1 has not ended: this bundle serves stage 1 only; make another one when stage 1"
            " has ended"
        )
    return OK


@dataclass(frozen=True)
class Remote:
    """A producer of this host for a trainer on another."""

    config: Config  # the run's, with this host's folder and devices
    prefix: str  # of the producer's name
    argv: tuple[str, ...]  # arguments of `python -m producer`, besides the run folder and the name
    endpoint: Endpoint
    keys: KeyPair
    wait_s: float

    def wait_for_trainer(self, tell: Callable[[str], None]) -> None:
        """Return when the trainer lets this host in.

        BadInput, with the cause: after `wait_s`, or at once where waiting cannot help.
        """
        where, link = self.endpoint.address, DealerLink(keys=self.keys)
        again = "make the bundle again with `launch.py bundle` on the trainer's host"
        start, failed, told = time.monotonic(), 0, False
        try:
            link.connect(self.endpoint)
            while (waited := time.monotonic() - start) < self.wait_s and failed < _HANDSHAKES:
                _, changes = link.receive(min(0.2, self.wait_s))
                if "connected" in changes:
                    return
                if "refused" in changes:
                    raise BadInput(
                        f"the trainer at {where} does not let this bundle's key in: the run has"
                        f" other keys now; {again}"
                    )
                failed += changes.count("misunderstood")
                if waited > 2 and not told:
                    told = True
                    tell(f"waiting for the trainer at {where}, {self.wait_s:.0f} s at most")
        finally:
            link.close(0)
        if failed:
            raise BadInput(
                f"what listens at {where} is not the trainer of this bundle's run: another run's,"
                f" or the run was begun anew ({again}), or no trainer at all (correct --connect)"
            )
        raise BadInput(
            f"no trainer answers at {where} ({_why_silent(where)}): is it running, with"
            " transport.bind=tcp://0.0.0.0:PORT, and does a firewall let this host through?"
        )


def _why_silent(address: str) -> str:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), 3).close()
    except OSError as e:
        return e.strerror or str(e)
    return "something accepts connections there but does not answer"


def open_bundle(args: argparse.Namespace) -> Remote | None:
    """What `launch.py producer --bundle` needs, checked before it connects to anything; None
    without --bundle.

    Raises:
        BadInput: flags that exclude each other, a bundle that cannot be used, or another corpus
        than the run's.
    """
    _check_flags(args)
    if args.bundle is None:
        return None
    opened = Bundle.open(Path(args.bundle))
    work = Path(args.work or opened.path.parent / f"xtts-{opened.about.run_id[:12]}").absolute()
    run = opened.unpack(work)
    roots = [os.path.abspath(root) for root in args.data_root]
    with Manifest.open(work / "manifest.sqlite", roots) as manifest:
        _check_clips(manifest, opened.about.roots)
    endpoint = opened.endpoint(args.connect)
    endpoint.write(run.endpoint_file)
    try:
        keys = KeyPair.load(work / "keys" / "client.json")
    except KeyFileError as e:
        raise BadInput(str(e)) from e
    prefix = "producer-" + (re.sub(r"[^A-Za-z0-9-]+", "-", socket.gethostname())[:40] or "remote")
    argv = ("--connect", args.connect, *(part for root in roots for part in ("--data-root", root)))
    return Remote(
        here(run.config, work),
        prefix,
        argv,
        endpoint,
        keys,
        _WAIT_S if args.wait is None else args.wait,
    )


def _check_flags(args: argparse.Namespace) -> None:
    """BadInput: flags that exclude each other, or a malformed address."""
    given = [
        f"--{name.replace('_', '-')}"
        for name in _ONLY_WITH_BUNDLE
        if getattr(args, name) is not None
    ]
    if args.bundle is None:
        if given:
            raise BadInput(
                f"{', '.join(given)}: only with --bundle; with --run, a producer finds its trainer"
                " and its clips by itself"
            )
        return
    others = [*flags.overrides(args), *(["--config"] if args.config else [])]
    if others:
        raise BadInput(
            f"{', '.join(others)}: --bundle brings the run and its settings; leave it out"
        )
    if args.connect is None or args.data_root is None:
        raise BadInput(
            "--bundle needs --connect tcp://HOST:PORT (the trainer) and --data-root DIR (the corpus"
            " on this host)"
        )
    try:
        check_address(args.connect, curve=True)
    except ChannelError as e:
        raise BadInput(f"--connect {e}") from e
    if not args.connect.startswith("tcp://") or args.connect.endswith(":*"):
        raise BadInput(
            f"--connect {args.connect}: expected tcp://HOST:PORT, where HOST is the trainer's host"
            " as seen from here"
        )


def here(config: Config, work: Path) -> Config:
    """A run's settings with this host's folder and devices: the run's GPUs are on its own host, and
    no trainer uses one of this host's. Producers that compute on a CPU there do so here too.
    """
    on_cpu = config.data_gpu == "cpu" or (config.devices == "auto" and not config.jit)
    places = {"run": str(work), "data_gpu": "cpu" if on_cpu else None, "model_gpu": "cpu"}
    return config.model_copy(
        update={**places, "samples": config.samples.model_copy(update={"device": "cpu"})}
    )


def _check_clips(manifest: Manifest, old_roots: list[str]) -> None:
    """BadInput: the audio files are not the ones that were scanned for the run: one is missing or
    has another size.

    Of more than 50 000 utterances, only evenly spaced ones are checked.
    """
    missing, other, looked_at = [], [], 0
    for path, size in manifest.files(-(-len(manifest) // _CHECKED_CLIPS)):
        looked_at += 1
        try:
            info = os.stat(path)
        except OSError:
            missing.append(path)
            continue
        if not stat.S_ISREG(info.st_mode) or not os.access(path, os.R_OK):
            missing.append(path)
        elif info.st_size != size:
            other.append(path)
    stands = {
        new: f"{new} stands for {old} of the trainer's host"
        for new, old in zip(manifest.roots, old_roots, strict=True)
    }
    for paths, what in (
        (missing, "are missing or cannot be read"),
        (other, "have another size than in the run's corpus"),
    ):
        if paths:
            names = ", ".join(map(str, paths[:3])) + (", …" if len(paths) > 3 else "")
            where = (
                f"{'; '.join(stands.values())}; copy the corpus as it is, or correct --data-root"
            )
            raise BadInput(f"{len(paths)} of {looked_at} audio files {what}: {names} ({where})")
