"""PyTorch checkpoint files without PyTorch: a reader that runs no code from the file, and a writer
that torch.load accepts.

A `.pth` is a zip of uncompressed records: `data.pkl`, a pickle that describes a tree of dicts and
tensors, and one record of raw numbers per storage. The pickle is read opcode by opcode
(`unpickled.py`): a class of Coqui's (its configuration is saved beside the weights) becomes an
inert `Opaque`, and any name but those of tensors and storages ends the reading. Tensors stay in the
file until they are asked for, one at a time. What a file may cost is bounded before it is paid:
its list of records, its pickle, and each tensor by the numbers that are there. NumPy alone.
"""

from __future__ import annotations

import math
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from common.system.files import open_plain
from common.xtts.checkpoints.pickled import describe_tensors
from common.xtts.checkpoints.pth_zip import PthError, contents, damaged, records_of
from common.xtts.checkpoints.unpickled import (
    MOST_BYTES,
    PickleFault,
    RefusedName,
    Storage,
    Unpickler,
)

_CHUNK = 1 << 22
_ALIGNMENT = 64
_MOST_AXES = 16
_MOST_NUMBER = 1 << 40  # of an offset, a size or a stride
_MOST_SPREAD, _NEAR = 64, 1 << 20  # numbers that may be read for each that is used


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in an open `PthFile`. `dtype` is what `read` returns: float32 for bfloat16."""

    file: PthFile = field(repr=False)
    record: str
    stored: str  # dtype in the file
    offset: int  # in elements
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements

    @property
    def dtype(self) -> np.dtype:
        """See the class."""
        return np.dtype("<f4" if self.stored == "bfloat16" else self.stored)

    def read(self) -> np.ndarray:
        """The numbers: a new contiguous array, made from the part of the storage that this tensor
        covers.

        PthError: it repeats numbers, or they lie far apart; what is read would not be bounded by
        what is there.
        """
        return self.file._read(self)


class PthFile:
    """An open checkpoint:

    `value` is the tree it holds, with `StoredTensor` leaves. Close it, or use it in a `with`.

    Raises:
        PthError: not there, damaged, not a checkpoint, of the old format that is no zip, larger in
            any way than a checkpoint of XTTS gets, or its pickle asks for something else than
            tensors, plain containers and Coqui's configuration.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        try:
            self._file: BinaryIO = open_plain(self.path)
        except OSError as e:
            raise PthError(f"cannot read {self.path}: {e.strerror}") from e
        try:
            self._records, _ = records_of(self.path, self._file)
            self._check_order()
            self.value = self._tree()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> PthFile:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def close(self) -> None:
        """Tensors that were not read are out of reach after this."""
        self._file.close()

    def verify(self, tensors: Iterator[StoredTensor] | list[StoredTensor]) -> None:
        """Compare the checksums of the records that these tensors lie in with what the file says.

        PthError: a record is damaged.
        """
        for name in dict.fromkeys(t.record for t in tensors):
            record, crc = self._records[name], 0
            self._file.seek(record.begin)
            left = record.size
            while left:
                chunk = self._file.read(min(_CHUNK, left))
                if not chunk:
                    raise self._damaged(f"{name} ends early")
                crc, left = zlib.crc32(chunk, crc), left - len(chunk)
            if crc != record.crc:
                raise self._damaged(
                    f"the checksum of {name} is {crc:08x}, it was written with {record.crc:08x}"
                )

    def _check_order(self) -> None:
        order = self._records.get("byteorder")
        if order is not None and contents(self.path, self._file, order, 64) != b"little":
            raise PthError(
                f"{self.path} was written on a big-endian machine; load and save it with PyTorch on"
                " an ordinary one"
            )

    def _tree(self) -> Any:
        data = contents(self.path, self._file, self._records["data.pkl"], MOST_BYTES)
        try:
            return Unpickler(data, self._tensor).read()
        except RefusedName as e:
            raise PthError(
                f"{self.path} refused: its pickle asks for {str(e)[:200]}, which no checkpoint of"
                " XTTS needs. Nothing of it was run; do not load this file with other programs"
            ) from e
        except PickleFault as e:
            raise self._damaged(f"its pickle cannot be read: {e}") from e

    # -- tensors -----------------------------------------------------------------------------------

    def _tensor(self, storage: Storage, offset: Any, shape: Any, strides: Any) -> StoredTensor:
        """PthError unless it lies in a storage of the file."""
        name = storage.record
        if not all(isinstance(x, (tuple, list)) and len(x) <= _MOST_AXES for x in (shape, strides)):
            raise self._damaged(f"a tensor of {name} has no shape and strides")
        numbers = (offset, *shape, *strides)
        if len(shape) != len(strides) or not all(
            type(n) is int and 0 <= n <= _MOST_NUMBER for n in numbers
        ):
            raise self._damaged(f"the offset, shape or strides of a tensor of {name} cannot be")
        record = self._records.get(storage.record)
        if record is None:
            raise self._damaged(f"it has no record {name}, which its pickle names")
        t = StoredTensor(self, storage.record, storage.dtype, offset, tuple(shape), tuple(strides))
        if (offset + _span(t)) * _itemsize(t.stored) > record.size:
            raise self._damaged(
                f"a tensor of shape {t.shape} does not fit into {name} of {record.size} bytes"
            )
        return t

    def _read(self, t: StoredTensor) -> np.ndarray:
        span, numel, size = _span(t), math.prod(t.shape), _itemsize(t.stored)
        if numel > span or span > max(_MOST_SPREAD * numel, _NEAR):
            raise PthError(
                f"{self.path} refused: a tensor of shape {t.shape} has the strides {t.strides} in"
                f" {t.record}, so that {span} numbers stand for {numel}; save it with PyTorch as"
                " tensor.contiguous()"
            )
        self._file.seek(self._records[t.record].begin + t.offset * size)
        flat = np.fromfile(self._file, "<u2" if t.stored == "bfloat16" else t.stored, span)
        if len(flat) < span:
            raise self._damaged(f"{t.record} ends early")
        if t.stored == "bfloat16":
            flat = (flat.astype("<u4") << 16).view("<f4")
        # Of an axis of one, the stride may be anything.
        strides = tuple(
            s * flat.itemsize if n > 1 else 0 for n, s in zip(t.shape, t.strides, strict=True)
        )
        return np.ascontiguousarray(
            np.lib.stride_tricks.as_strided(flat, t.shape, strides, writeable=False)
        ).reshape(t.shape)

    def _damaged(self, what: str) -> PthError:
        return damaged(self.path, what)


