"""The effect of trimming and levelling on a corpus."""

from __future__ import annotations

from common.audio.levels import decibels
from common.audio.treatment import Treatment
from common.system.counted import counted
from producer.corpus.headers import AudioFacts

_REACHED_DB = 0.1


class Treated:
    """Collects while recordings are judged; `notes` at the end."""

    def __init__(self, treatment: Treatment):
        self.treatment = treatment
        self._trimmed = self._held = 0
        self._cut_s = 0.0
        self._gains_db: list[float] = []

    def add(self, facts: AudioFacts) -> None:
        """Count a usable recording with its treatment."""
        if facts.portion is None or facts.level_db is None:
            return
        cut = facts.frames - facts.portion.frames
        self._trimmed += cut > 0
        self._cut_s += cut / facts.rate
        gain_db = decibels(facts.portion.gain / max(facts.peak, 1.0))
        self._gains_db.append(gain_db)
        wanted = self.treatment.level_db
        self._held += wanted is not None and facts.level_db + gain_db < wanted - _REACHED_DB

    def notes(self) -> list[str]:
        """A line for each setting in use."""
        out, of = [], len(self._gains_db)
        if self.treatment.trim_s is not None:
            out.append(
                f"silence at the ends cut down to {self.treatment.trim_s:g} s in {self._trimmed} of"
                f" {counted(of, '{n} [recording|recordings]')}, {self._cut_s:.1f} s in all"
            )
        if self.treatment.level_db is not None and of:
            held = (
                counted(
                    self._held,
                    "; {n} [is softer, since its peak|are softer, since their peaks] would exceed"
                    " full scale",
                )
                if self._held
                else ""
            )
            out.append(
                f"{counted(of, '{n} [recording|recordings]')} brought to"
                f" {self.treatment.level_db:g} dBFS where {counted(of, '[it sounds|they sound]')},"
                f" gains from {min(self._gains_db):.1f} to {max(self._gains_db):.1f} dB{held}"
            )
        return out
