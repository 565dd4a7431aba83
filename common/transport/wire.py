"""Messages between trainer and producers, as lists of frames. Knows bytes, not sockets.

Frame 0 is a msgpack map of at most 64 kB; a DATA message has one raw frame per array after it, smallest first, so that the
largest travels last. Nothing is ever unpickled: what a peer sends can at worst be refused with a WireError.

Header keys of every message: `v` (protocol version), `type`, `run` (32 hex digits), `gen` (trainer generation, from 1; 0 = a producer
that has not been welcomed yet); the others are the fields of the dataclasses below.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgpack
import numpy as np
import xxhash

VERSION = 2
MAX_HEADER_BYTES = 64 * 1024  # checked before unpacking: 1 MB of `[]` would make a million objects
MAX_ARRAYS = 32
MAX_DIMS = 8
MAX_TEXT = 4000  # characters of a reason or a status; longer ones are cut when sent
MAX_DEPTH = 6
MAX_ID = 2**63 - 1
DTYPES = ("float16", "float32", "int32", "int16", "uint16", "uint8", "int64")

_RUN = re.compile(r"[0-9a-f]{32}")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


class WireError(ValueError):
    """Bytes that are not a message of this protocol, or a message that cannot be sent. `version` is the peer's, when it was readable."""

    def __init__(self, text: str, version: int | None = None, run: str | None = None):
        super().__init__(text)
        self.version = version
        self.run = run


@dataclass(frozen=True)
class Ready:
    """P: I can be leased to in generation `gen`. info: feature_hash, probe, pid, name, device, capacity, …"""

    TYPE: ClassVar[str] = "READY"
    gen: int
    info: dict


@dataclass(frozen=True)
class Welcome:
    """T: the current generation and what it is about (stage, feature_hash, …); answered with READY."""

    TYPE: ClassVar[str] = "WELCOME"
    gen: int
    info: dict


@dataclass(frozen=True)
class Refuse:
    """T: this producer does not fit; it should print the reason and exit."""

    TYPE: ClassVar[str] = "REFUSE"
    gen: int
    reason: str


@dataclass(frozen=True)
class Lease:
    """T: one credit, make batch `g` of `plan`. `position` is the place in the trainer's schedule: lower is needed sooner."""

    TYPE: ClassVar[str] = "LEASE"
    gen: int
    plan: str
    g: int
    lease: int
    position: int
    ttl_s: float
    extra: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Data:
    """P: the batch of a lease. `digest` is digest(arrays); `meta` is small and not covered by it."""

    TYPE: ClassVar[str] = "DATA"
    gen: int
    plan: str
    g: int
    lease: int
    digest: str
    meta: dict
    arrays: dict[str, np.ndarray] = field(repr=False, default_factory=dict)


@dataclass(frozen=True)
class Nack:
    """P: this lease cannot be made; `later`: not now, for a cause that is not the batch's and may pass."""

    TYPE: ClassVar[str] = "NACK"
    gen: int
    plan: str
    g: int
    lease: int
    why: str
    later: bool = False


@dataclass(frozen=True)
class Revoke:
    """T: advice, the lease is void; skip it if work has not begun."""

    TYPE: ClassVar[str] = "REVOKE"
    gen: int
    lease: int


@dataclass(frozen=True)
class Heartbeat:
    """Both: alive. From a producer: what it is doing, and whether it has answered READY in `gen`."""

    TYPE: ClassVar[str] = "HB"
    gen: int
    status: str = ""
    ready: bool = False


@dataclass(frozen=True)
class Stop:
    """T: the run is over, answer BYE and leave."""

    TYPE: ClassVar[str] = "STOP"
    gen: int
    reason: str = ""


@dataclass(frozen=True)
class Bye:
    """P: leaving; whatever was leased to me is free."""

    TYPE: ClassVar[str] = "BYE"
    gen: int


Message = Ready | Welcome | Refuse | Lease | Data | Nack | Revoke | Heartbeat | Stop | Bye
_TYPES = {cls.TYPE: cls for cls in (Ready, Welcome, Refuse, Lease, Data, Nack, Revoke, Heartbeat, Stop, Bye)}
_FIELDS = {cls: [f.name for f in dataclasses.fields(cls)] for cls in _TYPES.values()}


def check_run_id(run: str) -> str:
    """`run` itself, if it is a run id (32 lower-case hex digits); else WireError."""
    if not isinstance(run, str) or not _RUN.fullmatch(run):
        raise WireError(f"run id {run!r:.60}: expected 32 lower-case hex digits (16 bytes)")
    return run


