"""Runs of the real networks, as small as they get, on the CPU; what they come to, to the bit."""

from __future__ import annotations

from pathlib import Path

from common.run.folder import RunFolder
from trainer import stages
from trainer.history import ledger
from trainer.history.checkpoint import Checkpoints

STEPS = 12


def tiny_tree(folder: Path, corpus: Path, num_producers: int = 1) -> dict:
    """Settings of a run in `folder`."""
    return {
        "run": str(folder / "run"),
        "devices": "auto",
        "data_gpu": "cpu",
        "model_gpu": "cpu",
        "data": {"train": str(corpus), "eval_fraction": 0.2},
        "text": {"vocab_size": 96},
        "model": {"size": "tiny", "layers": 1},
        "batching": {"batch_size": 2, "buckets": 1},
        "train": {
            "max_steps": STEPS,
            "accumulate": 2,
            "eval_every": 5,
            "save_every": 4,
            "log_every": 4,
            "optim": {"learning_rate": 1e-3},
        },
        "dvae": {
            "max_steps": 4,
            "batch_size": 4,
            "crop_frames": 32,
            "eval_every": 0,
            "save_every": 2,
        },
        # Fixed, whatever this machine has: the number of threads decides the bits.
        "threads": {
            "trainer_intra": 2,
            "trainer_inter": 2,
            "producer_intra": 1,
            "producer_inter": 1,
        },
        "producers": {"count": num_producers},
        "samples": {"count": 0},
    }


def result(run: RunFolder) -> list:
    """Folded ledgers and the bytes of the final weights and moments, of both stages."""
    out = []
    for stage in run.stages:
        files = stages.files_of(run, stage)
        lines = ledger.fold(ledger.read(files.ledger))
        found = Checkpoints(files.checkpoints, 9).load_latest(None)
        tensors = {
            (part, k): v.tobytes() for part in found.tensors for k, v in found.tensors[part].items()
        }
        out.append(
            ([(x["step"], x["g"], x["count"], x["digest"], x["loss"]) for x in lines], tensors)
        )
    return out


def assert_equal(got: list, want: list) -> None:
    """Two runs' `result`s."""
    for stage, (g, w) in enumerate(zip(got, want, strict=True)):
        assert g[0] == w[0], f"stage {stage + 1}: the ledger differs"
        differs = [k for k in w[1] if g[1].get(k) != w[1][k]]
        assert not differs, (
            f"stage {stage + 1}: {len(differs)} of {len(w[1])} tensors differ: {differs[:5]}"
        )
