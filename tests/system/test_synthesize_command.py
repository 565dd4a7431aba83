"""`launch.py synthesize`: from a run and from imported weights, to a file and as a stream, on the CPU; and what it refuses."""

import argparse
import io
import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

import launch
from common.run import settings as config_module
from common.system.errors import BadInput
from common.xtts import weights
from common.xtts.checkpoints import pth
from common.xtts.checkpoints.coqui import import_model
from common.xtts.dims import SIZES
from common.xtts.dvae import Dvae
from common.xtts.gpt import Gpt
from producer.creation.prepare import prepare_run
from tests.support.coqui_files import GPT_DIMS, dvae_arrays, model_arrays, with_tokens, write_model, write_vocabulary
from tests.support.corpora import make_corpus, sine, write_wav
from trainer.commands import speak
from trainer.commands import synthesize as synthesize_command
from trainer.commands.speak import of_run, of_weights, sampling
from trainer.history.checkpoint import Checkpoints
from trainer.stages import publish_dvae

ROOT = Path(__file__).parents[2]
TEXT = "one two three four"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`run`, a tiny run with checkpoints 2 (the best) and 4, `pretrained`, and `corpus` of clips."""
    folder = tmp_path_factory.mktemp("synthesize")
    make_corpus(folder / "corpus", 4, seconds=1.5)
    tree = {
        "run": str(folder / "run"),
        "data": {"train": str(folder / "corpus"), "eval_fraction": 0.25, "scan_threads": 1},
        "model": {"size": "tiny"},
        "text": {"vocab_size": 60},
    }
    run = prepare_run(config_module.parse(tree), on_cpu=True, cores=2)
    dvae, checkpoints = Dvae(run.dims.dvae), Checkpoints(run.path / "checkpoints", keep=3)
    dvae.initialise(2)
    run.dvae_weights.parent.mkdir(exist_ok=True)
    publish_dvae(run, weights.state_dict(dvae))
    for step, seed in ((2, 1), (4, 2)):
        gpt = Gpt(run.dims.gpt, seed=seed)
        checkpoints.save(step, {"model": weights.state_dict(gpt), "optimizer": {}}, {"best_step": 2})
    tokenizer = write_vocabulary(folder / "vocab.json", [(TEXT, "en")], 60, ["en"])
    write_model(folder / "model.pth", model_arrays(with_tokens(GPT_DIMS, tokenizer)))
    pth.save(folder / "dvae.pth", dvae_arrays())
    import_model(folder / "model.pth", folder / "pretrained", dvae=folder / "dvae.pth", vocab=folder / "vocab.json")
    return folder


def synthesize(folder: Path, *args: str, **more) -> subprocess.CompletedProcess:
    clip = str(folder / "corpus/wavs/c0001.wav")
    text = [] if "--text" in args else ["--text", TEXT]
    command = [sys.executable, str(ROOT / "launch.py"), "synthesize", "--device", "cpu", *text, *args, "--reference", clip]
    return subprocess.run(command, capture_output=True, timeout=280, **more)


def test_a_run_speaks_into_a_file(folder, tmp_path):
    """Drawn from all ids there are, START among them, which has no place in the DVAE's codebook."""
    wild = ("--temperature", "2", "--top-p", "1", "--top-k", "0", "--text", f"{TEXT} ж")
    done = synthesize(folder, "--run", str(folder / "run"), "--out", str(tmp_path / "a.WAV"), "--seed", "3", *wild, cwd=tmp_path)
    said = done.stderr.decode()
    assert done.returncode == 0, said
    wav, rate = soundfile.read(tmp_path / "a.WAV")
    assert rate == 22050
    assert (len(wav) + 256) % 1024 == 0  # 4 mel frames a code, 256 samples a frame, one frame less
    assert "step-00000002" in said  # the best, not the newest
    assert "real-time factor" in said
    assert "Griffin-Lim" in said
    assert "voice of 1 clip (1.5 s of speech) made in " in said
    assert said.count("3 s or more") == said.count("the vocabulary has no 'ж'") == 1


def test_imported_weights_stream_through_their_vocoder(folder):
    done = synthesize(folder, "--weights", str(folder / "pretrained"), "--stream", "--temperature", "0.9", "--text", f"{TEXT} ж")
    said = done.stderr.decode()
    assert done.returncode == 0, said
    samples = np.frombuffer(done.stdout, "<i2")  # nothing but samples
    assert len(samples) > 1000
    assert len(samples) % 256 == 0
    assert "HiFi-GAN, 24 000 Hz" in said
    assert "first sound after" in said
    assert said.count("the vocabulary has no 'ж'") == 1


def test_a_text_without_words_is_refused(folder, tmp_path):
    done = synthesize(folder, "--run", str(folder / "run"), "--out", str(tmp_path / "a.wav"), "--text", "😀")
    said = done.stderr.decode()
    assert done.returncode == 2, said
    assert "no words in the text '😀': nothing to say" in said
    assert not (tmp_path / "a.wav").exists()


