"""`launch.py synthesize`: from a run and from imported weights, to a file and as a stream, on the
CPU; and what it refuses.
"""

import argparse
import io
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

import launch
from common.run import settings as config_module
from common.run.folder import RunFolder
from common.run.published import publish
from common.system.errors import BadInput
from common.xtts import weights
from common.xtts.checkpoints import pth
from common.xtts.checkpoints.coqui import import_model
from common.xtts.dims import SIZES
from common.xtts.dvae import Dvae
from common.xtts.gpt import Gpt
from common.xtts.synthesize import Voice
from producer.creation.prepare import prepare_run
from tests.support.coqui_files import (
    GPT_DIMS,
    dvae_arrays,
    model_arrays,
    voices,
    with_tokens,
    write_model,
    write_vocabulary,
)
from tests.support.corpora import make_corpus, sine, write_wav
from trainer.commands import make_voices, speak
from trainer.commands import synthesize as synthesize_command
from trainer.commands import voices as trainer_voices
from trainer.commands.speak import of_run, of_weights, sampling
from trainer.history.checkpoint import Checkpoints

ROOT = Path(__file__).parents[2]
TEXT = "one two three four"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`run`, a tiny run with checkpoints 2 (the best) and 4, `pretrained`, and `corpus`
    of clips.
    """
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
    publish(run, weights.state_dict(dvae))
    for step, seed in ((2, 1), (4, 2)):
        gpt = Gpt(run.dims.gpt, seed=seed)
        checkpoints.save(
            step, {"model": weights.state_dict(gpt), "optimizer": {}}, {"best_step": 2}
        )
    tokenizer = write_vocabulary(folder / "vocab.json", [(TEXT, "en")], 60, ["en"])
    write_model(folder / "model.pth", model_arrays(with_tokens(GPT_DIMS, tokenizer)))
    pth.save(folder / "dvae.pth", dvae_arrays())
    pth.save(folder / "speakers_xtts.pth", voices("Ana Florence"))
    files = {
        name: folder / f
        for name, f in (
            ("dvae", "dvae.pth"),
            ("vocab", "vocab.json"),
            ("speakers", "speakers_xtts.pth"),
        )
    }
    import_model(folder / "model.pth", folder / "pretrained", **files)
    return folder


def synthesize(folder: Path, *args: str, **more) -> subprocess.CompletedProcess:
    clip = str(folder / "corpus/wavs/c0001.wav")
    text = [] if "--text" in args else ["--text", TEXT]
    command = [
        sys.executable,
        str(ROOT / "launch.py"),
        "synthesize",
        "--device",
        "cpu",
        *text,
        *args,
        "--reference",
        clip,
    ]
    return subprocess.run(command, capture_output=True, timeout=280, **more)


def test_v7_a_run_speaks_into_a_file(folder, tmp_path):
    """Drawn from all ids there are, START among them, which has no place in the DVAE's codebook.

    Of a user without a home folder.
    """
    wild = ("--temperature", "2", "--top-p", "1", "--top-k", "0", "--text", f"{TEXT} ж")
    done = synthesize(
        folder,
        "--run",
        str(folder / "run"),
        "--out",
        str(tmp_path / "a.WAV"),
        "--seed",
        "3",
        *wild,
        cwd=tmp_path,
        env={**os.environ, "HOME": "/proc/none"},
    )
    said = done.stderr.decode()
    assert done.returncode == 0, said
    wav, rate = soundfile.read(tmp_path / "a.WAV")
    assert rate == 22050
    assert (len(wav) + 256) % 1024 == 0  # 4 mel frames a code, 256 samples a frame, one frame less
    assert "step-00000002" in said  # the best, not the newest
    assert "real-time factor" in said
    assert "Griffin-Lim" in said
    assert "voice of 1 clip (1.5 s of sound) made in " in said
    assert said.count("3 s or more") == said.count("the vocabulary has no 'ж'") == 1
    assert re.search(r"^piece 1 of 1: \d+\.\d s, real-time factor \d+\.\d\d", said, re.MULTILINE)
    ours = "warning: |GPT of |codes to sound: |voice of |piece |real-time factor |/"
    assert all(re.match(ours, line) for line in said.splitlines()), said  # no library's
    assert os.listdir(tmp_path) == ["a.WAV"]


def test_imported_weights_stream_through_their_vocoder(folder):
    done = synthesize(
        folder,
        "--weights",
        str(folder / "pretrained"),
        "--stream",
        "--temperature",
        "0.9",
        "--text",
        f"{TEXT} ж",
    )
    said = done.stderr.decode()
    assert done.returncode == 0, said
    samples = np.frombuffer(done.stdout, "<i2")  # nothing but samples
    assert len(samples) > 1000
    assert len(samples) % 256 == 0
    assert "HiFi-GAN, 24 000 Hz" in said
    assert "first sound after" in said
    assert said.count("the vocabulary has no 'ж'") == 1


def loud(seconds: float, amplitude: float = 0.3) -> np.ndarray:
    return sine(round(22050 * seconds), amplitude=amplitude)


def quiet(seconds: float) -> np.ndarray:
    return np.zeros(round(22050 * seconds), np.float32)


def warnings_of(caplog, paths: list[str]) -> tuple[list, list[str]]:
    with caplog.at_level(logging.INFO):
        found = speak.references_of(paths, 22050)
    return found, [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


@pytest.mark.parametrize(
    ("seconds", "warned"),
    [
        ([1.5], "--reference has 1.50 s of sound in all"),
        ([1.0, 1.9], "--reference has 2.90 s of sound in all"),
        ([1.0, 2.0], None),
        ([3.5], None),
    ],
)
def test_how_much_of_a_voice_there_is_is_told(tmp_path, caplog, seconds, warned):
    paths = [str(write_wav(tmp_path / f"{i}.wav", loud(s))) for i, s in enumerate(seconds)]
    found, warnings = warnings_of(caplog, paths)
    assert [len(r.wav) for r in found] == [round(22050 * s) for s in seconds]
    assert len(warnings) == (warned is not None)
    assert not warned or (warned in warnings[0] and "3 s or more together" in warnings[0])


def stereo(path: Path, left: np.ndarray, right: np.ndarray, rate: int = 22050) -> str:
    soundfile.write(path, np.stack([left, right], 1), rate, subtype="FLOAT")
    return str(path)


@pytest.mark.parametrize("factor", [-1.0, -0.9, -0.7])
def test_v1_channels_that_cancel_each_other(tmp_path, caplog, factor):
    wav = loud(4)
    (found,), warnings = warnings_of(caplog, [stereo(tmp_path / "a.wav", wav, factor * wav)])
    np.testing.assert_allclose(found.wav, wav, atol=1e-6)
    assert "its channels cancel each other; the louder one is used" in warnings[0]
    (found,), _ = warnings_of(
        caplog, [stereo(tmp_path / "b.wav", wav, 0 * wav)]
    )  # one side alone is no such case
    np.testing.assert_allclose(found.wav, wav / 2, atol=1e-6)
    assert not found.notes


@pytest.mark.parametrize(
    ("parts", "first", "seconds"),
    [
        ((quiet(31), loud(6)), 30.8, 6.2),
        ((quiet(200), loud(20), quiet(200)), 199.8, 20.4),
        ((loud(50, 0.002), loud(40)), 50.0, 30.0),
        ((loud(2), quiet(1), loud(2)), 0.0, 5.0),
        ((loud(60),), 0.0, 30.0),
        ((loud(25), quiet(50)), 0.0, 25.2),
        ((loud(300),), 0.0, 30.0),
        ((loud(31), quiet(300)), 0.0, 30.0),
        ((quiet(300), loud(31)), 301.0, 30.0),
        ((quiet(217), loud(45), quiet(200)), 222.0, 30.0),
        ((quiet(403), loud(12), quiet(300)), 402.8, 12.4),
    ],
)
def test_v1_what_is_used_is_measured(tmp_path, caplog, parts, first, seconds):
    wav = np.concatenate(parts)
    (found,), warnings = warnings_of(caplog, [str(write_wav(tmp_path / "a.wav", wav))])
    assert found.seconds == pytest.approx(seconds, abs=0.3)
    assert found.sound_s <= found.seconds
    begin = round(first * 22050)
    assert found.sound_s > 0.95 * min(found.seconds, np.count_nonzero(wav) / 22050 - 0.2)
    expected = wav[begin : begin + len(found.wav)]
    assert np.sqrt(np.mean(found.wav**2)) == pytest.approx(np.sqrt(np.mean(expected**2)), rel=0.05)
    assert len(warnings) == (len(wav) > len(found.wav) + 12000)


def test_v1_a_long_recording_costs_what_is_used(tmp_path):
    """40 minutes: most of the file is never read."""
    path = tmp_path / "long.wav"
    with soundfile.SoundFile(path, "w", 22050, 1, subtype="PCM_16") as file:
        for i in range(40):
            file.write(loud(60) if i == 30 else quiet(60))
    read = []
    real = soundfile.SoundFile.read

    def noted(self, frames=-1, out=None, **more):
        read.append(frames if out is None else len(out))
        return real(self, frames, out=out, **more)

    try:
        soundfile.SoundFile.read = noted
        (found,) = speak.references_of([str(path)], 22050)
    finally:
        soundfile.SoundFile.read = real
    assert found.seconds == pytest.approx(30, abs=0.1)
    assert found.sound_s > 29
    assert min(read) > 0
    assert sum(read) <= 2 * 30.1 * 22050


@pytest.mark.parametrize(
    ("wav", "message"),
    [
        (quiet(5), "silent"),
        (loud(5, 1e-4), "silent: -83.0 dBFS"),
        (quiet(5) + 0.25, "silent: .* a constant offset of 0.25"),
        (np.eye(1, 5 * 22050, 9999, dtype=np.float32)[0], "almost silent: 0.02 s of sound"),
        (np.full(22050, np.nan, np.float32), "not finite"),
        (np.append(loud(40), np.inf), "not finite"),
        (loud(0.2), r"0.20 s long in all: at least 0.33 s"),
        (np.zeros(0, np.float32), "no samples"),
    ],
)
def test_v1_references_that_no_voice_can_be_made_of(tmp_path, wav, message):
    soundfile.write(tmp_path / "a.wav", wav, 22050, subtype="FLOAT")
    with pytest.raises(BadInput, match=rf"--reference .*{message}"):
        speak.references_of([str(tmp_path / "a.wav")], 22050)


def test_v8_voices_by_name(folder, capsys):
    """Speakers of the run, and voices that came with the weights."""

    def listed(*arguments: str) -> str:
        assert launch.main(["synthesize", "--list-voices", *arguments]) == 0
        return capsys.readouterr().out

    assert listed("--run", str(folder / "run")) == "corpus  (speaker of the run, 0.1 min)\n"
    assert (
        listed("--weights", str(folder / "pretrained")) == "Ana Florence  (came with the weights)\n"
    )
    run, weights = (
        {"run": str(folder / "run"), "voice": "corpus"},
        {
            "run": None,
            "voice": "Ana Florence",
        },
    )
    sources = of_run(folder / "run", None)
    speaker = speak.named_voice(run, sources)
    assert callable(speaker)
    voice = speak.named_voice(weights, of_weights(folder / "pretrained"))(None)
    assert (voice.latents.shape, voice.speaker.shape) == ((1, 8, 32), (1, 512))
    with pytest.raises(BadInput, match="--voice corps: no such voice; did you mean 'corpus'?"):
        speak.named_voice({**run, "voice": "corps"}, sources)
    with pytest.raises(BadInput, match="--voice Zoe: no such voice; there is 1. --list-voices"):
        speak.named_voice({**weights, "voice": "Zoe"}, of_weights(folder / "pretrained"))


def test_a_voice_that_is_not_finite_is_left_out(tmp_path, caplog):
    clip = write_wav(tmp_path / "a.wav", loud(2))

    class Broken:
        dims = SIZES["tiny"]

        def voice(self, clips):
            return Voice(np.full((1, 8, 32), np.nan, np.float32), np.ones((1, 512), np.float32))

    utterance = argparse.Namespace(path=clip, portion=None)
    assert make_voices._voice(Broken(), "Ana", [utterance]) is None
    assert "no voice Ana: these weights make no finite numbers" in caplog.text


def test_clips_of_a_voice(folder):
    """30 s at most, 3 s or more each where there are such; else the longest."""
    num_samples = np.array([22050 * s for s in (1, 5, 2, 8, 4, 9, 7, 3)])
    columns = {"num_samples": num_samples, "speaker": np.zeros(8, int), "split": np.zeros(8, int)}
    chosen = trainer_voices._chosen(columns, 0)
    assert all(num_samples[i] >= trainer_voices.GOOD_SAMPLES for i in chosen)
    assert 22 < num_samples[chosen].sum() / 22050 < 40
    short = {**columns, "num_samples": num_samples // 4}
    assert trainer_voices._chosen(short, 0) == [5, 3, 6, 1, 4, 7, 2, 0]
    run = RunFolder(folder / "run")
    assert [u.speaker for u in trainer_voices.clips_of_speaker(run.manifest, "corpus")][
        0
    ] == "corpus"
    assert trainer_voices.clips_of_speaker(run.manifest, "none") == []
    assert list(trainer_voices.clips_of(run.manifest, 5)) == ["corpus"]


@pytest.mark.slow
def test_v8_a_named_voice_speaks(folder, tmp_path):
    command = [
        sys.executable,
        str(ROOT / "launch.py"),
        "synthesize",
        "--device",
        "cpu",
        "--text",
        TEXT,
        "--voice",
        "Ana Florence",
    ]
    command += ["--weights", str(folder / "pretrained"), "--out", str(tmp_path / "a.wav")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert soundfile.info(tmp_path / "a.wav").samplerate == 24000


def test_which_checkpoint(folder):
    run = folder / "run"
    assert (
        of_run(run, None).gpt.parent.name == of_run(run, "best").gpt.parent.name == "step-00000002"
    )
    assert (
        of_run(run, "newest").gpt.parent.name == of_run(run, "4").gpt.parent.name == "step-00000004"
    )
    with pytest.raises(BadInput, match="no whole checkpoint 3; it has \\[2, 4\\]"):
        of_run(run, "3")
    with pytest.raises(BadInput, match="--step x: a number, newest or best"):
        of_run(run, "x")
    with pytest.raises(BadInput, match="not a run folder"):
        of_run(folder, None)


def test_v6_sampling_follows_where_the_weights_come_from(folder):
    nothing = dict.fromkeys(synthesize_command.SAMPLING)
    assert of_weights(folder / "pretrained").imported
    assert not of_run(folder / "run", None).imported
    assert sampling(nothing, imported=True).text_stop_input
    own = sampling({**nothing, "temperature": 0.5}, imported=False)
    assert (own.temperature, own.repetition_penalty, own.text_stop_input) == (0.5, 1.0, False)
    for imported in (True, False):
        greedy = sampling({**nothing, "temperature": 0.0}, imported)
        assert greedy.greedy
        assert not sampling({**nothing, "temperature": 0.1}, imported).greedy
    with pytest.raises(BadInput, match="not a folder of imported weights"):
        of_weights(folder)


def test_what_to_say_and_in_which_voice_must_be_given():
    for arguments, message in (
        (["--voice", "x"], "--text is missing"),
        (["--text", "x"], "one of --voice NAME"),
    ):
        with pytest.raises(BadInput, match=message):
            launch.synthesize(_parsed(["--run", "r", "--stream", *arguments]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "a.wav"], "one of --run RUN and --weights"),
        (["--run", "r", "--out", "a.wav", "--voice", "x"], "one of --voice NAME"),
        (
            ["--weights", "w", "--step", "3", "--out", "a.wav"],
            "--step chooses a checkpoint of --run",
        ),
        (["--run", "r"], "one of --out FILE.wav and --stream"),
        (["--run", "r", "--out", "a.wav", "--stream"], "one of --out FILE.wav and --stream"),
        (["--run", "r", "--out", "no/such/a.wav"], "does not exist"),
        (
            ["--run", "r", "--out", "x.mp3"],
            r"--out x.mp3: only WAV is written; name a file that ends in .wav, x.wav",
        ),
        (["--run", "r", "--out", "x"], "only WAV is written; name a file that ends in .wav, x.wav"),
        (["--run", "r", "--out", "."], "--out . is a folder: name the file to write, speech.wav"),
        *[
            (["--run", "r", "--stream", *wrong.split()], f"{wrong} is out of range: ")
            for wrong in (
                "--speed 0.0",
                "--speed 50.0",
                "--speed nan",
                "--pause -0.1",
                "--pause 3600.0",
                "--temperature -0.5",
                "--temperature inf",
                "--top-p 0.0",
                "--top-p 1.5",
                "--top-k -1",
                "--repetition-penalty 0.0",
                "--candidates 0",
                "--seed 99999999999",
            )
        ],
        (["--run", "r", "--stream", "--candidates", "2"], "leave one out"),
        (["--run", "r", "--stream", "--text", " "], "nothing to say"),
        (["--run", "r", "--stream", "--text", "-"], "nothing to say"),
        (["--run", "r", "--stream", "--device", "0,1"], "name one device"),
        (["--run", "r", "--stream", "--device", "99"], "99"),
        (["--run", "r", "--stream", "model.size=tiny"], "flags only"),
    ],
)
def test_v6_refused_before_anything_starts(folder, monkeypatch, arguments, message):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    monkeypatch.setattr(synthesize_command.os, "execve", lambda *_: pytest.fail("started"))
    text = [] if "--text" in arguments else ["--text", TEXT]
    with pytest.raises(BadInput, match=message):
        launch.synthesize(
            _parsed([*arguments, *text, "--reference", str(folder / "corpus/wavs/c0001.wav")])
        )


def test_v8_a_missing_clip_is_named():
    with pytest.raises(BadInput, match="--reference nowhere.wav: no such file .* --voice"):
        launch.synthesize(
            _parsed(["--run", "r", "--stream", "--text", TEXT, "--reference", "nowhere.wav"])
        )


def test_v2_a_book_from_standard_input_reaches_the_speaker(folder, monkeypatch):
    """Longer than an argument of a command may be (128 KiB)."""
    text = "سلام دنیا. " * 40_000
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    monkeypatch.setattr(synthesize_command, "hold_signals", lambda: None)
    handed = []

    def read_by_another(_, argv, env):
        code = "import sys; sys.stdout.buffer.write(open(int(sys.argv[1]), 'rb').read())"
        done = subprocess.run(
            [sys.executable, "-c", code, argv[-1]],
            pass_fds=[int(argv[-1])],
            capture_output=True,
            check=True,
        )
        os.close(int(argv[-1]))
        handed.append((argv, json.loads(done.stdout)))
        raise SystemExit

    monkeypatch.setattr(synthesize_command.os, "execve", read_by_another)
    clip = str(folder / "corpus/wavs/c0001.wav")
    with pytest.raises(SystemExit):
        launch.synthesize(_parsed(["--run", "r", "--stream", "--text", "-", "--reference", clip]))
    ((argv, options),) = handed
    assert max(map(len, argv)) < 1000
    assert options["text"] == text
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9")))
    with pytest.raises(BadInput, match=r"not UTF-8 \(byte 3\)"):
        launch.synthesize(_parsed(["--run", "r", "--stream", "--text", "-", "--reference", clip]))


def test_references_and_texts_are_judged_before_tensorflow_is_loaded(folder, tmp_path):
    """TensorFlow fails here as soon as it is imported."""
    (tmp_path / "tensorflow.py").write_text(
        "import os; os.write(2, b'TensorFlow was loaded'); raise SystemExit(1)"
    )
    silent = write_wav(tmp_path / "silent.wav", quiet(4))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path)))}

    def tried(*arguments: str, text: str = TEXT) -> subprocess.CompletedProcess:
        command = [sys.executable, str(ROOT / "launch.py"), "synthesize", "--text", text]
        command += ["--run", str(folder / "run"), "--device", "cpu", *arguments]
        command += ["--out", str(tmp_path / "a.wav")]
        return subprocess.run(command, capture_output=True, text=True, timeout=280, env=env)

    done = tried("--reference", str(silent))
    assert done.returncode == 2, done.stderr
    assert "silent: every sample is 0" in done.stderr
    assert "TensorFlow was loaded" not in done.stderr
    done = tried("--voice", "nobody")
    assert done.returncode == 2, done.stderr
    assert "--voice nobody: no such voice" in done.stderr
    clip = str(folder / "corpus/wavs/c0001.wav")
    done = tried("--reference", clip, text="😀")
    assert done.returncode == 2, done.stderr
    assert "no words in the text '😀': nothing to say" in done.stderr
    assert "TensorFlow was loaded" not in done.stderr
    assert not (tmp_path / "a.wav").exists()
    wav = loud(1.5)
    done = tried("--reference", stereo(tmp_path / "b.wav", wav, -wav))
    warned, loaded, _ = done.stderr.partition("TensorFlow was loaded")
    assert (done.returncode, bool(loaded)) == (1, True), done.stderr  # the clip will do
    assert "its channels cancel each other" in warned
    assert "1.50 s of sound in all" in warned


def _parsed(arguments: list[str]) -> argparse.Namespace:
    return launch.flags.parse(launch._parser("synthesize"), arguments)
