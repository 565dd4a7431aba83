"""Milliseconds per training step: one row per lever, each in a process of its own, in one table.

    python -m tests.bench.step
        every row at batch 32 and size xtts
    python -m tests.bench.step --rows ours,torch --batch 8,16,32
        some rows, several batch sizes
    python -m tests.bench.step --layers 6 --rows all
        the levers' effects with short compilations
    python -m tests.bench.step --check
        gradients of the fast operations against plain float32
    python -m tests.bench.step --rows ours --profile OUT
        where a step's time goes, kernel by kernel
    python -m tests.bench.step --rows "ours|ours fp8|ours fp8 wgrad bf16"
        products in FP8, and how many of them XLA handed to cuBLASLt as such

The step is the whole one: conditioning encoder, perceiver, GPT, heads, losses, gradients and AdamW,
on clips of 10 s with 150 text tokens, on data already on the device. `--json FILE` is read first
and appended to: rows that it has are not measured again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from common.gpu.choose import Device
from common.gpu.xla_env import xla_env
from tests.bench.owned import dies_with_me
from tests.bench.step_rows import ROWS, operations, with_plain_attention

DEFAULT_ROWS = (
    "gemm ceiling|ours|torch|bf16 plain|tf32 plain|fp32 plain|bf16 fused|ours, attention"
    " dropout|ours, stateless dropout"
)
TEXT_TOKENS, CODES = 150, 216  # 10 s
POSITIONS = 405  # of a row, latents and two of padding included


def main() -> int:
    """Measure what the flags ask for and print the table."""
    args = _arguments()
    if args.worker:
        print(json.dumps(_worker(json.loads(args.worker))), flush=True)  # noqa: T201
        return 0
    if args.check:
        from tests.bench.step_check import check

        os.environ.update(xla_env(os.environ, Device("gpu")))
        return check(args.layers or 4, args.size, args.check == "both")
    results = _read(args.json)
    began = time.monotonic()
    for row in _names(args.rows):
        for batch in (int(b) for b in args.batch.split(",")):
            job = {
                "row": row,
                "batch": batch,
                "size": args.size,
                "layers": args.layers,
                "steps": args.steps,
                "profile": args.profile,
            }
            job["memory_gb"] = args.memory_gb
            left = args.max_seconds - (time.monotonic() - began)
            if not args.again and any(
                all(r.get(k) == job[k] for k in ("row", "batch", "size", "layers", "memory_gb"))
                for r in results
            ):
                continue
            if left < 30:
                print(f"no time left for {row} at batch {batch}", flush=True)  # noqa: T201
                continue
            results.append(_measure(job, left, args.json, args.coqui))
            print(_line(results[-1]), flush=True)  # noqa: T201
    print(table(results))  # noqa: T201
    # A batch that is too large is a result.
    return int(any(r.get("error", "out of memory") != "out of memory" for r in results))


def _arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--rows",
        default=DEFAULT_ROWS,
        help="names separated by '|' (or ',' where no name has one), or all",
    )
    p.add_argument("--batch", default="32", help="batch sizes, separated by commas")
    p.add_argument("--size", default="xtts", choices=("tiny", "small", "xtts"))
    p.add_argument("--layers", type=int, help="fewer GPT blocks")
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--json", type=Path, help="results so far, appended to")
    p.add_argument("--again", action="store_true", help="measure rows that the JSON file has, too")
    p.add_argument("--max-seconds", type=float, default=86400.0)
    p.add_argument("--profile", help="a folder for the kernels' times and XLA's optimised program")
    p.add_argument(
        "--memory-gb", type=float, help="as on a smaller card: the most that TensorFlow may take"
    )
    p.add_argument(
        "--coqui",
        type=_program,
        default=sys.executable,
        help="for the rows named coqui: a Python that has coqui-tts",
    )
    p.add_argument("--check", nargs="?", const="fast", choices=("fast", "both"))
    p.add_argument("--worker", help=argparse.SUPPRESS)
    return p.parse_args()


def _program(name: str) -> str:
    """Its whole path, as it is started in another folder; a link stays one, or it would leave its
    virtual environment.
    """
    if (found := shutil.which(name)) is None:
        raise argparse.ArgumentTypeError(f"no program {name}")
    return os.path.abspath(found)


def _names(text: str) -> list[str]:
    if text == "all":
        return list(ROWS)
    names = [n.strip() for n in text.split("|" if "|" in text or text in ROWS else ",")]
    unknown = [n for n in names if n not in ROWS]
    if unknown:
        raise SystemExit(
            f"no row {', '.join(map(repr, unknown))}; the rows are: {' | '.join(ROWS)}"
        )
    return names


def _read(path: Path | None) -> list[dict]:
    return (
        [json.loads(line) for line in path.read_text().splitlines()]
        if path and path.exists()
        else []
    )


def _measure(job: dict, seconds: float, path: Path | None, coqui: str) -> dict:
    """One row in its own process: flags are read once, memory is counted from nothing, and a crash
    costs one row.
    """
    options = ROWS[job["row"]]
    flags = xla_env(
        {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {options.get('xla', '')}"}, Device("gpu")
    )["XLA_FLAGS"]
    cache = Path(tempfile.gettempdir()) / "xtts-bench-cache"
    if options.get("cache") == "cold":
        shutil.rmtree(cache, ignore_errors=True)
    if "cache" in options:
        cache.mkdir(exist_ok=True)
        flags += f" --xla_gpu_per_fusion_autotune_cache_dir={cache}"
    if job["profile"]:
        Path(job["profile"]).mkdir(parents=True, exist_ok=True)
    dumped = Path(job["profile"] or tempfile.mkdtemp(prefix="xtts-bench-xla-")) / "xla"
    if job["profile"] or "fp8" in options:
        flags += f" --xla_dump_to={dumped} --xla_dump_hlo_as_text"
    command, folder = [sys.executable, "-m", "tests.bench.step", "--worker", json.dumps(job)], ROOT
    if "coqui" in options:
        command, folder = (
            [coqui, *_coqui(job, options)],
            tempfile.gettempdir(),
        )  # not ROOT: Coqui's package has a module `trainer`, as this project
    began = time.monotonic()
    try:
        programs = (
            f"--tf_xla_persistent_cache_directory={cache}"
            if options.get("cache") in ("cold", "warm")
            else ""
        )
        env = {
            **os.environ,
            "TF_XLA_FLAGS": f"{os.environ.get('TF_XLA_FLAGS', '')} {programs}".strip(),
            "XLA_FLAGS": flags.strip(),
            "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
        }
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, timeout=seconds,
            preexec_fn=dies_with_me()
        )  # fmt: skip
        result = _last_json(done.stdout) or {"error": _why(done)}
    except subprocess.TimeoutExpired:
        result = {"error": f"not done within {seconds:.0f} s"}
    if not job["profile"]:
        shutil.rmtree(dumped.parent, ignore_errors=True)
    result = {**job, **result, "wall_s": round(time.monotonic() - began, 1)}
    if path:
        with open(path, "a") as file:
            file.write(json.dumps(result) + "\n")
    return result


def _coqui(job: dict, options: dict) -> list[str]:
    dims = _dims(job, options)
    gpt = {
        **dataclasses.asdict(dims.gpt),
        "start_audio": dims.gpt.start_audio,
        "stop_audio": dims.gpt.stop_audio,
    }
    asked = {
        "batch": job["batch"],
        "steps": job["steps"],
        "way": options["coqui"],
        "text_tokens": TEXT_TOKENS,
        "codes": CODES,
    }
    asked |= {
        "samples_per_code": dims.audio.samples_per_code,
        "cond_frames": dims.audio.cond_frames,
        "gpt": gpt,
    }
    return [str(ROOT / "tests" / "bench" / "coqui_step.py"), json.dumps(asked)]


def _last_json(text: str) -> dict | None:
    lines = [line for line in text.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else None


def _why(done: subprocess.CompletedProcess) -> str:
    lines = [
        x for x in done.stderr.splitlines() if x.strip() and not x.startswith(("I0000", "W0000"))
    ]
    for line in reversed(lines):
        if "RESOURCE_EXHAUSTED" in line or "out of memory" in line.lower():
            return "out of memory"
    return f"exit {done.returncode}: " + " / ".join(x.strip()[:300] for x in lines[-3:])


# -- the measured process --------------------------------------------------------------------------


def _worker(job: dict) -> dict:
    options = ROWS[job["row"]]
    if "torch" in options:
        from tests.bench.torch_step import measure as measure_torch

        dims = _dims(job, options)
        return measure_torch(
            dims, job["batch"], _bucket(job, options, dims), job["steps"], **options["torch"]
        )
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        if job["memory_gb"]:
            limit = tf.config.LogicalDeviceConfiguration(
                memory_limit=int(job["memory_gb"] * 1e9 / 2**20)
            )
            tf.config.set_logical_device_configuration(gpu, [limit])
        else:
            tf.config.experimental.set_memory_growth(gpu, True)
    device = (
        tf.config.experimental.get_device_details(gpus[0]).get("device_name", "GPU")
        if gpus
        else "CPU"
    )
    if options.get("ceiling"):
        from tests.bench.step_extras import ceiling

        return {"device": device, **ceiling(8192 if gpus else 512)}
    step, batch = build(job, options)
    return {"device": device, **_timed(tf, step, batch, job, options, bool(gpus))}


def _dims(job: dict, options: dict):
    from common.xtts.dims import SIZES

    dims = (
        SIZES[job["size"]]
        if job["layers"] is None
        else SIZES[job["size"]].with_layers(job["layers"])
    )
    return dataclasses.replace(
        dims, gpt=dataclasses.replace(dims.gpt, dropout=options.get("dropout", dims.gpt.dropout))
    )


def _bucket(job: dict, options: dict, dims):
    from common.data.buckets import Bucket

    return Bucket(
        job["batch"],
        options.get("positions", POSITIONS) - dims.gpt.num_latents,
        TEXT_TOKENS + 1,
        CODES,
    )


def make_batch(dims, bucket, seed: int = 0) -> dict:
    """Full rows of random ids and noise mels, as the producers pack them."""
    import numpy as np

    rng, gpt, rows = np.random.default_rng(seed), dims.gpt, bucket.batch_size
    text = rng.integers(1, gpt.num_text_tokens, (rows, TEXT_TOKENS))
    codes = rng.integers(0, gpt.num_audio_tokens - 2, (rows, CODES))
    column = np.ones((rows, 1), np.int64)
    stops = np.repeat(column * gpt.stop_audio, 4, axis=1)
    audio = np.concatenate([column * gpt.start_audio, codes, stops[:, :3]], 1)
    begin, end = TEXT_TOKENS + 1, TEXT_TOKENS + 1 + audio.shape[1]
    ids, positions = np.zeros((2, rows, bucket.row_len), np.int32)
    targets = np.full((rows, bucket.row_len), -1, np.int32)
    ids[:, :end] = np.concatenate([column * gpt.start_text, text, gpt.num_text_tokens + audio], 1)
    positions[:, :end] = [
        *range(begin),
        *(gpt.num_text_positions + i for i in range(audio.shape[1])),
    ]
    targets[:, begin:end] = np.concatenate([codes, stops], 1)
    return {
        "ids": ids,
        "positions": positions,
        "text_targets": np.concatenate([text, column * gpt.stop_text], 1).astype(np.int32),
        "audio_targets": targets,
        "weights": np.ones(rows, np.float32),
        "cond_mel": (
            rng.standard_normal((rows, dims.audio.cond_frames, gpt.num_mels)).astype(np.float16)
        ),
    }


def build(job: dict, options: dict):
    """A step with random weights, drawn on the device (zeros would run faster than real weights),
    and its batch on the device.
    """
    import tensorflow as tf

    from trainer.step.contract import Fp8
    from trainer.step.gpt import GptStep, StepOptions

    tf.config.experimental.enable_tensor_float_32_execution(options["precision"] != "fp32")
    dims = _dims(job, options)
    bucket = _bucket(job, options, dims)
    gpu = bool(tf.config.list_physical_devices("GPU"))
    jit = gpu or job.get("jit", False) or "fp8" in options
    if not gpu:  # a rehearsal
        options = with_plain_attention(options)
    made = StepOptions(
        compute_dtype=("mixed_bfloat16" if options["precision"] in ("bf16", "fp8") else "float32"),
        fp8=Fp8(**options["fp8"]) if "fp8" in options else None,
        operations=operations(options),
        attention_dropout=options.get("attention_dropout"),
        recompute=options.get("recompute", False),
        mel_dtype="float16",
        jit=jit,
        init_seed=None,
    )
    step = GptStep(dims, made, [bucket])
    for i, t in enumerate(step.optimizer.tensors):
        value = tf.random.stateless_normal(t.variable.shape, [i, 7]) * 0.02
        t.variable.assign(
            value + 1.0
            if t.key.endswith(("norm.weight", "ln_f.weight", "ln_1.weight", "ln_2.weight", "gamma"))
            else value
        )
    return step, {
        k: tf.identity(tf.convert_to_tensor(v)) for k, v in make_batch(dims, bucket).items()
    }


def _timed(tf, step, batch, job: dict, options: dict, gpu: bool) -> dict:
    from trainer.step.upload import Upload

    blocks, size = [], max(1, job["steps"] // 5)
    # On the device before the clock runs, as the feed brings them: a seed from the host would wait
    # for the step before.
    upload = Upload("/device:GPU:0" if gpu else None)
    seeds = [
        upload.to_device(upload.to_host({}, (i, 1)), lambda: None)[1] for i in range(10 + 5 * size)
    ]

    def once(i: int):
        seed = seeds[i % len(seeds)]
        if options.get("grouped"):
            step.micro(0, batch, seed, 1.0)
            return step.apply()
        return step.update(0, batch, seed)

    began = time.perf_counter()
    loss = float(once(0)["loss"])
    compile_s = time.perf_counter() - began
    for i in range(3):
        once(i)["loss"].numpy()
    for block in range(5):
        start = time.perf_counter()
        for i in range(size):
            out = once(10 + block * size + i)
        out["loss"].numpy()
        blocks.append(1e3 * (time.perf_counter() - start) / size)
    ms = statistics.median(blocks)
    peak = tf.config.experimental.get_memory_info("GPU:0")["peak"] if gpu else 0
    result = {
        "ms": round(ms, 2),
        "ms_range": [round(min(blocks), 2), round(max(blocks), 2)],
        "utterances_per_s": round(1e3 * job["batch"] / ms, 1),
        "peak_gb": round(peak / 1e9, 2),
        "compile_s": round(compile_s, 1),
        "loss": [round(loss, 4), round(float(out["loss"]), 4)],
    }
    if "fp8" in options:
        from tests.bench.step_extras import fp8_products

        result["products"] = fp8_products(os.environ["XLA_FLAGS"])
    if options.get("save"):
        from tests.bench.step_extras import saved

        result["save"] = saved(step, once)
    if job["profile"]:
        from tests.bench.kernel_times import profile

        result["kernels"] = profile(
            lambda: once(99)["loss"].numpy(), Path(job["profile"]), job["row"]
        )
    return result


# -- output ----------------------------------------------------------------------------------------


def _line(r: dict) -> str:
    if "error" in r:
        return f"{r['row']}, batch {r['batch']}: {r['error']} ({r['wall_s']} s)"
    if "tflops" in r:
        return f"{r['row']}: {r['tflops']} TFLOP/s on {r['device']}"
    more = "".join(f"\n    {k}: {r[k]}" for k in ("save", "products", "kernels") if k in r)
    return (
        f"{r['row']}, batch {r['batch']}: {r['ms']} ms {r['ms_range']}, {r['peak_gb']} GB, compiled"
        f" in {r['compile_s']} s{more}"
    )


def table(results: list[dict]) -> str:
    """All results as a Markdown table."""
    lines = [
        "| row | batch | layers | ms/step | utterances/s | peak GB | compile s | card |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        layers = r["layers"] or "all"
        if "ms" in r:
            cells = [r["ms"], r["utterances_per_s"], r["peak_gb"], r["compile_s"], r["device"]]
            lines.append(
                f"| {r['row']} | {r['batch']} | {layers} | "
                + " | ".join(str(c) for c in cells)
                + " |"
            )
        elif "error" in r:
            lines.append(
                f"| {r['row']} | {r['batch']} | {layers} | {r['error'].replace('|', ' ')[:160]} | |"
                " | | |"
            )
        else:
            lines.append(
                f"| {r['row']} | | | "
                + ", ".join(f"{k} {v}" for k, v in r["tflops"].items())
                + f" TFLOP/s | | | | {r['device']} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
