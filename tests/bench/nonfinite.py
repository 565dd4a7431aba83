"""Which gradients were not finite, and by which operations: for a run that ended after `N steps in
a row were not finite`.

    python -m tests.bench.nonfinite --run RUN [--steps 3]
        [--ways "as trained|plain attention|…"] [--json FILE]

Takes the weights of the newest checkpoint (which those steps did not change), makes the batches of
the last skipped steps again, and computes their gradients on this device: with the operations that
the run trains with, with each fast one replaced by its plain form, and in plain float32. Per way:
the loss, the gradients' norm, and the tensors whose gradients are not finite. What is not finite
everywhere lies in the data or the weights; what is finite with one operation replaced lies in that
operation. Without skipped steps: the last ones.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from tests.bench.step_rows import ATTENTION, LEAN, LONG_SUMS

ALL = (*ATTENTION, *LEAN, *LONG_SUMS, "dropout", "lookup", "qkv", "residual_dtype")
# Which of the run's own operations are plain (and the precision), each alone.
WAYS: dict[str, dict] = {
    "as trained": {},
    "plain attention": {"plain": ATTENTION},
    "not lean": {"plain": LEAN},
    "stateless dropout": {"plain": ("dropout",)},
    "embedding by matmul": {"plain": ("lookup",)},
    "joint qkv": {"plain": ("qkv",)},
    "all plain": {"plain": ALL},
    "all plain, fp32": {"plain": ALL, "compute_dtype": "float32"},
}


def skipped_batches(run, steps: int) -> list:
    """The planned batches of the last `steps` steps that the ledger says were skipped; of the last
    ones, if none was.
    """
    from trainer import stages
    from trainer.history import ledger

    lines = ledger.fold(ledger.read(stages.files_of(run, "gpt").ledger))
    chosen = ([line for line in lines if line.get("skipped")] or lines)[-steps:]
    plan = run.plan("gpt", "train")
    return [plan.batch(g) for line in chosen for g in range(line["g"], line["g"] + line["count"])]


def made_again(run, planned: list) -> list[dict[str, np.ndarray]]:
    """The batches' arrays, as a producer makes them."""
    from producer.batches.decode import DecodeError, decode
    from producer.batches.gpt import GptMaker

    def samples(clip):
        try:
            return decode(clip.utterance.path, clip.start, clip.num_samples)
        except DecodeError as e:
            return e

    maker, arrays = GptMaker(run), []
    with ThreadPoolExecutor(8) as pool:
        for p in planned:
            clips = maker.clips(p)
            arrays.append(maker.make(p, clips, list(pool.map(samples, clips))).arrays)
    return arrays


def gradients_of(stage, state: dict, way: dict, batches: list[tuple]) -> list[dict]:
    """Per (planned batch, arrays): loss, gradient norm, the largest gradient and weight, and the
    tensors with a gradient not finite.
    """
    import tensorflow as tf

    from common.xtts.operations import Operations, mixed, use
    from trainer.step.gpt import GptStep

    options = stage.step.options
    options = replace(
        options,
        operations=mixed(type(options.operations), Operations, *way.get("plain", ()))(),
        compute_dtype=way.get("compute_dtype", options.compute_dtype),
        init_seed=None,
    )
    step = GptStep(stage.step.dims, options, stage.step.buckets)
    step.load_state_dict(state)
    names = [t.key for t in step.optimizer.tensors]

    def traced(batch, seed):
        with use(step.operations):
            _, losses, gradients = step.gradients(batch, seed)
        wide = [tf.cast(g, tf.float32) for g in gradients]
        return (
            losses,
            tf.stack([tf.reduce_all(tf.math.is_finite(g)) for g in wide]),
            tf.stack([tf.reduce_sum(tf.square(g)) for g in wide]),
        )

    function, found = tf.function(traced, jit_compile=options.jit, autograph=False), []
    for planned, arrays in batches:
        losses, finite, squares = (
            x.numpy()
            for x in function(
                step._inputs(planned.bucket, arrays), tf.constant(planned.seed, tf.int32)
            )
        )
        bad = [name for name, ok in zip(names, finite, strict=True) if not ok]
        norm = math.sqrt(float(squares[finite].sum()))
        found.append(
            {"g": planned.g, "loss": float(losses[0]), "norm_of_finite": norm, "not_finite": bad}
        )
    return found


def largest_weights(state: dict, count: int = 5) -> list[tuple[str, float]]:
    """The tensors with the largest entries."""
    most = sorted(((float(np.abs(v).max()), k) for k, v in state["model"].items()), reverse=True)
    return [(k, round(v, 3)) for v, k in most[:count]]


def main() -> int:
    """Command line."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--run", type=Path, required=True)
    p.add_argument("--steps", type=int, default=3)
    p.add_argument("--ways", default="|".join(WAYS), help="names separated by '|'")
    p.add_argument("--json", type=Path)
    args = p.parse_args()
    names = [n.strip() for n in args.ways.split("|")]
    if unknown := [n for n in names if n not in WAYS]:
        p.error(f"no way {', '.join(map(repr, unknown))}; there are: {' | '.join(WAYS)}")
    from common.gpu.device import prove_device
    from common.run.folder import RunFolder

    run = RunFolder(args.run)
    threads = run.config.threads
    prove_device(intra_threads=threads.trainer_intra, inter_threads=threads.trainer_inter)
    from producer.batches.features import configure_tensorflow
    from trainer import stages
    from trainer.history.checkpoint import Checkpoints
    from trainer.step.precision import allow_tf32

    planned = skipped_batches(run, args.steps)
    configure_tensorflow(run.config)
    arrays = made_again(run, planned)
    stage = stages.build(run, "gpt")
    restored = Checkpoints(stage.files.checkpoints, run.config.train.keep).load_latest(None)
    if restored is None:
        raise SystemExit(f"{stage.files.checkpoints}: no checkpoint")
    allow_tf32(run.config)
    out, results = Console(width=None if sys.stdout.isatty() else 160, markup=False), {}
    out.print(f"weights of {restored.path.name}; the largest: {largest_weights(restored.tensors)}")
    table = Table(
        "operations", "batch", "loss", "norm of the finite gradients", "tensors not finite"
    )
    for name in names:
        try:
            found = gradients_of(
                stage, restored.tensors, WAYS[name], list(zip(planned, arrays, strict=True))
            )
        except Exception as e:  # noqa: BLE001 - one way that this device cannot compute must not hide the others
            results[name] = {"error": f"{type(e).__name__}: {str(e)[:300]}"}
            table.add_row(name, "", results[name]["error"])
            continue
        results[name] = found
        for r in found:
            bad = r["not_finite"]
            text = (
                "none"
                if not bad
                else f"{len(bad)}: {', '.join(bad[:4])}{' …' if len(bad) > 4 else ''}"
            )
            table.add_row(name, str(r["g"]), f"{r['loss']:.4f}", f"{r['norm_of_finite']:.4g}", text)
        if args.json:
            args.json.write_text(json.dumps(results, indent=1))
    out.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
