"""A clock on the wall that a test sets, for every process that it starts.

WALL_CLOCK names a file with seconds to add to the real time. `time.time` follows it, and so does
what psutil says of when processes began, as the kernel's own answer does when the clock is set.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

WALL_CLOCK = "WALL_CLOCK"


def set_by(file: Path, seconds: float) -> None:
    """From now on the clock is wrong by so much."""
    aside = file.with_name(f"{file.name}.tmp")
    aside.write_text(str(seconds))
    os.replace(aside, file)


def hang_from_environment() -> None:
    """Hang up the clock that WALL_CLOCK names, if it does."""
    name = os.environ.get(WALL_CLOCK)
    if not name:
        return
    import psutil._pslinux

    file, real, boot = Path(name), time.time, psutil._pslinux.boot_time

    def wrong_by() -> float:
        try:
            return float(file.read_text())
        except FileNotFoundError:
            return 0.0

    time.time = lambda: real() + wrong_by()
    psutil._pslinux.boot_time = lambda: boot() + wrong_by()
