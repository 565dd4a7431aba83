"""Milliseconds per batch from a producer process to this one: the channel against plain PUSH/PULL, and memcpy as the floor.

    python tests/bench/transport.py [--megabytes 8.2] [--batches 200] [--repeat 5] [--tf-data-service] [--json]

The channel's figures include what it does beyond carrying bytes: leases, order, and a digest computed on both sides. The producer sends
from a ring of ready arrays, so that no figure includes making a batch; the consumer drops each batch as it comes. `copies` = the consumer
also copies it once, as tf.convert_to_tensor will.
"""

from __future__ import annotations

import argparse
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
import zmq

sys.path.insert(0, str(Path(__file__).parents[2]))

from common import wire
from common.channel import LeaseServer
from common.keys import run_keys
from common.lease_client import Endpoint, Lease, LeaseClient, Stop, Welcome

RUN = "0" * 32
RING = 6


def ring(megabytes: float) -> list[dict[str, np.ndarray]]:
    """RING batches of about `megabytes` MB each: ids, positions and targets of 32 rows, the rest conditioning mels."""
    rng = np.random.default_rng(0)
    small = {name: rng.integers(0, 9000, (32, 405), np.int32) for name in ("ids", "positions", "audio_targets")}
    frames = int((megabytes * 1e6 - sum(a.nbytes for a in small.values())) / (32 * 80 * 4))
    return [{**small, "cond_mel": rng.standard_normal((32, max(1, frames), 80), np.float32)} for _ in range(RING)]


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
            client.ready(event.gen, {})
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
        socket.send_multipart(wire.encode(RUN, wire.Data(1, "train", g, 0, "0" * 32, {}, arrays)), copy=copy == "True")


def tf_data_producer(_: str, port_file: str, megabytes: float) -> None:
    """A dispatcher and a worker of the tf.data service; the dataset itself comes from the consumer."""
    import tensorflow as tf

    dispatcher = tf.data.experimental.service.DispatchServer(tf.data.experimental.service.DispatcherConfig(port=0))
    worker = tf.data.experimental.service.WorkerServer(
        tf.data.experimental.service.WorkerConfig(dispatcher_address=dispatcher.target.split("://")[1])
    )
    Path(port_file).write_text(dispatcher.target)
    worker.join()


PRODUCERS = {"channel": channel_producer, "push": push_producer, "tf_data": tf_data_producer}


# consumers: iterators over the arrays of one batch after the other


def over_channel(kind: str, folder: Path, megabytes: float) -> Iterator[dict[str, np.ndarray]]:
    address = f"ipc://{folder}/s" if kind == "ipc" else "tcp://127.0.0.1:*"
    server = LeaseServer(address, RUN, 8, capacity=4, keys=run_keys(folder)[0] if kind == "tcp" else None)
    server.open(1, {}, (("train", g) for g in itertools.count()))
    process = start("channel", server.endpoint, str(folder), megabytes)
    try:
        while True:
            yield server.next(30.0).arrays
            server.release()
    finally:
        server.close(2.0)
        process.wait(10)


def over_push(copy: bool, folder: Path, megabytes: float) -> Iterator[dict[str, np.ndarray]]:
    context = zmq.Context()
    socket = context.socket(zmq.PULL)
    socket.set_hwm(2)
    socket.bind(f"ipc://{folder}/s")
    process = start("push", f"ipc://{folder}/s", str(copy), megabytes)
    try:
        while True:
            frames = socket.recv_multipart(copy=copy)
            yield wire.decode([f if copy else f.buffer for f in frames])[1].arrays
    finally:
        process.kill()
        process.wait()
        context.destroy(linger=0)


def over_tf_data(folder: Path, megabytes: float) -> Iterator[dict]:
    import tensorflow as tf

    port_file = folder / "port"
    process = start("tf_data", "-", str(port_file), megabytes)
    try:
        while not port_file.exists() or not port_file.read_text():
            time.sleep(0.1)
        one = {name: tf.constant(a) for name, a in ring(megabytes)[0].items()}
        dataset = tf.data.Dataset.range(1 << 30).map(lambda i: {name: tf.identity(a) for name, a in one.items()})
        service = tf.data.experimental.service.distribute("parallel_epochs", port_file.read_text())
        yield from dataset.apply(service).prefetch(4)
    finally:
        process.kill()
        process.wait()


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
    return subprocess.Popen([sys.executable, __file__, "--produce", role, address, extra, str(megabytes)])


def measure(batches: Iterator, count: int, copies: bool) -> tuple[float, float]:
    """(milliseconds per batch, CPU milliseconds per batch of this process) over `count` batches after 10 to warm up."""
    kept: dict[str, np.ndarray] = {}
    for i, arrays in enumerate(itertools.islice(batches, count + 10)):
        if i == 10:
            start, cpu = time.perf_counter(), time.process_time()
        if copies:
            for name, array in arrays.items():
                np.copyto(kept.setdefault(name, np.empty_like(array)), array)
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    batches.close()
    return wall / count * 1e3, cpu / count * 1e3


def rows(megabytes: float, tf_data_service: bool) -> dict[str, tuple]:
    """Name -> (makes the iterator in a fresh folder, copies)."""
    table = {
        "memcpy": (lambda folder: memcpy(megabytes), False),
        "digest alone (one side)": (lambda folder: digests(megabytes), False),
        "PUSH/PULL ipc, copy=False": (lambda folder: over_push(False, folder, megabytes), False),
        "PUSH/PULL ipc, copy=True": (lambda folder: over_push(True, folder, megabytes), False),
        "channel ipc": (lambda folder: over_channel("ipc", folder, megabytes), False),
        "channel ipc, copies": (lambda folder: over_channel("ipc", folder, megabytes), True),
        "channel tcp + CURVE": (lambda folder: over_channel("tcp", folder, megabytes), False),
    }
    if tf_data_service:
        table["tf.data service"] = (lambda folder: over_tf_data(folder, megabytes), False)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=8.2)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--tf-data-service", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results: dict[str, list[tuple[float, float]]] = {}
    table = rows(args.megabytes, args.tf_data_service)
    for _ in range(args.repeat):  # in turn, so that a busy moment of the machine hits all alike
        for name, (make, copies) in table.items():
            with tempfile.TemporaryDirectory() as folder:
                results.setdefault(name, []).append(measure(make(Path(folder)), args.batches, copies))
    size = sum(a.nbytes for a in ring(args.megabytes)[0].values())
    report = {
        name: {"ms": statistics.median(w for w, _ in r), "best_ms": min(r)[0], "consumer_cpu_ms": statistics.median(c for _, c in r)}
        for name, r in results.items()
    }
    if args.json:
        sys.stdout.write(json.dumps({"bytes": size, "cpus": os.cpu_count(), "load": os.getloadavg()[0], "rows": report}, indent=1) + "\n")
        return
    sys.stdout.write(f"{size / 1e6:.1f} MB per batch, {args.batches} batches, median of {args.repeat}, load {os.getloadavg()[0]:.1f}\n")
    sys.stdout.write(f"{'':28}{'ms':>8}{'best':>8}{'GB/s':>8}{'consumer CPU ms':>17}\n")
    for name, r in report.items():
        sys.stdout.write(f"{name:28}{r['ms']:8.2f}{r['best_ms']:8.2f}{size / r['ms'] / 1e6:8.2f}{r['consumer_cpu_ms']:17.2f}\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--produce"]:
        PRODUCERS[sys.argv[2]](*sys.argv[3:5], float(sys.argv[5]))
    else:
        main()
