"""Samples of a run: which utterances, which files, and what is said when the model doesn't stop."""

import json
import logging
import math

import numpy as np
import pytest
import soundfile
from corpora import make_corpus

from common import config as config_module
from common.pictures import Png
from common.xtts.dvae import Dvae
from common.xtts.gpt import Gpt
from common.xtts.sampling import SamplingOptions
from common.xtts.synthesize import Synthesizer
from producer.prepare import prepare_run
from trainer import samples
from trainer.samples import SampleMaker, _file_name, choose


class FakeBoard:
    """Keeps the tags it was given."""

    def __init__(self):
        self.tags = []

    def sound(self, step, tag, samples, sample_rate):
        assert (step, samples.dtype, sample_rate) == (7, np.float32, 22050)
        self.tags.append(tag)

    def picture(self, step, tag, png, width, height):
        assert png[:4] == b"\x89PNG"
        self.tags.append(tag)


def columns(*rows):
    """(split, language, speaker) per utterance."""
    split, language, speaker = np.array(rows).T
    return {"split": split.astype(np.uint8), "language": language.astype(np.int16), "speaker": speaker.astype(np.int32)}


def test_utterances_are_chosen_across_languages_then_speakers():
    held_out = [(1, 0, 0), (1, 0, 0), (0, 2, 9), (1, 0, 1), (1, 1, 0), (1, 1, 2)]
    assert choose(columns(*held_out), 4) == [0, 5, 3, 4]  # en; de, by another speaker; en, by a third; what is left of de
    assert choose(columns(*held_out), 9) == [0, 5, 3, 4, 1]
    assert choose(columns(*held_out), 0) == []
    assert choose(columns((0, 0, 0), (0, 0, 1)), 2) == [0, 1]  # no evaluation split: the training set's


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
    assert [e["name"] for e in json.loads((tmp_path / "samples" / "samples.json").read_text())] == [i.name for i in infos]
    assert {f"samples/{own[0].name}", f"samples/{own[0].name}/synth", f"samples/{own[0].name}/recon"} <= set(board.tags)


@pytest.fixture
def quick(monkeypatch):
    """No Griffin-Lim and no drawing, for tests that are about neither: the sound is the mel itself."""
    monkeypatch.setattr(Synthesizer, "from_mel", lambda self, mel: np.ravel(mel).astype(np.float32) / 50)
    monkeypatch.setattr(samples, "mel_picture", lambda *_: Png(b"", 0, 0))


@pytest.mark.usefixtures("quick")
def test_weights_decide_the_sound_and_nothing_is_compiled_again(made, tmp_path):
    maker, gpt = made
    first, again = (maker.make(tmp_path / name, 7) for name in "ab")
    traces = maker._synthesizer.sampler.trace_counts.copy()
    assert first == again
    assert (tmp_path / "a" / first[0].synth).read_bytes() == (tmp_path / "b" / first[0].synth).read_bytes()
    weight = gpt.mel_head.weight.numpy()
    gpt.mel_head.weight.assign(-weight)
    try:
        maker.make(tmp_path / "c", 8)
    finally:
        gpt.mel_head.weight.assign(weight)
    assert (tmp_path / "a" / first[0].synth).read_bytes() != (tmp_path / "c" / first[0].synth).read_bytes()
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
    assert (infos[0].synth, infos[0].seconds, infos[0].level, infos[0].stopped) == (None, 0.0, 0.0, True)
    assert (tmp_path / infos[0].recon).is_file()
    assert "nothing was said" in caplog.text


def test_recordings_that_vanished_are_passed_over(run, tmp_path, caplog):
    (moved := run.manifest.utterances([choose(run.manifest.columns(), 1)[0]])[0].path).rename(tmp_path / "away.wav")
    try:
        infos = SampleMaker(run, Gpt(run.dims.gpt, seed=1), Dvae(run.dims.dvae), SamplingOptions(max_codes=3))._lines
    finally:
        (tmp_path / "away.wav").rename(moved)
    assert len([line for line in infos if line.true]) == 1
    assert "cannot be read" in caplog.text
