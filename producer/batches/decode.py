"""Audio files → float32 mono at 22 050 Hz, checked, in a bounded pool of threads.

`common/audio/reading.py` and `levels.py` decide what can be read and which samples can be used, in
the same way for the scan, for training and for reference clips.
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

import numpy as np
import soundfile
import soxr

from common.audio.errors import DecodeError
from common.audio.levels import louder_channel, measure, require_sound
from common.audio.reading import is_exact, mono, open_audio, read
from common.audio.treatment import Portion
from common.system import trace
from common.system.errors import Stopped
from common.system.stopwatch import Stopwatch

log = logging.getLogger(__name__)

SAMPLE_RATE = 22050
# blocks of the reduced rate ratio read around a part, so that the resampler's filter (< 1500
# samples) sees its neighbours
_MARGIN = 64


def num_output_samples(frames: int, rate: int) -> int:
    """Samples at 22 050 Hz of `frames` samples at `rate`: ceil(frames · 22050 / rate)."""
    return -(-frames * SAMPLE_RATE // rate)


def _silence(rate: int) -> int:
    """Samples to read beyond the last one: soxr may give one less than ceil if its input ends
    there.
    """
    return 0 if rate == SAMPLE_RATE else rate // 50


class _Timing(threading.local):
    """Each thread's stopwatch."""

    def __init__(self):
        self.watch = Stopwatch()


_timing = _Timing()


def _resample(wave: np.ndarray, rate: int, num_samples: int) -> np.ndarray:
    """The first `num_samples` at 22 050 Hz, in [-1, 1], of samples within [-1, 1] that end with
    `_silence(rate)`.
    """
    if rate == SAMPLE_RATE:
        return wave[:num_samples]
    with _timing.watch.part("resample"):
        wave = soxr.resample(wave, rate, SAMPLE_RATE)
    return np.clip(wave[:num_samples], -1.0, 1.0)  # the filter overshoots


@functools.lru_cache(maxsize=4096)
def _say_once(level: int, path: str, message: str) -> None:
    log.log(level, "%s: %s", path, message)


def _whole(f: soundfile.SoundFile, path: str | os.PathLike, used: Portion) -> np.ndarray:
    samples = read(f, path, 0, f.frames, _silence(f.samplerate))
    sound = samples[: f.frames]
    if is_exact(f):  # they hold no NaN, and nothing beyond 1
        require_sound(path, sound, f.samplerate)
        channel = louder_channel(sound)
    else:
        level = measure(path, sound, f.samplerate)
        channel = level.channel
        if level.peak > 1:
            samples = samples / np.float32(level.peak)
            if level.peak > 1.25:  # lossy codecs overshoot a little; that is not worth a note
                _say_once(logging.WARNING, str(path), f"peak {level.peak:.3g}, scaled to 1")
    if channel is not None:
        # For the log: the scan has warned of it if it looked at the samples.
        _say_once(
            logging.INFO,
            str(path),
            f"its channels cancel each other; channel {channel + 1} is taken alone",
        )
    wave = mono(samples, channel)
    if used.frames < f.frames:  # judged as a whole, used in part: nothing is left of the rest
        wave = wave[used.first : used.first + used.frames + _silence(f.samplerate)]
        wave[used.frames :] = 0
    num_samples = num_output_samples(used.frames, f.samplerate)
    return _resample(used.scaled(wave), f.samplerate, num_samples)


@functools.lru_cache(maxsize=1 << 16)
def _channel_of(path: str, size: int, mtime_ns: int) -> int | None:
    """The channel to take alone. A part cannot tell, so the whole file is read, once."""
    with open_audio(path) as f:
        return louder_channel(read(f, path, 0, f.frames))


def decode(
    path: str | os.PathLike,
    start: int = 0,
    num_samples: int | None = None,
    *,
    source_rate: int | None = None,
    source_frames: int | None = None,
    portion: Portion | None = None,
) -> np.ndarray:
    """A recording, or a part of it, as float32 mono at 22 050 Hz within [-1, 1]: mean of the
    channels, resampled by soxr.

    Args:
        path: WAV, FLAC, MP3, Ogg Vorbis or Opus, what else libsndfile reads, or what ffmpeg does.
        start: first sample wanted, counted at 22 050 Hz.
        num_samples: how many; None: to the end. The whole file has exactly ceil(frames · 22050 /
            rate).
        source_rate: the rate in the manifest; another one is an error.
        source_frames: the length in the manifest; another one is an error.
        portion: what of the recording is used, and how loud; everything said here of a recording
            but `source_frames` applies to this. None: all, as it is.

    Parts of PCM and FLAC files are read without the rest of the file. They equal that part of the
    whole to the bit at 22 050 Hz, and to the resampler's rounding at other rates.

    Raises:
        DecodeError: unreadable, changed since the scan, damaged, non-finite, silent, or the part
            lies outside.
    """
    with open_audio(path) as f:
        if (source_rate or f.samplerate, source_frames or f.frames) != (f.samplerate, f.frames):
            was, now = (
                f"{source_frames} samples at {source_rate} Hz",
                f"{f.frames} at {f.samplerate}",
            )
            raise DecodeError(
                path,
                f"changed since the scan: {was} then, {now} now; scan again",
                "changed since the scan",
            )
        used = Portion(0, f.frames, 1.0) if portion is None else portion
        if used.first + used.frames > f.frames:
            raise DecodeError(
                path, f"changed since the scan: {f.frames} samples now", "changed since the scan"
            )
        total = num_output_samples(used.frames, f.samplerate)
        end = total if num_samples is None else start + num_samples
        if not 0 <= start < end <= total:
            raise DecodeError(
                path, f"samples {start}..{end} of {total} asked for", "part outside the file"
            )
        if (start, end) == (0, total) or not is_exact(f):
            return np.ascontiguousarray(_whole(f, path, used)[start:end])
        return _part(f, path, used, start, end)


