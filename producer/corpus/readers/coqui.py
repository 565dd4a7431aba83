"""Coqui: a `|`- or tab-separated file whose first line names the columns, e.g. `audio_file|text|speaker_name|language`; no quoting."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from common.system.errors import BadInput
from producer.corpus.readers.row import Item, Row, RowError, audio_candidates, find_metadata, lines, not_utf8

# column → the names it goes by, compared in lower case
COLUMNS = {
    "audio": ("audio_file", "audio", "audio_path", "audio_filepath", "file", "file_name", "filename", "path", "wav", "wav_path"),
    "text": ("text", "sentence", "transcript", "transcription", "normalized_text"),
    "speaker": ("speaker_name", "speaker", "speaker_id", "client_id"),
    "language": ("language", "lang", "locale", "language_id"),
}


def parse_header(line: str) -> tuple[str, dict[str, int], int] | None:
    """(separator, column → index, number of columns) if `line` names at least the audio and the text column, else None."""
    for separator in ("|", "\t"):
        names = [n.strip().strip('"').lower() for n in line.split(separator)]
        found = {}
        for column, aliases in COLUMNS.items():
            index = next((names.index(a) for a in aliases if a in names), None)
            if index is not None:
                found[column] = index
        if "audio" in found and "text" in found:
            return separator, found, len(names)
    return None


def read(path: Path) -> Iterator[Item]:
    """Rows of a file with a header, or of the folder it lies in. BadInput: no such file, or its first line is no header.

    An empty language or speaker is None. A row's id is its audio path as written.
    """
    metadata = find_metadata(path)
    root, file = metadata.parent, str(metadata)
    rows = lines(metadata)
    number, first = next(rows, (1, ""))
    header = parse_header(first or "")
    if header is None:
        raise BadInput(f"{metadata}:{number}: no header; the first line must name the columns, like audio_file|text|speaker_name|language")
    separator, columns, width = header
    for number, line in rows:
        if line is None:
            yield not_utf8(metadata, number)
            continue
        fields = [f.strip() for f in line.split(separator)]
        audio = fields[columns["audio"]] if columns["audio"] < len(fields) else ""
        if len(fields) != width:
            yield RowError(file, number, audio, f"expected {width} fields as in the header, got {len(fields)}", "wrong number of fields")
            continue
        if not audio:
            yield RowError(file, number, "", "empty audio path", "empty id")
            continue
        speaker, language = (fields[columns[c]] or None if c in columns else None for c in ("speaker", "language"))
        yield Row(file, number, audio, partial(audio_candidates, root, audio), fields[columns["text"]], language, speaker)
