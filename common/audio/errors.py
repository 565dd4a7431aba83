"""Errors of audio files: what is wrong, in one sentence and in short."""

from __future__ import annotations

import os

CLOSED = "cannot be opened"  # the kind of an error that may lie in the place, not in the file
NO_FFMPEG = "needs ffmpeg"  # likewise: another machine may have it
CUT = "ends early"
JOINED = "joined recordings"


class DecodeError(Exception):
    """A file that cannot be used. `kind` is the short form of `reason`."""

    def __init__(self, path: str | os.PathLike, reason: str, kind: str | None = None):
        super().__init__(f"{path}: {reason}")
        self.path = str(path)
        self.reason = reason
        self.kind = kind or reason
