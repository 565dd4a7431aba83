"""Hostile messages by the million: through both ends of the channel in one process, against a live
run, and a forger that guesses.

    python tests/bench/fuzz_wire.py ends  [--messages 1000000] [--seed 1]
    python tests/bench/fuzz_wire.py live  [--messages 100000] [--over ipc|tcp] [--seed 1]
    python tests/bench/fuzz_wire.py forge [--messages 100000] [--seed 1]

`ends`: nothing is around the server and the client that catches; the batches of two proper
producers must come in order, whole, and from nobody else. `live`: a run of launch.py whose steps
are arithmetic, attacked with its own key (tcp) or through its socket (ipc); the same trainer must
come to the end, ledger and weights must be those of a plain loop, and its memory must not grow.
`forge`: one that has said READY answers leases of others. Prints the figures as JSON; exit code 1
where something did not hold.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import zmq

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from common.run.folder import RunFolder  # noqa: E402
from common.transport.address import Endpoint  # noqa: E402
from common.transport.client import LeaseClient  # noqa: E402
from common.transport.keys import run_keys  # noqa: E402
from common.transport.lease_records import Rules  # noqa: E402
from common.transport.server import LeaseServer  # noqa: E402
from tests.support import channels as cb  # noqa: E402
from tests.support.arithmetic_runs import assert_exact, settings  # noqa: E402
from tests.support.chaos import Driver  # noqa: E402
from tests.support.corpora import make_corpus  # noqa: E402
from tests.support.hostile import Forger, FrameHub, FrameLink, Hostile, until  # noqa: E402

MB = 1 << 20
FLAT_MB = 30.0
HOUR_S = 3600.0


def rss_mb(pid: int | None = None) -> float:
    return psutil.Process(pid).memory_info().rss / MB


def ends(count: int, seed: int) -> dict:
    """`count` messages to the trainer's end, a quarter of it to a producer's."""
    counts: dict[str, int] = {}
    strangers: set[str] = set()

    def on_event(kind: str, **fields) -> None:
        counts[kind] = counts.get(kind, 0) + 1
        if kind == "data":
            strangers.add(fields["peer"])

    hub, began = FrameHub(Hostile(seed, run=cb.RUN, features="ab"), count), time.monotonic()
    server = cb.picky_server(hub, on_event)
    producers = [
        cb.Producer(LeaseClient(hub.endpoint, cb.RUN, f"p{i}", 2, link=hub.link()), features="ab")
        for i in range(2)
    ]
    trained, memory = 0, []
    while hub.left:
        assert cb.train(server, 1) == [("train", trained)]
        trained += 1
        for p in producers:
            p.leases.clear()  # the test's own record of them
        if hub.left * 10 < count * (10 - len(memory)):
            memory.append(round(rss_mb(), 1))
    assert cb.train(server, 100) == [("train", trained + i) for i in range(100)]
    for p in producers:
        p.end()
    peers = len(server.stats()["peers"])
    server.close(drain_s=0.0, stop_producers=False)
    kept = client_end(count // 4, seed)
    return {
        "messages": count,
        "to_the_producers_end": count // 4,
        "seconds": round(time.monotonic() - began, 1),
        "batches": trained + 100,
        "from": sorted(strangers),
        "garbage": counts.get("garbage"),
        "unknown_lease": counts.get("unknown_lease"),
        "stale": counts.get("stale"),
        "peers_at_the_end": peers,
        "rss_mb": memory,
        "kept_by_the_producers_end": kept,
        "good": strangers <= {"p0", "p1"} and memory[-1] - memory[1] < FLAT_MB and kept <= 68,
    }


def client_end(count: int, seed: int) -> int:
    """How many events and leases a client keeps that nobody takes any off."""
    link = FrameLink(None, b"", Hostile(seed, to_trainer=False, run=cb.RUN), count)
    client = LeaseClient(lambda: Endpoint("frames"), cb.RUN, "p", 2, link=link)
    until(lambda: not link.left, HOUR_S)
    assert client.poll(0) is not None  # an error of its thread would be raised
    kept = len(client._queue) + len(client._events)
    client.close()
    return kept


class Attack:
    """Connections with the run's key, a new one every `LIFE` messages, for as long as there are
    messages.
    """

    LIFE = 200

    def __init__(self, run: RunFolder, count: int, seed: int):
        self.run, self.left = run, count
        self.hostile = Hostile(seed, run=run.run_id, features=run.feature_hash("gpt"), max_gen=6)
        self.random = random.Random(seed)

    def go(self) -> None:
        context, endpoint = zmq.Context(), Endpoint.read(self.run.endpoint_file)
        pair = run_keys(self.run.path)[1] if endpoint.public_key else None
        while self.left:
            dealer = context.socket(zmq.DEALER)
            dealer.linger, dealer.sndhwm = 5000, 1000
            if pair is not None:
                dealer.curve_serverkey = endpoint.public_key.encode()
                dealer.curve_publickey, dealer.curve_secretkey = (
                    pair.public.encode(),
                    pair.secret.encode(),
                )
            dealer.connect(endpoint.address)
            self.hostile.gen = self.random.choice((1, 2, 2, 3))
            for _ in range(min(self.LIFE, self.left)):
                dealer.send_multipart(self.hostile.frames() or [b""])
                self.left -= 1
            dealer.close()
        context.term()


def live(count: int, seed: int, over: str) -> dict:
    """A run of launch.py, attacked over its socket."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder = Path(name)
        make_corpus(folder / "corpus", 41, seconds=lambda i: 0.6 + 0.05 * (i % 9))
        more = {"transport__bind": f"tcp://127.0.0.1:{free_port()}"} if over == "tcp" else {}
        steps = max(300, count // 5)
        more |= {"train__max_steps": steps, "train__epochs": 100_000}
        more |= {"train__save_every": 200, "train__eval_every": 500, "train__log_every": 200}
        tree = settings(
            folder / "run",
            folder / "corpus",
            producers__count=2,
            producers__lease_ttl_s=2.0,
            dvae__max_steps=30,
            **more,
        )
        driver = Driver.create(folder, tree, step_ms=3, make_ms=1)
        driver.env["XTTS_CHANNEL_LOG"] = "1"
        try:
            driver.launch()
            driver.wait_for(lambda: driver.step() > 20, "the first steps of stage 2")
            return {"over": over, **watch(driver, RunFolder(folder / "run"), count, seed)}
        finally:
            driver.kill_everything()


def watch(driver: Driver, run: RunFolder, count: int, seed: int) -> dict:
    attack, pid, memory = Attack(run, count, seed), driver.pid("trainer"), []
    thread, began, first = (
        threading.Thread(target=attack.go, daemon=True),
        time.monotonic(),
        driver.step(),
    )
    thread.start()
    while thread.is_alive():
        thread.join(1.0)
        assert driver.pid("trainer") == pid, driver.story(
            f"the trainer has gone with {attack.left} messages left"
        )
        memory.append(round(rss_mb(pid), 1))
    took, last = time.monotonic() - began, driver.step()
    still = driver.launchers[-1].poll() is None and driver.pid("trainer") == pid
    restarted = driver.pid("trainer") not in (pid, None)
    driver.finish(HOUR_S)
    assert_exact(run)
    noted = Counter(
        json.loads(line)["kind"] for line in (run.path / "channel.jsonl").read_text().splitlines()
    )
    arrived = (
        noted["garbage"] + noted["unknown_lease"] + noted["stale"]
    )  # heartbeats, and what a refused peer says, leave no line
    starts = sum(
        "listening at" in line
        for line in (run.path / "logs" / "trainer.log").read_text().splitlines()
    )
    return {
        "messages": count,
        "of_these_noted_as_hostile": arrived,
        "seconds": round(took, 1),
        "steps_meanwhile": last - first,
        "trainer_outlived_the_attack": still,
        "trainers": starts,
        "rss_mb": [memory[0], max(memory), memory[-1]],
        "exact": True,
        "good": (
            still
            and not restarted
            and starts == 1
            and arrived > count / 3
            and max(memory) - memory[min(2, len(memory) - 1)] < FLAT_MB
        ),
    }


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as s:
        return s.getsockname()[1]


def forge(count: int, seed: int) -> dict:
    """One with a proper connection answers leases of others: how many are taken."""
    taken: dict[str, int] = {}
    unknown = [0]

    def on_event(kind: str, **fields) -> None:
        if kind == "data":
            taken[fields["peer"]] = taken.get(fields["peer"], 0) + 1
        unknown[0] += kind == "unknown_lease"

    with tempfile.TemporaryDirectory(prefix="fuzz-", dir="/tmp") as folder:
        address, leaked = f"ipc://{folder}/s", []
        server = LeaseServer(
            address, cb.RUN, cb.WINDOW, rules=Rules(lease_ttl_s=0.2), on_event=on_event
        )
        server.open(1, cb.OFFER, cb.train_schedule())

        def work(client, lease) -> None:
            leaked.append((lease.plan, lease.g, lease.lease))
            client.send(lease, cb.make(lease))

        good = cb.Producer(LeaseClient(lambda: Endpoint(address), cb.RUN, "good"), work)
        forger, began, trained = Forger(address, cb.RUN, seed), time.monotonic(), 0
        forger.join()
        while forger.tried < count:
            forger.guess(500, trained, leaked[-64:])
            trained += len(cb.train(server, 4))
        cb.wait_until(lambda: unknown[0] == forger.tried)
        forger.close()
        good.end()
        server.close(drain_s=0.0, stop_producers=False)
    return {
        "messages": count,
        "seconds": round(time.monotonic() - began, 1),
        "batches": trained,
        "taken_of_the_forgers": taken.get("forger", 0),
        "good": set(taken) == {"good"},
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("ends", "live", "forge"))
    parser.add_argument("--messages", type=int)
    parser.add_argument("--over", choices=("ipc", "tcp"), default="ipc")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    run: dict[str, Callable[[], dict]] = {
        "ends": lambda: ends(args.messages or 1_000_000, args.seed),
        "live": lambda: live(args.messages or 100_000, args.seed, args.over),
        "forge": lambda: forge(args.messages or 100_000, args.seed),
    }
    figures = run[args.what]()
    sys.stdout.write(json.dumps({"what": args.what, "seed": args.seed, **figures}) + "\n")
    return 0 if figures["good"] else 1


if __name__ == "__main__":
    sys.exit(main())
