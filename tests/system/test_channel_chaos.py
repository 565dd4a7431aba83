"""Trainers and producers killed, frozen and restarted at random: what was trained is what one
undisturbed run trains.
"""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.transport import wire
from common.transport.client import Lease
from tests.support import channel_fixtures
from tests.support import channels as cb

short_folder = channel_fixtures.short_folder
COUNT, DISTURBANCES = 600, 24


class Chaos:
    """One trainer and up to four producers as processes, and the dice."""

    def __init__(self, folder: Path, sockets: Path, seed: int):
        self.folder, self.random = folder, random.Random(seed)
        self.address = f"ipc://{sockets}/s"
        (folder / "generation").write_text("0")
        (folder / "limit").write_text("0")
        (folder / "checkpoint").write_text(json.dumps({"next_g": 0, "state": ""}))
        self.producers: list[subprocess.Popen] = []
        self.kills = {"trainer": 0, "producer": 0, "freeze": 0}
        self.names = 0
        self.trainer = self.start("trainer", str(folder), str(COUNT))

    def start(self, role: str, *arguments: str) -> subprocess.Popen:
        return subprocess.Popen([sys.executable, cb.__file__, role, self.address, *arguments])

    def join(self) -> None:
        self.names += 1
        self.producers.append(
            self.start("producer", f"p{self.names}", str(self.random.choice([0.001, 0.004, 0.02])))
        )

    def disturb(self) -> None:
        what = self.random.choice(["trainer", "producer", "freeze", "join", "join"])
        if what == "trainer":
            self.trainer.kill()
            self.trainer.wait()
            self.trainer = self.start("trainer", str(self.folder), str(COUNT))
        elif what == "producer" and len(self.producers) > 1:
            victim = self.producers.pop(self.random.randrange(len(self.producers)))
            victim.kill()
            victim.wait()
        elif what == "freeze":
            self.random.choice(self.producers).send_signal(signal.SIGSTOP)
        elif what == "join" and len(self.producers) < 4:
            self.join()
        for producer in self.producers:
            if self.random.random() < 0.3:
                producer.send_signal(signal.SIGCONT)
        if what in self.kills:
            self.kills[what] += 1

    def run(self) -> int:
        """Exit code of the trainer that came to the end.

        Before each disturbance it goes some batches further, and not to the end.
        """
        self.join()
        self.join()
        for i in range(DISTURBANCES):
            cb.replace(self.folder / "limit", str(COUNT * (i + 1) // (DISTURBANCES + 1)))
            time.sleep(self.random.uniform(0.1, 0.5))
            self.disturb()
        cb.replace(self.folder / "limit", str(COUNT))
        for producer in self.producers:
            producer.send_signal(signal.SIGCONT)
        return self.trainer.wait(240)

    def close(self) -> None:
        for process in [self.trainer, *self.producers]:
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [11])
def test_any_schedule_of_kills_trains_the_same_batches_in_the_same_order(
    tmp_path, short_folder, seed
):
    chaos = Chaos(tmp_path, short_folder, seed)
    try:
        assert chaos.run() == 0
    finally:
        chaos.close()
    assert chaos.kills["trainer"] > 0
    state = ""
    for g in range(COUNT):
        state = cb.chain(state, wire.digest(cb.make(Lease(1, "train", g, 0, 0))))
    assert json.loads((tmp_path / "checkpoint").read_text()) == {"next_g": COUNT, "state": state}
    lineage: list[int] = []
    for path in sorted(tmp_path.glob("events-*.jsonl")):
        lines = path.read_text().splitlines()
        log = cb.EventLog()
        log.events = [
            json.loads(line) for line in lines if line.endswith("}")
        ]  # the last line of a killed trainer may be torn
        log.check(window=8, capacity=2)
        assert not log.of("digest_mismatch")
        assert not log.of("batch_failed")
        trained = [e["g"] for e in log.of("release")]
        lineage[trained[0] if trained else len(lineage) :] = (
            trained  # a trainer goes on from its checkpoint
        )
    assert lineage == list(range(COUNT))  # nothing lost, nothing twice
