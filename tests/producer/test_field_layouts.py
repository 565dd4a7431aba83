"""Metadata as people have it, each with what is right: cases D6 and D14, and for each two more of
its kind.
"""

import json
import os
import re

import pytest

from common.system.errors import BadInput
from producer.corpus.readers import detect, parquet
from tests.support import scan_cases
from tests.support.corpora import make_corpus, sentence, write_metadata
from tests.support.scan_cases import RATE, clip, clips, speaker_of

tokenizer, scanned = scan_cases.tokenizer, scan_cases.scanned


# -- D6: layouts -----------------------------------------------------------------------------------


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
        "speaker": speaker_of(i),
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
        clip(root / f"{speaker_of(i)}/{i:03d}.wav", 0.6)
        (root / f"{speaker_of(i)}/{i:03d}{'.txt' if i % 2 else '.lab'}").write_text(sentence(i))
    (root / "README.txt").write_text("About this.")


def _texts_apart(root):
    for i in range(4):
        clip(root / f"wav/{speaker_of(i)}/{i:03d}.wav", 0.6)
        (root / f"txt/{speaker_of(i)}").mkdir(parents=True, exist_ok=True)
        (root / f"txt/{speaker_of(i)}/{i:03d}.txt").write_text(sentence(i))


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


@pytest.mark.parametrize("language", [["en"], {"code": "en"}, 7])
def test_d6_a_language_that_is_no_name_is_said(tmp_path, scanned, language):
    def odd(i):
        cut = _cut(i)
        cut["supervisions"][0] |= {"language": language} if i == 1 else {"speaker": 5}
        return cut

    _jsonl(tmp_path / "c", 4, odd, "cuts.jsonl")
    with pytest.raises(BadInput, match=re.escape(f"language '{language}'")):
        scanned(tmp_path / "c")


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


# -- D14: an evaluation set beside the training set ------------------------------------------------


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
