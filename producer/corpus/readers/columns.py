"""Which column of a table is the recording, the text, the speaker, the language: by their names,
else by their contents.

`data.columns` decides where neither tells: `{text: sentence}` or, counted from 1, `{text: 3}`;
null: there is no such column.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from common.system.errors import BadInput
from common.xtts.text.clean import UnknownLanguage, normalize_language
from producer.corpus.readers.paths import has_audio_suffix

ROLES = ("audio", "text", "speaker", "language")
Given = Mapping[str, "str | int | None"]

# role → its usual names, compared in lower case, the best first
NAMES = {
    "audio": (
        "audio_file", "audio", "audio_path", "audio_filepath", "file", "file_name", "filename",
        "file_path", "filepath", "path",
        "wav", "wav_path", "wav_file", "wav_filename", "audio_filename", "id", "clip", "clip_id",
        "name", "utt", "utt_id",
        "utterance", "utterance_id",
    ),
    "text": (
        "text", "sentence", "transcript", "transcription", "normalized_text", "normalised_text",
        "text_normalized",
        "normalized_transcription", "normalized", "normalised", "clean_text", "raw_text",
        "raw_transcription", "raw", "caption",
        "text_original", "original_text",
    ),
    "speaker": ("speaker_name", "speaker", "speaker_id", "client_id", "spk", "spk_id", "speakerid",
        "voice"),
    "language": ("language", "lang", "locale", "language_id", "lang_id"),
}  # fmt: skip
_NUMBER = re.compile(r"[-+]?[0-9]+([.,:][0-9]+)*( ?s)?\Z")
_ENOUGH = 3  # rows needed to tell a column by its contents
_MOST_LANGUAGES = 30


@dataclass(frozen=True)
class Columns:
    """Index of each role's column; `texts`: the text's first, then those to use if it is
    empty.
    """

    audio: int
    texts: tuple[int, ...]
    speaker: int | None = None
    language: int | None = None
    width: int = 0
    names: tuple[str, ...] = field(default=())  # of a header

    def describe(self) -> str:
        """Which column was taken for which role."""
        roles = [
            ("audio", self.audio),
            ("text", self.texts[0]),
            ("speaker", self.speaker),
            ("language", self.language),
        ]
        said = [f"{role} = {self._column(i)}" for role, i in roles if i is not None]
        if self.texts[1:]:
            said[1] += f" (where it is empty: {', '.join(self._column(i) for i in self.texts[1:])})"
        used = {i for _, i in roles} | set(self.texts)
        unused = [self._column(i) for i in range(self.width) if i not in used]
        return ", ".join(said) + (f"; not used: {', '.join(unused)}" if unused else "")

    def _column(self, i: int) -> str:
        return f"column {i + 1}" + (f" ({self.names[i]})" if i < len(self.names) else "")


def is_number(value: str) -> bool:
    """Whether a field is a bare number, for example a duration."""
    return bool(_NUMBER.match(value))


def by_name(names: Sequence[str], given: Given | None = None, where: str = "") -> Columns | None:
    """The columns of a header; None: the names are not a header's.

    BadInput: `given` names a column that is not there.
    """
    plain = tuple(n.strip().strip('"').lower() for n in names)
    found = {}
    for role, aliases in NAMES.items():
        index = next((plain.index(a) for a in aliases if a in plain), None)
        if index is not None:
            found[role] = index
    named = [v for v in (given or {}).values() if isinstance(v, str)]
    if not named and not {"audio", "text"} <= set(found):
        return None
    if named and not any(v.lower() in plain for v in named) and not found:
        return None
    found = _settle(found, plain, given, where)
    raw = [] if "text" in (given or {}) else [plain.index(a) for a in NAMES["text"] if a in plain]
    texts = (found["text"], *(i for i in raw if i not in found.values()))
    return Columns(
        found["audio"],
        texts[:2],
        found.get("speaker"),
        found.get("language"),
        len(plain),
        tuple(names),
    )


def _settle(
    found: dict[str, int], plain: tuple[str, ...], given: Given | None, where: str
) -> dict[str, int]:
    found = dict(found)
    for role, column in (given or {}).items():
        if column is None:
            found.pop(role, None)
            continue
        if isinstance(column, str):
            if column.lower() not in plain:
                raise BadInput(
                    f"{where}: data.columns.{role}: there is no column '{column}'; there are"
                    f" {', '.join(plain)}"
                )
            column = 1 + plain.index(column.lower())
        if not 1 <= column <= len(plain):
            raise BadInput(
                f"{where}: data.columns.{role}={column}: the columns count from 1 to {len(plain)}"
            )
        found = {r: i for r, i in found.items() if i != column - 1 or r == role} | {
            role: column - 1
        }
    for role in ("audio", "text"):
        if role not in found:
            raise BadInput(
                f"{where}: no column is the {role}; name it with data.columns.{role}=; there are"
                f" {', '.join(plain)}"
            )
    return found


def by_content(
    rows: Sequence[Sequence[str]], given: Given | None = None, where: str = ""
) -> Columns:
    """The columns of rows without a header, by the contents of the rows of the commonest width."""
    widths = [len(r) for r in rows]
    width = max(sorted(set(widths)), key=widths.count)
    width = 3 if width == 2 and 3 in widths else width  # id|text among id|raw text|text
    rows = [r for r in rows if len(r) == width]
    columns = [_Column(i, [r[i] for r in rows]) for i in range(width)]
    audio = next((c.index for c in columns if c.recordings > 0.8), 0)
    rest = [c for c in columns if c.index != audio]
    found = {"audio": audio}
    language = next(
        (
            c
            for c in rest
            if c.is_language and any(o.words > c.words or o.length > 4 for o in rest if o is not c)
        ),
        None,
    )
    if language is not None and len(rest) > 1 and len(rows) >= _ENOUGH:
        found["language"] = language.index
        rest.remove(language)
    worded = [c for c in rest if c.numbers < 0.95]
    if worded and width > _ENOUGH:
        rest = worded
    speaker = _speaker(rest, len(rows))
    if speaker is not None:
        found["speaker"] = speaker.index
        rest = [c for c in rest if not c.is_few(len(rows)) or c.distinct > speaker.distinct]
    texts = [c.index for c in reversed(rest)] or [width - 1]
    if width != 3:  # only beside a normalised text is there another
        texts = texts[:1]
    found["text"] = texts[0]
    if given:
        found = _settle(found, tuple(str(i + 1) for i in range(width)), given, where)
        texts = [found["text"]] + [
            i for i in texts if i not in found.values() and "text" not in given
        ]
    return Columns(
        found["audio"], tuple(texts[:2]), found.get("speaker"), found.get("language"), width
    )


class _Column:
    """Statistics of a column's values."""

    def __init__(self, index: int, values: list[str]):
        self.index = index
        self.values = [v.strip() for v in values]
        filled = [v for v in self.values if v]
        count = max(1, len(filled))
        self.distinct = len(set(filled))
        self.length = sum(map(len, filled)) / count
        self.words = sum(len(v.split()) for v in filled) / count
        self.numbers = sum(map(is_number, filled)) / count
        self.decimals = sum(is_number(v) and "." in v for v in filled) / count
        self.recordings = sum(has_audio_suffix(v) for v in filled) / count

    @property
    def is_language(self) -> bool:
        """Whether every value is a language code."""
        codes = {v for v in self.values if v}
        return 0 < len(codes) <= _MOST_LANGUAGES and all(
            len(c) <= 7 and _is_language(c) for c in codes
        )

    def is_few(self, rows: int) -> bool:
        """Whether its values repeat often, as speakers' names do."""
        return 0 < self.distinct <= max(1, rows // 2) and self.words <= 3 and self.decimals < 0.5


def _is_language(code: str) -> bool:
    try:
        normalize_language(code)
    except UnknownLanguage:
        return False
    return True


def _speaker(columns: list[_Column], rows: int) -> _Column | None:
    """The column of few values beside one of many; of two such columns, the one with more values.

    Numbers after the text are durations.
    """
    if rows < _ENOUGH or len(columns) < 2:
        return None
    most = max(c.distinct for c in columns)
    few = [c for c in columns if c.is_few(rows) and 2 * c.distinct <= most]
    few = [c for c in few if c.numbers < 0.95 or c is not columns[-1]]
    return max(few, key=lambda c: c.distinct, default=None)
