"""The scanned corpus on disk: utterances that are trained on, and every rejected row with its file,
line, id and reason.

One SQLite file, written once, aside, and renamed; read by every process through read-only
connections, one per thread. Paths are relative to their source's root, so that another machine may
keep the same clips elsewhere (`data_roots`). The digest covers what training sees (relative paths,
sizes, texts, tokens, lengths, languages, speakers as groups, split), not where or when it was
scanned.
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
import xxhash

from common.system.errors import BadInput
from common.system.files import fsync

VERSION = 1
APPLICATION_ID = 0x58545453  # "XTTS"
TRAIN, EVAL = 0, 1

_SCHEMA = f"""
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {VERSION};
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE sources (id INTEGER PRIMARY KEY, root TEXT NOT NULL);
CREATE TABLE languages (id INTEGER PRIMARY KEY, name TEXT NOT NULL);
CREATE TABLE speakers (id INTEGER PRIMARY KEY, name TEXT NOT NULL);
CREATE TABLE utterances (
  id INTEGER PRIMARY KEY, source INTEGER NOT NULL, path TEXT NOT NULL, name TEXT NOT NULL, text TEXT NOT NULL, clean TEXT NOT NULL,
  tokens BLOB NOT NULL, num_tokens INTEGER NOT NULL, language INTEGER NOT NULL, speaker INTEGER NOT NULL, num_samples INTEGER NOT NULL,
  source_rate INTEGER NOT NULL, source_frames INTEGER NOT NULL, size INTEGER NOT NULL, split INTEGER NOT NULL);
CREATE TABLE rejects (file TEXT NOT NULL, line INTEGER NOT NULL, id TEXT NOT NULL, kind TEXT NOT NULL, reason TEXT NOT NULL);
CREATE TABLE files (path TEXT PRIMARY KEY, size INTEGER NOT NULL, mtime_ns INTEGER NOT NULL, facts TEXT NOT NULL) WITHOUT ROWID;
"""
Roots = Sequence[str | os.PathLike] | str | os.PathLike | None
_FIELDS = (
    "id, source, path, name, text, clean, tokens, language, speaker, num_samples, source_rate,"
    " source_frames, size, split"
)


@dataclass(frozen=True)
class Utterance:
    """One recording with its text.

    `num_samples` counts at 22 050 Hz, `source_frames` at `source_rate`.
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


@dataclass(frozen=True)
class Reject:
    """A row that is not trained on. `kind` is the short form of `reason` that is counted."""

    file: str
    line: int
    id: str
    reason: str
    kind: str


