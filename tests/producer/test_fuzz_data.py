"""Mutated metadata and recordings: rows, rejects or one clear error come out, never a traceback;
and no file takes long or much.

A few hundred by default; ten thousand of each with the mark `slow`.
"""

import contextlib
import os
import random
import resource
import time
import zlib

import numpy as np
import pytest
import soundfile

from common.audio.errors import DecodeError
from common.system.errors import BadInput
from common.xtts.clips import ReferenceClipError, load_clip
from producer.batches.decode import decode
from producer.corpus.headers import facts_of
from producer.corpus.readers.paths import FixedPlace
from producer.corpus.rows import read_rows
from tests.support import scan_cases
from tests.support.corpora import sine
from tests.support.damage import BUILD, GOOD, RATE, encoded

TOKENS = [
    b"|", b"\t", b",", b";", b'"', b"\n", b"\r\n", b"\0", b"\xff\xfe", b"\xef\xbb\xbf",
    b"\xed\xa0\x80", b"{", b"}", b"[", b"]", b"\\",
    b"../", b"C:\\", b"//", b"%00", b"%", b"1e999", b"null", b"\xe2\x80\xa8", "é".encode("utf-16"),
    b"a" * 5000, b"text", b"audio",
]  # fmt: skip
METADATA = {
    "ljspeech": "metadata.csv", "coqui": "metadata.csv", "csv": "metadata.csv",
    "jsonl": "manifest.jsonl", "piper": "metadata.csv",
    "css10": "transcript.txt", "vctk": "txt/p225/p225_001.txt",
    "libritts": "84/1/84_1_001.normalized.txt",
    "common_voice": "validated.tsv", "mailabs": "en_US/by_book/female/mary/book/metadata.csv",
    "sidecar": "001.txt",
    "parquet": "train.parquet",
}  # fmt: skip
COUNTS = [pytest.param(240, id="few"), pytest.param(10_000, id="many", marks=pytest.mark.slow)]


def mutated(data: bytes, draw: random.Random, tokens=TOKENS) -> bytes:
    """A few bytes changed, cut, doubled, or a piece of another kind put in."""
    data = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4, 16))):
        at = draw.randrange(len(data) + 1)
        end = min(len(data), at + draw.choice((1, 2, 8, 64)))
        what = draw.randrange(6)
        if what == 0 and at < len(data):
            data[at] = draw.randrange(256)
        elif what == 1:
            data[at:at] = draw.choice(tokens)
        elif what == 2:
            del data[at:end]
        elif what == 3:
            data[at:at] = data[at:end]
        elif what == 4:
            data[at:end] = bytes(draw.randrange(256) for _ in range(end - at))
        elif draw.random() < 0.3:
            del data[at:]
    return bytes(data)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("reader", METADATA)
def test_mutated_metadata(tmp_path, reader, count):
    if reader == "parquet":
        pytest.importorskip("pyarrow")
    root = tmp_path / "c"
    BUILD[reader](root, GOOD)
    path = root / METADATA[reader]
    data, draw = path.read_bytes(), random.Random(zlib.crc32(reader.encode()))
    read = 0
    for _ in range(-(-count // len(METADATA))):
        path.write_bytes(mutated(data, draw))
        start = time.process_time()
        with contextlib.suppress(BadInput):
            rows = read_rows(
                scan_cases.settings({"path": str(root), "format": draw.choice(("auto", reader))})
            )
            for entry in rows.entries:
                str(entry).encode()
                if hasattr(entry, "row"):
                    facts_of(entry.row.place, False)
            read += 1
        assert time.process_time() - start < 2
    assert read


def _recordings() -> dict[str, bytes]:
    """A short recording in each container that libsndfile writes."""
    tone = (sine(8000) + 0.02 * np.random.default_rng(0).standard_normal(8000)).astype(np.float32)
    kinds = [
        ("WAV", "PCM_16"), ("WAV", "FLOAT"), ("WAV", "IMA_ADPCM"), ("WAV", "ULAW"),
        ("RF64", "PCM_16"), ("W64", "PCM_16"),
        ("AIFF", "PCM_16"),
        ("AU", "PCM_16"), ("CAF", "ALAC_16"), ("NIST", "PCM_16"), ("FLAC", "PCM_16"),
        ("OGG", "VORBIS"), ("MP3", None), ("VOC", "PCM_16"),
    ]  # fmt: skip
    found = {
        f"{name} {subtype}": encoded(tone, RATE, name, subtype)
        for name, subtype in kinds
        if name in soundfile.available_formats()
    }
    found["FLAC without a length"] = (
        found["FLAC PCM_16"][:21] + bytes(5) + found["FLAC PCM_16"][26:]
    )
    mp3 = found["MP3 None"]
    found["MP3 without a length"] = mp3.replace(b"Info", bytes(4)).replace(b"Xing", bytes(4))
    return found


RECORDINGS = _recordings()
HEADS = [
    b"\xff" * 8,
    bytes(8),
    b"\xff\xff\xff\x7f",
    b"RIFF",
    b"data",
    b"fLaC",
    b"OggS",
    b"ID3\x04\0\0\x7f\x7f\x7f\x7f",
    b"\xff\xfb\x90\x64",
]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", RECORDINGS)
def test_mutated_recordings(tmp_path, kind, count):
    path, data = tmp_path / "a.wav", RECORDINGS[kind]
    draw = random.Random(zlib.crc32(kind.encode()))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for i in range(-(-count // len(RECORDINGS))):
        small = draw.random() < 0.7  # most of what goes wrong is in the header
        path.write_bytes(
            mutated(data[:256], draw, HEADS) + data[256:] if small else mutated(data, draw, HEADS)
        )
        start = time.process_time()
        facts = facts_of(FixedPlace(str(path)), deep=True)
        assert bool(facts.error) == bool(facts.kind)
        for read in (decode, load_clip):
            with contextlib.suppress(DecodeError, ReferenceClipError):
                wave = read(path)
                assert np.isfinite(wave).all()
                assert np.abs(wave).max(initial=0) <= 1
        assert time.process_time() - start < 5, (kind, i)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 600_000, f"{grown} kB"  # 128 MiB of samples at once at the most


def test_descriptors_stay_flat_under_damage(tmp_path):
    path, draw = tmp_path / "a.wav", random.Random(0)
    before = len(os.listdir("/proc/self/fd"))
    for data in RECORDINGS.values():
        for _ in range(5):
            path.write_bytes(mutated(data, draw, HEADS))
            facts_of(FixedPlace(str(path)), deep=True)
    assert abs(len(os.listdir("/proc/self/fd")) - before) <= 2
