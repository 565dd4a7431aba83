"""The page of a run: what is on it, with answers known beforehand."""

import base64
import html
import io
import json
import re
import shutil
from html.parser import HTMLParser

import numpy as np
import pytest
import soundfile
from PIL import Image

from common.data.manifest import Manifest
from common.data.manifest_writer import ManifestWriter
from common.run import settings
from common.system.errors import BadInput
from tests.support import page_runs
from tests.support.page_runs import HOSTILE, RATE, put_utterance, tone
from trainer.history import judgements
from trainer.page import facts, report, sentences, sounds, svg
from trainer.report import summary
from trainer.report.pictures import Curve, Level, Panel

page_run = page_runs.page_run


class Tags(HTMLParser):
    """(tag, attributes) of a page in order; fails where tags do not nest."""

    VOID = {"meta", "link", "img", "br", "wbr"}

    def __init__(self, text: str):
        super().__init__()
        self.found, self._open = [], []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag


# -- curves


def test_a_charts_pixels():
    """Values 0 to 10 at steps 1 to 11: the first point is at the left foot, the last at the right,
    the best step in the middle.
    """
    panel = Panel("p", [Curve("c", range(1, 12), range(11))], "y", [Level("half", 5.0)])
    c = svg.chart(panel, best_step=6)
    first, *_, last = c.lines[0].points
    assert (first[0], last[0]) == (c.left, c.right)
    assert c.best.at == pytest.approx((c.left + c.right) / 2)
    assert first[1] == c.bottom  # 0 is the foot
    assert c.levels[0].at == pytest.approx(c.lines[0].points[5][1], abs=0.06)
    assert c.lines[0].last == "10"
    assert svg.chart(panel, best_step=99).best is None


def test_charts_pass_over_what_is_not_finite():
    assert svg.chart(Panel("p", [Curve("c", [1, 2], [np.nan, np.inf])], "y")) is None
    c = svg.chart(Panel("p", [Curve("c", [1, 2, 3], [1.0, np.nan, 3.0])], "y"))
    assert len(c.lines[0].points) == 2
    assert svg.chart(Panel("p", [Curve("c", [7], [2.5])], "y")).lines[0].last == "2.5"


def test_thinned_curves_keep_their_peaks():
    y = np.zeros(100_000)
    y[31_415] = 9.0
    y[27_182] = -4.0
    x, kept = svg.thinned(np.arange(100_000), y)
    assert len(x) <= 400
    assert (kept.max(), kept.min()) == (9.0, -4.0)
    assert (x[0], x[-1]) == (0, 99_999)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 10, [0, 2, 4, 6, 8, 10]), (0.07, 0.43, [0.1, 0.2, 0.3, 0.4]), (-5, 5, [-4, -2, 0, 2, 4])],
)
def test_ticks_are_round(low, high, expected):
    assert svg.ticks(low, high) == pytest.approx(expected)


def test_log_ticks():
    assert svg.log_ticks(0.9, 30) == pytest.approx([1, 2, 5, 10, 20])
    assert svg.log_ticks(1e-4, 10) == pytest.approx([1e-4, 1e-3, 1e-2, 0.1, 1, 10])


# -- sounds


def test_a_mel_shows_a_tone_at_its_frequency():
    """1 kHz is where the axis says."""
    mel = sounds.Sound(None, tone(1000, 1.0), RATE).log_mel
    row = 1 - (np.argmax(mel.mean(0)) + 0.5) / mel.shape[1]
    assert row == pytest.approx(sounds.height_of(1000), abs=0.02)
    assert (sounds.height_of(0), sounds.height_of(8000)) == (1.0, 0.0)


def test_opus_plays_as_long_as_the_sound():
    for rate in (RATE, 24000, 8000):
        address = sounds.opus(sounds.Sound(None, tone(440, 1.5, rate), rate))
        kind, _, data = address.partition(";base64,")
        assert kind == "data:audio/ogg"
        found = soundfile.info(io.BytesIO(base64.b64decode(data)))
        assert found.subtype == "OPUS"
        assert found.duration == pytest.approx(1.5, abs=0.05)


def test_the_scale_is_the_recordings_not_that_of_a_bad_sample(tmp_path):
    loud = sounds.Sound(tmp_path, tone(1000, 1.0), RATE)
    noise = sounds.Sound(tmp_path, np.full(RATE, 1e-4, np.float32), RATE)
    of = [
        sentences.Sentence(
            "a", "", "en", "", (sentences.Take("recording", loud), sentences.Take("step 1", noise))
        )
    ]
    assert sentences.scale_of(of) == sounds.Scale.of([loud.log_mel])
    assert sounds.Scale.of([]).high == 0.0


