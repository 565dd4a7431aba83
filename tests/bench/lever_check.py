"""Does each lever of the step run on this card, are its numbers right, and what does a call cost?

    python -m tests.bench.lever_check
        all of them
    python -m tests.bench.lever_check --only norm,products
        some: norm, products, fp32, call

norm: cuDNN's layer norm by types, beside XLA's. products: those of a block by cuBLAS and, switched
on while the process runs, by cuBLASLt. fp32: products in float32 under XLA's flag for cuBLASLt, and
what else may be needed for them. call: cuBLASLt as a custom call, of which XLA is expected to end
the process. What fails is a line; the rest goes on.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from common.gpu.choose import Device
from common.gpu.xla_env import xla_env
from tests.bench.owned import dies_with_me

ROWS, WIDTH = 12960, 1024  # 32 rows of 405 positions
COPIES, REPEATS = 10, 5  # calls per program, runs of it
LIMIT_S = 120.0  # of a part
LT = "--xla_gpu_enable_cublaslt=true"
FP32_FLAGS = {
    "fp32": LT,
    "fp32 whole scratch": f"{LT} --xla_disable_hlo_passes=gemm-workspace-rewriter",
}
# Errors beside float32, of the norm of what is compared: operands and results are bfloat16.
TOLERANCE = 0.01


def main() -> int:
    """Run each part in a process of its own."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--only", default="norm,products,fp32,call")
    p.add_argument("--rows", type=int, default=ROWS)
    p.add_argument("--child", help=argparse.SUPPRESS)
    p.add_argument("--skipped", type=int, default=0, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.child:
        _skipped[0] = args.skipped
        PARTS[args.child.split(" ")[0]](args.rows)
        return 0
    wanted = args.only.split(",")
    for part in ("norm", "products"):
        if part in wanted:
            _child(part, args.rows)
    others = [*(FP32_FLAGS if "fp32" in wanted else ()), *(["call"] if "call" in wanted else ())]
    for part in others:
        _child(part, args.rows)
    return 0


def _child(part: str, rows: int, skipped: int = 0) -> None:
    """Pass on what a part says; norm goes on in a new process behind the line that ended one."""
    began = time.monotonic()
    say(f"== {part}")
    with tempfile.TemporaryDirectory(prefix="xtts-levers-") as folder:
        flags = f"{os.environ.get('XLA_FLAGS', '')} {FP32_FLAGS.get(part, '')}"
        if part in FP32_FLAGS:
            flags += f" --xla_dump_to={folder} --xla_dump_hlo_as_text"
        env = {**os.environ, **xla_env({"XLA_FLAGS": flags}, Device("gpu"))}
        env["TF_CPP_MIN_LOG_LEVEL"] = "2"
        command = [sys.executable, "-m", "tests.bench.lever_check", "--child", part]
        command += ["--skipped", str(skipped), "--rows", str(rows)]
        with open(Path(folder) / "stderr", "w+") as stderr:
            child = subprocess.Popen(
                command,
                cwd=ROOT,
                env=env,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                preexec_fn=dies_with_me(),
            )
            late = threading.Timer(LIMIT_S, child.kill)
            late.start()
            said = 0
            for line in child.stdout:
                said += bool(re.match(r"  \S", line))
                say(line.rstrip())
            late.cancel()
            code = child.wait()
            stderr.seek(0)
            errors = stderr.read()
        for line in _calls(Path(folder)):
            say(line)
    say(f"  ended with {code} after {time.monotonic() - began:.0f} s")
    if code:
        say(f"  {_reason(errors)}")
    if code and part == "norm" and said:
        _child(part, rows, skipped + said)


def _reason(stderr: str) -> str:
    lines = [x.strip() for x in stderr.splitlines() if re.match(r"F0000|\S*Error|.*Check fail", x)]
    return " / ".join(lines or stderr.splitlines()[-3:])[:600]


_LT_CALL = re.compile(
    r"= (\(.*?s8\[\d+\]\S*\)) custom-call.*__cublas\$lt\$matmul.*?backend_config=(.*)"
)
_CONFIG = re.compile(r'"(selected_algorithm|autotune_workspace_size|epilogue)":"?(\w+)')


def _calls(folder: Path) -> list[str]:
    """Result shapes, algorithm and scratch space of the cuBLASLt calls that XLA dumped."""
    found = set()
    for path in folder.glob("*after_optimizations.txt"):
        for shapes, config in _LT_CALL.findall(path.read_text()):
            settings = " ".join(f"{k} {v}" for k, v in _CONFIG.findall(config))
            found.add(f"    {path.name.split('.')[1][:60]}: {shapes} {settings}")
    return sorted(found)


def say(text: str) -> None:
    """Print at once."""
    print(text, flush=True)  # noqa: T201


_skipped = [0]


def tried(name: str, function: Callable[..., object], *args) -> None:
    """One line: what the function says, or why it failed."""
    from tensorflow.errors import OpError

    if _skipped[0] > 0:
        _skipped[0] -= 1
        return
    print(f"  {name}: ", end="", flush=True)  # noqa: T201
    try:
        say(str(function(*args)))
    except (OpError, RuntimeError, ValueError, TypeError, AttributeError) as e:
        say(f"FAILED {type(e).__name__}: {' '.join(str(e).split())[:600]}")


# -- in the child ----------------------------------------------------------------------------------


def _tensorflow():
    import tensorflow as tf

    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)
    return tf


