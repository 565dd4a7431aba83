"""How good checkpoints are: figures with known answers, which checkpoint they make the best, and
when a run ends by itself.
"""

import importlib.util
import json
import math
import sys
import types
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from common.run import beginning, recognise
from common.run import settings as config_module
from common.system.errors import BadInput
from common.xtts.dims import SIZES
from common.xtts.gpt import Gpt
from producer.creation.sample_texts import check_judge
from tests.support import loop_runs
from tests.support.arithmetic_runs import arithmetic_run
from tests.support.arithmetic_step import ArithmeticStep
from trainer.history import judgements
from trainer.history.checkpoint import Checkpoints
from trainer.previews.judge import HeldOut, Judge, Spoken, cosine, rounded
from trainer.report import quality

TINY = SIZES["tiny"]
AUDIO = TINY.audio


def held_out(name, language="en", speaker="a", text="one two", codes=(1, 1, 2)):
    wav = np.full(8000, 0.1, np.float32)
    return HeldOut(ord(name), language, speaker, text, [5, 6], wav, np.array(codes))


def synthesizer(gpt=None, vocoder=None):
    """What the judge asks of a `Synthesizer`."""
    latents = np.zeros((1, TINY.gpt.num_latents, TINY.gpt.width), np.float32)
    asked = []

    def voice(clips):
        asked.append(clips)
        return SimpleNamespace(latents=latents)

    return SimpleNamespace(
        gpt=gpt,
        vocoder=vocoder,
        voice=voice,
        asked=asked,
        dims=TINY,
        sample_rate=AUDIO.sample_rate,
        tokenizer=SimpleNamespace(clean=lambda text, language: text.lower()),
    )


RUN = SimpleNamespace(
    config=SimpleNamespace(batching=SimpleNamespace(text_stop_input=False)), path=None
)


def test_cross_entropy_by_language_and_speaker():
    """A head without weights predicts the same whatever it has heard: log sum exp(b) - b[code]."""
    gpt = Gpt(TINY.gpt, seed=1)
    bias = np.zeros(TINY.gpt.num_audio_tokens, np.float32)
    bias[1], bias[2], bias[TINY.gpt.stop_audio] = 2.0, 1.0, 0.5
    gpt.mel_head.weight.assign(tf.zeros_like(gpt.mel_head.weight))
    gpt.mel_head.bias.assign(bias)
    z = math.log(np.exp(bias.astype(np.float64)).sum())
    all_of = [
        held_out("x", "en", "a", codes=(1, 1, 2)),
        held_out("y", "de", "a", codes=(3,)),
        held_out("z", "de", "b", codes=(2, 2)),
    ]
    s = synthesizer(gpt)
    figures = Judge(RUN, s, all_of)([])
    sums = {"x": 4 * z - 5.5, "y": 2 * z - 0.5, "z": 3 * z - 2.5}  # STOP is a code, too
    assert figures["audio_ce"] == pytest.approx(sum(sums.values()) / 9, rel=1e-5)
    assert figures["audio_ce_by_language"] == pytest.approx(
        {"de": (sums["y"] + sums["z"]) / 5, "en": sums["x"] / 4}, rel=1e-5
    )
    assert figures["audio_ce_by_speaker"] == pytest.approx(
        {"a": (sums["x"] + sums["y"]) / 6, "b": sums["z"] / 3}, rel=1e-5
    )
    assert figures["utterances"] == 3
    # Each is spoken in the voice of another clip of its speaker, if there is one.
    assert [clips[0] is u.wav for clips, u in zip(s.asked, (all_of[1], all_of[0]), strict=False)]
    assert [any(c[0] is u.wav for c in s.asked) for u in all_of] == [True, True, True]


def test_error_rates_beside_those_of_the_recordings():
    heard = {"x": "one two three four", "z": "eins"}
    us = [
        held_out("x", text="one two three four"),
        held_out("y", "fa", text="یک"),
        held_out("z", "de", text="eins zwei"),
    ]

    def listen(wav, rate, language):
        if language == "fa":
            return None  # a language that it does not know
        name = "x" if language == "en" else "z"
        return heard[name] if len(wav) == 8000 else "ONE, two! free"

    said = [Spoken(us[0], np.ones(5)), Spoken(us[1], np.ones(5)), Spoken(us[2], np.zeros(0))]
    figures = Judge(RUN, synthesizer(), [], listen)(said)
    assert figures["heard"] == 2
    # en: "three" → "free", "four" lost; de: nothing was said
    assert figures["wer_by_language"] == {"de": 1.0, "en": 0.5}
    # "three four" → "free": t deleted, h → f, " four" deleted: 7 of 18
    assert figures["cer_by_language"] == pytest.approx({"de": 1.0, "en": 7 / 18})
    assert figures["wer"] == pytest.approx(0.75)
    assert figures["wer_recordings"] == pytest.approx((0 + 0.5) / 2)


