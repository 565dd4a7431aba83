"""XLA's settings for a trainer on a GPU, as environment variables: they are read once, before TensorFlow is loaded.

What the user has set stays; a flag that is there is not set again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

# The autotuner tries Triton for every matrix product and takes cuBLAS in the end: 20 s of a compilation for the same step time.
_FLAGS = {"--xla_gpu_enable_triton_gemm": "false"}
# Of several ways to compute something, only those whose bits do not vary between calls; fused attention has one.
_DETERMINISTIC = {"--xla_gpu_exclude_nondeterministic_ops": "true"}


def xla_env(env: Mapping[str, str], *, deterministic: bool = False, cache: Path | None = None) -> dict[str, str]:
    """XLA_FLAGS for a child process.

    Args:
        env: the parent's environment.
        deterministic: bits must not vary.
        cache: a folder, made if missing, for what the autotuner finds: the next process compiles faster, and to the same bits.
    """
    flags = dict(_FLAGS)
    if deterministic:
        flags |= _DETERMINISTIC
    if cache is not None:
        cache.mkdir(parents=True, exist_ok=True)
        flags["--xla_gpu_per_fusion_autotune_cache_dir"] = str(cache)
    given = env.get("XLA_FLAGS", "")
    new = [f"{name}={value}" for name, value in flags.items() if name not in given]
    return {"XLA_FLAGS": " ".join([given, *new]).strip()}
