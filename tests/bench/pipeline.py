"""From files on disk to trained utterances: what the whole pipeline reaches of what its step could
do.

    python tests/bench/pipeline.py --data DIR | --make 2000 [--size xtts] [--steps 300]
        [--rows ours,tfdata,service,shared] [--json FILE]
                                   [--batch-size 32] [--buckets 2] [key=value …]

ours      the real run (`launch.py profile`), producers on the data GPU, codes computed for every
          batch (as in a first epoch); and its
          ceiling: the same steps in the same process on batches that lie in device memory already
shared    the same on one GPU: producers and trainer share it
cached    one GPU, all of it the trainer's: producers on the CPU, the DVAE codes from their cache,
          as from the second epoch on
tfdata    one process: the same decoding and features in a tf.data map with prefetch, on the
          trainer's device
service   the same map behind a tf.data service whose dispatcher and worker are in this process (a
          Python map cannot leave it)

--make N: a synthetic corpus instead of --data: N FLAC clips of noise and tones at 22 050 Hz (--rate
for another), lengths as in LJSpeech. On a machine without GPUs everything runs on the CPU (--size
tiny).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from common.gpu import choose
from common.gpu.listing import list_gpus
from common.launcher.program import environment
from common.run import settings as config_module
from common.system.cores import cores
from tests.support.corpora import sentence, write_metadata, write_wav

SAMPLE_RATE = 22050


# -- a corpus --------------------------------------------------------------------------------------


def clip(path: str, seed: int, seconds: float, rate: int) -> None:
    """A FLAC file that compresses about as speech does: gliding tones under a syllable-like
    envelope, and noise.
    """
    rng = np.random.default_rng(seed)
    t = np.arange(round(seconds * rate)) / rate
    pitch = 110 * 2 ** rng.uniform(0, 1) * (1 + 0.1 * np.sin(2 * np.pi * 0.7 * t))
    phase = 2 * np.pi * np.cumsum(pitch) / rate
    voice = sum(np.sin(k * phase + rng.uniform(0, 6)) / k for k in range(1, 12))
    envelope = np.clip(np.sin(2 * np.pi * 4 * t + rng.uniform(0, 6)) + 0.4, 0, None)
    samples = 0.1 * envelope * voice + 0.01 * rng.standard_normal(len(t))
    write_wav(Path(path), np.clip(samples, -1, 1).astype(np.float32), rate)


def make_corpus(folder: Path, n: int, rate: int) -> Path:
    """`n` clips of 1.1 to 10.1 s, 6.6 on average (LJSpeech's), about 15 characters per second."""
    rng = np.random.default_rng(1)
    seconds = np.clip(10.1 - rng.gamma(2.0, 1.75, n), 1.1, 10.1)
    (folder / "wavs").mkdir(parents=True)
    jobs = [
        (str(folder / "wavs" / f"c{i:05d}.flac"), i, float(s), rate) for i, s in enumerate(seconds)
    ]
    with ProcessPoolExecutor(cores()) as pool:
        list(pool.map(clip, *zip(*jobs, strict=True), chunksize=16))
    rows = []
    for i, s in enumerate(seconds):
        text = sentence(i, max(2, round(float(s) * 2.7)))
        rows.append(f"c{i:05d}|{text}|{text}")
    write_metadata(folder, rows)
    return folder


# -- ours ------------------------------------------------------------------------------------------


def profile(run: Path, steps: int, options: list[str]) -> dict:
    """`launch.py profile`'s document."""
    command = [
        sys.executable,
        "launch.py",
        "profile",
        f"run={run}",
        "--steps",
        str(steps),
        "--json",
        *options,
    ]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def row_of(document: dict, rows_per_batch: float) -> dict:
    """A line of the table from a profile."""
    speed, per_step = document["speed"], document["batches_per_step"]
    ceiling = 1e3 * rows_per_batch / document["ceiling_ms"]
    return {
        "utterances_per_s": speed["utterances_per_s"],
        "ceiling_utterances_per_s": ceiling,
        "of_ceiling_percent": 100 * document["ceiling_ms"] * per_step / speed["step_ms"],
        "step_ms": speed["step_ms"],
        "wait_percent": speed["wait_percent"],
        "variation_percent": speed.get("variation_percent"),
        "cpu_ms_per_utterance": speed["producer_cpu_ms_per_utterance"],
        "gpus": {
            f"{u['index']} ({', '.join(u['roles'])})": round(u["percent"]) for u in document["gpus"]
        },
        "verdict": document["verdict"]["sentence"],
    }


# -- in one process --------------------------------------------------------------------------------


def inside(run_dir: Path, steps: int, service: bool) -> dict:
    """The tf.data rows: decode, features and step in this process."""
    from common.gpu.device import prove_device
    from common.run.folder import RunFolder

    run = RunFolder(run_dir)
    t = run.config.threads
    prove_device(intra_threads=t.trainer_intra, inter_threads=t.trainer_inter)
    import tensorflow as tf

    from producer.batches.features import configure_tensorflow
    from producer.batches.gpt import GptMaker
    from trainer import profile as profiling
    from trainer import stages

    configure_tensorflow(run.config)
    if not run.dvae_weights.is_file():
        profiling.untrained_dvae(run)
    maker, stage = GptMaker(run), stages.build(run, "gpt")
    maker._cache = None
    plan, pool = run.plan("gpt", "train"), ThreadPoolExecutor(min(8, cores()))
    names = list(stages.planned_batches(run, stage)("train", 0)[1])

    def make(g: int) -> list[np.ndarray]:
        planned = maker.plan("train", int(g))
        clips = maker.clips(planned)
        decoded = list(pool.map(lambda c: decoded_or_error(c), clips))
        return [maker.make(planned, clips, decoded).arrays[n] for n in names]

    first = {}
    for g in range(plan.batches_per_epoch):
        first.setdefault(plan.batch(g).bucket, g)
    for bucket, g in first.items():  # compile
        float(
            stage.step.update(bucket, dict(zip(names, make(g), strict=True)), plan.batch(g).seed)[
                "loss"
            ]
        )
    dtypes = [tf.as_dtype(a.dtype) for a in make(0)]
    dataset = tf.data.Dataset.range(steps + 10).map(
        lambda g: tf.numpy_function(make, [g], dtypes), num_parallel_calls=2
    )
    if service:
        dispatcher = tf.data.experimental.service.DispatchServer()
        address = dispatcher.target.split("://")[1]
        worker = tf.data.experimental.service.WorkerServer(
            tf.data.experimental.service.WorkerConfig(dispatcher_address=address)
        )
        dataset = dataset.apply(
            tf.data.experimental.service.distribute("parallel_epochs", dispatcher.target)
        )
        assert worker is not None
    dataset = dataset.prefetch(8)
    if tf.config.list_logical_devices("GPU"):
        dataset = dataset.apply(tf.data.experimental.prefetch_to_device("/GPU:0", 2))
    return timed(stage.step, plan, names, iter(dataset), steps)


def decoded_or_error(clip):
    """Samples of a clip, or its error."""
    from producer.batches.decode import DecodeError, decode

    try:
        return decode(clip.utterance.path, clip.start, clip.num_samples)
    except DecodeError as e:
        return e


def timed(step, plan, names: list[str], batches, steps: int) -> dict:
    """Train `steps` batches; the first ones fill the buffers."""
    result, waited, rows = None, 0.0, 0
    for g in range(10):
        result = step.update(
            plan.batch(g).bucket, dict(zip(names, next(batches), strict=True)), plan.batch(g).seed
        )
    float(result["loss"])
    start, cpu = time.perf_counter(), time.process_time()
    for g in range(10, 10 + steps):
        asked = time.perf_counter()
        arrays = dict(zip(names, next(batches), strict=True))
        waited += time.perf_counter() - asked
        planned = plan.batch(g)
        result = step.update(planned.bucket, arrays, planned.seed)
        rows += planned.num_rows
    float(result["loss"])
    seconds = time.perf_counter() - start
    return {
        "utterances_per_s": rows / seconds,
        "step_ms": 1e3 * seconds / steps,
        "wait_percent": 100 * waited / seconds,
        "cpu_ms_per_utterance": 1e3 * (time.process_time() - cpu) / rows,
    }


def run_inside(run: Path, steps: int, kind: str, device) -> dict:
    """A tf.data row, in a process on the trainer's device."""
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [
            sys.executable,
            __file__,
            "--inside",
            kind,
            "--run",
            str(run),
            "--steps",
            str(steps),
            "--json",
            out.name,
        ]
        env = {k: v for k, v in {**os.environ, **environment(device)}.items() if v is not None}
        done = subprocess.run(command, cwd=ROOT, env=env, stdout=sys.stderr)
        return (
            json.loads(Path(out.name).read_text())
            if done.returncode == 0
            else {"error": f"ended with {done.returncode}"}
        )


def fill(run_dir: Path) -> None:
    """A DVAE for the run, and the codes of its clips in the cache that profiles of it share."""
    from common.run.folder import RunFolder
    from producer.batches.features import configure_tensorflow
    from producer.batches.gpt import GptMaker
    from trainer import profile as profiling

    run = RunFolder(run_dir)
    configure_tensorflow(run.config)
    if not run.dvae_weights.is_file():
        profiling.untrained_dvae(run)
    maker, pool = GptMaker(run), ThreadPoolExecutor(min(8, cores()))
    for g in range(run.plan("gpt", "train").batches_per_epoch):
        planned = maker.plan("train", g)
        clips = maker.clips(planned)
        maker.make(planned, clips, list(pool.map(decoded_or_error, clips)))


# -- the table -------------------------------------------------------------------------------------


def table(results: dict, title: str) -> Table:
    """One row per way of feeding."""
    t = Table(title=title, title_justify="left")
    for name in (
        "fed by",
        "utterances/s",
        "of its ceiling",
        "ms/step",
        "± in a shape",
        "data wait",
        "CPU ms/utterance",
        "GPU busy",
    ):
        t.add_column(name, justify="left" if name == "fed by" else "right")
    for name, r in results.items():
        if "error" in r:
            t.add_row(name, r["error"])
            continue

        def cell(key, spec, unit="", r=r):
            return f"{r[key]:{spec}}{unit}" if r.get(key) is not None else ""

        gpus = ", ".join(f"{k}: {v} %" for k, v in r.get("gpus", {}).items())
        first = (
            cell("utterances_per_s", ".1f"),
            cell("of_ceiling_percent", ".1f", " %"),
            cell("step_ms", ".1f"),
        )
        t.add_row(
            name,
            *first,
            cell("variation_percent", ".1f", " %"),
            cell("wait_percent", ".1f", " %"),
            cell("cpu_ms_per_utterance", ".2f"),
            gpus,
        )
    return t


def measure(args: argparse.Namespace, folder: Path) -> tuple[dict, str]:
    """Every row that was asked for, and the title."""
    from producer.creation.prepare import prepare_run

    data = Path(args.data) if args.data else make_corpus(folder / "corpus", args.make, args.rate)
    on_cpu = not list_gpus().gpus
    overrides = [
        f"run={json.dumps(str(folder / 'run'))}",
        f"data.train={json.dumps(str(data))}",
        f"model.size={args.size}",
    ]
    overrides += [
        f"batching.batch_size={args.batch_size}",
        f"batching.buckets={args.buckets}",
        *args.settings,
    ]
    overrides += ["data_gpu=cpu", "model_gpu=cpu"] if on_cpu else []
    config = config_module.load(ROOT / "configs" / "ljspeech.yaml", overrides)
    devices = choose.choose_gpus(config, list_gpus(), os.environ)
    run = prepare_run(
        config,
        on_cpu=on_cpu,
        cores=cores(),
        out=lambda text: print(text, file=sys.stderr),  # noqa: T201
    )
    plan = run.plan("gpt", "train")
    rows_per_batch = plan.num_utterances / plan.batches_per_epoch
    results: dict[str, dict] = {}
    one = {
        "shared": ["data_gpu=0", "model_gpu=0"],
        "cached": ["data_gpu=cpu", f"model_gpu={'cpu' if on_cpu else 0}"],
    }
    for name in args.rows.split(","):
        if name in ("tfdata", "service"):
            results[name] = run_inside(run.path, args.steps, name, devices.trainer)
        elif name != "shared" or not on_cpu:
            options = ["producers.cache_codes=" + str(name == "cached").lower(), *one.get(name, [])]
            if name == "cached":
                command = [sys.executable, __file__, "--inside", "fill", "--run", str(run.path)]
                subprocess.run(
                    command, cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}, check=True
                )
            results[name] = row_of(profile(run.path, args.steps, options), rows_per_batch)
        save(args.json, results)
    where = f"trainer {devices.trainer}, producers {', '.join(map(str, devices.producers))}"
    title = (
        f"size {args.size}, batch {args.batch_size}, {args.buckets} buckets, {args.steps} steps,"
        f" {plan.num_utterances} clips; {where}"
    )
    return results, title


