"""The store of codes: what comes back is what was put, whoever writes and whoever dies; batches do
not depend on it to the bit.
"""

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.corpora import write_wav
from tests.support.producer_runs import make_run, tone, write_dvae

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from common.data.manifest import TRAIN, Manifest
from common.data.manifest_writer import ManifestWriter, NewUtterance
from common.transport.wire import digest
from producer.batches.cache import CodesCache
from producer.batches.decode import decode

ROOT = Path(__file__).resolve().parents[2]
KEY = "0123456789abcdef" * 2
AUDIO = {"cond_min_samples": 11008, "cond_max_samples": 22016, "cond_eval_samples": 16512}


def codes_of(utterance: int) -> np.ndarray:
    """The answer known beforehand: 1 + u mod 250 codes, each a product of u + 3 and its place, mod
    1021.
    """
    return (np.arange(1, 2 + utterance % 250) * (utterance + 3)) % 1021


def test_what_comes_back_is_what_was_put(tmp_path):
    a, b = CodesCache(tmp_path / "c", 250, KEY), CodesCache(tmp_path / "c", 250, KEY)
    for u in (7, 0, 249, 12345, 3):
        assert a.get(u, len(codes_of(u))) is None
        a.put(u, codes_of(u))
    for cache in (
        a,
        b,
        CodesCache(tmp_path / "c", 250, KEY),
    ):  # also those opened before, also the next start
        for u in (7, 0, 249, 12345, 3):
            got = cache.get(u, len(codes_of(u)))
            assert got.dtype == np.int32
            np.testing.assert_array_equal(got, codes_of(u))
        assert cache.get(8, len(codes_of(8))) is None
    with pytest.raises(ValueError, match="at most 250"):
        a.put(1, np.zeros(251, np.int32))
    with pytest.raises(ValueError, match="16 bits"):
        a.put(1, np.array([70000]))


def test_other_features_other_lengths_and_damage_find_nothing(tmp_path):
    cache = CodesCache(tmp_path, 250, KEY)
    for u in range(20):
        cache.put(u, np.full(30, u))
    assert CodesCache(tmp_path, 250, KEY[::-1]).get(5, 30) is None
    assert cache.get(5, 29) is None  # the manifest says another length: another clip
    assert cache.get(5, 251) is None
    path = tmp_path / "codes.bin"
    data = bytearray(path.read_bytes())
    slot = 8 + 2 * 250
    data[5 * slot + 20] ^= 1  # a bit of a code
    data[6 * slot] ^= 1  # a bit of a sum
    data[7 * slot : 8 * slot], data[8 * slot : 9 * slot] = (
        data[8 * slot : 9 * slot],
        data[7 * slot : 8 * slot],
    )
    path.write_bytes(data[: 15 * slot + 40])  # cut off within 15
    found = {u for u in range(20) if cache.get(u, 30) is not None}
    assert found == set(range(15)) - {5, 6, 7, 8}
    cache.put(5, np.full(30, 5))
    np.testing.assert_array_equal(cache.get(5, 30), np.full(30, 5))


_WRITER = """
import sys
import numpy as np
from producer.batches.cache import CodesCache
cache = CodesCache(sys.argv[1], 250, sys.argv[2])
print("writes", flush=True)
while True:
    for u in range(2000):
        cache.put(u, (np.arange(1, 2 + u % 250) * (u + 3)) % 1021)
"""


def _flip(data, rng):
    for at in rng.integers(0, len(data), 200):
        data[at] ^= 1 << int(rng.integers(8))


def _shorten(data, rng):
    del data[int(rng.integers(len(data))) :]


def _empty_pages(data, rng):
    for at in rng.integers(0, len(data), 4) // 4096 * 4096:
        data[at : at + 4096] = bytes(len(data[at : at + 4096]))


