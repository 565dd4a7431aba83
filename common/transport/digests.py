"""Digests of the batches that came, for what comes twice: the same batch has the same bytes."""

from __future__ import annotations

from collections import OrderedDict, deque

from common.transport.delivery import Difference

REMEMBERED = 4096  # batches, and differences not yet taken


class Digests:
    """Which bytes each batch had the first time, and from whom."""

    def __init__(self):
        self._first: OrderedDict[tuple[str, int, tuple[int, ...]], tuple[str, str]] = OrderedDict()
        self._differing: deque[Difference] = deque(maxlen=REMEMBERED)

    def __len__(self) -> int:
        return len(self._first)

    def compare(
        self, plan: str, g: int, set_aside: tuple[int, ...], digest: str, producer: str
    ) -> Difference | None:
        """Remember a batch, made without the clips set aside; a difference from the first time."""
        key = (plan, g, set_aside)  # what the bytes may depend on
        known, by = self._first.setdefault(key, (digest, producer))
        self._first.move_to_end(key)
        if len(self._first) > REMEMBERED:
            self._first.popitem(last=False)
        if known == digest:
            return None
        found = Difference(plan, g, (by, producer), (known, digest))
        self._differing.append(found)
        return found

    def forget(self, plan: str, g: int) -> None:
        """The batch is made anew, and may have other bytes."""
        self._first = OrderedDict((k, v) for k, v in self._first.items() if k[:2] != (plan, g))

    def take_differing(self) -> list[Difference]:
        """The differences since the last call."""
        found = list(self._differing)
        self._differing.clear()
        return found