def encode_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian uint16, or as uint32 behind a zero byte where an id needs it (an
    odd length marks that).
    """
    ids = np.asarray(tokens, np.int64)
    if len(ids) and ids.max() > 0xFFFF:
        return b"\0" + ids.astype("<u4").tobytes()
    return ids.astype("<u2").tobytes()


def decode_tokens(blob: bytes) -> np.ndarray:
    """int32[n]: inverse of `encode_tokens`."""
    wide = len(blob) % 2
    return np.frombuffer(blob, "<u4" if wide else "<u2", offset=wide).astype(np.int32)


class ManifestWriter:
    """Fills a new manifest; `close` numbers it, fsyncs it and renames it into place, `abandon`
    leaves nothing behind.

    As a context manager it closes on success and abandons on an exception.
    """

    def __init__(self, path: str | os.PathLike):
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._aside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        self._aside.unlink(missing_ok=True)
        self._db = sqlite3.connect(self._aside, isolation_level=None)
        self._db.executescript(
            "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -65536;"
            f" {_SCHEMA} BEGIN;"
        )
        self._languages: dict[str, int] = {}
        self._speakers: dict[str, int] = {}
        self._roots: list[Path] = []
        self.num_utterances = 0
        self.num_rejects = 0

    def __enter__(self) -> ManifestWriter:
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def add_source(self, root: str | os.PathLike) -> int:
        """Register a folder that utterances lie below; the source's number."""
        self._roots.append(Path(os.path.abspath(root)))
        number = len(self._roots) - 1
        self._db.execute("INSERT INTO sources VALUES (?, ?)", (number, str(self._roots[-1])))
        return number

    @staticmethod
    def _intern(table: dict[str, int], name: str) -> int:
        return table.setdefault(name, len(table))

    def add_utterance(
        self,
        *,
        source: int,
        path: str | os.PathLike,
        name: str,
        text: str,
        clean: str,
        tokens: Sequence[int],
        language: str,
        speaker: str,
        num_samples: int,
        source_rate: int,
        source_frames: int,
        size: int,
        split: int = TRAIN,
    ) -> int:
        """Append one; its id, which counts from 0.

        A path below the source's root is stored relative to it.
        """
        absolute = os.path.abspath(path)
        root = str(self._roots[source])
        stored = (
            os.path.relpath(absolute, root)
            if absolute.startswith(root.rstrip(os.sep) + os.sep)
            else absolute
        )
        number = self.num_utterances
        speaker_id = self._intern(self._speakers, speaker)
        row = (
            number,
            source,
            stored,
            name,
            text,
            clean,
            encode_tokens(tokens),
            len(tokens),
            self._intern(self._languages, language),
        )
        row += (speaker_id, num_samples, source_rate, source_frames, size, split)
        self._db.execute(f"INSERT INTO utterances VALUES ({', '.join('?' * 15)})", row)
        self.num_utterances += 1
        return number

    def set_split(self, ids: Iterable[int], split: int) -> None:
        """Move utterances to a split."""
        self._db.executemany(
            "UPDATE utterances SET split = ? WHERE id = ?", ((split, int(i)) for i in ids)
        )

    def add_reject(self, reject: Reject) -> None:
        """Record a row that is left out."""
        self._db.execute(
            "INSERT INTO rejects VALUES (?, ?, ?, ?, ?)",
            (reject.file, reject.line, reject.id, reject.kind, reject.reason),
        )
        self.num_rejects += 1

    def add_file(self, path: str, size: int, mtime_ns: int, facts: dict) -> None:
        """Remember what a file's header said, for the next scan."""
        self._db.execute(
            "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?)",
            (path, size, mtime_ns, json.dumps(facts)),
        )

    def set_meta(self, key: str, value: object) -> None:
        """Store a JSON value under a name."""
        self._db.execute(
            "INSERT OR REPLACE INTO meta VALUES (?, ?)",
            (key, json.dumps(value, ensure_ascii=False)),
        )

    def close(self) -> None:
        """Finish: digest, fsync, rename over the final path. OSError: the disk refused."""
        for table, names in (("languages", self._languages), ("speakers", self._speakers)):
            self._db.executemany(
                f"INSERT INTO {table} VALUES (?, ?)",
                ((number, name) for name, number in names.items()),
            )
        self.set_meta("digest", _digest(self._db, self._languages))
        self.set_meta("num_utterances", self.num_utterances)
        self._db.execute("COMMIT")
        self._db.close()
        fsync(self._aside)
        os.replace(self._aside, self._path)
        fsync(self._path.parent)

    def abandon(self) -> None:
        """Drop what was written; the final path stays as it was."""
        self._db.close()
        self._aside.unlink(missing_ok=True)


def _digest(db: sqlite3.Connection, languages: dict[str, int]) -> str:
    names = [name for name, _ in sorted(languages.items(), key=lambda item: item[1])]
    h = xxhash.xxh3_128(json.dumps([VERSION, names]).encode())
    for row in db.execute(f"SELECT {_FIELDS} FROM utterances ORDER BY id"):
        # A clip outside its source's root is known by its file name: where it lies is this
        # machine's affair.
        path = os.path.basename(row[2]) if os.path.isabs(row[2]) else row[2]
        h.update(
            repr((*row[:2], path, *row[4:])).encode()
        )  # not row[3], the name: it may be an absolute path
    return h.hexdigest()