def test_what_cannot_be_read_is_no_sound(tmp_path):
    (tmp_path / "a.wav").write_bytes(b"no sound at all")
    assert sounds.load(tmp_path / "a.wav") is None
    assert sounds.load(tmp_path / "b.wav") is None


def test_steps_are_spread():
    assert sentences.spread([1, 2, 3], 12) == [1, 2, 3]
    assert sentences.spread(list(range(0, 1001, 10)), 3) == [0, 500, 1000]
    assert len(sentences.spread(list(range(100)), 12)) == 12


# -- pages


def test_a_page_has_everything_and_nothing_of_it_is_code(page_run):
    path = report.write(page_run)
    text = path.read_text(encoding="utf-8")
    tags = Tags(text).found
    assert path.name == "report.html"
    assert HOSTILE not in text
    assert html.escape(HOSTILE, quote=False).replace('"', "&#34;") in text
    assert not [t for t, _ in tags if t in ("script", "iframe", "object")]
    addresses = [a.get(k, "") for _, a in tags for k in ("src", "href")]
    assert all(a[:5] == "data:" or a[:1] in ("#", "") for a in addresses), "opens without a network"
    persian = [a for t, a in tags if t == "p" and a.get("lang") == "fa"]
    assert [a["dir"] for a in persian] == ["rtl"]
    assert sum(t == "audio" for t, _ in tags) == 3  # two at step 10; through the codes at the end
    assert "stopped at once: nothing was said" in text
    assert "cut off: did not stop by itself" in text
    assert "best: step" in text
    assert re.search(r"<code>model.<wbr>size</code></td><td><bdi>tiny</bdi>", text)


def test_sounds_beside_the_page(page_run):
    text = report.write(page_run, report.FILES).read_text()
    found = [a["src"] for t, a in Tags(text).found if t == "audio"]
    assert "samples/step-00000010/synth_fa_1.wav" in found
    assert all((page_run / f).is_file() for f in found)


def test_a_run_without_steps_has_a_page(page_run):
    shutil.rmtree(page_run / "samples")
    for file in ("metrics.jsonl", "ledger.jsonl", "dvae/metrics.jsonl", "dvae/ledger.jsonl"):
        (page_run / file).unlink(missing_ok=True)
    text = report.write(page_run).read_text()
    assert "No samples yet" in text
    assert text.count("no steps yet") == 2
    assert "figures" not in text, "of nothing"


def test_warnings_of_every_process_are_shown(page_run):
    """Equal ones once, the newest last, the newest eight; nothing else of a log, and no code."""
    assert "Warnings" not in report.write(page_run).read_text()
    logs = page_run / "logs"
    logs.mkdir(exist_ok=True)
    at = "2026-01-31 12:00:{:02d},123 {} {}: {}\n".format
    (logs / "trainer.log").write_text(
        "WARNING: All log messages before absl\n"
        + at(30, "WARNING", "trainer", HOSTILE)
        + at(31, "INFO", "trainer", "all is well")
        + at(40, "WARNING", "trainer", HOSTILE)
    )
    (logs / "producer-0.log").write_bytes(
        b"\xff" + b"x" * facts.LOG_BYTES + b"\n" + at(35, "ERROR", "producer-0", "disk").encode()
    )
    found = facts.warnings(page_run)
    day = "2026-01-31 12:00:"
    assert found == [
        facts.Warned(f"{day}35", "producer-0", "disk", 1),
        facts.Warned(f"{day}40", "trainer", HOSTILE, 2),
    ]
    text = report.write(page_run).read_text()
    assert HOSTILE not in text
    assert "(2 times)" in text
    assert "all is well" not in text
    assert "absl" not in text
    lines = [at(i, "WARNING", "sampler", f"number {i}") for i in range(20)]
    (logs / "trainer.log").write_text("".join(lines))
    assert [w.message for w in facts.warnings(page_run)] == [
        *(f"number {i}" for i in range(13, 20)),
        "disk",
    ]


