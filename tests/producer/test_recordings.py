"""Long recordings: cut at pauses where subtitles are only near them, written down by a recogniser
that stands in for Whisper.
"""

import csv
import errno
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import soundfile

import launch
from producer.corpus.recordings import split, transcribe
from producer.corpus.recordings.cutting import frame_levels
from producer.corpus.recordings.segments import read_segments
from tests.support import scan_cases
from tests.support.corpora import sine, write_wav

tokenizer, scanned = scan_cases.tokenizer, scan_cases.scanned
RATE = 16000


def speech(root, spans, total, name="talk.wav", rate=RATE):
    """Tones of 300, 400, … Hz at `spans` (seconds), silence elsewhere."""
    wave = 1e-4 * np.random.default_rng(0).standard_normal(round(total * rate)).astype(np.float32)
    for i, (start, end) in enumerate(spans):
        a, b = round(start * rate), round(end * rate)
        wave[a:b] = sine(b - a, 300 + 100 * i, rate)
    return write_wav(root / name, wave, rate)


def srt(cues):
    def time(s):
        return f"{int(s // 3600):02d}:{int(s // 60 % 60):02d}:{s % 60:06.3f}".replace(".", ",")

    return "".join(f"{i}\n{time(a)} --> {time(b)}\n{t}\n\n" for i, (a, b, t) in enumerate(cues, 1))


def rows(path):
    with open(path, newline="", encoding="utf-8") as f:
        return list(csv.DictReader(f))


def rejects(out):
    lines = (out / "rejects.tsv").read_text().splitlines()[1:]
    return [line.split("\t")[3] for line in lines]


def cut(root, *flags):
    assert launch.main(["split", str(root), *flags]) == 0
    return Path(f"{root}-clips")


def heard(path):
    """(seconds of sound, its frequency) of a clip."""
    wave, rate = soundfile.read(path)
    loud = np.flatnonzero(np.abs(wave) > 0.05)
    spectrum = np.abs(np.fft.rfft(wave * np.hanning(len(wave))))
    return len(loud) and (loud[-1] - loud[0]) / rate, np.argmax(spectrum) * rate / len(wave)


def test_subtitles_that_are_near_a_pause_are_cut_in_it(tmp_path):
    root = tmp_path / "talks"
    spans = [(1.0, 3.0), (3.3, 5.5), (7.0, 9.0)]
    speech(root, spans, 10)
    cues = [(0.7, 3.2, "One."), (3.2, 5.9, "Two!"), (6.6, 9.3, "سه؟")]
    (root / "talk.srt").write_text(srt(cues))
    out = cut(root)
    made = rows(out / "metadata.csv")
    assert [r["text"] for r in made] == ["One.", "Two!", "سه؟"]
    for i, (row, (start, end)) in enumerate(zip(made, spans, strict=True)):
        seconds, hz = heard(out / row["file_name"])
        assert seconds == pytest.approx(end - start, abs=0.02)
        assert hz == pytest.approx(300 + 100 * i, abs=2)
        assert float(row["start_s"]) == pytest.approx(start - 0.1, abs=0.06)
        assert float(row["end_s"]) == pytest.approx(end + 0.1, abs=0.06)
        assert soundfile.info(out / row["file_name"]).samplerate == RATE
    assert rejects(out) == []


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000])
def test_frames_keep_time_at_every_rate(rate):
    """After 300 s in blocks of any size: a tone that begins there begins in frame 30 000."""
    wave = np.zeros(301 * rate, np.float32)
    wave[300 * rate :] = 0.5
    levels = frame_levels(np.array_split(wave, 37), rate)
    assert len(levels) == 30100
    assert np.flatnonzero(levels > -20)[0] == 30000
    assert levels[-1] == pytest.approx(-6.02, abs=0.01)


def test_a_sentence_of_several_cues_is_one_clip_and_none_is_cut_in_a_word(tmp_path):
    root = tmp_path / "talks"
    speech(root, [(1, 3), (3.4, 5), (6, 9), (10, 24)], 25)
    cues = [
        *((1, 3, "a sentence that"), (3.4, 5, "goes on.")),
        *((6, 7.4, "No pause."), (7.4, 9, "Between these.")),
        *((10, 17, "Nor here."), (17, 24, "Too long.")),
    ]
    (root / "talk.srt").write_text(srt(cues))
    out = cut(root)
    texts = [r["text"] for r in rows(out / "metadata.csv")]
    assert texts == ["a sentence that goes on.", "No pause. Between these."]
    assert rejects(out) == ["no pause", "no pause"]


