"""Where a run may be created: in a folder that is new, empty, or left by a broken-off start.

The files of a run would lie among others, and `plan/` or `config.yaml` would take the place of
somebody's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from common.run.stages import NETWORKS
from common.system.errors import BadInput

# Of a run's files, the first to be moved in. identity.json comes last: without it, the start was
# broken off.
FIRST = "manifest.sqlite"
_OWN = ("launch.lock", "prepare.lock")
# What shells and batch systems open in the folder before this process starts.
_LOGS = (".log", ".out", ".err")
_OF_DISKS = ("lost+found", "@eaDir")
_NAMED = 3


def check(folder: Path) -> None:
    """Check that a run may be created in `folder`, which is none.

    BadInput: it was one, or it holds files that are no run's.
    """
    _check_no_history(folder)
    if (folder / FIRST).exists() or not folder.is_dir():
        return
    foreign = sorted(_foreign(folder))
    if foreign:
        more = f" and {len(foreign) - _NAMED} more" if len(foreign) > _NAMED else ""
        raise BadInput(
            f"{folder.resolve()} is no run folder and holds other files"
            f" ({', '.join(foreign[:_NAMED])}{more}): a run needs a folder of its own, new or"
            f" empty; name another, such as run={folder / 'run'}"
        )


def _foreign(folder: Path) -> Iterator[str]:
    """Names in `folder` that are neither ours nor harmless: hidden, a log, or a folder of those."""
    for path in folder.iterdir():
        name = path.name
        if name.startswith(".") or name in (*_OWN, *_OF_DISKS):
            continue
        if path.is_dir() and not path.is_symlink():
            if any(_foreign(path)):
                yield name
        elif not (path.is_file() and path.suffix in _LOGS):
            yield name


def _check_no_history(folder: Path) -> None:
    """BadInput: the folder has been trained in, but is not a run any more."""
    for stage in {s.folder for s in NETWORKS}:
        for name in ("checkpoints", "ledger.jsonl"):
            if (folder / stage / name).exists():
                raise BadInput(
                    f"{folder / stage} has {name} but {folder} no identity.json: it is not a whole"
                    " run; restore the file from a copy, or choose another run= folder"
                )
