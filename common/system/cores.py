"""How many CPUs this process may use."""

from __future__ import annotations

import os
from pathlib import Path

from common.system import cgroup


def cores(root: Path = cgroup.ROOT, own: Path = cgroup.OWN) -> int:
    """At least 1: the process's affinity, or a container's quota if that is less (more threads
    would only wait).
    """
    count = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota = cgroup.cpu_quota(root, own)
    return count if quota is None else min(count, max(1, int(quota)))
