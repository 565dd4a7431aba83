"""Damaged corpora with known answers: every reader's layout, and what can happen to its recordings
and to its metadata.

`BUILD[reader](root, blobs)` writes a corpus of recordings given as bytes; `DAMAGES` are faults,
each with what a scan must say of it. The recordings are sines of 0.6 s, so that the whole costs
little.
"""

from __future__ import annotations

import io
import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile

from tests.support.corpora import sentence, sine, write_metadata

RATE = 22050
N = 5  # recordings of a corpus; the second is the one that is damaged
AT = 1
LENGTH = 13230
TONE = sine(LENGTH)


def encoded(samples, rate=RATE, name="WAV", subtype="PCM_16") -> bytes:
    """A recording as the bytes of a file."""
    out = io.BytesIO()
    soundfile.write(out, samples, rate, subtype, format=name)
    return out.getvalue()


GOOD = [encoded(sine(LENGTH, 300 + 40 * i)) for i in range(N)]


# -- layouts ---------------------------------------------------------------------------------------


def _wavs(root: Path, blobs: list[bytes], folder: str = "wavs", name: str = "{:03d}.wav") -> None:
    (root / folder).mkdir(parents=True, exist_ok=True)
    for i, blob in enumerate(blobs):
        (root / folder / name.format(i)).write_bytes(blob)


def _ljspeech(root, blobs):
    _wavs(root, blobs)
    write_metadata(root, [f"{i:03d}|Raw {i}|{sentence(i)}" for i in range(N)])


def _coqui(root, blobs):
    _wavs(root, blobs)
    rows = [f"wavs/{i:03d}.wav|{sentence(i)}|ann|en" for i in range(N)]
    write_metadata(root, ["audio_file|text|speaker_name|language", *rows])


def _csv(root, blobs):
    _wavs(root, blobs, "audio")
    rows = [f'"audio/{i:03d}.wav","{sentence(i)}, and so on"' for i in range(N)]
    write_metadata(root, ['"file_name","transcription"', *rows])


def _jsonl(root, blobs):
    _wavs(root, blobs)
    entries = [
        {"audio_filepath": f"wavs/{i:03d}.wav", "text": sentence(i), "duration": 0.6}
        for i in range(N)
    ]
    write_metadata(root, map(json.dumps, entries), "manifest.jsonl")


def _piper(root, blobs):
    _wavs(root, blobs, "wav")
    write_metadata(root, [f"{i:03d}|{'ab'[i % 2]}|{sentence(i)}" for i in range(N)])


def _css10(root, blobs):
    _wavs(root, blobs, "book")
    rows = [f"book/{i:03d}.wav|Raw {i}|{sentence(i)}|0.{i + 1}" for i in range(N)]
    write_metadata(root, rows, "transcript.txt")


def _vctk(root, blobs):
    _wavs(root, blobs, "wav48/p225", "p225_{:03d}.wav")
    (root / "txt/p225").mkdir(parents=True)
    for i in range(N):
        (root / f"txt/p225/p225_{i:03d}.txt").write_text(sentence(i))


def _libritts(root, blobs):
    _wavs(root, blobs, "84/1", "84_1_{:03d}.wav")
    for i in range(N):
        (root / f"84/1/84_1_{i:03d}.normalized.txt").write_text(sentence(i))


def _common_voice(root, blobs):
    _wavs(root, blobs, "clips", "cv_{:03d}.mp3")
    rows = [f"{'ab'[i % 2] * 8}\tcv_{i:03d}.mp3\t{sentence(i)}\t2\ten" for i in range(N)]
    write_metadata(root, ["client_id\tpath\tsentence\tup_votes\tlocale", *rows], "validated.tsv")


def _mailabs(root, blobs):
    book = root / "en_US/by_book/female/mary/book"
    _wavs(book, blobs)
    write_metadata(book, [f"{i:03d}|Raw {i}|{sentence(i)}" for i in range(N)])


