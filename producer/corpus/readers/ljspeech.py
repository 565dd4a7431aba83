"""LJSpeech: `metadata.csv` with lines `id|raw text|normalised text` or `id|text`, no header, no quoting; audio in `wavs/`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from common.system.errors import BadInput
from producer.corpus.readers.coqui import COLUMNS
from producer.corpus.readers.row import Item, Notice, Row, RowError, audio_candidates, find_metadata, lines, not_utf8

_NUMBER = re.compile(r"[-+]?[0-9]+([.,:][0-9]+)*( ?s)?\Z")

_ENOUGH = 3  # rows before a constant column looks odd

# What a first line calls its columns where it names them all the same.
_IDS = {"id", "clip", "clip_id", "name", "utt", "utt_id", "utterance", "utterance_id", *COLUMNS["audio"]}
_TEXTS = {"raw", "raw_text", "raw_transcription", "normalised", "normalised_text", "normalized", "clean_text", *COLUMNS["text"]}
_OTHERS = {*COLUMNS["speaker"], *COLUMNS["language"]}
_SKIPPED = {"duration", "length"}  # numbers, which are not taken for the text


class _Distinct:
    """Whether more than one value was seen."""

    def __init__(self):
        self.first, self.several, self.count = "", False, 0

    def see(self, value: str) -> None:
        self.count += 1
        if self.count == 1:
            self.first = value
        self.several = self.several or value != self.first


def _is_header(root: Path, fields: list[str]) -> bool:
    """True for the names of columns, unless there is such a recording."""
    names = [f.strip('"').lower() for f in fields]
    if names[0] not in _IDS or not _TEXTS.intersection(names) or not _TEXTS.union(_OTHERS, _SKIPPED).issuperset(names[1:]):
        return False
    return not any(os.path.isfile(p) for p in audio_candidates(root, fields[0]))


def _skipped_header(file: str, number: int, fields: list[str]) -> Notice:
    """What is said of a header. BadInput: the last column that it names, where this format has the text, is something else."""
    names = "|".join(fields)
    if fields[-1].strip('"').lower() in _OTHERS:
        raise BadInput(
            f"{file}:{number}: the last column must be the text, and this header ({names}) names another there; "
            "call the first column audio_file, with format auto or coqui, to have the columns read by name"
        )
    return Notice(file, f"line {number} ({names}) names the columns and was skipped")


def read(path: Path) -> Iterator[Item]:
    """Rows of an LJSpeech folder, or of its metadata file.

    The text is the last column. A last column that is a bare number beside a worded one (a duration that some tool appended)
    is not the text: the worded one is, and the file gets a notice. So does a file whose first line names its columns.

    Raises:
        BadInput: there is no metadata file, or its first line names a last column that is not the text.
    """
    metadata = find_metadata(path)
    root, file = metadata.parent, str(metadata)
    numeric = rows = 0
    middle, last = _Distinct(), _Distinct()
    for i, (number, line) in enumerate(lines(metadata)):
        if line is None:
            yield not_utf8(metadata, number)
            continue
        fields = [f.strip() for f in line.split("|")]
        if i == 0 and _is_header(root, fields):
            yield _skipped_header(file, number, fields)
            continue
        rows += 1
        if len(fields) not in (2, 3):
            hint = "other columns need a header line: audio_file|text|speaker_name|language"
            if len(fields) == 1:
                hint = "fields are separated by '|', as in id|text"
            yield RowError(file, number, fields[0], f"expected 2 or 3 fields, got {len(fields)} ({hint})", "wrong number of fields")
            continue
        if not fields[0]:
            yield RowError(file, number, "", "empty id", "empty id")
            continue
        text = fields[-1] or fields[1]
        if len(fields) == 3 and _NUMBER.match(fields[2]) and any(c.isalpha() for c in fields[1]):
            numeric += 1
            text = fields[1]
        if len(fields) == 3 and fields[2]:
            middle.see(fields[1])
            last.see(fields[2])
        yield Row(file, number, fields[0], partial(audio_candidates, root, fields[0]), text)
    if numeric:
        yield Notice(file, f"column 3 looks numeric in {numeric}/{rows} rows; column 2 was taken as the text there")
    elif last.count >= _ENOUGH and not last.several and middle.several:
        hint = "if it is a speaker or a language, name the columns in a first line: audio_file|text|speaker_name"
        yield Notice(file, f"column 3 is {last.first!r} in all {last.count} rows of three; {hint}")
