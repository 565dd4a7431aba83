"""Decoding, resampling and mels: how many times faster than the sound is long, per CPU core,
against librosa and torchaudio; and on a GPU.

    python tests/bench/features.py [--seconds 10] [--clips 8] [--repeats 20] [--size xtts]
        [--json FILE]

Each row is measured in a process of its own, pinned to one core and then to two before its
interpreter loads anything; the fastest of the repeats counts, and for the ratio the median over
turns. On one core a second is a second of CPU time; on two it is one by the clock, without the time
in which a thread waits for a core that another process has (that it waits for another thread of its
own counts). Rows: decode + resample of FLAC, WAV and MP3 (ours against librosa.load); the DVAE's
and the conditioning log-mel (ours: the producer's compiled function, and the NumPy reference;
against librosa.feature.melspectrogram). Where there is a GPU: mels and DVAE codes of batches on it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FORMATS = {
    "flac 22.05 kHz": (".flac", 22050),
    "flac 48 kHz": (".flac", 48000),
    "wav 44.1 kHz": (".wav", 44100),
    "mp3 48 kHz": (".mp3", 48000),
}
AGAIN = 5  # each thread decodes all clips so often, so that the start of the threads does not count
MELS = {"dvae mel (fft 1024)": 1024, "conditioning mel (fft 2048)": 2048}


# -- in a pinned process
# --------------------------------------------------------------------------------------------------


def timed(
    works: dict[str, Callable[[], object]], repeats: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Seconds of each of `repeats`, after one that is not counted; in turn, so that all meet the
    same machine.
    """
    for work in works.values():
        work()
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            start = clock()
            work()
            times[name].append(clock() - start)
    return times


