"""The manifest file: what goes in comes out, whole or not at all, wherever the clips lie."""

import os
import sqlite3
import threading
import time

import numpy as np
import pytest

from common.data.manifest import EVAL, TRAIN, Manifest, Reject, decode_tokens, encode_tokens
from common.data.manifest_writer import ManifestWriter, NewUtterance
from common.system.errors import BadInput


def fill(path, root, n=5, change=None):
    with ManifestWriter(path) as w:
        source = w.add_source(root)
        for i in range(n):
            values = {
                "source": source,
                "path": root / "wavs" / f"{i}.wav",
                "name": f"{i}",
                "text": f"Text {i}",
                "clean": f"text {i}",
                "tokens": [7 + i, 300, 2] + [9] * (i % 5),
                "language": ("en", "fa")[i % 2],
                "speaker": ("x", "y", "z")[i % 3],
                "num_samples": 22050 + i,
                "source_rate": 48000,
                "source_frames": 48000 + 2 * i,
                "size": 1000 + i,
            }
            w.add_utterance(NewUtterance(**values | (change(i) if change else {})))
        w.add_reject(Reject("/c/metadata.csv", 9, "bad", "0.40 s < 0.50 s", "audio <11025 samples"))
        w.set_split([n - 1], EVAL)
        w.add_file(str(root / "wavs/0.wav"), 1000, 123456789012345678, {"rate": 48000})
        w.set_meta("warnings", ["über"])
    return path


def test_round_trip(tmp_path):
    with Manifest.open(fill(tmp_path / "m.sqlite", tmp_path)) as m:
        assert (len(m), m.languages, m.speakers, m.meta["warnings"]) == (
            5,
            ["en", "fa"],
            ["x", "y", "z"],
            ["über"],
        )
        a, b, c = m.utterances([3, 0, 3])
        assert (a.id, b.id, c.id) == (3, 0, 3)
        assert a.path == tmp_path / "wavs/3.wav"
        assert (a.name, a.text, a.clean, a.language, a.speaker, a.size) == (
            "3",
            "Text 3",
            "text 3",
            "fa",
            "x",
            1003,
        )
        assert (a.num_samples, a.source_rate, a.source_frames, a.split) == (
            22053,
            48000,
            48006,
            TRAIN,
        )
        np.testing.assert_array_equal(a.tokens, [10, 300, 2, 9, 9, 9])
        assert a.tokens.dtype == np.int32
        assert [u.id for u in m] == [0, 1, 2, 3, 4]
        assert m.rejects() == [
            Reject("/c/metadata.csv", 9, "bad", "0.40 s < 0.50 s", "audio <11025 samples")
        ]
        assert m.roots == [tmp_path]


def test_columns(tmp_path):
    with Manifest.open(fill(tmp_path / "m.sqlite", tmp_path)) as m:
        c = m.columns()
    assert {k: v.dtype.name for k, v in c.items()} == {
        "source": "int32",
        "num_samples": "int32",
        "num_tokens": "int32",
        "language": "int16",
        "speaker": "int32",
        "split": "uint8",
    }
    np.testing.assert_array_equal(c["num_samples"], np.arange(5) + 22050)
    np.testing.assert_array_equal(c["num_tokens"], np.arange(5) + 3)
    np.testing.assert_array_equal(c["language"], [0, 1, 0, 1, 0])
    np.testing.assert_array_equal(c["speaker"], [0, 1, 2, 0, 1])
    np.testing.assert_array_equal(c["split"], [0, 0, 0, 0, 1])


def test_padding_and_unknown_ids_are_key_errors(tmp_path):
    with Manifest.open(fill(tmp_path / "m.sqlite", tmp_path)) as m:
        for i in (-1, 5):
            with pytest.raises(KeyError, match=f"no utterance {i}"):
                m.utterances([0, i])
        assert m.utterances(np.array([1], np.int64))[0].id == 1


