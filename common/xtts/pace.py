"""How long a text may take to say, by its characters: what a speech model says far faster or slower
than the recordings that it was trained with is no speech of that text.

Characters are those of the text as it is read out (`Tokenizer.clean`), numbers and signs in words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SLACK_S = 1.0  # pauses before and after, whatever the text's length
MIN_SEEN = 20  # recordings; of fewer the extremes say nothing
_EXTREME = 0.01  # of the recordings on each side: wrong texts, long silence
_WIDER = 1.5  # a voice may be this much faster or slower than the recordings'
_ROOM = 2.0  # times the longest that is right: then nothing is drawn any more


@dataclass(frozen=True)
class Pace:
    """Seconds per character: the `fastest` and the `slowest` that count as speech.

    The defaults are for alphabets, where no recordings are at hand: speech has 0.05 to 0.09.
    """

    fastest: float = 0.025
    slowest: float = 0.2

    @classmethod
    def seen(cls, chars: Sequence[int], seconds: Sequence[float]) -> Pace | None:
        """Of recordings: the characters and the seconds of each; None: they are too few."""
        chars, seconds = np.asarray(chars, np.float64), np.asarray(seconds, np.float64)
        chars, seconds = chars[chars > 0], seconds[chars > 0]
        if len(chars) < MIN_SEEN:
            return None
        fastest = float(np.quantile(seconds / chars, _EXTREME))
        without_pauses = np.maximum(seconds - SLACK_S, 0) / chars
        slowest = max(fastest, float(np.quantile(without_pauses, 1 - _EXTREME)))
        return cls(fastest / _WIDER, slowest * _WIDER)

    def shortest_s(self, chars: int) -> float:
        """A text of so many characters takes at least so many seconds."""
        return self.fastest * chars

    def longest_s(self, chars: int) -> float:
        """... and at most so many."""
        return self.slowest * chars + SLACK_S

    def room_s(self, chars: int) -> float:
        """After so many seconds a text is cut off."""
        return _ROOM * self.longest_s(chars)

    def distance(self, chars: int, seconds: float) -> float:
        """How many times too short or too long; 1: neither."""
        if seconds <= 0:
            return float("inf")
        return max(1.0, seconds / self.longest_s(chars), self.shortest_s(chars) / seconds)

    def fault(self, chars: int, seconds: float, stopped: bool) -> str:
        """What is wrong with `seconds` of sound for so many characters, in words; "": nothing."""
        text = f"a text of {chars} characters"
        if not stopped:
            return f"no end after {seconds:.1f} s for {text}: cut off there"
        if not seconds:
            return f"nothing was said of {text}"
        if seconds > self.longest_s(chars):
            return f"runs on: {seconds:.1f} s for {text}, at most {self.longest_s(chars):.1f} s fit"
        if seconds < self.shortest_s(chars):
            least = self.shortest_s(chars)
            return f"stops early: {seconds:.1f} s for {text}, at least {least:.1f} s fit"
        return ""
