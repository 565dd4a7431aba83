"""Runs with arithmetic in place of the networks, and what they must come to, computed straight from
the plan without any channel.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import tests.support.arithmetic  # noqa: F401 - registers the size
from common.run import settings as config
from common.run.folder import RunFolder
from common.run.proof import Proof
from common.transport import wire
from producer.batches.maker import without
from producer.creation.prepare import prepare_run
from tests.support.arithmetic_maker import ArithmeticMaker
from tests.support.arithmetic_step import ArithmeticStep
from tests.support.corpora import make_corpus
from trainer import stages
from trainer.history import ledger
from trainer.history.checkpoint import Checkpoints
from trainer.history.schedule import schedule_of

STEP_KEYS = ("step", "epoch", "g", "count", "digest")


def settings(run: Path, corpus: Path, **overrides) -> dict:
    """Settings of a small arithmetic run; `overrides` by dotted key with `__` for the dot."""
    tree = {
        "run": str(run),
        "devices": "auto",
        "data": {"train": str(corpus), "eval_fraction": 0.2},
        "text": {"vocab_size": 128},
        "model": {"size": "arithmetic"},
        "batching": {"batch_size": 4, "buckets": 2},
        "train": {
            "max_steps": 60,
            "accumulate": 3,
            "eval_every": 7,
            "save_every": 5,
            "log_every": 20,
        },
        "dvae": {
            "max_steps": 6,
            "batch_size": 5,
            "save_every": 4,
            "eval_every": 5,
            "crop_frames": 64,
        },
        "transport": {"data_timeout_s": 120.0},
    }
    for key, value in overrides.items():
        config.set_override(tree, f"{key.replace('__', '.')}={json.dumps(value)}")
    return tree


def arithmetic_run(
    tmp_path: Path, num_clips: int = 41, *, out=lambda line: None, **overrides
) -> RunFolder:
    """A prepared arithmetic run on a corpus of short clips of several lengths."""
    corpus = tmp_path / "corpus"
    if not corpus.exists():
        make_corpus(corpus, num_clips, seconds=lambda i: 0.6 + 0.05 * (i % 9))
    tree = settings(tmp_path / "run", corpus, **overrides)
    return prepare_run(config.parse(tree), on_cpu=True, cores=2, out=out)


def edit_identity(folder: Path, without: str = "", **changes) -> None:
    """Make it a run of the time before runs kept a record of their files, of another identity."""
    identity = {**Proof.read(folder).identity, **changes}
    Proof(folder, {k: v for k, v in identity.items() if k != without}).write()


@dataclass
class Expected:
    """What one stage comes to."""

    steps: list[dict]  # step, epoch, g, count, digest
    weights: bytes


def replay(run: RunFolder, stage: str, quarantined_from: dict[int, int] | None = None) -> Expected:
    """Train a stage in a plain loop over the plan: the independent answer.

    `quarantined_from`: utterance → first g of weight 0.
    """
    schedule = schedule_of(run, stage)
    maker, step = ArithmeticMaker(run, stage), ArithmeticStep()
    lines = []
    for s in range(1, schedule.total_steps + 1):
        planned = schedule.step(s)
        numbers = range(planned.first_g, planned.first_g + planned.count)
        rows = [schedule.train.num_rows(g) for g in numbers]
        digests = []
        for g, n in zip(numbers, rows, strict=True):
            batch = schedule.train.batch(g)
            out = [u for u, first in (quarantined_from or {}).items() if first <= g]
            arrays = maker.make(without(batch, out), [], []).arrays
            digests.append(wire.digest(arrays))
            step.micro(batch.bucket, arrays, batch.seed, n / sum(rows))
        step.apply()
        lines.append(
            {
                "step": s,
                "epoch": planned.epoch,
                "g": planned.first_g,
                "count": planned.count,
                "digest": ledger.combine(digests),
            }
        )
    return Expected(lines, step.weights.tobytes() + step.moment.tobytes())


def outcome(run: RunFolder, stage: str) -> Expected:
    """What the run's folder says that one stage came to."""
    files = stages.files_of(run, stage)
    lines = ledger.fold(ledger.read(files.ledger))
    found = Checkpoints(files.checkpoints, 99).load_latest(None)
    weights = (
        found.tensors["model"]["weights"].tobytes() + found.tensors["optimizer"]["moment"].tobytes()
    )
    assert found.step == lines[-1]["step"]
    return Expected([{k: line[k] for k in STEP_KEYS} for line in lines], weights)


def assert_exact(run: RunFolder) -> None:
    """The folded ledgers are exactly the plans, digests and final weights bit-equal to the plain
    loop.
    """
    for stage in run.stages:
        want, got = replay(run, stage), outcome(run, stage)
        assert got.steps == want.steps, f"{stage}: the ledger differs from the plan"
        assert got.weights == want.weights, f"{stage}: the weights differ"
