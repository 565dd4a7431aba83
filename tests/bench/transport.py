"""Milliseconds per batch from a producer process to this one: the channel against plain PUSH/PULL
and the tf.data service.

    python tests/bench/transport.py [--megabytes 8.2] [--batches 40] [--rounds 15]
        [--rows "channel ipc|…"] [--json]

One producer process per row, all of them up all the time. The rows take turns in short stretches,
each after what had been waiting for it was drained, and are compared within a round, so that a busy
moment of the machine hits all alike. The channel's figures include what it does beyond carrying
bytes: leases, order, and a digest computed on both sides. Producers send from a ring of ready
arrays, so that no figure includes making a batch (the service's dataset holds them as constants; no
compression, no sharding). The consumer reads a number of each page of a batch and drops it;
`copies` = it also copies it once, as tf.convert_to_tensor will. CPU: of both processes, per batch,
which holds on a busy machine as well.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import zmq

sys.path.insert(0, str(Path(__file__).parents[2]))

from common.transport import wire
from common.transport.client import Endpoint, Lease, LeaseClient, Stop, Welcome
from common.transport.keys import run_keys
from common.transport.messages import Data, Notes, Offer
from common.transport.server import LeaseServer

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

RUN = "0" * 32
RING = 6
WAITING = 14  # more than any row holds ready while others have their turn
PAGE = 4096
PUSH, PUSH_COPY, CHANNEL, TF_DATA = (
    "PUSH/PULL ipc, copy=False",
    "PUSH/PULL ipc, copy=True",
    "channel ipc",
    "tf.data service",
)


def ring(megabytes: float) -> list[dict[str, np.ndarray]]:
    """RING batches of about `megabytes` MB each: ids, positions and targets of 32 rows, the rest
    conditioning mels.
    """
    rng = np.random.default_rng(0)
    small = {
        name: rng.integers(0, 9000, (32, 405), np.int32)
        for name in ("ids", "positions", "audio_targets")
    }
    frames = int((megabytes * 1e6 - sum(a.nbytes for a in small.values())) / (32 * 80 * 4))
    return [
        {**small, "cond_mel": rng.standard_normal((32, max(1, frames), 80), np.float32)}
        for _ in range(RING)
    ]


# producers, each in a process of its own


def channel_producer(address: str, run_dir: str, megabytes: float) -> None:
    """Serves the ring over LeaseClient until STOP."""
    batches = ring(megabytes)
    keys, pair = run_keys(Path(run_dir))
    endpoint = Endpoint(address, keys.pair.public if address.startswith("tcp") else None)
    client = LeaseClient(lambda: endpoint, RUN, "bench", capacity=4, keys=pair)
    while True:
        event = client.poll(1.0)
        if isinstance(event, Welcome):
            client.ready(event.gen)
        elif isinstance(event, Lease):
            client.send(event, batches[event.g % RING])
        elif isinstance(event, Stop):
            break
    client.bye()
    client.close()


def push_producer(address: str, copy: str, megabytes: float) -> None:
    """Sends the ring over PUSH, high-water mark 2, until killed."""
    batches = ring(megabytes)
    socket = zmq.Context().socket(zmq.PUSH)
    socket.set_hwm(2)
    socket.connect(address)
    for g in itertools.count():
        arrays = batches[g % RING]
        socket.send_multipart(
            wire.encode(RUN, Data(1, "train", g, 0, "0" * 32, Notes(), arrays)), copy=copy == "True"
        )


def tf_data_producer(_: str, port_file: str, megabytes: float) -> None:
    """A dispatcher and a worker of the tf.data service; the dataset itself comes from
    the consumer.
    """
    import tensorflow as tf

    dispatcher = tf.data.experimental.service.DispatchServer(
        tf.data.experimental.service.DispatcherConfig(port=0)
    )
    worker = tf.data.experimental.service.WorkerServer(
        tf.data.experimental.service.WorkerConfig(
            dispatcher_address=dispatcher.target.split("://")[1]
        )
    )
    Path(port_file).write_text(dispatcher.target)
    worker.join()


PRODUCERS = {"channel": channel_producer, "push": push_producer, "tf_data": tf_data_producer}


# consumers: iterators over the arrays of one batch after the other; `started` gets their producers


def over_channel(
    kind: str, folder: Path, megabytes: float, started: list
) -> Iterator[dict[str, np.ndarray]]:
    address = f"ipc://{folder}/s" if kind == "ipc" else "tcp://127.0.0.1:*"
    server = LeaseServer(address, RUN, 8, keys=run_keys(folder)[0] if kind == "tcp" else None)
    server.open(1, Offer("gpt"), (("train", g) for g in itertools.count()))
    started.append(start("channel", server.endpoint, str(folder), megabytes))
    try:
        while True:
            yield server.next(60.0).arrays
            server.release()
    finally:
        server.close(2.0)
        started[0].wait(10)


def over_push(
    copy: bool, folder: Path, megabytes: float, started: list
) -> Iterator[dict[str, np.ndarray]]:
    context = zmq.Context()
    socket = context.socket(zmq.PULL)
    socket.set_hwm(2)
    socket.bind(f"ipc://{folder}/s")
    started.append(start("push", f"ipc://{folder}/s", str(copy), megabytes))
    try:
        while True:
            frames = socket.recv_multipart(copy=copy)
            yield wire.decode([f if copy else f.buffer for f in frames])[1].arrays
    finally:
        kill(started[0])
        context.destroy(linger=0)


def over_tf_data(folder: Path, megabytes: float, started: list) -> Iterator[dict]:
    import tensorflow as tf

    port_file = folder / "port"
    started.append(start("tf_data", "-", str(port_file), megabytes))
    try:
        while not port_file.exists() or not port_file.read_text():
            time.sleep(0.1)
        ones = [tf.data.Dataset.from_tensors(batch) for batch in ring(megabytes)]
        dataset = functools.reduce(lambda a, b: a.concatenate(b), ones).repeat()
        off = tf.data.experimental.service.ShardingPolicy.OFF
        yield from dataset.apply(
            tf.data.experimental.service.distribute(off, port_file.read_text(), compression=None)
        ).prefetch(4)
    finally:
        kill(started[0])


def memcpy(megabytes: float) -> Iterator[dict[str, np.ndarray]]:
    source = ring(megabytes)
    target = {name: np.empty_like(a) for name, a in source[0].items()}
    for g in itertools.count():
        for name, array in source[g % RING].items():
            np.copyto(target[name], array)
        yield target


def digests(megabytes: float) -> Iterator[dict[str, np.ndarray]]:
    source = ring(megabytes)
    for g in itertools.count():
        wire.digest(source[g % RING])
        yield source[0]


def start(role: str, address: str, extra: str, megabytes: float) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, __file__, "--produce", role, address, extra, str(megabytes)]
    )


def kill(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()


class Row:
    """One way to get batches, up until it is closed."""

    def __init__(self, batches: Iterator, started: list, copies: bool):
        self._batches, self._started, self._copies = batches, started, copies
        self._kept: dict[str, np.ndarray] = {}

    def stretch(self, count: int) -> tuple[float, float]:
        """(milliseconds, CPU milliseconds of both processes) per batch, over `count` batches after
        those that had been waiting.
        """
        self._take(WAITING)
        began, cpu = time.perf_counter(), self._cpu_s()
        self._take(count)
        return (time.perf_counter() - began) / count * 1e3, (self._cpu_s() - cpu) / count * 1e3

    def _take(self, count: int) -> None:
        for arrays in itertools.islice(self._batches, count):
            for name, value in arrays.items():
                array = np.frombuffer(memoryview(value).cast("B"), np.uint8)
                array[::PAGE].max()
                if self._copies:
                    np.copyto(self._kept.setdefault(name, np.empty_like(array)), array)

    def _cpu_s(self) -> float:
        spent = [psutil.Process(p.pid).cpu_times() for p in self._started]
        return time.process_time() + sum(t.user + t.system for t in spent)

    def close(self) -> None:
        self._batches.close()


def rows(megabytes: float, folder: Path, wanted: str) -> dict[str, Row]:
    """The rows wanted (names separated by |, "" for all), up."""

    def row(over, *args, copies: bool = False) -> Row:
        own, started = Path(tempfile.mkdtemp(dir=folder)), []
        return Row(over(*args, own, megabytes, started), started, copies)

    table = {
        "memcpy": lambda: Row(memcpy(megabytes), [], False),
        "digest alone (one side)": lambda: Row(digests(megabytes), [], False),
        PUSH: lambda: row(over_push, False),
        PUSH_COPY: lambda: row(over_push, True),
        CHANNEL: lambda: row(over_channel, "ipc"),
        "channel ipc, copies": lambda: row(over_channel, "ipc", copies=True),
        "channel tcp + CURVE": lambda: row(over_channel, "tcp"),
        TF_DATA: lambda: row(over_tf_data),
    }
    names = [n.strip() for n in wanted.split("|")] if wanted else list(table)
    if unknown := [n for n in names if n not in table]:
        raise SystemExit(f"no row {', '.join(unknown)}; the rows are: {' | '.join(table)}")
    return {name: table[name]() for name in names}


def measure(table: dict[str, Row], rounds: int, count: int) -> dict[str, list[tuple[float, float]]]:
    """Row -> its stretches, one per round, each round beginning with another row."""
    names, results = list(table), {name: [] for name in table}
    for i in range(rounds + 1):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            results[name].append(table[name].stretch(count))
    return {
        name: stretches[1:] for name, stretches in results.items()
    }  # the first has the starts in it


def ratios(results: dict[str, list[tuple[float, float]]], of: str, to: str) -> dict[str, float]:
    """Of the times of one row to another's, round by round: median and quartiles; and of their CPU
    times, median.
    """
    each = sorted(a / b for (a, _), (b, _) in zip(results[of], results[to], strict=True))
    low, middle, high = statistics.quantiles(each, n=4, method="inclusive")
    cpu = statistics.median(a / b for (_, a), (_, b) in zip(results[of], results[to], strict=True))
    return {"median": middle, "quartiles": [low, high], "cpu": cpu}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=float, default=8.2)
    parser.add_argument("--batches", type=int, default=40, help="per stretch")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", default="", help="names separated by |; default: all")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # sockets' paths are short
        table = rows(args.megabytes, Path(folder), args.rows)
        try:
            results = measure(table, args.rounds, args.batches)
        finally:
            for row in table.values():
                row.close()
    size = sum(a.nbytes for a in ring(args.megabytes)[0].values())
    median = statistics.median
    report = {
        name: {
            "ms": median(w for w, _ in r),
            "best_ms": min(r)[0],
            "cpu_ms": median(c for _, c in r),
        }
        for name, r in results.items()
    }
    bases = [name for name in (PUSH, PUSH_COPY, TF_DATA) if name in results and CHANNEL in results]
    compared = {f"{CHANNEL} / {to}": ratios(results, CHANNEL, to) for to in bases}
    load = os.getloadavg()[0]
    if args.json:
        text = json.dumps(
            {
                "bytes": size,
                "cpus": os.cpu_count(),
                "load": load,
                "rows": report,
                "ratios": compared,
            },
            indent=1,
        )
        sys.stdout.write(text + "\n")
        return
    sys.stdout.write(
        f"{size / 1e6:.1f} MB per batch, {args.rounds} rounds of {args.batches} batches, medians,"
        f" load {load:.1f}\n"
    )
    sys.stdout.write(f"{'':28}{'ms':>8}{'best':>8}{'GB/s':>8}{'CPU ms':>9}\n")
    for name, r in report.items():
        sys.stdout.write(
            f"{name:28}{r['ms']:8.2f}{r['best_ms']:8.2f}{size / r['ms'] / 1e6:8.2f}"
            f"{r['cpu_ms']:9.2f}\n"
        )
    for name, r in compared.items():
        sys.stdout.write(
            f"{name}: {r['median']:.2f} ({r['quartiles'][0]:.2f} to {r['quartiles'][1]:.2f}), CPU"
            f" {r['cpu']:.2f}\n"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--produce"]:
        PRODUCERS[sys.argv[2]](*sys.argv[3:5], float(sys.argv[5]))
    else:
        main()
