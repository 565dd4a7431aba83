"""Paths and encodings of metadata as people write them: cases D7 and D12, and for each two more of
its kind.
"""

import os
import stat

import pytest

from common.audio.errors import DecodeError
from common.system.errors import BadInput
from common.xtts.clips import ReferenceClipError, load_clip
from producer.batches.decode import decode
from tests.support import scan_cases
from tests.support.corpora import make_corpus, write_metadata
from tests.support.scan_cases import clip

tokenizer, scanned = scan_cases.tokenizer, scan_cases.scanned


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
        == f"2 files have that name ({root}/data/ann/1.wav, {root}/data/bob/1.wav); write the path"
        " relative to the metadata file"
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


# -- D12: encodings --------------------------------------------------------------------------------

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
