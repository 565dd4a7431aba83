"""`python -m trainer.page --run RUN`: writes RUN/report.html once; started by the launcher beside a
run, at low priority.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from common.system.errors import OK, RunError
from trainer.page import report

NICE = 15  # producers and trainer first


def main() -> int:
    """Write the page; the exit code says whether it was written."""
    p = argparse.ArgumentParser(prog="python -m trainer.page", description=__doc__)
    p.add_argument("--run", required=True, type=Path)
    os.nice(NICE)
    try:
        report.write(p.parse_args().run)
    except RunError as e:
        sys.stderr.write(f"{e}\n")
        return e.exit_code
    return OK


if __name__ == "__main__":
    sys.exit(main())
