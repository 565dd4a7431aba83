"""Keeps RUN/report.html current beside a run: a process of its own writes it anew at low priority,
whenever the trainer has saved or samples have come, and once when the run has ended.
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

LOOK_S = 2.0  # between two checks for something new to show
LEAST_S = 15.0  # from one page to the next: writing one takes 3 s of one core on a small machine
MOST_S = 120.0  # after so long, one page is given up


class PageKeeper:
    """Use as a context manager around a run: keeps the page current, and writes the last one when
    the run ends, however it ends. A failure is a warning: no run ends or waits for its page.

    Args:
        argv, env: the process that writes it; None in `env` removes a variable, as in
        `ProcessSpec`.
        look_s, least_s: as above.
    """

    def __init__(
        self,
        run_dir: Path,
        argv: Sequence[str],
        env: Mapping[str, str | None],
        look_s: float = LOOK_S,
        least_s: float = LEAST_S,
    ):
        self._run_dir, self._argv = run_dir, list(argv)
        self._env = {k: v for k, v in {**os.environ, **env}.items() if v is not None}
        self._look_s, self._least_s = look_s, least_s
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
        shown = self._mark()
        written = time.monotonic() - self._least_s
        while not self._end.wait(self._look_s):
            mark = self._mark()
            if mark != shown and time.monotonic() - written >= self._least_s:
                shown = mark
                self._write()
                written = time.monotonic()

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