def test_likeness_is_the_cosine_of_the_embeddings():
    def speaker(clips, rate):
        level = float(np.abs(clips[0]).mean())
        return np.array([[1.0, 0.0]]) if level < 0.2 else np.array([[0.6, 0.8]])

    s = synthesizer(vocoder=SimpleNamespace(speaker=speaker))
    u = held_out("x")
    said = [Spoken(u, np.full(900, 0.1)), Spoken(u, np.full(900, 0.5)), Spoken(u, np.zeros(0))]
    figures = Judge(RUN, s, [])(said)
    assert figures["similarity"] == pytest.approx((1.0 + 0.6 + 0.0) / 3)
    assert cosine(np.zeros(2), np.ones(2)) == 0.0


def test_json_has_no_nan():
    assert rounded({"a": math.nan, "b": {"c": math.inf, "d": 1 / 3}, "n": 4}) == {
        "b": {"d": 0.333333},
        "n": 4,
    }


def checkpoint(folder, *steps):
    c = Checkpoints(folder / "checkpoints", keep=2)
    for step in steps:
        tensors = {"model": {"w": np.zeros(2, np.float32)}, "optimizer": {}}
        c.save(step, tensors, {"best_step": None})
    return c


def test_the_judged_best_is_kept_and_is_what_the_run_speaks_with(tmp_path):
    checkpoint(tmp_path, 1)
    judgements.add(tmp_path, 1, {"cer": 0.2, "similarity": 0.9}, "cer")
    for step, cer in ((2, 0.4), (3, 0.2), (4, 0.5)):
        checkpoint(tmp_path, step)
        judgements.add(tmp_path, step, {"cer": cer, "similarity": cer}, "cer")
    kept = [int(p.name[5:]) for p in sorted((tmp_path / "checkpoints").iterdir())]
    assert kept == [1, 3, 4]  # two, and the best
    assert beginning.checkpoint_of(tmp_path, None).parent.name == "step-00000001"
    assert judgements.since_best(tmp_path) == 3
    assert judgements.decide(tmp_path, "similarity").step == 1  # more is better
    assert judgements.decide(tmp_path, "audio_ce") is None
    assert beginning.checkpoint_of(tmp_path, None).parent.name == "step-00000004"
    with (tmp_path / "metrics.jsonl").open("a") as f:
        f.write('{"step": 9, "quality": {"cer')  # a kill in the middle
    assert sorted(judgements.read(tmp_path)) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("tree", "names"),
    [
        ({"train": {"best_by": "cer"}}, "samples.recogniser"),
        ({"train": {"best_by": "similarity"}}, "model.weights"),
        ({"train": {"best_by": "similarity"}, "samples": {"every": 0}}, "samples.every"),
        ({"samples": {"recogniser": "/no/such/model"}}, "faster-whisper model"),
    ],
)
def test_what_nobody_can_measure_is_refused(tree, names):
    with pytest.raises(BadInput, match=names):
        check_judge(config_module.parse({"model": {"size": "tiny"}, **tree}))


def test_a_recogniser_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(recognise.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"needs jiwer and pocketsphinx: pip install"):
        recognise.check("pocketsphinx")


def test_patience_ends_a_run_at_the_best_and_that_many_evaluations(tmp_path, monkeypatch, caplog):
    """Scores fall until step 15 and rise then: best + 3 evaluations of 5 steps is step 30."""
    run = arithmetic_run(
        tmp_path,
        train__max_steps=60,
        train__accumulate=1,
        train__eval_every=5,
        train__eval_at_epoch_end=False,
        train__patience=3,
    )
    steps = []

    def evaluate(self, bucket, batch):
        return {"audio_sum": 1.0 + abs(self.t - 15), "audio_count": 1.0}

    def apply(self, *args):
        steps.append(1)
        return done(self, *args)

    done = ArithmeticStep.update
    monkeypatch.setattr(ArithmeticStep, "evaluate", evaluate)
    monkeypatch.setattr(ArithmeticStep, "update", apply)
    loop_runs.train(run)
    state = loop_runs.newest(run)
    assert (state["step"], state["best_step"], state["position"]["since_best"]) == (30, 15, 3)
    before = len(steps)
    saved = loop_runs.newest(run)
    loop_runs.train(run)  # again: nothing is left
    assert len(steps) == before
    assert loop_runs.newest(run) == saved
    assert "is at step 30, where train.patience=3 ended it: nothing is left" in caplog.text


