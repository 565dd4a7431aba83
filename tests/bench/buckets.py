"""What does a number of buckets cost and gain: padding, milliseconds per step, utterances per
second, and the time to have all of its programs.

    python -m tests.bench.buckets [--counts 1,2,4,8,12] [--size xtts] [--batch 32] [--json FILE]

Lengths are like LJSpeech's: 1.1 to 10.1 s, about 6.5 s on average, 15 letters and 5.5 tokens per
second. Each bucket's step is timed on full rows on the device and weighted by its share of the
epoch's batches; programs are traced one by one and compiled side by side, as before training.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from common.gpu.choose import Device
from common.gpu.xla_env import xla_env
from tests.bench.step_rows import ROWS, operations, with_plain_attention

SAMPLE_RATE, PER_CODE = 22050, 1024
TOKENS_PER_S = 5.5
_COMPILED_AT_ONCE = 12


def lengths(num: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and codes of `num` clips, int64 each."""
    seconds = np.clip(np.random.default_rng(0).beta(3.2, 1.7, num) * 10.1, 1.1, 10.1)
    codes = np.ceil(seconds * SAMPLE_RATE / PER_CODE)
    return (seconds * TOKENS_PER_S).astype(np.int64), codes.astype(np.int64)


def full_batch(dims, bucket) -> dict:
    """A batch of the bucket whose rows are full, as the producers pack them."""
    from common.data.batch import empty_batch

    rng, gpt = np.random.default_rng(0), dims.gpt
    batch = empty_batch("gpt", bucket, dims, "float16")
    text = bucket.text_len - 1
    codes = bucket.row_len - bucket.text_len - 4
    for row in range(bucket.batch_size):
        tokens = rng.integers(1, gpt.num_text_tokens, text)
        audio = rng.integers(0, gpt.num_audio_tokens - 2, codes)
        stops = [gpt.stop_audio] * 4
        begin = text + 1
        batch["ids"][row] = [
            gpt.start_text, *tokens,
            *(gpt.num_text_tokens + np.array([gpt.start_audio, *audio, *stops[:3]])),
        ]  # fmt: skip
        batch["positions"][row] = [
            *range(begin), *(gpt.num_text_positions + i for i in range(codes + 4))
        ]  # fmt: skip
        batch["text_targets"][row, :begin] = [*tokens, gpt.stop_text]
        batch["audio_targets"][row, begin:] = [*audio, *stops]
    batch["weights"][:] = 1
    batch["cond_mel"][:] = rng.standard_normal(batch["cond_mel"].shape)
    return batch


def measure(count: int, args: argparse.Namespace) -> dict:
    """The row of one number of buckets."""
    import tensorflow as tf

    from common.data.buckets import make_buckets, padded_share, row_lengths
    from common.xtts.dims import SIZES
    from trainer.step.gpt import GptStep, StepOptions

    dims, gpu = SIZES[args.size], bool(tf.config.list_physical_devices("GPU"))
    tokens, codes = lengths(args.clips)
    buckets, of = make_buckets(
        tokens,
        codes,
        num_buckets=count,
        batch_size=args.batch,
        positions_per_batch=None,
        num_latents=dims.gpt.num_latents,
    )
    row = ROWS["ours"] if gpu else with_plain_attention(ROWS["ours"])
    options = StepOptions(
        compute_dtype="mixed_bfloat16",
        operations=operations(row),
        attention_dropout=0.0,
        mel_dtype="float16",
        jit=True,
        init_seed=None,
    )
    step = GptStep(dims, options, buckets)
    for i, t in enumerate(step.optimizer.tensors):
        noise = tf.random.stateless_normal(t.variable.shape, [i, 7]) * 0.02
        t.variable.assign(noise + (1.0 if t.key.endswith("norm.weight") else 0.0))
    began, given, coming = time.perf_counter(), set(), []
    with ThreadPoolExecutor(_COMPILED_AT_ONCE) as pool:
        for bucket in range(len(buckets)):
            new = [p for p in step.programs(bucket, False, True) if id(p) not in given]
            given |= {id(p) for p in new}
            coming += [pool.submit(p.compile) for p in new]
        for future in coming:
            future.result()
    ready_s = time.perf_counter() - began
    ms = [timed(tf, step, i, full_batch(dims, b), args.steps) for i, b in enumerate(buckets)]
    batches = np.ceil(np.bincount(of, minlength=len(buckets)) / args.batch)
    mean = float(np.average(ms, weights=batches))
    return {
        "buckets": len(buckets),
        "padding_percent": round(
            100 * padded_share(row_lengths(tokens, codes), [b.row_len for b in buckets]), 1
        ),
        "ms_per_step": round(mean, 1),
        "utterances_per_s": round(1e3 * args.batch / mean),
        "programs_ready_s": round(ready_s, 1),
        "ms_by_bucket": [round(x, 1) for x in ms],
        "peak_gb": round(tf.config.experimental.get_memory_info("GPU:0")["peak"] / 1e9, 1)
        if gpu
        else None,
    }


def timed(tf, step, bucket: int, batch: dict, steps: int) -> float:
    """Milliseconds per step."""
    from trainer.step.upload import Upload

    gpu = bool(tf.config.list_physical_devices("GPU"))
    upload = Upload("/device:GPU:0" if gpu else None)
    seeds = [upload.to_device(upload.to_host({}, (i, 1)), lambda: None)[1] for i in range(4)]
    batch = {k: tf.identity(tf.convert_to_tensor(v)) for k, v in batch.items()}
    for seed in seeds[:3]:
        step.update(bucket, batch, seed)["loss"].numpy()
    began = time.perf_counter()
    for i in range(steps):
        out = step.update(bucket, batch, seeds[i % 4])
    out["loss"].numpy()
    return 1e3 * (time.perf_counter() - began) / steps


def main() -> int:
    """Command line."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--counts", default="1,2,4,8,12")
    p.add_argument("--size", default="xtts", choices=("tiny", "small", "xtts"))
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--clips", type=int, default=13100, help="as many as LJSpeech has")
    p.add_argument("--steps", type=int, default=15, help="timed, of each bucket")
    p.add_argument("--json", type=Path)
    args = p.parse_args()
    os.environ.update(xla_env(os.environ, Device("gpu")))
    from common.gpu.device import import_tensorflow

    tf = import_tensorflow()
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)
    # As in training (`trainer.stages`).
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    rows = []
    for count in (int(c) for c in args.counts.split(",")):
        rows.append(measure(count, args))
        print(json.dumps(rows[-1]), flush=True)  # noqa: T201
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
