"""What the scan's tests share: a tokenizer of single characters, and the scan of a folder with what
it left in the manifest.

A test file takes the fixtures by name:
    tokenizer, scanned = scan_cases.tokenizer, scan_cases.scanned
"""

from __future__ import annotations

import pytest

from common.data.manifest import Manifest
from common.run import settings as config
from common.xtts.text.tokenizer import Tokenizer
from producer.corpus.scan import scan
from tests.support.corpora import sine, write_wav

RATE = 22050
LETTERS = "abcdefghijklmnopqrstuvwxyz"
ALPHABET = [
    (LETTERS, "en"),
    ("آابپتثجچحخدذرزژسشصضطظعغفقکگلمنوهیئءأؤ", "fa"),
    ("ابتثجحخدذرزسشصضطظعغفقكلمنهويةىءأإ", "ar"),
]


@pytest.fixture(scope="module")
def tokenizer():
    """All of a to z and the Arabic letters, no merges worth mentioning: one token per character."""
    return Tokenizer.train(ALPHABET, 100, ["en", "fa", "ar"])


def settings(*train, **data):
    return config.parse(
        {"data": {"train": [s if isinstance(s, dict) else {"path": str(s)} for s in train], **data}}
    )


class Scanned:
    def __init__(self, tmp_path, tokenizer, *train, options=None, **data):
        path = tmp_path / "run.manifest"
        self.result = scan(settings(*train, **data), path, tokenizer, **(options or {}))
        self.report = self.result.report
        with Manifest.open(path) as m:
            self.utterances = list(m)
            self.columns = m.columns()
            self.rejects = m.rejects()
            self.digest = m.digest

    @property
    def counts(self):
        return self.result.kept, self.result.rejected

    @property
    def reasons(self):
        return {r.id: r.reason for r in self.rejects}


@pytest.fixture
def scanned(tmp_path, tokenizer):
    return lambda *train, **kw: Scanned(tmp_path, tokenizer, *train, **kw)


def clip(path, seconds=1.0, freq=440.0, rate=RATE, **options):
    return write_wav(path, sine(round(seconds * rate), freq, rate), rate, **options)


def clips(root, n, folder="wavs", suffix=".wav", seconds=0.6):
    """`n` recordings 000, 001, …; their names without suffix."""
    names = [f"{i:03d}" for i in range(n)]
    for i, name in enumerate(names):
        clip(root / folder / f"{name}{suffix}", seconds, 300 + i)
    return names


def speaker_of(i):
    return "anna" if i % 2 else "bert"
