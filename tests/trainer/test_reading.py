"""Reading a text aloud, piece by piece: what is said of each, what is kept, and where a second
command goes on. A fake speaker says pieces whose sound is known.
"""

import logging
import os
import re
import signal
import subprocess
import sys
import wave
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from common.system.errors import FAILED, BadInput, RunError
from common.xtts.pace import Pace
from common.xtts.synthesize import NotFinite
from common.xtts.text.split import Piece
from trainer.commands import reading
from trainer.commands.piece_files import PieceFiles
from trainer.commands.reading import Reading
from trainer.commands.speak import Sources, libraries_held, read_aloud

RATE = 1000
ROOT = Path(__file__).parents[2]
ASKED = {"seed": 5, "speed": 1.0, "pause": 0.0, "candidates": 1, "run": None, "language": "en"}


class Speaker:
    """Says piece i as i + 1 tenths of a second of the level (i + 1) / 100; piece by piece until it
    is to fail.
    """

    sample_rate = RATE

    def __init__(self, fails_at: int | None = None, silent: bool = False, faults: tuple = ()):
        self.said, self.fails_at, self.silent, self.faults = [], fails_at, silent, faults

    def say(self, piece, voice, options, seed, speed, candidates, pace):
        i = seed[1]
        if i == self.fails_at:
            raise InterruptedError("stopped here")
        self.said.append(i)
        wav = sound(i) if not self.silent else np.zeros(0, np.float32)
        fault = "runs on" if i in self.faults else ""
        return SimpleNamespace(wav=wav, spent_s=0.05 * (i + 1), draws=1 + bool(fault), fault=fault)

    def stream(self, piece, voice, options, seed, speed, pace):
        i = seed[1]
        self.said.append(i)
        yield from np.array_split(sound(i), 2)


def sound(i: int) -> np.ndarray:
    return np.full(RATE // 10 * (i + 1), (i + 1) / 100, np.float32)


def pcm(i: int) -> np.ndarray:
    return np.round(sound(i) * 32767).astype(np.int16)


def a_reading(speaker: Speaker, count: int = 4, inside: tuple = (), **asked) -> Reading:
    pieces = [Piece(f"text {i}", [1, i], 6, i not in inside) for i in range(count)]
    return Reading(speaker, pieces, "voice", "options", Pace(), {**ASKED, **asked})


def samples(path: Path) -> np.ndarray:
    with wave.open(str(path)) as f:
        assert (f.getframerate(), f.getnchannels(), f.getsampwidth()) == (RATE, 1, 2)
        return np.frombuffer(f.readframes(f.getnframes()), "<i2")


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO)
    return lambda: [r.getMessage() for r in caplog.records]


def test_v2_a_line_per_piece_and_a_whole_file(tmp_path, said):
    out = tmp_path / "a.wav"
    reading.write(a_reading(Speaker(faults=(2,))), out, {"voice": "x"})
    np.testing.assert_array_equal(samples(out), np.concatenate([pcm(i) for i in range(4)]))
    assert os.listdir(tmp_path) == ["a.wav"]
    lines = said()
    assert lines[:2] == [
        "piece 1 of 4: 0.1 s, real-time factor 0.50",
        "piece 2 of 4: 0.2 s, real-time factor 0.50",
    ]
    assert lines[2:4] == [
        "piece 3 of 4: 0.3 s, real-time factor 0.50, drawn 2 times",
        "piece 3 runs on: text 2",
    ]
    assert lines[5] == f"{out}: 1.00 s at 1000 Hz, 4 pieces"


def test_v2_what_is_finished_is_kept_and_the_same_command_goes_on(tmp_path, said):
    out = tmp_path / "a.wav"
    with pytest.raises(InterruptedError):
        reading.write(a_reading(Speaker(fails_at=2)), out, {"voice": "x"})
    assert not out.exists()
    kept = sorted((tmp_path / "a.wav.pieces").iterdir())
    assert [p.name[:5] for p in kept] == ["0001-", "0002-"]
    np.testing.assert_array_equal(samples(kept[1]), pcm(1))  # to be listened to
    again = Speaker()
    reading.write(a_reading(again), out, {"voice": "x"})
    assert again.said == [2, 3]
    assert f"2 of 4 pieces are there already, in {kept[0].parent}" in said()
    np.testing.assert_array_equal(samples(out), np.concatenate([pcm(i) for i in range(4)]))
    assert os.listdir(tmp_path) == ["a.wav"]


