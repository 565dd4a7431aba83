"""Every process of a run: its command, device and environment."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from common.gpu import choose
from common.gpu.choose import Device, Devices
from common.gpu.xla_env import cache_folder, xla_env
from common.launcher.child import ProcessSpec, Program
from common.launcher.page import MOST_S, PageKeeper
from common.run.settings import Config
from common.system.errors import BadInput

ROOT = Path(__file__).resolve().parents[2]


def make_program(config: Config, run_dir: Path, devices: Devices) -> Program:
    """Every process of a run, its device and its environment.

    The trainer first: the producers connect to it.
    """
    run_dir = run_dir.resolve()
    trainer = ProcessSpec(
        name="trainer",
        role="trainer",
        argv=(sys.executable, "-m", "trainer", "--run", str(run_dir)),
        env=environment(devices.trainer, cache_folder(run_dir, "trainer")),
        device=str(devices.trainer),
        log=run_dir / "logs" / "trainer.log",
        main=True,
        by_steps=True,
        grace_s=10.0,
        save_s=30.0,
        lock=run_dir / "lock",
    )
    on = devices.producers
    producers = (
        producer_spec(f"producer-{i}", run_dir, on[i % len(on)])
        for i in range(config.producers.count)
    )
    speaks = sampler_specs(config, run_dir, devices.sampler)
    followers = (
        follower_spec(trainer, rank, device)
        for rank, device in enumerate(devices.followers[: config.trainers.count - 1], 1)
    )
    besides = (*producers, *speaks, *logger_specs(config, run_dir))
    return Program(run_dir, (trainer, *followers, *besides))


def follower_spec(
    trainer: ProcessSpec, rank: int, device: Device, alone: bool = False
) -> ProcessSpec:
    """One more trainer: takes its part of each step's batches from the first, and sums gradients
    with all others. `alone`: the first one is another launcher's, so this one is started again by
    itself.
    """
    run_dir, name = trainer.log.parent.parent, f"trainer-{rank}"
    return ProcessSpec(
        name=name,
        role="follower",
        argv=(*trainer.argv, "--rank", str(rank)),
        env=environment(device, cache_folder(run_dir, name)),
        device=str(device),
        log=trainer.log.with_name(f"{name}.log"),
        grace_s=trainer.grace_s,
        main=alone,
        by_steps=alone,
        leader="" if alone else trainer.name,
    )


def producer_spec(name: str, run_dir: Path, device: Device) -> ProcessSpec:
    """A producer: leases batch numbers at the address in RUN/endpoint.json, and sends
    batches there.
    """
    return ProcessSpec(
        name=name,
        role="producer",
        argv=(sys.executable, "-m", "producer", "--run", str(run_dir), "--name", name),
        env=environment(device, cache_folder(run_dir, name)),
        device=str(device),
        log=run_dir / "logs" / f"{name}.log",
    )


def sampler_specs(config: Config, run_dir: Path, device: Device) -> tuple[ProcessSpec, ...]:
    """The process that makes samples while the run trains; none if the settings ask for no
    samples before the run's end.
    """
    if not config.sample_every:
        return ()
    return (
        ProcessSpec(
            name="sampler",
            role="sampler",
            argv=(sys.executable, "-m", "trainer.previews.sampler", "--run", str(run_dir)),
            env=environment(device, cache_folder(run_dir, "sampler")),
            device=str(device),
            log=run_dir / "logs" / "sampler.log",
            optional=True,
            leave_s=60.0,  # at the run's end, to finish its current work
        ),
    )


def logger_specs(config: Config, run_dir: Path) -> Iterator[ProcessSpec]:
    """A process for each service that curves go to. BadInput: its package is not installed."""
    for name in config.loggers:
        if importlib.util.find_spec(name) is None:
            raise BadInput(f"loggers: {name} is not installed; pip install 'xtts-trainer[{name}]'")
        argv = (sys.executable, "-m", "trainer.loggers", "--run", str(run_dir), "--to", name)
        log = run_dir / "logs" / f"{name}.log"
        yield ProcessSpec(
            name, "logger", argv, log, environment(Device("cpu")), optional=True, leave_s=60.0
        )


def page_of(program: Program) -> PageKeeper:
    """The keeper of the run's page; its process needs no device."""
    argv = (sys.executable, "-m", "trainer.page", "--run", str(program.run_dir))
    deadline = ("--deadline", f"{MOST_S:.0f}")
    return PageKeeper(program.run_dir, (*argv, *deadline), environment(Device("cpu")))


def environment(device: Device, xla_cache: Path | None = None) -> dict[str, str | None]:
    """A child's environment: its one device, XLA's settings for it, and this project importable
    whatever the working directory contains.
    """
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
    return {
        **choose.child_env(device, os.environ),
        **xla_env(os.environ, device, xla_cache),
        "PYTHONPATH": path,
        "PYTHONSAFEPATH": "1",
    }