def save(path: Path | None, results: dict, title: str = "") -> None:
    """What there is so far: a command that is cut short keeps its rows."""
    if path is not None:
        path.write_text(json.dumps({"title": title, "results": results}, indent=1))


def main() -> int:
    """Command line."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = p.add_mutually_exclusive_group()
    source.add_argument("--data")
    source.add_argument("--make", type=int, metavar="N")
    p.add_argument("--rate", type=int, default=SAMPLE_RATE)
    p.add_argument("--size", default="tiny", choices=["tiny", "small", "xtts"])
    p.add_argument("--steps", type=int, default=100)
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--buckets", type=int, default=2)
    p.add_argument("--rows", default="ours,tfdata,service")
    p.add_argument("--shared", action="store_true", help="add the row on one GPU")
    p.add_argument("--json", type=Path)
    p.add_argument("--inside", choices=["tfdata", "service", "fill"], help=argparse.SUPPRESS)
    p.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    p.add_argument("settings", nargs="*", metavar="key=value")
    args = p.parse_args()
    if args.inside == "fill":
        fill(args.run)
        return 0
    if args.inside:
        args.json.write_text(json.dumps(inside(args.run, args.steps, args.inside == "service")))
        return 0
    if not args.data and not args.make:
        p.error("name a corpus with --data, or have one made with --make N")
    args.rows += ",shared" if args.shared else ""
    with tempfile.TemporaryDirectory(prefix="pipeline-") as folder:
        results, title = measure(args, Path(folder))
    if "ours" in results and "shared" in results:
        results["ours"]["against_one_shared_gpu"] = (
            results["ours"]["utterances_per_s"] / results["shared"]["utterances_per_s"]
        )
    out = Console(width=None if sys.stdout.isatty() else 150, markup=False)
    out.print(table(results, title))
    for name, r in results.items():
        if "verdict" in r:
            out.print(f"{name}: {r['verdict']}", highlight=False)
    if "against_one_shared_gpu" in results.get("ours", {}):
        out.print(f"two GPUs against one shared: {results['ours']['against_one_shared_gpu']:.2f} x")
    save(args.json, results, title)
    return 0


if __name__ == "__main__":
    sys.exit(main())