def _part(
    f: soundfile.SoundFile, path: str | os.PathLike, used: Portion, start: int, end: int
) -> np.ndarray:
    """Samples start..end of what is used of a file that allows exact seeking; reads whole periods
    of the rate ratio, so that phases agree.
    """
    channel = None
    if f.channels > 1:
        found = os.stat(path)
        channel = _channel_of(os.fspath(path), found.st_size, found.st_mtime_ns)
    if f.samplerate == SAMPLE_RATE:
        wave = mono(read(f, path, used.first + start, end - start), channel)
        return np.ascontiguousarray(used.scaled(wave))
    g = math.gcd(f.samplerate, SAMPLE_RATE)
    block_in, block_out = f.samplerate // g, SAMPLE_RATE // g
    margin = max(_MARGIN, -(-1500 // block_in))
    first = max(0, start // block_out - margin)
    last = -(-end // block_out) + margin
    frames = min(used.frames, last * block_in) - first * block_in
    at, silence = used.first + first * block_in, _silence(f.samplerate)
    wave = used.scaled(mono(read(f, path, at, frames, silence), channel))
    offset = start - first * block_out
    return np.ascontiguousarray(_resample(wave, f.samplerate, offset + end - start)[offset:])


class Decoding(Future):
    """A clip being decoded.

    `spent_s`, once done: seconds of the thread by part, `decode` without `resample`; `ended`: when
    that was, by time.perf_counter.
    """

    spent_s: dict[str, float] = {}
    ended = 0.0


class DecodePool:
    """Threads that decode.

    At most `capacity` files wait for a thread; the owner of the results bounds how many of these
    exist.

    Threads are daemons: a read that hangs on a dead network disk cannot keep the process from
    ending.
    """

    def __init__(
        self,
        threads: int,
        capacity: int | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ):
        self._should_stop = should_stop
        self._work: queue.Queue = queue.Queue(capacity or 4 * threads)
        self.num_threads = threads
        self._threads = [
            threading.Thread(target=self._run, name=f"decode-{i}", daemon=True)
            for i in range(threads)
        ]
        for t in self._threads:
            t.start()

    def submit(
        self,
        path: str | os.PathLike,
        *args,
        change: Callable[[np.ndarray], np.ndarray] | None = None,
        timeout_s: float = 60.0,
        **kwargs,
    ) -> Decoding:
        """`decode(path, …)` in a thread, then `change` of it where that is given; the future gives
        its array or its DecodeError.

        Raises:
            Stopped: should_stop() became true while the queue was full.
            TimeoutError: the queue stayed full for `timeout_s`; the disk or all threads hang.
        """
        future = Decoding()
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._work.put((future, path, change, args, kwargs), timeout=0.1)
                return future
            except queue.Full:
                if self._should_stop():
                    raise Stopped("stopped while waiting for a decode thread") from None
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"no decode thread was free for {timeout_s:.0f} s, next is {path}; does the"
                        " disk answer?"
                    ) from None

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            future, path, change, args, kwargs = item
            if not future.set_running_or_notify_cancel():
                continue
            watch = _timing.watch = Stopwatch()
            result, error, began = None, None, time.perf_counter()
            try:
                with watch.part("decode"):
                    result = decode(path, *args, **kwargs)
                    result = result if change is None else change(result)
            except BaseException as e:  # noqa: BLE001 - a thread's edge: the future's owner gets it, or would wait for ever
                error = e
            watch.add("decode", -watch.spent_s.get("resample", 0.0))
            future.spent_s, future.ended = watch.take(), time.perf_counter()
            thread = threading.current_thread().name
            trace.span(thread, os.path.basename(path), began, future.ended)
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
            del (
                result,
                error,
                future,
                item,
            )  # or the last clip would stay in memory until the next one arrives

    def close(self, timeout_s: float = 2.0) -> None:
        """Cancel what waits and end the threads; a thread that hangs in a read is left behind."""
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