@pytest.mark.parametrize("tokens", [[], [0], [65535, 3], [65536, 1, 0], list(range(200))])
def test_tokens_pack(tokens):
    blob = encode_tokens(tokens)
    np.testing.assert_array_equal(decode_tokens(blob), tokens)
    assert len(blob) <= 4 * len(tokens) + 1


def test_file_facts_hold_for_the_very_file_only(tmp_path):
    with Manifest.open(fill(tmp_path / "m.sqlite", tmp_path)) as m:
        path = str(tmp_path / "wavs/0.wav")
        assert m.file_facts(path, 1000, 123456789012345678) == {"rate": 48000}
        assert m.file_facts(path, 1001, 123456789012345678) is None
        assert m.file_facts(path, 1000, 123456789012345679) is None
        assert m.file_facts("/other" + path, 1000, 123456789012345678) is None


def test_the_digest_is_of_the_content(tmp_path):
    def digest(root, change=None, n=5):
        root.mkdir(parents=True, exist_ok=True)
        with Manifest.open(fill(root / "m.sqlite", root, n, change)) as m:
            return m.digest

    first = digest(tmp_path / "a")
    assert len(first) == 32
    assert digest(tmp_path / "b") == first  # elsewhere
    assert (
        digest(tmp_path / "c", lambda i: {"speaker": "abc"[i % 3], "name": f"/abs/{i}"}) == first
    )  # groups count, names do not
    for change in (
        lambda i: {"text": "Other"} if i == 2 else {},
        lambda i: {"tokens": [1]} if i == 2 else {},
        lambda i: {"size": 7} if i == 2 else {},
        lambda i: {"num_samples": 7} if i == 2 else {},
        lambda i: {"speaker": "z"} if i == 0 else {},
        lambda i: {"language": "en"},
        lambda i: {"split": EVAL} if i == 0 else {},
    ):
        assert digest(tmp_path / "d", change) != first
    assert digest(tmp_path / "e", n=4) != first


