"""The scanned corpus on disk: the utterances to train on, and every rejected row with its file,
line, id and reason.

One SQLite file, written once under a temporary name and renamed; every process reads it through
read-only connections, one per thread. Paths are relative to their source's root, so that another
machine may keep the same clips elsewhere (`data_roots`). The digest covers what training sees
(relative paths, sizes, texts, tokens, lengths, languages, speakers as groups, split), not where or
when the corpus was scanned.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.audio.treatment import Portion
from common.data.data_roots import Roots, remap
from common.system.errors import BadInput

VERSION = 1
APPLICATION_ID = 0x58545453  # "XTTS"
TRAIN, EVAL = 0, 1

FIELDS = (
    "id, source, path, name, text, clean, tokens, language, speaker, num_samples, source_rate,"
    " source_frames, size, split"
)
PORTION = ", portions.first, portions.frames, portions.gain"
_REST = 5  # number of fields after the speaker


@dataclass(frozen=True)
class Utterance:
    """One recording with its text.

    `num_samples` counts the samples in use at 22 050 Hz; `source_frames` counts the whole
    recording's at `source_rate`.
    """

    id: int
    path: Path
    name: str  # its id in the corpus
    text: str
    clean: str  # as tokenised
    tokens: np.ndarray  # int32[num_tokens]: language tag and text, no START or STOP
    language: str
    speaker: str
    num_samples: int
    source_rate: int
    source_frames: int
    size: int  # of the file, bytes
    split: int  # TRAIN or EVAL
    portion: Portion | None = None  # the part of the recording in use; None: all of it, unchanged


@dataclass(frozen=True)
class Reject:
    """A row that is left out. `kind` is the short form of `reason`, for counting."""

    file: str
    line: int
    id: str
    reason: str
    kind: str


def encode_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian uint16; if an id needs it, as uint32 after a zero byte (marked by
    the odd length).
    """
    if len(tokens) and max(tokens) > 0xFFFF:
        return b"\0" + np.asarray(tokens, "<u4").tobytes()
    return np.asarray(tokens, "<u2").tobytes()


def decode_tokens(blob: bytes) -> np.ndarray:
    """int32[n]: inverse of `encode_tokens`."""
    wide = len(blob) % 2
    return np.frombuffer(blob, "<u4" if wide else "<u2", offset=wide).astype(np.int32)


