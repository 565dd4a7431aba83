"""Microseconds of a block's four matrix products with their gradients, in bfloat16 and in FP8.

    python -m tests.bench.fp8_products [--rows 12960] [--width 1024] [--json FILE]

Each program has several products in a row, each with its own tensors, as a step has; an elementwise
function makes each x and each gradient, so that what FP8 adds (rounding, largest magnitudes,
transposes) can go into a fusion as it does there. Forward alone, and with all gradients: in FP8
that of x, or that of the weight, too.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

# name → (fields of `Fp8`, with gradients)
WAYS = {
    "bf16, forward": (None, False),
    "fp8, forward": ({}, False),
    "bf16": (None, True),
    "fp8, dgrad": ({}, True),
    "fp8, dgrad, wgrad": ({"wgrad": True}, True),
}
_COPIES, _REPEATS = 4, 20


def main() -> int:
    """Command line."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--rows", type=int, default=32 * 405)
    p.add_argument("--width", type=int, default=1024)
    p.add_argument("--json", type=Path)
    args = p.parse_args()
    from common.gpu.choose import Device
    from common.gpu.xla_env import xla_env

    os.environ.update(xla_env(os.environ, Device("gpu")))
    import tensorflow as tf

    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)
    c = args.width
    shapes = {"qkv": (c, 3 * c), "attention": (c, c), "up": (c, 4 * c), "down": (4 * c, c)}
    found = {}
    _say(f"| product | {' | '.join(WAYS)} |")
    _say("|---" * (1 + len(WAYS)) + "|")
    for name, shape in shapes.items():
        found[name] = [_measured(tf, name, args.rows, shape, *way) for way in WAYS.values()]
        _say(f"| {name} | {' | '.join(f'{us:.0f}' for us in found[name])} |")
        if args.json:
            args.json.write_text(json.dumps(found))
    return 0


def _measured(tf, name, num_rows: int, shape, options: dict | None, gradients: bool) -> float:
    """µs of one product, in a program that has several."""
    parts = 3 if name == "qkv" else 1
    product = _product(tf, shape, parts)
    program = tf.function(
        _program(tf, product, options, gradients), jit_compile=True, autograph=False
    )

    def noise(shape, dtype, std=1.0):
        made = [tf.random.stateless_normal(shape, [i, 3]) * std for i in range(_COPIES)]
        return [tf.cast(m, dtype) for m in made]

    given = (
        noise([num_rows, shape[0]], tf.bfloat16),
        [noise([num_rows, shape[1] // parts], tf.bfloat16) for _ in range(parts)],
        noise(shape, tf.float32, 0.02),
        tf.constant([64.0, 4096.0, 8192.0]),
    )
    for _ in range(2):
        tf.nest.flatten(program(*given))[0].numpy()
    began = time.perf_counter()
    for _ in range(_REPEATS):
        out = program(*given)
    tf.nest.flatten(out)[0].numpy()
    return 1e6 * (time.perf_counter() - began) / _REPEATS / _COPIES


def _product(tf, shape: tuple[int, int], parts: int):
    from common.xtts.layers import HFConv1D, Module
    from common.xtts.operations import current
    from common.xtts.shaping import KindsOutside, merge_heads

    class Product(Module):
        def __init__(self):
            super().__init__("product", "mixed_bfloat16")
            self.layer = HFConv1D(*shape, name="layer", dtype="mixed_bfloat16")

        def call(self, x):
            x = tf.nn.relu(x)
            if parts == 1:
                return [self.layer(x)]
            heads = KindsOutside(max(1, shape[0] // 64))
            outputs = current().qkv(x[tf.newaxis], self.layer, heads)
            return [merge_heads(y)[0] for y in outputs]

    return Product()


def _program(tf, product, options: dict | None, gradients: bool):
    from keras import StatelessScope

    from common.xtts.fast_operations import FastOperations
    from common.xtts.operations import use
    from trainer.step.contract import Fp8
    from trainer.step.fp8 import Scaled, in_fp8, scaled

    layer = product.layer
    operations = (FastOperations if options is None else in_fp8(FastOperations))(jit=True)

    def one(x, ds, weight, scales):
        layers = {} if options is None else {id(layer): Scaled(weight, scales, Fp8(**options))}
        wrt = [x, weight, layer.bias.value] + ([] if options is None else [scales])
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(wrt)
            with StatelessScope([(layer.weight, weight)]), scaled(layers):
                outputs = product(x)
        return tape.gradient(outputs, wrt, [tf.nn.relu(d) for d in ds]) if gradients else outputs

    def run(xs, ds, weights, scales):
        with use(operations):
            each = zip(xs, zip(*ds, strict=True), weights, strict=True)
            return [one(x, of_x, weight, scales) for x, of_x, weight in each]

    return run


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
