"""Trainers on several hosts: which of them this command is, by its flags or by what a cluster says,
and a further trainer under a supervisor of its own. Loads no TensorFlow.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from common.gpu import choose
from common.gpu.listing import Listing
from common.launcher import flags, resolve
from common.launcher.child import Program
from common.launcher.flags import switch
from common.launcher.program import follower_spec, make_program
from common.run import recorded_settings
from common.run.settings import Config, set_override
from common.run.settings_text import as_yaml
from common.system import lock
from common.system.errors import BadInput

TRAINER_FLAGS: dict[str, dict] = {
    "--replace": switch("take over from the running trainer, which saves first"),
    "--rank": {
        "metavar": "N",
        "type": int,
        "help": "with trainers.bind: start trainer N (from 1) of the run on this host",
    },
    "--slurm": switch("with trainers.bind, under srun: start the trainer that Slurm's task is"),
    "--tf-config": switch("with trainers.bind: start the trainer that TF_CONFIG names"),
}
WAIT_S = 600.0  # for the first host to create the run, or to change its settings
_LOOK_S = 0.5


def rank_of(args: argparse.Namespace, env: Mapping[str, str]) -> int | None:
    """Which of several trainers a command line starts; None: it does not say.

    BadInput: flags that exclude each other, an environment without what it is asked for, or another
    number of trainers than the settings have.
    """
    given = {
        "--replace": args.replace,
        "--rank": args.rank is not None,
        "--slurm": args.slurm,
        "--tf-config": args.tf_config,
    }
    named = [name for name, is_given in given.items() if is_given]
    if len(named) > 1:
        raise BadInput(f"{' and '.join(named)} exclude each other: give one")
    if args.rank is not None:
        return _checked(args)
    if not args.slurm and not args.tf_config:
        return None
    (rank, count), source = (
        (of_slurm(env), "Slurm") if args.slurm else (of_tf_config(env), "TF_CONFIG")
    )
    trainers = resolve.config_of(args).trainers
    if count != trainers.count:
        raise BadInput(
            f"{source} has {count} tasks, and trainers.count is {trainers.count}: each task is one"
            f" trainer, so start {trainers.count} tasks, or set trainers.count={count}"
        )
    if trainers.bind is None and count > 1:
        raise BadInput(
            "trainers.bind is not set: the trainers of other hosts have to find the first one; set"
            " trainers.bind=tcp://HOST:PORT, where HOST is the host of task 0"
        )
    return rank


def _checked(args: argparse.Namespace) -> int:
    if args.rank < 1:
        raise BadInput(
            f"--rank {args.rank}: further trainers count from 1; trainer 0 is the one that"
            " `launch.py` starts with the run, on the first host"
        )
    keys = (setting.split("=")[0] for setting in flags.overrides(args))
    others = [key for key in keys if key not in ("run", "model_gpu")]
    if others:
        raise BadInput(
            f"{', '.join(others)}: trainer {args.rank} takes the run's settings as they are; set"
            " them on the first host"
        )
    return args.rank


def of_slurm(env: Mapping[str, str]) -> tuple[int, int]:
    """(rank, number of trainers) by Slurm's variables, those that tf.distribute's
    SlurmClusterResolver reads: importing that would load TensorFlow. BadInput: not under srun.
    """
    rank = env.get("SLURM_PROCID", "")
    count = env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS", "")
    if not (rank.isdigit() and count.isdigit() and int(rank) < int(count)):
        raise BadInput(
            f"--slurm: SLURM_PROCID is {rank or 'not set'} and SLURM_NTASKS"
            f" {count or 'not set'}: start this command by srun, as docs/slurm.md shows"
        )
    return int(rank), int(count)


def of_tf_config(env: Mapping[str, str]) -> tuple[int, int]:
    """(rank, number of trainers) by TF_CONFIG, where a chief comes before the workers. BadInput:
    it is not set, or names no such task.
    """
    text = env.get("TF_CONFIG", "")
    shown = (
        '{"cluster": {"worker": ["host0:1", "host1:1"]}, "task": {"type": "worker", "index": 0}}'
    )
    try:
        told = json.loads(text)
        tasks = [
            (k, i) for k in ("chief", "worker") for i in range(len(told["cluster"].get(k, [])))
        ]
        task = told["task"]["type"], int(told["task"]["index"])
        return tasks.index(task), len(tasks)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BadInput(
            f"--tf-config: TF_CONFIG is {text[:200] or 'not set'}; expected {shown}, with this"
            " host's own task"
        ) from None


def further_trainer(
    args: argparse.Namespace,
    rank: int,
    list_gpus: Callable[[], Listing],
    tell: Callable[[str], None],
    supervise: Callable[[Program, tuple[str, ...]], int],
) -> int:
    """Start trainer `rank` of a run alone, and see it through; returns the exit code.

    BadInput: another command has started it, or there is no such run in time.
    """
    folder = resolve.config_of(args).run_dir
    config = wait_for_run(folder, rank, tell)
    name = f"trainer-{rank}"
    (folder / "status").mkdir(exist_ok=True)
    advice = f"trainer {rank} of this run is started already; stop it first, or give another --rank"
    with lock.lock(folder / "status" / f"{name}.lock", name, advice):
        devices = choose.choose_gpus(here(config, _asked(args)), list_gpus(), os.environ)
        first = make_program(config, folder, devices).processes[0]
        spec = follower_spec(first, rank, devices.trainer, alone=True)
        return supervise(Program(folder.resolve(), (spec,)), devices.notes)


def _asked(args: argparse.Namespace) -> str | None:
    """The device that the command line names."""
    tree: dict = {}
    for setting in flags.overrides(args):
        if setting.startswith("model_gpu="):
            set_override(tree, setting)
    return tree.get("model_gpu")


def here(config: Config, asked: str | None) -> Config:
    """A run's settings with this host's devices for a further trainer: no producer or sampler of
    the run is here. It computes on a GPU where the first one does.
    """
    on_cpu = config.model_gpu == "cpu" or (config.devices == "auto" and not config.jit)
    places = {
        "devices": config.devices if on_cpu else "gpu",
        "data_gpu": "cpu",
        "model_gpu": asked or ("cpu" if on_cpu else None),
    }
    return config.model_copy(
        update={**places, "samples": config.samples.model_copy(update={"device": "cpu"})}
    )


def wait_for_run(
    folder: Path, rank: int, tell: Callable[[str], None], wait_s: float = WAIT_S
) -> Config:
    """The settings of a run, once it has a trainer `rank` on another host; as long as its launcher
    creates it, this waits, too. BadInput: it has none within `wait_s`.
    """
    told, since = "", time.monotonic()
    while True:
        config, why = _settings(folder, rank)
        if config is not None:
            return config
        if lock.holder(folder / "prepare.lock") is not None:
            since = time.monotonic()
        if time.monotonic() - since > wait_s:
            raise BadInput(f"{why}, and that has not changed in {wait_s:.0f} s")
        if why != told:
            told = why
            tell(f"waiting, {wait_s:.0f} s at most: {why}")
        time.sleep(_LOOK_S)


def _settings(folder: Path, rank: int) -> tuple[Config | None, str]:
    """(settings, "") of a run with a trainer `rank` on another host; (None, why it is none yet)."""
    start = "start it on the first host with trainers.bind=tcp://HOST:PORT"
    if not (folder / "identity.json").is_file():
        return None, f"{folder} is no run (no identity.json): {start}, on a shared file system"
    own = [f"run={as_yaml(str(folder))}"]
    config = recorded_settings.load(folder / "config.yaml", own)
    if config.trainers.bind is None:
        return None, f"{folder} is a run of one host: {start}"
    if rank >= config.trainers.count:
        return None, (
            f"{folder} has {config.trainers.count} trainers, 0 to {config.trainers.count - 1}, and"
            f" no trainer {rank}: {start} trainers.count={rank + 1}"
        )
    return config, ""