class Manifest:
    """A manifest opened for reading. Safe to share between threads; not across a fork."""

    def __init__(self, path: Path, roots: list[Path], meta: dict):
        self.path = path
        self.meta = meta
        self._roots = roots
        self._local = threading.local()
        self._all: list[sqlite3.Connection] = []
        self._lock = threading.Lock()
        self.languages = [
            name for (name,) in self._db.execute("SELECT name FROM languages ORDER BY id")
        ]
        self.speakers = [
            name for (name,) in self._db.execute("SELECT name FROM speakers ORDER BY id")
        ]

    @staticmethod
    def create(path: str | os.PathLike) -> ManifestWriter:
        """Start a new manifest; nothing appears at `path` until the writer is closed."""
        return ManifestWriter(path)

    @classmethod
    def open(
        cls, path: str | os.PathLike, data_roots: Roots = None, check: bool = True
    ) -> Manifest:
        """Open an existing manifest read-only.

        Args:
            path: the SQLite file.
            data_roots: where the sources lie on this machine, one folder for each folder that was
            scanned, in their order. One for
                several holds each of them under its old name. None: where they were scanned.
            check: run SQLite's integrity check (0.1 s for 25 000 utterances) besides the format and
            count checks.

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
        return cls(path, _remap(roots, data_roots), meta)

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
        """32 hex digits over what training sees; equal for the same corpus in another folder."""
        return self.meta["digest"]

    @property
    def roots(self) -> list[Path]:
        """The folder of each source, on this machine."""
        return list(self._roots)

    def _utterance(self, row: tuple) -> Utterance:
        number, source, path, name, text, clean, tokens, language, speaker, *rest = row
        where = self._roots[source] / path  # an absolute path stays itself
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
        )

    def utterances(self, ids: Iterable[int]) -> list[Utterance]:
        """The utterances with these ids, in this order.

        KeyError: an id that does not exist (-1, a padding row, included).
        """
        found = []
        for i in ids:
            row = self._db.execute(
                f"SELECT {_FIELDS} FROM utterances WHERE id = ?", (int(i),)
            ).fetchone()
            if row is None:
                raise KeyError(f"no utterance {int(i)} in {self.path} (0..{len(self) - 1})")
            found.append(self._utterance(row))
        return found

    def __iter__(self) -> Iterator[Utterance]:
        for row in self._db.execute(f"SELECT {_FIELDS} FROM utterances ORDER BY id"):
            yield self._utterance(row)

    def files(self, every: int = 1) -> Iterator[tuple[Path, int]]:
        """Where a recording lies on this machine, and its size in bytes when it was scanned; of
        every `every`th utterance.
        """
        for source, path, size in self._db.execute(
            "SELECT source, path, size FROM utterances WHERE id % ? = 0 ORDER BY id", (every,)
        ):
            yield self._roots[source] / path, size

    def columns(self) -> dict[str, np.ndarray]:
        """The numbers of all utterances, [len(self)] each: num_samples, num_tokens int32, language
        int16, speaker int32, split uint8.
        """
        types = {
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
        """What the scan found in each file that it opened, rejected ones included."""
        for (facts,) in self._db.execute("SELECT facts FROM files ORDER BY path"):
            yield json.loads(facts)

    def file_facts(self, path: str, size: int, mtime_ns: int) -> dict | None:
        """What the scan found in this very file, or None if it was not there or has
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
    uri = f"file:{_quote(path)}?mode=ro&immutable=1"
    return sqlite3.connect(uri, uri=True, check_same_thread=False, isolation_level=None)


def _quote(path: Path) -> str:
    return os.path.abspath(path).replace("%", "%25").replace("?", "%3f").replace("#", "%23")


def _remap(roots: list[Path], data_roots: Roots) -> list[Path]:
    if data_roots is None:
        return roots
    given = (
        [Path(data_roots)]
        if isinstance(data_roots, (str, os.PathLike))
        else [Path(r) for r in data_roots]
    )
    old = list(dict.fromkeys(roots))  # two metadata files in one folder are two sources
    named = ", ".join(map(str, old))
    if len(given) == 1 and len(old) > 1:
        given = [given[0] / root.name for root in old]
        if len(set(given)) < len(old):
            raise BadInput(
                f"one data root for folders of the same name ({named}); give one each, in this"
                " order"
            )
    if len(given) != len(old):
        raise BadInput(
            f"{len(given)} data roots for {len(old)} sources: {named}; give one each, in this order"
        )
    missing = [str(g) for g in given if not g.is_dir()]
    if missing:
        raise BadInput(f"no such data folder: {', '.join(missing)}")
    new = dict(zip(old, (Path(os.path.abspath(g)) for g in given), strict=True))
    return [new[root] for root in roots]