def test_what_is_no_speech_is_left_out_and_in_no_clip(tmp_path):
    root = tmp_path / "talks"
    speech(root, [(1, 2), (2.4, 3.4), (3.8, 5), (6, 7), (8, 9), (10, 11)], 12)
    cues = [
        *((1, 2, "One and"), (2.4, 3.4, "[music]"), (3.8, 5, "two.")),
        *((6, 7, "(laughs) Three."), (8, 9, "Four."), (8.5, 9, "Five."), (10, 11, "Six.")),
        *((40, 41, "Beyond."),),
    ]
    (root / "talk.srt").write_text(srt(cues))
    out = cut(root)
    made = rows(out / "metadata.csv")
    assert [r["text"] for r in made] == ["One and", "two.", "Six."]
    assert all(heard(out / r["file_name"])[0] < 1.25 for r in made)
    kinds = ["no words", "sounds described", "overlaps", "overlaps", "beyond the recording"]
    assert sorted(rejects(out)) == sorted(kinds)


def test_webvtt_with_voices_and_json_with_speakers(tmp_path):
    vtt = tmp_path / "a.vtt"
    vtt.write_text(
        "WEBVTT\n\nNOTE a note\n\n1\n00:01.000 --> 00:02.500 align:start\n<v.loud Mary Ann>Hi"
        " <i>you</i> &amp; all\nthere</v>\n\n00:03.000 --> 00:04.000\n<00:03.500><c>Bye</c>\n"
    )
    segments, errors = read_segments(vtt)
    assert [(s.start_s, s.end_s, s.text, s.speaker, s.line) for s in segments] == [
        (1.0, 2.5, "Hi you & all there", "Mary Ann", 7),
        (3.0, 4.0, "Bye", "", 11),
    ]
    assert not errors
    a_list = tmp_path / "b.json"
    a_list.write_text(
        json.dumps(
            [{"start": 2, "end": 3, "text": " b ", "speaker": "S1"}, {"start": 0, "text": 1}]
        )
    )
    (segment,), (error,) = read_segments(a_list)
    assert (segment.text, segment.speaker) == ("b", "S1")
    assert (error.line, error.kind) == (2, "no times")
    for bad in ("{", '{"a": 1}', '"x"'):
        a_list.write_text(bad)
        with pytest.raises(split.BadInput, match="b.json"):
            read_segments(a_list)


def test_numbers_in_the_text_of_a_cue_stay(tmp_path):
    file = tmp_path / "a.srt"
    file.write_text(
        "\ufeff1\r\n00:00:01,0 --> 00:00:02,000\r\nIn the year\r\n1984\r\n2\r\n00:00:03,000 -->"
        " 00:00:04,000\r\n7\r\n"
    )
    segments, _ = read_segments(file)
    assert [s.text for s in segments] == ["In the year 1984", "7"]


def test_what_was_cut_is_not_cut_again(tmp_path, monkeypatch):
    root = tmp_path / "talks"
    for name in ("a", "b", "c"):
        speech(root, [(1, 2)], 3, f"{name}.wav")
        (root / f"{name}.srt").write_text(srt([(1, 2, f"Text {name}.")]))
    done, real = [], split.cut

    def stops_at_the_third(segments, levels, most_s):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(segments[0].text)
        return real(segments, levels, most_s)

    monkeypatch.setattr(split, "cut", stops_at_the_third)
    assert launch.main(["split", str(root)]) == 130
    out = Path(f"{root}-clips")
    assert not (out / "metadata.csv").exists()
    monkeypatch.setattr(split, "cut", lambda s, *a: (done.append(s[0].text), real(s, *a))[1])
    cut(root)
    assert done == ["Text a.", "Text b.", "Text c."]
    assert len(rows(out / "metadata.csv")) == 3
    (root / "b.srt").write_text(srt([(1, 2, "Changed here.")]))
    next((out / "wavs").glob("c.*")).unlink()
    cut(root)
    assert done[3:] == ["Changed here.", "Text c."]
    assert [r["text"] for r in rows(out / "metadata.csv")] == [
        "Text a.",
        "Changed here.",
        "Text c.",
    ]


def test_a_recording_that_is_cut_again_leaves_no_clips_behind(tmp_path):
    """Two texts become one; a killed call left an unfinished clip; other recordings keep theirs."""
    root = tmp_path / "talks"
    speech(root, [(1, 2), (4, 5)], 6, "a.wav")
    speech(root, [(1, 2)], 3, "a.wav.00001.flac")
    (root / "a.srt").write_text(srt([(1, 2, "One."), (4, 5, "Two.")]))
    (root / "a.wav.00001.srt").write_text(srt([(1, 2, "Other.")]))
    out = cut(root)
    clips = {r["file_name"] for r in rows(out / "metadata.csv")}
    assert len(clips) == 3
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(60)
    for pid in (ended.pid, os.getppid()):
        (out / "wavs" / f".a.wav.00001.flac.{pid}").write_bytes(b"fLaC")
    (root / "a.srt").write_text(srt([(1, 2, "One.")]))
    cut(root)
    left = {f"wavs/{p.name}" for p in (out / "wavs").iterdir()}
    running = f"wavs/.a.wav.00001.flac.{os.getppid()}"
    assert left == clips - {"wavs/a.wav.00002.flac"} | {running}


