"""Tensors on disk in the safetensors format, written one at a time: each is released once written,
and digested on the way. Read at once, in pieces side by side, and digested on the way, too.

The package's own writer holds everything in memory twice, and the GIL while it writes: at full
size, no step could start for seconds. Its reader copies every tensor under the GIL, after a digest
has read the file once.
"""

from __future__ import annotations

import json
import os
from collections.abc import MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

import numpy as np
import psutil
import xxhash

from common.system import cgroup
from common.system.documents import parse_json
from common.system.errors import RunError

_NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL"}
_NAMES |= {
    f"{kind}int{bits}": f"{kind.upper() or 'I'}{bits}"
    for kind in ("", "u")
    for bits in (8, 16, 32, 64)
}
_DTYPES = {short: name for name, short in _NAMES.items()}


def save_file(tensors: MutableMapping[str, Any], path: str | os.PathLike) -> str:
    """Write `tensors` and return the xxh3-128 of the file's bytes. OSError as of the file system.

    tensors: name → array, or anything with `shape`, `dtype` and `__array__`; emptied on the way.
    """
    # By alignment, then by name, as the package orders them.
    names = sorted(tensors, key=lambda name: (-np.dtype(tensors[name].dtype).itemsize, name))
    header, end = {}, 0
    for name in names:
        dtype, shape = np.dtype(tensors[name].dtype), [int(n) for n in tensors[name].shape]
        begin, end = end, end + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": _NAMES[dtype.name], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = xxhash.xxh3_128()
    with open(path, "wb") as file:
        for data in (len(text).to_bytes(8, "little"), text):
            digest.update(data)
            file.write(data)
        for name in names:
            data = np.asarray(tensors.pop(name), order="C").reshape(-1).view(np.uint8).data
            digest.update(data)
            file.write(data)
    return digest.hexdigest()


_PIECE = 1 << 26
_READERS = 4
_MOST_HEADER = 100_000_000  # bytes, as the package allows


def load_file(path: str | os.PathLike, digest: str) -> dict[str, np.ndarray]:
    """Read what `save_file` wrote, whose digest was `digest`: name → array, views of one buffer.

    Of another file, at most a header is looked at, before memory is taken. ValueError: it is one.
    RunError: it does not fit into memory. OSError as of the file system.
    """
    with open(path, "rb", buffering=0) as file:
        data = _room(path, _described(path, file))
        starts, seen = range(0, len(data), _PIECE), xxhash.xxh3_128()

        def read(start: int) -> np.ndarray:
            piece = data[start : start + _PIECE]
            done = 0
            while done < len(piece):
                n = os.preadv(file.fileno(), [piece[done:]], start + done)
                if n == 0:
                    raise ValueError(f"{os.fspath(path)} ends at {start + done} bytes")
                done += n
            return piece

        with ThreadPoolExecutor(_READERS) as pool:
            for piece in pool.map(read, starts):
                seen.update(piece.data)
    if seen.hexdigest() != digest:
        raise ValueError(f"{os.path.basename(path)} does not match its digest")
    begin = 8 + int.from_bytes(data[:8].tobytes(), "little")
    tensors = {}
    for name, of in json.loads(data[8:begin].tobytes()).items():
        first, end = (begin + n for n in of["data_offsets"])
        tensors[name] = data[first:end].view(_DTYPES[of["dtype"]]).reshape(of["shape"])
    return tensors


def _described(path: str | os.PathLike, file: BinaryIO) -> int:
    """The size of a file, which must be what its header says: a file may be of any size and take no
    room on the disk. ValueError: it is not.
    """
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    try:
        if length > min(size - 8, _MOST_HEADER):
            raise ValueError("no header")
        header = parse_json(file.read(length))
        described = 8 + length + max((t["data_offsets"][1] for t in header.values()), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        described = -1
    if described == size:
        return size
    what = f"its header describes {described}" if described >= 0 else "no header describes them"
    raise ValueError(
        f"{os.path.basename(path)} does not match its digest: it has {size} bytes, and {what}"
    )


def _room(path: str | os.PathLike, size: int) -> np.ndarray:
    """uint8[size]. RunError: this machine or container has too little memory."""
    memory, limit = psutil.virtual_memory(), cgroup.memory_limit()
    free = memory.available if limit is None else min(memory.available, limit)
    if size <= free:
        try:
            return np.empty(size, np.uint8)
        except MemoryError:  # a limit of the process
            pass
    raise RunError(
        f"{os.fspath(path)} has {size / 1e9:.1f} GB, and {free / 1e9:.1f} GB of memory are free:"
        " end other programs, or use a machine with more"
    )
