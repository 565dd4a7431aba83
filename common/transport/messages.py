"""Messages between trainer and producers: every message, its fields, and what a field may hold.

Checked here and nowhere else, before a message is sent and before a received one is used. P: sent
by a producer; T: by the trainer. Every message has `gen`, the trainer's generation, from 1; 0 is
that of a producer not welcomed yet. How a message becomes bytes is in common/transport/wire.py.
"""

from __future__ import annotations

import dataclasses
import functools
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    SkipValidation,
    TypeAdapter,
    ValidationError,
)

MAX_ID = 2**63 - 1
MAX_TEXT = 4000  # characters of a reason or a status; longer ones are cut when sent
MAX_REASON = 500  # of one bad clip
MAX_NAME = 64
MAX_CLIPS = 4096  # named in one message
MAX_PARTS = 64  # of a batch's time
MAX_ARRAYS = 32
MAX_DIMS = 8
DTYPES = ("float16", "float32", "int32", "int16", "uint16", "uint8", "int64")


class WireError(ValueError):
    """Bytes that are no message of this protocol, or a message that cannot be sent.

    `version`, `run`: the peer's, where they were readable.
    """

    def __init__(self, text: str, version: int | None = None, run: str | None = None):
        super().__init__(text)
        self.version = version
        self.run = run


def printable(text: str, limit: int = MAX_TEXT) -> str:
    """`text` as it may be sent: cut, and without characters that would move a reader's cursor."""
    text = text[:limit]
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def _check_printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("holds control characters")
    return text


def _text(limit: int) -> Any:
    return Annotated[str, Field(strict=True, max_length=limit), AfterValidator(_check_printable)]


def _matching(pattern: str) -> Any:
    return Annotated[str, Field(strict=True, pattern=pattern)]


# Limits of fields. They are generous: they keep nonsense out, not large runs.
Id = Annotated[int, Field(strict=True, ge=0, le=MAX_ID)]
Count = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]
Capacity = Annotated[int, Field(strict=True, ge=1, le=2**31 - 1)]
Amount = Annotated[float, Field(strict=True, ge=0, le=1e15, allow_inf_nan=False)]
Flag = Annotated[bool, Field(strict=True)]
Text = _text(MAX_TEXT)
Name = _matching(rf"^[A-Za-z0-9_.:-]{{1,{MAX_NAME}}}$")
Token = _matching(rf"^[A-Za-z0-9_.:-]{{0,{MAX_NAME}}}$")
Digest = _matching(r"^[0-9a-f]{32}$")
Clips = Annotated[tuple[Id, ...], Field(max_length=MAX_CLIPS)]
BadClips = Annotated[tuple[tuple[Id, _text(MAX_REASON)], ...], Field(max_length=MAX_CLIPS)]
Times = Annotated[dict[Name, Amount], Field(max_length=MAX_PARTS)]

_STRICT = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


@dataclass(frozen=True)
class Offer:
    """What a generation asks for: the stage whose batches are wanted, with which features."""

    __pydantic_config__: ClassVar = _STRICT
    stage: Token
    feature_hash: Token = ""


@dataclass(frozen=True)
class Notes:
    """A producer's notes on how it made a batch. The batch's digest covers none of them.

    bad: (utterance, why) of clips that could not be used; spent_ms: milliseconds by part;
    clips, cached: how many were needed, and how many of their codes were read from the cache;
    threads: that decode; cpu_ms: of the process; sent: time.time() when the batch left.
    """

    __pydantic_config__: ClassVar = _STRICT
    bad: BadClips = ()
    spent_ms: Times = field(default_factory=dict)
    threads: Count = 1
    clips: Count = 1
    cached: Count = 0
    cpu_ms: Amount = 0.0
    sent: Amount = 0.0


@dataclass(frozen=True)
class ArrayEntry:
    """An array of a batch in DATA's header; `frame`: its place among the frames."""

    __pydantic_config__: ClassVar = _STRICT
    name: Name
    dtype: Literal[DTYPES]
    shape: Annotated[tuple[Id, ...], Field(max_length=MAX_DIMS)]
    frame: Count


@dataclass(frozen=True)
class Heartbeat:
    """P: alive, and what it is doing; `ready`: whether it has answered READY in `gen`."""

    TYPE: ClassVar[str] = "HB"
    __pydantic_config__: ClassVar = _STRICT
    gen: Id
    status: Text = ""
    ready: Flag = False


@dataclass(frozen=True)
class Ready:
    """P: ready for leases. `probe`: digest of known features, as this device computes them."""

    TYPE: ClassVar[str] = "READY"
    __pydantic_config__: ClassVar = _STRICT
    gen: Id
    name: _text(MAX_NAME)
    pid: Count
    capacity: Capacity
    feature_hash: Token = ""
    probe: Token = ""


