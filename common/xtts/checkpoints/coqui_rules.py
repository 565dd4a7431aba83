"""Compares Coqui's tokenizer with ours on texts, and writes the module `coqui_languages.py` where
they differ.

Coqui knows 17 languages, cleans each in its own way, and uses all merges of a vocabulary for all of
them. What a voice was trained with may differ: a new language, our cleaning, a vocabulary that
grew. The module carries our rules as they are, source for source.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import tokenizers

from common.system.documents import read_json
from common.xtts.checkpoints import coqui_languages
from common.xtts.text import clean as cleaning
from common.xtts.text import rules
from common.xtts.text.errors import LanguageUnavailable, TextError
from common.xtts.text.tokenizer import Tokenizer, language_tag

_PACKAGE = cleaning.__name__.rpartition(".text")[0]  # whose modules are carried along
_CARRIED = "voice_rules"  # their package in the written file
_MOST_SHOWN = 5


@dataclass(frozen=True)
class Differs:
    """A text that Coqui turns into other tokens than training did, both as text."""

    language: str
    text: str
    ours: str
    coquis: str


class Rules:
    """How a voice's texts become tokens, compared with Coqui's way.

    Args:
        vocab: the voice's vocab.json.
        parity, keep_diacritics: its cleaning (see `text.clean`).
    """

    def __init__(self, vocab: Path, *, parity: bool, keep_diacritics: bool):
        self.options = {"parity": parity, "keep_diacritics": keep_diacritics}
        self.tokenizer = Tokenizer.load(vocab, **self.options)
        self._coquis = tokenizers.Tokenizer.from_file(str(vocab))
        document = read_json(vocab)
        self.merge_limits = dict(document["model"].get("merge_limits") or {})

    @property
    def unknown(self) -> list[str]:
        """Languages of the vocabulary that Coqui has no rules for."""
        return [x for x in self.tokenizer.languages if x not in rules.XTTS_LANGUAGES]

    @property
    def installed(self) -> list[str]:
        """Languages that the written module cleans: the unknown ones, and those whose cleaning is
        not Coqui's.
        """
        own = self.unknown if self.options["parity"] else list(self.tokenizer.languages)
        stripped = (
            []
            if self.options["keep_diacritics"] or "ar" not in self.tokenizer.languages
            else ["ar"]
        )
        return sorted({*own, *stripped})

    @property
    def needed(self) -> bool:
        """Whether Coqui needs the module to read texts as training did."""
        return bool(self.installed or self.merge_limits)

    def differences(
        self, pairs: Iterable[tuple[str, str]]
    ) -> tuple[dict[str, int], dict[str, int], list[Differs]]:
        """For (text, language) pairs in languages that Coqui knows: how many were compared and how
        many differ, by language, and a few examples.

        Texts that cannot be cleaned here are not compared.
        """
        compared: dict[str, int] = {}
        differing: dict[str, int] = {}
        shown: list[Differs] = []
        for text, language in pairs:
            if language in self.unknown or language not in self.tokenizer.languages:
                continue
            try:
                ours = self.tokenizer.encode(text, language)
            except (TextError, LanguageUnavailable):
                continue
            coquis = self._coquis_or_none(text, language)
            compared[language] = compared.get(language, 0) + 1
            if ours != coquis:
                differing[language] = differing.get(language, 0) + 1
                if len(shown) < _MOST_SHOWN:
                    said = "an error" if coquis is None else self.tokenizer.decode(coquis)
                    shown.append(Differs(language, text, self.tokenizer.decode(ours), said))
        return compared, differing, shown

    def _coquis_or_none(self, text: str, language: str) -> list[int] | None:
        try:
            return self.coquis(text, language)
        except TextError:
            return None

    def coquis(self, text: str, language: str) -> list[int]:
        """The ids that Coqui's tokenizer gives, without the module. TextError: it raises there."""
        plain = cleaning.clean(text, language, parity=True)
        return self._coquis.encode((language_tag(language) + plain).replace(" ", "[SPACE]")).ids

    @property
    def packages(self) -> dict[str, str]:
        """What the written module imports: module → package and version, as here; languages' own
        packages are asked for by the rules.
        """
        return _packages(_sources()) if self.needed else {}

    def module(self) -> str:
        """The source of coqui_languages.py for this voice."""
        values = {
            "LIMITS": {x: cleaning.char_limit(x) for x in self.installed},
            "OPTIONS": self.options,
            "MERGE_LIMITS": self.merge_limits,
            "PACKAGES": _packages(_sources()),
            "ROOT": cleaning.__name__.replace(_PACKAGE, _CARRIED, 1),
        }
        lines = []
        for line in Path(coqui_languages.__file__).read_text(encoding="utf-8").splitlines():
            name = line.partition(":")[0].partition(" ")[0]
            if name in values:
                line = f"{line.partition(' = ')[0]} = {values[name]!r}"
            lines.append(line)
        return "\n".join([*lines, "", "", *_written(_sources())]) + "\n"


def _sources() -> dict[str, str]:
    """The cleaning's modules and the packages they are in: carried name → source, with its imports
    renamed.
    """
    found: dict[str, str] = {}
    left = [cleaning.__name__]
    while left:
        name = left.pop()
        path = _file_of(name)
        if name in found or path is None:
            continue
        found[name] = source = path.read_text(encoding="utf-8")
        parents = name.split(".")
        left += [".".join(parents[:i]) for i in range(_PACKAGE.count(".") + 2, len(parents))]
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_PACKAGE):
                left += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                left += [
                    alias.name for alias in node.names if alias.name.startswith(f"{_PACKAGE}.")
                ]
    sources = {_CARRIED: ""} | {k: found[k] for k in sorted(found) if k != _PACKAGE}
    return {
        k.replace(_PACKAGE, _CARRIED, 1): s.replace(_PACKAGE, _CARRIED) for k, s in sources.items()
    }


def _packages(sources: dict[str, str]) -> dict[str, str]:
    """The packages that modules import, but for those that one language alone needs: name →
    requirement, the version that is installed here.
    """
    found = set()
    for source in sources.values():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom):
                found.add(node.module.partition(".")[0])
            elif isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
    backends = {
        module.partition(".")[0] for needs in rules.BACKENDS.values() for module, _ in needs
    }
    return {
        x: f"{x}=={metadata.version(x)}"
        for x in sorted(found - {*sys.stdlib_module_names, *backends, _CARRIED})
    }


def _file_of(name: str) -> Path | None:
    """The source of a module; None: the name is of something in a module."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # its parent is a module without parts
        return None
    return Path(spec.origin) if spec is not None and spec.origin else None


def _written(sources: dict[str, str]) -> Iterable[str]:
    for name, source in sources.items():
        literal = (
            f"r'''{source}'''"
            if "'''" not in source and not source.endswith("\\")
            else repr(source)
        )
        yield f"SOURCES[{name!r}] = {literal}"
