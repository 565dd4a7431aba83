"""`launch.py serve` beside a run: what 50 browsers cost, what is refused, that the run does not
notice a SIGKILL of it, and what a real Prometheus makes of it. Run by hand:

    python -m tests.bench.serve_clients [--prometheus prometheus] [--work runs/serve_clients]
        [--clip-s 1] [key=value …]

A run on a small corpus trains all the time: of size tiny, or as the settings say. Each client does
what the page's script does: the page every 35 s, its status every 2 s. Windows with and without
clients alternate, so that other programs disturb both alike; of each pair the second is with
clients as often as the first. With two or three cores, the trainer has the first one to itself, and
all else shares the others. A window begins and ends with a step. Prometheus scrapes every second;
then each query of the dashboard (docs/grafana/xtts.json) is put to its API. Prints figures; exit 1
where anything else than the step time is not as it should be.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.bench.owned import dies_with_me
from tests.support.corpora import make_corpus

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 900.0
PAGE_S, STATUS_S = 35.0, 2.0  # as in trainer/page/templates/live.html.j2
BAD_PATHS = ("/config.yaml", "/logs/trainer.log", "/../../etc/passwd", "/%2e%2e/identity.json")


def say(line: str) -> None:
    """A line, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def launch(*words: str, out: Path) -> subprocess.Popen:
    """`launch.py` with these words; its output goes to a file."""
    argv = [sys.executable, str(ROOT / "launch.py"), *words]
    with open(out, "w") as file:
        return subprocess.Popen(
            argv, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, preexec_fn=dies_with_me()
        )


def wait_for(condition, what: str):
    """Its first true value."""
    end = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        if time.monotonic() > end:
            sys.exit(f"waited {DEADLINE_S:.0f} s in vain for {what}")
        time.sleep(0.2)
    return value


def get(address: str, method: str = "GET") -> tuple[int, bytes]:
    """(status, body)."""
    try:
        with urllib.request.urlopen(
            urllib.request.Request(address, method=method), timeout=30
        ) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as e:
        return e.code, e.read()


