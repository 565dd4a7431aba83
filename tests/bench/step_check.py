"""`tests.bench.step --check`: the fast operations against plain float32, on this device.

First the fused kernel's own check; then the gradient of every tensor: ‖fast − plain‖ / ‖plain‖, the
worst ten, for bfloat16 with the fast operations. With `--check both`, for bfloat16 with the plain
ones as well, so that rounding and mistakes can be told apart. Without dropout, at batch 4.
"""

from __future__ import annotations

import numpy as np

LIMIT = 0.02


def check(layers: int, size: str, both: bool) -> int:
    """Print both comparisons; 0 if every tensor of the first is within LIMIT."""
    import tensorflow as tf

    from common.xtts.attention_check import why_not
    from tests.bench.step import ROWS, build
    from tests.bench.step_rows import PLAIN, with_plain_attention

    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)
    reason = why_not()
    _say(f"fused attention: {'works' if reason is None else reason}")
    job = {"size": size, "layers": layers, "batch": 4, "jit": True}
    fast = {**ROWS["ours"], "dropout": 0.0}
    if reason is not None:
        fast = with_plain_attention(fast)
    plain = {"precision": "fp32", "operations": PLAIN, "dropout": 0.0}
    want, want_loss = _gradients(build(job, plain))
    worst = 0.0
    for name, options in (
        ("fast operations, bf16", fast),
        ("plain operations, bf16", {**plain, "precision": "bf16"}),
    )[: 1 + both]:
        got, loss = _gradients(build(job, options))
        errors = sorted(((_error(got[key], want[key]), key) for key in want), reverse=True)
        total = np.sqrt(
            sum(np.sum((got[k] - want[k]) ** 2) for k in want)
            / sum(np.sum(want[k] ** 2) for k in want)
        )
        _say(
            f"{name}: loss {loss:.5f} against {want_loss:.5f}; all gradients together off by"
            f" {total:.3%}; the worst tensors:"
        )
        for error, key in errors[:10]:
            _say(f"  {error:8.3%}  norm {np.linalg.norm(want[key]):.3e}  {key}")
        worst = worst or errors[0][0]
    _say(f"{'passed' if worst <= LIMIT else 'FAILED'}: worst {worst:.3%}, limit {LIMIT:.0%}")
    return int(worst > LIMIT)


def _gradients(built) -> tuple[dict[str, np.ndarray], float]:
    import tensorflow as tf

    from common.xtts.operations import use

    step, batch = built

    @tf.function(jit_compile=True, autograph=False)
    def run():
        with use(step.operations):
            _, losses, gradients = step.gradients(batch, None)
        return losses[0], gradients

    loss, gradients = run()
    return {
        t.key: g.numpy().astype(np.float64)
        for t, g in zip(step.optimizer.tensors, gradients, strict=True)
    }, float(loss)


def _error(got: np.ndarray, want: np.ndarray) -> float:
    norm = np.linalg.norm(want)
    return float(np.linalg.norm(got - want) / norm) if norm > 0 else float(np.linalg.norm(got) > 0)


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201
