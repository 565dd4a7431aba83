"""Time that nobody can set: seconds since the machine started, and which start that was.

Times that one process writes and another compares use this clock. The wall clock is set by hand, by
NTP, and when a virtual machine wakes; it is for people to read.
"""

from __future__ import annotations

import functools
import time
from pathlib import Path

BOOT = Path("/proc/sys/kernel/random/boot_id")


def since_boot() -> float:
    """Seconds since the start, including suspended time where the system reports it."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


@functools.cache
def boot() -> str:
    """An id that changes with each start of the machine; "" if the system has none."""
    try:
        return BOOT.read_text().strip()
    except OSError:
        return ""