def steps_of(run: Path) -> list[dict]:
    """The lines of stage 2's steps so far, with `time` and `step_ms`."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [r for r in map(json.loads, lines) if "step_ms" in r]


class Clients:
    """Browsers, each a thread, that ask while they are awake.

    `seconds`: how long each answer took; `faults`: answers that were not 200.
    """

    def __init__(self, address: str, count: int):
        self._address, self._ends = address, threading.Event()
        self.awake = threading.Event()
        self.seconds: list[float] = []
        self.faults: list[str] = []
        self._threads = [
            threading.Thread(target=self._browse, args=(i / count,), daemon=True)
            for i in range(count)
        ]
        for t in self._threads:
            t.start()

    def _browse(self, phase: float) -> None:
        self._ask("/")
        self._ends.wait(phase * STATUS_S)
        cycle = round(PAGE_S / STATUS_S)
        for turn in itertools.count(1 + round(phase * cycle)):
            self._ends.wait(STATUS_S)
            self.awake.wait()
            if self._ends.is_set():
                return
            if turn % cycle == 0:
                self._ask("/")
            self._ask("/status.json")

    def _ask(self, path: str) -> None:
        began = time.monotonic()
        try:
            code, _ = get(self._address + path)
            if code != 200:
                self.faults.append(f"{path}: {code}")
        except OSError as e:
            self.faults.append(f"{path}: {e}")
        self.seconds.append(time.monotonic() - began)

    def close(self) -> None:
        """They leave."""
        self._ends.set()
        self.awake.set()
        for t in self._threads:
            t.join(60)


def serve(run: Path, work: Path, host: str = "127.0.0.1") -> tuple[subprocess.Popen, str]:
    """(process, its address without a path, with the token's query where there is one)."""
    log = work / "serve.log"
    child = launch("serve", "--run", str(run), "--host", host, "--port", "0", out=log)
    text = wait_for(lambda: log.read_text().partition(" ")[0].strip(), "serve's address")
    return child, text


def cpu_s(process: psutil.Process) -> float:
    """Of it, all threads."""
    times = process.cpu_times()
    return times.user + times.system


@dataclass(frozen=True)
class Window:
    """Some steps in a row: by the clock (median, and without the wait for data), and the CPU time
    of the trainer for each; what serve took meanwhile.
    """

    steps: int
    step_ms: float
    busy_ms: float
    cpu_ms: float
    serve_s: float
    seconds: float


class Steps:
    """The steps of a run as they end."""

    def __init__(self, run: Path):
        self._file = open(run / "metrics.jsonl")
        self._file.seek(0, os.SEEK_END)
        self._torn = ""  # a line that is being written

    def upto_next(self) -> list[dict]:
        """Those that have ended since the last call; waits for one."""
        found: list[dict] = []
        end = time.monotonic() + DEADLINE_S
        while not found:
            *whole, self._torn = (self._torn + self._file.read()).split("\n")
            found += [r for r in map(json.loads, whole) if "step_ms" in r]
            assert time.monotonic() < end, "no step ends"
            time.sleep(0.002)
        return found


def window(steps: Steps, trainer: psutil.Process, server: psutil.Process, seconds: float) -> Window:
    """So long, from the end of a step to the end of another."""
    steps.upto_next()
    began, cpu, served = time.monotonic(), cpu_s(trainer), cpu_s(server)
    found: list[dict] = []
    while time.monotonic() - began < seconds:
        found += steps.upto_next()
    used, served = cpu_s(trainer) - cpu, cpu_s(server) - served
    ms = statistics.median(r["step_ms"] for r in found)
    busy = statistics.median(r["step_ms"] - r["wait_ms"] for r in found)
    took = time.monotonic() - began
    return Window(len(found), ms, busy, 1e3 * used / len(found), served, took)


def give_cores(trainer: psutil.Process) -> None:
    """The trainer keeps one core; whatever this process has started, and starts, gets the others.

    Where there is one core, or where there are more than three, nothing is done.
    """
    first, *others = sorted(os.sched_getaffinity(0))
    if not 1 <= len(others) <= 2:
        return
    for child in (psutil.Process(), *psutil.Process().children(recursive=True)):
        own = [first] if child.pid == trainer.pid else others
        for thread in child.threads():
            os.sched_setaffinity(thread.id, own)


def beside_clients(run: Path, address: str, server: psutil.Process, trainer: psutil.Process, args):
    """Pairs of windows, with clients and without."""
    steps, browsers = Steps(run), Clients(address.rstrip("/"), args.clients)
    time.sleep(5)  # the pages that they open with
    quiet: list[Window] = []
    looked: list[Window] = []
    for pair in range(args.pairs):
        for awake in (pair % 2 == 0, pair % 2 != 0):
            browsers.awake.set() if awake else browsers.awake.clear()
            time.sleep(0.5)  # answers on their way
            found = window(steps, trainer, server, args.seconds)
            (looked if awake else quiet).append(found)
    browsers.close()
    for name, found in (("nobody looks", quiet), (f"{args.clients} clients", looked)):
        used, seconds = sum(w.serve_s for w in found), sum(w.seconds for w in found)
        say(
            f"{name}: {sum(w.steps for w in found)} steps in {len(found)} windows; serve took"
            f" {used:.2f} s of CPU in {seconds:.0f} s ({100 * used / seconds:.1f} % of a core)"
        )
    for field, what in (
        ("cpu_ms", "the trainer's CPU time"),
        ("busy_ms", "by the clock, without the wait for data"),
        ("step_ms", "by the clock"),
    ):
        without, beside = ([getattr(w, field) for w in of] for of in (quiet, looked))
        ratios = [100 * (b / q - 1) for b, q in zip(beside, without, strict=True)]
        low, high = interval(ratios)
        say(
            f"a step, {what}: {statistics.median(without):.2f} ms, with clients"
            f" {statistics.median(beside):.2f} ms; pairs differ by {statistics.median(ratios):+.2f}"
            f" % (median; 95 %: {low:+.2f} to {high:+.2f} %)"
        )
    took = sorted(browsers.seconds)
    say(
        f"{len(took)} answers, median {1e3 * statistics.median(took):.0f} ms, slowest"
        f" {1e3 * took[-1]:.0f} ms, {len(browsers.faults)} faults"
    )
    assert not browsers.faults, browsers.faults[:5]


def interval(values: list[float]) -> tuple[float, float]:
    """Of the median: 95 % of what resampling finds."""
    rng = random.Random(1)
    found = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(4000))
    return found[100], found[-100]


def refusals(run: Path, work: Path, address: str) -> None:
    """Paths, methods, and no token."""
    at = address.rstrip("/")
    found = {path: get(at + path)[0] for path in BAD_PATHS}
    found |= {m: get(at + "/", m)[0] for m in ("POST", "PUT", "DELETE", "OPTIONS")}
    child, open_to_all = serve(run, work, "0.0.0.0")
    try:
        here = open_to_all.replace("0.0.0.0", "127.0.0.1")
        bare, _, token = here.partition("?token=")
        found["no token"] = get(bare)[0]
        found["wrong token"] = get(f"{bare}?token=x{token}")[0]
        found["metrics without a token"] = get(f"{bare}metrics")[0]
        assert get(here)[0] == 200
    finally:
        child.kill()
        child.wait()
    say(f"refused: {found}")
    assert all(code in (401, 404, 501) for code in found.values()), found


