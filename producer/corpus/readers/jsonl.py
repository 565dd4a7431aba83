"""JSON, one object per line: NeMo's manifests, Hugging Face's `metadata.jsonl`, Lhotse's cuts; or
one list of such objects.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

from common.system.documents import parse_json
from common.system.errors import BadInput
from common.system.files import open_plain
from producer.corpus.readers.columns import NAMES, ROLES, Given
from producer.corpus.readers.paths import Locator, Place
from producer.corpus.readers.row import (
    MOST_LINE,
    Item,
    Row,
    RowError,
    Taken,
    find_metadata,
    lines,
    not_utf8,
)

MOST_BYTES = 1 << 29  # of a packed file
_MOST_IN_A_ROW = 1000
_MOST_LIST = 64 << 20  # of a file that is one JSON list, which is read whole
_USUAL, _DECODER = 4096, json.JSONDecoder()
_PART = "a part of a longer recording"


def is_jsonl(path: Path) -> bool:
    """Whether a file's name says that it is JSON."""
    return path.name.lower().endswith((".jsonl", ".json", ".ndjson", ".jsonl.gz", ".json.gz"))


def read(path: Path, given: Given | None = None) -> Iterator[Item]:
    """Rows of a file of JSON objects.

    Paths are relative to its folder. An object that is not a recording is an error of its line.

    Raises:
        BadInput: no such file, or no key of its first object is a known name for a recording or a
        text.
    """
    metadata = find_metadata(path)
    file, locator, keys, in_a_row = str(metadata), Locator(metadata.parent), None, 0
    for number, entry in _entries(metadata):
        if isinstance(entry, RowError):
            in_a_row += 1
            if in_a_row > _MOST_IN_A_ROW:
                raise BadInput(
                    f"{file}:{number}: {in_a_row} entries in a row are not JSON objects; is this"
                    " the metadata file?"
                )
            yield entry
            continue
        in_a_row = 0
        if "supervisions" in entry and "recording" in entry:
            if keys is None:
                keys = {}
                yield Taken(file, "read as jsonl: Lhotse's cuts")
            yield _cut(file, number, entry, locator)
            continue
        if keys is None:
            keys = _keys(entry, given, f"{file}:{number}")
            said = ", ".join(f"{role} = {keys[role]}" for role in ROLES if role in keys)
            unused = sorted(set(map(str, entry)) - {k.split(".")[0] for k in keys.values()})
            yield Taken(
                file,
                f"read as jsonl: {said}" + (f"; not used: {', '.join(unused)}" if unused else ""),
            )
        yield _row(file, number, entry, keys, locator)


def _entries(path: Path) -> Iterator[tuple[int, dict | RowError]]:
    """(line, object) of a file; for one JSON list (index, object)."""
    if path.name.lower().endswith(".gz"):
        yield from _parsed(path, enumerate(_unpacked(path), 1))
        return
    try:
        with open_plain(path) as f:
            is_list = f.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"["
            f.seek(0)
            data = f.read(_MOST_LIST + 1) if is_list else b""
    except OSError as e:
        raise BadInput(f"{path}: cannot be read ({e.strerror})") from e
    if not is_list:
        yield from _parsed(path, lines(path))
        return
    if len(data) > _MOST_LIST:
        raise BadInput(
            f"{path}: one JSON list of more than {_MOST_LIST >> 20} MiB; write one object a line"
            " (.jsonl)"
        )
    try:
        for number, entry in enumerate(_listed(data.decode("utf-8-sig")), 1):
            yield number, _object(path, number, entry)
    except ValueError as e:  # UnicodeDecodeError and JSONDecodeError
        raise BadInput(f"{path}: not JSON ({e})") from e
    except RecursionError as e:
        raise BadInput(f"{path}: not JSON (nested too deeply)") from e


def _listed(text: str) -> Iterator[object]:
    """The values of a JSON list, parsed one at a time to save memory."""
    space = re.compile(r"[ \t\r\n]*")

    def after(at: int) -> int:
        return space.match(text, at).end()

    at = after(after(0) + 1)
    if text[at : at + 1] == "]":
        at += 1
    else:
        while True:
            value, at = _one(text, at)
            yield value
            at = after(at)
            end = text[at : at + 1]
            if end not in (",", "]"):
                raise ValueError(f"no comma at character {at}")
            at = after(at + 1)
            if end == "]":
                break
    if after(at) != len(text):
        raise ValueError(f"more after the list, at character {at}")


def _one(text: str, at: int) -> tuple[object, int]:
    """(the value that begins there, where it ends); tries a usual size first: its copy is cheap."""
    for size in (_USUAL, MOST_LINE):
        part = text[at : at + size]
        try:
            value, end = _DECODER.raw_decode(part)
        except ValueError:
            if len(part) < size:
                raise
            continue
        if end < len(part) or at + end == len(text):  # a number may go on after the part
            return value, at + end
    raise ValueError(f"no value of at most {MOST_LINE >> 20} MiB at character {at}")


