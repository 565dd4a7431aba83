"""An interrupted arithmetic run whose files are damaged one by one, and what becomes of it: the
same weights in the end, or a refusal.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from common.run import bundle, recorded_settings
from common.run.folder import RunFolder
from common.system.errors import RunError, Stopped
from common.system.lifecycle import Stop
from common.transport.address import Endpoint, ipc_address
from common.transport.keys import KeyFileError, KeyPair, run_keys
from producer.__main__ import endpoint_of
from producer.creation.prepare import prepare_run
from tests.support.arithmetic_maker import ArithmeticMaker
from tests.support.arithmetic_runs import STEP_KEYS, Expected, arithmetic_run, outcome, replay
from tests.support.arithmetic_step import ArithmeticStep
from tests.support.loop_runs import train
from trainer.__main__ import prove
from trainer.history import ledger
from trainer.stages import files_of

SMALL = {
    "train__max_steps": 8,
    "train__save_every": 2,
    "train__eval_every": 4,
    "dvae__max_steps": 4,
    "dvae__save_every": 2,
    "dvae__eval_every": 2,
}
_STAGE_2 = 4 + 5  # updates until the stop: all of stage 1, and five of stage 2
BUNDLE = "run.bundle"
_NOT_READ = ("logs", ".", "cache")


@dataclass(frozen=True)
class Case:
    """An interrupted run and one of another seed, and what they have to come to."""

    run: Path
    whole: Path  # a copy of the run
    other: Path
    want: dict[str, Expected]

    def restore(self) -> None:
        """The run as it was interrupted."""
        shutil.rmtree(self.run)
        shutil.copytree(self.whole, self.run)

    def files(self) -> list[str]:
        """All files, within the folder, that anything reads."""
        names = (str(p.relative_to(self.whole)) for p in self.whole.rglob("*") if p.is_file())
        return sorted(n for n in names if not n.startswith(_NOT_READ) and "tensorboard" not in n)


def make_case(folder: Path, updates: int = _STAGE_2) -> Case:
    """A run stopped after so many updates of both stages together."""
    folders = {}
    for name, seed in (("one", 1), ("two", 2)):
        made = arithmetic_run(folder / name, num_clips=21, seed=seed, **SMALL)
        want = {stage: replay(made, stage) for stage in made.stages}
        _train_until(made, updates)
        Endpoint(ipc_address(made.path)).write(made.endpoint_file)
        run_keys(made.path)
        reachable = made.config.transport.model_copy(update={"bind": "tcp://0.0.0.0:5555"})
        made.config = made.config.model_copy(update={"transport": reachable})
        bundle.write(made, made.path / BUNDLE)
        folders[name] = made.path, want
    (run, want), (other, _) = folders["one"], folders["two"]
    shutil.copytree(run, folder / "whole")
    return Case(run, folder / "whole", other, want)


def _train_until(run: RunFolder, updates: int) -> None:
    stop, count, apply = Stop(), 0, ArithmeticStep.apply

    def counting(self):
        nonlocal count
        count += 1
        if count == updates:
            stop.request("stop", "test", 143)
        return apply(self)

    ArithmeticStep.apply = counting
    try:
        train(run, stop)
    except Stopped:
        pass
    finally:
        ArithmeticStep.apply = apply


# -- damage ----------------------------------------------------------------------------------------


def damages(case: Case, name: str, num_flips: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """(what, how) for a file of the run."""
    path, other = case.run / name, case.other / name
    size = (case.whole / name).stat().st_size
    yield "deleted", path.unlink
    if size:
        yield "truncated", lambda: os.truncate(path, size // 2)
        yield "emptied", lambda: os.truncate(path, 0)
    if other.is_file() and other.read_bytes() != (case.whole / name).read_bytes():
        yield "of another run", lambda: shutil.copyfile(other, path)
    rng = np.random.default_rng(len(name))
    for at in sorted(rng.integers(0, 8 * size, num_flips)) if size else ():
        yield f"bit {at} flipped", lambda at=int(at): flip(path, at)


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


# -- what becomes of it ----------------------------------------------------------------------------


def launched(case: Case) -> None:
    """launch.py run=RUN."""
    config = recorded_settings.load(case.run / "config.yaml", [f"run={case.run}"])
    run = prepare_run(config, on_cpu=True, cores=2, out=lambda line: None)
    _train(run)


def trainer_alone(case: Case) -> None:
    """launch.py trainer --run RUN, while producers are up."""
    run = RunFolder(case.run)
    _train(run)


def producer_alone(case: Case) -> None:
    """launch.py producer --run RUN: its batches follow the plan."""
    run = RunFolder(case.run)
    run.prove()
    for stage in run.stages:
        maker, good = ArithmeticMaker(run, stage), ArithmeticMaker(RunFolder(case.whole), stage)
        assert run.feature_hash(stage) == RunFolder(case.whole).feature_hash(stage)
        for g in range(6):
            made, right = (m.make(m.plan("train", g), [], []).arrays for m in (maker, good))
            assert all(np.array_equal(made[k], right[k]) for k in right), f"another batch {g}"
    endpoint_of(run, None)()


def _train(run: RunFolder) -> None:
    prove(run)
    train(run, num_producers=1)


MODES = {"launch": launched, "trainer": trainer_alone, "producer": producer_alone}


def keys_read(case: Case) -> None:
    """What a trainer that listens on tcp, and a producer beside it, read."""
    server, client = run_keys(case.run)
    assert client.public in server.allowed


def bundle_unpacked(case: Case) -> None:
    """launch.py producer --bundle, up to its folder: the files are the run's."""
    work = case.run / "unpacked"
    unpacked = bundle.Bundle.open(case.run / BUNDLE).unpack(work)
    whole = {RunFolder(run).run_id: run for run in (case.whole, case.other)}[unpacked.run_id]
    for name in ("identity.json", "vocab.json", "manifest.sqlite", "keys/client.json"):
        assert (work / name).read_bytes() == (whole / name).read_bytes(), name
    KeyPair.load(work / "keys" / "client.json")


KEYS = {"keys": keys_read, "bundle": bundle_unpacked}


def fate(case: Case, mode: str, modes: dict = MODES) -> str:
    """ "same weights", or the refusal's one line. AssertionError: other weights; any other error is
    a traceback for the user.
    """
    try:
        modes[mode](case)
    except (RunError, KeyFileError) as e:  # a process's edge makes a BadInput of the latter
        code = getattr(e, "exit_code", 2)
        if code not in (1, 2) or "\n" in str(e):
            raise AssertionError(f"exit {code}, not in one line: {e}") from e
        return str(e)
    if mode in ("launch", "trainer"):
        run = RunFolder(case.run)
        for stage in run.stages:
            lines = ledger.fold(ledger.read(files_of(run, stage).ledger))
            assert [{k: x[k] for k in STEP_KEYS} for x in lines] == case.want[stage].steps, (
                f"{stage}: another ledger"
            )
        assert outcome(run, "gpt").weights == case.want["gpt"].weights, "other weights"
        published = load_file(run.dvae_weights)["weights"].tobytes()
        assert case.want["dvae"].weights.startswith(published), "other weights of stage 1"
    return "same weights"
