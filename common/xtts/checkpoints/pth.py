"""PyTorch checkpoint files without PyTorch: a reader that runs no code from the file, and a writer
that torch.load accepts.

A `.pth` is a zip of uncompressed records: `data.pkl`, a pickle that describes a tree of dicts and
tensors, and one record of raw numbers per storage. The pickle is read by an unpickler that knows
the names of tensors and storages and nothing else: a class of Coqui's (its configuration is saved
beside the weights) becomes an inert `Opaque`, and any other name ends the reading. Tensors stay in
the file until they are asked for, one at a time. NumPy alone.
"""

from __future__ import annotations

import os
import pickle
import struct
import zipfile
import zlib
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from common.xtts.checkpoints.pickled import describe_tensors
from common.xtts.checkpoints.pth_zip import PthError, contents, open_zip

# bfloat16 has no NumPy dtype: it is read as float32, which holds each of its values.
_STORAGES = {
    "FloatStorage": "<f4",
    "DoubleStorage": "<f8",
    "HalfStorage": "<f2",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
    "CharStorage": "<i1",
    "ByteStorage": "<u1",
    "BoolStorage": "?",
}
# Modules whose objects sit beside the weights in Coqui's files. They are read as `Opaque`.
_INERT_PACKAGES = ("TTS", "trainer", "coqpit")
_INERT_NAMES = {
    *(
        (module, name)
        for module in ("numpy.core.multiarray", "numpy._core.multiarray")
        for name in ("scalar", "_reconstruct")
    ),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("_codecs", "encode"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("collections", "defaultdict"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    *(("torch", name) for name in ("float32", "float64", "float16", "bfloat16", "int64", "int32")),
    *(
        (module, name)
        for module in ("builtins", "__builtin__")
        for name in ("set", "list", "dict", "object", "int", "float", "complex")
    ),
}
_CHUNK = 1 << 22
_ALIGNMENT = 64


class Opaque(dict):
    """Stands for an object of a class that is not loaded: keeps what the file says about it, runs
    nothing.

    `name` is "module.Class", `args` what it would have been built from, `state` what would have
    been set on it, if anything.
    """

    name = ""

    def __new__(cls, *args, **kwargs):
        """Any arguments."""
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made

    def __init__(self, *args, **kwargs):
        super().__init__()

    def __setstate__(self, state):
        self.state = state

    def __hash__(self):
        return id(self)

    def append(self, item) -> None:
        """What the pickle of a list's subclass calls."""

    def extend(self, items) -> None:
        """See `append`."""


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
        """
        return self.file._read(self)


class PthFile:
    """An open checkpoint:

    `value` is the tree it holds, with `StoredTensor` leaves. Close it, or use it in a `with`.

    Raises:
        PthError: not there, damaged, not a checkpoint, of the old format that is no zip, or its
        pickle asks for something else than
            tensors, plain containers and Coqui's configuration.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        try:
            self._file: BinaryIO = open(self.path, "rb")
        except OSError as e:
            raise PthError(f"cannot read {self.path}: {e.strerror}") from e
        try:
            self._zip = open_zip(self.path, self._file)
            self._records, self._root = self._index()
            self._offsets: dict[str, int] = {}
            self.value = _Unpickler(self._file_of("data.pkl"), self).read()
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
            info, crc = self._records[name], 0
            self._file.seek(self._data_offset(name))
            left = info.file_size
            while left:
                chunk = self._file.read(min(_CHUNK, left))
                if not chunk:
                    raise self._damaged(f"{name} ends early")
                crc, left = zlib.crc32(chunk, crc), left - len(chunk)
            if crc != info.CRC:
                raise self._damaged(
                    f"the checksum of {name} is {crc:08x}, it was written with {info.CRC:08x}"
                )

    # -- records
    # ----------------------------------------------------------------------------------------------

    def _index(self) -> tuple[dict[str, zipfile.ZipInfo], str]:
        infos = self._zip.infolist()
        pickles = [i.filename for i in infos if i.filename.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise PthError(
                f"{self.path} is a zip, but no PyTorch checkpoint: it holds {len(pickles)} records"
                " named data.pkl, expected one"
            )
        root = pickles[0][: -len("data.pkl")]
        packed = [
            i.filename for i in infos if i.compress_type != zipfile.ZIP_STORED or i.flag_bits & 1
        ]
        if packed:
            raise PthError(
                f"{self.path}: {packed[0]} is compressed or encrypted, which PyTorch does not do;"
                " use the original file"
            )
        records = {i.filename[len(root) :]: i for i in infos if i.filename.startswith(root)}
        if "byteorder" in records and contents(self._zip, root + "byteorder") != b"little":
            raise PthError(
                f"{self.path} was written on a big-endian machine; load and save it with PyTorch on"
                " an ordinary one"
            )
        return records, root

    def _file_of(self, name: str) -> BinaryIO:
        try:
            return self._zip.open(self._root + name)
        except (zipfile.BadZipFile, OSError) as e:
            raise self._damaged(f"{name}: {e}") from e

    def _data_offset(self, name: str) -> int:
        """Where a record's bytes begin: behind its local header, whose length need not be that of
        the directory's entry.
        """
        if name not in self._offsets:
            at = self._records[name].header_offset
            self._file.seek(at)
            header = self._file.read(30)
            if len(header) < 30 or header[:4] != b"PK\x03\x04":
                raise self._damaged(f"{name} has no header at byte {at}")
            name_len, extra_len = struct.unpack("<HH", header[26:])
            self._offsets[name] = at + 30 + name_len + extra_len
        return self._offsets[name]

    def _tensor(self, storage: _Storage, offset: int, shape: tuple, strides: tuple) -> StoredTensor:
        numbers = (offset, *shape, *strides)
        if len(shape) != len(strides) or not all(isinstance(n, int) and n >= 0 for n in numbers):
            raise self._damaged(
                f"a tensor of {storage.record} has offset {offset}, shape {shape} and strides"
                f" {strides}"
            )
        info = self._records.get(storage.record)
        if info is None:
            raise self._damaged(f"it has no record {storage.record}, which its pickle names")
        tensor = StoredTensor(
            self, storage.record, storage.dtype, offset, tuple(shape), tuple(strides)
        )
        if (offset + _span(tensor)) * _itemsize(storage.dtype) > info.file_size:
            raise self._damaged(
                f"a tensor of shape {tuple(shape)} does not fit into {storage.record} of"
                f" {info.file_size} bytes"
            )
        return tensor

    def _read(self, t: StoredTensor) -> np.ndarray:
        span, size = _span(t), _itemsize(t.stored)
        self._file.seek(self._data_offset(t.record) + t.offset * size)
        flat = np.fromfile(self._file, "<u2" if t.stored == "bfloat16" else t.stored, span)
        if len(flat) < span:
            raise self._damaged(f"{t.record} ends early")
        if t.stored == "bfloat16":
            flat = (flat.astype("<u4") << 16).view("<f4")
        strides = tuple(s * flat.itemsize for s in t.strides)
        return np.ascontiguousarray(
            np.lib.stride_tricks.as_strided(flat, t.shape, strides, writeable=False)
        ).reshape(t.shape)

    def _damaged(self, what: str) -> PthError:
        return PthError(f"{self.path} is damaged or cut off: {what}; get the file again")


def _span(t: StoredTensor) -> int:
    """Elements from the tensor's first to its last in the storage."""
    if 0 in t.shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(t.shape, t.strides, strict=True))


def _itemsize(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


# -- the pickle
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Storage:
    record: str
    dtype: str


class _Refused(Exception):
    """Carries the name out of the C unpickler."""


class _Unpickler(pickle.Unpickler):
    """Resolves only the names below; what a pickle can call are these, and none of them does
    anything but remember its arguments.
    """

    def __init__(self, stream: BinaryIO, file: PthFile):
        super().__init__(stream, encoding="utf-8")
        self._file = file

    def read(self) -> Any:
        """The tree. PthError as in `PthFile`."""
        try:
            return self.load()
        except _Refused as e:
            raise PthError(
                f"{self._file.path} refused: its pickle asks for {e}, which no checkpoint of XTTS"
                " needs. Nothing of it was run; do not load this file with other programs"
            ) from e
        except PthError:
            raise
        except (
            pickle.UnpicklingError,
            EOFError,
            zipfile.BadZipFile,
            zlib.error,
            ValueError,
            TypeError,
            AttributeError,
            LookupError,
            OSError,
            OverflowError,
            MemoryError,
            RecursionError,
        ) as e:
            raise self._file._damaged(f"its pickle cannot be read ({type(e).__name__}: {e})") from e

    def find_class(self, module: str, name: str):
        """What the file means by a name; ends the reading where that is code."""
        if (module, name) == ("collections", "OrderedDict"):
            return type("OrderedDict", (OrderedDict,), {})  # BUILD may set attributes of it
        if (module, name) == ("collections", "Counter"):
            return type("Counter", (Counter,), {})
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return self._rebuild
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return self._rebuild_parameter
        if module == "torch" and name in _STORAGES:
            return _opaque(f"torch.{name}")
        if (module, name) == ("torch", "Size"):
            return tuple
        if module in ("copyreg", "copy_reg") and name == "_reconstructor":
            return self._reconstruct
        if module.split(".")[0] in _INERT_PACKAGES or (module, name) in _INERT_NAMES:
            return _opaque(f"{module}.{name}")
        raise _Refused(f"{module}.{name}")

    def persistent_load(self, pid) -> _Storage:
        """("storage", class, key, location, number of elements) → where the numbers are."""
        if (
            not isinstance(pid, tuple)
            or len(pid) != 5
            or pid[0] != "storage"
            or not isinstance(pid[2], str)
        ):
            raise pickle.UnpicklingError(f"unknown kind of storage: {pid!r:.80}")
        kind = getattr(pid[1], "name", "").removeprefix("torch.")
        if kind not in _STORAGES:
            raise pickle.UnpicklingError(f"storage {pid[2]} is of unknown type {pid[1]!r:.80}")
        return _Storage(f"data/{pid[2]}", _STORAGES[kind])

    def _rebuild(self, storage, offset, shape, strides, *unused) -> StoredTensor:
        if not isinstance(storage, _Storage):
            raise pickle.UnpicklingError("a tensor without storage")
        return self._file._tensor(storage, offset, shape, strides)

    def _rebuild_parameter(self, data, *unused) -> StoredTensor:
        return data

    def _reconstruct(self, cls, *unused) -> Opaque:
        if not (isinstance(cls, type) and issubclass(cls, Opaque)):
            raise pickle.UnpicklingError(f"cannot rebuild {cls!r:.80}")
        return cls()


def _opaque(name: str) -> type[Opaque]:
    return type("Opaque", (Opaque,), {"name": name})


# -- writing
# --------------------------------------------------------------------------------------------------


def save(path: str | os.PathLike, tree: Any) -> None:
    """Write a checkpoint that `torch.load(path, weights_only=True)` reads.

    Equal trees give equal bytes.

    Args:
        tree: a leaf, or dicts with str keys; leaves are str, int, float, bool, None, lists of
        these, arrays, or anything with
            `shape`, `dtype` and `read() -> array` (a `StoredTensor`, or a tensor yet to be loaded):
            those are read one at a time, in order.

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
