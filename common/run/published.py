"""Stage 1's weights as it leaves them to stage 2: `dvae/model.safetensors`. The file exists once
the stage has ended; its digest is on record before that.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from common.run.folder import RunFolder
from common.run.proof import Proof
from common.system.errors import BadInput
from common.system.files import bytes_digest, write_atomically

log = logging.getLogger(__name__)
NAME = "dvae/model.safetensors"


def publish(run: RunFolder, weights: Mapping[str, np.ndarray]) -> None:
    """Record the weights' digest, then write them durably in one step.

    BadInput: stage 2 has begun with other weights.
    """
    data = _as_file(weights)
    proof = Proof.read(run.path)  # another start may have written it since this run was opened
    if proof.files is not None:
        if proof.files.get(NAME, [bytes_digest(data)])[0] != bytes_digest(data) and _used(run):
            raise BadInput(_beyond(run, "stage 1 now gives others"))
        proof.files[NAME] = [bytes_digest(data)]
        proof.write()
        run.proof = proof
    write_atomically(run.dvae_weights, data)
    log.info("stage 1 ended: %s", run.dvae_weights)


def mend(run: RunFolder) -> bool:
    """Restore damaged weights from a checkpoint of stage 1. Returns whether they were damaged.

    BadInput: no checkpoint has them, and stage 2 has begun or the damaged file is there.
    """
    why = run.proof.fault(NAME)
    if why is None or not run.identity["trains_dvae"]:
        return False
    for folder in sorted((run.path / "dvae" / "checkpoints").glob("*step-*"), reverse=True):
        try:
            data = _as_file(load_file(folder / "model.safetensors"))
        except (OSError, SafetensorError):
            continue
        if bytes_digest(data) in run.proof.files[NAME]:
            write_atomically(run.dvae_weights, data)
            run.damaged.pop(NAME, None)
            log.warning(
                "%s: %s; restored from %s, equal to the original", run.dvae_weights, why, folder
            )
            return True
    if why == "missing" and not _used(run):
        return False  # stage 1 goes on from its newest checkpoint
    raise BadInput(_beyond(run, why))


def _as_file(weights: Mapping[str, np.ndarray]) -> bytes:
    return save({k: np.asarray(v, order="C") for k, v in weights.items()})


def _used(run: RunFolder) -> bool:
    """Whether a later stage has trained with the weights."""
    later = [s for s in run.stages if run.spec(s).needs_dvae]
    return any(os.path.exists(run.stage_folder(s) / "ledger.jsonl") for s in later)


def _beyond(run: RunFolder, why: str) -> str:
    return (
        f"{run.dvae_weights}: {why}, and no checkpoint of stage 1 has what stage 2 trains with;"
        " restore the file from a copy, or start a new run"
    )
