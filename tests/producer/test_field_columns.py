"""Columns of metadata as people have them: cases D3 to D5, and for each two more of its kind."""

import pytest

from common.system.errors import BadInput
from producer.corpus.readers import detect
from tests.support import scan_cases
from tests.support.corpora import sentence, write_metadata
from tests.support.scan_cases import clips, speaker_of

tokenizer, scanned = scan_cases.tokenizer, scan_cases.scanned


COLUMNS = {
    # first line, then a row of i; what is read: (text, speaker)
    "id text gender": ("id|text|gender", lambda i: f"{i:03d}|{sentence(i)}|female", None),
    "id text speaker": (None, lambda i: f"{i:03d}|{sentence(i)}|{speaker_of(i)}", speaker_of),
    "id speaker text": (None, lambda i: f"{i:03d}|{speaker_of(i)}|{sentence(i)}", speaker_of),
    "one unknown name before": (
        "id|age|sentence",
        lambda i: f"{i:03d}|{20 + i % 3}|{sentence(i)}",
        None,
    ),
    "id text speaker seconds": (
        None,
        lambda i: f"{i:03d}|{sentence(i)}|{speaker_of(i)}|{1 + i / 7:.2f}",
        speaker_of,
    ),
    "whole seconds behind": (None, lambda i: f"{i:03d}|{sentence(i)}|{1 + i % 3}", None),
    "numbers of speakers": (
        None,
        lambda i: f"{i:03d}|{1 + i % 3}|{sentence(i)}",
        lambda i: str(1 + i % 3),
    ),
    "text first": (None, lambda i: f"{sentence(i)}\t{i:03d}.wav\t{speaker_of(i)}", speaker_of),
    "file speaker text": (
        None,
        lambda i: f"wavs/{i:03d}.wav|{speaker_of(i)}|{sentence(i)}",
        speaker_of,
    ),
    "windows header": (
        "\ufeffAudio_File;Text;Speaker_Name",
        lambda i: f"{i:03d}.wav;{sentence(i)};{speaker_of(i)}",
        speaker_of,
    ),
    "every field quoted": (
        '"file_name","text"',
        lambda i: f'"{i:03d}.wav","{sentence(i)}, he said"',
        None,
    ),
    "quoted, no header": (
        None,
        lambda i: f'"wavs/{i:03d}.wav","{speaker_of(i)}","so, {sentence(i)}"',
        speaker_of,
    ),
    "semicolons": (
        "id;sentence;client_id",
        lambda i: f'{i:03d};"{sentence(i)}; so";{speaker_of(i)}',
        speaker_of,
    ),
    "pipes, quoted": (None, lambda i: f'"{i:03d}"|"{sentence(i)}"|"{speaker_of(i)}"', speaker_of),
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
        write_metadata(root, [f"{i:03d}|{speaker_of(i)}|{sentence(i)}" for i in range(6)])
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
    assert any("1 row goes on over several lines (at line 3)" in w for w in s.report.warnings)


def test_d3_the_user_says_which_column_is_what(tmp_path, scanned):
    root = tmp_path / "c"
    clips(root, 6)
    write_metadata(
        root, [f"{i:03d}|{sentence(i)}|{sentence(i + 50)}|{speaker_of(i)}" for i in range(6)]
    )
    s = scanned(root, columns={"text": 2, "speaker": 4})
    assert [(u.text, u.speaker) for u in s.utterances] == [
        (sentence(i), speaker_of(i)) for i in range(6)
    ]
    assert {
        u.speaker
        for u in scanned({"path": str(root), "columns": {"text": 2, "speaker": None}}).utterances
    } == {"c"}
    write_metadata(
        root, ["id|eins|zwei"] + [f"{i:03d}|{sentence(i)}|{speaker_of(i)}" for i in range(6)]
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
