"""How many CPUs this process may use."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # "<microseconds or max> <period>"


def cores(quota_file: Path = QUOTA) -> int:
    """At least 1: the process's affinity, and a container's quota where that is less (threads
    beyond it only wait).
    """
    count = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    with contextlib.suppress(OSError, ValueError):
        quota, period = quota_file.read_text().split()
        count = min(count, max(1, int(quota) // int(period)))
    return count
