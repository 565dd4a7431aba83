"""Messages as lists of frames.

Knows bytes, not sockets; what a message may say is in common/transport/messages.py.

Frame 0 is a msgpack map of at most 64 kB; a DATA message has one raw frame per array after it,
smallest first, so that the largest travels last. Nothing is ever unpickled: what a peer sends can
at worst be refused with a WireError.

The map's keys: `v` (version of the protocol), `type`, `run` (32 hex digits), the message's fields,
and `seal`, xxh3-64 of the map without it: a header damaged on its way is rejected.
REFUSE has no seal, so that every version reads it.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
import numpy as np
import xxhash

from common.transport.messages import (
    DTYPES,
    FROM_PRODUCER,
    FROM_TRAINER,
    MAX_ARRAYS,
    ArrayEntry,
    Data,
    Message,
    Refuse,
    WireError,
    entries_of,
    fields_of,
    message_of,
    printable,
)

VERSION = 3
MAX_HEADER_BYTES = 64 * 1024  # checked before unpacking: 1 MB of `[]` would make a million objects
MAX_FRAME_BYTES = 1 << 30

_RUN = re.compile(r"[0-9a-f]{32}")
_TEXTS = ("reason", "why", "status")  # cut and cleaned when sent: they carry errors of any kind
_ALL = {**FROM_PRODUCER, **FROM_TRAINER}


def check_run_id(run: str) -> str:
    """`run` itself, if it is a run id (32 lower-case hex digits); else WireError."""
    if not isinstance(run, str) or not _RUN.fullmatch(run):
        raise WireError(
            f"run id {reprlib.repr(run):.60}: expected 32 lower-case hex digits (16 bytes)"
        )
    return run


def digest(arrays: Mapping[str, np.ndarray]) -> str:
    """xxh3-128, 32 hex digits, over (name, dtype, shape, bytes) of every array in the mapping's
    order. Raises WireError.
    """
    h = xxhash.xxh3_128()
    for name, array in arrays.items():
        _check_dtype(name, array)
        h.update(f"{name}:{array.dtype.name}:{','.join(map(str, array.shape))};".encode())
        h.update(_bytes_of(array))
    return h.hexdigest()


def encode(run: str, message: Message) -> list[bytes | memoryview]:
    """Frames of a message.

    Contiguous arrays are not copied: the caller must not write to them afterwards. Raises
    WireError.
    """
    fields, frames = fields_of(message), []
    for name in _TEXTS:
        if isinstance(fields.get(name), str):
            fields[name] = printable(fields[name])
    if isinstance(message, Data):
        message_of(Data, {**fields, "arrays": {}})
        fields["arrays"], frames = _describe(message.arrays)
        entries_of(fields["arrays"])
    else:
        message_of(type(message), fields)
    header = {"v": VERSION, "type": message.TYPE, "run": check_run_id(run), **fields}
    if not isinstance(message, Refuse):
        header["seal"] = _seal(header)
    packed = msgpack.packb(header)
    if len(packed) > MAX_HEADER_BYTES:
        raise WireError(
            f"{message.TYPE} header of {len(packed)} bytes, at most {MAX_HEADER_BYTES} are allowed"
        )
    return [packed, *frames]


def decode(
    frames: Sequence[bytes | memoryview], kinds: Mapping[str, type[Message]] = _ALL
) -> tuple[str, Message]:
    """(run, message) of received frames.

    Arrays are read-only views of the frames (they keep them alive).

    kinds: the messages that may come from that end, by type. Raises WireError, and nothing else.
    """
    if not frames:
        raise WireError("message without frames")
    if len(frames) > MAX_ARRAYS + 1:
        raise WireError(f"{len(frames)} frames, at most {MAX_ARRAYS + 1} are allowed")
    header = _unpack(frames[0])
    version, name, run = (
        header.pop("v", None),
        header.pop("type", None),
        check_run_id(header.pop("run", None)),
    )
    if version != VERSION and name != Refuse.TYPE:
        known = version if type(version) is int else None
        raise WireError(
            f"protocol version {reprlib.repr(version):.20}, this side speaks {VERSION}", known, run
        )
    kind = kinds.get(name) if isinstance(name, str) else None
    if kind is None:
        raise WireError(f"unknown message type {reprlib.repr(name):.40}", run=run)
    if kind is Data:
        return run, _data(run, header, frames[1:])
    if len(frames) != 1:
        raise WireError(f"{name} with {len(frames)} frames, expected 1", run=run)
    if kind is Refuse:  # of any version: only what every one has
        reason = header.get("reason")
        header = {
            "gen": header.get("gen"),
            "reason": printable(reason) if isinstance(reason, str) else reason,
        }
        return run, message_of(kind, header)
    seal = header.pop("seal", None)
    message = message_of(kind, header)
    _check_seal(run, kind, header, seal)
    return run, message


def _data(run: str, header: dict, frames: Sequence[bytes | memoryview]) -> Data:
    described, seal = header.get("arrays"), header.pop("seal", None)
    checked = message_of(Data, {**header, "arrays": {}})
    entries = entries_of(described)
    _check_seal(run, Data, header, seal)
    fields = {**vars(checked), "arrays": _arrays_of(entries, frames)}
    return Data(**fields)


def _seal(header: dict) -> str:
    return xxhash.xxh3_64_hexdigest(msgpack.packb(header))


def _check_seal(run: str, kind: type[Message], fields: dict, seal: Any) -> None:
    """Call it only after the fields were checked: endless nesting cannot be packed."""
    if seal != _seal({"v": VERSION, "type": kind.TYPE, "run": run, **fields}):
        raise WireError(f"{kind.TYPE}: the header was damaged on its way", run=run)


def _check_dtype(name: str, array: np.ndarray) -> None:
    if array.dtype.name not in DTYPES or not array.dtype.isnative:
        raise WireError(
            f"array {name!r}: dtype {array.dtype} does not travel, only native {', '.join(DTYPES)}"
        )


def _bytes_of(array: np.ndarray) -> memoryview | bytes:
    """The array's bytes, without a copy where it is contiguous (np.ascontiguousarray would turn
    shape () into (1,)).
    """
    if not array.flags.c_contiguous:
        array = array.copy(order="C")
    return memoryview(array.reshape(-1).view(np.uint8)) if array.size else b""


def _describe(arrays: Mapping[str, np.ndarray]) -> tuple[list[dict], list[bytes | memoryview]]:
    """Header entries in field order, and the raw frames from smallest to largest; `frame` ties the
    two together.
    """
    order = sorted(arrays, key=lambda name: arrays[name].nbytes)
    place = {name: i for i, name in enumerate(order)}
    entries = []
    for name, array in arrays.items():
        _check_dtype(name, array)
        entries.append(
            {
                "name": name,
                "dtype": array.dtype.name,
                "shape": list(array.shape),
                "frame": place[name],
            }
        )
    return entries, [_bytes_of(arrays[name]) for name in order]


def _arrays_of(
    entries: Sequence[ArrayEntry], frames: Sequence[bytes | memoryview]
) -> dict[str, np.ndarray]:
    if len(entries) != len(frames):
        raise WireError(f"DATA describes {len(entries)} arrays and has {len(frames)} array frames")
    if sorted(entry.frame for entry in entries) != list(range(len(frames))):
        raise WireError("DATA: array entries do not name every frame once")
    arrays = {}
    for entry in entries:
        if entry.name in arrays:
            raise WireError(f"DATA: array {entry.name!r} twice")
        arrays[entry.name] = _array_of(entry, frames[entry.frame])
    return arrays


def _array_of(entry: ArrayEntry, frame: bytes | memoryview) -> np.ndarray:
    dtype, shape = np.dtype(entry.dtype).newbyteorder("<"), entry.shape
    size = len(frame) if isinstance(frame, bytes) else frame.nbytes
    needed = math.prod(shape) * dtype.itemsize
    if needed != size:
        raise WireError(
            f"array {entry.name!r}: {entry.dtype}{list(shape)} needs {needed} bytes, its frame has"
            f" {size}"
        )
    # NumPy refuses shapes whose other sizes multiply to more than an address, even with a 0 among
    # them.
    if math.prod(max(1, n) for n in shape) * dtype.itemsize > MAX_FRAME_BYTES:
        raise WireError(f"array {entry.name!r}: {entry.dtype}{list(shape)} is no shape of a batch")
    array = np.frombuffer(frame, dtype).reshape(shape) if size else np.empty(shape, dtype)
    if (
        not array.flags.aligned
    ):  # frames up to 8 kB are slices of ZeroMQ's read buffer, at any offset
        array = array.copy()
    array.flags.writeable = False
    return array


def _unpack(frame: bytes | memoryview) -> dict:
    size = len(frame) if isinstance(frame, bytes) else frame.nbytes
    if size > MAX_HEADER_BYTES:
        raise WireError(f"header of {size} bytes, at most {MAX_HEADER_BYTES} are allowed")
    try:
        header = msgpack.unpackb(
            frame,
            object_pairs_hook=_unique,
            ext_hook=_no_ext,
            use_list=False,
            max_ext_len=0,
            max_bin_len=0,
            max_str_len=16 * 1024,
            max_array_len=8192,
            max_map_len=1024,
        )
    except WireError:
        raise
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise WireError(f"header is not msgpack of this protocol: {error}") from None
    if not isinstance(header, dict):
        raise WireError(f"header is a {type(header).__name__}, expected a map")
    return header


def _unique(pairs: list[tuple[Any, Any]]) -> dict:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise WireError("header has a key twice")
    return result


def _no_ext(code: int, data: bytes) -> None:
    raise WireError(f"header has an extension type ({code}), none is allowed")
