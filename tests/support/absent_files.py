"""A lease server, and producers in threads whose batches only tell which files decode."""

import threading

from common.transport.client import LeaseClient
from common.transport.local import LocalHub
from common.transport.messages import Offer
from common.transport.server import LeaseServer
from producer.batches.decode import DecodePool
from producer.batches.maker import Clip
from producer.serve import Service
from tests.support.arithmetic_maker import ArithmeticMaker


class FromFiles(ArithmeticMaker):
    """Decodes its rows' files, and knows nothing but whether they decode."""

    def __init__(self, run, stage):
        super().__init__(run, stage)
        self._manifest = run.manifest

    def clips(self, planned):
        rows = [r for r, u in enumerate(planned.utterances.tolist()) if u >= 0]
        return [
            Clip(r, u)
            for r, u in zip(rows, self._manifest.utterances(planned.utterances[rows]), strict=True)
        ]

    def make(self, planned, clips, decoded):
        made = super().make(planned, clips, decoded)
        for clip, d in zip(clips, decoded, strict=True):
            if isinstance(d, Exception):
                for name in ("value", "seed", "weights"):
                    made.arrays[name][clip.row] = 0
                made.bad.append((clip.utterance.id, str(d)))
        return made


class Channel:
    """A lease server, and producers in threads that read files."""

    def __init__(self, run):
        self.run, self.hub, self.done = run, LocalHub(), threading.Event()
        self.server = LeaseServer("", run.run_id, 8, link=self.hub)
        self._ends = []

    def produce(self, name, make=FromFiles, roots=None):
        pool, client = (
            DecodePool(2, 1000),
            LeaseClient(self.hub.endpoint, self.run.run_id, name, capacity=2, link=self.hub.link()),
        )
        roots = tuple(map(str, self.run.manifest.roots)) if roots is None else roots
        service = Service(
            client, lambda stage: make(self.run, stage), pool, self.done.is_set, data_roots=roots
        )
        thread = threading.Thread(target=service.run, daemon=True)
        thread.start()
        self._ends.append((thread, client, pool))

    def open(self, schedule):
        self.server.open(1, Offer("gpt", self.run.feature_hash("gpt")), schedule)

    def close(self):
        self.done.set()
        for thread, _, _ in self._ends:
            thread.join(60)
        self.server.close(drain_s=0.0, stop_producers=False)
        for _, client, pool in self._ends:
            client.close()
            pool.close()
