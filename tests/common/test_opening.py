"""Recordings opened by several threads at once: nobody waits for another, and every failure has its
own reason.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import soundfile

from common.audio.errors import DecodeError
from common.audio.reading import Opening, open_audio
from tests.support.corpora import sine, write_wav

MOST_S = 20.0


class Library:
    """libsndfile; `before(path)` is called ahead of each file's opening, `inside` at a time."""

    def __init__(self, before):
        self._own, self._before, self._lock, self.inside = soundfile._snd, before, None, 0
        self._lock = threading.Lock()

    def __getattr__(self, name):
        return getattr(self._own, name)

    def sf_open(self, path, mode, info):
        with self._lock:
            self.inside += 1
        try:
            self._before(path.decode())
            return self._own.sf_open(path, mode, info)
        finally:
            with self._lock:
                self.inside -= 1


def reason(path):
    """Why it cannot be opened; None if it can."""
    try:
        open_audio(path).close()
    except DecodeError as e:
        return e.reason
    return None


@pytest.fixture
def good(tmp_path):
    return write_wav(tmp_path / "good.wav", sine(2000))


def test_two_threads_are_in_libsndfile_at_once(good, monkeypatch):
    together = threading.Barrier(2)
    monkeypatch.setattr(soundfile, "_snd", Library(lambda path: together.wait(MOST_S)))
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(reason, [good, good])) == [None, None]


def test_who_failed_asks_for_the_reason_alone(tmp_path, good, monkeypatch):
    """While another thread is slow to open, the second attempt waits for it."""
    bad = tmp_path / "bad.wav"
    bad.write_bytes(b"RIFF" + bytes(4) + b"nothing of the kind")
    want = reason(bad)
    slow_is_in, tried, attempts = threading.Event(), threading.Event(), []

    def before(path):
        if path == str(good):
            slow_is_in.set()
            assert tried.wait(MOST_S)
        else:
            attempts.append(library.inside)
            tried.set()

    library = Library(before)
    monkeypatch.setattr(soundfile, "_snd", library)
    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(reason, good)
        assert slow_is_in.wait(MOST_S)
        assert (reason(bad), slow.result(MOST_S)) == (want, None)
    assert attempts == [2, 1]


def test_reasons_stay_with_their_files(tmp_path, good):
    """Two kinds of failure among good files, by four threads: what one thread alone is told."""
    files = [good] * 6
    for i, data in enumerate((b"RIFF\4\0\0\0WAVE", b"OggS" + bytes(60), b"fLaC" + bytes(60))):
        files.append(tmp_path / f"{i}.wav")
        files[-1].write_bytes(data)
    want = [reason(f) for f in files]
    assert len(set(want)) > 2
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(reason, files * 40)) == want * 40


class Interrupted(threading.Condition):
    """Instead of a wait: what a signal's handler raises meanwhile."""

    def wait_for(self, ready, timeout=None):
        if not ready():
            raise KeyboardInterrupt
        return True


def test_who_is_interrupted_before_it_is_alone_holds_up_nobody():
    opening = Opening()
    opening._changed = Interrupted()
    with opening:
        with pytest.raises(KeyboardInterrupt), opening.alone():
            pass
        with opening:
            pass