def _span(t: StoredTensor) -> int:
    """Elements from the tensor's first to its last in the storage."""
    if 0 in t.shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(t.shape, t.strides, strict=True))


def _itemsize(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


# -- writing ---------------------------------------------------------------------------------------


def save(path: str | os.PathLike, tree: Any) -> None:
    """Write a checkpoint that `torch.load(path, weights_only=True)` reads.

    Equal trees give equal bytes.

    Args:
        tree: a leaf, or dicts with str keys; leaves are str, int, float, bool, None, lists of
            these, arrays, or anything with `shape`, `dtype` and `read() -> array` (a
            `StoredTensor`, or a tensor yet to be loaded): those are read one at a time, in order.

    Replaces an existing file at once or not at all. OSError as it comes: no room, no permission.
    TypeError: another kind of leaf.
    """
    path = Path(path)
    described, tensors = describe_tensors(tree)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(aside, "wb") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                _write_record(archive, file, "data.pkl", described)
                _write_record(archive, file, "byteorder", b"little")
                for i, tensor in enumerate(tensors):
                    array = np.ascontiguousarray(
                        tensor.read() if hasattr(tensor, "read") else tensor
                    )
                    _write_record(archive, file, f"data/{i}", array.reshape(-1).view(np.uint8).data)
                _write_record(archive, file, "version", b"3\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def _write_record(archive: zipfile.ZipFile, file: BinaryIO, name: str, data) -> None:
    info = zipfile.ZipInfo(f"archive/{name}")  # dated 1980: no clock in the bytes
    # Storages begin at multiples of 64 bytes, so that PyTorch can map the file. The gap is an extra
    # field that readers pass over.
    gap = -(file.tell() + 30 + len(info.filename) + 4) % _ALIGNMENT
    info.extra = b"FB" + struct.pack("<H", gap) + bytes(gap)
    with archive.open(info, "w") as record:
        record.write(data)
