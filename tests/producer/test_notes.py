"""What libmpg123 writes to standard error, and that it stays off the terminal."""

from __future__ import annotations

import ctypes
import os
import sys
import threading

import numpy as np
import pytest
import soundfile

import launch
from common.audio import notes
from common.audio.reading import open_audio, read
from tests.support.corpora import make_corpus

RATE = 22050
glibc = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="for the GNU C library"
)


@pytest.fixture
def noted(tmp_path):
    """An MP3 with zeros between two frames, all of whose samples are there."""
    path = tmp_path / "noted.mp3"
    noise = 0.1 * np.random.default_rng(0).standard_normal(2 * RATE).astype(np.float32)
    soundfile.write(path, noise, RATE, format="MP3")
    data = path.read_bytes()
    path.write_bytes(data[:5000] + bytes(300) + data[5000:])
    return path


def decoded(path):
    with open_audio(path) as f:
        read(f, path, 0, f.frames)


@glibc
def test_notes_are_dropped_inside_and_python_is_not(noted, capfd):
    decoded(noted)
    assert "Skipped" in capfd.readouterr().err, "this libsndfile writes no notes"
    with notes.dropped():
        decoded(noted)
        os.write(2, b"a line of Python's")
        with notes.dropped():
            decoded(noted)
        decoded(noted)
    assert capfd.readouterr().err == "a line of Python's"
    decoded(noted)
    assert "Skipped" in capfd.readouterr().err


@glibc
def test_the_last_of_several_threads_gives_the_stream_back(noted, capfd):
    inside, leave = threading.Barrier(3, timeout=60), [threading.Event() for _ in range(2)]

    def work(i):
        with notes.dropped():
            inside.wait()
            leave[i].wait(60)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    inside.wait()
    leave[0].set()
    threads[0].join(60)
    decoded(noted)
    assert capfd.readouterr().err == ""
    leave[1].set()
    threads[1].join(60)
    decoded(noted)
    assert "Skipped" in capfd.readouterr().err


def test_a_scan_says_nothing_that_names_no_file(noted, tmp_path, capfd):
    root = make_corpus(tmp_path / "c", 3)
    os.replace(noted, root / "wavs/noted.mp3")
    with open(root / "metadata.csv", "a") as f:
        f.write("noted|some words to say|some words to say\n")
    page = tmp_path / "page.html"
    assert launch.main(["scan", f"data.train={root}", "--html", str(page)]) == 0
    sys.stderr.flush()
    out, err = capfd.readouterr()
    assert err == ""
    assert "kept=4" in out
