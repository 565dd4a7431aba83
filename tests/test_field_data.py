"""Corpora as people have them, each with what is right: cases D1 to D14, and for each two more of its kind."""

import json
import os
import struct
import subprocess

import numpy as np
import pytest
import scan_cases
import soundfile
from corpora import make_corpus, sentence, sine, write_metadata, write_wav

from common.errors import BadInput
from common.xtts import ffmpeg
from common.xtts.audio_error import DecodeError
from common.xtts.clips import ReferenceClipError, load_clip
from producer.decode import decode
from producer.prepare import _mel_stats
from producer.readers import detect, parquet
from producer.scan import scan

tokenizer, scanned = scan_cases.tokenizer, scan_cases.scanned
RATE = 22050
TONE = sine(RATE)


def clip(path, seconds=1.0, freq=440.0, rate=RATE, **options):
    return write_wav(path, sine(round(seconds * rate), freq, rate), rate, **options)


def clips(root, n, folder="wavs", suffix=".wav", seconds=0.6):
    """`n` recordings 000, 001, …; their names without suffix."""
    names = [f"{i:03d}" for i in range(n)]
    for i, name in enumerate(names):
        clip(root / folder / f"{name}{suffix}", seconds, 300 + i)
    return names


def decodable(path):
    try:
        return decode(path)
    except DecodeError as e:
        return e.reason


# -- D1: channels that cancel ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".wav", ".flac", ".mp3"])
@pytest.mark.parametrize("share", [-1.0, -0.9, -0.8])
def test_d1_of_channels_that_cancel_one_is_taken(tmp_path, scanned, suffix, share):
    root = make_corpus(tmp_path / "c", 2)
    path = write_wav(root / f"wavs/x{suffix}", np.stack([TONE, share * TONE], 1))
    write_metadata(root, ["c0001|one", "c0002|two", "x|three"])
    wave = decode(path)
    assert np.abs(wave).max() == pytest.approx(0.5, abs=0.03)
    assert np.abs(load_clip(path)).max() == pytest.approx(0.5, abs=0.03)
    if suffix != ".mp3":
        np.testing.assert_array_equal(decode(path, 3000, 5000), wave[3000:8000])
    warnings = scanned(root).report.warnings
    assert [w for w in warnings if "cancel" in w] == [
        f"1 clips have channels that cancel each other when they are added; the louder one is taken alone ({path})"
    ]


def test_d1_the_mean_stays_where_nothing_cancels(tmp_path, scanned):
    root = make_corpus(tmp_path / "c", 2)
    dead = write_wav(root / "wavs/dead.wav", np.stack([TONE, 0 * TONE], 1))
    alike = write_wav(root / "wavs/alike.wav", np.stack([TONE, 0.5 * TONE], 1))
    write_metadata(root, ["c0001|one", "c0002|two", "dead|three", "alike|four"])
    assert np.abs(decode(dead)).max() == pytest.approx(0.25, abs=1e-3)
    assert np.abs(decode(alike)).max() == pytest.approx(0.375, abs=1e-3)
    said = "\n".join(scanned(root).report.warnings)
    assert f"1 stereo clips have an empty channel, so that their mean is 6 dB softer ({dead})" in said
    assert "cancel" not in said


# -- D2: next to silence -----------------------------------------------------------------------------------------------------------------