def test_curves_and_lines_of_judgements():
    judged = {
        10: {"audio_ce_by_language": {"en": 3.0, "de": 4.0}, "cer": 0.5, "cer_recordings": 0.1},
        20: {"audio_ce_by_language": {"en": 2.0}},
    }
    ce, heard = quality.panels(judged)
    assert [(c.label, list(c.x), list(c.y)) for c in ce.curves] == [
        ("de", [10], [4.0]),
        ("en", [10, 20], [3.0, 2.0]),
    ]
    assert [c.label for c in heard.curves] == ["cer", "cer recordings"]
    rows = quality.rows(
        {
            "best_checkpoint": 10,
            "best_by": "cer",
            "quality": judged[10],
            "last_judged": 20,
            "quality_last": {"cer": 0.7},
        }
    )
    assert rows[:2] == [
        ("best checkpoint", "step 10, by cer"),
        ("character error rate", "50.0 % (recordings 10.0 %, step 20 70.0 %)"),
    ]
    json.dumps(judged)


# -- recognisers -----------------------------------------------------------------------------------


@pytest.fixture
def whisper(monkeypatch):
    """A stand-in for faster-whisper: hears "<language> <seconds>" in two parts."""
    made = []

    class WhisperModel:
        supported_languages = ("en", "fa")

        def __init__(self, folder, **options):
            made.append((folder, options))

        def transcribe(self, wav, **options):
            assert wav.dtype == np.float32
            assert not options["condition_on_previous_text"]
            seconds = f" {len(wav) / recognise.RATE:.1f} "
            parts = (SimpleNamespace(text=t) for t in (f" {options['language']}", seconds))
            return parts, SimpleNamespace()

    module = types.ModuleType("faster_whisper")
    module.WhisperModel, module.__spec__ = WhisperModel, ModuleSpec("faster_whisper", None)
    monkeypatch.setitem(sys.modules, "faster_whisper", module)
    return made


def test_faster_whisper_listens_with_a_model_in_a_folder(tmp_path, whisper):
    (tmp_path / "model.bin").write_bytes(b"")
    listen = recognise.recogniser(str(tmp_path))
    assert whisper == [(str(tmp_path), {"device": "cpu", "local_files_only": True})]
    wav = np.full(22050, 0.1, np.float32)  # 1 s, and a quarter of silence at either end
    assert listen(wav, 22050, "fa") == "fa 1.5"
    assert listen(wav, 22050, "xx") is None  # the model does not know it


def test_a_folder_without_a_model_is_refused_before_anything_is_loaded(tmp_path, whisper):
    says = "neither pocketsphinx nor a folder with a faster-whisper model"
    with pytest.raises(BadInput, match=says):
        recognise.recogniser(str(tmp_path))
    assert whisper == []


def test_faster_whisper_that_is_not_installed_is_named(tmp_path, monkeypatch):
    (tmp_path / "model.bin").write_bytes(b"")
    found = importlib.util.find_spec
    lacking = lambda name: None if name == "faster_whisper" else found(name)  # noqa: E731
    monkeypatch.setattr(recognise.importlib.util, "find_spec", lacking)
    with pytest.raises(BadInput, match=r"needs faster_whisper: pip install 'xtts-trainer\[whisper"):
        recognise.check(str(tmp_path))


def test_pocketsphinx_knows_english_alone_and_hears_nothing_in_silence():
    pytest.importorskip("pocketsphinx")
    listen = recognise.recogniser("pocketsphinx")
    assert listen(np.zeros(22050, np.float32), 22050, "en") == ""
    assert listen(np.zeros(22050, np.float32), 22050, "fa") is None


def test_rates_against_counts_by_hand():
    """Of 7 words, one is replaced (w → o), one lost (" four") and one too many (" up")."""
    said, heard = ["one two three four", "five six seven"], ["one too three", "five six seven up"]
    found = recognise.rates([*said, "…"], [*heard, "x"], lambda text: text)
    assert found.wer == pytest.approx(3 / 7)
    assert found.cer == pytest.approx((1 + 5 + 3) / (18 + 14))
    with pytest.raises(ValueError, match="no text"):
        recognise.rates(["…"], ["a"], lambda text: text)