def _sidecar(root, blobs):
    _wavs(root, blobs, "", "{:03d}.wav")
    for i in range(N):
        (root / f"{i:03d}.txt").write_text(sentence(i))


def _parquet(root, blobs, change=lambda columns: columns):
    import pyarrow
    from pyarrow import parquet

    root.mkdir()
    audio = [{"bytes": blob, "path": f"{i:03d}.wav"} for i, blob in enumerate(blobs)]
    columns = change({"audio": audio, "text": [sentence(i) for i in range(N)]})
    parquet.write_table(pyarrow.table(columns), root / "train.parquet")


BUILD: dict[str, Callable[[Path, list[bytes]], None]] = {
    "ljspeech": _ljspeech, "coqui": _coqui, "csv": _csv, "jsonl": _jsonl, "piper": _piper,
    "css10": _css10, "vctk": _vctk,
    "libritts": _libritts, "common_voice": _common_voice, "mailabs": _mailabs, "sidecar": _sidecar,
    "parquet": _parquet,
}  # fmt: skip


# -- damage ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Damage:
    """What happens to a corpus, and what a scan has to say.

    `kinds`: of the rejects, in the order of the rows; `reason`: part of the first one's; `error`:
    of the BadInput instead; `warning`: part of a warning; `text`: that of the damaged row, where it
    is kept.
    """

    reader: str
    name: str
    make: Callable[[Path], None]
    kept: int = N
    kinds: tuple[str, ...] = ()
    reason: str = ""
    error: str = ""
    warning: str = ""
    text: str = ""
    blob: bytes | None = None  # the damaged recording, where it is one

    @property
    def id(self) -> str:
        """Its name among all."""
        return f"{self.reader}: {self.name}"


DAMAGES: list[Damage] = []


def _audio(name: str, blob: bytes, kind: str = "", reason: str = "", warning: str = "") -> None:
    """One recording is `blob`; the readers take turns."""
    reader = list(BUILD)[len(DAMAGES) % len(BUILD)]

    def make(root: Path) -> None:
        BUILD[reader](root, [*GOOD[:AT], blob, *GOOD[AT + 1 :]])

    kinds = (kind,) if kind else ()
    DAMAGES.append(
        Damage(reader, name, make, N - len(kinds), kinds, reason, warning=warning, blob=blob)
    )


def _poked(value: float, at: int = 100) -> np.ndarray:
    samples = TONE.copy()
    samples[at] = value
    return samples


def _click(*at: int) -> np.ndarray:
    samples = np.zeros(LENGTH, np.float32)
    samples[list(at)] = 0.9
    return samples


def _with(blob: bytes, at: int, data: bytes) -> bytes:
    return blob[:at] + data + blob[at + len(data) :]


def _flac_total(blob: bytes, total: int) -> bytes:
    head = int.from_bytes(blob[18:26], "big")
    return _with(blob, 18, (head >> 36 << 36 | total).to_bytes(8, "big"))


def _ogg_endless(blob: bytes) -> bytes:
    """An Ogg file whose last page does not say that it is the last."""
    at = blob.rfind(b"OggS")
    page = bytearray(blob[at:])
    page[5] &= ~4
    page[22:26] = bytes(4)
    crc = 0
    for byte in page:
        crc ^= byte << 24
        for _ in range(8):
            crc = (crc << 1 ^ 0x04C11DB7 if crc & 1 << 31 else crc << 1) & 0xFFFFFFFF
    page[22:26] = struct.pack("<I", crc)
    return blob[:at] + bytes(page)


WAV = GOOD[AT]
NOISY = (TONE + 0.05 * np.random.default_rng(0).standard_normal(LENGTH)).astype(np.float32)
FLAC, OGG, MP3 = (
    encoded(NOISY, name="FLAC"),
    encoded(NOISY, subtype="VORBIS", name="OGG"),
    encoded(NOISY, subtype=None, name="MP3"),
)
AIFF, W64, AU = (encoded(NOISY, name=name) for name in ("AIFF", "W64", "AU"))
NOISE = (10**-4.5 * np.random.default_rng(1).standard_normal(LENGTH)).astype(np.float32)
LONG = np.tile(TONE, 22)