def digest(arrays: Mapping[str, np.ndarray]) -> str:
    """xxh3-128, 32 hex digits, over (name, dtype, shape, bytes) of every array in the mapping's order. Raises WireError."""
    h = xxhash.xxh3_128()
    for name, array in arrays.items():
        _check_dtype(name, array)
        h.update(f"{name}:{array.dtype.name}:{','.join(map(str, array.shape))};".encode())
        h.update(_bytes_of(array))
    return h.hexdigest()


def encode(run: str, message: Message) -> list[bytes | memoryview]:
    """Frames of a message. Contiguous arrays are not copied: the caller must not write to them afterwards. Raises WireError."""
    header: dict[str, Any] = {"v": VERSION, "type": message.TYPE, "run": run}
    for name in _FIELDS[type(message)]:
        value = getattr(message, name)
        header[name] = value[:MAX_TEXT] if name in ("reason", "why", "status") else value
    frames: list[bytes | memoryview] = []
    if isinstance(message, Data):
        header["arrays"], frames = _describe(message.arrays)
    _check_fields(type(message), header)
    packed = msgpack.packb(header)
    if len(packed) > MAX_HEADER_BYTES:
        raise WireError(f"{message.TYPE} header of {len(packed)} bytes, at most {MAX_HEADER_BYTES} are allowed")
    return [packed, *frames]


def decode(frames: Sequence[bytes | memoryview]) -> tuple[str, Message]:
    """(run, message) of received frames. Arrays are read-only views of the frames (they keep them alive). Raises WireError."""
    if not frames:
        raise WireError("message without frames")
    if len(frames) > MAX_ARRAYS + 1:
        raise WireError(f"{len(frames)} frames, at most {MAX_ARRAYS + 1} are allowed")
    header = _unpack(frames[0])
    version, kind, run = header.pop("v", None), header.pop("type", None), header.pop("run", None)
    run = check_run_id(run)
    if version != VERSION and kind != Refuse.TYPE:  # a refusal is readable in any version
        raise WireError(f"protocol version {version!r:.20}, this side speaks {VERSION}", version if _is_int(version) else None, run)
    cls = _TYPES.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise WireError(f"unknown message type {kind!r:.40}", run=run)
    if cls is Data:
        described = header.get("arrays")
        _check_fields(cls, header)
        header["arrays"] = _arrays_of(described, frames[1:])
        return run, Data(**header)
    if len(frames) != 1:
        raise WireError(f"{kind} with {len(frames)} frames, expected 1", run=run)
    _check_fields(cls, header)
    return run, cls(**header)


def _check_dtype(name: str, array: np.ndarray) -> None:
    if array.dtype.name not in DTYPES or not array.dtype.isnative:
        raise WireError(f"array {name!r}: dtype {array.dtype} does not travel, only native {', '.join(DTYPES)}")


def _bytes_of(array: np.ndarray) -> memoryview | bytes:
    """The array's bytes, without a copy where it is contiguous (np.ascontiguousarray would turn shape () into (1,))."""
    if not array.flags.c_contiguous:
        array = array.copy(order="C")
    return memoryview(array.reshape(-1).view(np.uint8)) if array.size else b""


def _describe(arrays: Mapping[str, np.ndarray]) -> tuple[list[dict], list[bytes | memoryview]]:
    """Header entries in field order, and the raw frames from smallest to largest; `frame` ties the two together."""
    order = sorted(arrays, key=lambda name: arrays[name].nbytes)
    place = {name: i for i, name in enumerate(order)}
    entries = []
    for name, array in arrays.items():
        _check_dtype(name, array)
        entries.append({"name": name, "dtype": array.dtype.name, "shape": list(array.shape), "frame": place[name]})
    return entries, [_bytes_of(arrays[name]) for name in order]