class Manifest:
    """A manifest opened for reading. Safe to share between threads; not across a fork."""

    def __init__(self, path: Path, roots: list[Path], meta: dict):
        self.path = path
        self.meta = meta
        self._roots = roots
        self._local = threading.local()
        self._all: list[sqlite3.Connection] = []
        self._lock = threading.Lock()
        # A corpus whose recordings are used unchanged has no such table.
        treated = meta.get("treatment") is not None
        self._select = f"SELECT {FIELDS}{PORTION if treated else ''} FROM utterances"
        self._select += " JOIN portions USING (id)" if treated else ""
        self.languages = [
            name for (name,) in self._db.execute("SELECT name FROM languages ORDER BY id")
        ]
        self.speakers = [
            name for (name,) in self._db.execute("SELECT name FROM speakers ORDER BY id")
        ]

    @classmethod
    def open(
        cls, path: str | os.PathLike, data_roots: Roots = None, check: bool = True
    ) -> Manifest:
        """Open an existing manifest read-only.

        Args:
            path: the SQLite file.
            data_roots: where the sources are on this machine, one folder for each folder that was
            scanned, in their order. A single one for several contains each under its old name.
            None: where they were scanned.
            check: also run SQLite's integrity check (0.1 s for 25 000 utterances), not only the
            format and count checks.

        Raises:
            BadInput: no such file, not a manifest, another version, damaged, or `data_roots` does
                not fit.
        """
        path = Path(path)
        if not path.is_file():
            raise BadInput(f"{path}: no manifest there; `launch.py scan` makes one")
        db = _connect(path)
        try:
            application, version = (
                db.execute(f"PRAGMA {p}").fetchone()[0] for p in ("application_id", "user_version")
            )
            if application != APPLICATION_ID:
                raise BadInput(f"{path}: not a manifest (or never finished); scan again")
            if version != VERSION:
                raise BadInput(
                    f"{path}: manifest version {version}, this program reads {VERSION}; scan again"
                )
            if check:
                fault = db.execute("PRAGMA quick_check(1)").fetchone()[0]
                if fault != "ok":
                    raise BadInput(f"{path}: damaged ({fault}); scan again")
            meta = {k: json.loads(v) for k, v in db.execute("SELECT key, value FROM meta")}
            (count,) = db.execute("SELECT count(*) FROM utterances").fetchone()
            if count != meta.get("num_utterances"):
                raise BadInput(
                    f"{path}: damaged ({count} utterances, {meta.get('num_utterances')} written);"
                    " scan again"
                )
            roots = [Path(root) for (root,) in db.execute("SELECT root FROM sources ORDER BY id")]
        except sqlite3.Error as e:
            raise BadInput(f"{path}: damaged or not a manifest ({e}); scan again") from e
        finally:
            db.close()
        return cls(path, remap(roots, data_roots), meta)

    @property
    def _db(self) -> sqlite3.Connection:
        db = getattr(self._local, "db", None)
        if db is None:
            db = self._local.db = _connect(self.path)
            with self._lock:
                self._all.append(db)
        return db

    def close(self) -> None:
        """Close every thread's connection."""
        with self._lock:
            while self._all:
                self._all.pop().close()
        self._local = threading.local()

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> Manifest:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __len__(self) -> int:
        return self.meta["num_utterances"]

    @property
    def digest(self) -> str:
        """32 hex digits over what training sees; the same for the same corpus in another folder."""
        return self.meta["digest"]

    @property
    def roots(self) -> list[Path]:
        """The folder of each source, on this machine."""
        return list(self._roots)

    def _utterance(self, row: tuple) -> Utterance:
        number, source, path, name, text, clean, tokens, language, speaker, *rest = row
        rest, portion = rest[:_REST], rest[_REST:]
        where = self._roots[source] / path  # an absolute path stays as it is
        return Utterance(
            number,
            where,
            name,
            text,
            clean,
            decode_tokens(tokens),
            self.languages[language],
            self.speakers[speaker],
            *rest,
            Portion(*portion) if portion else None,
        )

    def utterances(self, ids: Iterable[int]) -> list[Utterance]:
        """The utterances with these ids, in this order.

        KeyError: an id that does not exist (-1, a padding row, included).
        """
        found = []
        for i in ids:
            row = self._db.execute(f"{self._select} WHERE id = ?", (int(i),)).fetchone()
            if row is None:
                raise KeyError(f"no utterance {int(i)} in {self.path} (0..{len(self) - 1})")
            found.append(self._utterance(row))
        return found

    def __iter__(self) -> Iterator[Utterance]:
        for row in self._db.execute(f"{self._select} ORDER BY id"):
            yield self._utterance(row)

    def files(self, every: int = 1) -> Iterator[tuple[Path, int]]:
        """Path of a recording on this machine, and its size in bytes when it was scanned, for
        every `every`th utterance.
        """
        for source, path, size in self._db.execute(
            "SELECT source, path, size FROM utterances WHERE id % ? = 0 ORDER BY id", (every,)
        ):
            yield self._roots[source] / path, size

    def columns(self) -> dict[str, np.ndarray]:
        """The numbers of all utterances, [len(self)] each: source, num_samples, num_tokens int32,
        language int16, speaker int32, split uint8.
        """
        types = {
            "source": np.int32,
            "num_samples": np.int32,
            "num_tokens": np.int32,
            "language": np.int16,
            "speaker": np.int32,
            "split": np.uint8,
        }
        rows = self._db.execute(f"SELECT {', '.join(types)} FROM utterances ORDER BY id")
        table = np.fromiter(rows, np.dtype([(k, np.int32) for k in types]), len(self))
        return {k: table[k].astype(t) for k, t in types.items()}

    def rejects(self) -> list[Reject]:
        """Every row left out, in the order of the corpus."""
        rows = self._db.execute("SELECT file, line, id, reason, kind FROM rejects ORDER BY rowid")
        return [Reject(*row) for row in rows]

    def facts(self) -> Iterator[dict]:
        """What the scan found in each file that it opened, including rejected ones."""
        for (facts,) in self._db.execute("SELECT facts FROM files ORDER BY path"):
            yield json.loads(facts)

    def file_facts(self, path: str, size: int, mtime_ns: int) -> dict | None:
        """What the scan found in this very file; None if it was not there or has
        changed since.
        """
        row = self._db.execute(
            "SELECT facts FROM files WHERE path = ? AND size = ? AND mtime_ns = ?",
            (path, size, mtime_ns),
        ).fetchone()
        return json.loads(row[0]) if row else None


def _connect(path: Path) -> sqlite3.Connection:
    # immutable: the file is replaced, never changed, so no locks are needed (and none work on some
    # network disks).
    uri = f"{file_uri(path)}?mode=ro&immutable=1"
    return sqlite3.connect(uri, uri=True, check_same_thread=False, isolation_level=None)


def file_uri(path: Path) -> str:
    """SQLite's URI of a file, to which options can be added."""
    quoted = os.path.abspath(path).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
    return f"file:{quoted}"
