"""Open an audio file: WAV, FLAC, MP3, Ogg, Opus and more by libsndfile, the rest by ffmpeg.

The content decides, not the name.

A header's claims cost nothing until they are found credible: an impossible rate or length is
refused before any memory is allocated.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import soundfile

from common.audio import containers, ffmpeg, flac, mp3
from common.audio.errors import CLOSED, CUT, DecodeError
from common.system.files import why_irregular

MIN_RATE, MAX_RATE = 4000, 384000  # outside: the header lies
MAX_VALUES = 1 << 25  # samples of all channels that are read at once: 128 MiB as floats
_UNKNOWN = (
    1 << 48
)  # frames from here on: libsndfile's word for a stream that does not say how long it is
# Seeking is exact to the sample, and no sample can exceed 1: a part of such a file equals that part
# of the whole.
_EXACT_SUBTYPES = ("PCM_", "ALAC_", "ULAW", "ALAW")


def why_unreadable(path: str | os.PathLike, error: str = "") -> DecodeError:
    """The error for a file that libsndfile refuses: its own message for an empty file is "does not
    exist".
    """
    try:
        with open(path, "rb") as f:
            head = f.read(512).lstrip()
    except OSError as e:
        return DecodeError(path, f"{CLOSED} ({e.strerror})", CLOSED)
    if not head:
        return DecodeError(path, "empty file")
    if head.startswith(b"version https://git-lfs"):
        reason = "Git LFS pointer, not the file itself; run `git lfs pull`"
        return DecodeError(path, reason, "Git LFS pointer")
    if head[:1] == b"<" or head[:1] == b"{":
        return DecodeError(path, f"not audio (a web page or text: {head[:24]!r})", "not audio")
    reason = error.rpartition(": ")[2] or "unknown format"
    return DecodeError(path, f"not audio ({reason})", "not audio")


class Opening:
    """Who is opening a file: any number of threads at once, or one `alone`.

    libsndfile keeps the reason of a failure in one place for the whole process, where another
    thread's opening wipes it out.
    """

    def __init__(self):
        self._changed = threading.Condition()
        self._inside, self._alone = 0, 0  # threads; the one that is to be alone

    def __enter__(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._alone in (0, threading.get_ident()))
            self._inside += 1

    def __exit__(self, *error) -> None:
        with self._changed:
            self._inside -= 1
            if self._alone:
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else opens anything meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: not self._alone)
            self._alone = threading.get_ident()
        try:
            with self._changed:
                self._changed.wait_for(lambda: not self._inside)
            yield
        finally:
            with self._changed:
                self._alone = 0
                self._changed.notify_all()


OPENING = Opening()


class _ReadOnce(soundfile.SoundFile):
    """A file that is read in one go.

    soundfile seeks to the end of each read in files that call themselves seekable, and in FLAC
    seeking means decoding. This one does not call itself seekable, but `seek` still works.
    """

    # soundfile's own lock lets one thread open at a time: threads that decode wait for each other
    _sf_error_lock = OPENING

    def seekable(self) -> bool:
        """False, so that soundfile does not seek by itself."""
        return False


class _Converted(_ReadOnce):
    """A file converted by ffmpeg."""


def _sound(file: str | bytes, kind: type[_ReadOnce] = _ReadOnce) -> _ReadOnce:
    """A file, or the bytes of one, as libsndfile opens it.

    soundfile.SoundFileError with the reason, OSError.
    """

    def attempt() -> _ReadOnce:
        return kind(io.BytesIO(file) if isinstance(file, bytes) else file)

    try:
        return attempt()
    except soundfile.SoundFileError:
        with OPENING.alone():
            return attempt()


def is_converted(f: soundfile.SoundFile) -> bool:
    """Whether the headers are those of ffmpeg's output, not the file's own."""
    return isinstance(f, _Converted)


def open_audio(path: str | os.PathLike) -> soundfile.SoundFile:
    """An open file with a credible header.

    DecodeError: unreadable, no samples, or a rate or length that cannot be.
    """
    f = _open(os.fspath(path))
    try:
        if not MIN_RATE <= f.samplerate <= MAX_RATE:
            reason = f"sample rate {f.samplerate} Hz is not credible ({MIN_RATE}..{MAX_RATE})"
            raise DecodeError(path, reason, "sample rate not credible")
        if f.frames <= 0:  # of an Ogg file that is cut, too
            if not is_converted(f):
                containers.check_whole(path, os.path.getsize(path), f.format)
            raise DecodeError(path, "no samples")
    except DecodeError:
        f.close()
        raise
    return f


def _open(path: str) -> soundfile.SoundFile:
    try:
        irregular = why_irregular(os.stat(path).st_mode)
    except (OSError, ValueError):  # opening it gives the better message
        irregular = ""
    if irregular:
        raise DecodeError(path, irregular, "not a file")
    try:
        f = _sound(path)
    except (soundfile.SoundFileError, OSError) as e:
        return _open_otherwise(path, str(e))
    if f.format == "MP3" or f.frames >= _UNKNOWN:
        return _with_length(path, f)
    return f


def _with_length(path: str, f: soundfile.SoundFile) -> soundfile.SoundFile:
    """A file whose header does not say its length, with the length of its frames."""
    complete = (
        mp3.with_length if f.format == "MP3" else flac.with_length if f.format == "FLAC" else None
    )
    data = None
    try:
        if complete is not None:
            with open(path, "rb") as raw:
                data = complete(raw, os.fstat(raw.fileno()).st_size)
        if data is None and f.frames < _UNKNOWN:
            return f
        f.close()
        if data is None:
            raise DecodeError(
                path, f"{CUT}: neither its header nor its last frame says how long it is", CUT
            )
        return _sound(data)
    except OSError as e:
        f.close()
        raise DecodeError(path, f"{CLOSED} ({e.strerror})", CLOSED) from e
    except soundfile.SoundFileError as e:
        raise why_unreadable(path, str(e)) from e


def _open_otherwise(path: str, error: str) -> soundfile.SoundFile:
    """A file that libsndfile refuses, through ffmpeg if that knows its format.

    DecodeError otherwise.
    """
    try:
        with open(path, "rb") as raw:
            name, size = ffmpeg.kind_of(raw.read(16)), os.fstat(raw.fileno()).st_size
    except OSError as e:
        raise DecodeError(path, f"{CLOSED} ({e.strerror})", CLOSED) from e
    containers.check_whole(path, size, containers.container_of(path))
    if name is None:
        raise why_unreadable(path, error)
    try:
        return _sound(ffmpeg.convert(path, name), _Converted)
    except soundfile.SoundFileError as e:
        raise DecodeError(
            path, f"damaged {name}: ffmpeg gave no sound", "damaged audio data"
        ) from e


def is_exact(f: soundfile.SoundFile) -> bool:
    """Whether a part of it can be read without the rest."""
    return f.subtype.startswith(_EXACT_SUBTYPES)


def read(
    f: soundfile.SoundFile, path: str | os.PathLike, start: int, frames: int, silence: int = 0
) -> np.ndarray:
    """float32[frames + silence, channels], the last of them 0.

    DecodeError: the data are damaged or end early, or are too many.
    """
    if (frames + silence) * f.channels > MAX_VALUES:
        seconds = frames / f.samplerate
        reason = f"{seconds:.0f} s of {f.channels} channels are too much to read at once"
        raise DecodeError(path, reason, "too large")
    samples = np.empty((frames + silence, f.channels), np.float32)
    samples[frames:] = 0
    try:
        if start:  # a newly opened file is at its start, and seeking decodes
            f.seek(start)
        got = len(f.read(out=samples[:frames]))
    except soundfile.SoundFileError as e:
        reason = f"damaged audio data ({str(e) or 'libsndfile gave no reason'})"
        raise DecodeError(path, reason, "damaged audio data") from e
    if got != frames:
        raise DecodeError(path, f"{CUT}: {frames} samples announced, {got} there", CUT)
    return samples


def mono(samples: np.ndarray, channel: int | None = None) -> np.ndarray:
    """float32[n]: the mean of float32[n, channels], or one of them."""
    if channel is not None:
        return np.ascontiguousarray(samples[:, channel])
    if samples.shape[1] == 2:  # the same to the bit, in a tenth of the time
        return (samples[:, 0] + samples[:, 1]) * np.float32(0.5)
    return samples[:, 0] if samples.shape[1] == 1 else samples.mean(1, dtype=np.float32)
