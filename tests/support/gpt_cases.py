"""Small GPTs and batches for tests: sizes that compile in a second, rows packed by hand."""

import dataclasses
import json
from pathlib import Path

import numpy as np

from common.data.buckets import Bucket
from common.xtts.dims import AudioDims, DvaeDims, GptDims, ModelDims

GOLDEN = Path(__file__).parents[1] / "golden" / "gpt.npz"
FRAMES = 12

MICRO = GptDims(
    layers=2,
    width=16,
    heads=2,
    num_text_tokens=20,
    num_audio_tokens=18,
    start_text=3,
    stop_text=0,
    max_text_tokens=12,
    max_audio_tokens=20,
    num_latents=4,
    perceiver_depth=1,
    perceiver_heads=2,
    perceiver_head_dim=8,
    cond_blocks=2,
    cond_groups=4,
    num_mels=80,
    dropout=0.1,
)
SMALL = dataclasses.replace(MICRO, layers=1, cond_blocks=1)
SMALL_BUCKETS = [
    Bucket(batch_size=2, row_len=20, text_len=7, num_codes=8),
    Bucket(batch_size=3, row_len=26, text_len=9, num_codes=12),
]


def model_dims(gpt: GptDims = MICRO, frames: int = FRAMES) -> ModelDims:
    return ModelDims("test", AudioDims(cond_max_samples=(frames - 1) * 256), DvaeDims(), gpt)


def without_dropout(gpt: GptDims = MICRO) -> GptDims:
    return dataclasses.replace(gpt, dropout=0.0)


def pack(gpt: GptDims, texts, codes, row_len: int, text_len: int) -> dict[str, np.ndarray]:
    """Contiguous rows, one per (text, codes) pair: START text | START codes STOP STOP STOP |
    padding.
    """
    rows = len(texts)
    ids, positions = np.zeros((rows, row_len), np.int32), np.zeros((rows, row_len), np.int32)
    text_targets, audio_targets = (
        np.full((rows, text_len), -1, np.int32),
        np.full((rows, row_len), -1, np.int32),
    )
    for row, (text, code) in enumerate(zip(texts, codes, strict=True)):
        audio_in = [gpt.start_audio, *code, *[gpt.stop_audio] * 3]
        begin, end = len(text) + 1, len(text) + 1 + len(audio_in)
        ids[row, :end] = [gpt.start_text, *text, *(gpt.num_text_tokens + i for i in audio_in)]
        positions[row, :end] = [
            *range(begin),
            *(gpt.num_text_positions + i for i in range(len(audio_in))),
        ]
        text_targets[row, :begin] = [*text, gpt.stop_text]
        audio_targets[row, begin:end] = [*code, *[gpt.stop_audio] * 4]
    return {
        "ids": ids,
        "positions": positions,
        "text_targets": text_targets,
        "audio_targets": audio_targets,
    }


def make_batch(
    bucket: Bucket, gpt: GptDims = MICRO, frames: int = FRAMES, seed: int = 0, lengths=None
) -> dict[str, np.ndarray]:
    """A full random batch of `bucket`; `lengths` = (text lengths, code lengths) per row, random by
    default.
    """
    rng = np.random.default_rng(seed)
    rows = bucket.batch_size
    if lengths is None:
        lengths = (
            rng.integers(2, bucket.text_len, rows),
            rng.integers(3, bucket.num_codes + 1, rows),
        )
    texts = [rng.integers(4, gpt.num_text_tokens, n) for n in lengths[0]]
    codes = [rng.integers(0, gpt.num_audio_tokens - 2, n) for n in lengths[1]]
    return {
        **pack(gpt, texts, codes, bucket.row_len, bucket.text_len),
        "cond_mel": rng.standard_normal((rows, frames, gpt.num_mels)).astype(np.float32),
        "weights": np.ones(rows, np.float32),
    }


@dataclasses.dataclass(frozen=True)
class Golden:
    """What Coqui's own class computed (tests/golden/make_gpt.py)."""

    arrays: dict[str, np.ndarray]
    meta: dict
    gpt: GptDims

    def part(self, name: str) -> dict[str, np.ndarray]:
        return {
            key[len(name) + 1 :]: array
            for key, array in self.arrays.items()
            if key.startswith(name + "/")
        }

    @property
    def weights(self) -> dict[str, np.ndarray]:
        return {key: array.astype(np.float32) for key, array in self.part("weight").items()}

    def batch(self, i: int) -> dict[str, np.ndarray]:
        """Batch i of the original's arrays, as contiguous rows."""
        b = self.part(f"batch{i}")
        texts = [row[:length] for row, length in zip(b["text"], b["text_lengths"], strict=True)]
        codes = [
            row[: -(-length // 1024)]
            for row, length in zip(b["codes"], b["wav_lengths"], strict=True)
        ]
        bucket = self.bucket
        mel = np.ascontiguousarray(b["cond_mel"][:, 0].transpose(0, 2, 1))
        rows = pack(self.gpt, texts, codes, bucket.row_len, bucket.text_len)
        return {**rows, "cond_mel": mel, "weights": np.ones(len(texts), np.float32)}

    @property
    def bucket(self) -> Bucket:
        """One shape for all of the golden batches, longer than any row."""
        return Bucket(batch_size=3, row_len=32, text_len=11, num_codes=14)


def load_golden() -> Golden:
    with np.load(GOLDEN) as file:
        arrays = dict(file)
    meta = json.loads(str(arrays["meta"]))
    return Golden(arrays, meta, GptDims(**meta["dims"], dropout=0.0))
