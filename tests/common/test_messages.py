"""What messages declare is what is used: each field of each message is read by somebody, besides
what carries it.
"""

import dataclasses
import sys
import threading
from contextlib import contextmanager

import pytest

from common.system.errors import BadInput
from common.transport.client import Lease, LeaseClient, Welcome
from common.transport.lease_records import Rules
from common.transport.local import LocalHub
from common.transport.messages import FROM_PRODUCER, FROM_TRAINER, Notes, Offer
from common.transport.server import LeaseServer
from producer.serve import Service
from tests.support.arithmetic_maker import ArithmeticMaker
from tests.support.arithmetic_runs import arithmetic_run
from tests.support.hostile import until
from tests.support.loop_runs import train

DECLARED = [*FROM_PRODUCER.values(), *FROM_TRAINER.values(), Offer, Notes]
CARRIERS = (
    "common.transport.messages",
    "common.transport.wire",
    "common.transport.links",
    "common.transport.local",
)
# Of every message, and the first thing that is looked at, whatever it is.
ENVELOPE = "gen"


@contextmanager
def watched():
    """The (class, field) pairs that our code reads meanwhile, without what only carries messages,
    and without the tests.
    """
    seen = set()
    for cls in DECLARED:
        names = {f.name for f in dataclasses.fields(cls)}

        def read(self, name, kind=cls.__name__, names=names):
            if name in names:
                by = sys._getframe(1).f_globals["__name__"]
                if by.startswith(("common.", "producer.", "trainer.")) and by not in CARRIERS:
                    seen.add((kind, name))
            return object.__getattribute__(self, name)

        cls.__getattribute__ = read
    try:
        yield seen
    finally:
        for cls in DECLARED:
            del cls.__getattribute__


def serve(run, hub, name: str) -> tuple[Service, LeaseClient]:
    client = LeaseClient(hub.endpoint, run.run_id, name, 2, link=hub.link(), heartbeat_s=0.05)
    return Service(client, lambda stage: ArithmeticMaker(run, stage), None, lambda: False), client


def exchange(run) -> None:
    """What a run without trouble does not say: leases that are put off, refused and revoked, a
    refusal, a stop.
    """
    hub, schedule = LocalHub(), [("train", g) for g in range(3)]
    server = LeaseServer("", run.run_id, 2, link=hub, rules=Rules(lease_ttl_s=0.2))
    server.open(
        1,
        Offer("gpt", run.feature_hash("gpt")),
        schedule,
        lambda r: "too new" if r.name == "new" else None,
    )
    idle = LeaseClient(hub.endpoint, run.run_id, "idle", 1, link=hub.link(), heartbeat_s=0.05)
    leases = []

    def lease() -> Lease | None:
        event = idle.poll(0.05)
        if isinstance(event, Welcome):
            idle.ready(event.gen)
        leases.extend([event] if isinstance(event, Lease) else [])
        return leases[-1] if leases else None

    until(lease, 60)
    idle.nack(leases.pop(), "the folder is away", later=True)
    until(lease, 60)
    idle.nack(leases.pop(), "no such row")
    until(lambda: (found := lease()) is not None and not idle.is_current(found), 60)  # revoked
    idle.close()
    refused, client = serve(run, hub, "new")
    with pytest.raises(BadInput, match="too new"):
        refused.run()
    client.close()
    service, client = serve(run, hub, "good")
    thread = threading.Thread(target=service.run, daemon=True)
    thread.start()
    for _ in schedule:
        server.next(60)
        server.release()
    server.close(drain_s=60)
    thread.join(60)
    client.close()


def test_every_field_is_read_by_somebody(tmp_path):
    # Long enough without a pause for the watch to look at what producers say of their batches.
    steps = {
        "train__max_steps": 30,
        "train__log_every": 1,
        "train__save_every": 100,
        "dvae__max_steps": 1,
    }
    run = arithmetic_run(tmp_path, 20, **steps, train__eval_every=0, train__eval_at_epoch_end=False)
    with watched() as seen:
        train(run)
        exchange(run)
    declared = {
        (cls.__name__, f.name)
        for cls in DECLARED
        for f in dataclasses.fields(cls)
        if f.name != ENVELOPE
    }
    assert declared - seen == set(), "fields that nobody reads"
    assert all(
        dataclasses.fields(cls)[0].name == ENVELOPE
        for cls in (*FROM_PRODUCER.values(), *FROM_TRAINER.values())
    )
