"""Whether the fast operations learn as well as plain float32: the losses of the same steps on the
same batches from the same weights.

    python -m tests.bench.precision --data DIR [--size xtts] [--layers N] [--steps 300]
        [--batch-size 8] [--ways bf16,fp32] [--json FILE]

The clips of DIR (a corpus in any format that `launch.py scan` reads, 32 clips are enough) are made
to batches once, with the codes of a random encoder and a codebook drawn from what it makes of these
clips; each way then trains on them over and over in a process of its own. Dropout masks are the
same everywhere, there is none in attention, so that what differs is rounding and operations alone.
Printed: the mean loss of the first and the last 20 steps, how far the last is from float32's, the
largest difference of the smoothed curves (means of 20 steps), both as a share of float32's loss or,
where that is smaller, of a twentieth of its first one, skipped steps, ms/step. Exits 1 if a last
mean is more than 1 % off, or a way fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from tests.bench.step_rows import ATTENTION, operations

ROOT = Path(__file__).resolve().parents[2]

SMOOTH = 20
LIMIT = 0.01
LEARNT = 0.05  # of the first loss; below it the clips are known by heart, and what is left is noise
FP8: dict[str, dict] = {  # fields of `Fp8`
    "fp8": {},
    "fp8 wgrad": {"wgrad": True},
    "fp8 mlp": {"products": ("up", "down")},
    "fp8 forward": {"dgrad": False},
}
WAYS = {
    "fp32": ("fp32", ("plain", ("dropout",))),
    "tf32": ("tf32", ("plain", ("dropout",))),
    "bf16": ("bf16", ("fast", ())),
    "bf16 plain attention": ("bf16", ("fast", ATTENTION)),
    **dict.fromkeys(FP8, ("fp8", ("fast", ()))),
}


def prepared(args: argparse.Namespace, folder: Path) -> int:
    """A run folder of the corpus and every batch of its first epoch, as files in `folder`.

    Returns how many batches.
    """
    from common.run import settings as config_module
    from common.run.folder import RunFolder
    from common.system.cores import cores
    from producer.creation.prepare import prepare_run

    settings = [
        f"run={json.dumps(str(folder / 'run'))}",
        f"data.train={json.dumps(args.data)}",
        f"model.size={args.size}",
        "devices=auto",
    ]
    settings += [
        f"batching.batch_size={args.batch_size}",
        "batching.buckets=1",
        "data.eval_fraction=0.04",
    ]
    config = config_module.load(ROOT / "configs" / "ljspeech.yaml", settings)
    prepare_run(config, on_cpu=True, cores=cores(), out=lambda text: print(text, file=sys.stderr))  # noqa: T201
    run = RunFolder(folder / "run")
    from tests.bench.nonfinite import made_again

    codebook_from(run)
    plan = run.plan("gpt", "train")
    planned = [plan.batch(g) for g in range(plan.batches_per_epoch)]
    for i, arrays in enumerate(made_again(run, planned)):
        np.savez(folder / f"batch{i}.npz", **arrays)
    return len(planned)


def codebook_from(run) -> None:
    """The run's DVAE: first weights, whose codebook is drawn from the encoder's outputs for the
    corpus, so that all codes are used.
    """
    import tensorflow as tf

    from common.run.published import publish
    from common.xtts.audio import DvaeMel
    from common.xtts.dvae import Dvae
    from common.xtts.weights import state_dict
    from producer.batches.decode import decode

    dvae, mel, manifest = Dvae(run.dims.dvae), DvaeMel(run.mel_stats, run.dims.audio), run.manifest
    dvae.initialise(run.config.seed)
    utterances = manifest.utterances(np.asarray(run.plan("gpt", "train").order))
    outputs = [
        dvae.encode(mel(tf.constant(decode(u.path, 0, None)[np.newaxis]))).numpy()[0]
        for u in utterances[:64]
    ]
    vectors = np.concatenate(outputs)
    rng = np.random.default_rng(0)
    chosen = vectors[
        rng.choice(
            len(vectors), run.dims.dvae.num_codes, replace=len(vectors) < run.dims.dvae.num_codes
        )
    ]
    dvae.codebook.embed.value.assign(chosen.T)
    run.dvae_weights.parent.mkdir(exist_ok=True)
    publish(run, state_dict(dvae))


def trained(args: argparse.Namespace) -> dict:
    """Losses of one way."""
    import tensorflow as tf

    from common.run.folder import RunFolder
    from trainer.step.contract import Fp8
    from trainer.step.gpt import GptStep, StepOptions

    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    kind, chosen = WAYS[args.way]
    tf.config.experimental.enable_tensor_float_32_execution(kind != "fp32")
    run = RunFolder(args.folder / "run")
    dims = run.dims if args.layers is None else run.dims.with_layers(args.layers)
    options = StepOptions(
        learning_rate=args.learning_rate,
        betas=(0.9, 0.98),
        warmup_steps=20,
        clip_norm=1.0,
        compute_dtype=(
            "mixed_bfloat16" if kind == "bf16" or (kind == "fp8" and gpus) else "float32"
        ),
        operations=operations({"operations": chosen}),
        fp8=Fp8(**FP8[args.way]) if kind == "fp8" else None,
        attention_dropout=0.0,
        mel_dtype="float16",
        jit=bool(gpus) or kind == "fp8",
    )
    step = GptStep(dims, options, run.plan("gpt", "train").buckets)
    files = [np.load(args.folder / f"batch{i}.npz") for i in range(args.batches)]
    batches = [{k: tf.identity(tf.convert_to_tensor(f[k])) for k in f.files} for f in files]
    results = []
    for i in range(args.steps):
        if i == min(10, args.steps - 1):
            results[-1]["loss"].numpy()
            began = time.perf_counter()
        results.append(step.update(0, batches[i % len(batches)], (i, 1)))
    read = [step.read(r) for r in results]
    ms = 1e3 * (time.perf_counter() - began) / max(1, args.steps - 10)
    device = (
        tf.config.experimental.get_device_details(gpus[0]).get("device_name", "GPU")
        if gpus
        else "CPU"
    )
    losses = [r["loss"] for r in read]
    return {
        "losses": losses,
        "skipped": sum(not r["finite"] for r in read),
        "ms": ms,
        "device": device,
    }


def compared(results: dict) -> list[dict]:
    """Each way against fp32."""
    rows, n = [], SMOOTH
    base = np.asarray(results.get("fp32", {}).get("losses", []))

    def smooth(x):
        return np.convolve(x, np.ones(n) / n, "valid")

    for way, r in results.items():
        if "error" in r:
            rows.append({"way": way, "error": r["error"]})
            continue
        losses = np.asarray(r["losses"])
        row = {
            "way": way,
            "first": losses[:n].mean(),
            "last": losses[-n:].mean(),
            "skipped": r["skipped"],
            "ms": r["ms"],
            "device": r["device"],
        }
        if len(base) == len(losses) and way != "fp32":
            least = LEARNT * base[:n].mean()
            row["last_off"] = (row["last"] - base[-n:].mean()) / max(base[-n:].mean(), least)
            row["curve_off"] = float(
                np.max(np.abs(smooth(losses) - smooth(base)) / np.maximum(smooth(base), least))
            )
        rows.append({k: float(v) if isinstance(v, np.floating) else v for k, v in row.items()})
    return rows


def main() -> int:
    """Command line."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--data")
    p.add_argument("--size", default="xtts", choices=("tiny", "small", "xtts"))
    p.add_argument("--layers", type=int)
    p.add_argument("--steps", type=int, default=300)
    p.add_argument("--batch-size", type=int, default=8)
    p.add_argument("--learning-rate", type=float, default=5e-6)
    p.add_argument("--ways", default="bf16,fp32")
    p.add_argument("--json", type=Path)
    p.add_argument("--way", help=argparse.SUPPRESS)
    p.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    p.add_argument("--batches", type=int, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.way:
        print(  # noqa: T201
            prepared(args, args.folder) if args.way == "batches" else json.dumps(trained(args)),
            flush=True,
        )
        return 0
    if not args.data:
        p.error("name a corpus with --data")
    args.data = str(Path(args.data).resolve())
    ways, results = args.ways.split(","), {}
    if unknown := [w for w in ways if w not in WAYS]:
        p.error(f"no way {', '.join(unknown)}; there are: {', '.join(WAYS)}")
    with tempfile.TemporaryDirectory(prefix="precision-") as name:
        folder = Path(name)
        common = [
            sys.executable,
            "-m",
            "tests.bench.precision",
            "--folder",
            str(folder),
            "--size",
            args.size,
            "--way",
        ]
        # On the CPU, and in a process of its own: the batches are the same on any machine, and
        # TensorFlow keeps what it has taken.
        prepare = [*common, "batches", "--data", args.data, "--batch-size", str(args.batch_size)]
        made = _run(prepare, {"CUDA_VISIBLE_DEVICES": "-1"})
        if made.returncode:
            raise SystemExit(f"the batches could not be made:\n{made.stderr[-2000:]}")
        batches = int(made.stdout.split()[-1])
        for way in ways:
            command = [
                *common,
                way,
                "--batches",
                str(batches),
                "--steps",
                str(args.steps),
                "--learning-rate",
                str(args.learning_rate),
            ]
            command += ["--layers", str(args.layers)] if args.layers else []
            done = _run(command, {})
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            results[way] = (
                json.loads(lines[-1])
                if lines
                else {"error": f"exit {done.returncode}: {done.stderr[-300:]}"}
            )
            if args.json:
                args.json.write_text(
                    json.dumps({"results": results, "compared": compared(results)})
                )
    return _report(args, results)


def _run(command: list[str], env: dict) -> subprocess.CompletedProcess:
    from common.gpu.choose import Device
    from common.gpu.xla_env import xla_env

    cuda = {} if "CUDA_VISIBLE_DEVICES" in env else xla_env(os.environ, Device("gpu"))
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", **cuda, **env},
        capture_output=True,
        text=True,
    )


def _report(args: argparse.Namespace, results: dict) -> int:
    table = Table(
        title=f"size {args.size}, {args.steps} steps, batch {args.batch_size}", title_justify="left"
    )
    for name in (
        "precision",
        "first 20",
        "last 20",
        "last against fp32",
        "curve against fp32",
        "skipped",
        "ms/step",
        "card",
    ):
        table.add_column(name)
    worst = 0.0
    for row in compared(results):
        if "error" in row:
            table.add_row(row["way"], row["error"])
            worst = float("inf")
            continue
        off = [f"{100 * row[k]:+.2f} %" if k in row else "" for k in ("last_off", "curve_off")]
        worst = max(worst, abs(row.get("last_off", 0.0)))
        figures = (
            f"{row['first']:.4f}",
            f"{row['last']:.4f}",
            *off,
            str(row["skipped"]),
            f"{row['ms']:.1f}",
            row["device"],
        )
        table.add_row(row["way"], *figures)
    Console(width=None if sys.stdout.isatty() else 150, markup=False).print(table)
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
