"""An audio file, opened:

WAV, FLAC, MP3, Ogg, Opus and more through libsndfile, by content and not by name; the rest by
ffmpeg.

What a header claims costs nothing until it has been found credible: a rate or a length that cannot
be is refused before any memory is asked for.
"""

from __future__ import annotations

import io
import os

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
    """The error for a file that libsndfile refuses: its own text says "does not exist" of an empty
    one.
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


class _ReadOnce(soundfile.SoundFile):
    """A file that is read in one go. soundfile seeks to where each read has ended, and in FLAC
    seeking decodes: it does so only
    in files that say that they can be sought in. `seek` works all the same.
    """

    def seekable(self) -> bool:
        """No, to soundfile."""
        return False


class _Converted(_ReadOnce):
    """What ffmpeg made of a file."""


def is_converted(f: soundfile.SoundFile) -> bool:
    """Whether these are not the file's own headers but those of what ffmpeg made of it."""
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
    except (OSError, ValueError):  # which opening it says better
        irregular = ""
    if irregular:
        raise DecodeError(path, irregular, "not a file")
    try:
        f = _ReadOnce(path)
    except (soundfile.SoundFileError, OSError) as e:
        return _open_otherwise(path, str(e))
    if f.format == "MP3" or f.frames >= _UNKNOWN:
        return _with_length(path, f)
    return f


def _with_length(path: str, f: soundfile.SoundFile) -> soundfile.SoundFile:
    """A file whose header does not say how long it is, with the length that its frames have."""
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
        return _ReadOnce(io.BytesIO(data))
    except OSError as e:
        f.close()
        raise DecodeError(path, f"{CLOSED} ({e.strerror})", CLOSED) from e
    except soundfile.SoundFileError as e:
        raise why_unreadable(path, str(e)) from e


def _open_otherwise(path: str, error: str) -> soundfile.SoundFile:
    """A file that libsndfile refuses, through ffmpeg where that knows its format.

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
        return _Converted(io.BytesIO(ffmpeg.convert(path, name)))
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
        if start:  # a new file stands at its start, and seeking decodes
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
