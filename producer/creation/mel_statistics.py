"""A run's mel statistics: given, kept, or measured on a sample of its clips."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from common.audio.errors import DecodeError
from common.data import stateless_random
from common.data.manifest import TRAIN, Manifest
from common.run.folder import RunFolder
from common.run.settings import Config
from common.run.stages import stages_of
from common.system.errors import BadInput
from common.xtts import filterbank
from common.xtts.dims import ModelDims
from producer.batches.decode import decode

log = logging.getLogger(__name__)

# Enough clips for the mean of 80 channels to settle, few enough to take seconds.
CLIPS = 64


def mel_stats(
    config: Config,
    manifest: Manifest,
    existing: RunFolder | None,
    dims: ModelDims,
    begun: Path | None,
) -> np.ndarray:
    """float32[80]: the given statistics, or the mean |log-mel| per channel over a fixed sample of
    the training clips.
    """
    given = config.model.mel_stats or (None if begun is None else begun / "mel_stats.safetensors")
    if given is not None:
        try:
            arrays = load_file(given)
        except (SafetensorError, OSError) as e:
            raise BadInput(f"model.mel_stats={given} is not a safetensors file: {e}") from e
        stats = arrays.get("mel_stats")
        if stats is None or stats.shape != (dims.audio.num_mels,):
            raise BadInput(
                f"{given}: expected one tensor 'mel_stats' of {dims.audio.num_mels} values, has"
                f" {sorted(arrays)}"
            )
        return stats.astype(np.float32)
    if not any(s.networks for s in stages_of(config.model.size)):
        return np.ones(dims.audio.num_mels, np.float32)
    if existing is not None and existing.manifest.digest == manifest.digest:
        return existing.mel_stats
    ids = np.flatnonzero(manifest.columns()["split"] == TRAIN)
    chosen = ids[
        np.argsort(stateless_random.draws(stateless_random.key(0, len(ids)), np.arange(len(ids))))[
            :CLIPS
        ]
    ]
    errors: list[DecodeError] = []
    waves = _decodable(manifest, np.sort(chosen), errors)
    first = next(waves, None)
    if first is None:
        shown = "\n  ".join(map(str, errors[:10]))
        raise BadInput(
            f"none of the {len(errors)} clips drawn for the mel statistics can be used:\n  {shown}"
        )
    return filterbank.mel_stats(itertools.chain([first], waves))


def _decodable(
    manifest: Manifest, ids: np.ndarray, errors: list[DecodeError]
) -> Iterator[np.ndarray]:
    for u in manifest.utterances(ids):
        try:
            yield decode(u.path)
        except DecodeError as e:
            errors.append(e)
            log.warning("not used for the mel statistics: %s", e)
