"""What crosses the wire: the fields of a batch, their dtypes, shapes and pad values. Producers write it, the trainer holds them to it.

Shape letters: B rows, T positions after the conditioning latents (text and audio parts, then padding), L text-head positions,
F mel frames (of the conditioning clip, or of stage 1's crop), M mel channels.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from common.data.buckets import Bucket
from common.xtts.dims import ModelDims

MEL = "mel"  # stands for the dtype that `transport.mel_dtype` names


@dataclass(frozen=True)
class Field:
    """One array of a batch."""

    name: str
    dtype: str
    letters: str
    pad: float = 0


GPT_FIELDS = (
    Field("ids", "int32", "BT"),  # text ids; audio ids offset by num_text_tokens
    Field("positions", "int32", "BT"),  # text positions; audio positions offset by num_text_positions
    Field("text_targets", "int32", "BL", -1),
    Field("audio_targets", "int32", "BT", -1),
    Field("weights", "float32", "B"),
    Field("cond_mel", MEL, "BFM"),
)
DVAE_FIELDS = (
    Field("num_frames", "int32", "B"),
    Field("weights", "float32", "B"),
    Field("mel", MEL, "BFM"),
)
ARITHMETIC_FIELDS = (
    Field("value", "int64", "B"),
    Field("seed", "int64", "B"),
    Field("weights", "float32", "B"),
)
ROW_BYTES = "XTTS_TEST_ROW_BYTES"  # arithmetic batches carry so many bytes more per row, so that few rows can weigh as much as real ones
FIELDS = {"gpt": GPT_FIELDS, "dvae": DVAE_FIELDS, "arithmetic": ARITHMETIC_FIELDS}


def batch_spec(kind: str, bucket: Bucket, dims: ModelDims, mel_dtype: str) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """Name → (dtype, shape) of every array of one bucket's batch, in wire order. `kind`: "gpt", "dvae" or "arithmetic"."""
    frames = bucket.row_len if kind == "dvae" else dims.audio.cond_frames
    sizes = {"B": bucket.batch_size, "T": bucket.row_len, "L": bucket.text_len, "F": frames, "M": dims.audio.num_mels}
    spec = {f.name: (np.dtype(mel_dtype if f.dtype == MEL else f.dtype), tuple(sizes[c] for c in f.letters)) for f in FIELDS[kind]}
    if kind == "arithmetic" and os.environ.get(ROW_BYTES):
        spec["load"] = (np.dtype("uint8"), (bucket.batch_size, int(os.environ[ROW_BYTES])))
    return spec


def empty_batch(kind: str, bucket: Bucket, dims: ModelDims, mel_dtype: str) -> dict[str, np.ndarray]:
    """A batch of padding rows: every weight 0, every value finite."""
    pad = {f.name: f.pad for f in FIELDS[kind]}
    return {name: np.full(shape, pad.get(name, 0), dtype) for name, (dtype, shape) in batch_spec(kind, bucket, dims, mel_dtype).items()}


def num_bytes(kind: str, bucket: Bucket, dims: ModelDims, mel_dtype: str) -> int:
    """Bytes of one batch's arrays."""
    return sum(dtype.itemsize * int(np.prod(shape)) for dtype, shape in batch_spec(kind, bucket, dims, mel_dtype).values())


def check_batch(arrays: dict[str, np.ndarray], spec: dict[str, tuple[np.dtype, tuple[int, ...]]]) -> None:
    """ValueError naming the first array that is missing, surplus, or of another dtype or shape than `spec` says."""
    for name, (dtype, shape) in spec.items():
        a = arrays.get(name)
        if a is None or a.dtype != dtype or a.shape != shape:
            got = "nothing" if a is None else f"{a.dtype}{list(a.shape)}"
            raise ValueError(f"array '{name}': expected {dtype}{list(shape)}, got {got}")
    surplus = sorted(set(arrays) - set(spec))
    if surplus:
        raise ValueError(f"array '{surplus[0]}' does not belong to this batch")