def test_the_clips_of_a_recording_are_a_corpus(tmp_path, scanned):
    root = tmp_path / "talks"
    spans = [(1 + 3 * i, 3 + 3 * i) for i in range(16)]  # longer than the blocks that are read
    speech(root, spans, 50, "talk.flac", 48000)
    (root / "talk.srt").write_text(
        srt([(a, b, f"hear {'ab' * (i + 3)}.") for i, (a, b) in enumerate(spans)])
    )
    (root / "mute.wav").write_bytes((root / "talk.flac").read_bytes()[:2000])
    (root / "mute.en.srt").write_text(srt([(0, 1, "x.")]))
    write_wav(root / "alone.wav", sine(RATE), RATE)
    write_wav(root / "latin.wav", sine(RATE), RATE)
    (root / "latin.srt").write_bytes("1\n00:00:00,0 --> 00:00:01,0\ncafé".encode("latin-1"))
    out = cut(root)
    for i, row in enumerate(rows(out / "metadata.csv")):
        assert heard(out / row["file_name"]) == pytest.approx((2.0, 300 + 100 * i), abs=3)
    found = scanned(out, min_audio_s=0.5)
    assert found.counts == (16, 0)
    assert len(rejects(out)) == 3
    assert {"no segments", "not read"} < set(rejects(out))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "has x.srt"), (("--out", "{}/clips"), "lies in"), (("--max-seconds", "0"), "positive"),
        (("seed=3",), "unrecognized arguments"),
    ],
)  # fmt: skip
def test_what_cannot_be_split_is_said(tmp_path, capsys, flags, said):
    write_wav(tmp_path / "talks/a.wav", sine(RATE), RATE)
    command = ["split", *[f.format(tmp_path / "talks") for f in flags], str(tmp_path / "talks")]
    assert launch.main(command) == 2
    assert said in capsys.readouterr().err