def measured(tf, function: Callable, wanted: Sequence, *args) -> str:
    """Whether `function(*args) -> tensors` is right, and ms of a call, of COPIES in a program."""
    from common.xtts.operations import Operations

    ops = Operations(jit=True)

    def repeated(*copies):
        found = []
        for given in copies:
            # One after the other.
            given = ops.together(*given, *found[-1])[: len(given)] if found else given
            found.append(list(function(*given)))
        return found  # or XLA would leave out what no one reads

    program = tf.function(repeated, jit_compile=True, autograph=False)
    # Each call has operands of its own: equal calls would be merged.
    copies = [[tf.identity(x) for x in args] for _ in range(COPIES)]
    text = error(tf, program(*copies)[0], wanted)
    tf.nest.flatten(program(*copies))[-1][:1].numpy()
    began = time.perf_counter()
    for _ in range(REPEATS):
        out = program(*copies)
    tf.nest.flatten(out)[-1][:1].numpy()
    ms = 1e3 * (time.perf_counter() - began) / REPEATS / COPIES
    return f"{text}, {ms:.4f} ms"


def compiled(tf, function: Callable, *args) -> list:
    """Its results."""
    return list(tf.function(function, jit_compile=True, autograph=False)(*args))


def error(tf, found: Sequence, wanted: Sequence) -> str:
    """The worst relative error by norm, and whether it is within the tolerance."""
    errors = []
    for f, w in zip(found, wanted, strict=True):
        f, w = (tf.cast(x, tf.float32) for x in (f, w))
        errors.append(float(tf.norm(f - w) / tf.norm(w)))
    worst = max(errors)
    of_each = " ".join(f"{e:.2%}" for e in errors)
    return f"{'right' if worst <= TOLERANCE else 'WRONG'} ({of_each})"


EPS = 1e-5


def norm(num_rows: int) -> None:
    """cuDNN's layer norm, call by call, then as the operation."""
    tf = _tensorflow()
    from common.xtts.operations import PLAIN

    x, dy = (tf.random.stateless_normal([num_rows, WIDTH], [i, 1]) for i in range(2))
    x, weight = 2 * x + 0.5, 1 + 0.1 * tf.random.stateless_normal([WIDTH], [3, 1])
    bias = 0.1 * tf.random.stateless_normal([WIDTH], [4, 1])
    with tf.GradientTape() as tape:
        tape.watch([x, weight, bias])
        y = PLAIN.layer_norm(x, weight, bias, EPS, tf.float32)
    gradients = tape.gradient(y, [x, weight, bias], dy)
    mean = tf.reduce_mean(x, -1, keepdims=True)
    scale = tf.math.rsqrt(tf.math.reduce_variance(x, -1, keepdims=True) + EPS)
    _norm_calls(tf, (x, weight, bias, dy), (y, mean, scale), gradients)
    _norm_operations(tf, (x, weight, bias, tf.cast(dy, tf.bfloat16)), [y, *gradients])


