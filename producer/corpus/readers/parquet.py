"""Parquet:

Hugging Face's data sets, with embedded audio or with paths. Needs the package pyarrow.

Embedded recordings are unpacked once into a folder beside the file (`train-0.parquet` →
`train-0.audio/`), since every epoch reads them again in random order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from common.audio import containers
from common.system.errors import BadInput
from producer.corpus.readers.columns import NAMES, ROLES, Given
from producer.corpus.readers.paths import FixedPlace, Locator, Place
from producer.corpus.readers.row import Item, Row, RowError, Taken

_BATCH = 64  # rows in memory
_SUFFIXES = {
    "WAV": ".wav",
    "FLAC": ".flac",
    "OGG": ".ogg",
    "MP4": ".m4a",
    "WEBM": ".webm",
    "AIFF": ".aiff",
    "CAF": ".caf",
}


def is_parquet(path: Path) -> bool:
    """True for such a file."""
    return path.name.lower().endswith(".parquet")


def files_in(path: Path) -> list[Path]:
    """The parquet files of a folder, or of its `data/`."""
    return sorted(path.glob("*.parquet")) or sorted((path / "data").glob("*.parquet"))


def read(path: Path, given: Given | None = None) -> Iterator[Item]:
    """Rows of a parquet file, or of all those in a folder; a row's line is its number, from 1.

    Raises:
        BadInput: pyarrow is not installed, the file is damaged or lacks columns of audio and text,
        or its folder is read-only.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as e:
        raise BadInput(
            f"{path} is Parquet, which needs the package pyarrow: pip install"
            " 'xtts-trainer[parquet]'"
        ) from e
    files = [path] if path.is_file() else files_in(path)
    if not files:
        raise BadInput(f"{path}: no parquet files there")
    for file in files:
        try:
            with parquet.ParquetFile(file) as table:
                yield from _rows(file, table, given)
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as e:
            raise BadInput(
                f"{file}: not a whole Parquet file ({str(e).splitlines()[0][:200]}); copy it again"
            ) from e


def _rows(file: Path, table, given: Given | None) -> Iterator[Item]:
    columns = _columns(table.schema_arrow.names, given, str(file))
    embedded = "binary" in str(table.schema_arrow.field(columns["audio"]).type)
    folder, number = file.with_suffix(".audio"), 0
    said = ", ".join(f"{role} = {columns[role]}" for role in ROLES if role in columns)
    unused = sorted(set(table.schema_arrow.names) - set(columns.values()))
    where = f"; recordings unpacked into {folder}" if embedded else ""
    yield Taken(
        str(file),
        f"read as parquet: {said}{where}" + (f"; not used: {', '.join(unused)}" if unused else ""),
    )
    locator = Locator(file.parent)
    for batch in table.iter_batches(_BATCH, columns=list(columns.values())):
        for entry in batch.to_pylist():
            number += 1
            values = {role: entry[name] for role, name in columns.items()}
            audio = values["audio"]
            own = [
                str(values[r]) if values.get(r) not in (None, "") else None
                for r in ("language", "speaker")
            ]
            text = "" if values["text"] is None else str(values["text"])
            if isinstance(audio, bytes):
                audio = {"bytes": audio}
            if isinstance(audio, dict) and audio.get("bytes"):
                name, place = _unpacked(folder, number, audio, file)
            else:
                name = audio.get("path") if isinstance(audio, dict) else audio
                if not isinstance(name, str) or not name:
                    yield RowError(str(file), number, "", "no recording in this row", "empty id")
                    continue
                place = Place(locator, name)
            yield Row(str(file), number, name, place, text, *own)


def _columns(names: list[str], given: Given | None, where: str) -> dict[str, str]:
    plain = {n.lower(): n for n in names}
    found = {}
    for role, aliases in NAMES.items():
        name = next((plain[a] for a in aliases if a in plain), None)
        if name is not None:
            found[role] = name
    for role, name in (given or {}).items():
        if name is None:
            found.pop(role, None)
        elif name not in names:
            raise BadInput(
                f"{where}: data.columns.{role}: there is no column '{name}'; there are"
                f" {', '.join(names)}"
            )
        else:
            found[role] = name
    for role in ("audio", "text"):
        if role not in found:
            raise BadInput(
                f"{where}: no column is the {role}; name it with data.columns.{role}=; there are"
                f" {', '.join(names)}"
            )
    return found


def _unpacked(folder: Path, number: int, audio: dict, file: Path) -> tuple[str, FixedPlace]:
    """The id and place of an embedded recording; writes it unless it exists."""
    data, stem = audio["bytes"], f"{number:08d}"
    written = os.path.basename(str(audio.get("path") or "").replace("\\", "/"))
    suffix = os.path.splitext(written)[1].lower() or _SUFFIXES.get(
        containers.container_of_bytes(data), ".audio"
    )
    path = folder / f"{stem}{suffix}"
    try:
        if not path.is_file() or path.stat().st_size != len(data):
            folder.mkdir(exist_ok=True)
            aside = path.with_name(f".{path.name}.{os.getpid()}")
            aside.write_bytes(data)
            os.replace(aside, path)
    except OSError as e:
        raise BadInput(
            f"{file}: its recordings cannot be unpacked into {folder} ({e.strerror}); copy the file"
            " to a folder with room"
        ) from e
    return f"{number}/{written}" if written else str(number), FixedPlace(str(path))
