"""Who may answer a lease: the producer that it went to, after its READY, and nobody else, whatever
they know.
"""

from collections import Counter

import numpy as np
import pytest

from common.transport import wire
from common.transport.messages import Bye, Data, Nack, Notes
from tests.support import channel_fixtures
from tests.support import channels as cb
from tests.support.arithmetic_maker import ArithmeticMaker
from tests.support.arithmetic_runs import arithmetic_run, assert_exact
from tests.support.hostile import Forger
from tests.support.lease_harness import Harness
from tests.support.loop_runs import train
from trainer import stages

channel, ipc = channel_fixtures.channel, channel_fixtures.ipc
FORGED = {"numbers": np.full(4, -1, np.int32), "filler": np.full(3000, -1, np.float32)}


@pytest.fixture
def bench():
    b = Harness()
    yield b
    b.check_accounts()


def forged(lease, plan=None, g=None) -> Data:
    return Data(
        lease.gen,
        plan or lease.plan,
        lease.g if g is None else g,
        lease.lease,
        wire.digest(FORGED),
        Notes(),
        FORGED,
    )


def test_a_batch_is_taken_from_the_producer_that_the_lease_went_to_alone(bench):
    for name in ("a", "b"):
        bench.join(name, capacity=2)
    for name, lease in bench.leases():
        other = bench.book.heard(b"b" if name == "a" else b"a")
        assert bench.book.on_data(other, forged(lease), True) == "unknown"
        bench.book.on_nack(other, Nack(1, lease.plan, lease.g, lease.lease, "no"))
        assert bench.book.on_data(bench.book.heard(b"stranger"), forged(lease), True) == "unknown"
        assert bench.answer(name, lease) == "accepted"
    assert bench.book.outcomes == {"accepted": 4}
    assert not bench.kinds("strike", "digest_mismatch")


def test_nor_before_it_has_said_ready(bench):
    """After a new connection it is another peer until then, and its features may be others."""
    bench.join("a", capacity=1)
    [(_, lease)] = bench.leases()
    bench.book.peer_lost(b"a", "disconnected")
    joining = bench.book.heard(b"a")
    assert bench.book.on_data(joining, forged(lease), True) == "unknown"
    bench.book.peer_refused(joining, "other features")
    assert bench.book.on_data(joining, forged(lease), True) == "unknown"
    bench.join("a", capacity=1)
    assert bench.answer("a", lease) == "accepted"


def test_a_refused_producer_cannot_send_what_it_was_leased_before(bench):
    peer = bench.join("a", capacity=1)
    [(_, lease)] = bench.leases()
    bench.book.peer_refused(peer, "other features")
    assert bench.book.on_data(peer, forged(lease), True) == "unknown"


def test_an_answer_for_another_batch_than_the_leases_is_not_taken(bench):
    peer = bench.join("a", capacity=1)
    [(_, lease)] = bench.leases()
    assert bench.book.on_data(peer, forged(lease, g=lease.g + 1), True) == "unknown"
    assert bench.book.on_data(peer, forged(lease, plan="eval"), True) == "unknown"
    bench.book.on_nack(peer, Nack(1, "eval", lease.g, lease.lease, "no"))
    assert bench.book.outcomes == {}


def test_of_guessed_leases_none_is_taken(ipc):
    """`tests/bench/fuzz_wire.py forge` tries 100 000; here numbers that were the leases' once,
    random ones, and those of others.
    """
    server = ipc.serve(cb.train_schedule(), lease_ttl_s=0.5)
    leaked = []

    def work(client, lease):
        leaked.append((lease.plan, lease.g, lease.lease))
        client.send(lease, cb.make(lease))

    ipc.producer("good", work=work)
    forger, seen = Forger(ipc.address, cb.RUN), []
    try:
        forger.join()
        cb.wait_until(lambda: ipc.log.of("peer_ready", peer="forger"))
        while forger.tried < 3000:
            forger.guess(100, len(seen), leaked)
            seen += cb.train(server, 4)
        cb.wait_until(lambda: len(ipc.log.of("unknown_lease")) == forger.tried)
        forger.say(Bye(1))
        cb.wait_until(lambda: ipc.log.of("peer_lost", peer="forger"))
    finally:
        forger.close()
    assert seen == [("train", g) for g in range(len(seen))]
    assert {e["peer"] for e in ipc.log.of("data")} == {"good"}
    assert not ipc.log.of("digest_mismatch")


class Slandering(ArithmeticMaker):
    """Says of clips that are not in the batch that they are bad: first of twelve that do not exist,
    then of another batch's.
    """

    said: Counter = Counter()

    def make(self, planned, clips, decoded):
        made, key = super().make(planned, clips, decoded), (self.stage, planned.plan, planned.g)
        Slandering.said[key] += 1
        if planned.g == 2 and Slandering.said[key] <= 2:
            others = sorted(
                set(range(30)) - set(planned.utterances.tolist()) - set(planned.prompts.tolist())
            )
            made.bad = (
                [(10**6 + i, "gone") for i in range(12)]
                if Slandering.said[key] == 1
                else [(others[0], "gone")]
            )
        return made


def test_a_producer_can_condemn_no_clip_but_those_of_its_batch(tmp_path):
    """Twelve ids that nobody has filled the run's limit, and ended it for good."""
    Slandering.said.clear()
    run = arithmetic_run(tmp_path, train__max_steps=10)
    train(run, make=Slandering)
    assert Slandering.said["gpt", "train", 2] == 3
    assert not stages.files_of(run, "gpt").quarantine.exists()
    assert_exact(run)
