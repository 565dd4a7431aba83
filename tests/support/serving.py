"""The trainer's end of a producer's tests: a stage opened, every batch taken, and waiting with a
deadline.
"""

import time

import numpy as np

from common.transport.messages import Offer

LATER_S = 200.0  # longer than anything takes that still happens


def wait_for(condition):
    deadline = time.monotonic() + LATER_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def open_stage(server, run, gen, schedule, stage="gpt", **options):
    server.open(gen, Offer(stage, run.feature_hash(stage)), schedule, **options)


def take_all(server):
    taken = []
    while (d := server.next(LATER_S)) is not None:
        taken.append((d.plan, d.g, {k: np.array(v) for k, v in d.arrays.items()}, d.notes))
        server.release()
    return taken
