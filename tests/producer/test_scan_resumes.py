"""A scan that is killed: the next one does not open again what was looked at, and comes to the same
manifest to the bit.
"""

import contextlib
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

import launch
from producer.corpus import headers, journal, scan
from producer.corpus.journal import Journal, place_of
from tests.support import scan_cases
from tests.support.corpora import make_corpus, sine, write_wav

tokenizer = scan_cases.tokenizer
N, CHUNK, AT_GATE = 60, 4, 37

# A scan that stops at one of its recordings, says so, and waits to be killed.
KILLED = """
import sys, time
from pathlib import Path
from common.xtts.text.tokenizer import Tokenizer
from producer.corpus import headers, scan
from tests.support import scan_cases

root, manifest, kept, chunk, gate = sys.argv[1:]
examine, opened = headers._examine, []

def held(path, *args):
    opened.append(path)
    while len(opened) == int(gate):
        print("at the gate", flush=True)
        time.sleep(600)
    return examine(path, *args)

headers._examine, scan._CHUNK = held, int(chunk)
tokenizer = Tokenizer.train(scan_cases.ALPHABET, 100, ["en", "fa", "ar"])
scan.scan(scan_cases.settings(root, scan_threads=1), Path(manifest), tokenizer, journal=Path(kept))
"""


def corpus(root):
    """Recordings with things to find in them: one is soft, one is damaged, one clips."""
    make_corpus(root, N, 0.6, freq=lambda i: 200 + 7 * i)
    write_wav(root / "wavs/c0004.wav", sine(13230, amplitude=0.003))
    write_wav(root / "wavs/c0007.wav", np.clip(3 * sine(13230), -1, 1))
    (root / "wavs/c0009.wav").write_bytes(b"not a recording")
    return root


def scanned(root, manifest, tokenizer, monkeypatch, kept=None, **data):
    """A scan of one thread; the recordings that it opened, and the manifest's bytes."""
    opened, examine = [], headers._examine

    def counted(path, *args):
        opened.append(os.path.basename(path))
        return examine(path, *args)

    with monkeypatch.context() as m:
        m.setattr(headers, "_examine", counted)
        m.setattr(scan, "_CHUNK", CHUNK)
        config = scan_cases.settings(root, scan_threads=1, **data)
        scan.scan(config, manifest, tokenizer, journal=kept)
    return opened, manifest.read_bytes()


def kill_at_the_gate(root, folder, kept):
    command = [sys.executable, "-c", KILLED, root, folder / "m", kept, CHUNK, AT_GATE]
    with subprocess.Popen(
        [str(c) for c in command], stdout=subprocess.PIPE, cwd=launch.ROOT, text=True
    ) as p:
        assert p.stdout.readline() == "at the gate\n"
        p.send_signal(signal.SIGKILL)
    assert not (folder / "m").exists()


