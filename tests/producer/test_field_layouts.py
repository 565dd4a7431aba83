"""Metadata as people have it, each with what is right: cases D3 to D7, D12 and D14, and for each
two more of its kind.
"""

import json
import os
import stat

import pytest

from common.audio.errors import DecodeError
from common.system.errors import BadInput
from common.xtts.clips import ReferenceClipError, load_clip
from producer.batches.decode import decode
from producer.corpus.readers import detect, parquet
from tests.support import scan_cases
from tests.support.corpora import make_corpus, sentence, sine, write_metadata, write_wav

tokenizer, scanned = scan_cases.tokenizer, scan_cases.scanned
RATE = 22050


def clip(path, seconds=1.0, freq=440.0, rate=RATE, **options):
    return write_wav(path, sine(round(seconds * rate), freq, rate), rate, **options)


def clips(root, n, folder="wavs", suffix=".wav", seconds=0.6):
    """`n` recordings 000, 001, …; their names without suffix."""
    names = [f"{i:03d}" for i in range(n)]
    for i, name in enumerate(names):
        clip(root / folder / f"{name}{suffix}", seconds, 300 + i)
    return names


# -- D3, D4, D5: columns
# --------------------------------------------------------------------------------------------------


def _speakers(i):
    return "anna" if i % 2 else "bert"


