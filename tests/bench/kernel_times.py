"""Where a step's time on the GPU goes:

CUDA kernels by name, through TensorFlow's profiler, else through PyTorch's.

Both read CUPTI; TensorFlow's wants the CUDA 12 library by name, and PyTorch's sees all kernels of
the process.
"""

from __future__ import annotations

import glob
import gzip
import re
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

_STEPS = 3
_KINDS = (
    ("attention", r"fmha|flash|sdpa|cudnn"),
    ("matrix products", r"gemm|cutlass|xmma|nvjet|cublas|dot"),
    ("reductions", r"reduce|softmax"),
    ("transposes, copies", r"transpose|copy|memcpy|concatenate|slice"),
    ("scatter, gather", r"scatter|gather"),
    ("elementwise", r"fusion|loop|add|mul|convert|select|Memset|memset"),
)


def profile(once: Callable[[], object], folder: Path, row: str) -> dict:
    """Run `once` under a profiler; writes <row>.kernels.txt and <row>.hlo.txt.gz.

    Returns ms per step by kind, and the busy total.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"\W+", "-", row)
    try:
        times = _with_tensorflow(once, folder)
    except Exception as e:  # noqa: BLE001 - the edge: a benchmark without this table is still one
        times, why = {}, str(e)
    else:
        why = "it recorded no kernel"
    if not times:
        print(f"TensorFlow's profiler: {why}; trying PyTorch's", flush=True)  # noqa: T201
        try:
            times = _with_torch(once)
        except Exception as e:  # noqa: BLE001 - the edge, as above
            return {"error": str(e)[:300]}
    lines = [
        f"{ms:9.3f} ms {count:6.0f} x  {kernel}"
        for kernel, (ms, count) in sorted(times.items(), key=lambda x: -x[1][0])
    ]
    (folder / f"{name}.kernels.txt").write_text("\n".join(lines) + "\n")
    _keep_program(folder, name)
    kinds: dict[str, float] = defaultdict(float)
    for kernel, (ms, _) in times.items():
        kinds[
            next((kind for kind, pattern in _KINDS if re.search(pattern, kernel, re.I)), "other")
        ] += ms
    return {
        **{k: round(v, 2) for k, v in sorted(kinds.items(), key=lambda x: -x[1])},
        "busy": round(sum(kinds.values()), 2),
    }


def _with_tensorflow(once: Callable[[], object], folder: Path) -> dict[str, tuple[float, float]]:
    import tensorflow as tf
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    where = folder / "profile"
    tf.profiler.experimental.start(str(where))
    for _ in range(_STEPS):
        once()
    tf.profiler.experimental.stop()
    times: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for path in glob.glob(f"{where}/**/*.xplane.pb", recursive=True):
        space = xplane_pb2.XSpace()
        space.ParseFromString(Path(path).read_bytes())
        for plane in space.planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for line in plane.lines:
                if not line.name.startswith("Stream"):
                    continue
                for event in line.events:
                    entry = times[plane.event_metadata[event.metadata_id].name]
                    entry[0] += event.duration_ps / 1e9 / _STEPS
                    entry[1] += 1 / _STEPS
    shutil.rmtree(where, ignore_errors=True)
    return {k: (v[0], v[1]) for k, v in times.items()}


def _with_torch(once: Callable[[], object]) -> dict[str, tuple[float, float]]:
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        for _ in range(_STEPS):
            once()
    times = {}
    for event in recorded.key_averages():
        total_us = getattr(event, "self_device_time_total", 0) or getattr(
            event, "self_cuda_time_total", 0
        )
        if total_us:
            times[event.key] = (total_us / 1e3 / _STEPS, event.count / _STEPS)
    return times


def _keep_program(folder: Path, name: str) -> None:
    """The largest optimised program that XLA dumped is the step; the rest goes."""
    dumped = glob.glob(f"{folder}/xla/*gpu_after_optimizations.txt") or glob.glob(
        f"{folder}/xla/*after_optimizations.txt"
    )
    if dumped:
        largest = max(dumped, key=lambda p: Path(p).stat().st_size)
        with open(largest, "rb") as source, gzip.open(folder / f"{name}.hlo.txt.gz", "wb") as out:
            shutil.copyfileobj(source, out)
    shutil.rmtree(folder / "xla", ignore_errors=True)
