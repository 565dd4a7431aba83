"""XLA's settings for a process on a GPU, as environment variables: they are read once, when
TensorFlow is loaded, and an unknown flag
ends the process. CPU processes get none.

What the user has set stays; a flag that is there is not set again.

What the autotuner finds is kept in a folder per process and version of TensorFlow: XLA checks
neither the version of what it reads, nor does its way of writing stand several processes in one
folder (openxla/xla docs/persisted_autotuning.md, marin-community/marin#8896).

The autotuner is off (level 0): every candidate that it times stops what else runs on the device,
the training beside it too, and cuBLAS's own choice was as fast here (docs/measured.md).
`deterministic` runs need no flag: TensorFlow's op determinism tells XLA to take the first candidate
of each, without timing any.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from common.gpu.choose import Device

# the folder of XLA's cache, which has to exist before XLA looks for it: the child makes it
CACHE = "XTTS_XLA_CACHE"

# Where a user turns the autotuner on again, it would try Triton for every matrix product and take
# cuBLAS in the end: 20 s of a compilation for the same step time.
_FLAGS = {"--xla_gpu_enable_triton_gemm": "false", "--xla_gpu_autotune_level": "0"}
_CACHE_FLAG = "--xla_gpu_per_fusion_autotune_cache_dir"


def xla_env(env: Mapping[str, str], device: Device, cache: Path | None = None) -> dict[str, str]:
    """XLA's part of a child's environment; empty for a child on the CPU, and where the user's
    XLA_FLAGS name a file of flags.

    Args:
        env: the parent's environment.
        cache: where the autotuner's findings are kept: the next process compiles faster. None:
        nowhere.
    """
    given = env.get("XLA_FLAGS", "").strip()
    if device.kind == "cpu" or (given and not given.startswith("-")):
        return {}
    flags = _FLAGS if cache is None else {**_FLAGS, _CACHE_FLAG: _quoted(cache)}
    theirs = {f"--{name}" for name in re.findall(r"(?:^|\s)--?(\w+)", given)}
    own = {name: value for name, value in flags.items() if name not in theirs}
    set_ = {
        "XLA_FLAGS": " ".join([given, *(f"{name}={value}" for name, value in own.items())]).strip()
    }
    return {**set_, CACHE: str(cache)} if _CACHE_FLAG in own else set_


def cache_folder(run_dir: Path, process: str) -> Path:
    """Where a run's process keeps what XLA's autotuner finds."""
    return run_dir / "cache" / "xla" / f"tensorflow-{_version()}" / process


def _version() -> str:
    """The installed TensorFlow's, without importing it."""
    for name in ("tensorflow", "tensorflow-cpu", "tf-nightly"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def _quoted(path: Path) -> str:
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
