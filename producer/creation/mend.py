"""A run's record of its files, and what is done at a start about files that are not as it says:
made anew from what they were made from.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from common.run import published, recorded_settings
from common.run import settings as config_module
from common.run.beginning import LIST
from common.run.folder import RunFolder
from common.run.proof import SETTINGS, Proof
from common.run.settings import Config
from common.system.errors import BadInput
from common.system.files import file_digest, fsync

_SINGLE = ("manifest.sqlite", "vocab.json", "mel_stats.safetensors")
_GIVEN = ("dvae/first.safetensors", "dvae/model.safetensors")


def first_record(folder: Path, identity: dict, config: Config) -> Proof:
    """The record of a run whose files are all in place."""
    proof = Proof(folder, identity, {}, config.model_dump(mode="json"))
    for name in (*_SINGLE, *_GIVEN, SETTINGS, LIST, *_plans(folder)):
        if (folder / name).is_file():
            proof.files[name] = [file_digest(folder / name)]
    return proof


def _plans(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in (folder / "plan").rglob("*") if p.is_file())


def damaged(
    run: RunFolder, aside: Path, lost: Iterable, own_plans: Callable[[Path], None]
) -> dict[str, str]:
    """Files of a run that are to be replaced by those in `aside`, and what is wrong with them.

    Args:
        aside: everything made anew for the same run; the plans are another corpus's where clips are
        lost. own_plans: makes the run's own plans below a folder.

    Raises:
        BadInput: one cannot be made anew.
    """
    if published.mend(run):
        run.damaged.pop(published.NAME, None)
    if run.proof.files is None:  # nothing says what is damaged: what was just made is right
        names = () if lost else (*_SINGLE[1:], *_plans(aside))
        return {n: "" for n in names if file_digest(aside / n) != _digest(run.path / n)}
    found = dict(run.damaged)
    if lost and any(name.startswith("plan/") for name in found):
        own_plans(aside)
    for name, why in found.items():
        if lost and name in ("mel_stats.safetensors", "manifest.sqlite"):
            raise BadInput(
                f"{run.path / name}: {why}, and clips that it was made from are gone; restore"
                " either from a copy"
            )
        if not (aside / name).is_file():
            raise BadInput(f"{run.path / name}: {why}; restore it from a copy")
        if (
            name.startswith(("plan/", LIST))
            and file_digest(aside / name) not in run.proof.files[name]
        ):
            raise BadInput(f"{run.path / name}: {why}, and it cannot be made as it was; restore it")
    return found


def _digest(path: Path) -> str | None:
    return file_digest(path) if path.is_file() else None


def move_in(run: RunFolder, config: Config, aside: Path, names: Iterable[str]) -> None:
    """Replace files of the run by those in `aside`, and the settings. The record comes first, and
    allows both, so that a power cut may come anywhere between.
    """
    folder, proof = run.path, run.proof
    if proof.files is None:
        proof = first_record(folder, run.identity, config)
    names = list(names)
    for name in names:
        if name != "rejects.tsv":
            proof.record(name, file_digest(aside / name))
        fsync(aside / name)
    recorded_settings.keep(proof, config)
    proof.write()
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(aside / name, folder / name)
        fsync((folder / name).parent)
    config_module.dump(config, folder / SETTINGS)


def told(run: RunFolder, mended: dict[str, str]) -> Iterator[str]:
    """Lines for the user."""
    for name, why in mended.items():
        yield f"warning: {run.path / name}: {why or 'damaged'}; made anew, equal to what it was"
    if run.proof.files is None:
        yield "the run was made before runs kept digests of their files; from now on it does"
