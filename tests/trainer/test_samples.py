"""Samples of a run: which utterances, which files, and what is said when the model doesn't stop."""

import dataclasses
import json
import logging
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import soundfile

import launch
from common.run import settings as config_module
from common.run.folder import RunFolder
from common.run.sections import Samples
from common.xtts.dvae import Dvae
from common.xtts.gpt import Gpt
from common.xtts.sampling import SamplingOptions
from common.xtts.synthesize import Synthesizer
from producer.creation.prepare import prepare_run
from tests.support.coqui_files import imported_run
from tests.support.corpora import make_corpus, sine, write_wav
from trainer.previews import samples
from trainer.previews.samples import SampleMaker
from trainer.previews.script import _file_name, choose
from trainer.report.pictures import Png


class FakeBoard:
    """Keeps the tags it was given."""

    def __init__(self):
        self.tags, self.texts = [], []

    def sound(self, step, tag, samples, sample_rate):
        assert (step, samples.dtype, sample_rate) == (7, np.float32, 22050)
        self.tags.append(tag)

    def text(self, step, tag, text):
        assert text
        self.texts.append(tag)

    def picture(self, step, tag, png, width, height):
        assert png[:4] == b"\x89PNG"
        self.tags.append(tag)


def columns(*rows):
    """(split, language, speaker) per utterance."""
    split, language, speaker = np.array(rows).T
    return {
        "split": split.astype(np.uint8),
        "language": language.astype(np.int16),
        "speaker": speaker.astype(np.int32),
    }


def test_utterances_are_chosen_across_languages_then_speakers():
    held_out = [(1, 0, 0), (1, 0, 0), (0, 2, 9), (1, 0, 1), (1, 1, 0), (1, 1, 2)]
    assert choose(columns(*held_out), 4) == [
        0,
        5,
        3,
        4,
    ]  # en; de, by another speaker; en, by a third; what is left of de
    assert choose(columns(*held_out), 9) == [0, 5, 3, 4, 1]
    assert choose(columns(*held_out), 0) == []
    assert choose(columns((0, 0, 0), (0, 0, 1)), 2) == [
        0,
        1,
    ]  # no evaluation split: the training set's


def test_file_names():
    assert _file_name("wavs/a b?.WAV") == "a_b_"
    assert _file_name("LJ001-0002") == "LJ001-0002"
    assert _file_name("v1.2") == "v1.2"
    assert len(_file_name("x" * 99)) == 60


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("samples")
    make_corpus(folder / "corpus", 8, seconds=lambda i: 1.0 + 0.1 * i)
    tree = {
        "run": str(folder / "run"),
        "data": {"train": str(folder / "corpus"), "eval_fraction": 0.4, "scan_threads": 1},
        "model": {"size": "tiny"},
        "text": {"vocab_size": 60},
        "samples": {"count": 2, "texts": ["one two three"]},
    }
    return prepare_run(config_module.parse(tree), on_cpu=True, cores=2)


@pytest.fixture(scope="module")
def made(run):
    """A random model that never stops by itself."""
    gpt, dvae = Gpt(run.dims.gpt, seed=1), Dvae(run.dims.dvae)
    bias = gpt.mel_head.bias.numpy()
    bias[-2:] = -40.0
    gpt.mel_head.bias.assign(bias)
    dvae.initialise(2)
    return SampleMaker(run, gpt, dvae, SamplingOptions(max_codes=20)), gpt