@dataclass(frozen=True)
class Data:
    """P: the batch of a lease. `digest` is `wire.digest(arrays)`."""

    TYPE: ClassVar[str] = "DATA"
    __pydantic_config__: ClassVar = _STRICT
    gen: Id
    plan: Name
    g: Id
    lease: Id
    digest: Digest
    notes: Notes
    arrays: SkipValidation[dict[str, np.ndarray]] = field(repr=False, default_factory=dict)


@dataclass(frozen=True)
class Nack:
    """P: this lease cannot be made; `later`: not now, for a cause that may pass."""

    TYPE: ClassVar[str] = "NACK"
    __pydantic_config__: ClassVar = _STRICT
    gen: Id
    plan: Name
    g: Id
    lease: Id
    why: Text
    later: Flag = False


@dataclass(frozen=True)
class Bye:
    """P: leaving; whatever was leased to it is free."""

    TYPE: ClassVar[str] = "BYE"
    __pydantic_config__: ClassVar = _STRICT
    gen: Id


@dataclass(frozen=True)
class Alive:
    """T: alive."""

    TYPE: ClassVar[str] = "ALIVE"
    __pydantic_config__: ClassVar = _STRICT
    gen: Id


@dataclass(frozen=True)
class Welcome:
    """T: the current generation and what it is about; answered with READY."""

    TYPE: ClassVar[str] = "WELCOME"
    __pydantic_config__: ClassVar = _STRICT
    gen: Id
    offer: Offer


@dataclass(frozen=True)
class Refuse:
    """T: this producer does not fit; it prints the reason and ends. The same in every version."""

    TYPE: ClassVar[str] = "REFUSE"
    __pydantic_config__: ClassVar = _STRICT
    gen: Id
    reason: Text


@dataclass(frozen=True)
class Lease:
    """T: one credit: make batch `g` of `plan` without the clips set aside.

    `position` is the batch's place in the trainer's schedule: lower is needed sooner.
    """

    TYPE: ClassVar[str] = "LEASE"
    __pydantic_config__: ClassVar = _STRICT
    gen: Id
    plan: Name
    g: Id
    lease: Id
    position: Id
    set_aside: Clips = ()


@dataclass(frozen=True)
class Revoke:
    """T: advice, the lease is void; skip it if work has not begun."""

    TYPE: ClassVar[str] = "REVOKE"
    __pydantic_config__: ClassVar = _STRICT
    gen: Id
    lease: Id


@dataclass(frozen=True)
class Stop:
    """T: the run is over, answer BYE and leave."""

    TYPE: ClassVar[str] = "STOP"
    __pydantic_config__: ClassVar = _STRICT
    gen: Id
    reason: Text = ""


Message = Heartbeat | Ready | Data | Nack | Bye | Alive | Welcome | Refuse | Lease | Revoke | Stop
FROM_PRODUCER = {m.TYPE: m for m in (Heartbeat, Ready, Data, Nack, Bye)}
FROM_TRAINER = {m.TYPE: m for m in (Alive, Welcome, Refuse, Lease, Revoke, Stop)}

_DECLARED = (*FROM_PRODUCER.values(), *FROM_TRAINER.values(), Offer, Notes, ArrayEntry)
_FIELDS = {m: tuple(f.name for f in dataclasses.fields(m)) for m in _DECLARED}
_ENTRIES = Annotated[tuple[ArrayEntry, ...], Field(max_length=MAX_ARRAYS)]


@functools.cache
def _checker(kind: Any) -> TypeAdapter:
    """Built when first needed: all of them take 70 ms, which a command that sends nothing need not
    spend.
    """
    return TypeAdapter(kind)


def fields_of(message: Message | Offer | Notes | ArrayEntry) -> dict[str, Any]:
    """A message's fields by name; fields that are messages become dicts, too."""
    found = {}
    for name in _FIELDS[type(message)]:
        value = getattr(message, name)
        found[name] = fields_of(value) if type(value) in _FIELDS else value
    return found


def message_of(kind: type[Message], fields: Mapping[str, Any]) -> Message:
    """The message with these fields.

    WireError: one is missing, unknown, or has a value that is not allowed.
    """
    try:
        return _checker(kind).validate_python(fields)
    except ValidationError as error:
        raise WireError(f"{kind.TYPE}: {_first(error)}") from None


def entries_of(value: Any) -> tuple[ArrayEntry, ...]:
    """The description of arrays in a DATA message. WireError: it is not one."""
    try:
        return _checker(_ENTRIES).validate_python(value)
    except ValidationError as error:
        raise WireError(f"DATA: arrays.{_first(error)}") from None


def _first(error: ValidationError) -> str:
    found = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(map(str, found["loc"]))
    return f"{where:.80}: {found['msg']:.120}, not {reprlib.repr(found['input'])}"