def test_a_killed_scan_goes_on_where_it_was(tmp_path, tokenizer, monkeypatch):
    root, kept = corpus(tmp_path / "c"), tmp_path / "kept/journal"
    opened, whole = scanned(root, tmp_path / "whole", tokenizer, monkeypatch)
    assert len(opened) == N
    kill_at_the_gate(root, tmp_path, kept)
    done = CHUNK * ((AT_GATE - 1) // CHUNK)
    again, resumed = scanned(root, tmp_path / "again", tokenizer, monkeypatch, kept)
    assert again == opened[done:]
    assert resumed == whole
    assert not kept.exists()
    assert scanned(root, tmp_path / "last", tokenizer, monkeypatch, kept)[0] == opened


@pytest.fixture
def begun(tmp_path, tokenizer, monkeypatch):
    """A corpus, what a scan of it opens, its manifest, and the journal of one that found nothing
    it liked at its end: of all recordings.
    """
    root, kept = corpus(tmp_path / "c"), tmp_path / "journal"
    opened, whole = scanned(root, tmp_path / "whole", tokenizer, monkeypatch)
    with monkeypatch.context() as m, contextlib.suppress(ZeroDivisionError):
        m.setattr(scan._Scan, "check_usable", lambda self: 1 // 0)
        scanned(root, tmp_path / "failed", tokenizer, monkeypatch, kept)
    assert len(kept.read_bytes().splitlines()) == N
    return root, opened, whole, kept


@pytest.mark.parametrize("at", [0, 1, 40, -1])
def test_damaged_lines_are_looked_at_again(tmp_path, tokenizer, monkeypatch, begun, at):
    """A line with a flipped bit; a torn last line; and lines that are not lines."""
    root, opened, whole, kept = begun
    lines = kept.read_bytes().splitlines(keepends=True)
    if at == -1:
        lines[at] = lines[at][:50]
    else:
        lines[at] = lines[at][:60] + bytes([lines[at][60] ^ 4]) + lines[at][61:]
    kept.write_bytes(b"\n\xff\0{}\n" + b"".join(lines))
    again, bytes_ = scanned(root, tmp_path / "again", tokenizer, monkeypatch, kept)
    assert (again, bytes_) == ([opened[at]], whole)


def test_every_cut_of_a_journal_is_survived(tmp_path, begun):
    kept = begun[3]
    data = kept.read_bytes()
    for at in range(0, len(data), 997):
        kept.write_bytes(data[:at])
        with Journal(kept) as found:
            assert len(found) == data[:at].count(b"\n")
        assert kept.read_bytes() == data[:at] or kept.read_bytes() == data[:at] + b"\n"


def test_a_recording_that_changed_meanwhile_is_looked_at_again(
    tmp_path, tokenizer, monkeypatch, begun
):
    root, opened, whole, kept = begun
    write_wav(root / "wavs/c0020.wav", sine(22050, 900))
    again, bytes_ = scanned(root, tmp_path / "again", tokenizer, monkeypatch, kept)
    assert again == ["c0020.wav"]
    assert bytes_ != whole


def test_headers_alone_do_not_stand_for_samples(tmp_path, tokenizer, monkeypatch, begun):
    root, opened, whole, kept = begun
    kept.unlink()
    with monkeypatch.context() as m, contextlib.suppress(ZeroDivisionError):
        m.setattr(scan._Scan, "check_usable", lambda self: 1 // 0)
        m.setattr(scan, "DEEP_FILES", 10)
        m.setattr(scan, "SAMPLED_FILES", 6)
        scanned(root, tmp_path / "few", tokenizer, monkeypatch, kept)
    again, bytes_ = scanned(root, tmp_path / "again", tokenizer, monkeypatch, kept)
    # Every tenth was decoded; about the one that is not a recording there is no more to know.
    assert again == [name for i, name in enumerate(opened) if i % 10]
    assert bytes_ == whole


def test_without_a_place_to_write_a_scan_is_a_scan(tmp_path, tokenizer, monkeypatch, caplog):
    root = corpus(tmp_path / "c")
    (tmp_path / "file").write_text("no folder")
    _, whole = scanned(root, tmp_path / "whole", tokenizer, monkeypatch)
    there = scanned(root, tmp_path / "a", tokenizer, monkeypatch, tmp_path / "file/journal")
    assert there[1] == whole
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    assert scanned(root, tmp_path / "b", tokenizer, monkeypatch, tmp_path / "link")[1] == whole
    assert not (tmp_path / "elsewhere").exists()
    full = monkeypatch.context()
    with full as m:
        m.setattr(journal.os, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
        assert scanned(root, tmp_path / "d", tokenizer, monkeypatch, tmp_path / "j")[1] == whole


def test_the_command_keeps_it_among_the_users_caches(tmp_path, monkeypatch, capsys):
    root, caches = corpus(tmp_path / "c"), tmp_path / "caches"
    monkeypatch.setenv("XDG_CACHE_HOME", str(caches))
    seen, examine = [], headers._examine

    def counted(path, *args):
        seen.append(path)
        if len(seen) == N:
            raise KeyboardInterrupt
        return examine(path, *args)

    monkeypatch.setattr(headers, "_examine", counted)
    monkeypatch.setattr(scan, "_CHUNK", CHUNK)
    command = ["scan", f"data.train={root}", "model.size=tiny", "data.scan_threads=1"]
    with contextlib.suppress(KeyboardInterrupt):
        launch.main(command)
    kept = place_of([root])
    assert kept.parent == caches / "xtts-trainer"
    assert len(kept.read_bytes().splitlines()) == N - CHUNK
    assert launch.main(command) == 0
    assert len(seen) == N + CHUNK
    assert not kept.exists()
    assert place_of([tmp_path / "d"]) != kept
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert place_of([root]) is None
    capsys.readouterr()
