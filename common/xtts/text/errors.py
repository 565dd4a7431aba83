"""What can be wrong with a text or its language."""

from __future__ import annotations

from collections.abc import Iterable


class TextError(ValueError):
    """This text cannot be turned into tokens that say the same; the row is rejected with this
    message.
    """


class DamagedText(TextError):
    """A text that was decoded wrongly earlier: letters are lost, and none can be guessed."""


class UnknownLanguage(ValueError):
    """A language code without rules for cleaning.

    `meant`: the code that a name like "farsi" stands for.
    """

    def __init__(self, language: str, known: Iterable[str], meant: str | None = None):
        advice = f"did you mean {meant}?" if meant else f"have: {', '.join(sorted(known))}"
        super().__init__(f"language {language!r} is not known; {advice}")
        self.language, self.meant = language, meant


class LanguageNotInVocabulary(ValueError):
    """A language that the vocabulary has no tag for. `meant`: as in `UnknownLanguage`."""

    def __init__(self, language: str, known: Iterable[str], meant: str | None = None):
        advice = f" (did you mean {meant}?)" if meant else ""
        super().__init__(
            f"language {language} not in vocabulary{advice}; have: {', '.join(sorted(known))}"
        )
        self.language = language


class LanguageUnavailable(RuntimeError):
    """A language whose cleaning needs a package that is not installed: the machine's fault, not a
    row's.
    """

    def __init__(self, language: str, package: str):
        super().__init__(
            f"language {language} needs the package {package}: pip install {package} (or this"
            f" project's extra [{language}])"
        )
        self.language, self.package = language, package
