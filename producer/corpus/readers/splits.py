"""Which parts of a corpus folder to read, and as what: the metadata, an evaluation set beside it,
and what to ignore.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from common.system.counted import counted
from producer.corpus.readers import parquet
from producer.corpus.readers.row import METADATA_NAMES, Notice, usual_metadata

EVALUATION = ("eval", "evaluation", "val", "valid", "validation", "dev")
_TRAIN = re.compile(r"(?<![a-z])train(?![a-z])", re.I)
_SPLIT = re.compile(r"(?<![a-z])(train|test|" + "|".join(EVALUATION) + r")(?![a-z])", re.I)
Part = tuple[Path, bool]  # what to read, and whether it is the evaluation set


def parts(path: Path, separate: bool) -> tuple[list[Part], list[Notice]]:
    """The parts of a corpus that is given as a folder, and notices about them.

    `metadata_train.csv` with `metadata_eval.csv` beside it (`train.csv` and `dev.csv`, `train/` and
    `validation/`, `train-*.parquet`) are a training and an evaluation set; a test set is ignored.
    `separate`: an evaluation set is given elsewhere (`data.val`), or this is one.
    """
    if not path.is_dir():
        return [(path, False)], _unread_beside(path)
    named = next((path / n for n in METADATA_NAMES if (path / n).is_file()), None)
    if named is not None:
        return _with_evaluation(path, named, separate)
    if usual_metadata(path) is not None:
        return [(path, False)], []
    shards = parquet.files_in(path)
    if shards:
        return _shards(path, shards, separate)
    train = next(
        (p for p in (path / "train", path / "Train") if p.is_dir() and _holds_metadata(p)), None
    )
    if train is not None:
        return _with_evaluation(path, train, separate)
    return [(path, False)], []


def _holds_metadata(folder: Path) -> bool:
    return any((folder / n).is_file() for n in METADATA_NAMES)


def _split_of(name: str) -> str:
    """train, test or eval, by a file's or folder's name; "" if it names none."""
    found = _SPLIT.search(name)
    if found is None:
        return ""
    word = found.group(1).lower()
    return "eval" if word in EVALUATION else word


def _with_evaluation(path: Path, train: Path, separate: bool) -> tuple[list[Part], list[Notice]]:
    found, notices = [(train, False)], []
    kin = sorted(p for p in path.iterdir() if p != train and _is_kin(train, p))
    if _split_of(train.name) == "train" and not separate:
        best = sorted((p for p in kin if _split_of(p.name) == "eval"), key=_rank)
        if best:
            found.append((best[0], True))
            kin.remove(best[0])
            notices.append(
                Notice(str(best[0]), f"is the evaluation set, as it lies beside {train.name}")
            )
    notices += [Notice(str(p), f"not read; {train.name} beside it is") for p in kin]
    return found, notices


def _rank(path: Path) -> int:
    return EVALUATION.index(_SPLIT.search(path.name).group(1).lower())


def _is_kin(train: Path, other: Path) -> bool:
    """Whether `other` is metadata too: its name differs only in the split's word, or is a usual
    name.
    """
    if train.is_dir():
        return other.is_dir() and _split_of(other.name) != "" and _holds_metadata(other)
    if not other.is_file():
        return False
    if _split_of(other.name) and os.path.splitext(other.name)[1] == train.suffix:
        return _SPLIT.sub("", other.name) in {
            _SPLIT.sub("", train.name),
            f"metadata_{train.suffix}",
            train.name.replace("metadata", "metadata_"),
        }
    return other.name in METADATA_NAMES


def _shards(path: Path, shards: list[Path], separate: bool) -> tuple[list[Part], list[Notice]]:
    of = {p: _split_of(p.name) for p in shards}
    if "train" not in of.values():
        return [(p, False) for p in shards], []
    found = [(p, False) for p in shards if of[p] == "train"]
    held = [p for p in shards if of[p] == "eval"]
    notices = []
    if held and not separate:
        found += [(p, True) for p in held]
        notices.append(
            Notice(
                str(held[0]),
                counted(
                    len(held), "is the evaluation set ({n} [file|files]), as it lies beside train"
                ),
            )
        )
        held = []
    rest = [p for p in shards if of[p] not in ("train", "eval")] + held
    return found, notices + [
        Notice(str(p), "not read; the files of train beside it are") for p in rest
    ]


def _unread_beside(metadata: Path) -> list[Notice]:
    """Notices about files beside a training set that was named as a file: with the folder, they
    would be read too.
    """
    if not _TRAIN.search(metadata.name):
        return []
    kin = sorted(
        p
        for p in metadata.parent.iterdir()
        if p != metadata and _is_kin(metadata, p) and _split_of(p.name) == "eval"
    )
    return [
        Notice(
            str(p), f"not read, as {metadata.name} was named; name the folder, or this in data.val"
        )
        for p in kin
    ]
