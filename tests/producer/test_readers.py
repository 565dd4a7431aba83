"""Metadata of three corpus formats with the faults that people report (numbered as in
test_scan.py).
"""

import pytest

from common.system.errors import BadInput
from producer.corpus.readers import READERS, Notice, Row, RowError, Taken, detect
from tests.support.corpora import sine, write_metadata, write_wav


def read(root, name=None, columns=None):
    return [i for i in READERS[name or detect(root)](root, columns) if not isinstance(i, Taken)]


def taken(root, name=None, columns=None):
    return [i.message for i in READERS[name or detect(root)](root, columns) if isinstance(i, Taken)]


def rows(root, name=None):
    return [i for i in read(root, name) if isinstance(i, Row)]


def test_ljspeech_takes_the_last_column(tmp_path):
    write_metadata(tmp_path, ["a|Dr. No|Doctor No", "b|two fields"])
    assert detect(tmp_path) == "ljspeech"
    found = rows(tmp_path)
    assert [(r.line, r.id, r.text, r.language, r.speaker) for r in found] == [
        (1, "a", "Doctor No", None, None),
        (2, "b", "two fields", None, None),
    ]
    assert found[0].candidates[0] == str(tmp_path / "wavs/a.wav")
    assert found[0].file == str(tmp_path / "metadata.csv")


def test_c01_a_byte_order_mark_is_not_part_of_the_first_id(tmp_path):
    path = write_metadata(tmp_path, ["a|x|x", "b|y|y"])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert [r.id for r in rows(tmp_path)] == ["a", "b"]
    path.write_text("c|ö|ö\nd|y|y\n", encoding="utf-16")
    assert [(r.id, r.text) for r in rows(tmp_path)] == [("c", "ö"), ("d", "y")]


def test_c02_a_row_with_too_few_or_too_many_fields_is_an_error(tmp_path):
    write_metadata(tmp_path, ["a|x", "b|x|y", "c", "d|x|y|z", "|x|y"])
    items = read(tmp_path)
    assert [type(i) for i in items] == [Row, Row, RowError, RowError, RowError]
    assert [(i.line, i.id) for i in items] == [(1, "a"), (2, "b"), (3, "c"), (4, "d"), (5, "")]
    assert (
        items[2].reason
        == "expected 2 or 3 fields, got 1 (fields are separated by '|', as in id|text)"
    )
    assert items[3].reason.startswith(
        "expected 2 or 3 fields, got 4 (other columns need a header line"
    )
    assert items[4].reason == "empty id"


def test_c02_a_duration_column_is_never_the_text(tmp_path):
    write_metadata(tmp_path, [f"a{i}|some words|3.21" for i in range(6)])
    items = read(tmp_path)
    assert [i.text for i in items[:6]] == ["some words"] * 6
    assert items[6] == Notice(
        str(tmp_path / "metadata.csv"),
        "column 3 looks numeric in 6 of 6 rows; column 2 was taken as the text there",
    )


def test_c02_a_constant_last_column_is_the_speaker(tmp_path):
    write_metadata(tmp_path, [f"a{i}|words {i}|anna" for i in range(4)])
    assert [(r.text, r.speaker) for r in read(tmp_path)] == [
        (f"words {i}", "anna") for i in range(4)
    ]
    assert taken(tmp_path)[0].endswith("audio = column 1, text = column 2, speaker = column 3")
    write_metadata(tmp_path, [f"a{i}|same|same" for i in range(4)])
    assert [(r.text, r.speaker) for r in read(tmp_path)] == [("same", None)] * 4


def test_c02_numbers_that_are_spoken_stay(tmp_path):
    write_metadata(tmp_path, ["a|1984|1984", "b|In 1984|In 1984"])
    assert [i.text for i in read(tmp_path)] == ["1984", "In 1984"]


@pytest.mark.parametrize(
    ("header", "row", "said"),
    [
        ("id|text", "a|one", "audio = column 1 (id), text = column 2 (text)"),
        (
            'ID|"Raw_Text"|"normalized_text"',
            "a|1|one",
            'text = column 3 ("normalized_text") (where it is empty: column 2 ("Raw_Text"))',
        ),
        (
            "utt_id|transcription|duration",
            "a|one|3",
            "text = column 2 (transcription); not used: column 3 (duration)",
        ),
        ("id|speaker|text", "a|ann|one", "text = column 3 (text), speaker = column 2 (speaker)"),
        ("id|text|speaker", "a|one|ann", "text = column 2 (text), speaker = column 3 (speaker)"),
    ],
)
def test_a_header_of_an_ljspeech_file_is_read_by_its_names(tmp_path, header, row, said):
    write_metadata(tmp_path, ["", header, row, header])
    found, again = read(tmp_path, "ljspeech")
    assert said in taken(tmp_path)[0]
    assert (found.line, found.id, found.text) == (3, "a", "one")
    assert again.id == header.partition("|")[0]  # only a first line is a header


