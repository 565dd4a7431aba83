"""Two hosts as network namespaces, a run on one and a producer of its bundle on the other, over
CURVE: who is not let in, and a link that goes away and comes back.

    python -m tests.bench.two_hosts [--away 30]

Needs root and `ip` (iproute2). A wrong key, none, and another run's bundle must each end with one
line in under 5 s from the moment the producer asks, which is when it has started: a start that is
refused for a bundle that is not there is measured first, and taken off. After the link was away,
the same producer and the same trainer must bring the run to its end, exact. Prints the figures as
JSON; exit code 1 where something did not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from common.run import bundle
from common.run.folder import RunFolder
from common.system import status
from common.transport.keys import KeyPair, run_keys
from tests.support import arithmetic_runs
from tests.support.arithmetic_runs import assert_exact, settings
from tests.support.chaos import LAUNCH, Driver
from tests.support.corpora import make_corpus
from tests.support.gates import LAG

HERE, THERE, NET = "xtts-here", "xtts-there", "10.251.7"
AT = f"tcp://{NET}.1:5711"
REFUSED_S = 5.0


def ip(*args: str, check: bool = True) -> None:
    subprocess.run(["ip", *args], check=check, capture_output=True)


def up() -> None:
    """Two namespaces and a cable between them."""
    for name in (HERE, THERE):
        ip("netns", "add", name)
    ip(
        "link",
        "add",
        "xtts0",
        "netns",
        HERE,
        "type",
        "veth",
        "peer",
        "name",
        "xtts1",
        "netns",
        THERE,
    )
    for name, device, host in ((HERE, "xtts0", 1), (THERE, "xtts1", 2)):
        ip("-n", name, "addr", "add", f"{NET}.{host}/24", "dev", device)
        ip("-n", name, "link", "set", device, "up")
        ip("-n", name, "link", "set", "lo", "up")


def down() -> None:
    for name in (HERE, THERE):
        ip("netns", "del", name, check=False)


def on(host: str, *args: str) -> list[str]:
    return ["ip", "netns", "exec", host, *args]


class Hosts(Driver):
    """launch.py on one host, producers of bundles on the other."""

    def _spawn(self, *args: str) -> subprocess.Popen:
        out = open(self.config.parent / "console.log", "ab")  # noqa: SIM115 - the child's
        return subprocess.Popen(
            on(HERE, *LAUNCH, *args),
            env=self.env,
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def far(self, file: Path, work: Path) -> list[str]:
        argv = [*LAUNCH, "producer", "--bundle", str(file), "--connect", AT, "--gpu", "cpu"]
        data = str(self.config.parent / "there")
        return on(THERE, *argv, "--data-root", data, "--work", str(work))


def with_another_key(run: RunFolder, out: Path) -> Path:
    """The run's bundle with a client key that its trainer does not know."""
    file = run.path / "keys" / "client.json"
    kept = file.read_bytes()
    KeyPair.new().save(file)
    try:
        bundle.write(run, out)
    finally:
        file.write_bytes(kept)
    out.chmod(0o600)
    return out


def without_key(whole: Path, out: Path) -> Path:
    """The bundle, and no key in it."""
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(out, "w") as new:
        for item in old.infolist():
            if not item.filename.endswith("keys/client.json"):
                new.writestr(item, old.read(item))
    out.chmod(0o600)
    return out


def refused(driver: Hosts, name: str, file: Path, start_s: float = 0.0) -> dict:
    """How a producer of `file` ends: its last line, and the seconds to its end, of which a start
    takes `start_s`.
    """
    work, began = driver.config.parent / f"work-{name}", time.monotonic()
    process = subprocess.Popen(
        driver.far(file, work),
        env=driver.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        text, _ = process.communicate()
    lines = [line for line in text.splitlines() if "error" in line.lower()]
    seconds = time.monotonic() - began
    good = process.returncode == 2 and len(lines) == 1 and seconds - start_s < REFUSED_S
    return {
        "code": process.returncode,
        "seconds": round(seconds, 1),
        "line": lines[-1] if lines else text[-300:],
        "traceback": "Traceback" in text,
        "good": good and "Traceback" not in text,
    }


def other_runs_bundle(root: Path) -> Path:
    """Of a run with other keys on the same corpus."""
    folder = root / "other"
    folder.mkdir()
    shutil.copytree(root / "there", folder / "corpus")
    run = arithmetic_runs.arithmetic_run(folder, transport__bind=AT)
    run_keys(run.path)
    bundle.write(run, folder / "f")
    return folder / "f"


def away(driver: Hosts, file: Path, seconds: float) -> dict:
    """A producer at work, the link down for `seconds`, and how long until the next step."""
    work = driver.config.parent / "work"
    driver.extra.append(
        subprocess.Popen(
            driver.far(file, work),
            env=driver.env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    )
    driver.wait_for(lambda: driver.trained(2) >= 10, "step 10")
    trainer, (far,) = driver.pid("trainer"), status.read_all(work)
    ip("-n", THERE, "link", "set", "xtts1", "down")
    driver.gate.limit(2, 10_000)
    time.sleep(seconds)
    before = driver.trained(2)
    ip("-n", THERE, "link", "set", "xtts1", "up")
    began = time.monotonic()
    driver.wait_for(lambda: driver.trained(2) > before, "a step after the link came back")
    back_s = time.monotonic() - began
    same = (driver.pid("trainer"), status.read(work, far.name).pid) == (trainer, far.pid)
    driver.finish()
    assert_exact(RunFolder(driver.run))
    return {
        "away_s": seconds,
        "next_step_after_s": round(back_s, 2),
        "same_processes": same,
        "exact": True,
        "good": same,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--away", type=float, default=30.0)
    args = parser.parse_args()
    figures = {}
    with tempfile.TemporaryDirectory(prefix="two-hosts-") as name:
        root = Path(name)
        make_corpus(root / "corpus", 41, seconds=lambda i: 0.6 + 0.05 * (i % 9))
        shutil.copytree(root / "corpus", root / "there")
        more = {"producers__count": 0, "transport__bind": AT, "train__max_steps": 2000}
        more |= {"train__epochs": 100_000, "train__save_every": 200, "train__eval_every": 500}
        tree = settings(root / "run", root / "corpus", **more)
        base = Hosts.create(root, tree, step_ms=1, make_ms=1)
        up()
        try:
            base.gate.limit(2, 20 + LAG)
            base.launch()
            base.wait_for(lambda: (root / "run" / "endpoint.json").exists(), "the trainer")
            bundle.write(RunFolder(root / "run"), root / "f")
            bad = {
                "wrong key": with_another_key(RunFolder(root / "run"), root / "wrong"),
                "no key": without_key(root / "f", root / "none"),
                "another run's bundle": other_runs_bundle(root),
            }
            figures["a start alone"] = refused(base, "start", root / "nowhere", REFUSED_S)
            start_s = figures["a start alone"]["seconds"]
            for what, file in bad.items():
                figures[what] = refused(base, what.split()[0], file, start_s)
                sys.stdout.write(f"{what}: {figures[what]}\n")
                sys.stdout.flush()
            figures["link away"] = away(base, root / "f", args.away)
        finally:
            base.kill_everything()
            down()
    sys.stdout.write(json.dumps(figures) + "\n")
    return int(not all(f["good"] for f in figures.values()))


if __name__ == "__main__":
    sys.exit(main())