def _arrays_of(entries: list[dict], frames: Sequence[bytes | memoryview]) -> dict[str, np.ndarray]:
    if len(entries) != len(frames):
        raise WireError(f"DATA describes {len(entries)} arrays and has {len(frames)} array frames")
    if sorted(entry["frame"] for entry in entries) != list(range(len(frames))):
        raise WireError("DATA: array entries do not name every frame once")
    arrays = {}
    for entry in entries:
        name, frame, shape = entry["name"], frames[entry["frame"]], tuple(entry["shape"])
        if name in arrays:
            raise WireError(f"DATA: array {name!r} twice")
        dtype = np.dtype(entry["dtype"]).newbyteorder("<")
        size = len(frame) if isinstance(frame, bytes) else frame.nbytes
        needed = math.prod(shape) * dtype.itemsize
        if needed != size:
            raise WireError(f"array {name!r}: {entry['dtype']}{list(shape)} needs {needed} bytes, its frame has {size}")
        array = np.frombuffer(frame, dtype).reshape(shape) if size else np.empty(shape, dtype)
        if not array.flags.aligned:  # frames up to 8 kB are slices of ZeroMQ's read buffer, at any offset
            array = array.copy()
        array.flags.writeable = False
        arrays[name] = array
    return arrays


def _unpack(frame: bytes | memoryview) -> dict:
    size = len(frame) if isinstance(frame, bytes) else frame.nbytes
    if size > MAX_HEADER_BYTES:
        raise WireError(f"header of {size} bytes, at most {MAX_HEADER_BYTES} are allowed")
    try:
        header = msgpack.unpackb(
            frame,
            object_pairs_hook=_unique,
            ext_hook=_no_ext,
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
    _check_plain(header, "header", 0)
    return header


def _unique(pairs: list[tuple[Any, Any]]) -> dict:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise WireError("header has a key twice")
    return result


def _no_ext(code: int, data: bytes) -> None:
    raise WireError(f"header has an extension type ({code}), none is allowed")


def _check_plain(value: Any, where: str, depth: int) -> None:
    """None, bool, int, finite float, str, and lists and str-keyed maps of them: nothing else travels in a header."""
    if value is None or isinstance(value, (bool, str)):
        return
    if isinstance(value, int):
        if not -MAX_ID - 1 <= value <= 2 * MAX_ID + 1:
            raise WireError(f"{where}: integer out of 64 bits")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise WireError(f"{where}: {value} is not a finite number")
    elif isinstance(value, (dict, list, tuple)) and depth < MAX_DEPTH:
        if isinstance(value, dict):
            for key, item in value.items():
                if not isinstance(key, str):
                    raise WireError(f"{where}: key {key!r:.40} is not a string")
                _check_plain(item, f"{where}.{key[:40]}", depth + 1)
        else:
            for item in value:
                _check_plain(item, f"{where}[]", depth + 1)
    else:
        raise WireError(f"{where}: {type(value).__name__} is not allowed here (or nested deeper than {MAX_DEPTH})")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_TEXT


def _id(value: Any) -> bool:
    return _is_int(value) and 0 <= value <= MAX_ID


def _array_entries(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) <= MAX_ARRAYS and all(_array_entry(entry) for entry in value)


def _array_entry(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and set(entry) == {"name", "dtype", "shape", "frame"}
        and isinstance(entry["name"], str)
        and _NAME.fullmatch(entry["name"]) is not None
        and entry["dtype"] in DTYPES
        and isinstance(entry["shape"], (list, tuple))
        and len(entry["shape"]) <= MAX_DIMS
        and all(_id(size) for size in entry["shape"])
        and _id(entry["frame"])
    )


_CHECKS = {
    "gen": _id,
    "g": _id,
    "lease": _id,
    "position": _id,
    "plan": lambda value: isinstance(value, str) and _NAME.fullmatch(value) is not None,
    "info": lambda value: isinstance(value, dict),
    "extra": lambda value: isinstance(value, dict),
    "meta": lambda value: isinstance(value, dict),
    "digest": lambda value: isinstance(value, str) and _DIGEST.fullmatch(value) is not None,
    "reason": _text,
    "why": _text,
    "status": _text,
    "ready": lambda value: isinstance(value, bool),
    "later": lambda value: isinstance(value, bool),
    "ttl_s": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e6,
    "arrays": _array_entries,
}


def _check_fields(cls: type, header: dict) -> None:
    names = _FIELDS[cls]
    given = set(header) - {"v", "type", "run"}
    if given != set(names):
        wrong = sorted(given ^ set(names))
        raise WireError(f"{cls.TYPE}: fields {wrong[:5]} missing or unknown, expected {names}")
    for name in names:
        if not _CHECKS[name](header[name]):
            raise WireError(f"{cls.TYPE}: {name} = {header[name]!r:.80} is not valid")
        if isinstance(header[name], dict):
            _check_plain(header[name], f"{cls.TYPE}.{name}", 1)