def test_a_first_line_that_is_a_recording_is_no_header(tmp_path):
    write_metadata(tmp_path, ["id|text", "a|one"])
    write_wav(tmp_path / "wavs/id.wav", sine(100))
    assert [(r.id, r.text) for r in read(tmp_path)] == [("id", "text"), ("a", "one")]
    write_metadata(tmp_path, ["name|a few words", "a|one"])
    assert [r.id for r in read(tmp_path)] == ["name", "a"]


def test_c04_quote_marks_are_text(tmp_path):
    write_metadata(tmp_path, ['a1|"Stop, he said|"Stop, he said', "a2|b|c", 'a3|d" e|d" e'])
    assert [r.text for r in rows(tmp_path)] == ['"Stop, he said', "c", 'd" e']
    write_metadata(tmp_path, ["audio_file|text", 'a.wav|"Stop', "b.wav|b", 'c.wav|d"'])
    assert [r.text for r in rows(tmp_path)] == ['"Stop', "b", 'd"']


def test_c05_line_ends_and_blank_lines(tmp_path):
    (tmp_path / "metadata.csv").write_bytes(
        "a|x|x\r\nb|y|y\r\n\r\n  \r\n"
        "c|ä\u2028\x85z|ä\u2028\x85z\r\nd|q|w\r\n\r\n\r\n".rstrip().encode()
    )
    found = read(tmp_path)
    assert [(r.line, r.id, r.text) for r in found] == [
        (1, "a", "x"),
        (2, "b", "y"),
        (5, "c", "ä\u2028\x85z"),
        (6, "d", "w"),
    ]
    assert not any("\r" in f for r in found for f in (r.id, r.text, *r.candidates))


def test_a_line_that_is_not_utf8_is_an_error_and_the_rest_is_read(tmp_path):
    (tmp_path / "metadata.csv").write_bytes("a|x|x\nb|caf\xe9|y\nc|z|z\n".encode("latin-1"))
    items = read(tmp_path)
    assert [type(i) for i in items] == [Row, RowError, Row]
    assert (items[1].line, items[1].reason) == (2, "not UTF-8; save the metadata file as UTF-8")


@pytest.mark.parametrize(
    ("written", "where"),
    [
        ("LJ1", "wavs/LJ1.wav"),
        ("LJ2.wav", "wavs/LJ2.wav"),
        ("LJ2.wav", "LJ2.wav"),
        ("wavs/LJ3.wav", "wavs/LJ3.wav"),
        ("./wavs/LJ3.wav", "wavs/LJ3.wav"),
        ("wavs\\LJ3.wav", "wavs/LJ3.wav"),
        ("LJ5", "wavs/LJ5.flac"),
        ("LJ5.wav", "wavs/LJ5.flac"),
        ("LJ6", "LJ6.mp3"),
        ("p.v1.02", "wavs/p.v1.02.wav"),
        ("sub/LJ7", "wavs/sub/LJ7.ogg"),
        ("LJ8.WAV", "wavs/LJ8.WAV"),
    ],
)
def test_c07_every_usual_form_of_a_path_finds_the_file(tmp_path, written, where):
    write_metadata(tmp_path, [f"{written}|x|x"])
    assert str(tmp_path / where) in rows(tmp_path)[0].candidates


def test_c07_absolute_paths(tmp_path):
    write_metadata(tmp_path / "c", [f"{tmp_path}/else/LJ4.wav|x|x", f"{tmp_path}/else/LJ5|x|x"])
    a, b = rows(tmp_path / "c")
    assert a.candidates[0] == f"{tmp_path}/else/LJ4.wav"
    assert b.candidates[:2] == (f"{tmp_path}/else/LJ5.wav", f"{tmp_path}/else/LJ5.flac")


def test_coqui_columns_go_by_name(tmp_path):
    write_metadata(
        tmp_path,
        ["audio_file|language|speaker_name|text", "wavs/1.wav|fa|ali|سلام", "wavs/2.wav|||hello"],
    )
    assert detect(tmp_path) == "coqui"
    a, b = rows(tmp_path)
    assert (a.line, a.id, a.text, a.language, a.speaker) == (2, "wavs/1.wav", "سلام", "fa", "ali")
    assert (b.text, b.language, b.speaker) == ("hello", None, None)
    assert a.candidates[0] == str(tmp_path / "wavs/1.wav")


