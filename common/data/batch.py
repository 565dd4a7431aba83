"""The fields of a batch as they cross the wire: dtypes, shapes and pad values.

Producers write batches by it; the trainer checks what arrives against it.

Shape letters: B rows, T positions after the conditioning latents (text and audio parts, then
padding), L text-head positions, F mel frames of the conditioning clip, M mel channels. In stage 1,
T is the frames of a crop.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from common.data.buckets import Bucket
from common.xtts.dims import ModelDims

MEL = "mel"  # stands for the dtype named by `transport.mel_dtype`


@dataclass(frozen=True)
class Field:
    """One array of a batch.

    Its shape is given by letters (see the module's docstring) and numbers.
    """

    name: str
    dtype: str
    shape: str | tuple[str | int, ...]
    pad: float = 0


GPT_FIELDS = (
    Field("ids", "int32", "BT"),  # text ids; audio ids offset by num_text_tokens
    Field(
        "positions", "int32", "BT"
    ),  # text positions; audio positions offset by num_text_positions
    Field("text_targets", "int32", "BL", -1),
    Field("audio_targets", "int32", "BT", -1),
    Field("weights", "float32", "B"),
    Field("cond_mel", MEL, "BFM"),
)
DVAE_FIELDS = (
    Field("num_frames", "int32", "B"),
    Field("weights", "float32", "B"),
    Field("mel", MEL, "BTM"),
)
FIELDS = {"gpt": GPT_FIELDS, "dvae": DVAE_FIELDS}  # by the kind of batch


def batch_spec(
    kind: str, bucket: Bucket, dims: ModelDims, mel_dtype: str
) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """Name → (dtype, shape) of every array of one bucket's batch, in wire order.

    `kind`: as in FIELDS.
    """
    sizes = {
        "B": bucket.batch_size,
        "T": bucket.row_len,
        "L": bucket.text_len,
        "F": dims.audio.cond_frames,
        "M": dims.audio.num_mels,
    }
    dtypes = {MEL: mel_dtype}
    return {
        f.name: (np.dtype(dtypes.get(f.dtype, f.dtype)), tuple(sizes.get(c, c) for c in f.shape))
        for f in FIELDS[kind]
    }


def empty_batch(
    kind: str, bucket: Bucket, dims: ModelDims, mel_dtype: str
) -> dict[str, np.ndarray]:
    """A batch of padding rows: every weight 0, every value finite."""
    pad = {f.name: f.pad for f in FIELDS[kind]}
    return {
        name: np.full(shape, pad.get(name, 0), dtype)
        for name, (dtype, shape) in batch_spec(kind, bucket, dims, mel_dtype).items()
    }


def num_bytes(kind: str, bucket: Bucket, dims: ModelDims, mel_dtype: str) -> int:
    """Bytes of one batch's arrays."""
    return sum(
        dtype.itemsize * int(np.prod(shape))
        for dtype, shape in batch_spec(kind, bucket, dims, mel_dtype).values()
    )


def check_batch(
    arrays: dict[str, np.ndarray], spec: dict[str, tuple[np.dtype, tuple[int, ...]]]
) -> None:
    """ValueError naming the first array that is missing, surplus, or of another dtype or shape than
    `spec` says.
    """
    for name, (dtype, shape) in spec.items():
        a = arrays.get(name)
        if a is None or a.dtype != dtype or a.shape != shape:
            got = "nothing" if a is None else f"{a.dtype}{list(a.shape)}"
            raise ValueError(f"array '{name}': expected {dtype}{list(shape)}, got {got}")
    surplus = sorted(set(arrays) - set(spec))
    if surplus:
        raise ValueError(f"array '{surplus[0]}' does not belong to this batch")
