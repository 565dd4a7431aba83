"""Checkpoints made to harm: pickles, zips and lists of tensors that no program writes."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path

from tests.support.hostile_files import Hostile, irregular

# A tuple that contains itself twice, sixty times over: hashing or printing it visits 2^60 leaves.
BOMB = b")" + b"2\x86" * 60
STORAGE = (
    b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x08t"
)
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n("


def _number(n: int) -> bytes:
    return pickle.dumps(n, 2)[2:-1]


def _numbers(values) -> bytes:
    return b"(" + b"".join(map(_number, values)) + b"t"


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text.encode())) + text.encode()


def tensor(offset: int, shape, strides, storage: bytes = STORAGE) -> bytes:
    """{"model": {"w": a tensor with these numbers}}"""
    one = (
        REBUILD + storage + b"Q" + _number(offset) + _numbers(shape) + _numbers(strides) + b"\x89N"
    )
    return b"\x80\x02}" + _text("model") + b"}" + _text("w") + one + b"tRss."


def pickles() -> Iterator[tuple[str, bytes]]:
    """Bombs, lies, and what would be code."""
    p = b"\x80\x02"
    yield "a memo index of 2^31", p + b"}r\xff\xff\xff\x7f."
    yield "a memo index of 2^60, as text", p + b"}p1152921504606846976\n."
    yield "a key that is hashed for ever", p + b"}" + BOMB + b"Ns."
    yield "a set of what is hashed for ever", p + b"\x8f(" + BOMB + b"\x90."
    yield "a frozenset of it", p + b"(" + BOMB + b"\x91."
    yield "a storage that is printed for ever", p + BOMB + b"Q."
    yield "a call of it", p + BOMB + b")R."
    yield "a state for it", p + BOMB + b"}b."
    yield "an inert object's arguments", p + b"cTTS.a\nB\n" + BOMB + b"R."
    yield "a million lists, each in the next", p + b"]" * 900_000 + b"a" * 899_999 + b"."
    yield "a million tuples, each in the next", p + b")" + b"\x85" * 990_000 + b"."
    yield "sixteen million steps", p + b"N0" * (8 << 20) + b"N."
    yield "five million dicts", p + b"(" + b"}" * 5_000_000 + b"l."
    yield "a million marks", p + b"(" * 999_990 + b"."
    yield "more than is read", p + b"N" * (17 << 20) + b"."
    yield "2^60 bytes announced", p + b"\x8e" + struct.pack("<Q", 1 << 60) + b"x."
    yield "4 GB of text announced", p + b"X\xff\xff\xff\xffx."
    yield "an integer of 2 GB", p + b"\x8b\xff\xff\xff\x7fx."
    yield "an integer of 10 000 bits", p + b"\x8b" + struct.pack("<i", 1250) + b"\x7f" * 1250 + b"."
    yield "a million digits", p + b"I" + b"9" * 1_000_000 + b"\n."
    yield "a name without an end", p + b"c" + b"a" * 1_000_000
    yield "100 000 names", p + b"".join(b"cTTS.a\nn%d\n0" % i for i in range(100_000)) + b"N."
    yield (
        "integers of one hash",
        p + b"}(" + b"".join(_number(i * ((1 << 61) - 1)) + b"N" for i in range(20_000)) + b"u.",
    )
    yield (
        "a copy of itself, and again",
        p + b"(" + b"K\x01" * 50_000 + b"lq\x000" + (b"ctorch\nSize\nh\x00\x85R0" * 20_000) + b"N.",
    )
    for name in (b"os\nsystem", b"builtins\neval", b"collections\nCounter.__init__", b"io\nopen"):
        yield f"code: {name!r}", p + b"c" + name + b"\n(X\x02\x00\x00\x00lstR."
        yield f"code, by INST: {name!r}", b"(S'ls'\ni" + name + b"\n."
    yield "code, by a name on the stack", b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x02ls\x85R."
    yield "a name of numbers", b"\x80\x04K\x01K\x02\x93."
    yield "a state for a class", p + b"ccollections\nCounter\nN}X\x05\x00\x00\x00ownedK\x01s\x86b."
    yield "a state for a function", p + b"ctorch._utils\n_rebuild_tensor_v2\n}b."
    yield "a state for a list", p + b"]}b."
    yield "an extension", p + b"\x82\x01."
    yield "an id as text", b"Px\n."
    yield "a buffer", b"\x80\x05\x97."
    yield "no end", p + b"}"
    yield "an end alone", b"."
    yield "nothing", b""
    yield "no stack", p + b"0."
    yield "no mark", p + b"t."
    yield "an unknown opcode", p + b"\xff."
    wide = b"}q\x00(" + b"".join(_text(f"k{i}") + b"h\x00" for i in range(1000)) + b"u"
    yield "a config that holds itself", p + b"}" + _text("config") + wide + b"s."
    deep = b"cTTS.a\nB\n)Rq\x01h\x01b"
    yield "an object that is its own state", p + b"}" + _text("config") + deep + b"s."
    yield "10^18 entries by reference", p + b"}" + _text("config") + b"}q\x0a0" + b"".join(
        b"}q" + bytes([11 + n]) + b"(" + b"".join(
            _text(f"k{i}") + b"h" + bytes([10 + n]) for i in range(200)
        ) + b"u0" for n in range(8)
    ) + b"h\x12s."  # fmt: skip
    huge = _text("gpt_layers") + _number(10**12)
    yield (
        "a model of 10^12 layers",
        tensor(0, (8,), (1,))[:-1] + _text("config") + b"}" + (huge + b"ss."),
    )


def tensors() -> Iterator[tuple[str, bytes]]:
    """Of 8 numbers of 4 bytes."""
    yield "a stride of zero", tensor(0, (1 << 40,), (0,))
    yield "rows of zero stride", tensor(0, (1 << 20, 8), (0, 1))
    yield "a row of 2^62", tensor(0, (1 << 62,), (0,))
    yield "2^62 empty rows", tensor(0, (1 << 62, 0), (1, 1))
    yield "2^39 empty rows", tensor(0, (1 << 39, 0), (1, 1))
    yield "a negative stride", tensor(7, (8,), (-1,))
    yield "a negative size", tensor(0, (-1,), (1,))
    yield "behind the end", tensor(1, (8,), (1,))
    yield "an offset of 2^63", tensor(1 << 63, (1,), (1,))
    yield "a stride of 2^40 over one", tensor(0, (1, 8), (1 << 40, 1))
    yield "100 000 axes", tensor(0, (1,) * 100_000, (1,) * 100_000)
    yield "sizes that are flags", tensor(0, (True, True), (1, 1))
    yield (
        "a storage elsewhere",
        tensor(
            0, (8,), (1,), STORAGE.replace(b"\x01\x00\x00\x000", b"\x0b\x00\x00\x00../../../ab")
        ),
    )
    yield (
        "a storage that is not there",
        tensor(0, (8,), (1,), STORAGE.replace(b"\x01\x00\x00\x000", b"\x01\x00\x00\x009")),
    )


def archive(data: bytes = b"\x80\x02}.", change=None, **more) -> bytes:
    """A checkpoint; `change(info)` before a record is listed, `more` records by name."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as z:
        for name, content in {"data.pkl": data, "data/0": bytes(32), **more}.items():
            z.writestr(f"a/{name}", content)
        if change is not None:
            change(z)
    return out.getvalue()