def fastest(
    works: dict[str, Callable[[], object]],
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Seconds of the fastest of `repeats` of each; `ratio`: the median of librosa's to ours of the
    same turn, which a busy machine
    disturbs least."""
    times = timed(works, repeats, clock)
    best = {name: min(t) for name, t in times.items()}
    if {"ours", "librosa"} <= set(times):
        best["ratio"] = statistics.median(
            b / a for a, b in zip(times["ours"], times["librosa"], strict=True)
        )
    return best


def loaders() -> dict[str, Callable[[Path], object]]:
    """Path → samples at 22 050 Hz, by library; those that are not installed are left out."""
    from producer.batches.decode import decode

    found: dict[str, Callable] = {"ours": decode}
    with contextlib.suppress(ImportError):
        import librosa

        librosa.load, librosa.feature.melspectrogram  # noqa: B018 - loaded late; may lack numba
        found["librosa"] = lambda path: librosa.load(path, sr=22050)[0]
    with contextlib.suppress(ImportError):
        import torch
        import torchaudio
        import torchcodec  # noqa: F401 - what torchaudio loads files through, from 2.9 on

        torch.set_num_threads(1)

        def load(path: Path):
            wave, rate = torchaudio.load(path)
            return torchaudio.functional.resample(wave.mean(0), rate, 22050)

        found["torchaudio"] = load
    return found


def decode_rows(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Format → library → × real time on one thread; on two cores: ours on one thread and on two."""
    rows, pool = {}, ThreadPoolExecutor(2)
    for name, (suffix, _) in FORMATS.items():
        paths = sorted(args.folder.glob(f"{name.replace(' ', '-')}-*{suffix}"))
        if not paths:
            continue
        if args.threads == 1:
            works = {
                who: lambda f=f, paths=paths: [f(p) for p in paths] for who, f in loaders().items()
            }
            seconds = fastest(works, args.repeats, time.process_time)
        else:
            ours = loaders()["ours"]

            def decode(some, f=ours):
                return [f(p) for p in some]

            many = paths * AGAIN
            alone, both = [], []
            for _ in range(args.repeats):  # in turn, so that both meet the same machine
                alone.append(pool.submit(unhindered_s, decode, many).result() / AGAIN)
                pair = [pool.submit(unhindered_s, decode, many) for _ in range(2)]
                both.append(statistics.mean(f.result() for f in pair) / (2 * AGAIN))
            seconds = {
                "ours": min(alone),
                "two": min(both),
                "ratio": statistics.median(a / b for a, b in zip(alone, both, strict=True)),
            }
        rows[name] = {
            who: s if who == "ratio" else len(paths) * args.seconds / s
            for who, s in seconds.items()
        }
    return rows


def unhindered_s(work: Callable, argument: object) -> float:
    """Seconds that `work` takes in this thread, without those in which it could run and another
    process had the core.
    """
    stat = Path("/proc/thread-self/schedstat")

    def waited():
        return int(stat.read_text().split()[1]) / 1e9 if stat.exists() else 0.0

    before, start = waited(), time.perf_counter()
    work(argument)
    return time.perf_counter() - start - (waited() - before)


def mel_rows(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Kind of log-mel → library → × real time; ours as a batch in one compiled function on all
    threads.
    """
    import numpy as np

    wav = (
        0.1 * np.random.default_rng(0).standard_normal((args.clips, round(args.seconds * 22050)))
    ).astype(np.float32)
    rows = {}
    for name, fft in MELS.items():
        seconds = fastest(mel_works(wav, fft, args.threads), args.repeats, time.process_time)
        rows[name] = {
            who: s if who == "ratio" else args.clips * args.seconds / s
            for who, s in seconds.items()
        }
    return rows


def mel_works(wav, fft: int, threads: int) -> dict[str, Callable[[], object]]:
    """A batch's log-mels, by library."""
    import numpy as np
    import tensorflow as tf

    from common.xtts.audio import CondMel, DvaeMel
    from common.xtts.dims import AudioDims
    from common.xtts.filterbank import log_mel_numpy

    mel = (DvaeMel if fft == 1024 else CondMel)(
        np.full(80, 5.0, np.float32), AudioDims(), by_clip=True
    )
    function = tf.function(
        mel, input_signature=[tf.TensorSpec(wav.shape)], autograph=False
    ).get_concrete_function()
    pool = ThreadPoolExecutor(threads)
    works: dict[str, Callable] = {"ours": lambda: function(tf.constant(wav)).numpy()}
    works["numpy"] = lambda: list(pool.map(lambda w: log_mel_numpy(w, fft), wav))
    with contextlib.suppress(ImportError):
        from librosa.feature import melspectrogram

        options = {
            "n_fft": fft,
            "win_length": 1024,
            "hop_length": 256,
            "n_mels": 80,
            "fmax": 8000.0,
            "htk": True,
            "sr": 22050,
        }

        def one(w):
            return np.log(np.maximum(melspectrogram(y=w, **options), 1e-5))

        works["librosa"] = (
            (lambda: [one(w) for w in wav]) if threads == 1 else (lambda: list(pool.map(one, wav)))
        )
    with contextlib.suppress(ImportError):
        import torch
        import torchaudio

        torch.set_num_threads(threads)
        transform = torchaudio.transforms.MelSpectrogram(
            22050, fft, 1024, 256, n_mels=80, f_max=8000.0, norm="slaney"
        )
        batch = torch.from_numpy(wav)
        works["torchaudio"] = lambda: torch.log(torch.clamp(transform(batch), min=1e-5))
    return works


def gpu_rows(clips: int, seconds: float, repeats: int, size: str) -> dict[str, float]:
    """ms per batch of 32 on the GPU: both mels, and mel + DVAE codes, arrays in and out
    included.
    """
    import numpy as np
    import tensorflow as tf

    from common.xtts.audio import CondMel, DvaeMel
    from common.xtts.dims import SIZES
    from common.xtts.dvae import Dvae, clip_codes

    tf.config.experimental.enable_tensor_float_32_execution(False)
    dims, stats = SIZES[size], np.full(80, 5.0, np.float32)
    codes = -(-round(seconds * 22050) // 1024)
    wav = (
        0.1
        * np.random.default_rng(0).standard_normal((clips, codes * 1024 + dims.audio.pad_samples))
    ).astype(np.float32)
    cond = wav[:, : dims.audio.cond_max_samples].copy()
    dvae, dvae_mel, cond_mel = (
        Dvae(dims.dvae),
        DvaeMel(stats, dims.audio),
        CondMel(stats, dims.audio),
    )
    work = {
        "dvae mel": (dvae_mel, wav),
        "conditioning mel": (cond_mel, cond),
        "mel + DVAE codes": (lambda w: clip_codes(dvae, dvae_mel, w, dims.audio), wav),
    }
    rows = {}
    for name, (body, values) in work.items():
        function = tf.function(
            body, input_signature=[tf.TensorSpec(values.shape)], jit_compile=True, autograph=False
        ).get_concrete_function()
        work = {
            name: lambda function=function, values=values: function(tf.constant(values)).numpy()
        }
        rows[name] = 1e3 * fastest(work, repeats)[name]
    return rows


def inner(args: argparse.Namespace) -> dict:
    """A measurement; this process is pinned already."""
    sys.path.insert(0, str(ROOT))
    if args.inner == "gpu":
        return gpu_rows(32, args.seconds, args.repeats, args.size)
    if args.inner == "decode":
        return decode_rows(args)
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(args.threads)
    tf.config.threading.set_inter_op_parallelism_threads(args.threads)
    return mel_rows(args)


# -- the table
# --------------------------------------------------------------------------------------------------


def pinned(args: argparse.Namespace, what: str, threads: int, folder: Path) -> dict:
    """Run a measurement on `threads` cores."""
    cpus = sorted(os.sched_getaffinity(0))[:threads]
    pools = dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(threads)
    )
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **pools}
    if what != "gpu":
        env["CUDA_VISIBLE_DEVICES"] = "-1"
    command = [
        sys.executable,
        __file__,
        "--inner",
        what,
        "--threads",
        str(threads),
        "--folder",
        str(folder),
    ]
    command += [
        "--seconds",
        str(args.seconds),
        "--clips",
        str(args.clips),
        "--repeats",
        str(args.repeats),
        "--size",
        args.size,
    ]
    pin = None if what == "gpu" else (lambda: os.sched_setaffinity(0, cpus))
    done = subprocess.run(command, env=env, capture_output=True, text=True, preexec_fn=pin)
    if done.returncode:
        sys.stderr.write(done.stderr[-2000:])
        return {}
    return json.loads(done.stdout.splitlines()[-1])


def make_clips(folder: Path, clips: int, seconds: float) -> None:
    """The same sound in every format (those that libsndfile can write here)."""
    import numpy as np
    import soundfile

    rng = np.random.default_rng(0)
    for name, (suffix, rate) in FORMATS.items():
        if suffix[1:].upper() not in soundfile.available_formats():
            continue
        t = np.arange(round(seconds * rate)) / rate
        for i in range(clips):
            voice = sum(np.sin(2 * np.pi * k * (120 + i) * t) / k for k in range(1, 12)) * (
                0.5 + 0.5 * np.sin(2 * np.pi * 4 * t)
            )
            samples = 0.1 * voice + 0.01 * rng.standard_normal(len(t))
            soundfile.write(
                folder / f"{name.replace(' ', '-')}-{i}{suffix}",
                np.clip(samples, -1, 1).astype(np.float32),
                rate,
            )


def main() -> int:
    """Command line."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--seconds", type=float, default=10.0)
    p.add_argument("--clips", type=int, default=8)
    p.add_argument("--repeats", type=int, default=20)
    p.add_argument("--size", default="xtts", choices=["tiny", "small", "xtts"])
    p.add_argument("--json", type=Path)
    p.add_argument("--inner", help=argparse.SUPPRESS)
    p.add_argument("--folder", help=argparse.SUPPRESS, type=Path)
    p.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.inner:
        sys.stdout.write(json.dumps(inner(args)) + "\n")
        return 0
    from rich.console import Console

    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)
        make_clips(folder, args.clips, args.seconds)
        threads = [n for n in (1, 2) if n <= len(os.sched_getaffinity(0))]
        results = {f"decode, {n}": pinned(args, "decode", n, folder) for n in threads} | {
            "mel, 1": pinned(args, "mel", 1, folder)
        }
        results["gpu"] = pinned(args, "gpu", 1, folder) if _has_gpu() else {}
    Console(width=None if sys.stdout.isatty() else 150, markup=False).print(table(results))
    if results["gpu"]:
        Console(width=150).print(
            "on the GPU, ms per batch of 32: "
            + ", ".join(f"{k} {v:.2f}" for k, v in results["gpu"].items())
        )
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    return 0


def _has_gpu() -> bool:
    sys.path.insert(0, str(ROOT))
    from common.gpu.listing import list_gpus

    return bool(list_gpus().gpus)


def table(results: dict):
    """× real time, and the ratios that matter."""
    from rich.table import Table

    t = Table(title="× real time per pinned core", title_justify="left")
    for name in (
        "",
        "ours",
        "NumPy",
        "librosa",
        "torchaudio",
        "ours / librosa",
        "ours, 2 threads",
        "scaling",
    ):
        t.add_column(name, justify="left" if not name else "right")
    for what, names in (("decode", FORMATS), ("mel", MELS)):
        for name in names:
            alone = results[f"{what}, 1"].get(name, {})
            one = {who: alone.get(who) for who in ("ours", "numpy", "librosa", "torchaudio")}
            both = results.get(f"{what}, 2", {}).get(name, {})

            def cell(v):
                return f"{v:.0f}" if v else ""

            ratio = alone.get("ratio")
            scaling = f"{both['ratio']:.2f}" if "two" in both else ""
            ratios = [f"{ratio:.2f}" if ratio else "", cell(both.get("two")), scaling]
            t.add_row(
                f"{what} {name}" if what == "decode" else name, *map(cell, one.values()), *ratios
            )
    return t


if __name__ == "__main__":
    sys.exit(main())