def test_v2_only_what_would_sound_the_same_is_taken_up(tmp_path):
    """Another voice, another text of a piece, a damaged file: said anew."""
    out = tmp_path / "a.wav"

    def stopped(at: int = 3) -> None:
        with pytest.raises(InterruptedError):
            reading.write(a_reading(Speaker(fails_at=at)), out, {"voice": "x"})

    stopped()
    other_voice = Speaker(fails_at=3)
    with pytest.raises(InterruptedError):
        reading.write(a_reading(other_voice), out, {"voice": "y"})
    assert other_voice.said == [0, 1, 2]
    changed = a_reading(Speaker(fails_at=3))
    changed.pieces[1] = replace(changed.pieces[1], ids=[1, 99])
    with pytest.raises(InterruptedError):
        reading.write(changed, out, {"voice": "x"})
    assert changed.synthesizer.said == [1]
    damaged = next(p for p in (tmp_path / "a.wav.pieces").iterdir() if p.name.startswith("0001"))
    for path in (tmp_path / "a.wav.pieces").glob("0001-*"):
        path.write_bytes(damaged.read_bytes()[:60])
    last = Speaker()
    reading.write(a_reading(last), out, {"voice": "x"})
    assert last.said == [0, 3]


def test_v2_a_complete_set_of_pieces_needs_only_to_be_joined(tmp_path, monkeypatch):
    out, speaker = tmp_path / "a.wav", Speaker()
    with monkeypatch.context() as patched:
        patched.setattr(PieceFiles, "join", lambda *_: (_ for _ in ()).throw(InterruptedError))
        with pytest.raises(InterruptedError):
            reading.write(a_reading(speaker), out, {})
    reading.write(a_reading(speaker), out, {})
    assert speaker.said == [0, 1, 2, 3]
    assert len(samples(out)) == RATE


