"""A scan's remarks about the texts it keeps: letters of a foreign script, characters without a
sound, what cleaning changes.
"""

from __future__ import annotations

import random
import unicodedata
from collections import Counter
from dataclasses import dataclass, field

from common.system.counted import counted
from common.xtts.text.clean import foreign_script
from common.xtts.text.marks import is_silent
from common.xtts.text.tokenizer import describe_characters
from producer.corpus.rows import CorpusRow

EXAMPLES = 20
_SHOWN_CHARACTERS = 8
# Marks that editors and keyboards leave everywhere; their removal is not worth reporting.
_USUAL = ("Cf", "Lm", "Mn")


@dataclass
class _Sighting:
    texts: int = 0
    first: str = ""
    what: Counter[str] = field(default_factory=Counter)

    def add(self, where: str, found: dict[str, int]) -> None:
        self.texts += 1
        self.first = self.first or where
        self.what.update(found)


@dataclass
class _Changes:
    texts: int = 0
    changed: int = 0
    examples: list[list[str]] = field(default_factory=list)
    draw: random.Random = field(default_factory=lambda: random.Random(0))

    def add(self, text: str, clean: str) -> None:
        self.texts += 1
        if " ".join(text.lower().split()) == clean:
            return
        self.changed += 1
        if len(self.examples) < EXAMPLES:
            self.examples.append([text, clean])
        elif (
            place := self.draw.randrange(self.changed)
        ) < EXAMPLES:  # every changed text is equally likely to be shown
            self.examples[place] = [text, clean]


class TextFindings:
    """Collects while rows are kept; `messages` and `cleaning` at the end."""

    def __init__(self):
        self._foreign: dict[str, _Sighting] = {}
        self._removed = _Sighting()
        self._changes: dict[str, _Changes] = {}

    def look_at(self, entry: CorpusRow, clean: str) -> None:
        """Note what is odd about the text of a kept row, and what cleaning made of it."""
        text, language = entry.row.text, entry.language
        where = f"{entry.row.file}:{entry.row.line}"
        self._changes.setdefault(language, _Changes()).add(text, clean)
        foreign = foreign_script(text, language)
        if foreign:
            self._foreign.setdefault(language, _Sighting()).add(where, foreign)
        removed = {
            c
            for c in set(text)
            if is_silent(c) and unicodedata.category(c) not in _USUAL and c not in clean
        }
        if removed:
            self._removed.add(where, {c: text.count(c) for c in removed})

    def messages(self) -> list[str]:
        """One line per language with letters of another script, and one for the characters left
        out.
        """
        out = []
        for language, seen in self._foreign.items():
            letters = ", ".join(f"{script} x{n}" for script, n in seen.what.most_common())
            out.append(
                f"{counted(seen.texts, '{n} [text|texts]')} in {language}"
                f" {counted(seen.texts, '[holds|hold]')} letters of another script: {letters}"
                f" ({counted(seen.texts, '[|first ]')}at {seen.first})"
            )
        seen = self._removed
        if seen.texts:
            shown = dict(seen.what.most_common(_SHOWN_CHARACTERS))
            left = len(seen.what) - len(shown)
            more = counted(left, " and {n} [other|others]") if left else ""
            names = describe_characters(Counter(shown).elements())
            out.append(
                counted(seen.texts, "{n} [text holds|texts hold] characters without a sound, ")
                + f"which are left out: {names}{more}"
                f" ({counted(seen.texts, '[|first ]')}at {seen.first})"
            )
        return out

    def cleaning(self) -> dict[str, dict]:
        """By language: how many `texts`, how many `changed` beyond case and spaces, and `examples`
        [before, after].
        """
        return {
            language: {"texts": c.texts, "changed": c.changed, "examples": c.examples}
            for language, c in sorted(self._changes.items())
        }