def _swap_pages(data, rng):
    a, b = (int(x) * 4096 for x in rng.integers(0, len(data) // 4096, 2))
    data[a : a + 4096], data[b : b + 4096] = data[b : b + 4096], data[a : a + 4096]


def _shift(data, rng):
    at = int(rng.integers(len(data)))
    data[at:at] = rng.bytes(int(rng.integers(1, 600)))


def _swap_slots(data, rng):
    a, b = (int(x) * 508 for x in rng.integers(0, 100, 2))
    data[a : a + 508], data[b : b + 508] = data[b : b + 508], data[a : a + 508]


def _random(data, rng):
    at = int(rng.integers(len(data) // 2))
    data[at : at + 5000] = rng.bytes(5000)


@pytest.mark.parametrize(
    "damage", [_flip, _shorten, _empty_pages, _swap_pages, _shift, _swap_slots, _random]
)
def test_damage_of_any_kind_costs_codes_and_never_gives_wrong_ones(tmp_path, damage):
    """A disk that loses, mixes up or invents bytes: what comes back is right or absent, what was
    untouched comes back, and what is put again stays.
    """
    whole = CodesCache(tmp_path / "whole", 250, KEY)
    for u in range(100):
        whole.put(u, codes_of(u))
    data = (tmp_path / "whole" / "codes.bin").read_bytes()
    for seed in range(10):
        hurt, folder = bytearray(data), tmp_path / str(seed)
        damage(hurt, np.random.default_rng(seed))
        folder.mkdir()
        (folder / "codes.bin").write_bytes(hurt)
        cache = CodesCache(folder, 250, KEY)
        for u in range(100):
            got, n = cache.get(u, len(codes_of(u))), 8 + 2 * len(codes_of(u))
            slot = slice(u * 508, u * 508 + n)
            assert (got is not None) == (hurt[slot] == data[slot])
            if got is not None:
                np.testing.assert_array_equal(got, codes_of(u))
        for u in range(100):
            cache.put(u, codes_of(u))
            np.testing.assert_array_equal(cache.get(u, len(codes_of(u))), codes_of(u))
        cache.close()


def test_the_store_is_bounded_by_the_corpus(tmp_path):
    """However often and with whatever codes a clip is put, its slot is all that it takes."""
    cache = CodesCache(tmp_path, 250, KEY)
    for round_ in range(5):
        for u in range(50):
            cache.put(u, (codes_of(u + round_)), stamp=str(round_))
    assert (tmp_path / "codes.bin").stat().st_size <= 50 * (8 + 2 * 250)
    assert cache.get(7, len(codes_of(11)), "4") is not None
    assert cache.get(7, len(codes_of(10)), "3") is None


def test_three_writers_and_sigkill_at_any_time(tmp_path):
    """Three producers write the same slots and are killed at once, again and again: a slot is right
    or absent, never wrong.
    """
    reader = CodesCache(tmp_path, 250, KEY)
    seen = 0
    for wanted in (0, 500, 1500):  # slots seen before the kill
        argv = [sys.executable, "-c", _WRITER, str(tmp_path), KEY]
        writers = [
            subprocess.Popen(
                argv, cwd=ROOT, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
            )
            for _ in range(3)
        ]
        for w in writers:
            assert w.stdout.readline() == b"writes\n"
        end, found = time.monotonic() + 280, 0
        while found < wanted:
            assert time.monotonic() < end
            found += sum(_is_right(reader, u) for u in range(0, 2000, 97))
        for w in writers:
            w.send_signal(signal.SIGKILL)
            w.wait()
            w.stdout.close()
        seen += found + sum(_is_right(reader, u) for u in range(2000))
    assert seen > 2000


def _is_right(cache, u):
    """True if found; a found one must be right."""
    got = cache.get(u, 1 + u % 250)
    if got is not None:
        np.testing.assert_array_equal(got, codes_of(u))
    return got is not None


def test_a_folder_that_cannot_be_written_is_said_once_and_still_read(tmp_path, caplog, monkeypatch):
    CodesCache(tmp_path / "c", 250, KEY).put(3, codes_of(3))
    cache = CodesCache(tmp_path / "c", 250, KEY)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with caplog.at_level(logging.WARNING):
        cache.put(4, codes_of(4))
        cache.put(5, codes_of(5))
    assert [r.message for r in caplog.records if "No space left" in r.message] == [
        r.message for r in caplog.records
    ]
    assert len(caplog.records) == 1
    np.testing.assert_array_equal(cache.get(3, len(codes_of(3))), codes_of(3))
    (tmp_path / "file").write_text("")
    nowhere = CodesCache(tmp_path / "file" / "c", 250, KEY)
    nowhere.put(3, codes_of(3))
    assert nowhere.get(3, len(codes_of(3))) is None


# -- batches
# --------------------------------------------------------------------------------------------------


def decode_all(clips):
    return [decode(c.utterance.path, c.start, c.num_samples) for c in clips]


def batches(maker, numbers):
    """[(digest, clips)] of the numbers."""
    made = []
    for plan, g in numbers:
        planned = maker.plan(plan, g)
        clips = maker.clips(planned)
        made.append((digest(maker.make(planned, clips, decode_all(clips)).arrays), clips))
    return made


def mixed_rates(folder):
    """A run whose clips are at 22 050, 44 100 and 48 000 Hz."""
    run = make_run(folder, [1.1 + 0.17 * i for i in range(9)], num_eval=1, audio=AUDIO)
    rates = [(22050, 44100, 48000)[i % 3] for i in range(9)]
    with ManifestWriter(folder / "manifest.sqlite") as m:
        m.add_source(folder / "clips")
        for u, rate in zip(run.manifest.utterances(range(9)), rates, strict=True):
            frames = u.num_samples * rate // 22050
            samples = np.interp(
                np.arange(frames) * 22050 / rate,
                np.arange(u.num_samples),
                tone(u.id, u.num_samples / 22050),
            )
            path = write_wav(folder / "clips" / f"r{u.id}.flac", samples.astype(np.float32), rate)
            facts = {
                "num_samples": -(-frames * 22050 // rate),
                "source_rate": rate,
                "source_frames": frames,
                "size": path.stat().st_size,
            }
            words = {
                "name": f"c{u.id}",
                "text": "x",
                "clean": "x",
                "tokens": u.tokens,
                "language": "en",
                "speaker": "a",
            }
            m.add_utterance(
                NewUtterance(source=0, path=path, **words, **facts, split=TRAIN if u.id < 8 else 1)
            )
    run.manifest = Manifest.open(folder / "manifest.sqlite")
    return run


def test_batches_are_the_same_to_the_bit_with_and_without_the_cache(tmp_path):
    from producer.batches.gpt import GptMaker

    run = mixed_rates(tmp_path / "run")
    write_dvae(run)
    epoch = run.plan("gpt", "train").batches_per_epoch
    numbers = [("train", g) for g in range(2 * epoch)] + [("eval", 0)]
    without = GptMaker(run)
    without._cache = None
    expected = [d for d, _ in batches(without, numbers)]

    filling = GptMaker(run)
    first = batches(filling, numbers)
    assert [d for d, _ in first] == expected
    second_epoch = [c for _, clips in first[epoch : 2 * epoch] for c in clips]
    assert second_epoch
    assert all(c.codes is not None and c.num_samples is not None for c in second_epoch), (
        "only the conditioning clips are decoded"
    )
    assert any(c.num_samples < c.utterance.num_samples for c in second_epoch)

    full = GptMaker(run)
    assert [d for d, _ in batches(full, numbers)] == expected
    assert full.num_traces == 1, "codes that are known are not computed"

    shutil.copyfile(_file(run), tmp_path / "copy")
    slot = 8 + 2 * max(b.num_codes for b in run.plan("gpt", "train").buckets)
    damaged = bytearray(_file(run).read_bytes())
    for u in (0, 3, 4):
        damaged[u * slot + 9] ^= 4
    _file(run).write_bytes(damaged)
    assert [d for d, _ in batches(GptMaker(run), numbers)] == expected, (
        "a part of a batch known, the rest not"
    )
    assert _file(run).read_bytes() == (tmp_path / "copy").read_bytes()


def _file(run) -> Path:
    (path,) = (run.path / "cache").glob("codes-*/codes.bin")
    assert path.parent.name == f"codes-{run.feature_hash('gpt')[:16]}"
    return path


def test_the_setting_switches_it_off(tmp_path):
    from producer.batches.gpt import open_cache

    run = make_run(tmp_path / "run", [1.0, 1.5], producers={"cache_codes": False})
    assert open_cache(run, KEY, 250) is None
    assert not (tmp_path / "run" / "cache").exists()
