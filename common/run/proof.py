"""Proof that a run folder is unchanged: `identity.json` with its own digest, the digest of every
file that decides what is trained, and the settings.

A file may have two digests on record: it is replaced after `identity.json`, and a power cut may
come between. Older runs have no record; launch.py compares what their identity says about contents
when it starts them, and writes the record.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from common.system.documents import read_json
from common.system.errors import BadInput
from common.system.files import digest, file_digest, write_atomically

NAME = "identity.json"
SETTINGS = "config.yaml"
_OWN = ("files", "settings", "digest")  # keys of the document; the others are the run's identity


@dataclass
class Proof:
    """A run folder's record.

    `files`: path within the folder → the xxh3-128 values that it may have, the current one first.
    `settings`: the tree in config.yaml. Both None: a run made before there was a record.
    """

    path: Path
    identity: dict
    files: dict[str, list[str]] | None = None
    settings: dict | None = field(default=None, repr=False)

    @classmethod
    def read(cls, folder: Path) -> Proof:
        """Read a folder's record. BadInput: it is not a run folder, or the record is damaged."""
        path = folder / NAME
        try:
            document = read_json(path)
            why = _fault(document)
        except FileNotFoundError:
            raise BadInput(
                f"{folder} is not a run folder (no {NAME}); `python launch.py … run={folder}`"
                " creates one"
            ) from None
        except OSError as e:
            raise BadInput(f"cannot read {path}: {e.strerror}") from e
        except ValueError as e:
            why = str(e)
        if why is not None:
            raise BadInput(
                f"{path} is damaged ({why}); restore it from a copy: nothing else says what this"
                " run is"
            )
        identity = {k: v for k, v in document.items() if k not in _OWN}
        return cls(folder, identity, document.get("files"), document.get("settings"))

    def write(self) -> None:
        """Replace identity.json; durable when this returns."""
        body = {**self.identity}
        if self.files is not None:
            body |= {"files": self.files, "settings": self.settings}
            body["digest"] = digest(body)
        write_atomically(self.path / NAME, json.dumps(body, indent=1))

    def record(self, name: str, new: str) -> None:
        """Record the new digest of a file about to be replaced; the old one stays valid."""
        try:
            now = file_digest(self.path / name)
        except OSError:
            now = new
        allowed = now != new and now in self.files.get(name, ())
        self.files[name] = [new, now] if allowed else [new]

    def fault(self, name: str) -> str | None:
        """What is wrong with a file; None: nothing, or there is no record of it."""
        allowed = (self.files or {}).get(name)
        if allowed is None:
            return None
        try:
            found = file_digest(self.path / name)
        except FileNotFoundError:
            return "missing"
        except OSError as e:
            return f"cannot be read: {e.strerror}"
        return None if found in allowed else "damaged: its digest differs"

    def faults(self) -> dict[str, str]:
        """What is wrong with the files on record except the settings, by name."""
        found = {name: self.fault(name) for name in self.files or () if name != SETTINGS}
        return {name: why for name, why in found.items() if why is not None}


def _fault(document: object) -> str | None:
    """What is wrong with an identity.json that parses."""
    if not isinstance(document, dict):
        return "it is not a JSON object"
    if any(key in document for key in _OWN):
        body = {k: v for k, v in document.items() if k != "digest"}
        if document.get("digest") != digest(body):
            return "it does not match its own digest"
    if not isinstance(document.get("run_id"), str) or not isinstance(document.get("dims"), dict):
        return "it lacks the run's id or sizes"
    return None


def is_run(folder: str | os.PathLike) -> bool:
    """Whether a folder is a run's."""
    return (Path(folder) / NAME).is_file()
