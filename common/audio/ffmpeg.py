"""Files that libsndfile cannot read (M4A, AAC, WMA, WebM and others), converted by ffmpeg where it
is installed.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import resource
import shutil
import subprocess
import tempfile
import threading

from common.audio.errors import NO_FFMPEG, DecodeError

DEADLINE_S = 60.0
MAX_BYTES = 1 << 27  # of what ffmpeg gives: 128 MiB, 12 minutes of 44.1 kHz mono as floats
_HINT = "install ffmpeg (pip install 'xtts-trainer[ffmpeg]'), or convert it to FLAC"

_PART = re.compile(
    r"^\[\S+ @ 0x[0-9a-f]+\] "
)  # which part of it speaks, at an address that changes

# (offset, bytes there) → what people call it
_SIGNATURES = (
    (4, b"ftyp", "M4A"),
    (0, b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "WMA"),
    (0, b"\x1a\x45\xdf\xa3", "WebM"),
    (0, b"#!AMR", "AMR"),
    (0, b"wvpk", "WavPack"),
    (0, b"MAC ", "Monkey's Audio"),
    (0, b"caff", "CAF"),
)


def kind_of(head: bytes) -> str | None:
    """The name of a format that ffmpeg reads and libsndfile does not, by a file's first 16 bytes;
    None: none of them.
    """
    for offset, magic, name in _SIGNATURES:
        if head[offset : offset + len(magic)] == magic:
            return name
    if (
        len(head) > 1 and head[0] == 0xFF and head[1] & 0xF6 == 0xF0
    ):  # a sync word with layer 0: ADTS
        return "AAC"
    return None


@functools.cache
def find() -> str | None:
    """The ffmpeg to use: the one on PATH, else that of the package imageio-ffmpeg; None: there is
    none.
    """
    found = shutil.which("ffmpeg")
    if found:
        return found
    try:
        import imageio_ffmpeg

        return imageio_ffmpeg.get_ffmpeg_exe()
    except (ImportError, RuntimeError):  # RuntimeError: the package is there without its program
        return None


def convert(path: str | os.PathLike, name: str, deadline_s: float = DEADLINE_S) -> bytes:
    """The first audio stream of a file as a WAV of float samples, at its own rate.

    Args:
        name: what the format is called, for errors.
        deadline_s: after so long ffmpeg is killed.

    Raises:
        DecodeError: there is no ffmpeg, it refuses the file or takes too long, or the sound is
            larger than 128 MiB.
    """
    program = find()
    if program is None:
        reason = f"{name} is read through ffmpeg, which is not installed here; {_HINT}"
        raise DecodeError(path, reason, NO_FFMPEG)
    source = ["-protocol_whitelist", "file", "-i", f"file:{os.fspath(path)}", "-map", "0:a:0"]
    sink = ["-c:a", "pcm_f32le", "-bitexact", "-protocol_whitelist", "pipe", "-f", "wav", "pipe:1"]
    command = [program, "-nostdin", "-v", "error", "-xerror", "-threads", "1"]
    command += ["-max_alloc", str(MAX_BYTES), *source, *sink]
    with tempfile.TemporaryFile() as said:
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said
        ) as process:
            # Of its own: this process may be killed before it can kill.
            limit = math.ceil(deadline_s)
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(process.pid, resource.RLIMIT_CPU, (limit, limit))
            late = threading.Event()
            timer = threading.Timer(deadline_s, lambda: (late.set(), process.kill()))
            timer.start()
            try:
                data = process.stdout.read(MAX_BYTES + 1)
                if len(data) > MAX_BYTES:
                    process.kill()
                process.wait()
            finally:
                timer.cancel()
                process.kill()
        said.seek(0)
        words = said.read(400).decode("utf-8", "replace").strip().splitlines()
    if late.is_set():
        raise DecodeError(
            path, f"{name}: ffmpeg did not finish within {deadline_s:g} s", "ffmpeg too slow"
        )
    if len(data) > MAX_BYTES:
        raise DecodeError(path, f"{name}: more than {MAX_BYTES >> 20} MiB of samples", "too large")
    if process.returncode or not data:
        why = _PART.sub("", words[0]) if words else f"exit status {process.returncode}"
        raise DecodeError(path, f"damaged {name}: ffmpeg says: {why}", "damaged audio data")
    return data
