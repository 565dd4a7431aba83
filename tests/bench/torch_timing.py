"""How the PyTorch rows of `tests.bench.step` are timed.

Imports nothing of the project: Coqui's row runs without it on its path.
"""

import statistics
import time
from collections.abc import Callable

import torch


def timed(once: Callable[[], torch.Tensor], steps: int, batch: int, model: torch.nn.Module) -> dict:
    """A row: the median of five blocks of steps, each ended by waiting for the last loss.

    `once` makes a step and returns its loss; the
    first, which compiles, and three more come before the clock."""
    began = time.perf_counter()
    first = once().item()
    compile_s = time.perf_counter() - began
    for _ in range(3):
        once().item()
    blocks, size = [], max(1, steps // 5)
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(size):
            last = once()
        last.item()
        blocks.append(1e3 * (time.perf_counter() - start) / size)
    ms, gpu = statistics.median(blocks), torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if gpu else "CPU",
        "torch": torch.__version__,
        "ms": round(ms, 2),
        "ms_range": [round(min(blocks), 2), round(max(blocks), 2)],
        "utterances_per_s": round(1e3 * batch / ms, 1),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if gpu else 0.0,
        "compile_s": round(compile_s, 1),
        "loss": [round(first, 4), round(last.item(), 4)],
        "parameters": sum(p.numel() for p in model.parameters()),
    }
