"""How often each language and corpus comes in balanced training: `batching.weights`, and the
`share` of a source in `data.train`.

The sources with a share have exactly that; the others have what is left. Within each of these
parts, languages come by their weights, 1 where none is named.
"""

from __future__ import annotations

import numpy as np

from common.data.manifest import TRAIN, Manifest
from common.run.settings import Config
from common.system.errors import BadInput
from common.xtts.text.clean import UnknownLanguage, normalize_language

_WHOLE = 1e-9


def check(config: Config) -> None:
    """BadInput: weights or shares that have no effect, or shares that leave the rest nothing."""
    weights, found = config.batching.weights, _shares(config)
    given = [f"data.train[{i}].share={share:g}" for i, share in found.items()]
    named = [*(["batching.weights"] if weights else []), *given]
    for i, source in enumerate(config.data.val):
        if source.share is not None:
            raise BadInput(f"data.val[{i}].share: nothing is trained on data.val; leave it out")
    if named and config.batching.sampling != "balanced":
        raise BadInput(
            f"{', '.join(named)}: of batching.sampling=balanced alone; set that, or leave them out"
        )
    total, rest = sum(found.values()), len(found) < len(config.data.train)
    if total > 1 + _WHOLE or (rest and total > 1 - _WHOLE):
        left = ", and leave nothing for the others" if rest else ""
        raise BadInput(
            f"{', '.join(given)} come to {total:g}{left}: make them less than 1 together"
        )
    if given and not rest and total < 1 - _WHOLE:
        raise BadInput(f"{', '.join(given)} come to {total:g}, and no other source has the rest")


def groups_of(config: Config, manifest: Manifest) -> tuple[np.ndarray, np.ndarray] | None:
    """(int[N] the group of each utterance, float64[G] the share of each group); None: languages
    come equally often, or every utterance once an epoch.

    BadInput: a language that the corpus does not have, a source with a share but no utterances.
    """
    weights = config.batching.weights
    if not weights and not _shares(config):
        return None
    by_name = {_code(name): weight for name, weight in weights.items()}
    absent = sorted(set(by_name) - set(manifest.languages))
    if absent:
        raise BadInput(
            f"batching.weights: the corpus has no {', '.join(absent)}; it has"
            f" {', '.join(manifest.languages)}"
        )
    columns, num_languages = manifest.columns(), len(manifest.languages)
    part = _parts(config, columns)
    group = part * num_languages + columns["language"]
    there = np.bincount(group[columns["split"] == TRAIN], minlength=group.max() + 1) > 0
    weight = np.array([by_name.get(name, 1.0) for name in manifest.languages])
    share = np.zeros(len(there))
    for number, of_part in _share_of_parts(config).items():
        own = np.arange(len(there)) // num_languages == number
        within = np.where(own & there, np.resize(weight, len(there)), 0.0)
        if not within.any():
            raise BadInput(
                f"{_named(config, number)}: there is nothing to train on; see the scan's report"
            )
        share += of_part * within / within.sum()
    return group, share


def lines(config: Config, manifest: Manifest) -> list[str]:
    """What a user should know of balanced training."""
    if config.batching.sampling != "balanced":
        return []
    columns, found = manifest.columns(), groups_of(config, manifest)
    ids = np.flatnonzero(columns["split"] == TRAIN)
    language = columns["language"][ids]
    if found is None:
        there = np.bincount(language, minlength=len(manifest.languages)) > 0
        of_language = there / there.sum()
    else:
        number = np.arange(len(found[1])) % len(manifest.languages)
        of_language = np.bincount(number, weights=found[1], minlength=len(manifest.languages))
    counts = np.bincount(language, minlength=len(manifest.languages))
    told = ", ".join(
        f"{name} {100 * of_language[i]:.0f} % (of the corpus {100 * counts[i] / len(ids):.0f} %)"
        for i, name in enumerate(manifest.languages)
        if counts[i]
    )
    shares = [
        f"; {100 * share:.0f} % from {config.data.train[i].path}"
        for i, share in _shares(config).items()
    ]
    return [f"balanced training: {told}{''.join(shares)}"]


def _shares(config: Config) -> dict[int, float]:
    """The shares that are set, by the number of their source."""
    return {
        i: source.share for i, source in enumerate(config.data.train) if source.share is not None
    }


def _parts(config: Config, columns: dict[str, np.ndarray]) -> np.ndarray:
    """int64[N]: 0 for sources without a share, else 1, 2, … as they are listed."""
    numbers = max(len(config.data.train), int(columns["source"].max(initial=0)) + 1)
    of_source = np.zeros(numbers, np.int64)
    for i in _shares(config):
        of_source[i] = i + 1
    return of_source[columns["source"]]


def _share_of_parts(config: Config) -> dict[int, float]:
    found = {i + 1: share for i, share in _shares(config).items()}
    rest = 1.0 - sum(found.values())
    return found if len(found) == len(config.data.train) else {0: rest, **found}


def _named(config: Config, part: int) -> str:
    if part:
        return f"data.train[{part - 1}].share={_shares(config)[part - 1]:g}"
    return "data.train: the sources without a share"


def _code(name: str) -> str:
    try:
        return normalize_language(name)
    except UnknownLanguage as e:
        raise BadInput(f"batching.weights: {e}") from e
