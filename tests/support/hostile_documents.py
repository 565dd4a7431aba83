"""Settings, tables, keys, bundles and recordings made to harm."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import os
import struct
import zipfile
from collections.abc import Container, Iterator
from pathlib import Path

import numpy as np
import soundfile

from tests.support.hostile_files import Hostile, irregular

MB = 1 << 20
VOCABULARY = {
    "model": {"type": "BPE", "vocab": {}, "merges": []},
    "added_tokens": [
        {"id": i, "content": token, "special": True}
        for i, token in enumerate(("[STOP]", "[UNK]", "[SPACE]", "[START]", "[en]", "a"))
    ],
}


def yamls() -> Iterator[tuple[str, bytes]]:
    """Settings."""
    laugh = b"a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + b"".join(
        b"a%d: &a%d [%s]\n" % (i + 1, i + 1, b", ".join([b"*a%d" % i] * 10)) for i in range(20)
    )
    yield "a billion laughs", laugh
    merges = b"m0: &m0 {a: 1}\n" + b"".join(
        b"m%d: &m%d {<<: [%s]}\n" % (i + 1, i + 1, b", ".join([b"*m%d" % i] * 10))
        for i in range(20)
    )
    yield "merges of merges", merges
    yield "a value within itself", b"train: &a [*a]\n"
    yield "a section within itself", b"train: &a {b: *a}\n"
    yield "a merge of itself", b"train: &a {<<: *a}\n"
    yield "100 000 brackets", b"train: " + b"[" * 100_000
    yield "100 000 braces", b"train: " + b"{a: " * 100_000
    yield "100 000 dashes", b"- " * 100_000 + b"a"
    yield "100 000 question marks", b"? " * 100_000 + b"a"
    yield "100 000 indents", b"".join(b" " * i + b"a:\n" for i in range(600))
    yield "2 MB of values", b"train: [" + b"1, " * 700_000 + b"1]"
    yield "200 kB of values", b"train: [" + b"1, " * 70_000 + b"1]"
    yield "20 000 anchors", b"".join(b"- &a%d 1\n" % i for i in range(20_000))
    yield "20 000 keys", b"".join(b"k%d: 1\n" % i for i in range(15_000))
    yield (
        "20 000 keys of one hash",
        b"".join(b"%d: 1\n" % (i * ((1 << 61) - 1)) for i in range(9_000)),
    )
    yield "a million digits", b"seed: " + b"9" * 200_000
    yield "sixty to the 50 000", b"seed: 1" + b":59" * 50_000
    yield "binary", b"seed: !!binary " + b"A" * 200_000
    yield "code", b"seed: !!python/object/apply:os.system [ls]\n"
    yield "a set of lists", b"seed: !!set {? [a]}\n"
    yield "a date that is none", b"seed: 2026-99-99\n"
    yield "a text without an end", b'seed: "' + b"\\x41" * 50_000
    yield "folded lines", b"seed: >\n" + b" a\n\n" * 50_000
    yield "zero bytes", b"seed: 1\0\0"
    yield "UTF-16", "seed: 1".encode("utf-16")
    yield "not UTF-8", b"seed: \xff\xfe"
    yield "tabs", b"seed:\t\t1\n\ttrain: 2\n"
    yield "an unknown alias", b"seed: *nobody\n"
    yield "two documents", b"seed: 1\n---\nseed: 2\n"


def jsons() -> Iterator[tuple[str, bytes]]:
    """What any reader of JSON may be given."""
    yield "nothing", b""
    yield "100 000 deep", b"[" * 100_000 + b"]" * 100_000
    yield "100 000 objects deep", b'{"a":' * 100_000
    yield "15 MB of empty lists", b"[" + b"[]," * (5 * MB) + b"[]]"
    yield "40 MB of zeros", b"[" + b"0," * (20 * MB) + b"0]"
    yield "a million digits", b"[" + b"9" * 1_000_000 + b"]"
    yield "not a number", b'{"a": NaN, "b": Infinity}'
    yield "half a character", b'{"a": "\\ud800"}'
    yield "zero bytes", b"\0" * 1000
    yield "UTF-32", '{"a": 1}'.encode("utf-32")
    yield "not UTF-8", b'{"a": "\xff"}'
    yield "a list", b"[1, 2]"
    yield "a number", b"7"
    yield "cut", b'{"a": [1, 2'


def vocabularies() -> Iterator[tuple[str, object]]:
    """vocab.json."""

    def added(i: object, content: object = "b") -> dict:
        extra = [{"id": i, "content": content, "special": False}]
        return {**VOCABULARY, "added_tokens": VOCABULARY["added_tokens"] + extra}

    yield "an id of 2^60", added(1 << 60)
    yield "a negative id", added(-1)
    yield "an id that is a fraction", added(6.5)
    yield "an id that is a text", added("6")
    yield "an id that is a flag", added(True)
    yield "an id twice", added(1)
    yield "a token that is a number", added(6, 7)
    yield "a token that is a list", added(6, [1])
    for name, merges in (
        ("that are nested", [[[["a"]]]]), ("of one", ["a"]), ("of three", ["a a a"]),
        ("that are numbers", [1]), ("of unknown tokens", ["a zzz"]), ("that are a text", "a a"),
    ):  # fmt: skip
        yield f"merges {name}", {**VOCABULARY, "model": {**VOCABULARY["model"], "merges": merges}}
    for limits in ({"en": "x"}, {"en": 1e300}, [1], "x"):
        model = {**VOCABULARY["model"], "merge_limits": limits}
        yield f"merge limits {limits}", {**VOCABULARY, "model": model}
    yield "another model", {"model": {"type": "WordPiece"}}
    yield "a model that is a list", {"model": [1]}


def tables() -> Iterator[tuple[str, bytes]]:
    """metadata.jsonl."""
    row = b'{"audio_filepath": "a.wav", "text": "hello there"}\n'
    yield "a line of 20 MB", row + b'{"a": "' + b"x" * (20 * MB) + b'"}'
    yield "a line without an end", b"{" * (20 * MB)
    yield "a list in a list", b"[" * 100_000
    yield "a list of 70 MB", b"[" + row.strip() + b"," + b"0," * (35 * MB) + b"0]"
    yield "20 MB of empty lists", b"[" + row.strip() + b"," + b"[]," * (7 * MB) + b"[]]"
    yield "one entry of 20 MB", b"[[" + b"[]," * (7 * MB) + b"[]]]"
    yield "no comma", b"[" + row.strip() + row.strip() + b"]"
    yield "more behind the list", b"[" + row.strip() + b"] x"
    yield "paths that are lists", b'{"audio_filepath": [[]], "text": "a"}\n'
    yield "a name with a zero byte", b'{"audio_filepath": "a\\u0000b", "text": "a"}\n'
    yield "a cut without sources", b'{"supervisions": [{}], "recording": {"sources": [7]}, "id": 1}'
    yield "a cut of odd numbers", json.dumps(
        {"supervisions": [{"text": [1]}], "id": 1, "start": float("nan"), "duration": 1,
         "recording": {"sources": [{"type": "file", "source": 1}], "duration": 1}}
    ).encode()  # fmt: skip


def recordings() -> Iterator[tuple[str, bytes]]:
    """Audio whose headers lie, or that is far more than its bytes."""
    rng = np.random.default_rng(0)
    sound = (0.3 * rng.standard_normal(4000)).astype(np.float32)

    def written(kind: str, subtype: str, wave=sound, rate: int = 22050) -> bytearray:
        out = io.BytesIO()
        soundfile.write(out, wave, rate, format=kind, subtype=subtype)
        return bytearray(out.getvalue())

    def changed(data: bytearray, at: int, form: str, *values) -> bytes:
        struct.pack_into(form, data, at, *values)
        return bytes(data)

    wav = written("WAV", "PCM_16")
    for name, at, form, value in (
        ("4 GB of samples", 40, "<I", 0xFFFFFFFF), ("2 GB of samples", 40, "<I", 0x7FFFFFFF),
        ("65 535 channels", 22, "<H", 65535), ("1 024 channels", 22, "<H", 1024),
        ("no channels", 22, "<H", 0), ("a rate of 2^32", 24, "<I", 0xFFFFFFFF),
        ("a rate of 0", 24, "<I", 0), ("a rate of 384 kHz", 24, "<I", 384000),
        ("blocks of 0", 32, "<H", 0), ("blocks of 65 535", 32, "<H", 65535),
        ("65 535 bits", 34, "<H", 65535), ("no bits", 34, "<H", 0),
        ("an unknown format", 20, "<H", 0x1234), ("a format chunk of 2 GB", 16, "<I", 0x7FFFFFFF),
        ("a file of 0", 4, "<I", 0),
    ):  # fmt: skip
        yield f"WAV: {name}", changed(bytearray(wav), at, form, value)
    yield "WAV: a chunk of 4 GB", bytes(wav[:36]) + b"LIST\xff\xff\xff\xff" + bytes(wav[36:])
    yield "WAV: a million chunks", bytes(wav[:36]) + b"junk\0\0\0\0" * 1_000_000 + bytes(wav[36:])
    yield "RF64: 2^60 bytes", changed(written("RF64", "PCM_16"), 20, "<QQ", 1 << 60, 1 << 58)
    flac = written("FLAC", "PCM_16")
    for name, total in (("2^36 samples", (1 << 36) - 1), ("100 h", 22050 * 360_000)):
        low = struct.unpack_from(">Q", flac, 18)[0] & ~((1 << 36) - 1)
        yield f"FLAC: {name}", changed(bytearray(flac), 18, ">Q", low | total)
    low = struct.unpack_from(">Q", flac, 18)[0] & ~((1 << 36) - 1)
    yield "FLAC: no total", changed(bytearray(flac), 18, ">Q", low)
    yield "FLAC: a block of 16 MB", changed(bytearray(flac), 4, ">I", 0x04FFFFFF)
    for name, channels, rate, seconds in (
        ("silence, 20 min", 1, 48000, 1200), ("silence, 8 channels, 192 kHz", 8, 192000, 15),
        ("silence, 120 s of 384 kHz", 2, 384000, 60), ("silence, 100 s, 8 channels", 8, 48000, 100),
    ):  # fmt: skip
        quiet = np.zeros((rate * seconds, channels), np.int16)
        quiet[::1000] = 9000  # what a scan takes for sound
        yield f"FLAC: {name}", bytes(written("FLAC", "PCM_16", quiet, rate))
        del quiet
    for kind, subtype in (("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", "MPEG_LAYER_III")):
        rate = 24000 if subtype == "OPUS" else 22050
        data = written(kind, subtype, np.tile(sound, 10), rate)
        if kind == "OGG":
            last = data.rindex(b"OggS")
            yield f"{subtype}: 2^62 samples", changed(bytearray(data), last + 6, "<q", 1 << 62)
            yield f"{subtype}: -1 samples", changed(bytearray(data), last + 6, "<q", -1)
            yield f"{subtype}: 255 channels", changed(
                bytearray(data), data.index(b"OpusHead" if rate == 24000 else b"\x01vorbis")
                + (9 if rate == 24000 else 11), "<B", 255,
            )  # fmt: skip
        for marker in (b"Xing", b"Info"):
            if marker in data:
                at = data.index(marker)
                yield "MP3: 2^32 frames", changed(bytearray(data), at + 8, ">I", 0xFFFFFFFF)
        yield f"{subtype}: a part twice", bytes(data[: len(data) // 2] * 2)
    aiff = written("AIFF", "PCM_16")
    at = aiff.index(b"COMM")
    yield "AIFF: 2^32 samples", changed(bytearray(aiff), at + 10, ">I", 0xFFFFFFFF)
    yield "AIFF: 32 767 channels", changed(bytearray(aiff), at + 8, ">h", 32767)
    yield "AIFF: a rate of 10^300", changed(bytearray(aiff), at + 16, ">HQ", 0x7FFE, 1 << 63)
    yield "AU: 2^32 bytes", changed(written("AU", "PCM_16"), 8, ">I", 0xFFFFFFFF)
    yield "AU: 2^31 channels", changed(written("AU", "PCM_16"), 20, ">I", 0x7FFFFFFF)
    yield "CAF: 2^62 bytes", changed(written("CAF", "PCM_16"), 56, ">q", 1 << 62)
    yield "W64: 2^62 bytes", changed(written("W64", "PCM_16"), 16, "<q", 1 << 62)
    yield (
        "NIST: 10^18 samples",
        bytes(written("NIST", "PCM_16")).replace(b"sample_count -i 4000", b"sample_count -i 9999"),
    )
    yield "M4A: boxes within boxes", b"\0\0\0\x20ftypM4A \0\0\0\0" + b"\xff\xff\xff\xffmoov" * 9999
    yield "M4A: a box of 2^63", b"\0\0\0\x01ftyp" + b"\x7f" + b"\xff" * 7 + bytes(1000)
    yield "M4A: a box of 0", b"\0\0\0\x08ftyp\0\0\0\0moov" + bytes(1000)
    yield "WebM: sizes of 2^56", b"\x1a\x45\xdf\xa3\x01" + b"\xff" * 7 + bytes(2000)
    yield (
        "WMA: objects of 2^62",
        bytes.fromhex("3026b2758e66cf11a6d900aa0062ce6c")
        + struct.pack("<QIBB", 1 << 62, 0x7FFFFFFF, 1, 2)
        + bytes(1000),
    )
    for name, data in (
        ("a web page", b"<html>404"), ("nothing", b""), ("zeros", bytes(100_000)),
        ("ID3 of 256 MB", b"ID3\4\0\0\x7f\x7f\x7f\x7f" + bytes(5000)),
        ("sync words", b"\xff\xfb\x90\0" * 50_000), ("AAC", b"\xff\xf1\x50\x80" * 50_000),
        ("pages of Ogg", b"OggS\0\2" + b"\0" * 21 * 1000), ("RIFF", b"RIFF\xff\xff\xff\xffWAVE"),
        ("a list of files", b"#EXTM3U\nfile:///etc/passwd\n"), ("AMR", b"#!AMR\n" + b"\xff" * 9999),
        ("an LFS pointer", b"version https://git-lfs.github.com/spec/v1\n"),
    ):  # fmt: skip
        yield name, data


def keys() -> Iterator[tuple[str, object]]:
    """RUN/keys/client.json."""
    good = {"public": "a" * 40, "secret": "b" * 40}
    yield "keys that do not belong together", good
    for name, key in (
        ("short", "a" * 39), ("long", "a" * 41), ("not of Z85", "~" * 40), ("huge", "#" * 40),
        ("of accents", "é" * 40), ("of zero bytes", "\0" * 40), ("a number", 7), ("a list", [1]),
        ("none", None), ("a megabyte", "a" * MB),
    ):  # fmt: skip
        yield f"a key: {name}", {**good, "secret": key}
        yield f"a public key: {name}", {**good, "public": key}


def bundles(whole: Path) -> Iterator[tuple[str, bytes]]:
    """Of a whole one: keys that are none, members that lead elsewhere, lists that lie."""
    with zipfile.ZipFile(whole) as z:
        parts = {i.filename: z.read(i) for i in z.infolist()}
    about = json.loads(parts["bundle.json"])

    def made(change=None, **more) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as z:
            for name, data in {**parts, **more}.items():
                z.writestr(name, data)
            if change is not None:
                change(z)
        return out.getvalue()

    def saying(**changed) -> bytes:
        return made(**{"bundle.json": json.dumps({**about, **changed})})

    for name, key in (
        ("short", "a" * 39), ("not of Z85", "~" * 40), ("huge", "#" * 40), ("none", None),
        ("a number", 7), ("of accents", "é" * 40),
    ):  # fmt: skip
        yield f"the trainer's key: {name}", saying(server_key=key)
    yield "a run's name that is a path", saying(run_id="../../x")
    yield "members that are a number", saying(members=7)
    yield "members that are numbers", saying(members={n: 7 for n in about["members"]})
    yield "no members", saying(members={})
    yield "roots that are numbers", saying(roots=[1, 2])
    yield "another format", saying(format=10**9)
    yield "more fields", saying(more=1)
    yield "a list in its place", made(**{"bundle.json": "[" * 100_000})
    yield "a member more", made(**{"../../x": "x"})
    yield "another key within", made(**{"keys/client.json": json.dumps({"public": "x"})})
    yield "a plan that was changed", made(**{"plan/gpt/train.json": "{}"})
    yield "200 000 members", made(**{f"x{i}": "" for i in range(50_000)})

    def each(**values):
        def change(z: zipfile.ZipFile) -> None:
            for info in z.infolist():
                for key, value in values.items():
                    setattr(info, key, value)

        return change

    yield "encrypted", made(each(flag_bits=1))
    yield "4 GB", made(each(file_size=0xFFFFFFF0, compress_size=0xFFFFFFF0))
    yield "links", made(each(external_attr=0o120777 << 16))
    yield "at one place", made(each(header_offset=0))
    yield "version 9.9", made(each(extract_version=99))
    yield "nothing", b""
    yield "no zip", b"PK\x03\x04" + bytes(1000)


def _file(reader: str, name: str, data: bytes | object) -> Hostile:
    data = data if isinstance(data, bytes) else json.dumps(data).encode()

    def make(path: Path) -> None:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as f:
            f.write(data)

    return Hostile(reader, name, make)


def all_of_them(bundle: Path, only: Container[str]) -> Iterator[Hostile]:
    """For the readers in `only`. `bundle`: a whole one."""
    for reader, found in (
        ("yaml", yamls()), ("vocab.json", vocabularies()), ("key", keys()),
        ("metadata.jsonl", tables()), ("audio", recordings()),
    ):  # fmt: skip
        if reader not in only:
            continue
        for name, data in found:
            yield _file(reader, name, data)
        yield from irregular(reader)
    for name, data in jsons():
        for reader in ("document", "coqui config.json", "vocab.json", "metadata.jsonl", "key",
                       "segments.json", "endpoint.json"):  # fmt: skip
            yield _file(reader, name, data)
    packed = gzip.compress(bytes(64 * MB), 9)
    yield dataclasses.replace(_file("metadata.jsonl", "a packed GB", packed * 16))
    yield _file("metadata.jsonl", "packed and cut", packed[:1000])
    for name, data in bundles(bundle) if "bundle" in only else ():
        yield _file("bundle", name, data)
    yield from irregular("bundle")
    yield Hostile("bundle", "that others can read", _open_to_all(bundle))
    yield Hostile("bundle", "a link to one", lambda p: p.symlink_to(bundle))


def _open_to_all(bundle: Path):
    def make(path: Path) -> None:
        path.write_bytes(bundle.read_bytes())
        path.chmod(0o644)

    return make