def test_pauses_are_between_sentences(tmp_path):
    out = tmp_path / "a.wav"
    reading.write(a_reading(Speaker(), inside=(1,), pause=0.5), out, {})
    silence = np.zeros(RATE // 2, np.int16)
    expected = [pcm(0), silence, pcm(1), pcm(2), silence, pcm(3)]
    np.testing.assert_array_equal(samples(out), np.concatenate(expected))


def test_nothing_said_leaves_nothing(tmp_path):
    with pytest.raises(BadInput, match="stopped at once and said nothing"):
        reading.write(a_reading(Speaker(silent=True)), tmp_path / "a.wav", {})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("to_stream", [False, True])
def test_v5_a_text_of_sound_that_is_not_finite_is_an_error(tmp_path, monkeypatch, to_stream):
    """Exit code 1, and no file; pieces that were finite before are kept."""
    speaker, file = Speaker(), tmp_path / "weights"
    written = []
    monkeypatch.setattr(reading, "_heard", lambda data: written.append(data) or True)

    def fails(self, piece, voice, options, seed, *more, **named):
        if seed[1] == 1:
            raise NotFinite("the model's states are not finite")
        return (Speaker.stream if to_stream else Speaker.say)(
            self, piece, voice, options, seed, *more, **named
        )

    monkeypatch.setattr(speaker, "say", fails.__get__(speaker))
    monkeypatch.setattr(speaker, "stream", fails.__get__(speaker))
    asked = {"stream": to_stream, "out": str(tmp_path / "a.wav"), "reference": None, "voice": "x"}
    text = replace(a_reading(speaker, **asked), options=Pace())
    with pytest.raises(RunError, match="states are not finite: no sound can be made") as refused:
        read_aloud(text, Sources(file, None, file, file, None, None))
    assert refused.value.exit_code == FAILED == 1
    assert not (tmp_path / "a.wav").exists()
    assert speaker.said == [0]
    assert len(written) == (2 if to_stream else 0)


def test_other_peoples_files_stay(tmp_path):
    folder = tmp_path / "a.wav.pieces"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    reading.write(a_reading(Speaker()), tmp_path / "a.wav", {})
    assert os.listdir(folder) == ["notes.txt"]
    (tmp_path / "b.wav.pieces").write_text("a file")
    with pytest.raises(BadInput, match=r"b\.wav\.pieces is a file"):
        reading.write(a_reading(Speaker()), tmp_path / "b.wav", {})


def test_a_stream_has_its_lines_and_pauses(said, monkeypatch):
    written = []
    monkeypatch.setattr(reading, "_heard", lambda data: written.append(data) or True)
    reading.stream(a_reading(Speaker(), count=2, pause=0.5))
    got = np.frombuffer(b"".join(written), "<i2")
    assert len(got) == 100 + 500 + 200
    assert not got[100:600].any()
    lines = said()
    assert re.fullmatch(r"piece 1 of 2: 0\.1 s, real-time factor \d+\.\d\d", lines[1])
    assert re.fullmatch(r"piece 2 of 2: 0\.2 s, real-time factor \d+\.\d\d", lines[2])


def test_v2_a_stop_leaves_at_once_whatever_the_process_is_doing(tmp_path):
    """The main thread is in one long call, as in a compilation: nobody waits for it."""
    code = """
import hashlib, logging, sys
from common.system.lifecycle import run_main
from trainer.commands.speak import leave_when_stopped
logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
def main(stop):
    leave_when_stopped(stop, "; the same command goes on")
    logging.info("at work")
    while True:
        hashlib.pbkdf2_hmac("sha256", b"x", b"y", 1 << 30)
run_main(main)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr.readline() == "at work\n"
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert rest == "stopped by SIGINT; the same command goes on\n"  # not "forced out"


def test_a_signal_during_exec_is_not_lost(tmp_path):
    """Between the command and the process that speaks: it waits until somebody listens."""
    code = """
import os, signal, sys
from common.system.lifecycle import hold_signals, run_main
if len(sys.argv) == 1:
    hold_signals()
    os.kill(os.getpid(), signal.SIGINT)
    os.execv(sys.executable, [sys.executable, __file__, "again"])
def main(stop):
    stop.wait(60)
run_main(main)
"""
    script = tmp_path / "again.py"
    script.write_text(code)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(script)], env=env, timeout=60, capture_output=True)
    assert done.returncode == 130, done.stderr


def load_without_a_library() -> None:
    with libraries_held():
        os.write(2, b"libcuda.so.1: cannot open\n")
        raise ImportError


def test_what_libraries_write_while_they_load_is_shown_only_if_that_fails(capfd):
    with libraries_held():
        os.write(2, b"I0000 oneDNN custom operations are on\n")
    os.write(2, b"afterwards\n")
    assert capfd.readouterr().err == "afterwards\n"
    with pytest.raises(ImportError):
        load_without_a_library()
    assert capfd.readouterr().err == "libcuda.so.1: cannot open\n"


# -- pace ------------------------------------------------------------------------------------------


def test_a_pace_is_taken_from_recordings():
    """0.05 to 0.08 s a character and half a second of silence; one wrong text does not count."""
    rng = np.random.default_rng(0)
    chars = rng.integers(20, 200, 400)
    seconds = 0.5 + chars * rng.uniform(0.05, 0.08, 400)
    seconds[7] = 300.0
    pace = Pace.seen(chars, seconds)
    assert 0.05 / 1.5 < pace.fastest < 0.06 / 1.5
    assert 0.07 * 1.5 < pace.slowest < 0.08 * 1.5
    assert not pace.fault(100, 7.0, True)
    assert pace.fault(100, 20.0, True).startswith("runs on: 20.0 s for a text of 100 characters")
    assert pace.fault(100, 1.0, True).startswith("stops early: 1.0 s")
    assert not pace.fault(3, 1.2, True)  # a short word with silence around it
    assert Pace.seen(chars[:19], seconds[:19]) is None


def test_how_far_a_draw_is_from_right():
    pace = Pace(0.05, 0.1)
    assert pace.distance(100, 8.0) == 1.0
    assert pace.distance(100, 22.0) == pytest.approx(2.0)
    assert pace.distance(100, 2.5) == pytest.approx(2.0)
    assert pace.distance(100, 0.0) == float("inf")


def test_a_pace_is_that_of_the_language(monkeypatch):
    """Of the training rows of that language alone; of too few, or without a run, the usual one."""
    rows = [("en", 100, 6.0)] * 50 + [("fa", 100, 9.0)] * 50 + [("de", 100, 5.0)] * 5
    utterances = [
        SimpleNamespace(language=x, clean="a" * chars, num_samples=round(22050 * s))
        for x, chars, s in rows
    ]
    codes = np.array(["en fa de".split().index(x) for x, *_ in rows])
    manifest = SimpleNamespace(
        columns=lambda: {"split": np.zeros(len(rows), int), "language": codes},
        utterances=lambda ids: [utterances[i] for i in ids],
        languages=["en", "fa", "de"],
    )
    dims = SimpleNamespace(audio=SimpleNamespace(sample_rate=22050))
    run = SimpleNamespace(manifest=manifest, dims=dims)
    monkeypatch.setattr("common.run.folder.RunFolder", lambda path: run)

    def pace(language: str, run: str | None = "runs/x") -> Pace:
        return reading.pace_of({"run": run, "language": language})

    assert pace("en").fastest == pytest.approx(0.06 / 1.5)
    assert pace("fa-IR").slowest == pytest.approx(0.08 * 1.5, rel=0.13)
    assert pace("de") == pace("fr") == pace("en", None) == Pace()