def test_files_of_each_sample(run, made, tmp_path, caplog):
    maker, _ = made
    board = FakeBoard()
    with caplog.at_level(logging.WARNING):
        infos = maker.make(tmp_path / "samples", 7, board)
    own, texts = infos[:2], infos[2:]
    assert [i.text for i in texts] == ["one two three"]
    for i in own:
        spoken, rate = soundfile.read(tmp_path / "samples" / i.synth)
        recon, _ = soundfile.read(tmp_path / "samples" / i.recon)
        assert rate == 22050
        assert len(spoken) == 256 * (4 * i.num_codes - 1) == pytest.approx(i.seconds * rate, abs=15)
        assert abs(len(recon) / rate - i.true_seconds) < 0.03
        assert i.true_codes == math.ceil(i.true_seconds * rate / 1024)
        assert i.level > 0
        assert np.abs(recon).max() > 0
        assert i.num_codes == min(20, 4 * i.true_codes)
        assert (tmp_path / "samples" / i.picture).read_bytes()[:4] == b"\x89PNG"
        assert not i.stopped
    assert "no STOP within 20 codes; cut off" in caplog.text
    for i in texts:
        assert (i.recon, i.true_codes, i.reference) == (None, None, own[0].reference)
        assert (tmp_path / "samples" / i.synth).is_file()
    assert [e["name"] for e in json.loads((tmp_path / "samples" / "samples.json").read_text())] == [
        i.name for i in infos
    ]
    assert {
        f"samples/{own[0].name}/mel",
        f"samples/{own[0].name}/synth",
        f"samples/{own[0].name}/recon",
    } <= set(board.tags)
    assert set(board.texts) == {f"samples/{i.name}/text" for i in infos}
    for i in infos:  # each code's attention over the text, by a model that has learnt nothing
        assert (tmp_path / "samples" / i.attention).read_bytes()[:4] == b"\x89PNG"
        assert 0 <= i.aligned < 0.5
        assert f"samples/{i.name}/attention" in board.tags


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """A run that begins with imported weights, vocoder included."""
    return imported_run(tmp_path_factory.mktemp("imported"))


def maker_of_imported(run):
    gpt, dvae = Gpt(run.dims.gpt, seed=1), Dvae(run.dims.dvae)
    dvae.initialise(2)
    maker = samples.maker_of(run, gpt, dvae)
    maker._options = dataclasses.replace(maker._options, max_codes=12)
    vocoder = maker._synthesizer.vocoder
    for t in (
        vocoder.encoder.tensors() if vocoder else ()
    ):  # drawn at random, as no variance and no filter bank can be
        if t.key.endswith(("running_var", ".fb")):
            t.variable.assign(np.abs(t.variable.numpy()) + 0.1)
    return maker


def test_imported_weights_speak_through_their_vocoder(imported, tmp_path, monkeypatch):
    monkeypatch.setattr(Synthesizer, "from_mel", lambda *_: pytest.fail("Griffin-Lim"))
    maker = maker_of_imported(imported)
    (info,) = maker.make(tmp_path, 7)
    assert maker._options.text_stop_input
    for name, codes in (
        (info.synth, info.num_codes + info.stopped),
        (info.recon, info.true_codes + 1),
    ):  # STOP's frame is heard, too
        wav, rate = soundfile.read(tmp_path / name)
        assert rate == 24000
        assert len(wav) == 256 * int(int(4 * codes) * 24000 / 22050)
        assert np.abs(wav).max() > 0
    assert info.seconds == pytest.approx(1024 * (info.num_codes + info.stopped) / 22050, abs=0.02)
    assert (tmp_path / info.picture).read_bytes()[:4] == b"\x89PNG"


@pytest.mark.usefixtures("quick")
def test_a_vocoder_that_is_damaged_is_done_without(imported, tmp_path, caplog):
    path = Path(imported.config.model.weights) / "hifigan.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])
    try:
        (info,) = maker_of_imported(imported).make(tmp_path, 7)
    finally:
        path.write_bytes(whole)
    assert soundfile.info(tmp_path / info.synth).samplerate == 22050
    assert "samples use Griffin-Lim instead of the vocoder" in caplog.text


