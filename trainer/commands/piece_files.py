"""The finished pieces of a long text, on disk beside the file that they become: they stay if the
work stops, and the same command goes on from them.

`OUT.wav.pieces/0001-<digest>.wav`: a WAV per piece, to listen to at once. The digest covers all
that decides the sound (text, voice, weights, seed, options), so a piece is used again only if it
would sound the same.
"""

from __future__ import annotations

import os
import re
import wave
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from common.system.errors import BadInput
from common.system.files import digest, fsync, write_atomically
from trainer.report.tensorboard import wav_bytes

_OURS = re.compile(r"\d{4,}-[0-9a-f]{16}\.wav|\.\d{4,}-[0-9a-f]{16}\.wav\.\d+|\.joined")


class PieceFiles:
    """Pieces of one text.

    Args:
        out: the file that they become.
        sample_rate: the pieces' rate.
        decides: what decides the sound of every piece, JSON-able.
    """

    def __init__(self, out: Path, sample_rate: int, decides: dict):
        self.out, self.sample_rate = out, sample_rate
        self.folder = out.with_name(f"{out.name}.pieces")
        self._decides = {**decides, "sample_rate": sample_rate}

    def path(self, number: int, ids: list[int]) -> Path:
        """A piece's file name, from its number (from 0) and its tokens."""
        name = digest({**self._decides, "number": number, "ids": ids})[:16]
        return self.folder / f"{number + 1:04d}-{name}.wav"

    def samples(self, path: Path) -> int | None:
        """A finished piece's samples; None: it is not there, or not a complete WAV of ours."""
        try:
            with wave.open(str(path), "rb") as f:
                whole = os.path.getsize(path) >= f.getnframes() * f.getsampwidth()
                ours = (f.getframerate(), f.getnchannels(), f.getsampwidth())
                return f.getnframes() if whole and ours == (self.sample_rate, 1, 2) else None
        except (OSError, EOFError, wave.Error):
            return None

    def keep(self, path: Path, wav: np.ndarray) -> None:
        """Write a finished piece. BadInput: its folder cannot be made."""
        try:
            self.folder.mkdir(exist_ok=True)
        except FileExistsError:
            raise BadInput(
                f"{self.folder} is a file: finished pieces are kept in a folder of that name; move"
                " it, or name another --out"
            ) from None
        write_atomically(path, wav_bytes(wav, self.sample_rate))

    def join(self, paths: Iterable[Path], pauses: Iterable[float]) -> float:
        """Write `out` from its pieces and seconds of silence after each, and delete the pieces.
        Returns the total seconds.

        One piece is in memory at a time.
        """
        joined, total = self.folder / ".joined", 0
        with open(joined, "wb") as raw:
            with wave.open(raw, "wb") as f:
                f.setnchannels(1)
                f.setsampwidth(2)
                f.setframerate(self.sample_rate)
                for path, pause in zip(paths, pauses, strict=True):
                    with wave.open(str(path), "rb") as piece:
                        f.writeframes(piece.readframes(piece.getnframes()))
                    f.writeframes(bytes(2 * round(pause * self.sample_rate)))
                total = f.getnframes()
            raw.flush()
            os.fsync(raw.fileno())
        os.replace(joined, self.out)
        fsync(self.out.absolute().parent)
        self.remove()
        return total / self.sample_rate

    def remove(self) -> None:
        """Delete the pieces, including other texts', and the folder unless it contains anything
        else.
        """
        if not self.folder.is_dir():
            return
        others = False
        for path in self.folder.iterdir():
            if _OURS.fullmatch(path.name):
                path.unlink(missing_ok=True)
            else:
                others = True
        if not others:
            self.folder.rmdir()