COLUMNS = {
    # first line, then a row of i; what is read: (text, speaker)
    "id text gender": ("id|text|gender", lambda i: f"{i:03d}|{sentence(i)}|female", None),
    "id text speaker": (None, lambda i: f"{i:03d}|{sentence(i)}|{_speakers(i)}", _speakers),
    "id speaker text": (None, lambda i: f"{i:03d}|{_speakers(i)}|{sentence(i)}", _speakers),
    "one unknown name before": (
        "id|age|sentence",
        lambda i: f"{i:03d}|{20 + i % 3}|{sentence(i)}",
        None,
    ),
    "id text speaker seconds": (
        None,
        lambda i: f"{i:03d}|{sentence(i)}|{_speakers(i)}|{1 + i / 7:.2f}",
        _speakers,
    ),
    "whole seconds behind": (None, lambda i: f"{i:03d}|{sentence(i)}|{1 + i % 3}", None),
    "numbers of speakers": (
        None,
        lambda i: f"{i:03d}|{1 + i % 3}|{sentence(i)}",
        lambda i: str(1 + i % 3),
    ),
    "text first": (None, lambda i: f"{sentence(i)}\t{i:03d}.wav\t{_speakers(i)}", _speakers),
    "file speaker text": (
        None,
        lambda i: f"wavs/{i:03d}.wav|{_speakers(i)}|{sentence(i)}",
        _speakers,
    ),
    "windows header": (
        "\ufeffAudio_File;Text;Speaker_Name",
        lambda i: f"{i:03d}.wav;{sentence(i)};{_speakers(i)}",
        _speakers,
    ),
    "every field quoted": (
        '"file_name","text"',
        lambda i: f'"{i:03d}.wav","{sentence(i)}, he said"',
        None,
    ),
    "quoted, no header": (
        None,
        lambda i: f'"wavs/{i:03d}.wav","{_speakers(i)}","so, {sentence(i)}"',
        _speakers,
    ),
    "semicolons": (
        "id;sentence;client_id",
        lambda i: f'{i:03d};"{sentence(i)}; so";{_speakers(i)}',
        _speakers,
    ),
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
    rows = [
        '"file","text"',
        '"000","say ""yes"", then"',
        '"001","two\nlines"',
        '"002","open',
        '"003","plain"',
        '"004","x"y',
    ]
    write_metadata(root, rows)
    s = scanned(root)
    assert [(u.name, u.text) for u in s.utterances] == [
        ("000", 'say "yes", then'),
        ("001", "two\nlines"),
        ("003", "plain"),
    ]
    assert [(r.line, r.kind) for r in s.rejects] == [(5, "broken quoting"), (7, "broken quoting")]
    assert any("1 rows go on over several lines (first at line 3)" in w for w in s.report.warnings)


def test_d3_the_user_says_which_column_is_what(tmp_path, scanned):
    root = tmp_path / "c"
    clips(root, 6)
    write_metadata(
        root, [f"{i:03d}|{sentence(i)}|{sentence(i + 50)}|{_speakers(i)}" for i in range(6)]
    )
    s = scanned(root, columns={"text": 2, "speaker": 4})
    assert [(u.text, u.speaker) for u in s.utterances] == [
        (sentence(i), _speakers(i)) for i in range(6)
    ]
    assert {
        u.speaker
        for u in scanned({"path": str(root), "columns": {"text": 2, "speaker": None}}).utterances
    } == {"c"}
    write_metadata(
        root, ["id|eins|zwei"] + [f"{i:03d}|{sentence(i)}|{_speakers(i)}" for i in range(6)]
    )
    assert [u.text for u in scanned(root, columns={"text": "eins"}).utterances] == [
        sentence(i) for i in range(6)
    ]
    for columns, words in (
        ({"text": 9}, "count from 1 to 3"),
        ({"text": "drei"}, "there is no column 'drei'; there are id, eins, zwei"),
    ):
        with pytest.raises(BadInput, match=words):
            scanned(root, columns=columns)


# -- D6: layouts
# --------------------------------------------------------------------------------------------------


def _jsonl(root, n, entry, name="metadata.jsonl"):
    clips(root, n)
    write_metadata(root, [json.dumps(entry(i)) for i in range(n)], name)


def _cut(i):
    source = {"type": "file", "channels": [0], "source": f"wavs/{i:03d}.wav"}
    recording = {"id": f"{i:03d}", "sources": [source], "sampling_rate": RATE, "duration": 0.6}
    supervision = {
        "id": f"s{i}",
        "start": 0,
        "duration": 0.6,
        "text": sentence(i),
        "speaker": _speakers(i),
        "language": "en",
    }
    return {
        "id": f"{i:03d}",
        "start": 0,
        "duration": 0.6,
        "channel": 0,
        "supervisions": [supervision],
        "recording": recording,
    }


def _hf(root):
    _jsonl(root, 4, lambda i: {"file_name": f"wavs/{i:03d}.wav", "transcription": sentence(i)})


def _nemo(root):
    def entry(i):
        return {
            "audio_filepath": f"wavs/{i:03d}.wav",
            "text": sentence(i),
            "duration": 0.6,
            "speaker": i % 2,
        }

    _jsonl(root, 4, entry, "train_manifest.json")


def _lhotse(root):
    _jsonl(root, 4, _cut, "cuts.jsonl")


def _json_list(root):
    clips(root, 4)
    (root / "manifest.json").write_text(
        json.dumps([{"audio": {"path": f"{i:03d}.wav"}, "text": sentence(i)} for i in range(4)])
    )


def _libritts(root):
    for i in range(4):
        stem = root / f"train-clean/{84 + i % 2}/121123/{84 + i % 2}_121123_{i:06d}_000000"
        clip(stem.with_suffix(".wav"), 0.6)
        stem.with_suffix(".normalized.txt").write_text(sentence(i))
        stem.with_suffix(".original.txt").write_text("Not This.")


def _common_voice(root):
    for i in range(4):
        clip(root / f"clips/common_voice_en_{i}.mp3", 0.8)
    rows = [
        f"{'ab'[i % 2] * 64}\tcommon_voice_en_{i}.mp3\t{sentence(i)}\t2\t0\ttwenties\t\t\ten\t"
        for i in range(4)
    ]
    header = (
        "client_id\tpath\tsentence\tup_votes\tdown_votes\tage\tgender\taccents\tlocale\tsegment"
    )
    write_metadata(root, [header, *rows], "validated.tsv")
    write_metadata(root, [header, rows[0]], "train.tsv")
    write_metadata(root, [header, rows[1]], "dev.tsv")
    write_metadata(root, [header], "invalidated.tsv")


def _common_voice_release(root):
    _common_voice(root / "en")


def _css10(root):
    clips(root, 4, "book")
    write_metadata(
        root, [f"book/{i:03d}.wav|Raw {i}|{sentence(i)}|0.6" for i in range(4)], "transcript.txt"
    )


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


def _texts_apart(root):
    for i in range(4):
        clip(root / f"wav/{_speakers(i)}/{i:03d}.wav", 0.6)
        (root / f"txt/{_speakers(i)}").mkdir(parents=True, exist_ok=True)
        (root / f"txt/{_speakers(i)}/{i:03d}.txt").write_text(sentence(i))


def _parquet(root):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    names = clips(root.parent / "loose", 4)
    audio = [
        {"bytes": (root.parent / f"loose/wavs/{n}.wav").read_bytes(), "path": f"{n}.wav"}
        for n in names
    ]
    root.mkdir()
    table = pa.table(
        {"audio": audio, "text": [sentence(i) for i in range(4)], "speaker_id": [1, 2, 1, 2]}
    )
    (root / "data").mkdir()
    pq.write_table(table, root / "data/train-00000-of-00001.parquet")


def _vctk(root):
    for i in range(4):
        speaker = f"p{225 + i % 2}"
        (root / "txt" / speaker).mkdir(parents=True, exist_ok=True)
        (root / f"txt/{speaker}/{speaker}_{i:03d}.txt").write_text(sentence(i))
        clip(root / f"wav48/{speaker}/{speaker}_{i:03d}.wav", 0.6, rate=48000)


LAYOUTS = {  # name → (what makes it, reader, speakers)
    "hugging face": (_hf, "jsonl", 1), "nemo": (_nemo, "jsonl", 2), "lhotse": (_lhotse, "jsonl", 2),
    "list": (_json_list, "jsonl", 1),
    "libritts": (_libritts, "libritts", 2), "common voice": (_common_voice, "common_voice", 2),
    "release": (_common_voice_release, "common_voice", 2), "css10": (_css10, "css10", 1),
    "m-ailabs": (_mailabs, "mailabs", 1),
    "sidecar": (_sidecar, "sidecar", 2), "texts apart": (_texts_apart, "sidecar", 2),
    "parquet": (_parquet, "parquet", 2), "vctk": (_vctk, "vctk", 2),
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
        assert sorted(u.text for u in s.utterances) == sorted(
            sentence(i % 2 if layout == "m-ailabs" else i) for i in range(4)
        )
        assert len({u.speaker for u in s.utterances}) == speakers


def test_d6_parquet_without_its_package_is_named(tmp_path, scanned, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(
        BadInput,
        match=(
            r"a.parquet is Parquet, which needs the package pyarrow: pip install"
            r" 'xtts-trainer\[parquet\]'"
        ),
    ):
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


def test_d6_the_only_table_of_a_folder_is_its_metadata(tmp_path, scanned):
    root = tmp_path / "c"
    clips(root, 3)
    write_metadata(root, [f"{i:03d}|{sentence(i)}" for i in range(3)], "my corpus.csv")
    assert scanned(root).counts == (3, 0)
    write_metadata(root, ["a,b"], "speakers.tsv")
    with pytest.raises(BadInput, match="which of my corpus.csv, speakers.tsv is the metadata"):
        scanned(root)
    assert scanned(root / "my corpus.csv").counts == (3, 0)


@pytest.mark.parametrize(
    ("name", "words"),
    [("a.wav", "a recording, not a corpus"), ("a.tar.gz", "an archive; unpack it")],
)
def test_d6_files_that_are_no_metadata(tmp_path, scanned, name, words):
    (tmp_path / name).write_bytes(b"RIFF")
    with pytest.raises(BadInput, match=f"{name}: {words}"):
        scanned(tmp_path / name)


def test_d6_folders_with_metadata_are_named(tmp_path, scanned):
    for name in ("one", "two"):
        make_corpus(tmp_path / "all" / name, 2, 0.6)
    with pytest.raises(
        BadInput,
        match="no corpus found there; .*; one, two in it have metadata: name those folders",
    ):
        scanned(tmp_path / "all")


# -- D7: paths
# --------------------------------------------------------------------------------------------------


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
    write_metadata(
        root, ["/gone/ann/1.wav|one", "1.wav|two", "E:\\only-bob.wav|three", "nowhere|four"]
    )
    s = scanned(root)
    assert [os.path.relpath(u.path, root) for u in s.utterances] == [
        "data/ann/1.wav",
        "data/bob/only-bob.wav",
    ]
    assert (
        s.reasons["1.wav"]
        == f"2 files have that name ({root}/data/ann/1.wav, {root}/data/bob/1.wav); write the path,"
        " as seen from the metadata file"
    )
    assert s.reasons["nowhere"].endswith(f"; nothing below {root} has that name")


def test_d7_a_search_ends_where_there_is_too_much(tmp_path, scanned, monkeypatch):
    root = make_corpus(tmp_path / "c", 3, 0.6)
    for folder in ("p", "q"):
        clip(root / f"deep/{folder}/{folder}.wav", 0.6)
    write_metadata(root, ["c0001|one", "c0002|two", "c0003|three", "nowhere|four"])
    monkeypatch.setattr("producer.corpus.readers.paths.MOST_FILES", 1)
    assert "; not among the recordings below " in scanned(root).reasons["nowhere"]


def test_what_is_no_file_is_refused_unopened(tmp_path, scanned):
    root = make_corpus(tmp_path / "c", 2, 0.6)
    os.mkfifo(root / "wavs/pipe.wav")
    (root / "wavs/folder.wav").mkdir()
    os.mknod(root / "wavs/socket.wav", stat.S_IFSOCK | 0o600)
    os.symlink("/dev/zero", root / "wavs/zero.wav")
    write_metadata(
        root,
        [
            "c0001|one",
            "c0002|two",
            "c0001.wav|more",
            "pipe|three",
            "folder|four",
            "zero|five",
            "socket|six",
        ],
    )
    s = scanned(root)
    assert s.counts == (3, 4)
    for name, what in (
        ("pipe", "a named pipe"),
        ("folder", "a folder"),
        ("zero", "a device"),
        ("socket", "a socket"),
    ):
        assert s.reasons[name] == f"not a file: {what} lies there ({root}/wavs/{name}.wav)"
        with pytest.raises(DecodeError, match=f"not a file: {what}"):
            decode(root / f"wavs/{name}.wav")
        with pytest.raises(ReferenceClipError, match=f"not a file: {what}"):
            load_clip(root / f"wavs/{name}.wav")


# -- D12: encodings
# --------------------------------------------------------------------------------------------------

TEXT = "c0001|one two\nc0002|three four\n"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            TEXT.encode("utf-16")[:-1],
            (
                r"not UTF-16, which its first bytes say it is \(byte 62 of 63: truncated data\);"
                r" save it as UTF-8"
            ),
        ),
        (TEXT.encode("utf-16-le"), "null bytes where text should be"),
        (
            b"\xff\xfe" + "c|a\n".encode("utf-16-le") + b"\x00\xd8x\x00",
            "not UTF-16, .*byte 10 of 14: illegal UTF-16 surrogate",
        ),
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


# -- D14: an evaluation set beside the training set
# ---------------------------------------------------------------------------------------


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
        rows = ["file\ttext"] * name.endswith("tsv") + [
            f"{i:03d}{chr(9) if name.endswith('tsv') else '|'}{sentence(i)}" for i in numbers
        ]
        if name.endswith("json"):
            rows = [
                json.dumps({"audio_filepath": f"wavs/{i:03d}.wav", "text": sentence(i)})
                for i in numbers
            ]
        write_metadata((root / name).parent, rows, os.path.basename(name))
    s = scanned(root)
    assert (s.report.train, s.report.evaluation) == (4, 2)
    beside = root / (held if os.path.dirname(held) == "" else os.path.dirname(held))
    aside = root / (other if os.path.dirname(other) == "" else os.path.dirname(other))
    assert (
        f"{beside}: is the evaluation set, as it lies beside"
        f" {os.path.basename(train.split('/')[0])}" in s.report.warnings
    )
    assert (
        f"{aside}: not read; {os.path.basename(train.split('/')[0])} beside it is"
        in s.report.warnings
    )
    clip(tmp_path / "v/wavs/x.wav")
    write_metadata(tmp_path / "v", ["x|one"])
    s = scanned(root, val=[{"path": str(tmp_path / "v")}])
    assert (s.report.train, s.report.evaluation) == (4, 1)
    assert any(str(beside) in w and "not read" in w for w in s.report.warnings)
