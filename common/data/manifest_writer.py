"""Writes a manifest: under a temporary name, with its digest, then renamed into place."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from common.audio.treatment import Portion, Treatment
from common.data.manifest import (
    APPLICATION_ID,
    FIELDS,
    PORTION,
    TRAIN,
    VERSION,
    Reject,
    encode_tokens,
    file_uri,
)
from common.system.files import fsync

_SCHEMA = f"""
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {VERSION};
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE sources (id INTEGER PRIMARY KEY, root TEXT NOT NULL);
CREATE TABLE languages (id INTEGER PRIMARY KEY, name TEXT NOT NULL);
CREATE TABLE speakers (id INTEGER PRIMARY KEY, name TEXT NOT NULL);
CREATE TABLE utterances (
  id INTEGER PRIMARY KEY, source INTEGER NOT NULL, path TEXT NOT NULL, name TEXT NOT NULL,
  text TEXT NOT NULL, clean TEXT NOT NULL, tokens BLOB NOT NULL, num_tokens INTEGER NOT NULL,
  language INTEGER NOT NULL, speaker INTEGER NOT NULL, num_samples INTEGER NOT NULL,
  source_rate INTEGER NOT NULL, source_frames INTEGER NOT NULL, size INTEGER NOT NULL,
  split INTEGER NOT NULL);
CREATE TABLE rejects (
  file TEXT NOT NULL, line INTEGER NOT NULL, id TEXT NOT NULL, kind TEXT NOT NULL,
  reason TEXT NOT NULL);
CREATE TABLE files (
  path TEXT PRIMARY KEY, size INTEGER NOT NULL, mtime_ns INTEGER NOT NULL, facts TEXT NOT NULL)
  WITHOUT ROWID;
"""

_PORTIONS = """
CREATE TABLE portions (
  id INTEGER PRIMARY KEY, first INTEGER NOT NULL, frames INTEGER NOT NULL, gain REAL NOT NULL);
"""


@dataclass(frozen=True)
class NewUtterance:
    """An utterance to store; its fields are those of `Utterance`, `source` the number that
    `add_source` gave.
    """

    source: int
    path: str | os.PathLike
    name: str
    text: str
    clean: str
    tokens: Sequence[int]
    language: str
    speaker: str
    num_samples: int
    source_rate: int
    source_frames: int
    size: int
    split: int = TRAIN
    portion: Portion | None = None  # given if the writer has a treatment


class ManifestWriter:
    """Fills a new manifest; `close` numbers it, fsyncs it and renames it into place, `abandon`
    leaves nothing behind.

    As a context manager it closes on success and abandons on an exception.

    `treatment`: what is done to recordings; each utterance then comes with its portion.
    """

    def __init__(self, path: str | os.PathLike, treatment: Treatment | None = None):
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._aside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        self._aside.unlink(missing_ok=True)
        # nolock: no other process knows the file, and some network disks have no locks.
        uri = f"{file_uri(self._aside)}?nolock=1"
        self._db = sqlite3.connect(uri, uri=True, isolation_level=None)
        self._treated = treatment is not None and treatment.changes
        self._db.executescript(
            "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -65536;"
            f" {_SCHEMA} {_PORTIONS if self._treated else ''} BEGIN;"
        )
        if self._treated:
            self.set_meta("treatment", vars(treatment))
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
        """Register a folder that contains utterances; return the source's number."""
        self._roots.append(Path(os.path.abspath(root)))
        number = len(self._roots) - 1
        self._db.execute("INSERT INTO sources VALUES (?, ?)", (number, str(self._roots[-1])))
        return number

    @staticmethod
    def _intern(table: dict[str, int], name: str) -> int:
        return table.setdefault(name, len(table))

    def add_utterance(self, new: NewUtterance) -> int:
        """Append one; return its id, which counts from 0.

        A path below the source's root is stored relative to it.
        """
        absolute = os.path.abspath(new.path)
        root = str(self._roots[new.source]).rstrip(os.sep) + os.sep
        number = self.num_utterances
        speaker = self._intern(self._speakers, new.speaker)
        row = (
            number,
            new.source,
            absolute.removeprefix(root),
            new.name,
            new.text,
            new.clean,
            encode_tokens(new.tokens),
            len(new.tokens),
            self._intern(self._languages, new.language),
            speaker,
            new.num_samples,
            new.source_rate,
            new.source_frames,
            new.size,
            new.split,
        )
        self._db.execute(f"INSERT INTO utterances VALUES ({', '.join('?' * len(row))})", row)
        if self._treated:
            part = new.portion
            self._db.execute(
                "INSERT INTO portions VALUES (?, ?, ?, ?)",
                (number, part.first, part.frames, part.gain),
            )
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
        """Remember a file's header for the next scan."""
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
        self.set_meta("digest", _digest(self._db, self._languages, self._treated))
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


def _digest(db: sqlite3.Connection, languages: dict[str, int], treated: bool) -> str:
    names = [name for name, _ in sorted(languages.items(), key=lambda item: item[1])]
    h = xxhash.xxh3_128(json.dumps([VERSION, names]).encode())
    what = (
        f"SELECT {FIELDS}{PORTION} FROM utterances JOIN portions USING (id)"
        if treated
        else f"SELECT {FIELDS} FROM utterances"
    )
    for row in db.execute(f"{what} ORDER BY id"):
        # A clip outside its source's root counts by its file name: its place is this machine's
        # affair.
        path = os.path.basename(row[2]) if os.path.isabs(row[2]) else row[2]
        h.update(
            repr((*row[:2], path, *row[4:])).encode()
        )  # not row[3], the name: it may be an absolute path
    return h.hexdigest()
