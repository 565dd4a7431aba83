"""What can be wrong with a text or its language."""

from __future__ import annotations

from collections.abc import Iterable


class TextError(ValueError):
    """This text cannot be turned into tokens that say what it says; the row is to be rejected with this message."""


class UnknownLanguage(ValueError):
    """A language code without rules for cleaning."""

    def __init__(self, language: str, known: Iterable[str]):
        super().__init__(f"language {language!r} is not known; have: {', '.join(sorted(known))}")
        self.language = language


class LanguageNotInVocabulary(ValueError):
    """A language that the vocabulary has no tag for."""

    def __init__(self, language: str, known: Iterable[str]):
        super().__init__(f"language {language} not in vocabulary; have: {', '.join(sorted(known))}")
        self.language = language


class LanguageUnavailable(RuntimeError):
    """A language whose cleaning needs a package that is not installed: a matter of the machine, not of a row."""

    def __init__(self, language: str, package: str):
        super().__init__(f"language {language} needs the package {package}: pip install {package} (or this project's extra [{language}])")
        self.language, self.package = language, package
