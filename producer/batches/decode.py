"""Audio files → float32 mono at 22 050 Hz, checked, in a bounded pool of threads.

libsndfile reads WAV, FLAC, MP3, OGG Vorbis and Opus by content, whatever the file is called, and without ffmpeg. It hands NaN, Inf
and peaks of 1e30 through as they are, so every sample is looked at here before a network sees it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import soundfile
import soxr

from common.system.errors import Stopped
from common.system.stopwatch import Stopwatch

log = logging.getLogger(__name__)

SAMPLE_RATE = 22050
MIN_RATE, MAX_RATE = 4000, 384000  # outside: the header lies
MAX_PEAK = 2.0**31  # 32-bit integers stored as floats still scale to speech; above that the data are garbage
MIN_MEAN = 5e-4  # mean magnitude after scaling to a peak of 1; below: a few spikes drown the speech (speech has 0.02 to 0.1)
CLIPPED = 0.99  # of full scale
# Seeking is exact to the sample, and no sample can exceed 1: a part of such a file equals that part of the whole.
_EXACT_SUBTYPES = ("PCM_", "ALAC_", "ULAW", "ALAW")
_PROBE = 997  # every so many samples are looked at first for one that is not 0
_MARGIN = 64  # blocks of the reduced rate ratio read around a part, so that the resampler's filter (< 1500 samples) sees its neighbours


CLOSED = "cannot be opened"  # the kind of an error that may be the place's, not the file's


class DecodeError(Exception):
    """A file that cannot be used. `kind` is the short form of `reason`."""

    def __init__(self, path: str | os.PathLike, reason: str, kind: str | None = None):
        super().__init__(f"{path}: {reason}")
        self.path = str(path)
        self.reason = reason
        self.kind = kind or reason


@dataclass(frozen=True)
class Level:
    """What the samples of a whole file look like. `clipped` is the share of samples at full scale."""

    peak: float
    clipped: float


def num_output_samples(frames: int, rate: int) -> int:
    """Samples at 22 050 Hz of `frames` samples at `rate`: ceil(frames · 22050 / rate)."""
    return -(-frames * SAMPLE_RATE // rate)


def why_unreadable(path: str | os.PathLike, error: str = "") -> DecodeError:
    """The error for a file that libsndfile refuses: its own text says "does not exist" of an empty one."""
    try:
        with open(path, "rb") as f:
            head = f.read(512).lstrip()
    except OSError as e:
        return DecodeError(path, f"{CLOSED} ({e.strerror})", CLOSED)
    if not head:
        return DecodeError(path, "empty file")
    if head.startswith(b"version https://git-lfs"):
        return DecodeError(path, "Git LFS pointer, not the file itself; run `git lfs pull`", "Git LFS pointer")
    if head[:1] == b"<" or head[:1] == b"{":
        return DecodeError(path, f"not audio (a web page or text: {head[:24]!r})", "not audio")
    return DecodeError(path, f"not audio ({error.rpartition(': ')[2] or 'unknown format'})", "not audio")


class _ReadOnce(soundfile.SoundFile):
    """A file that is read in one go. soundfile seeks to where each read has ended, and in FLAC seeking decodes: it does so only in files
    that say that they can be sought in. `seek` works all the same.
    """

    def seekable(self) -> bool:
        """No, to soundfile."""
        return False


def open_audio(path: str | os.PathLike) -> soundfile.SoundFile:
    """An open file with a credible header. DecodeError: unreadable, no samples, or a rate that cannot be."""
    try:
        f = _ReadOnce(os.fspath(path))
    except (soundfile.SoundFileError, OSError) as e:
        raise why_unreadable(path, str(e)) from e
    try:
        if not MIN_RATE <= f.samplerate <= MAX_RATE:
            raise DecodeError(path, f"sample rate {f.samplerate} Hz is not credible ({MIN_RATE}..{MAX_RATE})", "sample rate not credible")
        if f.frames <= 0:
            raise DecodeError(path, "no samples")
    except DecodeError:
        f.close()
        raise
    return f


def _read(f: soundfile.SoundFile, path: str | os.PathLike, start: int, frames: int, silence: int = 0) -> np.ndarray:
    """float32[frames + silence, channels], the last of them 0. DecodeError: the data are damaged or end early."""
    samples = np.empty((frames + silence, f.channels), np.float32)
    samples[frames:] = 0
    try:
        if start:  # a new file stands at its start, and seeking decodes
            f.seek(start)
        got = len(f.read(out=samples[:frames]))
    except soundfile.SoundFileError as e:
        raise DecodeError(path, f"damaged audio data ({str(e) or 'libsndfile gave no reason'})", "damaged audio data") from e
    if got != frames:
        raise DecodeError(path, f"ends early: {frames} samples announced, {got} there", "ends early")
    return samples


def _silence(rate: int) -> int:
    """Samples to read behind the last one: what is resampled must not end with it, as soxr alone may give one less than ceil."""
    return 0 if rate == SAMPLE_RATE else rate // 50


def measure(path: str | os.PathLike, samples: np.ndarray) -> Level:
    """Level of a whole file's samples [n, channels]. DecodeError: non-finite, absurd or silent."""
    high, low = float(samples.max()), float(samples.min())
    peak = max(high, -low)
    if not math.isfinite(peak):
        bad = int(np.count_nonzero(~np.isfinite(samples)))
        raise DecodeError(path, f"non-finite: {bad}", "non-finite samples")
    if peak > MAX_PEAK:
        raise DecodeError(path, f"absurd level: peak {peak:.3g}", "absurd level")
    if peak == 0:
        raise _silent(path)
    if peak > 1:
        mean = float(np.abs(samples).mean(dtype=np.float64))
        if mean < MIN_MEAN * peak:
            raise DecodeError(path, f"absurd level: peak {peak:.3g} over a signal of {mean:.3g} on average", "absurd level")
    full = np.count_nonzero(np.abs(samples) >= CLIPPED) if CLIPPED <= peak <= 1 else 0
    return Level(peak, full / samples.size)


