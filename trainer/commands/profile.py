"""`launch.py profile`, the launcher's side: makes a run folder of its own beside the user's, and
shows the results as tables and one sentence.

Loads no TensorFlow.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from common.data.plan import Plan, PlanRows, write_plan
from common.run import beginning, recorded_settings
from common.run.folder import RunFolder
from common.run.proof import Proof
from common.run.settings import Config
from common.system import trace as spans
from common.system.documents import read_json
from common.system.errors import OK, BadInput, RunError
from common.system.files import file_digest
from trainer import profile
from trainer.commands import trace
from trainer.sum_cost import SumCost

FEWEST_STEPS = 20
_MANY_EPOCHS = 10**6
_NEW_PLANS = (
    "seed",
    "parity",
    "data",
    "text",
    "model",
    "batching",
)  # settings that would change the plans
_LINKED = ("manifest.sqlite", "vocab.json", "mel_stats.safetensors")
_STEP_ROWS = {
    "wait": "wait for data",
    "compute": "forward and backward",
    "optimizer": "optimizer",
    "logging": "logging",
    "checkpoint": "checkpoint (its pause / save_every)",
    "total": "step, by the clock",
    "transfer": "transfer (under the step before)",
}
_BATCH_ROWS = {
    "read": "read (plan, texts)",
    "decode": "decode (all threads)",
    "resample": "resample (all threads)",
    "codes": "mel and DVAE codes",
    "mel": "conditioning mel",
    "pack": "pack rows",
    "serialise": "serialise",
    "make": "make",
    "decode_wait": "wait for decode threads",
    "device_wait": "wait for mels and codes",
    "lease_wait": "wait for leases",
}


def run(
    config: Config,
    changed: list[str] | None,
    free_steps: int,
    prepare: Callable[[Config], RunFolder],
    supervise: Callable[[RunFolder], int],
    as_json: bool,
    trace_file: Path | None = None,
) -> int:
    """Profile and print; return the exit code.

    Args:
        config: the settings of the run, or of one that does not exist yet.
        changed: the settings in which it differs from the existing run's; None: there is no such
        run.
        prepare, supervise: make a run folder, run a run's processes.
        trace_file: gets every span of every process; None: nobody wants them.

    Raises:
        BadInput: too few steps, a trace that cannot be written, or whatever `prepare` finds.
        RunError: it gave no figures.
    """
    if free_steps < FEWEST_STEPS:
        raise BadInput(f"--steps {free_steps}: measure at least {FEWEST_STEPS} steps")
    if trace_file is not None:
        trace.check(trace_file)
    cost = SumCost.read(config.run_dir) if config.trainers.count > 1 else None
    with temporary_folder(config.run_dir) as folder:
        mine = settings(config, folder, free_steps)
        existing = RunFolder(config.run_dir) if changed is not None and fits(changed) else None
        made = prepare(mine) if existing is None else borrow(existing, mine)
        without_evaluation(made)
        os.environ[profile.ASKED] = str(free_steps)
        os.environ[spans.ASKED] = "" if trace_file is None else "1"
        code = supervise(made)
        if code == OK:
            document, untold = read(folder), None
            if config.trainers.count > 1:
                document["sum"] = sum_in_words(document, cost, config.train.accumulate)
            if trace_file is not None:
                try:
                    count = trace.write(folder, trace_file)
                    document["trace"] = {"file": str(trace_file), "events": count}
                except (BadInput, RunError) as e:  # the figures took minutes: they come first
                    untold = e
            text = json.dumps(document) if as_json else view(document)
            Console(width=None if sys.stdout.isatty() else 110, soft_wrap=as_json).print(
                text, markup=False, highlight=False
            )
            if untold is not None:
                raise untold
    return code


@contextmanager
def temporary_folder(run_dir: Path) -> Iterator[Path]:
    """A folder beside the run's, on the same disk; removed afterwards, or by the next profile if
    this process is killed. BadInput: it cannot be made.
    """
    prefix = f".profile@{socket.gethostname()}-"
    try:
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        for left in run_dir.parent.glob(f"{glob.escape(prefix)}*"):
            pid = left.name.removeprefix(prefix).partition("-")[0]
            if pid.isdigit() and not psutil.pid_exists(int(pid)):
                shutil.rmtree(left, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=run_dir.parent))
    except OSError as e:
        raise BadInput(
            f"cannot make a folder for the profile beside {run_dir}: {e.strerror}"
        ) from e
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def settings(config: Config, folder: Path, free_steps: int) -> Config:
    """The run's settings for a profile of `free_steps` and the steps that wait for every call: no
    evaluation, no samples, another folder.
    """
    steps, optim = profile.all_steps(free_steps), config.train.optim
    # The learning rates of a run that goes on, with its warm-up in full.
    decay = max(optim.decay_steps or config.train.max_steps or 0, optim.warmup_steps + 1, steps)
    train = {
        "epochs": _MANY_EPOCHS,
        "max_steps": steps,
        "eval_at_epoch_end": False,
        "optim": optim.model_copy(update={"decay_steps": decay}),
    }
    train = config.train.model_copy(update=train)
    dvae = config.dvae.model_copy(
        update={"max_steps": 1}
    )  # codes of untrained weights take as long
    samples = config.samples.model_copy(update={"count": 0, "texts": []})
    alone = config.trainers.model_copy(update={"count": 1})  # a profile is that of one trainer
    parts = {"train": train, "dvae": dvae, "samples": samples, "trainers": alone, "loggers": []}
    return config.model_copy(update={"run": str(folder), **parts})


def fits(changed: list[str]) -> bool:
    """Whether a run's corpus and plans stay valid if the settings of these keys change."""
    return not any(key.split(".")[0] in _NEW_PLANS for key in changed)


