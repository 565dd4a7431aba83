"""WAV files that end before the data that their headers announce: what an interrupted copy leaves,
and what only looks like it.
"""

import os
import struct

import numpy as np
import pytest
import soundfile

from common.data.manifest import Manifest
from producer.corpus.headers import facts_of
from producer.corpus.readers.paths import FixedPlace
from tests.support import scan_cases
from tests.support.corpora import make_corpus, sine, write_wav
from tests.support.scan_cases import Scanned

tokenizer, scanned = scan_cases.tokenizer, scan_cases.scanned

PCM = (sine(22050) * 20000).astype("<i2").tobytes()
SIZE = len(PCM)
LIST = b"LIST" + struct.pack("<I", 5) + b"INFOx" + b"\0"  # an odd size and its padding


def wav(
    data=PCM, announced=SIZE, *, riff=None, before=b"", behind=b"", order="<", bits=16, frame=None
) -> bytes:
    """A mono file at 22 050 Hz with a given header."""
    frame = bits // 8 if frame is None else frame
    body = (
        b"WAVE"
        + before
        + b"fmt "
        + struct.pack(order + "IHHIIHH", 16, 1, 1, 22050, 22050 * (bits // 8), frame, bits)
    )
    body += b"data" + struct.pack(order + "I", announced) + data + behind
    return (
        (b"RIFF" if order == "<" else b"RIFX")
        + struct.pack(order + "I", len(body) if riff is None else riff)
        + body
    )


def facts(folder, data: bytes):
    path = folder / "a.wav"
    path.write_bytes(data)
    return facts_of(FixedPlace(str(path)), deep=True)


@pytest.mark.parametrize("deep", [False, True])
def test_a_truncated_file_is_rejected(tmp_path, tokenizer, deep):
    root = make_corpus(tmp_path / "c", 4)
    os.truncate(root / "wavs/c0002.wav", 44 + 50000)
    s = Scanned(tmp_path, tokenizer, root, options={"deep": deep})
    assert s.reasons == {
        "c0002": (
            "ends early: the header announces 88200 bytes of audio, the file has 50000; copy it"
            " again"
        )
    }
    assert "rejected: ends early 1" in s.report.lines()
    with Manifest.open(tmp_path / "run.manifest") as previous:  # remembered, too
        assert (
            Scanned(tmp_path, tokenizer, root, options={"previous": previous, "deep": deep}).reasons
            == s.reasons
        )


CUT = {
    "half": wav(PCM[: SIZE // 2]),
    "one frame": wav(PCM[:-2]),
    "a chunk before": wav(PCM[:20000], before=LIST),
    "many chunks before": wav(PCM[:20000], before=LIST * 20),
    "big-endian": wav(PCM[:20000], order=">"),
    "the header counted in": wav(PCM[:-4], SIZE + 44),
}
WHOLE = {
    "whole": wav(),
    "part of a frame": wav(PCM[:-1]),
    "ffmpeg into a pipe": wav(announced=0xFFFFFFFF, riff=0xFFFFFFFF),
    "SoX into a pipe": wav(announced=0x7FFFF000, riff=0x7FFFF024),
    "arecord": wav(announced=0x80000000),
    "2**31 - 1": wav(announced=0x7FFFFFFF),
    "2**32 - 45": wav(announced=0xFFFFFFD3),
    "never closed": wav(announced=0, riff=8),
    "LIST behind": wav(behind=LIST),
    "id3 behind": wav(behind=b"id3 " + struct.pack("<I", 10) + b"ID3\4" + bytes(6)),
    "LIST before": wav(before=LIST),
    "odd, padded": wav(PCM[:22049] + b"\0", 22049, bits=8),
    "odd, not padded": wav(PCM[:22049], 22049, bits=8),
    "big-endian": wav(order=">"),
    "the header counted in": wav(announced=SIZE + 44),
    "the RIFF size": wav(announced=SIZE + 36),
    "frames of no bytes": wav(frame=0),
}


@pytest.mark.parametrize("data", CUT.values(), ids=CUT)
def test_what_is_cut(tmp_path, data):
    found = facts(tmp_path, data)
    assert found.kind == "ends early"
    assert found.error.startswith("ends early: the header announces ")


@pytest.mark.parametrize("data", WHOLE.values(), ids=WHOLE)
def test_what_is_whole(tmp_path, data):
    found = facts(tmp_path, data)
    assert (found.error, found.kind) == ("", "")
    assert found.frames in (22049, 22050)


@pytest.mark.parametrize(
    ("container", "subtype"),
    [
        ("RF64", "PCM_16"),
        ("WAVEX", "PCM_24"),
        ("WAV", "FLOAT"),
        ("WAV", "ULAW"),
        ("WAV", "IMA_ADPCM"),
        ("WAV", "MS_ADPCM"),
    ],
)
def test_other_kinds_of_wav(tmp_path, container, subtype):
    path = tmp_path / "a.wav"
    soundfile.write(
        path, np.stack([sine(30000), sine(30000, 880)], 1), 22050, subtype, format=container
    )
    assert not facts_of(FixedPlace(str(path)), deep=True).error
    os.truncate(path, path.stat().st_size // 2)
    assert facts_of(FixedPlace(str(path)), deep=True).kind == "ends early"


def test_other_formats_are_read_as_before(tmp_path):
    for suffix in (".flac", ".ogg", ".mp3"):
        assert not facts_of(
            FixedPlace(str(write_wav(tmp_path / f"a{suffix}", sine(44100)))), deep=True
        ).error


def test_a_header_of_nothing_but_chunks_ends(tmp_path):
    """The walk over the chunks stops by itself if there is no end in sight."""
    found = facts(tmp_path, wav(before=(b"junk" + bytes(4)) * 5000))
    assert found.error == ""