def _norm_calls(tf, given: Sequence, forward: Sequence, gradients: Sequence) -> None:
    from tests.bench.step_levers import norm_backward, norm_forward

    (x, weight, bias, dy), (_, mean, scale) = given, forward
    wide, half = tf.float32, tf.bfloat16
    for of_x, of_w, of_y in ((wide, wide, half), (wide, wide, wide), (half, half, half)):
        names = " ".join(d.name for d in (of_x, of_w, of_y))
        operands = (tf.cast(x, of_x), *(tf.cast(p, of_w) for p in (weight, bias)))
        call = functools.partial(norm_forward, eps=EPS, dtype=of_y)
        tried(f"forward, x w y {names}", measured, tf, call, forward, *operands)
    cases = ((wide, wide, half), (half, half, half), (half, wide, half), (wide, wide, wide))
    for of_x, of_w, of_dy in cases:
        names = " ".join(d.name for d in (of_x, of_w, of_dy))
        operands = (tf.cast(x, of_x), tf.cast(weight, of_w), tf.cast(dy, of_dy), mean, scale)
        call = functools.partial(norm_backward, eps=EPS)
        tried(f"backward, x w dy {names}", measured, tf, call, gradients, *operands)


def _norm_operations(tf, given: Sequence, wanted: Sequence) -> None:
    from common.xtts.fast_operations import FastOperations
    from common.xtts.operations import use
    from tests.bench.step_levers import LEVERS

    def forward(ops, x, w, b):
        with use(ops):
            return [ops.layer_norm(x, w, b, EPS, tf.bfloat16)]

    def both(ops, x, w, b, dy):
        with use(ops):
            with tf.GradientTape() as tape:
                tape.watch([x, w, b])
                y = ops.layer_norm(x, w, b, EPS, tf.bfloat16)
            return [y, *tape.gradient(y, [x, w, b], dy)]

    for name, lever in {"XLA": lambda base: base, **LEVERS}.items():
        ops = lever(FastOperations)(jit=True)
        alone, whole = functools.partial(forward, ops), functools.partial(both, ops)
        tried(f"operation, {name}, forward", measured, tf, alone, wanted[:1], *given[:3])
        tried(f"operation, {name}, both", measured, tf, whole, wanted, *given)


