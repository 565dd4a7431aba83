"""Texts that Coqui reads otherwise: counted, and mended by a module beside the voice."""

import importlib.util
import re
import sys
import types

import pytest
import tokenizers

from common.xtts.checkpoints.coqui_readme import readme
from common.xtts.checkpoints.coqui_rules import Rules
from common.xtts.text import clean as cleaning
from common.xtts.text.tokenizer import Tokenizer
from tests.support.coqui_files import (
    SETTINGS,
    check_readme_code,
)

MIXED = [
    ("en", "He said “yes” — 1,000 times."), ("en", "Mr. Smith paid $5."),
    ("de", "Er sagte »ja« für 1.000 €."), ("de", "u\u0308ber"),
    ("ar", "رقم ١٢٣"), ("ar", "مرحبا بكم"), ("en", "plain words"), ("de", "lauter worte"),
    ("en", "it’s 20%"), ("en", "№ 5"),
    ("ar", "كتاب"),
]  # fmt: skip


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    """A vocabulary of en, de and ar, and the same with Persian, whose merges would
    change Arabic.
    """
    folder = tmp_path_factory.mktemp("grown")
    texts = [(t, x) for x, t in MIXED] + [
        ("abcdefghijklmnopqrstuvwxyz ,.!?%$€“”»«—’№0123456789ßäöü", "de")
    ]
    base = Tokenizer.train(texts, 400, ["en", "de", "ar"], parity=True)
    longer = base.extend([("مرحبا کتاب کتاب سلام", "fa"), ("کتاب سلام", "fa")] * 5, ["fa"], 60)
    longer.save(folder / "vocab.json")
    return folder / "vocab.json"


def test_x3_texts_in_other_tokens_are_counted(grown):
    ours, coquis = (Rules(grown, parity=parity, keep_diacritics=True) for parity in (False, True))
    pairs = [(text, language) for language, text in MIXED]
    compared, differing, shown = ours.differences([*pairs, ("سلام", "fa")])
    assert sum(compared.values()) == 11
    assert sum(differing.values()) >= 5
    assert any("“yes”" in d.text for d in shown)
    # Cleaned as Coqui does, nothing is left but what the merges for Persian do to Arabic.
    compared, differing, _ = coquis.differences(pairs)
    assert sum(compared.values()) == 11
    assert set(differing) == {"ar"}
    assert (ours.unknown, ours.installed) == (["fa"], ["ar", "de", "en", "fa"])
    assert (coquis.unknown, coquis.installed, coquis.needed) == (["fa"], ["fa"], True)
    stripped = Rules(grown, parity=True, keep_diacritics=False)
    assert stripped.installed == ["ar", "fa"]


class VoiceBpeTokenizer:
    """Stands for Coqui's class: the same interface and manners, its cleaning by ours
    with parity.
    """

    def __init__(self, vocab_file):
        self.tokenizer = tokenizers.Tokenizer.from_file(str(vocab_file))
        self.char_limits = {"en": 250}
        self.checked = []

    def check_input_length(self, txt, lang):
        self.checked.append(lang)

    def preprocess_text(self, txt, lang):
        if lang not in ("en", "de", "ar"):
            raise NotImplementedError(f"Language '{lang}' is not supported.")
        return cleaning.clean(txt, lang, parity=True)

    def encode(self, txt, lang):
        lang = lang.split("-")[0]
        self.check_input_length(txt, lang)
        txt = f"[{lang}]{self.preprocess_text(txt, lang)}".replace(" ", "[SPACE]")
        return self.tokenizer.encode(txt).ids


@pytest.fixture
def coquis(monkeypatch):
    """A fresh stand-in for Coqui's class, where coqui_languages looks for it."""
    made = type("VoiceBpeTokenizer", (VoiceBpeTokenizer,), dict(VoiceBpeTokenizer.__dict__))
    for name in (
        "TTS",
        "TTS.tts",
        "TTS.tts.layers",
        "TTS.tts.layers.xtts",
        "TTS.tts.layers.xtts.tokenizer",
    ):
        module = types.ModuleType(name)
        module.VoiceBpeTokenizer = made
        monkeypatch.setitem(sys.modules, name, module)
    yield made
    for name in [n for n in sys.modules if n.startswith("voice_rules")]:
        del sys.modules[name]
    sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != "_Sources"]


@pytest.mark.parametrize("parity", [True, False])
def test_x2_the_written_module_teaches_coqui(grown, coquis, tmp_path, parity, monkeypatch):
    """Persian, Arabic as before the vocabulary grew, and where the voice was trained with our
    cleaning, that; carried in the file.
    """
    rules = Rules(grown, parity=parity, keep_diacritics=True)
    (tmp_path / "coqui_languages.py").write_text(rules.module(), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(
        "coqui_languages", tmp_path / "coqui_languages.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    early = coquis(grown)
    with pytest.raises(NotImplementedError, match="'fa'"):
        early.encode("سلام", "fa")
    assert early.encode("مرحبا کتاب", "ar") != rules.tokenizer.encode("مرحبا کتاب", "ar")
    with monkeypatch.context() as without:
        for name in ("babel", "ftfy"):
            without.setitem(sys.modules, name, None)
        with pytest.raises(ImportError, match=r"pip install babel==[\d.]+ ftfy==[\d.]+ "):
            module.install()
        with pytest.raises(NotImplementedError, match="'fa'"):  # nothing is done by halves
            early.encode("سلام", "fa")
    module.install()
    module.install()
    assert module.rules().__name__.startswith("voice_rules")
    for tokenizer in (early, coquis(grown)):
        for language, text in [
            *MIXED,
            ("fa", "می‌خواهم ۱۲۳ کتاب"),
            ("fa", "سلام کتاب"),
            ("ar", "مرحبا کتاب"),
        ]:
            assert tokenizer.encode(text, language) == rules.tokenizer.encode(text, language), text
        assert tokenizer.char_limits["fa"] == 250
        assert tokenizer.char_limits["en"] == 250
        with pytest.raises(NotImplementedError):
            tokenizer.encode("x", "xx")
    assert "en-us" not in early.checked


def test_the_readme_installs_the_rules_that_a_voice_needs(grown):
    config = {**SETTINGS, "repetition_penalty": 5.0, "top_k": 50, "top_p": 0.85}
    bare = readme(config, [], {}, Rules(grown, parity=True, keep_diacritics=True))
    assert 'get_conditioning_latents(audio_path=["clip.wav"]' in bare
    assert "coqui_languages.install()" in bare
    assert re.search(r"pip install coqui-tts babel==[\d.]+ ftfy==[\d.]+ num2words==[\d.]+`", bare)
    check_readme_code(bare)