_audio("empty", b"", "empty file")
_audio("a web page", b"<!DOCTYPE html><html>404</html>", "not audio", "a web page or text")
_audio("an error in JSON", b'{"error": "rate limit"}', "not audio", "a web page or text")
_audio(
    "a Git LFS pointer",
    b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    "Git LFS pointer",
)
_audio(
    "random bytes", bytes(np.random.default_rng(2).integers(1, 250, 4096, np.uint8)), "not audio"
)
_audio("a picture", b"\x89PNG\r\n\x1a\n" + bytes(500), "not audio")
_audio("a header alone", WAV[:44], "ends early")
_audio("half a header", WAV[:20], "not audio")
_audio(
    "half a WAV",
    WAV[: len(WAV) // 2],
    "ends early",
    "the header announces 26460 bytes of audio, the file has 13208",
)
_audio("a WAV without its last second half", WAV[:-1000], "ends early")
_audio(
    "half a FLAC",
    FLAC[: len(FLAC) // 2],
    "ends early",
    "announces 13230 samples, and the last of them are not there",
)
_audio("half an Ogg", OGG[: len(OGG) // 2], "ends early", "the last Ogg page is incomplete")
_audio("an Ogg without an end", _ogg_endless(OGG), warning="1 file may end early")
_audio("half an MP3", MP3[: len(MP3) // 2], "ends early", "the header announces")
_audio("half an AIFF", AIFF[: len(AIFF) // 2], "ends early")
_audio("half a W64", W64[: len(W64) // 2], "ends early")
_audio("half an AU", AU[: len(AU) // 2], "ends early")
_audio("two WAVs joined", WAV + WAV, "joined recordings", "two WAV files are joined")
_audio("two FLACs joined", FLAC + FLAC, "joined recordings")
_audio("two Oggs joined", OGG + OGG, "joined recordings")
_audio("two MP3s joined", MP3 + MP3, "joined recordings")
_audio("a FLAC with a hole", _with(FLAC, len(FLAC) // 3, bytes(300)), "damaged audio data")
_audio("a FLAC without a length", _flac_total(FLAC, 0))
_audio(
    "a FLAC of two years",
    _flac_total(FLAC, (1 << 36) - 1),
    "ends early",
    "announces 68719476735 samples",
)
_audio("a FLAC whose length is too short", _flac_total(FLAC, 100), "ends early")
_audio("a WAV written into a pipe", _with(_with(WAV, 40, b"\xff" * 4), 4, b"\xff" * 4))
_audio("a WAV of 4 GB by its header", _with(WAV, 40, struct.pack("<I", 0x7FE00000)), "ends early")
_audio("one NaN", encoded(_poked(np.nan), subtype="FLOAT"), "non-finite samples", "non-finite: 1")
_audio(
    "one infinity", encoded(_poked(np.inf), subtype="FLOAT"), "non-finite samples", "non-finite: 1"
)
_audio("one sample of 1e30", encoded(_poked(1e30), subtype="DOUBLE"), "absurd level", "peak 1e+30")
_audio("loud floats", encoded(4 * TONE, subtype="FLOAT"), warning="1 clip exceeds full scale")
_audio("zeros", encoded(0 * TONE), "silent", "every sample is 0")
_audio("noise at -90 dBFS", encoded(NOISE, subtype="PCM_24"), "silent", "silent: -9")
_audio("a constant", encoded(0 * TONE + 0.25), "silent", "a constant offset of 0.25")
_audio("a click in zeros", encoded(_click(5000)), "almost silent", "0.02 s of sound in 0.60 s")
_audio(
    "two clicks in zeros", encoded(_click(500, 9000)), "almost silent", "0.04 s of sound in 0.60 s"
)
_audio(
    "stereo that cancels",
    encoded(np.stack([TONE, -TONE], 1)),
    warning="1 clip has channels that cancel",
)
_audio(
    "stereo that cancels nearly",
    encoded(np.stack([TONE, -0.9 * TONE], 1)),
    warning="1 clip has channels that cancel",
)
_audio(
    "a dead channel",
    encoded(np.stack([0 * TONE, TONE], 1)),
    warning="1 stereo clip has an empty channel",
)
_audio(
    "a constant added",
    encoded(0.5 * TONE + 0.3),
    warning="1 clip has a constant offset (0.3",
)
_audio("clipped", encoded(np.clip(5 * TONE, -1, 1)), warning="1 clip is clipped")
_audio("a rate of 1 Hz", encoded(TONE, 1), "sample rate not credible")
_audio("a rate of 2 GHz", encoded(TONE, 2_000_000_000), "sample rate not credible")
_audio("telephone", encoded(TONE, 8000), warning="1 clip is sampled below 16 kHz")
_audio(
    "too short",
    encoded(TONE[:4410]),
    "audio shorter than 0.5 s (data.min_audio_s)",
    "0.20 s < 0.50 s",
)
_audio(
    "too long", encoded(LONG), "audio longer than 11.61 s (data.max_audio_s)", "13.20 s > 11.61 s"
)
_audio("no samples", encoded(TONE[:0]), "no samples")
_audio(
    "a tail of silence",
    encoded(np.r_[TONE, 0 * LONG[: 3 * RATE]]),
    warning="1 clip ends with more than 1.5 s of silence",
)
_audio("FLAC under a name of WAV", FLAC)
_audio("8 bits", encoded(TONE, subtype="PCM_U8"))
_audio("24 bits in AIFF", encoded(TONE, name="AIFF", subtype="PCM_24"))


def _metadata(
    reader: str, name: str, change: Callable[[Path], None], kept: int = N, *kinds: str, **expected
) -> None:
    def make(root: Path) -> None:
        BUILD[reader](root, GOOD)
        change(root)

    DAMAGES.append(Damage(reader, name, make, kept, kinds, **expected))


def _line(file: str, number: int, new: str | bytes) -> Callable[[Path], None]:
    """Line `number` (from 1) of a file becomes `new`."""

    def change(root: Path) -> None:
        path = root / file
        rows = path.read_bytes().split(b"\n")
        rows[number - 1] = new.encode() if isinstance(new, str) else new
        path.write_bytes(b"\n".join(rows))

    return change


def _whole(file: str, new: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda root: (root / file).write_bytes(new((root / file).read_bytes())) and None


def _gone(file: str) -> Callable[[Path], None]:
    return lambda root: os.remove(root / file)


def _pipe(file: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        os.remove(root / file)
        os.mkfifo(root / file)

    return change


M, MISSING, WIDTH = "metadata.csv", "audio file missing", "wrong number of fields"
_metadata(
    "ljspeech",
    "a field too few",
    _line(M, 2, "001"),
    4,
    WIDTH,
    reason="expected 2 or 3 fields, got 1",
)
_metadata(
    "ljspeech",
    "two fields too many",
    _line(M, 2, "001|a|b|c|d"),
    4,
    WIDTH,
    reason="expected 2 or 3 fields, got 5",
)
_metadata("ljspeech", "no id", _line(M, 2, "|a|b"), 4, "empty id")
_metadata("ljspeech", "no text", _line(M, 2, "001||"), 4, "empty text")
_metadata(
    "ljspeech", "dots for a text", _line(M, 2, "001|...|..."), 4, "empty text", reason="no words"
)
_metadata(
    "ljspeech", "an id twice", _line(M, 2, "000|a|b"), 4, "duplicate id", reason="first at line 1"
)
_metadata("ljspeech", "Latin-1", _line(M, 2, "001|x|café".encode("latin-1")), 4, "not UTF-8")
_metadata("ljspeech", "UTF-16", _whole(M, lambda b: b.decode().encode("utf-16")))
_metadata(
    "ljspeech",
    "a torn UTF-16",
    _whole(M, lambda b: b.decode().encode("utf-16")[:-1]),
    error="not UTF-16",
)
_metadata(
    "ljspeech",
    "UTF-16 without a mark",
    _whole(M, lambda b: b.decode().encode("utf-16-le")),
    error="null bytes",
)
_metadata(
    "ljspeech", "CRLF and a mark", _whole(M, lambda b: b"\xef\xbb\xbf" + b.replace(b"\n", b"\r\n"))
)
_metadata("ljspeech", "nothing in it", _whole(M, lambda b: b""), error="no rows in the metadata")
_metadata("ljspeech", "a lone quote", _line(M, 2, '001|x|"open quote'), text='"open quote')
_metadata("ljspeech", "a null byte in the id", _line(M, 2, "00\0001|x|one"), 4, MISSING)
_metadata("ljspeech", "a recording gone", _gone("wavs/001.wav"), 4, MISSING, reason="nothing below")
_metadata(
    "ljspeech",
    "a pipe for a recording",
    _pipe("wavs/001.wav"),
    4,
    "not a file",
    reason="a named pipe",
)
_metadata(
    "coqui",
    "a field too many",
    _line(M, 3, "wavs/001.wav|a|b|en|x"),
    4,
    WIDTH,
    reason="expected 4 fields as in the header, got 5",
)
_metadata("coqui", "no path", _line(M, 3, "|a|b|en"), 4, "empty id", reason="empty audio path")
_metadata(
    "coqui",
    "an unknown language",
    _line(M, 3, "wavs/001.wav|a|b|klingon"),
    error="unknown language 'klingon' in 1 row",
)
_metadata(
    "coqui",
    "a Windows path",
    _line(M, 3, "C:\\x\\wavs\\001.wav|one|b|en"),
    warning="1 recording is not where",
    text="one",
)
_metadata(
    "coqui",
    "letters of no vocabulary",
    _line(M, 3, "wavs/001.wav|ᚠᚢ|b|en"),
    4,
    "unknown characters",
)
_metadata(
    "csv", "a quote without an end", _line(M, 3, '"audio/001.wav","open'), 4, "broken quoting"
)
_metadata("csv", "words behind a quote", _line(M, 3, '"audio/001.wav","a"b'), 4, "broken quoting")
_metadata(
    "csv",
    "commas without quotes",
    _line(M, 3, "audio/001.wav,a,b"),
    4,
    WIDTH,
    reason="put quotes around",
)
_metadata("csv", "a text of two lines", _line(M, 3, '"audio/001.wav","one\ntwo"'), text="one\ntwo")
_metadata(
    "jsonl",
    "half an object",
    _line("manifest.jsonl", 2, '{"audio_filepath": "wavs/0'),
    4,
    "not JSON",
)
_metadata(
    "jsonl",
    "a list",
    _line("manifest.jsonl", 2, "[1]"),
    4,
    "not JSON",
    reason="not a JSON object but list",
)
_metadata("jsonl", "no path", _line("manifest.jsonl", 2, '{"text": "a"}'), 4, "empty id")
_metadata(
    "jsonl",
    "a text that is none",
    _line("manifest.jsonl", 2, '{"audio_filepath": "wavs/001.wav", "text": {}}'),
    4,
    "not a text",
)
_metadata(
    "jsonl",
    "half a character",
    _line("manifest.jsonl", 2, '{"audio_filepath": "wavs/001.wav", "text": "\\ud800"}'),
    4,
    "not UTF-8",
)
_metadata(
    "jsonl", "an offset",
    _line("manifest.jsonl", 2, '{"audio_filepath": "wavs/001.wav", "text": "a", "offset": 3}'), 4,
    "a part of a longer recording",
)  # fmt: skip
_metadata("jsonl", "brackets without end", _line("manifest.jsonl", 2, "[" * 100000), 4, "not JSON")
_metadata(
    "jsonl",
    "names that say nothing",
    _line("manifest.jsonl", 1, '{"x": "a", "y": "b"}'),
    error="no key is a known name for the audio",
)
_metadata(
    "piper",
    "a field too few",
    _line(M, 2, "001|two"),
    4,
    WIDTH,
    reason="expected 3 fields as in most rows, got 2",
)
_metadata("piper", "no id", _line(M, 2, "|a|two"), 4, "empty id")
_metadata("css10", "a field too few", _line("transcript.txt", 2, "book/001.wav|a|b"), 4, WIDTH)
_metadata("css10", "a recording gone", _gone("book/001.wav"), 4, MISSING)
_metadata(
    "vctk",
    "Latin-1",
    lambda root: (root / "txt/p225/p225_001.txt").write_bytes(b"caf\xe9") and None,
    4,
    "not UTF-8",
)
_metadata(
    "vctk",
    "a recording without a text",
    _gone("txt/p225/p225_001.txt"),
    4,
    warning="1 recording of p225 has no text",
)
_metadata("vctk", "a text without a recording", _gone("wav48/p225/p225_001.wav"), 4, MISSING)
_metadata("vctk", "a pipe for a text", _pipe("txt/p225/p225_001.txt"), 4, "text file unreadable")
_metadata(
    "libritts",
    "an empty text",
    lambda root: (root / "84/1/84_1_001.normalized.txt").write_text("\n") and None,
    4,
    "empty text",
)
_metadata(
    "libritts",
    "a recording without a text",
    _gone("84/1/84_1_001.normalized.txt"),
    4,
    warning="1 recording has no text",
)
_metadata(
    "libritts",
    "a pipe for a text",
    _pipe("84/1/84_1_001.normalized.txt"),
    4,
    "text file unreadable",
)
_metadata(
    "common_voice", "a field too few", _line("validated.tsv", 3, "b\tcv_001.mp3\ttwo\t2"), 4, WIDTH
)
_metadata("common_voice", "a clip gone", _gone("clips/cv_001.mp3"), 4, MISSING)
_metadata("common_voice", "no header", _line("validated.tsv", 1, ""))
_metadata(
    "mailabs", "a clip gone", _gone("en_US/by_book/female/mary/book/wavs/001.wav"), 4, MISSING
)
_metadata(
    "mailabs",
    "no text",
    _line("en_US/by_book/female/mary/book/metadata.csv", 2, "001||"),
    4,
    "empty text",
)
_metadata("sidecar", "a text without a recording", _gone("001.wav"), 4, MISSING)
_metadata(
    "sidecar",
    "a recording without a text",
    _gone("001.txt"),
    4,
    warning="1 recording has no text beside it",
)
_metadata(
    "sidecar",
    "times for a text",
    lambda root: (root / "001.txt").write_text("0 50000 sil\n") and None,
    4,
    "not a text",
)
_metadata(
    "sidecar",
    "a torn UTF-16",
    lambda root: (root / "001.txt").write_bytes(b"\xff\xfea") and None,
    4,
    "text file unreadable",
)


def _parquet_with(change: Callable[[dict], dict]) -> Callable[[Path], None]:
    return lambda root: _parquet(root, GOOD, change)


def _row(column: str, value: object) -> Callable[[dict], dict]:
    def change(columns: dict) -> dict:
        columns[column][AT] = value
        return columns

    return change


for _name, _make, _kept, _kinds, _error in (
    ("no recording in a row", _parquet_with(_row("audio", None)), 4, ("empty id",), ""),
    ("no text in a row", _parquet_with(_row("text", None)), 4, ("empty text",), ""),
    (
        "no column of texts",
        _parquet_with(lambda c: {"audio": c["audio"], "label": [1] * N}),
        0,
        (),
        "no column is the text",
    ),
):
    DAMAGES.append(Damage("parquet", _name, _make, _kept, _kinds, error=_error))
_metadata(
    "parquet",
    "cut in half",
    _whole("train.parquet", lambda b: b[: len(b) // 2]),
    error="not a whole Parquet file",
)
