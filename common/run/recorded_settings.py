"""A run's settings: `config.yaml` is what users read, the record in `identity.json` is what counts.

A file that is missing, cut or not YAML is restored from the record. One that says something else
is refused, since nobody can tell an edit from a flipped bit: give changes on the command line.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from common.run import proof as record
from common.run import settings
from common.run.proof import SETTINGS, Proof
from common.run.settings import Config
from common.run.settings_text import renamed
from common.system.errors import BadInput
from common.system.files import bytes_digest, write_atomically

log = logging.getLogger(__name__)
_NAMED = 3


def load(path: str | os.PathLike, overrides: list[str] = ()) -> Config:
    """As `settings.load`; if the file is a run's config.yaml, the settings on record.

    BadInput: as for `settings.load`, or the run's file was changed.
    """
    path = Path(path)
    if path.name != SETTINGS or not record.is_run(path.parent):
        return settings.load(path, overrides)
    return settings.of_tree(tree_of(Proof.read(path.parent)), path, overrides)


def of(proof: Proof) -> Config:
    """A run's settings. BadInput: config.yaml was changed."""
    return settings.of_tree(tree_of(proof), proof.path / SETTINGS)


def tree_of(proof: Proof) -> dict:
    """A run's settings as plain values. BadInput: config.yaml was changed."""
    path = proof.path / SETTINGS
    if proof.settings is None:
        return settings.read_tree(path)
    if proof.fault(SETTINGS) is None:
        return proof.settings
    try:
        found = _flat(renamed(settings.read_tree(path), str(path)))
    except BadInput as e:
        log.warning("%s; using the settings as %s has them", e, record.NAME)
        return proof.settings
    was = _flat(renamed(proof.settings, str(path)))
    changed = [k for k in found if k not in was or found[k] != was[k]]
    if changed:
        named = "; ".join(f"{k}: {was.get(k)} → {found[k]}" for k in changed[:_NAMED])
        more = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
        raise BadInput(
            f"{path} is not as the run's last start wrote it ({named}{more}). Give changes on the"
            f" command line: `launch.py run={proof.path} key=value`; or delete the file: it is"
            " written again as it was"
        )
    if len(found) < len(was):
        log.warning("%s is cut; using the settings as %s has them", path, record.NAME)
    return proof.settings


def keep(proof: Proof, config: Config) -> None:
    """Put settings on record; `proof.write` makes that durable, and the file follows."""
    proof.settings = config.model_dump(mode="json")
    proof.record(SETTINGS, bytes_digest(settings.as_text(config).encode()))


def write(proof: Proof, config: Config) -> None:
    """Set the settings of a run from now on, on record and in config.yaml."""
    keep(proof, config)
    proof.write()
    settings.dump(config, proof.path / SETTINGS)


def mend(proof: Proof, config: Config) -> None:
    """Write config.yaml again if it is missing or damaged. OSError: the disk refused."""
    path = proof.path / SETTINGS
    text = settings.as_text(config)
    if proof.fault(SETTINGS) is not None and bytes_digest(text.encode()) in proof.files[SETTINGS]:
        write_atomically(path, text)
        log.warning("%s was missing or damaged: restored", path)


def _flat(tree, prefix: str = "") -> dict[str, str]:
    if not isinstance(tree, dict):
        return {prefix: repr(tree)}
    return {
        k: v
        for name, sub in tree.items()
        for k, v in _flat(sub, f"{prefix}.{name}" if prefix else str(name)).items()
    }