def test_runs_compared(page_run, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(page_run, other)
    config = other / "config.yaml"
    config.write_text(config.read_text().replace("learning_rate: 5.0e-06", "learning_rate: 0.25"))
    path = report.write_comparison([page_run, other], tmp_path / "c.html")
    text = path.read_text()
    Tags(text)
    rows = re.findall(r"<tr><td><code>([\w.]+)</code></td><td><bdi>(.*?)</bdi>.*<bdi>(.*?)<", text)
    assert ("train.optim.learning_rate", "5e-06", "0.25") in rows
    assert not [k for k, a, b in rows if a == b]
    assert text.count("held-out audio_ce") >= 1
    with pytest.raises(BadInput, match="two run folders"):
        report.write_comparison([page_run], path)
    with pytest.raises(BadInput, match="not a run folder"):
        report.write_comparison([page_run, tmp_path], path)


def test_settings_that_differ():
    config = settings.parse({"train": {"keep": 7}, "data": {"train": "corpus"}})
    changed = {s.key: (s.value, s.default) for s in facts.changed_settings(config)}
    assert changed == {
        "train.keep": ("7", "3"),
        "data.train": ("path: corpus format: auto", "none"),
    }


def test_the_corpus_in_ten_lines(tmp_path):
    with ManifestWriter(tmp_path / "m.sqlite") as w:
        root = w.add_source(tmp_path)
        for i in range(10):
            put_utterance(w, root, i)
    lines = dict(facts.corpus_lines(Manifest.open(tmp_path / "m.sqlite")))
    assert lines["recordings"] == "10, 10.0 min"
    assert lines["held out for evaluation"] == "2"
    assert lines["languages"] == "fa 8.0 min, en 2.0 min"
    assert lines["left out"] == "nothing"
    assert len(lines) <= 10


def test_judgements_of_checkpoints_are_curves_on_the_page(page_run):
    for step, cer in ((5, 0.5), (10, 0.3)):
        figures = {"audio_ce_by_language": {"en": 3.0, "fa": 4.0}, "similarity": 0.6}
        rates = {"cer": cer, "wer": cer, "cer_recordings": 0.1, "wer_recordings": 0.2}
        judgements.add(page_run, step, figures | rates, "audio_ce")
    text = report.write(page_run).read_text()
    Tags(text)
    for title in (
        "Held-out audio CE by language",
        "Understood by a recogniser",
        "Likeness of the voice",
        "cer recordings",
    ):
        assert title in text


def test_samples_say_whose_step_they_are(page_run):
    """Those of a run's end may be of an earlier checkpoint than the last: the best."""
    path = page_run / "samples" / "samples.json"
    assert sentences.step_of_samples(path) is None  # of a run made before they said so
    infos = [info | {"step": 15} for info in json.loads(path.read_text())]
    path.write_text(json.dumps(infos))
    assert "step 15" in html.unescape(report.write(page_run).read_text())
    assert sentences.step_of_samples(page_run / "nowhere") is None


def test_attention_is_shown_below_the_mel_it_belongs_to(page_run):
    """Of the samples that have it; a damaged picture is left out."""
    folder = page_run / "samples" / "step-00000010"
    infos = json.loads((folder / "samples.json").read_text())
    for info, data in zip(infos, (None, b"no picture"), strict=True):
        info |= {"attention": f"attention_{info['name']}.png", "aligned": 0.625}
        if data is None:
            Image.new("RGB", (380, 300), "red").save(folder / info["attention"])
        else:
            (folder / info["attention"]).write_bytes(data)
    (folder / "samples.json").write_text(json.dumps(infos))
    (shown,) = re.findall(r'<img class="attention" src="(.*?)"', report.write(page_run).read_text())
    assert "aligned 0.62" in report.write(page_run).read_text()
    kind, _, data = shown.partition(",")
    assert kind == "data:image/webp;base64"
    with Image.open(io.BytesIO(base64.b64decode(data))) as found:
        assert found.size == (380, 300)
        red, green, blue = found.convert("RGB").getpixel((190, 150))
    assert red > 200 > 50 > max(green, blue)


def test_the_use_and_memory_of_each_card_over_the_steps(page_run):
    """From the speed's records; a run on CPUs has none, and no panel."""
    assert "GPU use" not in report.write(page_run).read_text()
    cards = [
        {"gpu0_percent": 90.0, "gpu0_memory_mb": 8000.0, "step_ms": 1.0},
        {"gpu0_percent": 70.0, "gpu0_memory_mb": 8100.0, "gpu3_percent": 20.0, "step_ms": 1.0},
        {"gpu0_percent": 1.0},  # of a step that was lost with a crash
    ]
    with open(page_run / "metrics.jsonl", "a") as file:
        for step, of in zip((10, 20, 40), cards, strict=True):
            file.write(json.dumps({"step": step, "speed": of, "bottleneck": ""}) + "\n")
    found = summary.History.read(page_run)
    use, memory = facts.speed_panels("x", found)[-2:]
    assert (use.title, memory.title) == ("x: GPU use", "x: GPU memory")
    assert [(c.label, list(c.x), list(c.y)) for c in use.curves] == [
        ("GPU0", [10, 20], [90.0, 70.0]),
        ("GPU3", [20], [20.0]),
    ]
    assert [list(c.y) for c in memory.curves] == [[8000.0, 8100.0]]
    assert "GPU use" in report.write(page_run).read_text()
    assert found.steps[-1]["step_ms"] == 100.0