@pytest.mark.parametrize(
    ("seconds", "words", "warned"),
    [
        ([1.5], "voice of 1 clip (1.5 s of speech) made in ", "--reference is 1.50 s long in all"),
        ([1.0, 1.9], "voice of 2 clips (2.9 s of speech) made in ", "--reference is 2.90 s long in all"),
        ([1.0, 2.0], "voice of 2 clips (3.0 s of speech) made in ", None),
        ([3.5], "voice of 1 clip (3.5 s of speech) made in ", None),
    ],
)
def test_how_much_of_a_voice_there_is_is_told(tmp_path, caplog, seconds, words, warned):
    class Model:
        dims = SIZES["tiny"]

        def voice(self, clips):
            return [len(c) for c in clips]

    paths = [str(write_wav(tmp_path / f"{i}.wav", sine(round(22050 * s)))) for i, s in enumerate(seconds)]
    with caplog.at_level(logging.INFO):
        assert speak._voice(Model(), paths) == [round(22050 * s) for s in seconds]
    assert words in caplog.text
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == (warned is not None)
    assert not warned or (warned in warnings[0] and "3 s or more together" in warnings[0])


def test_which_checkpoint(folder):
    run = folder / "run"
    assert of_run(run, None).gpt.parent.name == of_run(run, "best").gpt.parent.name == "step-00000002"
    assert of_run(run, "newest").gpt.parent.name == of_run(run, "4").gpt.parent.name == "step-00000004"
    with pytest.raises(BadInput, match="no whole checkpoint 3; it has \\[2, 4\\]"):
        of_run(run, "3")
    with pytest.raises(BadInput, match="--step x: a number, newest or best"):
        of_run(run, "x")
    with pytest.raises(BadInput, match="not a run folder"):
        of_run(folder, None)


def test_sampling_follows_where_the_weights_come_from(folder):
    nothing = dict.fromkeys(synthesize_command.SAMPLING)
    assert of_weights(folder / "pretrained").imported
    assert not of_run(folder / "run", None).imported
    assert sampling(nothing, imported=True).text_stop_input
    own = sampling({**nothing, "temperature": 0.5}, imported=False)
    assert (own.temperature, own.repetition_penalty, own.text_stop_input) == (0.5, 1.0, False)
    with pytest.raises(BadInput, match="temperature must be positive"):
        sampling({**nothing, "temperature": 0.0}, imported=False)
    with pytest.raises(BadInput, match="not a folder of imported weights"):
        of_weights(folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "a.wav"], "one of --run RUN and --weights"),
        (["--run", "r", "--weights", "w", "--out", "a.wav"], "one of --run RUN and --weights"),
        (["--weights", "w", "--step", "3", "--out", "a.wav"], "--step chooses a checkpoint of --run"),
        (["--run", "r"], "one of --out FILE.wav and --stream"),
        (["--run", "r", "--out", "a.wav", "--stream"], "one of --out FILE.wav and --stream"),
        (["--run", "r", "--out", "no/such/a.wav"], "does not exist"),
        (["--run", "r", "--out", "x.mp3"], r"--out x.mp3: only WAV is written; name a file that ends in .wav, x.wav"),
        (["--run", "r", "--out", "x"], "only WAV is written; name a file that ends in .wav, x.wav"),
        (["--run", "r", "--out", "."], "--out . is a folder: name the file to write, speech.wav"),
        (["--run", "r", "--stream", "--speed", "0"], "--speed must be positive"),
        (["--run", "r", "--out", "a.wav", "--candidates", "0"], "--candidates must be at least 1"),
        (["--run", "r", "--stream", "--candidates", "2"], "leave one out"),
        (["--run", "r", "--stream", "--text", " "], "nothing to say"),
        (["--run", "r", "--stream", "--text", "-"], "nothing to say"),
        (["--run", "r", "--stream", "--device", "0,1"], "one device speaks"),
        (["--run", "r", "--stream", "--device", "99"], "99"),
        (["--run", "r", "--stream", "model.size=tiny"], "flags only"),
    ],
)
def test_refused_before_anything_starts(folder, monkeypatch, arguments, message):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    monkeypatch.setattr(synthesize_command.os, "execve", lambda *_: pytest.fail("started"))
    text = [] if "--text" in arguments else ["--text", TEXT]
    with pytest.raises(BadInput, match=message):
        launch.synthesize(_parsed([*arguments, *text, "--reference", str(folder / "corpus/wavs/c0001.wav")]))


def test_a_missing_clip_is_named():
    with pytest.raises(BadInput, match="--reference nowhere.wav: no such file"):
        launch.synthesize(_parsed(["--run", "r", "--stream", "--text", TEXT, "--reference", "nowhere.wav"]))


def _parsed(arguments: list[str]) -> argparse.Namespace:
    return launch.flags.parse(launch._parser("synthesize"), arguments)