def products(num_rows: int) -> None:
    """A block's products by cuBLAS, then by cuBLASLt, then one in float32 by cuBLAS again."""
    tf = _tensorflow()
    from common.xtts.fast_operations import FastOperations
    from common.xtts.operations import use
    from tests.bench.step_levers import switch_flags

    ops = FastOperations(jit=True)

    def forward(x, w, b):
        return [tf.nn.bias_add(tf.matmul(x, w), b)]

    def with_gelu(x, w, b):
        with use(ops):
            up = tf.nn.bias_add(tf.matmul(x, w), b)
            return [ops.gelu_tanh(up), up]

    def of_x(d, w):
        return [tf.matmul(d, w, transpose_b=True)]

    def of_weight(x, d):
        return [tf.matmul(x, d, transpose_a=True)]

    def noise(*shape, std=1.0):
        return std * tf.random.stateless_normal(shape, [shape[-1], len(shape)])

    cases = {}
    for i, o in ((1024, 1024), (1024, 3072), (1024, 4096), (4096, 1024)):
        x, w, b, d = noise(num_rows, i), noise(i, o, std=0.02), noise(o), noise(num_rows, o)
        cases[f"{i} to {o}, bias"] = (forward, (x, w, b))
        cases[f"{i} to {o}, gradient of x"] = (of_x, (d, w))
        cases[f"{i} to {o}, gradient of weight"] = (of_weight, (x, d))
    cases["1024 to 4096, bias and GELU"] = (
        with_gelu,
        (noise(num_rows, 1024), noise(1024, 4096, std=0.02), noise(4096)),
    )
    for flag in ("", LT):
        if flag:
            tried("switched to cuBLASLt", switch_flags, LT)
        for name, (function, given) in cases.items():
            halves = [tf.cast(x, tf.bfloat16) for x in given]

            # Of the same rounded operands: what is compared is the product.
            wanted = function(*(tf.cast(x, tf.float32) for x in halves))
            library = "cuBLASLt" if flag else "cuBLAS"
            tried(f"{library}, {name}", measured, tf, function, wanted, *halves)
    tried("switched back", switch_flags, LT.replace("true", "false"))
    tf.config.experimental.enable_tensor_float_32_execution(False)
    function, given = cases["1024 to 1024, bias"]
    tried("float32 afterwards", lambda: error(tf, compiled(tf, function, *given), function(*given)))


def fp32(num_rows: int) -> None:
    """Products in float32, each in a program of its own."""
    tf = _tensorflow()
    tf.config.experimental.enable_tensor_float_32_execution(False)

    def noise(*shape):
        return 0.1 * tf.random.stateless_normal(shape, [shape[-1], len(shape)])

    def add_bias(x, w, b):
        return [tf.nn.bias_add(tf.matmul(x, w), b)]

    def of_x(d, w):
        return [tf.matmul(d, w, transpose_b=True)]

    def of_weight(x, d):
        return [tf.matmul(x, d, transpose_a=True)]

    def with_gelu(x, w, b):
        up = tf.nn.bias_add(tf.matmul(x, w), b)
        return [tf.nn.gelu(up, approximate=True), up]

    def scores(q, k):
        return [tf.einsum("bthd,bshd->bhts", q, k)]

    def mixed(p, v):
        return [tf.einsum("bhts,bshd->bthd", p, v)]

    for i, o in ((1024, 1024), (1024, 3072), (1024, 4096), (4096, 1024)):
        x, w, b, d = noise(num_rows, i), noise(i, o), noise(o), noise(num_rows, o)
        for function, given in ((add_bias, (x, w, b)), (of_x, (d, w)), (of_weight, (x, d))):
            _plain(tf, f"{i} to {o}, {function.__name__}", function, given)
    given = (noise(num_rows, 1024), noise(1024, 4096), noise(4096))
    _plain(tf, "1024 to 4096, with_gelu", with_gelu, given)
    q = noise(32, num_rows // 32, 16, 64)
    _plain(tf, "attention, scores", scores, (q, q))
    p = noise(32, 16, num_rows // 32, num_rows // 32)
    _plain(tf, "attention, mixed", mixed, (p, q))


def _plain(tf, name: str, function: Callable, given: Sequence) -> None:
    def named(*args):
        return function(*args)

    named.__name__ = re.sub(r"\W+", "_", f"product {name}")  # as in the name of XLA's dump
    tried(name, lambda: error(tf, compiled(tf, named, *given), function(*given)))


def call(num_rows: int) -> None:
    """One custom call of cuBLASLt."""
    tf = _tensorflow()
    from tests.bench.step_levers import cublaslt_product

    x, w, b = (tf.zeros(s, tf.bfloat16) for s in ([num_rows, 1024], [1024, 1024], [1024]))
    tried("custom call", lambda: str(compiled(tf, lambda *a: [cublaslt_product(*a)], x, w, b)[0]))


PARTS = {"norm": norm, "products": products, "fp32": fp32, "call": call}

if __name__ == "__main__":
    sys.exit(main())