def _silences():
    rng = np.random.default_rng(0)
    zeros = np.zeros(2 * RATE, np.float32)
    noise = (10 ** (-90 / 20) * rng.standard_normal(2 * RATE)).astype(np.float32)
    one_click = zeros.copy()
    one_click[RATE] = 0.9
    short = zeros.copy()
    short[: RATE // 10] = TONE[: RATE // 10]
    clicks = zeros.copy()
    clicks[[100, RATE, 2 * RATE - 100]] = 0.9
    return {
        "noise": (noise, "silent: -90.0 dBFS"),
        "offset": (zeros + np.float32(0.25), "silent: -inf dBFS, a constant offset of 0.25"),
        "click": (one_click, "almost silent: 0.02 s of sound in 2.00 s"),
        "short": (short, "almost silent: 0.10 s of sound in 2.00 s"),
        "clicks": (clicks, "almost silent: 0.06 s of sound in 2.00 s"),
        "noise on an offset": (noise - np.float32(0.1), "silent: -90.0 dBFS, a constant offset of 0.1"),
    }


SILENCES = _silences()


@pytest.mark.parametrize("kind", SILENCES)
@pytest.mark.parametrize("subtype", ["PCM_24", "FLOAT"])
def test_d2_what_is_next_to_silence_passes_nowhere(tmp_path, scanned, kind, subtype):
    """The same judgement in the scan, in training and for a reference clip."""
    root = make_corpus(tmp_path / "c", 2)
    samples, reason = SILENCES[kind]
    path = write_wav(root / "wavs/x.wav", samples, subtype=subtype)
    write_metadata(root, ["c0001|one", "c0002|two", "x|three"])
    assert scanned(root).reasons["x"].startswith(reason)
    with pytest.raises(DecodeError) as e:
        decode(path)
    assert e.value.reason.startswith(reason)
    with pytest.raises(ReferenceClipError, match="silent"):
        load_clip(path)


def test_d2_soft_speech_and_sound_on_an_offset_are_kept(tmp_path, scanned):
    root = tmp_path / "c"
    write_wav(root / "wavs/soft.wav", 0.01 * TONE)
    write_wav(root / "wavs/offset.wav", 0.2 * TONE + np.float32(0.25))
    x = np.zeros(3 * RATE, np.float32)
    x[: RATE // 2] = TONE[: RATE // 2]
    write_wav(root / "wavs/word.wav", x)
    write_metadata(root, ["soft|a soft word", "offset|another word", "word|just this one word"])
    s = scanned(root)
    assert s.counts == (3, 0)
    said = "\n".join(s.report.warnings)
    assert "1 clips are very quiet (below -45 dBFS where they sound; quietest -49.0 dBFS: " in said
    assert "1 clips have a constant offset (largest 0.25 of full scale: " in said
    assert "1 clips end with more than 1.5 s of silence (longest 2.5 s: " in said


def test_d2_silent_clips_never_move_the_statistics(tmp_path, tokenizer):
    """A scan that saw headers alone lets them pass; the statistics do not count them."""
    found = {}
    for name, silent in (("good", False), ("mixed", True)):
        root = make_corpus(tmp_path / name, 6, 0.6)
        if silent:
            for kind, (samples, _) in SILENCES.items():
                write_wav(root / f"wavs/z {kind}.wav", samples, subtype="FLOAT")
            rows = (root / "metadata.csv").read_text().splitlines()
            write_metadata(root, rows + [f"z {kind}|one" for kind in SILENCES])
        settings = scan_cases.settings(root, eval_fraction=0)
        scan(settings, tmp_path / name / "m", tokenizer, deep=False)
        with scan_cases.Manifest.open(tmp_path / name / "m") as m:
            assert len(m) == (12 if silent else 6)
            found[name] = _mel_stats(settings, m, None, settings.dims)
    np.testing.assert_allclose(found["mixed"], found["good"], rtol=1e-6)


# -- D3, D4, D5: columns -----------------------------------------------------------------------------------------------------------------


def _speakers(i):
    return "anna" if i % 2 else "bert"


COLUMNS = {
    # first line, then a row of i; what is read: (text, speaker)
    "id text gender": ("id|text|gender", lambda i: f"{i:03d}|{sentence(i)}|female", None),
    "id text speaker": (None, lambda i: f"{i:03d}|{sentence(i)}|{_speakers(i)}", _speakers),
    "id speaker text": (None, lambda i: f"{i:03d}|{_speakers(i)}|{sentence(i)}", _speakers),
    "one unknown name before": ("id|age|sentence", lambda i: f"{i:03d}|{20 + i % 3}|{sentence(i)}", None),
    "id text speaker seconds": (None, lambda i: f"{i:03d}|{sentence(i)}|{_speakers(i)}|{1 + i / 7:.2f}", _speakers),
    "text first": (None, lambda i: f"{sentence(i)}\t{i:03d}.wav\t{_speakers(i)}", _speakers),
    "file speaker text": (None, lambda i: f"wavs/{i:03d}.wav|{_speakers(i)}|{sentence(i)}", _speakers),
    "windows header": ("\ufeffAudio_File;Text;Speaker_Name", lambda i: f"{i:03d}.wav;{sentence(i)};{_speakers(i)}", _speakers),
    "every field quoted": ('"file_name","text"', lambda i: f'"{i:03d}.wav","{sentence(i)}, he said"', None),
    "quoted, no header": (None, lambda i: f'"wavs/{i:03d}.wav","{_speakers(i)}","so, {sentence(i)}"', _speakers),
    "semicolons": ("id;sentence;client_id", lambda i: f'{i:03d};"{sentence(i)}; so";{_speakers(i)}', _speakers),
    "pipes, quoted": (None, lambda i: f'"{i:03d}"|"{sentence(i)}"|"{_speakers(i)}"', _speakers),
}


@pytest.mark.parametrize("case", COLUMNS)
def test_d3_to_d5_columns_are_found(tmp_path, scanned, case):
    header, row, speaker = COLUMNS[case]
    clips(tmp_path / "c", 30)
    write_metadata(tmp_path / "c", ([header] if header else []) + [row(i) for i in range(30)])
    s = scanned(tmp_path / "c")
    assert s.counts == (30, 0), s.report.lines()
    for i, u in enumerate(s.utterances):
        assert sentence(i) in u.text
        assert not {"female", "anna", "bert", '"', "|"} & set(u.text.split())
        assert u.speaker == (speaker(i) if speaker else "c")
    assert any("audio = column" in note and "text = column" in note for note in s.report.notes)


def test_d4_folders_of_recordings_and_two_speakers(tmp_path, scanned):
    for folder in ("wav", "wavs", "audio", "clips"):
        root = tmp_path / folder
        clips(root, 6, folder)
        write_metadata(root, [f"{i:03d}|{_speakers(i)}|{sentence(i)}" for i in range(6)])
        s = scanned(root)
        assert s.counts == (6, 0)
        assert {u.speaker for u in s.utterances} == {"anna", "bert"}
    assert detect(tmp_path / "wav") == "piper"


def test_d5_quotes_of_csv(tmp_path, scanned):
    root = tmp_path / "c"
    clips(root, 5)
    rows = ['"file","text"', '"000","say ""yes"", then"', '"001","two\nlines"', '"002","open', '"003","plain"', '"004","x"y']
    write_metadata(root, rows)
    s = scanned(root)
    assert [(u.name, u.text) for u in s.utterances] == [("000", 'say "yes", then'), ("001", "two\nlines"), ("003", "plain")]
    assert [(r.line, r.kind) for r in s.rejects] == [(5, "broken quoting"), (7, "broken quoting")]


def test_d3_the_user_says_which_column_is_what(tmp_path, scanned):
    root = tmp_path / "c"
    clips(root, 6)
    write_metadata(root, [f"{i:03d}|{sentence(i)}|{sentence(i + 50)}|{_speakers(i)}" for i in range(6)])
    s = scanned(root, columns={"text": 2, "speaker": 4})
    assert [(u.text, u.speaker) for u in s.utterances] == [(sentence(i), _speakers(i)) for i in range(6)]
    assert {u.speaker for u in scanned({"path": str(root), "columns": {"text": 2, "speaker": None}}).utterances} == {"c"}
    write_metadata(root, ["id|eins|zwei"] + [f"{i:03d}|{sentence(i)}|{_speakers(i)}" for i in range(6)])
    assert [u.text for u in scanned(root, columns={"text": "eins"}).utterances] == [sentence(i) for i in range(6)]
    for columns, words in (({"text": 9}, "count from 1 to 3"), ({"text": "drei"}, "there is no column 'drei'; there are id, eins, zwei")):
        with pytest.raises(BadInput, match=words):
            scanned(root, columns=columns)


# -- D6: layouts -------------------------------------------------------------------------------------------------------------------------


def _jsonl(root, n, entry, name="metadata.jsonl"):
    clips(root, n)
    write_metadata(root, [json.dumps(entry(i)) for i in range(n)], name)


def _cut(i):
    source = {"type": "file", "channels": [0], "source": f"wavs/{i:03d}.wav"}
    recording = {"id": f"{i:03d}", "sources": [source], "sampling_rate": RATE, "duration": 0.6}
    supervision = {"id": f"s{i}", "start": 0, "duration": 0.6, "text": sentence(i), "speaker": _speakers(i), "language": "en"}
    return {"id": f"{i:03d}", "start": 0, "duration": 0.6, "channel": 0, "supervisions": [supervision], "recording": recording}


def _hf(root):
    _jsonl(root, 4, lambda i: {"file_name": f"wavs/{i:03d}.wav", "transcription": sentence(i)})


def _nemo(root):
    entry = lambda i: {"audio_filepath": f"wavs/{i:03d}.wav", "text": sentence(i), "duration": 0.6, "speaker": i % 2}  # noqa: E731
    _jsonl(root, 4, entry, "train_manifest.json")


def _lhotse(root):
    _jsonl(root, 4, _cut, "cuts.jsonl")


def _json_list(root):
    clips(root, 4)
    (root / "manifest.json").write_text(json.dumps([{"audio": {"path": f"{i:03d}.wav"}, "text": sentence(i)} for i in range(4)]))


def _libritts(root):
    for i in range(4):
        stem = root / f"train-clean/{84 + i % 2}/121123/{84 + i % 2}_121123_{i:06d}_000000"
        clip(stem.with_suffix(".wav"), 0.6)
        stem.with_suffix(".normalized.txt").write_text(sentence(i))
        stem.with_suffix(".original.txt").write_text("Not This.")


def _common_voice(root):
    for i in range(4):
        clip(root / f"clips/common_voice_en_{i}.mp3", 0.8)
    rows = [f"{'ab'[i % 2] * 64}\tcommon_voice_en_{i}.mp3\t{sentence(i)}\t2\t0\ttwenties\t\t\ten\t" for i in range(4)]
    header = "client_id\tpath\tsentence\tup_votes\tdown_votes\tage\tgender\taccents\tlocale\tsegment"
    write_metadata(root, [header, *rows], "validated.tsv")
    write_metadata(root, [header, rows[0]], "train.tsv")
    write_metadata(root, [header, rows[1]], "dev.tsv")
    write_metadata(root, [header], "invalidated.tsv")


def _common_voice_release(root):
    _common_voice(root / "en")


def _css10(root):
    clips(root, 4, "book")
    write_metadata(root, [f"book/{i:03d}.wav|Raw {i}|{sentence(i)}|0.6" for i in range(4)], "transcript.txt")


def _mailabs(root):
    for book in ("one", "two"):
        folder = root / f"en_US/by_book/female/mary/{book}"
        clips(folder, 2)
        write_metadata(folder, [f"{i:03d}|Raw|{sentence(i)}" for i in range(2)])


def _sidecar(root):
    for i in range(4):
        clip(root / f"{_speakers(i)}/{i:03d}.wav", 0.6)
        (root / f"{_speakers(i)}/{i:03d}{'.txt' if i % 2 else '.lab'}").write_text(sentence(i))
    (root / "README.txt").write_text("About this.")


def _parquet(root):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    names = clips(root.parent / "loose", 4)
    audio = [{"bytes": (root.parent / f"loose/wavs/{n}.wav").read_bytes(), "path": f"{n}.wav"} for n in names]
    root.mkdir()
    table = pa.table({"audio": audio, "text": [sentence(i) for i in range(4)], "speaker_id": [1, 2, 1, 2]})
    (root / "data").mkdir()
    pq.write_table(table, root / "data/train-00000-of-00001.parquet")


def _vctk(root):
    for i in range(4):
        speaker = f"p{225 + i % 2}"
        (root / "txt" / speaker).mkdir(parents=True, exist_ok=True)
        (root / f"txt/{speaker}/{speaker}_{i:03d}.txt").write_text(sentence(i))
        clip(root / f"wav48/{speaker}/{speaker}_{i:03d}.wav", 0.6, rate=48000)


LAYOUTS = {  # name → (what makes it, reader, speakers)
    "hugging face": (_hf, "jsonl", 1), "nemo": (_nemo, "jsonl", 2), "lhotse": (_lhotse, "jsonl", 2), "list": (_json_list, "jsonl", 1),
    "libritts": (_libritts, "libritts", 2), "common voice": (_common_voice, "common_voice", 2),
    "release": (_common_voice_release, "common_voice", 2), "css10": (_css10, "css10", 1), "m-ailabs": (_mailabs, "mailabs", 1),
    "sidecar": (_sidecar, "sidecar", 2), "parquet": (_parquet, "parquet", 2), "vctk": (_vctk, "vctk", 2),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_d6_layouts_are_found_and_can_be_named(tmp_path, scanned, layout):
    make, reader, speakers = LAYOUTS[layout]
    root = tmp_path / "c"
    make(root)
    named = root / "data/train-00000-of-00001.parquet" if layout == "parquet" else root
    assert detect(named) == reader
    for source in ({"path": str(root)}, {"path": str(named), "format": reader}):
        s = scanned(source)
        assert s.counts == (4, 0), s.report.lines()
        assert sorted(u.text for u in s.utterances) == sorted(sentence(i % 2 if layout == "m-ailabs" else i) for i in range(4))
        assert len({u.speaker for u in s.utterances}) == speakers


def test_d6_parquet_without_its_package_is_named(tmp_path, scanned, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(BadInput, match=r"a.parquet is Parquet, which needs the package pyarrow: pip install 'xtts-trainer\[parquet\]'"):
        scanned(tmp_path / "a.parquet")


def test_d6_parquet_is_unpacked_once(tmp_path, scanned):
    _parquet(tmp_path / "c")
    first = scanned(tmp_path / "c")
    file = tmp_path / "c/data/train-00000-of-00001.audio/00000001.wav"
    before = file.stat().st_mtime_ns
    assert first.utterances[0].path == file
    assert scanned(tmp_path / "c").digest == first.digest
    assert file.stat().st_mtime_ns == before
    assert parquet.files_in(tmp_path / "c")[0].name == "train-00000-of-00001.parquet"


# -- D7: paths ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "there"),
    [
        ("C:\\Users\\x\\wavs\\{}.wav", "wavs/{}.wav"),
        ("D:/data/corpus/{}.wav", "wav/{}.wav"),
        ("\\\\server\\share\\wavs\\{}.wav", "clips/{}.wav"),
        ("/home-of-another/corpus/wavs/{}.wav", "wavs/{}.wav"),
        ("file:///mnt/disk/{}.wav", "deep/er/{}.wav"),
        ("wavs/{}.wav", "wavs/{}.WAV"),
        ("{}", "wavs/{}.Flac"),
        ("caf\u00e9 {}", "wavs/cafe\u0301 {}.wav"),
        ("cafe\u0301 {}.wav", "wavs/caf\u00e9 {}.wav"),
        ("my%20clip%20{}.wav", "wavs/my clip {}.wav"),
        ("caf%C3%A9{}", "wavs/caf\u00e9{}.wav"),
        ("100%{}", "wavs/100%{}.wav"),
    ],
)
def test_d7_paths_as_people_write_them(tmp_path, scanned, written, there):
    root = tmp_path / "c"
    for name in ("a", "b", "c"):
        path = root / there.format(name)
        clip(path.with_suffix(path.suffix.lower()), 0.6).rename(path)
    write_metadata(root, [f"{written.format(n)}|some words here" for n in "abc"])
    s = scanned(root)
    assert s.counts == (3, 0), s.report.lines()
    assert [str(u.path) for u in s.utterances] == [str(root / there.format(n)) for n in "abc"]
    moved = [w for w in s.report.warnings if "not where the metadata says" in w]
    assert len(moved) <= 1
    if "/" in written or "\\" in written:
        assert moved == [] or moved[0].startswith("3 recordings are not where the metadata says")


def test_d7_of_several_files_the_nearest_or_none(tmp_path, scanned):
    root = tmp_path / "c"
    for speaker in ("ann", "bob"):
        clip(root / f"data/{speaker}/1.wav", 0.6)
        clip(root / f"data/{speaker}/only-{speaker}.wav", 0.6)
    write_metadata(root, ["/gone/ann/1.wav|one", "1.wav|two", "E:\\only-bob.wav|three", "nowhere|four"])
    s = scanned(root)
    assert [os.path.relpath(u.path, root) for u in s.utterances] == ["data/ann/1.wav", "data/bob/only-bob.wav"]
    assert s.reasons["1.wav"] == (
        f"2 files have that name ({root}/data/ann/1.wav, {root}/data/bob/1.wav); write the path, as seen from the metadata file"
    )
    assert s.reasons["nowhere"].endswith(f"; nothing below {root} has that name")


def test_what_is_no_file_is_refused_unopened(tmp_path, scanned):
    root = make_corpus(tmp_path / "c", 2, 0.6)
    os.mkfifo(root / "wavs/pipe.wav")
    (root / "wavs/folder.wav").mkdir()
    os.symlink("/dev/zero", root / "wavs/zero.wav")
    write_metadata(root, ["c0001|one", "c0002|two", "pipe|three", "folder|four", "zero|five"])
    s = scanned(root)
    assert s.counts == (2, 3)
    for name, what in (("pipe", "a named pipe"), ("folder", "a folder"), ("zero", "a device")):
        assert s.reasons[name] == f"not a file: {what} lies there ({root}/wavs/{name}.wav)"
        with pytest.raises(DecodeError, match=f"not a file: {what}"):
            decode(root / f"wavs/{name}.wav")
        with pytest.raises(ReferenceClipError, match=f"not a file: {what}"):
            load_clip(root / f"wavs/{name}.wav")


# -- D8: what libsndfile cannot read -------------------------------------------------------------------------------------------------------


def converted(path, *options, source=None):
    """The tone in another format, made by ffmpeg."""
    if ffmpeg.find() is None:
        pytest.skip("there is no ffmpeg")
    wav = source or clip(path.with_suffix(".made.wav"))
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([ffmpeg.find(), "-nostdin", "-v", "error", "-y", "-i", wav, *options, path], check=True, timeout=60)
    if source is None:
        wav.unlink()
    return path


@pytest.mark.parametrize("suffix", [".m4a", ".webm", ".wma", ".aac"])
def test_d8_other_formats_are_read_through_ffmpeg(tmp_path, scanned, suffix):
    root = make_corpus(tmp_path / "c", 1)
    path = converted(root / f"wavs/x{suffix}")
    write_metadata(root, ["c0001|one", f"x{suffix}|two"])
    s = scanned(root)
    assert s.counts == (2, 0), s.report.lines()
    wave = decode(path)
    assert len(wave) == pytest.approx(RATE, abs=2500)
    assert np.abs(wave).max() == pytest.approx(0.5, abs=0.05)
    np.testing.assert_array_equal(decode(path, 1000, 2000), wave[1000:3000])


def test_d8_without_ffmpeg_it_is_said(tmp_path, scanned, monkeypatch):
    root = make_corpus(tmp_path / "c", 2)
    (root / "wavs/x.m4a").write_bytes(struct.pack(">I", 20) + b"ftypM4A " + bytes(8))
    write_metadata(root, ["c0001|one", "c0002|two", "x.m4a|three"])
    monkeypatch.setattr(ffmpeg, "find", lambda: None)
    s = scanned(root)
    assert s.reasons["x.m4a"].startswith("M4A is read through ffmpeg, which is not installed here; install ffmpeg")
    assert s.rejects[0].kind == "needs ffmpeg"


def test_d8_ffmpeg_is_bounded(tmp_path, monkeypatch):
    slow, loud = tmp_path / "slow", tmp_path / "loud"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    loud.write_text("#!/bin/sh\nexec cat /dev/zero\n")
    for script in (slow, loud):
        script.chmod(0o755)
    monkeypatch.setattr(ffmpeg, "find", lambda: str(slow))
    with pytest.raises(DecodeError, match=r"ffmpeg did not finish within 0.2 s"):
        ffmpeg.convert(tmp_path / "x.m4a", "M4A", deadline_s=0.2)
    monkeypatch.setattr(ffmpeg, "find", lambda: str(loud))
    monkeypatch.setattr(ffmpeg, "MAX_BYTES", 1 << 20)
    with pytest.raises(DecodeError, match="more than 1 MiB of samples"):
        ffmpeg.convert(tmp_path / "x.m4a", "M4A")


# -- D9, D10: ends -----------------------------------------------------------------------------------------------------------------------


def container(path, suffix):
    """44 100 samples of a tone and a little noise in a container."""
    x = (sine(2 * RATE) + 0.02 * np.random.default_rng(0).standard_normal(2 * RATE)).astype(np.float32)
    kinds = {".ogg": ("OGG", "VORBIS"), ".opus": ("OGG", "OPUS"), ".mp3": ("MP3", None), ".w64": ("W64", "PCM_16")}
    kinds |= {".aiff": ("AIFF", "PCM_16"), ".au": ("AU", "PCM_16"), ".caf": ("CAF", "PCM_16"), ".sph": ("NIST", "PCM_16")}
    kinds |= {".flac": ("FLAC", "PCM_16"), ".wav": ("WAV", "PCM_16"), ".rf64": ("RF64", "PCM_24")}
    name, subtype = kinds[suffix]
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, x, 24000 if suffix == ".opus" else RATE, subtype, format=name)
    return path


CONTAINERS = [".ogg", ".opus", ".mp3", ".w64", ".aiff", ".au", ".caf", ".sph", ".flac", ".wav", ".rf64"]


@pytest.mark.parametrize("suffix", CONTAINERS)
def test_d9_ends_that_are_missing_and_files_that_are_joined(tmp_path, tokenizer, suffix):
    root = tmp_path / "c"
    kind, suffix = suffix, suffix.replace("rf64", "wav")
    whole = container(root / f"wavs/whole{suffix}", kind).read_bytes()
    for name, data in {
        "cut": whole[: len(whole) * 3 // 4],
        "half": whole[: len(whole) // 2],
        "joined": whole + whole,
    }.items():
        (root / f"wavs/{name}{suffix}").write_bytes(data)
    write_metadata(root, [f"{n}{suffix}|some words to say" for n in ("whole", "cut", "half", "joined")])
    for deep in (True, False):
        s = scan_cases.Scanned(tmp_path, tokenizer, root, options={"deep": deep})
        kinds = {r.id.split(".")[0]: r.kind for r in s.rejects}
        joined = {"joined": "joined recordings"}
        if suffix == ".flac" and not deep:
            joined = {}  # it takes reading all of it to see that
        assert kinds == {"cut": "ends early", "half": "ends early"} | joined
    assert len(decode(root / f"wavs/whole{suffix}")) == -(-2 * RATE * RATE // (24000 if kind == ".opus" else RATE))


@pytest.mark.parametrize("rate", ["-q:a 4", "-q:a 9", "-b:a 64k"])
def test_d9_mp3_without_a_length_header_is_read_whole(tmp_path, rate):
    x = sine(4 * RATE)
    x[: 2 * RATE] *= 0.01  # so that the first frame's bit rate says little of the rest
    source = write_wav(tmp_path / "a.wav", x + 0.001 * np.random.default_rng(0).standard_normal(4 * RATE).astype(np.float32))
    path = converted(tmp_path / "vbr.mp3", *rate.split(), "-write_xing", "0", source=source)
    wave = decode(path)
    assert len(wave) == pytest.approx(4 * RATE, abs=3000)
    assert np.abs(wave[3 * RATE :]).max() > 0.4
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 3 // 4])
    assert scan_reason(path).startswith("ends early: its last frame is incomplete")
    path.write_bytes(b"ID3\x04\0\0\0\0\0\x0a" + bytes(10) + data)
    assert len(decode(path)) == len(wave)


def scan_reason(path):
    from producer.probe import probe
    from producer.readers.paths import FixedPlace

    return probe(FixedPlace(str(path)), deep=True).error


def piped_flac(path, samples, cut=0):
    """A FLAC whose header gives no length, as a program leaves it that writes into a pipe."""
    soundfile.write(path, samples, RATE, "PCM_16", format="FLAC")
    data = bytearray(path.read_bytes())
    total = int.from_bytes(data[18:26], "big")
    data[18:26] = (total >> 36 << 36).to_bytes(8, "big")
    path.write_bytes(bytes(data[: len(data) - cut]))
    return path


@pytest.mark.parametrize("n", [44100, 8192, 30001])
def test_d10_flac_without_a_length_is_read(tmp_path, n):
    x = (sine(n) + 0.05 * np.random.default_rng(1).standard_normal(n)).astype(np.float32)
    soundfile.write(tmp_path / "good.flac", x, RATE, "PCM_16")
    path = piped_flac(tmp_path / "pipe.flac", x)
    np.testing.assert_array_equal(decode(path), decode(tmp_path / "good.flac"))
    np.testing.assert_array_equal(decode(path, 1000, 3000), decode(path)[1000:4000])
    for cut in (1, 700):
        assert scan_reason(piped_flac(tmp_path / "cut.flac", x, cut)).startswith("ends early")
    path.write_bytes(path.read_bytes() + b"TAG" + bytes(125))
    assert len(decode(path)) == n


def test_d10_a_length_that_is_a_lie_costs_nothing(tmp_path):
    path = write_wav(tmp_path / "a.flac", TONE)
    data = bytearray(path.read_bytes())
    data[18:26] = (int.from_bytes(data[18:26], "big") | (1 << 36) - 1).to_bytes(8, "big")
    path.write_bytes(bytes(data))
    assert decodable(path) == "3116530 s of 1 channels are too much to read at once"
    assert scan_reason(path).startswith("ends early: the header announces 68719476735 samples")


# -- D11: above the limit of a deep scan ---------------------------------------------------------------------------------------------------


def _broken(kind):
    x = TONE.copy()
    if kind == "nan":
        x[100] = np.nan
    elif kind == "silent":
        x *= 1e-5
    else:
        x *= 1e30
    return x


@pytest.mark.parametrize("kind", ["nan", "silent", "absurd"])
def test_d11_a_large_corpus_of_broken_samples_is_bad_input(tmp_path, tokenizer, kind, monkeypatch):
    monkeypatch.setattr("producer.scan.DEEP_FILES", 40)
    monkeypatch.setattr("producer.scan.SAMPLED_FILES", 10)
    root = tmp_path / "c"
    write_wav(root / "wavs/c0.wav", _broken(kind), subtype="FLOAT")
    for i in range(1, 50):
        os.link(root / "wavs/c0.wav", root / f"wavs/c{i}.wav")
    write_metadata(root, [f"c{i}|{sentence(i)}" for i in range(50)])
    word = {"nan": "non-finite", "silent": "silent", "absurd": "absurd level"}[kind]
    with pytest.raises(BadInput, match=rf"10 of the 10 recordings that were decoded \(of 50\) are unusable: {word}"):
        scan_cases.Scanned(tmp_path, tokenizer, root)
    for i in range(0, 50, 5):
        os.remove(root / f"wavs/c{i}.wav")
        write_wav(root / f"wavs/c{i}.wav", TONE)
    s = scan_cases.Scanned(tmp_path, tokenizer, root, eval_fraction=0)
    assert "10 of 50 recordings were decoded; of the others the headers alone are known (corpora above 40 rows)" in s.report.lines()
    settings = scan_cases.settings(root)
    with scan_cases.Manifest.open(tmp_path / "run.manifest") as m:
        assert (_mel_stats(settings, m, None, settings.dims) > 0).all()  # of those that can be used


def test_d11_statistics_of_no_usable_clip_are_bad_input(tmp_path, tokenizer):
    root = tmp_path / "c"
    write_wav(root / "wavs/a.wav", _broken("nan"), subtype="FLOAT")
    write_metadata(root, ["a|one"])
    scan(scan_cases.settings(root, eval_fraction=0), tmp_path / "m", tokenizer, deep=False)
    settings = scan_cases.settings(root)
    with scan_cases.Manifest.open(tmp_path / "m") as m, pytest.raises(BadInput, match=r"none of the 1 clips (?s:.*)a.wav: non-finite: 1"):
        _mel_stats(settings, m, None, settings.dims)


# -- D12: encodings ------------------------------------------------------------------------------------------------------------------------

TEXT = "c0001|one two\nc0002|three four\n"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (TEXT.encode("utf-16")[:-1], r"not UTF-16, which its first bytes say it is \(byte 62 of 63: truncated data\); save it as UTF-8"),
        (TEXT.encode("utf-16-le"), "null bytes where text should be"),
        (b"\xff\xfe" + "c|a\n".encode("utf-16-le") + b"\x00\xd8x\x00", "not UTF-16, .*byte 10 of 14: illegal UTF-16 surrogate"),
        (TEXT.encode("utf-32")[:-2], "not UTF-32, .*truncated data"),
    ],
)
def test_d12_damaged_encodings_are_bad_input(tmp_path, scanned, data, words):
    root = make_corpus(tmp_path / "c", 2)
    (root / "metadata.csv").write_bytes(data)
    with pytest.raises(BadInput, match=rf"metadata.csv: {words}"):
        scanned(root)
    (root / "metadata.csv").write_bytes(TEXT.encode("utf-32"))
    assert scanned(root).counts == (2, 0)


# -- D13: what does not belong together ----------------------------------------------------------------------------------------------------


def test_d13_silence_at_the_ends_and_texts_that_are_too_short(tmp_path, scanned):
    root = tmp_path / "c"
    rows = []
    for i in range(30):
        clip(root / f"wavs/good{i}.wav", 2.0)
        rows.append(f"good{i}|{sentence(i)}")
    for i in range(3):
        write_wav(root / f"wavs/tail{i}.wav", np.concatenate([TONE, np.zeros(6 * RATE, np.float32)]))
        write_wav(root / f"wavs/head{i}.wav", np.concatenate([np.zeros(2 * RATE, np.float32), TONE]))
        write_wav(root / f"wavs/gap{i}.wav", np.concatenate([TONE, np.zeros(4 * RATE, np.float32), TONE]))
        clip(root / f"wavs/yes{i}.wav", 10.0)
        rows += [f"{kind}{i}|{sentence(40 + i)} and {kind}" for kind in ("tail", "head", "gap")]
        rows.append(f"yes{i}|Yes. {i}"[: len(f"yes{i}|Yes.")])
    write_metadata(root, rows)
    s = scanned(root)
    assert s.counts == (42, 0)
    found = {f["kind"]: f for f in s.report.findings}
    assert {k: found[k]["rows"] for k in ("silence_after", "silence_before", "pause")} == {
        "silence_after": 3,
        "silence_before": 3,
        "pause": 3,
    }
    assert found["silence_after"]["message"].startswith("3 clips end with more than 1.5 s of silence (longest 6.0 s: ")
    assert found["slow"]["rows"] >= 3
    assert "0.4 per second against 1" in found["slow"]["message"]
    assert found["slow"]["worst"][0].startswith(f"{root}/metadata.csv:")


# -- D14: an evaluation set beside the training set ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("train", "held", "other"),
    [
        ("metadata_train.csv", "metadata_eval.csv", "metadata_test.csv"),
        ("train.tsv", "dev.tsv", "test.tsv"),
        ("train_manifest.json", "val_manifest.json", "test_manifest.json"),
        ("train/metadata.csv", "validation/metadata.csv", "test/metadata.csv"),
    ],
)
def test_d14_the_evaluation_set_beside_the_training_set(tmp_path, scanned, train, held, other):
    root = tmp_path / "c"
    for i in range(6):
        for folder in {os.path.dirname(train), os.path.dirname(held)}:
            clip(root / folder / f"wavs/{i:03d}.wav", 0.6)
    for name, numbers in ((train, range(4)), (held, (4, 5)), (other, (0,))):
        rows = ["file\ttext"] * name.endswith("tsv") + [f"{i:03d}{chr(9) if name.endswith('tsv') else '|'}{sentence(i)}" for i in numbers]
        if name.endswith("json"):
            rows = [json.dumps({"audio_filepath": f"wavs/{i:03d}.wav", "text": sentence(i)}) for i in numbers]
        write_metadata((root / name).parent, rows, os.path.basename(name))
    s = scanned(root)
    assert (s.report.train, s.report.evaluation) == (4, 2)
    beside = root / (held if os.path.dirname(held) == "" else os.path.dirname(held))
    aside = root / (other if os.path.dirname(other) == "" else os.path.dirname(other))
    assert f"{beside}: is the evaluation set, as it lies beside {os.path.basename(train.split('/')[0])}" in s.report.warnings
    assert f"{aside}: not read; {os.path.basename(train.split('/')[0])} beside it is" in s.report.warnings
    clip(tmp_path / "v/wavs/x.wav")
    write_metadata(tmp_path / "v", ["x|one"])
    s = scanned(root, val=[{"path": str(tmp_path / "v")}])
    assert (s.report.train, s.report.evaluation) == (4, 1)
    assert any(str(beside) in w and "not read" in w for w in s.report.warnings)
