"""Keeps RUN/report.html current beside a run: a process of its own writes it anew at low priority,
whenever the trainer has saved or samples have come, for a twentieth of the time at most, and once
when the run has ended.
"""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.system import status

log = logging.getLogger(__name__)

LOOK_S = 2.0  # between two looks at what there is to show
LEAST_S = 15.0  # from the run's start to the first page, and from each page to the next
SHARE = 0.05  # of the time may go into pages: of a long run with samples, one takes seconds
MOST_S = 120.0  # one page may take so long; then it is given up


class PageKeeper:
    """Use as a context manager around a run: keeps the page current, and writes the last one when
    the run ends, however it ends. A failure is a warning: no run ends or waits for its page.

    Args:
        argv, env: the process that writes it; None in `env` removes a variable, as in
            `ProcessSpec`.
        look_s, least_s, share: as above.
    """

    def __init__(
        self,
        run_dir: Path,
        argv: Sequence[str],
        env: Mapping[str, str | None],
        look_s: float = LOOK_S,
        least_s: float = LEAST_S,
        share: float = SHARE,
    ):
        self._run_dir, self._argv = run_dir, list(argv)
        self._env = {k: v for k, v in {**os.environ, **env}.items() if v is not None}
        self._look_s, self._least_s, self._share = look_s, least_s, share
        self._end = threading.Event()
        self._warned = False
        self._thread = threading.Thread(target=self._keep, name="page", daemon=True)

    def __enter__(self) -> PageKeeper:
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._end.set()
        self._thread.join(MOST_S + 5)
        self._write()

    def _keep(self) -> None:
        shown, written, wait_s = self._mark(), time.monotonic(), self._least_s
        while not self._end.wait(self._look_s):
            mark, began = self._mark(), time.monotonic()
            if mark != shown and began - written >= wait_s:
                shown = mark
                self._write()
                written = time.monotonic()
                wait_s = max(self._least_s, (written - began) / self._share)

    def _mark(self) -> tuple:
        """Changes when there is something new to show."""
        s = status.read(self._run_dir, "trainer")
        saved = (s.stage, s.saved_step) if s is not None else ()
        samples = sorted(p.name for p in self._run_dir.glob("samples/step-*"))
        return (*saved, *samples)

    def _write(self) -> None:
        try:
            # A session of its own: Ctrl-C in the terminal is meant for the run.
            done = subprocess.run(
                self._argv,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                timeout=MOST_S,
                start_new_session=True,
                check=False,
            )
            said = done.stderr.strip().rpartition("\n")[2] or f"exit status {done.returncode}"
            fault = said if done.returncode else ""
        except subprocess.TimeoutExpired:
            fault = f"not finished within {MOST_S:.0f} s"
        except OSError as e:
            fault = str(e)
        if fault and not self._warned:
            self._warned = True
            log.warning("report.html was not written: %s", fault)
