"""Which run and which settings a command line refers to."""

from __future__ import annotations

import argparse
from pathlib import Path

from common.launcher import flags
from common.run import recorded_settings
from common.run import settings as config
from common.run.bundle import refuse_unpacked
from common.run.settings import Config
from common.run.settings_text import as_yaml
from common.system.errors import BadInput

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def settings_file(args: argparse.Namespace) -> Path:
    """--config; without it, the settings of the run that is named, if it exists, else those for a
    corpus of one's own, from nothing or from weights, else the demo's.
    """
    if args.config:
        return Path(args.config)
    settings = flags.overrides(args)
    run_dir = _named_run(settings)
    if run_dir is not None and (run_dir / "identity.json").is_file():
        return run_dir / "config.yaml"
    own = any(s.startswith(("data.train=", "data={")) for s in settings)
    weights = any(s.startswith("model.weights=") for s in settings)
    return CONFIGS / (
        "demo.yaml" if not own else "finetune_xtts.yaml" if weights else "ljspeech.yaml"
    )


def config_of(args: argparse.Namespace) -> Config:
    """The settings with the command line's changes.

    BadInput: as of `recorded_settings.load`.
    """
    return recorded_settings.load(settings_file(args), flags.overrides(args))


def run_dir_of(args: argparse.Namespace) -> Path:
    """The run folder that a command refers to: --run, run=…, or the config file's.

    BadInput: the command line has other settings.
    """
    settings = flags.overrides(args)
    others = [s for s in settings if not s.startswith("run=")]
    if others:
        raise BadInput(f"{', '.join(others)}: this command only takes the run folder")
    return _named_run(settings) or config_of(args).run_dir


def existing_run(args: argparse.Namespace) -> tuple[Config, list[str]]:
    """An existing run's settings with overrides, and the keys among these that its processes
    must receive. BadInput: no such run.
    """
    settings = flags.overrides(args)
    run_dir = _named_run(settings) or recorded_settings.load(settings_file(args)).run_dir
    refuse_unpacked(run_dir)
    if not (run_dir / "identity.json").is_file():
        raise BadInput(f"{run_dir} is not a run folder (no identity.json); --run names it")
    rest = [s for s in settings if not s.startswith("run=")]
    of = recorded_settings.load(run_dir / "config.yaml", [*rest, f"run={as_yaml(str(run_dir))}"])
    return of, [s.split("=")[0] for s in rest if not s.startswith(("model_gpu=", "data_gpu="))]


def _named_run(settings: list[str]) -> Path | None:
    """The folder of --run or run=…"""
    tree: dict = {}
    for s in settings:
        if s.startswith("run="):
            config.set_override(tree, s)
    return config.parse(tree).run_dir if tree else None
