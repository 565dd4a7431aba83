"""A scan in figures, as JSON and as a page: what is in them, and that no corpus writes markup."""

import base64
import io
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import soundfile

import launch
from common.data.buckets import padded_share, row_lengths
from common.data.manifest import Manifest
from producer.corpus.figures import Figures, Histogram
from producer.corpus.page import drawing
from producer.corpus.page.render import write_page
from tests.support import scan_cases
from tests.support.corpora import sentence, sine, write_metadata, write_wav

tokenizer, scanned = scan_cases.tokenizer, scan_cases.scanned
PERSIAN = "کتاب خوب است"
EVIL = "<script>alert(1)</script> کتاب"


class Page(HTMLParser):
    """The page's elements, and its text."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.texts = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.texts.append(data)

    def all(self, tag):
        return [a for t, a in self.elements if t == tag]


def tones(root, n):
    for i in range(n):
        write_wav(root / f"wavs/{i:03d}.wav", sine(44100, 200 + i))
    return root


def corpus(root):
    """Twenty-four Persian rows of 2 s: one clipped, one that is a script, one without words, one
    without a file.
    """
    for i in range(24):
        wave = sine(44100, 200 + i)
        write_wav(root / f"wavs/{i:03d}.wav", np.clip(5 * wave, -1, 1) if i == 4 else wave)
    texts = [f"{PERSIAN} {'آب ' * (i + 1)}".strip() for i in range(24)]
    texts[5], texts[6] = EVIL, "…"
    rows = [f"{i:03d}|{t}|{t}" for i, t in enumerate(texts)] + ["gone|کتاب|کتاب"]
    write_metadata(root, rows)
    return root


@pytest.fixture
def made(tmp_path, scanned):
    """The scan, its figures, and its page."""
    root = corpus(tmp_path / "corpus")
    found = scanned(root, language="fa")
    figures = Figures.of(found.result.path, scan_cases.settings(root, language="fa"))
    write_page(found.report, figures, found.result.path, tmp_path / "page.html")
    return found, figures, (tmp_path / "page.html").read_text()


def test_histograms_count_every_value_once():
    h = Histogram.of([0.4, 1.2, 1.3, 1.3, 9.9])
    assert (h.smallest, h.median, h.largest) == (0.4, 1.3, 9.9)
    assert sum(h.counts) == 5
    assert len(h.counts) <= 41
    assert (h.start, h.width) == (0.0, 0.5)
    for value, bar in ((0.4, 1), (1.2, 3), (1.3, 3), (9.9, 1)):
        i = int((value - h.start) / h.width + 1e-9)
        assert h.counts[i] == bar
    assert Histogram.of([]) is None
    assert Histogram.of([-30.0]).counts == [1]


def test_bars_stand_where_the_counts_are():
    picture = drawing.of_histogram(Histogram(10.0, 5.0, [2, 0, 1, 4], 10, 20, 29), "s")
    assert [round(b.x) for b in picture.bars] == [0, 220, 330]
    assert [b.height for b in picture.bars] == [60, 30, 120]
    assert all(b.y + b.height == drawing.HEIGHT for b in picture.bars)
    assert picture.bars[0].title == "10 to 15 s: 2"
    assert picture.ticks == [(0, "10"), (220, "20"), (440, "30")]


def test_figures_are_those_of_the_rows(made):
    found, figures, _ = made
    assert found.counts == (22, 3)  # no words, no file, < is in no vocabulary
    assert figures.histograms["seconds"].counts == [22]
    assert sum(figures.histograms["level_db"].counts) >= 22
    letters = figures.alphabet["fa"]
    clean = "".join(u.clean for u in found.utterances)
    assert letters == {c: clean.count(c) for c in set(clean)}
    assert list(letters.values()) == sorted(letters.values(), reverse=True)
    train = [u for u in found.utterances if u.split == 0]
    lengths = row_lengths(
        np.array([len(u.tokens) for u in train]),
        np.array([-(-u.num_samples // 1024) for u in train]),
    )
    assert figures.padding[1] == padded_share(lengths, [int(lengths.max())])
    assert list(figures.padding.values()) == sorted(figures.padding.values(), reverse=True)


def test_a_finding_names_the_utterance_that_it_is_about(made):
    found, _, _ = made
    by_kind = {f["kind"]: f for f in found.report.findings}
    (clipped,) = by_kind["clipped"]["utterances"]
    assert found.utterances[clipped].path.name == "004.wav"
    for finding in by_kind.values():
        assert len(finding["worst"]) == len(finding["said"]) == len(finding["utterances"])
        for at, of in zip(finding["worst"], finding["utterances"], strict=True):
            assert int(at.rpartition(":")[2]) == int(found.utterances[of].name) + 1, finding


def test_the_page_holds_all_and_asks_for_nothing(made):
    found, figures, text = made
    page = Page(text)
    assert not page.all("script")
    assert not page.all("link")
    assert not page.all("img")
    assert not re.search(r"(?:src|href)=\"(?!data:)|url\(|@import", text)
    assert len(page.all("svg")) == 5
    said = "".join(page.texts)
    for kind, count in found.report.tally.items():
        assert f"{kind}: {count}" in said
    for finding in found.report.findings:
        assert finding["message"] in said
    for c in figures.alphabet["fa"]:
        assert c == " " or c in said
    worst = [p for f in found.report.findings for p in zip(f["worst"], f["said"], strict=True)]
    assert any(said.startswith(at) for at, said in worst)
    assert len(re.findall(r"metadata\.csv:\d+</small>", text)) == len(worst)
    assert not re.search(r"metadata\.csv:\d+[^<]*</bdi>", text)  # not twice
    persian = [a for a in page.all("p") if a.get("lang") == "fa"]
    assert persian
    assert all(a["dir"] == "auto" for a in persian)


def test_what_a_corpus_says_is_text_and_no_markup(tmp_path, scanned, tokenizer):
    evil = '"><img src=x onerror=alert(1)>{{ 7*7 }}'
    root = tones(tmp_path / "c", 6)
    rows = [f"00{i}|{sentence(i)}|{sentence(i)}|{evil}|en" for i in range(5)]
    write_metadata(
        root, ["audio_file|raw|text|speaker_name|language", *rows, f"{evil}|a b|a b|{evil}|en"]
    )
    found = scanned(root)
    figures = Figures.of(found.result.path, scan_cases.settings(root))
    write_page(found.report, figures, found.result.path, tmp_path / "page.html")
    page = Page((tmp_path / "page.html").read_text())
    assert not page.all("img")
    assert any(evil in t for t in page.texts)  # neither executed nor left out
    assert not any("49" in t for t in page.texts if "onerror" in t)


def test_clips_play_as_training_hears_them(made):
    found, _, text = made
    (first, *_) = [a["src"] for a in Page(text).all("audio")]
    kind, _, data = first.partition(",")
    assert kind == "data:audio/mpeg;base64"
    wave, rate = soundfile.read(io.BytesIO(base64.b64decode(data)))
    assert rate == 22050
    assert abs(len(wave) - 44100) < 4000  # an encoder adds frames
    clipped = next(f for f in found.report.findings if f["kind"] == "clipped")
    freq = 200 + int(found.utterances[clipped["utterances"][0]].name)
    spectrum = np.abs(np.fft.rfft(wave[4000:26050]))
    assert abs(int(np.argmax(spectrum)) - freq) <= 1
    assert np.abs(wave).max() > 0.8


def test_a_clip_that_is_gone_meanwhile_is_said(tmp_path, scanned):
    root = corpus(tmp_path / "corpus")
    found = scanned(root, language="fa")
    (root / "wavs/004.wav").unlink()
    figures = Figures.of(found.result.path, scan_cases.settings(root, language="fa"))
    write_page(found.report, figures, found.result.path, tmp_path / "page.html")
    assert "cannot be opened" in (tmp_path / "page.html").read_text()


def test_few_buckets_are_suggested_where_more_save_nothing(tmp_path, scanned, tokenizer):
    """Clips of 2 s with texts of two lengths: two buckets leave nothing to save."""
    root = tones(tmp_path / "c", 96)
    texts = ["a" * (10 if i % 2 else 60) for i in range(96)]
    write_metadata(root, [f"{i:03d}|{t}|{t}" for i, t in enumerate(texts)])
    found = scanned(root)
    config = scan_cases.settings(root)
    figures = Figures.of(found.result.path, config)
    assert figures.padding[1] > 0.2
    assert figures.padding[2] == 0
    for batch_size, suggested in ((8, ["batching.buckets=2"]), (48, [])):  # 48: too few batches
        batching = config.batching.model_copy(update={"batch_size": batch_size})
        figures = Figures.of(found.result.path, config.model_copy(update={"batching": batching}))
        assert [s.setting for s in figures.suggestions if "buckets" in s.setting] == suggested


def test_the_command_writes_page_and_json(tmp_path, capsys):
    root, page = corpus(tmp_path / "corpus"), tmp_path / "report.html"
    command = ["scan", f"data.train={root}", "data.language=fa", "model.size=tiny"]
    assert launch.main([*command, "--html", str(page), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    documented = re.findall(
        r"`(\w+)`",
        "".join(
            line.split("|")[1]
            for line in (launch.ROOT / "docs/data.md")
            .read_text()
            .partition("| `version` | 1 |")[1:][1]
            .splitlines()
            if line.startswith("| `")
        ),
    )
    assert set(found) == {"version", *documented}
    assert found["version"] == 1
    assert found["kept"] + found["rejected"] == 25
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert launch.main([*command, "--html", str(tmp_path / "no/such/x.html")]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_facts_of_every_file_can_be_read(made):
    found, _, _ = made
    with Manifest.open(found.result.path) as m:
        facts = list(m.facts())
    assert len(facts) == 24
    assert all(f["rate"] == 22050 for f in facts)
