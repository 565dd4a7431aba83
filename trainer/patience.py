"""How long a stop waits for a save: from the time of earlier saves, bounded by a setting."""

from __future__ import annotations

from contextlib import AbstractContextManager

from common.system.lifecycle import SAVE_S, Stop
from common.system.status import StatusFile

_TIMES = 3.0  # the longest save so far: one in flight, one for what came after it, and a margin
_SOONER_S = 0.5  # earlier than the supervisor, whose kill leaves no message


class Patience:
    """A stop's deadline while a save is written; this process knows it, and through its status the
    supervisor.

    Args:
        most_s: the longest wait of a stop; also the wait for the first save, about which nothing is
        known.
    """

    def __init__(self, stop: Stop, status: StatusFile, most_s: float):
        self._stop, self._status, self._most_s = stop, status, most_s
        self._longest_s = 0.0
        self._set(most_s)

    def saving(self) -> AbstractContextManager:
        """While inside, a stop waits for the save."""
        return self._stop.saving()

    def took(self, seconds: float) -> None:
        """Note how long a save took."""
        self._longest_s = max(self._longest_s, seconds)
        self._set(min(self._most_s, max(SAVE_S, _TIMES * self._longest_s)))

    @property
    def left_for_another(self) -> bool:
        """Whether another save, as long as the longest so far, fits before the deadline."""
        left_s = self._stop.remaining_s()
        return left_s is None or left_s > 1.25 * self._longest_s

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the process is forced out; None: no stop yet."""
        return self._stop.remaining_s()

    def _set(self, seconds: float) -> None:
        self._stop.save_s = seconds
        self._status.update(save_grace_s=seconds + _SOONER_S)
