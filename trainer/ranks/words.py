"""The messages between a run's trainers: words of one frame, and batches with their arrays
after it.

The first trainer leads; the others follow. Every word but `hello` has the leader's `session`, so
that nothing from an earlier leader is taken for the current one's.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import msgpack

from common.system.errors import RunError
from common.system.lifecycle import SUPERVISOR
from common.transport.messages import WireError, printable
from common.transport.wire import MAX_HEADER_BYTES

MAX_PAYLOAD = 1 << 24  # bytes of digests, or of a part of a step: some per tensor

# Kind → its fields. `number` counts meetings from 1.
FROM_FOLLOWER: dict[str, dict[str, type]] = {
    # `host`, `address` (of its collective server): of a follower that meets over tcp, else ""
    "hello": {"rank": int, "count": int, "pid": int, "family": str, "host": str, "address": str},
    "beat": {"doing": str},
    "used": {"g": int},
    "meet": {"number": int, "payload": bytes},
    "digests": {"step": int, "payload": bytes},
}
FROM_LEADER: dict[str, dict[str, type]] = {
    "beat": {},
    "set_up": {"stage": str, "addresses": list},
    "begin": {"step": int},
    "batch": {"g": int},
    "go": {"number": int, "payloads": list},
    "ask": {"step": int},
    "end": {"why": str, "code": int},  # the first trainer's exit code
    "refused": {"why": str},
}


class RankLost(RunError):
    """A trainer of the group is gone, hangs or is absent; all start again."""


class RanksDiffer(RunError):
    """Weights that must be equal in all trainers are not; nothing more is saved."""


@dataclass(frozen=True)
class Word:
    """A received word."""

    kind: str
    session: str
    fields: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]


def encode(kind: str, session: str, **fields: Any) -> bytes:
    """One frame."""
    said = {k: printable(v) if isinstance(v, str) else v for k, v in fields.items()}
    return msgpack.packb({"kind": kind, "session": session, **said})


def decode(frame: bytes | memoryview, table: dict[str, dict[str, type]]) -> Word:
    """Inverse of `encode`. WireError: it is not a word of `table`."""
    if len(frame) > MAX_PAYLOAD + MAX_HEADER_BYTES:
        raise WireError(f"a word of {len(frame)} bytes")
    try:
        said = msgpack.unpackb(frame)
        kind, session = said.pop("kind"), said.pop("session")
        wanted = table[kind]
    except (ValueError, TypeError, KeyError, AttributeError, msgpack.UnpackException) as e:
        raise WireError(f"no word between trainers: {type(e).__name__}: {e}") from None
    if not isinstance(session, str) or {k: type(v) for k, v in said.items()} != wanted:
        raise WireError(f"a word {kind!r} with other fields than {', '.join(wanted)}")
    return Word(kind, session, said)


def family() -> str:
    """Of the launcher that started this process: trainers of two launchers do not mix."""
    return os.environ.get(SUPERVISOR, "")
