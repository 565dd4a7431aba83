"""What `tests.bench.step` measures besides steps: a checkpoint in the background, the card's matrix
products, and which of a step's are in FP8.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

import tensorflow as tf


def saved(step, once) -> dict:
    """What a checkpoint in the background costs, and whether it holds the moment: weights sampled
    on the device at that moment.
    """
    from trainer.history.checkpoint import Checkpoints
    from trainer.history.saver import Saver

    folder = Path(tempfile.mkdtemp(prefix="xtts-bench-save-"))
    try:
        saver = Saver(Checkpoints(folder, 1), contextlib.nullcontext)
        sampled = {t.key: t.variable.value[..., :4].numpy() for t in step.optimizer.tensors[-40:]}
        before = time.perf_counter()
        saver.begin(1, step.snapshot, {"best_step": None})
        slowest, steps = 0.0, 0
        while (outcome := saver.take(0.0)) is None:
            start = time.perf_counter()
            once(500 + steps)["loss"].numpy()
            slowest, steps = max(slowest, time.perf_counter() - start), steps + 1
        total = time.perf_counter() - before
        held = Checkpoints(folder, 1).load(1).tensors["model"]
        tensors = {t.key: t for t in step.optimizer.tensors}
        exact = all(
            (held[k].transpose(tensors[k].from_torch)[..., :4] == v).all()
            for k, v in sampled.items()
        )
        found = {
            "pause_ms": round(1e3 * outcome.pause_s, 1),
            "seconds": round(outcome.seconds, 2),
            "error": str(outcome.error or ""),
        }
        return {
            **found,
            "steps_meanwhile": steps,
            "ms_per_step": round(1e3 * total / steps, 1),
            "slowest_ms": round(1e3 * slowest, 1),
            "exact": exact,
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def ceiling(n: int) -> dict:
    """TFLOP/s of bf16 products: a large square one, and those of a GPT block's forward pass at
    batch 32.
    """

    def rate(m: int, k: int, n: int, repeat: int = 20) -> float:
        a = tf.cast(tf.random.stateless_normal([m, k], [1, 2]), tf.bfloat16)
        b = tf.cast(tf.random.stateless_normal([k, n], [3, 4]), tf.bfloat16)
        tf.matmul(a, b)
        tf.reduce_sum(tf.matmul(a, b)).numpy()
        start = time.perf_counter()
        for _ in range(repeat):
            c = tf.matmul(a, b)
        c[0, 0].numpy()
        return round(2 * m * k * n * repeat / (time.perf_counter() - start) / 1e12, 1)

    rows = 32 * 405 if n > 4096 else 64
    shapes = {
        f"{n}^3": (n, n, n),
        "qkv": (rows, 1024, 3072),
        "proj": (rows, 1024, 1024),
        "fc": (rows, 1024, 4096),
        "down": (rows, 4096, 1024),
    }
    return {"tflops": {name: rate(*shape) for name, shape in shapes.items()}}


_TARGET = re.compile(r'custom_call_target="(__cublas[^"]*)"|=[^=]* (dot)\(')


def fp8_products(flags: str) -> dict:
    """How many products XLA made calls of cuBLASLt in FP8, by the programs that it dumped: in all,
    and each program that has some. Programs of three blocks count once, as they are compiled.
    """
    folder = re.search(r"--xla_dump_to=(\S+)", flags).group(1)
    found: Counter[str] = Counter()
    programs = {}
    for path in sorted(Path(folder).glob("*after_optimizations.txt")):
        targets = Counter(a or b for a, b in _TARGET.findall(path.read_text()))
        found += targets
        if targets["__cublas$lt$matmul$f8"]:
            programs[path.name.split(".")[0]] = dict(targets)
    return {"fp8": found["__cublas$lt$matmul$f8"], "all": sum(found.values()), "programs": programs}