def test_clips_may_lie_elsewhere(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    for d in (old, new):
        d.mkdir()
    path = fill(tmp_path / "m.sqlite", old)
    with Manifest.open(path, data_roots=new) as m:
        assert m.utterances([2])[0].path == new / "wavs/2.wav"
    with pytest.raises(BadInput, match="no such data folder"):
        Manifest.open(path, data_roots=tmp_path / "gone")
    with pytest.raises(BadInput, match="2 data roots for 1 sources"):
        Manifest.open(path, data_roots=[old, new])


def test_several_sources_below_one_data_root(tmp_path):
    row = dict.fromkeys(("name", "text", "clean", "language", "speaker"), "en") | dict.fromkeys(
        ("num_samples", "source_rate", "source_frames", "size"), 1
    )
    with ManifestWriter(tmp_path / "m.sqlite") as w:
        for name in ("a", "b"):
            w.add_utterance(
                NewUtterance(
                    source=w.add_source(f"/far/{name}"),
                    path=f"/far/{name}/1.wav",
                    tokens=[1],
                    **row,
                )
            )
        w.add_utterance(NewUtterance(source=1, path="/else/2.wav", tokens=[1], **row))
    for name in ("a", "b"):
        (tmp_path / "here" / name).mkdir(parents=True)
    with Manifest.open(tmp_path / "m.sqlite", data_roots=tmp_path / "here") as m:
        assert [str(u.path) for u in m] == [
            f"{tmp_path}/here/a/1.wav",
            f"{tmp_path}/here/b/1.wav",
            "/else/2.wav",
        ]


def test_a_folder_scanned_twice_is_one_data_root_and_two_of_one_name_are_two(tmp_path):
    row = dict.fromkeys(("name", "text", "clean", "language", "speaker"), "en") | dict.fromkeys(
        ("num_samples", "source_rate"), 1
    )
    for name, roots in (("twice", ("/far/a", "/far/a")), ("names", ("/far/a/wavs", "/far/b/wavs"))):
        with ManifestWriter(tmp_path / name) as w:
            for i, root in enumerate(roots):
                at = f"{root}/{i}.wav"
                w.add_utterance(
                    NewUtterance(
                        source=w.add_source(root),
                        path=at,
                        tokens=[1],
                        source_frames=1,
                        size=10 + i,
                        **row,
                    )
                )
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
    with Manifest.open(tmp_path / "twice", data_roots=tmp_path / "x") as m:
        assert list(m.files()) == [(tmp_path / "x/0.wav", 10), (tmp_path / "x/1.wav", 11)]
        assert list(m.files(every=2)) == [(tmp_path / "x/0.wav", 10)]
        assert m.roots == [tmp_path / "x"] * 2
    with pytest.raises(
        BadInput,
        match=(
            r"one data root for folders of the same name \(/far/a/wavs, /far/b/wavs\); give one"
            r" each"
        ),
    ):
        Manifest.open(tmp_path / "names", data_roots=tmp_path / "x")
    with Manifest.open(tmp_path / "names", data_roots=[tmp_path / "x", tmp_path / "y"]) as m:
        assert [p for p, _ in m.files()] == [tmp_path / "x/0.wav", tmp_path / "y/1.wav"]


def test_nothing_is_left_of_a_scan_that_failed(tmp_path):
    path = fill(tmp_path / "m.sqlite", tmp_path)
    before = path.read_bytes()
    with pytest.raises(TypeError), ManifestWriter(path) as w:
        w.add_source(None)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["m.sqlite"]


def test_what_is_no_manifest_is_bad_input(tmp_path):
    with pytest.raises(BadInput, match="no manifest there"):
        Manifest.open(tmp_path / "nope")
    (tmp_path / "text").write_text("hello " * 1000)
    with pytest.raises(BadInput, match="damaged or not a manifest"):
        Manifest.open(tmp_path / "text")
    sqlite3.connect(tmp_path / "other.sqlite").execute("CREATE TABLE t (x)").connection.close()
    with pytest.raises(BadInput, match="not a manifest"):
        Manifest.open(tmp_path / "other.sqlite")
    path = fill(tmp_path / "m.sqlite", tmp_path, 2000)
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 5000] = b"\xff" * 5000
    path.write_bytes(data)
    with pytest.raises(BadInput, match="damaged"):
        Manifest.open(path)
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(BadInput, match="damaged"):
        Manifest.open(path)


def test_reading_changes_nothing_and_works_in_a_read_only_folder(tmp_path):
    (tmp_path / "run#1?").mkdir()
    path = fill(tmp_path / "run#1?" / "m.sqlite", tmp_path)
    before = path.read_bytes()
    os.chmod(path.parent, 0o555)
    try:
        with Manifest.open(path) as m:
            m.utterances([0])
            with pytest.raises(sqlite3.OperationalError, match="readonly"):
                m._db.execute("DELETE FROM utterances")
        assert os.listdir(path.parent) == ["m.sqlite"]
    finally:
        os.chmod(path.parent, 0o755)
    assert path.read_bytes() == before


def test_many_threads_read_at_once(tmp_path):
    with Manifest.open(fill(tmp_path / "m.sqlite", tmp_path, 300)) as m:
        wrong = []

        def work(seed):
            for ids in np.random.default_rng(seed).integers(0, 300, (50, 8)):
                if [u.text for u in m.utterances(ids)] != [f"Text {i}" for i in ids]:
                    wrong.append(ids)

        threads = [threading.Thread(target=work, args=(s,)) for s in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert not wrong


def test_look_ups_are_fast(tmp_path):
    with Manifest.open(fill(tmp_path / "m.sqlite", tmp_path, 20000)) as m:
        ids = np.random.default_rng(0).integers(0, 20000, (200, 8))
        start = time.process_time()
        for batch in ids:
            m.utterances(batch)
        assert time.process_time() - start < 0.5  # 0.04 measured: 0.2 ms a batch
