"""Time that nobody can set: seconds since the machine was started, and which start that was.

What one process notes and another compares stands on this clock. The one on the wall is set by
hand, by NTP, and by whoever wakes a virtual machine; it is for people to read.
"""

from __future__ import annotations

import functools
import time
from pathlib import Path

BOOT = Path("/proc/sys/kernel/random/boot_id")


def since_boot() -> float:
    """Seconds, the time of a suspended machine included where the system tells it."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


@functools.cache
def boot() -> str:
    """Another one after each start of the machine; "" where the system does not tell."""
    try:
        return BOOT.read_text().strip()
    except OSError:
        return ""
