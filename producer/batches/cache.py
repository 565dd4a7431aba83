"""The DVAE codes of clips, kept on disk: they depend on the clip alone, so from the second epoch on
only the conditioning clip is decoded.

One file per feature hash, RUN/cache/codes-<hash>/codes.bin, with a slot of fixed size for each
utterance: its place follows from the id, so there is no index to load or to get out of step (slots
nobody wrote are holes and take no disk). A slot is the checksum of (utterance, codes) and the
codes; it is written by one `pwrite`, by any number of producers at once, and killed at any point.
Whatever does not match its checksum (never written, half written, of another version, lost in a
power cut) counts as absent and is computed again. The file's size and time of change are in the
checksum, so a clip that was replaced is computed again, too.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import xxhash

log = logging.getLogger(__name__)

_FORMAT = 1
_SUM_BYTES = 8
_CODE = np.dtype("<u2")


def stamp_of(path: str | os.PathLike) -> str:
    """Size and time of change of a recording; "" where it is not there."""
    try:
        info = os.stat(path)
    except OSError:
        return ""
    return f"{info.st_size}:{info.st_mtime_ns}"


class CodesCache:
    """Codes by utterance: by its id, or by one number for each set of codes that it has.

    Args:
        folder: created if missing.
        max_codes: the longest utterance's; it fixes the size of a slot, so all who share a folder
            must agree on it.
        key: what the codes depend on besides the clip (the feature hash); another key finds
            nothing.

    A folder that cannot be written to (full, read-only) is reported once; what it holds is still
    read.
    """

    def __init__(self, folder: str | os.PathLike, max_codes: int, key: str):
        self._max_codes = max_codes
        self._slot_bytes = _SUM_BYTES + _CODE.itemsize * max_codes
        self._salt = f"{_FORMAT}:{max_codes}:{key}:".encode()
        self._path = Path(folder) / "codes.bin"
        self._writes = True
        self.hits = self.misses = 0
        self._file = self._open()

    def _open(self) -> int | None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as e:
            self._cannot_write(e)
        try:
            return os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None

    def _cannot_write(self, error: OSError) -> None:
        self._writes = False
        log.warning(
            "codes are not kept: cannot write %s (%s); every epoch computes them again",
            self._path,
            error.strerror or error,
        )

    def _sum(self, utterance: int, codes: bytes, stamp: str) -> bytes:
        return xxhash.xxh3_64_digest(
            self._salt + utterance.to_bytes(8, "little") + stamp.encode() + b":" + codes
        )

    def get(self, utterance: int, n: int, stamp: str = "") -> np.ndarray | None:
        """int32[n], the codes as they were put with the same `stamp` (see `stamp_of`); None:
        absent.
        """
        codes = None
        size = _SUM_BYTES + _CODE.itemsize * n
        if self._file is not None and n <= self._max_codes:
            slot = self._read(size, utterance * self._slot_bytes)
            if len(slot) == size and slot[:_SUM_BYTES] == self._sum(
                utterance, slot[_SUM_BYTES:], stamp
            ):
                codes = np.frombuffer(slot, _CODE, offset=_SUM_BYTES).astype(np.int32)
        self.hits += codes is not None
        self.misses += codes is None
        return codes

    def _read(self, size: int, offset: int) -> bytes:
        try:
            return os.pread(self._file, size, offset)
        except OSError as e:
            log.warning(
                "%s cannot be read (%s): codes are computed again", self._path, e.strerror or e
            )
            self.close()
            return b""

    def put(self, utterance: int, codes: np.ndarray, stamp: str = "") -> None:
        """Keep int[n].

        ValueError: more than `max_codes`, or a code that does not fit into 16 bits.
        """
        if codes.ndim != 1 or len(codes) > self._max_codes:
            raise ValueError(
                f"utterance {utterance}: codes of shape {codes.shape}, at most {self._max_codes}"
                " fit into a slot"
            )
        if len(codes) and not 0 <= int(codes.min()) <= int(codes.max()) < 1 << 16:
            raise ValueError(
                f"utterance {utterance}: codes from {codes.min()} to {codes.max()} do not fit into"
                " 16 bits"
            )
        if not self._writes or self._file is None:
            return
        body = codes.astype(_CODE).tobytes()
        try:
            os.pwrite(
                self._file, self._sum(utterance, body, stamp) + body, utterance * self._slot_bytes
            )
        except OSError as e:
            self._cannot_write(e)

    def close(self) -> None:
        """Close the file; from now on nothing is found."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
