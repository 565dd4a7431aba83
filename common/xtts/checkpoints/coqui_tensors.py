"""Tensors of Coqui's checkpoints on their way into a folder: which there must be,
and how each is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.xtts.checkpoints import shapes
from common.xtts.checkpoints.pretrained import (
    CoquiError,
    write_safetensors,
)

GPT, HIFIGAN, SPEAKER = (
    "gpt.",
    "hifigan_decoder.waveform_decoder.",
    "hifigan_decoder.speaker_encoder.",
)


_MOST_NAMED = 20


@dataclass(frozen=True)
class Loaded:
    """A tensor of a checkpoint as the folder will hold it: float32, or int64 where it counts.

    CoquiError where it is not finite.
    """

    tensor: Any
    key: str
    path: Path

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def dtype(self) -> np.dtype:
        return np.dtype("<f4" if self.tensor.dtype.kind == "f" else self.tensor.dtype)

    def read(self) -> np.ndarray:
        array = self.tensor.read().astype(self.dtype, copy=False)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            bad = int(array.size - np.isfinite(array).sum())
            raise CoquiError(
                f"{self.path}: {self.key} holds {bad} values that are not finite; use an earlier"
                " checkpoint"
            )
        return array


def below(prefix: str, state: Mapping[str, Any]) -> dict[str, Any]:
    return {k[len(prefix) :]: t for k, t in state.items() if k.startswith(prefix)}


def sizes_of(path: Path):
    def sizes(function, part: Mapping[str, Any], *more):
        try:
            return function({k: t.shape for k, t in part.items()}, *more)
        except shapes.UnknownSizes as e:
            raise CoquiError(f"{path} is not a whole XTTS v2 checkpoint: {e}") from e

    return sizes


def check_tensors(
    path: Path, expected: Mapping[str, tuple[int, ...]], found: Mapping[str, Any]
) -> None:
    """CoquiError naming at most 20 tensors in all that are missing, surplus or of another shape."""
    faults = [f"{k} is missing" for k in expected if k not in found]
    faults += [
        f"{k} is {found[k].shape}, needs {s}"
        for k, s in expected.items()
        if k in found and found[k].shape != s
    ]
    faults += [f"{k} is not part of XTTS" for k in found if k not in expected]
    if faults:
        more = f"\n  and {len(faults) - _MOST_NAMED} more" if len(faults) > _MOST_NAMED else ""
        listed = "\n  ".join(faults[:_MOST_NAMED])
        raise CoquiError(
            f"{path} is not an XTTS v2 checkpoint of its own sizes, {len(faults)} tensors differ:\n"
            f"  {listed}{more}"
        )


def write_part(folder: Path, name: str, part: Mapping[str, Any], source: Path) -> str:
    return write_safetensors(
        folder / f"{name}.safetensors", {k: Loaded(part[k], k, source) for k in sorted(part)}
    )