@pytest.mark.usefixtures("quick")
def test_weights_that_are_gone_are_not_done_without_in_silence(imported, tmp_path, caplog):
    shutil.copytree(imported.path, tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    (run.pretrained / "hifigan.safetensors").unlink()
    maker_of_imported(run)
    assert "no longer contains its vocoder" in caplog.text
    shutil.rmtree(run.pretrained)
    run.config = run.config.model_copy(
        update={"model": run.config.model.model_copy(update={"weights": None})}
    )
    caplog.clear()
    maker_of_imported(run)
    assert "pretrained is no longer there" in caplog.text


@pytest.fixture
def quick(monkeypatch):
    """No Griffin-Lim and no drawing, for tests that are about neither: the sound is the
    mel itself.
    """
    monkeypatch.setattr(
        Synthesizer, "from_mel", lambda self, mel: np.ravel(mel).astype(np.float32) / 50
    )
    monkeypatch.setattr(samples, "mel_picture", lambda *_: Png(b"", 0, 0))


@pytest.mark.usefixtures("quick")
def test_weights_decide_the_sound_and_nothing_is_compiled_again(made, tmp_path):
    maker, gpt = made
    first, again = (maker.make(tmp_path / name, 7) for name in "ab")
    traces = maker._synthesizer.sampler.trace_counts.copy()
    assert first == again
    assert (tmp_path / "a" / first[0].synth).read_bytes() == (
        tmp_path / "b" / first[0].synth
    ).read_bytes()
    weight = gpt.mel_head.weight.numpy()
    gpt.mel_head.weight.assign(-weight)
    try:
        maker.make(tmp_path / "c", 8)
    finally:
        gpt.mel_head.weight.assign(weight)
    assert (tmp_path / "a" / first[0].synth).read_bytes() != (
        tmp_path / "c" / first[0].synth
    ).read_bytes()
    assert maker._synthesizer.sampler.trace_counts == traces


@pytest.mark.usefixtures("quick")
def test_a_model_that_stops_at_once_leaves_the_reconstruction(made, tmp_path, caplog):
    maker, gpt = made
    bias = gpt.mel_head.bias.numpy()
    gpt.mel_head.bias.assign(bias + 1e4 * (np.arange(len(bias)) == len(bias) - 1))
    try:
        infos = maker.make(tmp_path, 7)
    finally:
        gpt.mel_head.bias.assign(bias)
    assert (infos[0].synth, infos[0].seconds, infos[0].level, infos[0].stopped) == (
        None,
        0.0,
        0.0,
        True,
    )
    assert (tmp_path / infos[0].recon).is_file()
    assert "said nothing" in caplog.text


@pytest.mark.usefixtures("quick")
def test_interim_samples_leave_out_what_stays_the_same(made, tmp_path, caplog):
    maker, _ = made
    maker.make(tmp_path / "before", 6, interim=True)
    caplog.clear()
    infos = maker.make(tmp_path, 7, interim=True)
    assert [i.recon for i in infos] == [None] * 3
    assert not list(tmp_path.glob("recon*"))
    assert not caplog.records, "that it is cut off is nothing to warn of"


def test_whose_voice_says_the_users_texts(run, tmp_path, caplog):
    """The text's own clip, else the shared ones in turn, else the first utterance; what has
    vanished is passed over.
    """
    clips = [str(write_wav(tmp_path / f"{n}.wav", sine(22050, 200 + 100 * n))) for n in range(3)]
    texts = [
        {"text": "one"},
        {"text": "two", "reference": clips[2]},
        {"text": "three", "reference": str(tmp_path / "gone.wav")},
        "one two",
    ]

    def voices(**samples_):
        wanted = Samples.model_validate({"count": 1, "texts": texts, **samples_})
        config = run.config.model_copy(update={"samples": wanted})
        changed = RunFolder(run.path)
        changed.config = config
        maker = SampleMaker(changed, Gpt(run.dims.gpt, seed=1), Dvae(run.dims.dvae))
        return [(line.name, line.reference.name) for line in maker._lines]

    held_out = run.manifest.utterances(choose(run.manifest.columns(), 1))[0]
    own = (f"en_{held_out.name}", held_out.name)
    assert voices() == [own, ("en_text0", own[1]), ("en_text1", clips[2]), ("en_text3", own[1])]
    assert "samples.texts[2] is skipped: there is no voice for it" in caplog.text
    assert voices(references=clips[:2], count=0) == [
        ("en_text0", clips[0]),
        ("en_text1", clips[2]),
        ("en_text3", clips[1]),
    ]
    assert voices(count=0, texts=["one"]) == [("en_text0", own[1])], (
        "a voice is found although no utterance is to be said"
    )


def test_a_text_without_words_is_passed_over(run, caplog):
    changed = RunFolder(run.path)
    changed.config = run.config.model_copy(
        update={"samples": Samples.model_validate({"count": 1, "texts": ["😀", "one"]})}
    )
    lines = SampleMaker(changed, Gpt(run.dims.gpt, seed=1), Dvae(run.dims.dvae))._lines
    assert [line.name for line in lines][1:] == ["en_text1"]
    assert "samples.texts[0] is skipped: no words in the text '😀': nothing to say" in caplog.text


@pytest.mark.usefixtures("quick")
def test_a_model_that_prefers_start_makes_samples_all_the_same(made, tmp_path):
    maker, gpt = made
    bias = gpt.mel_head.bias.numpy()
    gpt.mel_head.bias.assign(bias + 1e4 * (np.arange(len(bias)) == len(bias) - 2))
    try:
        infos = maker.make(tmp_path, 7)
    finally:
        gpt.mel_head.bias.assign(bias)
    assert all(i.num_codes and i.synth for i in infos)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            {"texts": ["fine", "😀"]},
            (
                r"samples.texts\[1\] \('😀'\) cannot be spoken: no words in the text '😀': nothing"
                r" to say"
            ),
        ),
        (
            {"texts": ["fine", " "]},
            r"samples.texts\[1\] \(' '\) cannot be spoken: the text is empty",
        ),
        (
            {"texts": [{"text": "hallo", "language": "de"}]},
            r"samples.texts\[0\] .*language de not in vocabulary; have: en",
        ),
        (
            {"references": ["nowhere.wav"]},
            r"samples.references\[0\]: reference .*nowhere.wav: cannot be read as audio",
        ),
        (
            {"texts": [{"text": "a", "reference": "noise.wav"}]},
            r"samples.texts\[0\].reference: .*noise.wav: cannot be read as audio",
        ),
        ({"references": ["short.wav"]}, r"samples.references\[0\]: .*short.wav is 0.10 s long"),
    ],
)
def test_what_cannot_be_spoken_is_refused_before_anything_starts(
    run, tmp_path, monkeypatch, capsys, wrong, words
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "noise.wav").write_text("no sound")
    write_wav(tmp_path / "short.wav", sine(2205))
    monkeypatch.setattr(launch, "Supervisor", lambda *_: pytest.fail("processes were started"))
    settings = [
        f"samples.{key}={json.dumps(value, ensure_ascii=False)}" for key, value in wrong.items()
    ]
    source = run.config.data.train[0].path
    assert (
        launch.main(
            [
                f"run={tmp_path / 'new'}",
                f"data.train={source}",
                "data.scan_threads=1",
                "devices=auto",
                *settings,
            ]
        )
        == 2
    )
    assert re.search(words, capsys.readouterr().err)
    assert not (tmp_path / "new").exists()


def test_steps_between_checkpoints_are_told(run, tmp_path, caplog):
    tree = run.config.model_dump()
    tree |= {"run": str(tmp_path / "new"), "samples": {"every": 1500}}
    prepare_run(config_module.parse(tree), on_cpu=True, cores=2)
    assert "samples.every=1500 is no multiple of train.save_every=1000" in caplog.text


def test_recordings_that_vanished_are_passed_over(run, tmp_path, caplog):
    (moved := run.manifest.utterances([choose(run.manifest.columns(), 1)[0]])[0].path).rename(
        tmp_path / "away.wav"
    )
    try:
        infos = SampleMaker(
            run, Gpt(run.dims.gpt, seed=1), Dvae(run.dims.dvae), SamplingOptions(max_codes=3)
        )._lines
    finally:
        (tmp_path / "away.wav").rename(moved)
    assert len([line for line in infos if line.recording]) == 1
    assert "cannot be read" in caplog.text
