"""Gives Coqui's tokenizer the text rules that a voice was trained with.

Needs coqui-tts and the packages of PACKAGES, which `install`
names where they are missing, and nothing of the project it is from.

    import coqui_languages

    coqui_languages.install()  # once, before the model speaks

Languages that Coqui has no rules for are then cleaned as in training, and a vocabulary that has
grown for a new language is used for the others as before. What Coqui does well by itself stays as
it is.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import json
import sys
from functools import lru_cache

# Of each language that is cleaned here: how many characters are spoken well in one go.
LIMITS: dict[str, int] = {}
# As in training.
OPTIONS: dict[str, bool] = {}
# How many of the vocabulary's merges a language uses, "*" for those not named; empty: all of them.
MERGE_LIMITS: dict[str, int] = {}
# What the rules import: module → package, of the version they were exported with.
PACKAGES: dict[str, str] = {}
# The rules, as modules: name → source.
ROOT = ""
SOURCES: dict[str, str] = {}


class _Sources(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the modules of SOURCES by their names."""

    def find_spec(self, name, path=None, target=None):
        if name not in SOURCES:
            return None
        package = any(other.startswith(f"{name}.") for other in SOURCES)
        return importlib.util.spec_from_loader(name, self, is_package=package)

    def exec_module(self, module):
        code = compile(SOURCES[module.__name__], f"<{module.__name__} in {__file__}>", "exec")
        exec(code, module.__dict__)


def rules():
    """The module that cleans texts: `clean(text, language, …)`.

    ImportError: packages are missing; says which to install.
    """
    missing = {}
    for module, package in PACKAGES.items():
        try:
            importlib.import_module(module)
        except ImportError as error:
            missing[package] = error
    if missing:
        reasons = "; ".join(map(str, missing.values()))
        raise ImportError(
            "this voice's text rules need packages that Coqui does without: pip install"
            f" {' '.join(missing)}  ({reasons})"
        )
    if SOURCES and not any(isinstance(finder, _Sources) for finder in sys.meta_path):
        sys.meta_path.append(_Sources())
    return importlib.import_module(ROOT)


def install() -> None:
    """Teach Coqui's `VoiceBpeTokenizer` the rules, those made already too.

    Twice is once. ImportError as of `rules`.
    """
    from TTS.tts.layers.xtts.tokenizer import VoiceBpeTokenizer as Coquis

    if getattr(Coquis, "has_coqui_languages", False):
        return
    clean, its_own, its_encode = rules().clean, Coquis.preprocess_text, Coquis.encode

    def preprocess_text(self, txt, lang):
        return clean(txt, lang, **OPTIONS) if lang in LIMITS else its_own(self, txt, lang)

    def encode(self, txt, lang):
        lang = lang.split("-")[0]
        limit = MERGE_LIMITS.get(lang, MERGE_LIMITS.get("*"))
        if limit is None:
            return its_encode(self, txt, lang)
        self.check_input_length(txt, lang)
        tag = "zh-cn" if lang == "zh" else lang
        text = f"[{tag}]{self.preprocess_text(txt, lang)}".replace(" ", "[SPACE]")
        return _shortened(self.tokenizer.to_str(), limit).encode(text).ids

    class Limits:
        """Character limits: Coqui's, and those of the languages above.

        A data descriptor, so that it wins over instances.
        """

        def __get__(self, instance, owner=None):
            return (
                self if instance is None else {**instance.__dict__.get("char_limits", {}), **LIMITS}
            )

        def __set__(self, instance, value):
            instance.__dict__["char_limits"] = value

    Coquis.preprocess_text, Coquis.encode, Coquis.char_limits = preprocess_text, encode, Limits()
    Coquis.has_coqui_languages = True


@lru_cache(maxsize=8)
def _shortened(vocabulary: str, limit: int):
    """The tokenizer with the first `limit` merges."""
    from tokenizers import Tokenizer

    document = json.loads(vocabulary)
    document["model"]["merges"] = document["model"]["merges"][:limit]
    return Tokenizer.from_str(json.dumps(document))