def test_coqui_header_in_any_order_case_and_separator(tmp_path):
    write_metadata(tmp_path, ["Text\tPath\tLocale\tclient_id", "hola\ta.mp3\tes\tx"])
    (row,) = rows(tmp_path)
    assert (row.text, row.id, row.language, row.speaker) == ("hola", "a.mp3", "es", "x")


def test_coqui_row_errors(tmp_path):
    write_metadata(tmp_path, ["audio_file|text", "a.wav|x|y", "|x", "b.wav|x"])
    items = read(tmp_path)
    assert [i.reason for i in items[:2]] == [
        "expected 2 fields as in the header, got 3",
        "empty audio path",
    ]
    assert items[2].id == "b.wav"


def test_c22_coqui_without_a_header_says_what_is_missing(tmp_path):
    write_metadata(tmp_path, ["wavs/1.wav|en|x|hello"])
    with pytest.raises(
        BadInput, match="metadata.csv:1: no header; the first line must name the columns"
    ):
        read(tmp_path, "coqui")
    write_metadata(
        tmp_path, [f"wavs/{i}.wav|{'fa' if i % 2 else 'en'}|x|hello {i}" for i in range(6)]
    )
    assert detect(tmp_path) == "ljspeech"
    assert [(r.language, r.speaker, r.text) for r in read(tmp_path)][:2] == [
        ("en", "x", "hello 0"),
        ("fa", "x", "hello 1"),
    ]


def test_vctk_tree(tmp_path):
    for speaker, clip, ending in (
        ("p225", "p225_001", "_mic1.flac"),
        ("p225", "p225_002", "_mic2.flac"),
        ("p226", "p226_001", "_mic1.flac"),
    ):
        (tmp_path / "txt" / speaker).mkdir(parents=True, exist_ok=True)
        (tmp_path / "txt" / speaker / f"{clip}.txt").write_text(f"Text of {clip}.\n")
        write_wav(
            tmp_path / "wav48_silence_trimmed" / speaker / f"{clip}{ending}", sine(100), 48000
        )
    assert detect(tmp_path) == "vctk"
    found = rows(tmp_path)
    assert [(r.id, r.speaker, r.text, r.line) for r in found] == [
        ("p225_001", "p225", "Text of p225_001.", 1),
        ("p225_002", "p225", "Text of p225_002.", 1),
        ("p226_001", "p226", "Text of p226_001.", 1),
    ]
    folder = tmp_path / "wav48_silence_trimmed/p225"
    assert found[0].candidates[:2] == (
        str(folder / "p225_001_mic1.flac"),
        str(folder / "p225_001_mic2.flac"),
    )
    assert found[0].file == str(tmp_path / "txt/p225/p225_001.txt")


def test_vctk_recordings_without_a_text_are_counted(tmp_path):
    (tmp_path / "txt/p225").mkdir(parents=True)
    (tmp_path / "txt/p225/p225_001.txt").write_text("One.")
    audio = tmp_path / "wav48_silence_trimmed"
    for name in (
        "p225/p225_001_mic1.flac",
        "p315/p315_001_mic1.flac",
        "p315/p315_001_mic2.flac",
        "p315/p315_002_mic1.flac",
    ):
        (audio / name).parent.mkdir(parents=True, exist_ok=True)
        (audio / name).write_bytes(b"")
    (audio / "log.txt").write_bytes(b"")
    (audio / "p225/._p225_002_mic1.flac").write_bytes(b"")
    row, notice = read(tmp_path)
    assert (row.id, notice) == (
        "p225_001",
        Notice(str(tmp_path), "2 recordings of p315 have no text"),
    )
    (tmp_path / "wav48/p225").mkdir(parents=True)
    (tmp_path / "wav48/p225/p225_003.wav").write_bytes(b"")
    assert read(tmp_path)[-1].message == "3 recordings of p315 and others have no text"


def test_a_source_may_be_the_metadata_file(tmp_path):
    path = write_metadata(tmp_path, ["audio_file|text", "wavs/a.wav|x"], name="my_train.csv")
    (row,) = rows(path)
    assert row.candidates[0] == str(tmp_path / "wavs/a.wav")


def test_nothing_there_is_bad_input(tmp_path):
    with pytest.raises(BadInput, match="no such file or folder"):
        detect(tmp_path / "nope")
    with pytest.raises(BadInput, match="no corpus found there; looked for metadata.csv"):
        detect(tmp_path)
    with pytest.raises(BadInput, match="not a VCTK tree"):
        read(tmp_path, "vctk")