def _each(**values):
    def change(z: zipfile.ZipFile) -> None:
        for info in z.infolist():
            for key, value in values.items():
                setattr(info, key, value)

    return change


def _named(name: str):
    def change(z: zipfile.ZipFile) -> None:
        z.infolist()[-1].filename = name

    return change


def _patched(old: bytes, new: bytes, data: bytes | None = None) -> bytes:
    data = archive() if data is None else data
    assert old in data
    return data.replace(old, new)


def zips() -> Iterator[tuple[str, bytes]]:
    """Lists that lie, names that lead elsewhere, records that are not plain bytes."""
    yield "encrypted", archive(change=_each(flag_bits=1))
    yield "strongly encrypted", archive(change=_each(flag_bits=0x41))
    yield "patched data", archive(change=_each(flag_bits=0x20))
    yield "a masked header", archive(change=_each(flag_bits=0x2000))
    yield "zip version 6.3", archive(change=_each(extract_version=63))
    yield "zip version 9.9", archive(change=_each(extract_version=99))
    yield "a kind that is not known", archive(change=_each(compress_type=98))
    for kind in (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", kind) as z:
            z.writestr("a/data.pkl", b"\x80\x02" + b"N0" * (1 << 19) + b"N.")
        yield f"1 MiB packed, kind {kind}", out.getvalue()
    for name in ("/etc/x", "../x", "a/../x", "a/./x", "a\\x", "C:x", "a//x", "a/data.pkl"):
        yield f"the name {name}", archive(change=_named(name))
    yield "a zero byte in a name", _patched(b"a/data/0", b"a/dat\x00/0")
    yield "a link", archive(change=_each(external_attr=0o120777 << 16, create_system=3))
    yield "other sizes", archive(change=_each(file_size=1 << 50))
    yield (
        "4 GB in a file of 300 bytes",
        archive(change=_each(file_size=0xFFFFFFF0, compress_size=0xFFFFFFF0)),
    )
    yield "2^60 bytes", archive(change=_each(file_size=1 << 60, compress_size=1 << 60))
    yield "each at the first one's place", archive(change=_each(header_offset=0))
    yield "behind the end", archive(change=_each(header_offset=10_000))
    yield "another checksum", archive(change=_each(CRC=1))
    yield "another name in its own header", archive()[::1].replace(b"a/data/0", b"a/data/9", 1)
    yield "two pickles", archive(**{"b/data.pkl": b"N."})
    yield "no pickle", _patched(b"data.pkl", b"data.pk_")
    yield "a byte order of 20 MB", archive(byteorder=b"x" * (20 << 20))
    yield "another byte order", archive(byteorder=b"big")
    yield "50 000 records", archive(**{f"data/{i}": b"" for i in range(50_000)})
    end = archive().index(b"PK\x05\x06")
    for what, at, new in (
        ("65 535 records", 8, b"\xff\xff\xff\xff"),
        ("a list of 4 GB", 12, b"\xff\xff\xff\x7f"),
        ("a list behind the end", 16, b"\xff\xff\xff\x7f"),
        ("of another disk", 4, b"\x01\x00\x01\x00"),
    ):
        data = bytearray(archive())
        data[end + at : end + at + 4] = new
        yield f"said to have {what}", bytes(data)
    locator = b"PK\x06\x07" + struct.pack("<LQL", 0, 0, 1)
    far = b"PK\x06\x06" + struct.pack("<QHHLLQQQQ", 44, 45, 45, 0, 0, *(4 * [1 << 60]))
    yield "a list of 2^60 bytes", far + archive()[:end] + locator + archive()[end:]
    yield "old, no zip", pickle.dumps({"a": 1}, 2)
    yield "the end of a zip alone", archive()[end:]


def safetensors() -> Iterator[tuple[str, bytes]]:
    """Headers that lie."""

    def file(header: object, data: bytes = bytes(32), length: int | None = None) -> bytes:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        return struct.pack("<Q", len(text) if length is None else length) + text + data

    def one(dtype="F32", shape=(8,), offsets=(0, 32)):
        return {"w": {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}}

    yield "nothing", b""
    yield "seven bytes", bytes(7)
    yield "a header of 2^63", file(one(), length=(1 << 63) + 1)
    yield "a header behind the end", file(one(), length=1000)
    yield "a header of no bytes", file(b"")
    yield "a header of 90 MB", file(b'{"a":[' + b"[]," * (30 << 20) + b"[]]}")
    yield "a header of 7 MB of lists", file(b'{"a":[' + b"[]," * (7 << 18) + b"[]]}")
    yield "100 000 tensors at one place", file({f"t{i}": one()["w"] for i in range(50_000)})
    yield "nested 100 000 deep", file(b"[" * 100_000)
    yield "not UTF-8", file(b'{"\xff\xfe": 1}')
    yield "a list", file([1, 2])
    yield "a shape of 2^63", file(one(shape=(1 << 63,)))
    yield "a shape that overflows", file(one(shape=(1 << 32, 1 << 32)))
    yield "2^62 empty rows", file(one(shape=(1 << 62, 0), offsets=(0, 0)), b"")
    yield "a negative shape", file(one(shape=(-8,)))
    yield "a shape of fractions", file(one(shape=(8.5,)))
    yield "offsets that overlap", file({**one(), "v": one()["w"]})
    yield "offsets in reverse", file(one(offsets=(32, 0)))
    yield "offsets behind the end", file(one(shape=(1 << 30,), offsets=(0, 1 << 32)))
    yield "a gap", file(one(offsets=(4, 36)), bytes(36))
    yield "more behind the data", file(one(), bytes(1000))
    yield "an unknown dtype", file(one(dtype="X32"))
    yield "a dtype of quarter bytes", file(one(dtype="F8_E5M2", shape=(32,)))
    yield "metadata of numbers", file({"__metadata__": {"a": 1}, **one()})
    yield "no offsets", file({"w": {"dtype": "F32", "shape": [8]}})


def all_of_them() -> Iterator[Hostile]:
    """Of both formats."""
    for name, data in pickles():
        yield _file("pth", name, archive(data))
    for name, data in tensors():
        yield _file("pth", name, archive(data))
    for name, data in zips():
        yield _file("pth", name, data)
    for name, data in safetensors():
        yield _file("safetensors", name, data)
    yield from irregular("pth")
    yield from irregular("safetensors")


def _file(reader: str, name: str, data: bytes) -> Hostile:
    return Hostile(reader, name, lambda p: Path(p).write_bytes(data))