def _unpacked(path: Path) -> Iterator[bytes]:
    left = MOST_BYTES
    try:
        with open_plain(path) as packed, gzip.open(packed) as f:
            while line := f.readline(MOST_LINE + 1):
                left -= len(line)
                if left < 0:
                    raise BadInput(f"{path}: more than {MOST_BYTES >> 20} MiB; unpack it")
                if len(line) > MOST_LINE:
                    raise BadInput(f"{path}: a line of more than {MOST_LINE >> 20} MiB")
                yield line
    except (OSError, EOFError, zlib.error) as e:
        raise BadInput(f"{path}: not a whole gzip file ({e}); copy it again") from e


def _parsed(
    path: Path, numbered: Iterator[tuple[int, str | bytes | None]]
) -> Iterator[tuple[int, dict | RowError]]:
    for number, line in numbered:
        if line is None:
            yield number, not_utf8(path, number)
        elif line.strip():
            try:
                yield number, _object(path, number, parse_json(line))
            except ValueError as e:
                yield (
                    number,
                    RowError(
                        str(path),
                        number,
                        "",
                        f"not JSON ({type(e).__name__}: {e})"[:200],
                        "not JSON",
                    ),
                )


def _object(path: Path, number: int, entry: object) -> dict | RowError:
    if isinstance(entry, dict):
        return entry
    return RowError(
        str(path), number, "", f"not a JSON object but {type(entry).__name__}", "not JSON"
    )


def _value(entry: dict, key: str) -> object:
    for part in key.split("."):
        if not isinstance(entry, dict):
            return None
        entry = entry.get(part)
    return entry


def _keys(entry: dict, given: Given | None, where: str) -> dict[str, str]:
    """Role → key, by the names of the first object."""
    keys, plain = {}, {str(k).lower(): str(k) for k in entry}
    for role, aliases in NAMES.items():
        name = next((plain[a] for a in aliases if a in plain), None)
        if name is not None:
            keys[role] = (
                f"{name}.path" if role == "audio" and isinstance(entry[name], dict) else name
            )
    for role, key in (given or {}).items():
        if key is None:
            keys.pop(role, None)
        elif not isinstance(key, str) or _value(entry, key) is None:
            raise BadInput(
                f"{where}: data.columns.{role}: there is no '{key}'; there are {', '.join(plain)}"
            )
        else:
            keys[role] = key
    for role in ("audio", "text"):
        if role not in keys:
            raise BadInput(
                f"{where}: no key is a known name for the {role}: set data.columns.{role}=;"
                f" there are {', '.join(plain)}"
            )
    return keys


def _row(file: str, number: int, entry: dict, keys: dict[str, str], locator: Locator) -> Item:
    found = {role: _value(entry, key) for role, key in keys.items()}
    name, text = found["audio"], found["text"]
    if not isinstance(name, str) or not name:
        return RowError(
            file, number, "", f"no path of a recording in {keys['audio']!r}", "empty id"
        )
    if text is not None and not isinstance(text, (str, int, float)):
        return RowError(
            file,
            number,
            name,
            f"{keys['text']!r} is not a text but {type(text).__name__}",
            "not a text",
        )
    offset = entry.get("offset") or 0
    if isinstance(offset, (int, float)) and offset > 0:
        return RowError(
            file,
            number,
            name,
            f"{_PART} (from {offset:.2f} s on); cut it into a file of its own",
            _PART,
        )
    said = "" if text is None else str(text)
    return Row(file, number, name, Place(locator, name), said, *_own(found))


def _own(found: dict) -> list[str | None]:
    """Language and speaker that an object names, of whatever type its writer gave them."""
    values = (found.get(role) for role in ("language", "speaker"))
    return [None if v is None or v == "" else str(v) for v in values]


def _cut(file: str, number: int, cut: dict, locator: Locator) -> Item:
    """The row of a Lhotse cut with one supervision of the whole recording."""
    name, recording = str(cut.get("id", "")), cut.get("recording")
    sources = recording.get("sources") if isinstance(recording, dict) else None
    said = cut.get("supervisions")
    if not isinstance(said, list) or len(said) != 1 or not isinstance(said[0], dict):
        count = len(said) if isinstance(said, list) else 0
        return RowError(
            file, number, name, f"a cut with {count} supervisions; one is needed", "not one text"
        )
    only = sources[0] if isinstance(sources, list) and len(sources) == 1 else None
    if not isinstance(only, dict) or only.get("type") != "file":
        return RowError(
            file,
            number,
            name,
            "its recording is not one file; export the cuts to files first",
            "not one file",
        )
    whole, start, length = recording.get("duration"), cut.get("start", 0), cut.get("duration")
    numbers = [v for v in (whole, start, length) if isinstance(v, (int, float))]
    if len(numbers) == 3 and (start > 0.01 or whole - length > 0.01):
        reason = (
            f"{_PART} ({start:.2f} to {start + length:.2f} of {whole:.2f} s); export the cuts to"
            " files first"
        )
        return RowError(file, number, name, reason, _PART)
    source, text = str(only.get("source", "")), said[0]
    name, place = name or os.path.basename(source), Place(locator, source)
    return Row(file, number, name, place, str(text.get("text") or ""), *_own(text))
