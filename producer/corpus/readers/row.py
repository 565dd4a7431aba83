"""What every reader yields, and the rules they share: how to read lines and where a clip may
be.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from common.system.counted import counted
from common.system.errors import BadInput
from common.system.files import open_plain, why_irregular
from producer.corpus.readers.paths import FixedPlace, Place, has_audio_suffix

METADATA_NAMES = (
    "metadata.csv", "metadata.tsv", "metadata.txt", "metadata.jsonl", "metadata_train.csv",
    "metadata_train.tsv",
    "metadata_train.txt", "train.csv", "train.tsv", "train.txt", "train.jsonl",
    "train_manifest.json", "train_manifest.jsonl",
    "manifest.json", "manifest.jsonl", "cuts.jsonl", "cuts.jsonl.gz", "cuts_train.jsonl.gz",
    "transcript.txt", "transcripts.txt",
    "filelist.txt", "dataset.jsonl", "dataset.csv",
)  # fmt: skip
MOST_LINE = 4 << 20  # bytes
_MOST_DECODED = 64 << 20  # bytes of a file that one reads whole
_ARCHIVES = (".zip", ".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".7z", ".rar")
_TABLES = (".csv", ".tsv", ".jsonl", ".psv")


@dataclass(frozen=True)
class Row:
    """One line of a corpus."""

    file: str
    line: int
    id: str
    place: (
        Place | FixedPlace
    )  # not the paths themselves: 20 strings per row are gigabytes in a large corpus
    text: str
    language: str | None = None  # as written there; None if the corpus names none
    speaker: str | None = None

    @property
    def candidates(self) -> tuple[str, ...]:
        """The paths where its audio may be, the likeliest first; unchecked."""
        return self.place.candidates()


@dataclass(frozen=True)
class RowError:
    """A line that cannot be an utterance. `kind` is the short form, for counting."""

    file: str
    line: int
    id: str
    reason: str
    kind: str


@dataclass(frozen=True)
class Notice:
    """A warning about a whole file."""

    file: str
    message: str


@dataclass(frozen=True)
class Taken:
    """How a file was read: no fault, no warning, but worth showing."""

    file: str
    message: str


Item = Row | RowError | Notice | Taken


def usual_metadata(folder: Path) -> Path | None:
    """The metadata file of a folder: one with a usual name, else the only table; None:
    neither.
    """
    for name in METADATA_NAMES:
        if (folder / name).is_file():
            return folder / name
    tables = _tables(folder)
    return tables[0] if len(tables) == 1 else None


def _tables(folder: Path) -> list[Path]:
    return sorted(
        p
        for p in folder.iterdir()
        if p.suffix.lower() in _TABLES and p.is_file() and not p.name.startswith(".")
    )


def find_metadata(path: Path) -> Path:
    """The metadata file of a corpus given as that file or as its folder.

    BadInput: there is none.
    """
    if path.is_file():
        _check_name(path)
        return path
    if not path.is_dir():
        if path.exists():
            raise BadInput(f"{path}: {why_irregular(path.stat().st_mode)}")
        raise BadInput(
            f"{path}: no such file or folder; give a corpus folder or its metadata file"
            " (data.train=DIR)"
        )
    found = usual_metadata(path)
    if found is not None:
        return found
    several = ", ".join(p.name for p in _tables(path)[:10])
    if several:
        raise BadInput(
            f"{path}: which of {several} is the metadata? name the file (data.train={path}/…)"
        )
    nested = sorted(p.parent.name for name in METADATA_NAMES[:4] for p in path.glob(f"*/{name}"))
    inside = f"; {', '.join(nested[:5])} in it have metadata: name those folders" if nested else ""
    raise BadInput(
        f"{path}: no corpus found there; looked for {', '.join(METADATA_NAMES[:5])} and the like,"
        " *.parquet, VCTK, LibriTTS, Common Voice, M-AILABS, and recordings with a text beside"
        f" each (docs/data.md lists all){inside}"
    )


def _check_name(path: Path) -> None:
    """BadInput: the file is a recording, or an archive."""
    if has_audio_suffix(path.name):
        raise BadInput(
            f"{path}: a recording, not a corpus; give the folder, or the metadata file that"
            " names it"
        )
    if path.name.lower().endswith(_ARCHIVES):
        raise BadInput(f"{path}: an archive; unpack it, and give the folder")


_MARKS = (  # the longer one first: UTF-32's begins with UTF-16's
    (b"\xff\xfe\0\0", "utf-32"), (b"\0\0\xfe\xff", "utf-32"), (b"\xff\xfe", "utf-16"),
    (b"\xfe\xff", "utf-16"),
)  # fmt: skip


def lines(path: Path) -> Iterator[tuple[int, str | None]]:
    """(line number from 1, text without its line end) for each line of a file in UTF-8, UTF-16 or
    UTF-32 that is not blank.

    Removes a byte-order mark. CRLF and LF end a line, nothing else does (U+2028 or U+0085 inside a
    text stays). The text is None if the bytes are not UTF-8.

    Raises:
        BadInput: the file cannot be read, or does not have the encoding of its byte-order mark.
    """
    try:
        f = open_plain(path)
    except OSError as e:
        raise BadInput(f"{path}: cannot be read ({e.strerror})") from e
    with f:
        head = f.read(4)
        f.seek(0)
        encoding = next((name for mark, name in _MARKS if head.startswith(mark)), None)
        rows = _rows(path, f) if encoding is None else _decoded(path, f, encoding)
        for number, raw in enumerate(rows, 1):
            if number == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
                if encoding is None and b"\0" in raw[:4]:
                    raise BadInput(
                        f"{path}: null bytes where text should be (UTF-16 without its mark?); save"
                        " it as UTF-8"
                    )
            raw = raw.rstrip(b"\r\n")
            if not raw.strip():
                continue
            try:
                yield number, raw.decode()
            except UnicodeDecodeError:
                yield number, None


def _rows(path: Path, f: BinaryIO) -> Iterator[bytes]:
    """Lines with their ends. BadInput: one is longer than any text."""
    for number, raw in enumerate(iter(lambda: f.readline(MOST_LINE + 1), b""), 1):
        if len(raw) > MOST_LINE:
            raise BadInput(
                f"{path}:{number}: a line of more than {MOST_LINE >> 20} MiB; is this the metadata"
                " file?"
            )
        yield raw


def _decoded(path: Path, f: BinaryIO, encoding: str) -> list[bytes]:
    """The lines of a UTF-16 or UTF-32 file as UTF-8."""
    data = f.read(_MOST_DECODED + 1)
    if len(data) > _MOST_DECODED:
        raise BadInput(
            f"{path}: more than {_MOST_DECODED >> 20} MiB of {encoding.upper()}; save it as UTF-8"
        )
    try:
        return data.decode(encoding).encode().split(b"\n")
    except UnicodeDecodeError as e:
        name, at = encoding.upper(), f"byte {e.start} of {len(data)}"
        raise BadInput(
            f"{path}: not {name}, which its first bytes say it is ({at}: {e.reason}); save it as"
            " UTF-8"
        ) from e


def not_utf8(file: Path, line: int) -> RowError:
    """The error for a line whose bytes are not UTF-8."""
    return RowError(str(file), line, "", "not UTF-8; save the metadata file as UTF-8", "not UTF-8")


def text_of(file: Path, name: str = "") -> str | RowError:
    """The text of a file with one recording's text, its lines joined; or why there is none.

    `name`: the recording's id.
    """
    name = name or file.name.split(".")[0]
    if not file.is_file():
        return RowError(str(file), 1, name, "not a file that can be read", "text file unreadable")
    try:
        parts = list(lines(file))
    except BadInput as e:
        return RowError(
            str(file), 1, name, str(e).removeprefix(f"{file}: "), "text file unreadable"
        )
    if any(text is None for _, text in parts):
        return RowError(str(file), 1, name, "not UTF-8; save the text file as UTF-8", "not UTF-8")
    return " ".join(text.strip() for _, text in parts)


def without_text(count: int, first: str) -> str:
    """What to say of recordings that no text belongs to."""
    said = "{n} [recording has no text beside it|recordings have no text beside them] ([|first ]"
    return f"{counted(count, said)}{first})"