def borrow(run: RunFolder, config: Config) -> RunFolder:
    """Make `config.run` a run on another run's corpus, plans, DVAE and cached codes, without that
    run's checkpoints and ledger.
    """
    folder = config.run_dir
    for name in _LINKED:
        os.symlink((run.path / name).resolve(), folder / name)
    shutil.copytree(run.path / "plan", folder / "plan")
    if run.dvae_weights.is_file():
        (folder / "dvae").mkdir()
        os.symlink(run.dvae_weights.resolve(), folder / "dvae" / run.dvae_weights.name)
    if (run.path / beginning.FOLDER).is_dir():
        os.symlink((run.path / beginning.FOLDER).resolve(), folder / beginning.FOLDER)
    (folder / "cache").mkdir()
    for codes in (run.path / "cache").glob(
        "codes-*"
    ):  # as far as it got: what the profile adds is right for both
        os.symlink(codes.resolve(), folder / "cache" / codes.name)
    proof = Proof(folder, {**run.identity, "run_id": os.urandom(16).hex()}, {})
    for name in run.proof.files or ():
        if (folder / name).is_file():
            proof.files[name] = [file_digest(folder / name)]
    recorded_settings.write(proof, config)
    return RunFolder(folder)


def without_evaluation(run: RunFolder) -> None:
    """Empty the evaluation plans: every run ends with an evaluation, which would be compiled for
    nothing.
    """
    none = np.zeros(0, np.int64)
    for stage in run.stages:
        plan = Plan.open(run.path / "plan" / stage, "eval")
        write_plan(
            run.path / "plan" / stage,
            "eval",
            PlanRows(ids=none, bucket_of=none, language=none),
            seed=plan.seed,
            sampling="fixed",
            buckets=plan.buckets,
        )
        for path in (run.path / "plan" / stage).iterdir():
            name = str(path.relative_to(run.path))
            if name in (run.proof.files or ()):
                run.proof.record(name, file_digest(path))
    run.proof.write()


def read(folder: Path) -> dict:
    """The trainer's measurements. RunError: it did not get that far."""
    path = folder / profile.FILE
    if not path.is_file():
        raise RunError(
            "the profile run ended without figures: too few steps (raise --steps), or see the"
            " messages above"
        )
    return read_json(path)


def sum_in_words(document: dict, cost: SumCost | None, accumulate: int) -> str:
    """What adding up gradients takes of a step of several trainers, each of which takes as long for
    a batch as the one that was profiled.
    """
    if cost is None:
        return (
            "this is the profile of one trainer; what several pay to add up their gradients is"
            " measured when they start: start the run with them once"
        )
    steps, per_step = document["steps"], document["batches_per_step"]
    batch_s = steps["compute"]["mean"] / per_step
    return (
        f"one trainer was profiled; {cost.advice(accumulate, batch_s, steps['optimizer']['mean'])}"
    )


def view(document: dict) -> Group:
    """Print tables of the steps and batches, the cards, and the verdict."""
    per_step = document["batches_per_step"]
    title = "each step" + (f" ({per_step:.1f} batches)" if per_step > 1 else "")
    parts = [
        _table(title, document["steps"], _STEP_ROWS),
        _table("each batch, in its producer", document["batch"], _BATCH_ROWS),
    ]
    for use in document["gpus"]:
        parts.append(
            Text(
                f"GPU {use['index']} ({', '.join(use['roles'])}): {use['percent']:.0f} % busy,"
                f" {use['memory_mb']} of {use['total_mb']} MB"
            )
        )
    if document["spare"]:
        parts.append(Text(document["spare"]))
    producers, speed = document["producers"], document["speed"]
    parts.append(
        Text(
            f"now {speed['steps_per_s']:.2f} steps/s, {speed['utterances_per_s']:.1f} utterances/s;"
            f" ceiling if data were always there {1e3 / document['ceiling_ms']:.2f} batches/s;"
            f" producers: {producers['count']}, which could make"
            f" {producers['could_make_per_s']:.2f} batches/s; {producers['needed']} needed"
        )
    )
    if "sum" in document:
        parts.append(Text(document["sum"]))
    if "trace" in document:
        t = document["trace"]
        parts.append(Text(f"trace: {t['file']} ({t['events']} events; open it in ui.perfetto.dev)"))
    return Group(*parts, Text(document["verdict"]["sentence"], style="bold"))


def _table(title: str, rows: dict[str, dict[str, float]], names: dict[str, str]) -> Table:
    table = Table(
        "ms",
        "mean",
        "± std",
        "p95",
        "n",
        title=title,
        title_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
    )
    for key, name in names.items():
        if key in rows and rows[key]["n"]:
            r = rows[key]
            table.add_row(name, *(f"{1e3 * r[k]:.2f}" for k in ("mean", "std", "p95")), str(r["n"]))
    return table
