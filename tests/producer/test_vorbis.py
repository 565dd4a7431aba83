"""Rate and length of Ogg Vorbis as read here, against libsndfile's."""

from __future__ import annotations

import io
import os
import struct

import numpy as np
import pytest
import soundfile

from common.audio import ogg, vorbis
from common.audio.containers import check_whole
from common.audio.errors import DecodeError
from common.audio.reading import open_audio
from producer.corpus import headers
from producer.corpus.readers.paths import FixedPlace


def recording(n: int, rate: int = 22050, channels: int = 1, **tags: str) -> bytes:
    """Noise that swells, so that blocks of both lengths are used."""
    noise = 0.2 * np.random.default_rng(n).standard_normal((n, channels)).astype(np.float32)
    noise[: n // 3] *= 0.001
    out = io.BytesIO()
    with soundfile.SoundFile(out, "w", rate, channels, "VORBIS", format="OGG") as f:
        for name, text in tags.items():
            setattr(f, name, text)
        for at in range(0, n, 8192):  # libsndfile's stack holds no long block
            f.write(noise[at : at + 8192])
    return out.getvalue()


def checksum(page: bytes) -> bytes:
    """RFC 3533's, bit by bit."""
    crc = 0
    for byte in page[:22] + bytes(4) + page[26:]:
        crc ^= byte << 24
        for _ in range(8):
            crc = (crc << 1 ^ (0x04C11DB7 if crc & 1 << 31 else 0)) & 0xFFFFFFFF
    return struct.pack("<I", crc)


def pages(data: bytes) -> list[bytes]:
    """The pages of a file, by their own lengths."""
    at, found = 0, []
    while at < len(data):
        body = at + 27 + data[at + 26]
        end = body + sum(data[at + 27 : body])
        found.append(data[at:end])
        at = end
    return found


def sealed(page: bytes) -> bytes:
    """A page with the checksum of what it holds."""
    return page[:22] + checksum(page) + page[26:]


def moved(page: bytes, samples: int) -> bytes:
    """A page whose sounds end later."""
    at = struct.unpack_from("<Q", page, 6)[0] + samples
    return sealed(page[:6] + struct.pack("<Q", at) + page[14:])


def flagged(page: bytes, flags: int) -> bytes:
    return sealed(page[:5] + bytes([flags]) + page[6:])


def read_here(path, data: bytes) -> vorbis.Header | None:
    path.write_bytes(data)
    return vorbis.header(path, len(data))


@pytest.mark.parametrize(("rate", "channels"), [(16000, 1), (22050, 1), (24000, 2), (48000, 6)])
@pytest.mark.parametrize("n", [1, 100, 2000, 50000])
def test_rate_and_length_are_those_of_the_samples_written(tmp_path, rate, channels, n):
    found = read_here(tmp_path / "a.ogg", recording(n, rate, channels, title="x", artist="ü"))
    assert (found.rate, found.frames) == (rate, n)


def test_a_large_file_is_read_at_its_ends(tmp_path):
    data = recording(1_400_000)
    assert len(data) > ogg.SMALL
    assert read_here(tmp_path / "a.ogg", data).frames == 1_400_000
    assert read_here(tmp_path / "a.ogg", data[:-1]) is None


def test_checksums_of_pages():
    data, at = recording(9000), 0
    for page in pages(data):
        assert page[22:26] == checksum(page)
        assert ogg.is_intact(data, at, at + len(page))
        other = bytearray(data)
        other[at + len(page) - 1] ^= 16
        assert not ogg.is_intact(bytes(other), at, at + len(page))
        at += len(page)


def oddities(data: bytes) -> dict[str, bytes]:
    """Files that a scan leaves to libsndfile, by what is odd about them."""
    p, other = pages(data), pages(recording(20000, 32000))
    setup = p[1].index(b"\x05vorbis")
    return {
        "two streams, one after the other": data + data,
        "another stream's last page": data + other[-1],
        "a beginning cut off": b"".join([*p[:2], *(moved(x, 5000) for x in p[2:])]),
        "no page marked as the last": b"".join([*p[:-1], flagged(p[-1], 0)]),
        "a first page that is not marked": b"".join([flagged(p[0], 0), *p[1:]]),
        "a stream that begins again": b"".join([*p[:-1], flagged(p[-1], 6)]),
        "the first sounds missing": b"".join([*p[:2], *p[3:]]),
        "no sounds": b"".join(p[:2]),
        "something behind it": data + b"TAG" + bytes(125),
        "something before it": b"ID3" + data,
        "a comment longer than its page": b"".join(
            [
                p[0],
                sealed(p[1].replace(b"\x03vorbis", b"\x03vorbis\xff\xff", 1)[: len(p[1])]),
                *p[2:],
            ]
        ),
        "no setup": b"".join([p[0], sealed(p[1][:setup] + b"\x07" + p[1][setup + 1 :]), *p[2:]]),
        "a page damaged": data[:3000] + bytes([data[3000] ^ 1]) + data[3001:],
        "the last page damaged": data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
        "nothing but a beginning": data[:40],
        "nothing": b"",
        "one length of blocks": recording(20000, 8000),
    }


def test_whatever_is_out_of_the_ordinary_is_left_to_libsndfile(tmp_path):
    data = recording(60000)
    assert len(pages(data)) > 4
    found = {what: read_here(tmp_path / "a.ogg", odd) for what, odd in oddities(data).items()}
    assert {what for what, header in found.items() if header is not None} == set()


def test_a_scan_says_the_same_with_a_setup_that_is_known_and_without(tmp_path, monkeypatch):
    """Of each oddity and of damage to any byte."""
    data = recording(60000)
    rng = np.random.default_rng(1)
    files = [data, *oddities(data).values(), recording(100), recording(3000, title="t")]
    for at in (*range(0, 60, 3), *rng.integers(58, len(data), 150)):
        files.append(data[:at] + bytes([data[at] ^ 1 << int(rng.integers(8))]) + data[at + 1 :])
    files += [data[:n] for n in rng.integers(1, len(data), 20)]
    known = vorbis.Headers()
    known.confirm(read_here(tmp_path / "a.ogg", data), 22050, 60000)
    seen = []
    for i, content in enumerate(files):
        path = tmp_path / f"{i}.ogg"
        path.write_bytes(content)
        said = []
        for headers_of in (vorbis.Headers(), known):
            monkeypatch.setattr(headers, "_VORBIS", headers_of)
            said.append(headers.facts_of(FixedPlace(str(path)), False))
        assert said[0] == said[1], i
        seen.append(said[0].kind)
    assert seen[0] == ""
    assert {"ends early", "joined recordings", "not audio"} <= set(seen)


def test_pages_with_other_content_and_a_right_checksum(tmp_path):
    """What is believed is what libsndfile says, and the file is whole."""
    data = recording(60000)
    known, p, rng, believed = vorbis.Headers(), pages(data), np.random.default_rng(2), 0
    known.confirm(read_here(tmp_path / "a.ogg", data), 22050, 60000)
    for _ in range(200):
        i = int(rng.integers(len(p)))
        changed = bytearray(p[i])
        places = (*range(5, 22), *range(27, len(changed)))
        at = int(rng.choice(places[: 60 if rng.random() < 0.5 else None]))
        changed[at] = int(rng.integers(256))
        odd = b"".join([*p[:i], sealed(bytes(changed)), *p[i + 1 :]])
        found = read_here(tmp_path / "a.ogg", odd)
        if found is None or found not in known:
            continue
        believed += 1
        with open_audio(tmp_path / "a.ogg") as f:
            assert (f.samplerate, f.frames) == (found.rate, found.frames), (i, at)
        assert check_whole(tmp_path / "a.ogg", len(odd), "OGG") == ""
    assert believed > 12


def test_a_header_is_believed_once_libsndfile_has_confirmed_one_like_it(tmp_path, monkeypatch):
    opened = []

    def noted(path):
        opened.append(os.path.basename(path))
        return open_audio(path)

    monkeypatch.setattr(headers, "_VORBIS", vorbis.Headers())
    monkeypatch.setattr(headers, "open_audio", noted)
    for name, n, rate in (("a", 900, 22050), ("b", 800, 22050), ("c", 700, 24000), ("d", 9, 24000)):
        (tmp_path / f"{name}.ogg").write_bytes(recording(n, rate))
    facts = [headers.facts_of(FixedPlace(str(tmp_path / f"{n}.ogg")), False) for n in "abcd"]
    assert [(f.frames, f.rate) for f in facts] == [
        (900, 22050),
        (800, 22050),
        (700, 24000),
        (9, 24000),
    ]
    assert opened == ["a.ogg", "c.ogg"]
    assert headers.facts_of(FixedPlace(str(tmp_path / "b.ogg")), True).deep
    assert opened == ["a.ogg", "c.ogg", "b.ogg"]


def test_a_header_that_libsndfile_reads_otherwise_is_never_believed():
    known, header = vorbis.Headers(), vorbis.Header(22050, 100, 7)
    known.confirm(header, 22050, 99)
    assert header not in known
    known.confirm(header, 22050, 100)
    known.confirm(header, 22050, 99)
    assert header not in known


def test_what_cannot_be_read_is_left_to_the_opening_that_says_so(tmp_path):
    assert vorbis.header(tmp_path / "none.ogg", 9) is None
    with pytest.raises(DecodeError):
        open_audio(tmp_path / "none.ogg")
