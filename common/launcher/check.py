"""`launch.py check`: does this machine do what a run needs?

One line per finding, with advice where it fails.

What needs TensorFlow runs in child processes, each pinned to its device as in a run. The last
findings come from a run of three steps through the same code that trains.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np
import soundfile

from common.gpu import choose
from common.gpu.choose import Device, Devices
from common.gpu.listing import Listing, list_gpus
from common.gpu.memory import MEMORY
from common.run.settings import Config
from common.system import logs
from common.system.errors import (
    BAD_INPUT,
    INTERRUPTED,
    OK,
    TERMINATED,
    BadInput,
    RunError,
    Stopped,
)

STEPS = 3
CHILD_TIMEOUT_S = 180.0
PACKAGES = ("numpy", "pyzmq", "soundfile", "tokenizers", "safetensors", "pydantic")
WORDS = (
    "one two three four five six seven eight nine ten red green blue small large river house garden"
    " window bread".split()
)


@dataclass(frozen=True)
class Finding:
    """One line of the check."""

    ok: bool
    what: str
    detail: str
    advice: str = ""

    def __str__(self) -> str:
        advice = f" → {self.advice}" if self.advice and not self.ok else ""
        return f"{'ok  ' if self.ok else 'FAIL'} {self.what}: {self.detail}{advice}"


def run(
    config: Config,
    train: Callable[..., int],
    tell: Callable[[str], None],
    listing: Listing | None = None,
) -> int:
    """Check the machine for runs like `config`, on its `data_gpu` and `model_gpu`.

    Args:
        train: `launch.train`, called as train(config, out=…).
        listing: the machine's GPUs; None asks NVML.

    Returns:
        0 if everything is in order, else 2.
    """
    # `devices: auto` would accept the CPU; a check is about GPUs unless the CPU is named.
    config = config.model_copy(update={"devices": "gpu"})
    failed = False
    for finding in _findings(config, train, tell, list_gpus() if listing is None else listing):
        tell(str(finding))
        failed = failed or not finding.ok
    tell("something is wrong: see the lines with FAIL" if failed else "all in order")
    return BAD_INPUT if failed else OK


def _findings(
    config: Config, train: Callable[..., int], tell: Callable[[str], None], listing: Listing
) -> Iterator[Finding]:
    yield _packages()
    yield _driver(config, listing)
    try:
        devices = choose.choose_gpus(config, listing, os.environ)
    except BadInput as e:
        yield Finding(False, "devices", str(e))
        return
    pairs = [("data", devices.producers[0]), ("model", devices.trainer)]
    pairs += [(f"data {i}", d) for i, d in enumerate(devices.producers[1:], 1)]
    yield Finding(
        True, "devices", "; ".join([f"{role} on {d}" for role, d in pairs] + list(devices.notes))
    )
    sound, seen = True, set()
    for role, device in pairs:
        if device in seen:
            continue
        seen.add(device)
        for finding in device_findings(role, device, os.environ):
            sound = sound and finding.ok
            yield finding
    if sound:
        tell("     three real steps follow; compiling them can take minutes")
        yield from _real_steps(config, devices, train)


def _packages() -> Finding:
    python = ".".join(map(str, sys.version_info[:3]))
    found, missing = [], []
    for name in PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        return Finding(
            False,
            "python",
            f"{python} without {', '.join(missing)}",
            f"pip install {' '.join(missing)}",
        )
    return Finding(True, "python", f"{python}, {', '.join(found)}")


def _driver(config: Config, listing: Listing) -> Finding:
    if listing.gpus:
        return Finding(True, "driver", f"NVIDIA {listing.driver}, {len(listing.gpus)} GPU(s)")
    if config.data_gpu == config.model_gpu == "cpu":
        return Finding(True, "driver", "none needed: the CPU was asked for")
    return Finding(
        False,
        "driver",
        listing.reason,
        f"install the NVIDIA driver and see that `nvidia-smi` works, or {choose.CPU_ADVICE}",
    )


# -- children --------------------------------------------------------------------------------------


def device_findings(role: str, device: Device, env: Mapping[str, str]) -> list[Finding]:
    """Versions, the one visible device, and a matrix product and a convolution on it, as reported
    by a child process that is pinned to it.
    """
    what = f"{role} device"
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(p for p in (env.get("PYTHONPATH", ""), root) if p)
    child = {
        k: v
        for k, v in {**env, **choose.child_env(device, env), "PYTHONPATH": path}.items()
        if v is not None
    }
    try:
        p = subprocess.run(
            [sys.executable, "-m", "common.launcher.check_child", role],
            env=child,
            capture_output=True,
            text=True,
            timeout=CHILD_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return [
            Finding(
                False,
                what,
                f"no answer within {CHILD_TIMEOUT_S:.0f} s",
                "see `nvidia-smi` for a hung process on the card",
            )
        ]
    found = [
        Finding(**json.loads(line)) for line in p.stdout.splitlines() if line.startswith('{"ok"')
    ]
    if p.returncode != OK and all(f.ok for f in found):
        last = ([line for line in p.stderr.splitlines() if line.strip()] or ["it said nothing"])[-1]
        end = f"killed by signal {-p.returncode}" if p.returncode < 0 else f"exit {p.returncode}"
        found.append(
            Finding(
                False,
                what,
                f"{end}: {last[:300]}",
                "run `python -m common.launcher.check_child` with the same device for the whole"
                " output",
            )
        )
    return found


# -- three steps -----------------------------------------------------------------------------------


def _real_steps(config: Config, devices: Devices, train: Callable[..., int]) -> Iterator[Finding]:
    """Train three steps per stage with the config's model and batch size, on clips of the
    greatest length.
    """
    parent = config.run_dir.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".check-", dir=parent))
    except OSError as e:
        yield Finding(
            False,
            "run folder",
            f"cannot write {parent}: {e.strerror}",
            "choose another place with run=…",
        )
        return
    os.environ["XTTS_CHANNEL_LOG"] = "1"
    try:
        small = small_run(config, folder)
        out = io.StringIO()
        try:
            code = train(small, out=out)
        except Stopped:
            raise
        except RunError as e:
            yield Finding(False, "steps", str(e))
            return
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        if code == TERMINATED:
            raise Stopped("stopped")
        yield from _evidence(small, devices, code, out.getvalue())
    finally:
        del os.environ["XTTS_CHANNEL_LOG"]
        shutil.rmtree(folder, ignore_errors=True)


def small_run(config: Config, folder: Path) -> Config:
    """The config reduced to three steps on synthetic clips of the greatest length, in `folder`."""
    size, most = config.batching.batch_size, config.data.max_audio_s
    corpus = _clips(folder / "corpus", max(2 * size, config.dvae.batch_size), most)
    tree = config.model_dump()
    tree["run"] = str(folder / "run")
    tree["data"] = {"train": [{"path": str(corpus)}], "eval_fraction": 0.0, "max_audio_s": most}
    tree["train"] |= {"max_steps": STEPS, "epochs": 1000, "accumulate": 1, "save_every": 10**9}
    tree["dvae"] |= {"max_steps": STEPS, "save_every": 10**9, "eval_every": 0}
    tree["batching"] |= {"buckets": 1, "positions_per_batch": None}
    tree["transport"] |= {"bind": "ipc"}
    tree["samples"], tree["trainers"] = {"count": 0}, {"count": 1}
    tree["text"]["extend"] = None  # the check's own clips contain no new language
    return Config.model_validate(tree)


def _clips(folder: Path, count: int, seconds: float) -> Path:
    """Write `count` clips of tones and noise, the longest of `seconds`, with matching texts."""
    rng = np.random.default_rng(0)
    (folder / "wavs").mkdir(parents=True)
    rows = []
    for i in range(count):
        length = int((seconds - 0.01) * 22050) if i % 4 == 0 else 22050 + 331 * i % 22050
        t = np.arange(length) / 22050
        wav = 0.3 * np.sin(2 * np.pi * (120 + 7 * i) * t) + 0.05 * rng.standard_normal(length)
        soundfile.write(
            folder / "wavs" / f"c{i}.wav", wav.astype(np.float32), 22050, subtype="PCM_16"
        )
        words = [
            WORDS[(i + 7 * k + k * k) % len(WORDS)] for k in range(max(3, 2 * length // 22050))
        ]
        rows.append(f"c{i}|{' '.join(words)}|{' '.join(words)}\n")
    (folder / "metadata.csv").write_text("".join(rows))
    return folder


def _evidence(config: Config, devices: Devices, code: int, output: str) -> Iterator[Finding]:
    """Findings from the run's ledgers and channel log."""
    run_dir = config.run_dir
    said = [line for line in output.splitlines() if "ERROR" in line or "killed" in line]
    why = _without_time(said[0]) if said else f"launch exit {code}"
    deliveries = _jsonl(run_dir / "channel.jsonl")
    good = [e for e in deliveries if e.get("kind") == "deliver"]
    bad = [e for e in deliveries if e.get("kind") == "bad_digest"]
    wire = f"{devices.producers[0].kind.upper()} → wire → {devices.trainer.kind.upper()}"
    if good and not bad:
        yield Finding(
            True,
            "wire",
            f"{wire}: {len(good)} batches with equal digests at both ends, the first"
            f" {good[0]['digest']}",
        )
    else:
        yield Finding(
            False,
            "wire",
            f"{wire}: {len(good)} batches arrived intact, {len(bad)} with another digest than they"
            f" were sent with; {why}",
            _advice(why),
        )
    steps = [line for line in _jsonl(run_dir / "ledger.jsonl") if "step" in line]
    size = f"size {config.model.size}, batch {config.batching.batch_size}"
    if steps:
        yield Finding(True, "model", f"forward and backward, {size}, on {devices.trainer}")
    else:
        yield Finding(False, "model", f"no step of {size} was made: {why}", _advice(why))
    losses = [line.get("loss") for line in steps]
    if code == OK and len(steps) == STEPS and all(x is not None for x in losses):
        times = ", ".join(f"{line['step_ms']:.0f}" for line in steps)
        yield Finding(
            True,
            "steps",
            f"{STEPS} real steps, losses {', '.join(f'{x:.3f}' for x in losses)} ({times} ms"
            " without compilation)",
        )
    else:
        yield Finding(
            False, "steps", f"{len(steps)} of {STEPS} steps, losses {losses}: {why}", _advice(why)
        )
    if said := _memory(run_dir / "logs" / "trainer.log"):
        yield Finding(True, "memory", said)


def _memory(log: Path) -> str:
    """What the trainer reported about the largest step's memory and how many rows would fit; "" on
    a CPU.
    """
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    said = [
        line.message for line in map(logs.parse, lines) if line and line.message.startswith(MEMORY)
    ]
    return said[-1].removeprefix(MEMORY) if said else ""


def _without_time(line: str) -> str:
    parsed = logs.parse(line)
    return parsed.message if parsed else line.split(" ", 1)[-1]


def _advice(why: str) -> str:
    if any(w in why for w in ("ResourceExhausted", "OOM", "out of memory")):
        return "the largest batch does not fit: lower batching.batch_size, or use the other card"
    return "run the same settings with launch.py and read RUN/logs"


def _jsonl(path: Path) -> list[dict]:
    lines = []
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                lines.append(json.loads(line))
    return lines
