"""Decide how many batches the trainer asks for at once: the fewest that never leave it waiting, at
most the window.

The benefit of fewer is memory, a few MB on the trainer's host for each; nothing else depends on it.
Leases go out while a batch's position is below released + target, so a target between 1 and the
window changes when a batch is made, never its content, its order, or whether it comes.

The target doubles when the trainer runs low: fewer than two batches in its hands (one to train
next, one to copy to the device under that step) and none waiting. It shrinks by one after PATIENCE
× target batches in which the buffer never fell below half of it, and never again to a size at which
it once ran low: shrinking costs at most one wait per size of the window in a generation. Producers
that are too slow on average drive it to the window as well, where nothing is lost by it: what they
make is taken at once.
"""

from __future__ import annotations

IN_HAND = 2
PATIENCE = 16


class Target:
    """The credits that may be out; batches are counted by those released since the generation
    began.

    Args:
        window: the upper limit.
        start: where it begins; None: it stays the window.
    """

    def __init__(self, window: int, start: int | None = None):
        self.window, self._fixed = window, start is None
        self.value = window if start is None else max(1, min(start, window))
        self._floor = 1
        # until a target's worth of batches has gone by, the buffer is still that of the previous
        # target
        self._changed_at = 0
        self._half_full_since = 0

    def ran_low(self, released: int) -> None:
        """Note that the trainer asked for a batch and none was there, with fewer than IN_HAND in
        its hands.
        """
        if self._fixed or self.value == self.window or released - self._changed_at < self.value:
            return
        self._floor = self.value + 1
        self._set(min(self.window, 2 * self.value), released)

    def released(self, released: int, held: int) -> None:
        """Note that a batch was trained; `held` wait or are in the trainer's hands."""
        if self._fixed:
            return
        if 2 * held < self.value:
            self._half_full_since = released
        elif released - self._half_full_since >= PATIENCE * self.value and self.value > self._floor:
            self._set(self.value - 1, released)

    def _set(self, value: int, released: int) -> None:
        self.value, self._changed_at, self._half_full_since = value, released, released