def prometheus(binary: str, address: str, work: Path) -> None:
    """Scrape for a while, then ask as the dashboard does."""
    target = urllib.parse.urlsplit(address).netloc
    config = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [{"job_name": "xtts", "static_configs": [{"targets": [target]}]}],
    }
    (work / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        listen = f"127.0.0.1:{s.getsockname()[1]}"
    argv = [binary, f"--config.file={work / 'prometheus.yml'}"]
    argv += [f"--storage.tsdb.path={work / 'tsdb'}", f"--web.listen-address={listen}"]
    with open(work / "prometheus.log", "w") as log:
        child = subprocess.Popen(argv, stdout=log, stderr=log, preexec_fn=dies_with_me())
    api = f"http://{listen}/api/v1/"
    try:

        def up() -> bool:
            try:
                code, body = get(api + "targets")
            except OSError:
                return False
            if code != 200:  # it reads its files yet
                return False
            targets = json.loads(body)["data"]["activeTargets"]
            return bool(targets) and targets[0]["health"] == "up"

        wait_for(up, "Prometheus' first scrape")
        time.sleep(20)
        panels = json.loads((ROOT / "docs/grafana/xtts.json").read_text())["panels"]
        for query in (t["expr"] for panel in panels for t in panel["targets"]):
            asked = urllib.parse.quote(query.replace("$job", "xtts"))
            answer = json.loads(get(f"{api}query?query={asked}")[1])
            assert answer["status"] == "success", answer
            result = answer["data"]["result"]
            of = ", ".join(f"{r['metric']['process']} {r['value'][1]}" for r in result)
            say(f"  {query}: {of}")
            assert result, query
    finally:
        child.terminate()
        child.wait(30)


def snapshot(run: Path) -> dict[str, tuple[int, int]]:
    """Every file's size and time."""
    files = (p for p in run.rglob("*") if p.is_file())
    return {str(p.relative_to(run)): (p.stat().st_size, p.stat().st_mtime_ns) for p in files}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prometheus", help="its program; without, that part is left out")
    parser.add_argument("--work", type=Path, default=Path("runs/serve_clients"))
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=10.0, help="of a window")
    parser.add_argument("--pairs", type=int, default=12, help="of windows")
    parser.add_argument("--clip-s", type=float, default=1.0, help="the shortest clip; s")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    args = parser.parse_args()
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    run = work / "run"
    corpus = make_corpus(work / "corpus", 40, seconds=lambda i: args.clip_s + 0.05 * (i % 9))
    own = {"model.size": "tiny", "batching.batch_size": "8", "batching.buckets": "1"}
    own |= {"dvae.max_steps": "5", "train.epochs": "100000", "samples.count": "0"}
    own |= {"train.eval_every": "0", "train.eval_at_epoch_end": "false"}
    own |= dict(setting.split("=", 1) for setting in args.settings)
    words = [f"{key}={value}" for key, value in own.items()]
    trains = launch(f"run={run}", f"data.train={corpus}", *words, out=work / "train.log")
    wait_for(lambda: len(steps_of(run)) > 30 or trains.poll() is not None, "training")
    assert trains.poll() is None, (work / "train.log").read_text()[-3000:]
    child, address = serve(run, work)
    trainer = next(
        p for p in psutil.Process(trains.pid).children() if p.cmdline()[1:3] == ["-m", "trainer"]
    )
    give_cores(trainer)
    beside_clients(run, address, psutil.Process(child.pid), trainer, args)
    refusals(run, work, address)
    if args.prometheus:
        say("Prometheus:")
        prometheus(args.prometheus, address, work)
    family = {p.pid for p in psutil.Process(trains.pid).children(recursive=True)}
    child.kill()
    child.wait()
    before = len(steps_of(run))
    wait_for(lambda: len(steps_of(run)) > before + 20, "steps after serve's SIGKILL")
    assert family <= {p.pid for p in psutil.Process(trains.pid).children(recursive=True)}
    say("serve was SIGKILLed: the run goes on, with the same processes")
    os.kill(trains.pid, signal.SIGINT)
    assert trains.wait(120) == 130
    was = snapshot(run)
    child, address = serve(run, work)
    codes = [get(address.rstrip("/") + path)[0] for path in ("/", "/status.json", "/metrics")]
    child.kill()
    child.wait()
    assert codes == [200] * 3
    assert snapshot(run) == was
    say("a finished run is served, and not a file of it is changed")
    say("ok")


if __name__ == "__main__":
    main()