def _silent(path: str | os.PathLike) -> DecodeError:
    return DecodeError(path, "silent: every sample is 0", "silent")


def check_levels(path: str | os.PathLike) -> Level:
    """Read a whole file and measure it. DecodeError: what `decode` would raise."""
    with open_audio(path) as f:
        return measure(path, _read(f, path, 0, f.frames))


class _Timing(threading.local):
    """Each thread's stopwatch."""

    def __init__(self):
        self.watch = Stopwatch()


_timing = _Timing()


def _mono(samples: np.ndarray) -> np.ndarray:
    return samples[:, 0] if samples.shape[1] == 1 else samples.mean(1, dtype=np.float32)


def _resample(mono: np.ndarray, rate: int, num_samples: int) -> np.ndarray:
    """The first `num_samples` at 22 050 Hz, in [-1, 1], of samples within [-1, 1] that end with `_silence(rate)`."""
    if rate == SAMPLE_RATE:
        return mono[:num_samples]
    with _timing.watch.part("resample"):
        mono = soxr.resample(mono, rate, SAMPLE_RATE)
    return np.clip(mono[:num_samples], -1.0, 1.0)  # the filter overshoots


@functools.lru_cache(maxsize=4096)
def _warn_once(path: str, message: str) -> None:
    log.warning("%s: %s", path, message)


def _whole(f: soundfile.SoundFile, path: str | os.PathLike) -> np.ndarray:
    samples = _read(f, path, 0, f.frames, _silence(f.samplerate))
    if f.subtype.startswith(_EXACT_SUBTYPES):  # they hold no NaN, and nothing beyond 1
        if not (samples[::_PROBE].any() or samples.any()):
            raise _silent(path)
        return _resample(_mono(samples), f.samplerate, num_output_samples(f.frames, f.samplerate))
    level = measure(path, samples[: f.frames])
    if level.peak > 1:
        samples = samples / np.float32(level.peak)
        if level.peak > 1.25:  # lossy codecs overshoot a little; that is no news
            _warn_once(str(path), f"peak {level.peak:.3g}, scaled to 1")
    return _resample(_mono(samples), f.samplerate, num_output_samples(f.frames, f.samplerate))