def test_a_disk_that_refuses_is_said(tmp_path, capsys, monkeypatch):
    root = tmp_path / "talks"
    speech(root, [(1, 2)], 3)
    (root / "talk.srt").write_text(srt([(1, 2, "One.")]))
    (tmp_path / "file").write_bytes(b"")
    assert launch.main(["split", str(root), "--out", str(tmp_path / "file/clips")]) == 2
    assert f"error: {tmp_path / 'file/clips'}" in capsys.readouterr().err

    def full(path, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (root / "talk.srt").unlink()
    monkeypatch.setattr(transcribe, "write_atomically", full)
    with pytest.raises(transcribe.BadInput, match="No space left"):
        written(root, {3: [(1, 2, "One.", 0.5)]})


# -- written down


def fake(texts, calls=None):
    """A recogniser that knows recordings by their length in whole seconds."""

    def load(folder, device):
        def recognise(wave, language):
            seconds = round(len(wave) / transcribe.RATE)
            if calls is not None:
                calls.append(seconds)
            if texts[seconds] is None:
                raise KeyboardInterrupt
            return language or "en", [transcribe.Said(*t) for t in texts[seconds]]

        return recognise

    return load


def written(folder, texts, calls=None, *flags):
    args = launch.flags.parse(
        launch._parser("transcribe"), ["--model", "m", "--language", "fa", *flags, str(folder)]
    )
    said = []
    transcribe.run(args, said.append, fake(texts, calls))
    return said


def test_recordings_are_written_down_for_review(tmp_path, scanned):
    root = tmp_path / "talks"
    write_wav(root / "a.wav", sine(3 * 22050))
    write_wav(root / "sub/b.flac", sine(2 * 48000, rate=48000), 48000)
    speech(root, [(1, 3), (4, 14)], 20, "long.wav")
    texts = {
        3: [(0.1, 2.9, "سلام, دوست", 0.9)], 2: [(0.0, 1.0, "آب", 0.4), (1.0, 2.0, '"نان"', 0.8)],
        20: [(1.0, 3.0, "کتاب.", 0.6), (4.0, 14.0, "خوب.", 0.5)],
    }  # fmt: skip
    said = written(root, texts)
    assert said[0] == "3 recordings transcribed, 0 were before"
    made = rows(root / "metadata.csv")
    assert [(r["file_name"], r["text"], r["language"], r["confidence"]) for r in made] == [
        ("a.wav", "سلام, دوست", "fa", "0.9000"),
        ("sub/b.flac", 'آب "نان"', "fa", "0.4000"),
    ]
    review = [r["confidence"] for r in rows(root / "review.csv")]
    assert review == ["0.4000", "0.5000", "0.6000", "0.8000", "0.9000"]
    assert scanned(root).counts == (2, 0)
    out = cut(root)
    cuts = [r["text"] for r in rows(out / "metadata.csv")]
    assert cuts == ["سلام, دوست", "کتاب.", "خوب.", 'آب "نان"']


def test_recordings_with_a_text_stay_in_the_corpus(tmp_path, scanned):
    """What transcribe writes down is added to them: metadata.csv is the whole corpus."""
    root = tmp_path / "mixed"
    for n in (2, 3, 4):
        write_wav(root / f"{n}.wav", sine(n * 22050))
    write_wav(root / "sub/5.wav", sine(5 * 22050))
    (root / "3.txt").write_text('three, "of" the folder')
    (root / "sub/5.lab").write_text("five")
    assert scanned(root).counts == (2, 0)
    texts = {2: [(0, 2, "two", 0.5)], 4: [(0, 4, "four", 0.75)]}
    calls = []
    for transcribed, before in ((2, 0), (0, 2)):
        said = written(root, texts, calls)
        assert said[:2] == [
            f"{transcribed} recordings transcribed, {before} were before",
            "2 more have a text beside them (.txt, .lab)",
        ]
        assert [tuple(r.values())[:4] for r in rows(root / "metadata.csv")] == [
            ("2.wav", "two", "fa", "0.5000"),
            ("3.wav", 'three, "of" the folder', "fa", ""),
            ("4.wav", "four", "fa", "0.7500"),
            ("sub/5.wav", "five", "fa", ""),
        ]
        assert scanned(root).counts == (4, 0)
    assert calls == [2, 4]


def test_what_is_written_down_stays_with_its_corrections(tmp_path):
    for n in (2, 3, 4, 5):
        write_wav(tmp_path / f"{n}.wav", sine(n * 22050))
    (tmp_path / "5.srt").write_text(srt([(0, 1, "x")]))
    calls = []
    with pytest.raises(KeyboardInterrupt):
        written(tmp_path, {2: [(0, 2, "a b", 0.5)], 3: None}, calls)
    made = json.loads((tmp_path / "2.json").read_text())
    made["segments"][0]["text"] = "corrected"
    (tmp_path / "2.json").write_text(json.dumps(made))
    texts = {3: [(0, 2, "c", 0.5)], 4: []}
    said = written(tmp_path, texts, calls)
    assert calls == [2, 3, 3, 4]
    assert said[0] == "2 recordings transcribed, 2 were before"
    assert [r["text"] for r in rows(tmp_path / "metadata.csv")] == ["corrected", "c"]
    (tmp_path / "3.json").write_text('{"recognised_by": "m", "segments": 3}')
    with pytest.raises(transcribe.BadInput, match="3.json"):
        written(tmp_path, texts)


@pytest.mark.parametrize("seconds", ["0", "-1", "nan"])
def test_no_clip_is_as_short_as_that(tmp_path, seconds):
    write_wav(tmp_path / "a.wav", sine(22050))
    with pytest.raises(transcribe.BadInput, match="--max-seconds must be positive"):
        written(tmp_path, {1: []}, None, f"--max-seconds={seconds}")


def test_metadata_of_somebody_else_is_not_overwritten(tmp_path):
    write_wav(tmp_path / "a.wav", sine(22050))
    (tmp_path / "metadata.csv").write_text("a|mine\n")
    with pytest.raises(transcribe.BadInput, match="this command did not write it"):
        written(tmp_path, {1: []})
    assert (tmp_path / "metadata.csv").read_text() == "a|mine\n"


def test_the_package_gets_a_local_folder_alone(tmp_path, monkeypatch):
    with pytest.raises(transcribe.BadInput, match=r"no model\.bin"):
        transcribe.faster_whisper(tmp_path, "cpu")
    (tmp_path / "model.bin").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "faster_whisper", None)
    with pytest.raises(transcribe.BadInput, match=r"xtts-trainer\[transcribe\]"):
        transcribe.faster_whisper(tmp_path, "cpu")
    asked = {}

    class Model:
        def __init__(self, path, **options):
            asked.update(path=path, **options)

        def transcribe(self, wave, **options):
            asked.update(options)
            segment = types.SimpleNamespace(start=0, end=1, text=" hi ", avg_logprob=np.log(0.25))
            return iter([segment]), types.SimpleNamespace(language="en")

    monkeypatch.setitem(sys.modules, "faster_whisper", types.SimpleNamespace(WhisperModel=Model))
    language, said = transcribe.faster_whisper(tmp_path, "cpu")(np.zeros(9, np.float32), None)
    assert list(said) == [transcribe.Said(0, 1, "hi", pytest.approx(0.25))]
    assert (language, asked["path"], asked["local_files_only"]) == ("en", str(tmp_path), True)
