"""XLA's settings for a process on a GPU, as environment variables: XLA reads them once, when
TensorFlow loads, and an unknown flag ends the process. CPU processes get none.

The user's own flags stay and are not set again.

The autotuner's findings are kept in a folder per process and version of TensorFlow: XLA does not
check the version of what it reads, and several processes must not write into one folder
(openxla/xla docs/persisted_autotuning.md, marin-community/marin#8896).

At their defaults: the autotuner's level (the default compares every candidate's output with the
others', which costs time and finds kernels that compute something wrong; at level 0 stage 1's
convolutions take 50 times as long, docs/measured.md), and its choice between code generators for
fusions. `deterministic` runs need no flag: TensorFlow's op determinism tells
XLA to take the first candidate of each, without timing any.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from common.gpu.choose import Device

# the folder of XLA's cache, which must exist before XLA looks for it: the child creates it
CACHE = "XTTS_XLA_CACHE"

# The autotuner tries Triton for every matrix product and chooses cuBLAS in the end: that costs a
# compilation 20 s for the same step time.
_FLAGS = {"--xla_gpu_enable_triton_gemm": "false"}
_CACHE_FLAG = "--xla_gpu_per_fusion_autotune_cache_dir"
_CACHE_WORD = re.compile(rf'{_CACHE_FLAG}=(?:"(?:\\.|[^"\\])*"|\S+)')


def xla_env(env: Mapping[str, str], device: Device, cache: Path | None = None) -> dict[str, str]:
    """XLA's part of a child's environment; empty for a child on the CPU, and if the user's
    XLA_FLAGS name a file of flags.

    Args:
        env: the parent's environment.
        cache: where to keep the autotuner's findings, so that the next process compiles faster.
        None: nowhere.
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
    """The folder where a run's process keeps XLA's autotuning results."""
    return run_dir / "cache" / "xla" / f"tensorflow-{tensorflow_version()}" / process


def flags_in_force(env: Mapping[str, str]) -> str:
    """XLA_FLAGS, without the folder of the autotuner's findings: each process has its own."""
    return " ".join(_CACHE_WORD.sub(" ", env.get("XLA_FLAGS", "")).split())


def tensorflow_version() -> str:
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