def decode(
    path: str | os.PathLike,
    start: int = 0,
    num_samples: int | None = None,
    *,
    source_rate: int | None = None,
    source_frames: int | None = None,
) -> np.ndarray:
    """A recording, or a part of it, as float32 mono at 22 050 Hz within [-1, 1]: mean of the channels, resampled by soxr.

    Args:
        path: WAV, FLAC, MP3, OGG Vorbis or Opus.
        start: first sample wanted, counted at 22 050 Hz.
        num_samples: how many; None: to the end. The whole has exactly ceil(frames · 22050 / rate).
        source_rate: rate that the manifest recorded; another one is an error.
        source_frames: length that the manifest recorded; another one is an error.

    Parts of PCM and FLAC files are read without the rest of the file. They equal that part of the whole to the bit at 22 050 Hz, and
    to the resampler's rounding at other rates.

    Raises:
        DecodeError: unreadable, changed since the scan, damaged, non-finite, silent, or the part lies outside.
    """
    with open_audio(path) as f:
        if (source_rate or f.samplerate, source_frames or f.frames) != (f.samplerate, f.frames):
            was, now = f"{source_frames} samples at {source_rate} Hz", f"{f.frames} at {f.samplerate}"
            raise DecodeError(path, f"changed since the scan: {was} then, {now} now; scan again", "changed since the scan")
        total = num_output_samples(f.frames, f.samplerate)
        end = total if num_samples is None else start + num_samples
        if not 0 <= start < end <= total:
            raise DecodeError(path, f"samples {start}..{end} of {total} asked for", "part outside the file")
        if (start, end) == (0, total) or not f.subtype.startswith(_EXACT_SUBTYPES):
            return np.ascontiguousarray(_whole(f, path)[start:end])
        return _part(f, path, start, end)


def _part(f: soundfile.SoundFile, path: str | os.PathLike, start: int, end: int) -> np.ndarray:
    """Samples start..end of a file that allows exact seeking; reads whole periods of the rate ratio, so that phases agree."""
    if f.samplerate == SAMPLE_RATE:
        return np.ascontiguousarray(_mono(_read(f, path, start, end - start)))
    g = math.gcd(f.samplerate, SAMPLE_RATE)
    block_in, block_out = f.samplerate // g, SAMPLE_RATE // g
    margin = max(_MARGIN, -(-1500 // block_in))
    first = max(0, start // block_out - margin)
    last = -(-end // block_out) + margin
    frames = min(f.frames, last * block_in) - first * block_in
    mono = _mono(_read(f, path, first * block_in, frames, _silence(f.samplerate)))
    offset = start - first * block_out
    return np.ascontiguousarray(_resample(mono, f.samplerate, offset + end - start)[offset:])


class Decoding(Future):
    """A clip being decoded. `spent_s`, once done: seconds of the thread by part, `decode` without `resample`."""

    spent_s: dict[str, float] = {}


class DecodePool:
    """Threads that decode. At most `capacity` files wait for a thread; how many results lie about is for their owner to bound.

    Threads are daemons: a read that hangs on a dead network disk cannot keep the process from leaving.
    """

    def __init__(self, threads: int, capacity: int | None = None, should_stop: Callable[[], bool] = lambda: False):
        self._should_stop = should_stop
        self._work: queue.Queue = queue.Queue(capacity or 4 * threads)
        self.num_threads = threads
        self._threads = [threading.Thread(target=self._run, name=f"decode-{i}", daemon=True) for i in range(threads)]
        for t in self._threads:
            t.start()

    def submit(self, path: str | os.PathLike, *args, timeout_s: float = 60.0, **kwargs) -> Decoding:
        """`decode(path, …)` in a thread; the future gives its array or its DecodeError.

        Raises:
            Stopped: should_stop() became true while the queue was full.
            TimeoutError: the queue stayed full for `timeout_s`; the disk or all threads hang.
        """
        future = Decoding()
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._work.put((future, path, args, kwargs), timeout=0.1)
                return future
            except queue.Full:
                if self._should_stop():
                    raise Stopped("stopped while waiting for a decode thread") from None
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no decode thread was free for {timeout_s:.0f} s, next is {path}; does the disk answer?") from None

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            future, path, args, kwargs = item
            if not future.set_running_or_notify_cancel():
                continue
            watch = _timing.watch = Stopwatch()
            result, error = None, None
            try:
                with watch.part("decode"):
                    result = decode(path, *args, **kwargs)
            except BaseException as e:  # noqa: BLE001 - a thread's edge: the future's owner gets it, or would wait for ever
                error = e
            watch.add("decode", -watch.spent_s.get("resample", 0.0))
            future.spent_s = watch.take()
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
            del result, error, future, item  # else the last clip would stay in memory until the next one comes

    def close(self, timeout_s: float = 2.0) -> None:
        """Cancel what waits and end the threads; one that hangs in a read is left behind."""
        while True:
            try:
                item = self._work.get_nowait()
            except queue.Empty:
                break
            if item is not None:
                item[0].cancel()
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(queue.Full):
            for _ in self._threads:
                self._work.put(None, timeout=max(0.01, deadline - time.monotonic()))
        for t in self._threads:
            t.join(max(0.01, deadline - time.monotonic()))

    def __enter__(self) -> DecodePool:
        return self

    def __exit__(self, *_) -> None:
        self.close()
