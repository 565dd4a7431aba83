"""Run folders with known clips for the producer's tests, written part by part: what is inside is
known to the last sample.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import tests.support.arithmetic  # noqa: F401 - registers the size
from common.data.buckets import Bucket, make_buckets
from common.data.manifest import EVAL, TRAIN, Manifest
from common.data.manifest_writer import ManifestWriter, NewUtterance
from common.data.plan import PlanRows, write_plan
from common.run import settings as config_module
from common.run.folder import RunFolder
from common.run.settings import Config
from common.run.stages import STAGES
from common.xtts.dims import ModelDims
from common.xtts.filterbank import log_mel_numpy
from tests.support.corpora import sine, write_wav

RUN_ID = "0123456789abcdef" * 2
STATS = np.linspace(2.0, 5.0, 80).astype(np.float32)


def settings(folder: Path, size: str = "tiny", **sections: dict) -> Config:
    """A resolved config: one thread per pool, deterministic, batches of 4."""
    tree = {
        "run": str(folder),
        "model": {"size": size},
        "batching": {"batch_size": 4, "buckets": 2},
        "dvae": {"crop_frames": 64, "batch_size": 4},
        "producers": {"leases": 2, "decode_threads": 2},
        "threads": dict.fromkeys(
            ("trainer_intra", "trainer_inter", "producer_intra", "producer_inter"), 1
        ),
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return config_module.resolve(config_module.parse(tree), on_cpu=True, cores=2)


def tokens_of(i: int) -> list[int]:
    """Text ids of utterance i."""
    return [3 + (i + k) % 40 for k in range(4 + i % 9)]


def tone(i: int, seconds: float) -> np.ndarray:
    """Utterance i: two sines, other ones for each i."""
    n = round(seconds * 22050)
    return sine(n, 200 + 37 * i, amplitude=0.4) + sine(n, 1000 + 91 * i, amplitude=0.2)


def make_run(
    folder: Path,
    lengths_s: list[float],
    *,
    size: str = "tiny",
    num_eval: int = 0,
    audio: dict | None = None,
    speakers: str = "",
    **sections,
) -> RunFolder:
    """A run over clips of the given lengths; the last `num_eval` are the evaluation set.

    An arithmetic run has no files.

    `speakers`: a letter for each clip; default: all are of speaker a.
    """
    config = settings(folder, size, **sections)
    dims = dataclasses.replace(
        config.dims, audio=dataclasses.replace(config.dims.audio, **(audio or {}))
    )
    n = len(lengths_s)
    folder.mkdir(parents=True, exist_ok=True)
    with ManifestWriter(folder / "manifest.sqlite") as m:
        (folder / "clips").mkdir(exist_ok=True)
        m.add_source(folder / "clips")
        for i, s in enumerate(lengths_s):
            path = folder / "clips" / f"c{i}.wav"
            if size != "arithmetic":
                write_wav(path, tone(i, s))
            samples = round(s * 22050)
            split = TRAIN if i < n - num_eval else EVAL
            facts = {
                "num_samples": samples,
                "source_rate": 22050,
                "source_frames": samples,
                "size": 2 * samples,
                "split": split,
            }
            words = {
                "name": f"c{i}",
                "text": "x",
                "clean": "x",
                "tokens": tokens_of(i),
                "language": "en",
                "speaker": (speakers or "a" * n)[i],
            }
            m.add_utterance(NewUtterance(source=0, path=path, **words, **facts))
    save_file({"mel_stats": STATS}, folder / "mel_stats.safetensors")
    _write_plans(folder, config, dims)
    config_module.dump(config, folder / "config.yaml")
    identity = {"run_id": RUN_ID, "dims": dims.to_dict(), "trains_dvae": True}
    (folder / "identity.json").write_text(json.dumps(identity))
    return RunFolder(folder)


def _write_plans(folder: Path, config: Config, dims: ModelDims) -> None:
    columns = Manifest.open(folder / "manifest.sqlite").columns()
    b = config.batching
    codes = -(-(columns["num_samples"] + 256 * (b.code_phases - 1)) // 1024)
    # Cut as if for batches of 1: so few clips would get one bucket.
    buckets, of = make_buckets(
        columns["num_tokens"],
        codes,
        num_buckets=b.buckets,
        batch_size=1,
        positions_per_batch=None,
        num_latents=dims.gpt.num_latents,
    )
    gpt = [dataclasses.replace(bucket, batch_size=b.batch_size) for bucket in buckets]
    frames = config.dvae.crop_frames
    shapes = {
        "gpt": (gpt, of),
        "dvae": (
            [Bucket(config.dvae.batch_size, frames, 0, frames // 4)],
            np.zeros(len(codes), np.int16),
        ),
    }
    for stage in STAGES:
        buckets, of = shapes[stage]
        for name, split, sampling in (("train", TRAIN, "epoch"), ("eval", EVAL, "fixed")):
            ids, pool = np.flatnonzero(columns["split"] == split), None
            if stage == "gpt" and b.prompt == "speaker":
                lenders = ids if name == "train" else np.arange(len(codes))
                pool = lenders, columns["speaker"][lenders]
            facts = {
                "bucket_of": of[ids],
                "language": columns["language"][ids],
                "speaker": columns["speaker"][ids],
            }
            write_plan(
                folder / "plan" / stage,
                name,
                PlanRows(ids=ids, pool=pool, **facts),
                seed=7,
                sampling=sampling,
                buckets=buckets,
            )


def write_dvae(run: RunFolder, seed: int = 1) -> None:
    """DVAE weights as stage 1 would leave them: random, the codebook about where the encoder's
    outputs are.
    """
    from common.xtts.dvae import Dvae
    from common.xtts.weights import load_state_dict, state_dict

    dvae = Dvae(run.dims.dvae)
    rng = np.random.default_rng(seed)
    state = {
        k: rng.normal(0, 1 / np.sqrt(max(1, np.prod(v.shape[1:]))), v.shape).astype(v.dtype)
        for k, v in state_dict(dvae).items()
    }
    load_state_dict(dvae, state)
    mels = [log_mel_numpy(tone(i, 1.5), 1024) / STATS for i in range(8)]
    z = (
        dvae.encode(np.stack(mels).astype(np.float32))
        .numpy()
        .reshape(-1, run.dims.dvae.codebook_dim)
    )
    # Around the encoder's outputs but not among them: steady tones give many that are nearly the
    # same, and ties would follow.
    embed = z.mean(0)[:, None] + z.std(0)[:, None] * rng.normal(
        size=(z.shape[1], run.dims.dvae.num_codes)
    )
    state["codebook.embed"] = embed.astype(np.float32)
    run.dvae_weights.parent.mkdir(exist_ok=True)
    save_file(state, run.dvae_weights)
