"""The producer's loop against the real lease server, in one process, with arithmetic in place of
features.
"""

import contextlib
import os
import threading
import time

import numpy as np
import pytest

from common.system.errors import BadInput
from common.system.lock import lock
from common.system.status import StatusFile
from common.transport.client import Lease, LeaseClient, Welcome
from common.transport.local import LocalHub
from common.transport.messages import Offer, Ready
from common.transport.server import BatchFailed, LeaseServer, NoData
from common.transport.wire import digest
from producer import serve
from producer.__main__ import ASK_S, Over
from producer.batches.decode import DecodePool
from producer.batches.maker import BatchError, Clip, Work, without
from producer.serve import Service
from tests.support.arithmetic_maker import ArithmeticMaker, value_of
from tests.support.corpora import sine, write_wav
from tests.support.producer_runs import RUN_ID, make_run
from tests.support.serving import LATER_S, open_stage, take_all, wait_for


class Running:
    """A service in a thread, its client and what it reports."""

    def __init__(self, hub, run, make_stage=None, name="p0", **options):
        self.stages, self.phases, self.error, self.reason = [], [], None, None
        self.stopping = threading.Event()
        self.client = LeaseClient(hub.endpoint, RUN_ID, name, 2, link=hub.link(), heartbeat_s=0.1)
        self.pool = DecodePool(2, 1000)

        def open_stage(stage):
            self.stages.append(stage)
            return (make_stage or (lambda s: ArithmeticMaker(run, s)))(stage)

        options.setdefault("report", lambda phase, batches: self.phases.append(phase))
        self.service = Service(self.client, open_stage, self.pool, self.stopping.is_set, **options)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self):
        try:
            self.reason = self.service.run()
        except Exception as e:  # noqa: BLE001 - the test looks at it
            self.error = e

    def join(self):
        self.stopping.set()
        self.thread.join(LATER_S)
        assert not self.thread.is_alive()
        self.client.close()
        self.pool.close()


@pytest.fixture
def world(tmp_path):
    """run, hub, server, start(…) → Running."""
    run, hub, running = (
        make_run(tmp_path, [1.0] * 23, size="arithmetic", num_eval=3),
        LocalHub(),
        [],
    )
    server = LeaseServer("", RUN_ID, 4, link=hub)

    def start(**options):
        running.append(Running(hub, run, **options))
        return running[-1]

    yield run, server, start
    with contextlib.suppress(ValueError):
        server.close(drain_s=1.0)
    for r in running:
        r.join()


def test_two_epochs_and_an_evaluation_in_order_each_utterance_once_per_epoch(world):
    run, server, start = world
    plan = run.plan("gpt", "train")
    n = plan.batches_per_epoch
    schedule = (
        [("train", g) for g in range(n)] + [("eval", 0)] + [("train", g) for g in range(n, 2 * n)]
    )
    open_stage(server, run, 1, schedule)
    start(name="p0")
    start(name="p1")
    taken = take_all(server)
    assert [(p, g) for p, g, _, _ in taken] == schedule
    for epoch in (taken[:n], taken[n + 1 :]):
        values = sum(int(a["value"].sum()) for _, _, a, _ in epoch)
        assert values == sum(3 * i + 7 for i in range(20))
    for p, g, arrays, notes in taken:
        planned = run.plan("gpt", p).batch(g)
        np.testing.assert_array_equal(
            arrays["value"], np.where(planned.utterances >= 0, 3 * planned.utterances + 7, 0)
        )
        np.testing.assert_array_equal(arrays["weights"], planned.weights)
        assert notes.bad == ()


def test_ready_says_what_the_trainer_compares(world):
    run, server, start = world
    seen = []
    open_stage(server, run, 1, [("train", 0)], accept=seen.append)
    start()
    take_all(server)
    maker = ArithmeticMaker(run, "gpt")
    assert seen == [Ready(1, "p0", os.getpid(), 2, maker.feature_hash, maker.probe())]


def test_a_generation_of_the_same_stage_keeps_the_maker_and_another_stage_opens_one(world):
    run, server, start = world
    open_stage(server, run, 1, [("train", 0)], stage="dvae")
    p = start()
    take_all(server)
    for gen, stage in ((2, "dvae"), (3, "gpt"), (4, "gpt")):
        open_stage(server, run, gen, [("train", g) for g in range(3)], stage=stage)
        assert len(take_all(server)) == 3
    assert p.stages == ["dvae", "gpt"]


def test_quarantined_utterances_become_rows_of_weight_0_and_nothing_moves(world):
    run, server, start = world
    planned = run.plan("gpt", "train").batch(1)
    out = [int(planned.utterances[1]), 999]
    open_stage(
        server,
        run,
        1,
        [("train", 0), ("train", 1)],
        set_aside=lambda plan, g: out if g == 1 else (),
    )
    start()
    arrays = take_all(server)[1][2]
    expected = value_of(planned.utterances)
    expected[1] = 0
    np.testing.assert_array_equal(arrays["value"], expected)
    assert arrays["weights"].tolist() == [1, 0, *planned.weights[2:].tolist()]
    assert arrays["seed"][1] == 0
    np.testing.assert_array_equal(without(planned, out).row_seeds, planned.row_seeds)


def test_a_batch_that_cannot_be_made_is_refused_with_its_reason(world):
    run, server, start = world

    class Broken(ArithmeticMaker):
        def make(self, planned, clips, decoded):
            if planned.g == 1:
                raise BatchError("row 2 does not fit")
            return super().make(planned, clips, decoded)

    open_stage(server, run, 1, [("train", 0), ("train", 1)])
    start(make_stage=lambda s: Broken(run, s))
    assert server.next(LATER_S).g == 0
    with pytest.raises(BatchFailed, match="row 2 does not fit"):
        server.next(LATER_S)


def test_a_batch_that_the_plan_does_not_have_is_refused(world):
    run, server, start = world
    open_stage(server, run, 1, [("eval", 10**6)])
    start()
    with pytest.raises(BatchFailed, match="batch 1000000 of plan eval"):
        server.next(LATER_S)


class WithClips(ArithmeticMaker):
    """Decodes its rows' clips, of which an arithmetic run has none on disk; a row
    without is bad.
    """

    def __init__(self, run, stage="gpt"):
        super().__init__(run, stage)
        self.manifest = run.manifest

    def clips(self, planned):
        rows = np.flatnonzero(planned.utterances >= 0)
        return [
            Clip(int(r), u)
            for r, u in zip(rows, self.manifest.utterances(planned.utterances[rows]), strict=True)
        ]

    def make(self, planned, clips, decoded):
        bad = [
            (c.utterance.id, str(d))
            for c, d in zip(clips, decoded, strict=True)
            if isinstance(d, Exception)
        ]
        made = super().make(without(planned, [u for u, _ in bad]), clips, decoded)
        made.bad = bad
        return made


def test_a_clip_that_does_not_decode_is_named_beside_the_batch(world):
    run, server, start = world
    plan = run.plan("gpt", "train")
    g = next(g for g in range(plan.batches_per_epoch) if plan.num_rows(g) == 4)
    planned = plan.batch(g)
    good = int(planned.utterances[2])
    write_wav(run.path / "clips" / f"c{good}.wav", sine(22050))
    open_stage(server, run, 1, [("train", g)])
    start(make_stage=lambda s: WithClips(run), data_roots=(str(run.path / "clips"),))
    ((_, _, arrays, notes),) = take_all(server)
    assert arrays["weights"].tolist() == [0, 0, 1, 0]
    assert [u for u, _ in notes.bad] == [u for u in planned.utterances.tolist() if u != good]
    assert all("cannot be opened (No such file or directory)" in reason for _, reason in notes.bad)


def test_a_data_folder_that_is_gone_condemns_no_clip(world):
    run, server, start = world
    open_stage(server, run, 1, [("train", 0)])
    start(make_stage=lambda s: WithClips(run), data_roots=(str(run.path / "clips"), "/not/mounted"))
    wait_for(lambda: server.stats()["lease_ends"].get("postponed"))
    with pytest.raises(NoData, match="postponed by p0: the data folder /not/mounted is not there"):
        server.next(0.3)


def test_an_unexpected_error_ends_the_loop(world):
    run, server, start = world

    class Broken(ArithmeticMaker):
        def make(self, planned, clips, decoded):
            raise MemoryError("the device is full")

    open_stage(server, run, 1, [("train", 0)])
    p = start(make_stage=lambda s: Broken(run, s))
    p.thread.join(LATER_S)
    assert isinstance(p.error, MemoryError)


def test_a_device_that_never_ends_a_batch_ends_the_producer(world, monkeypatch):
    """Its heartbeats would go on for ever, and its trainer wait in vain; another process may get
    the device to work.
    """
    run, server, start = world
    monkeypatch.setattr(serve, "DEVICE_S", 1.0)
    hang = threading.Event()

    class Hanging(ArithmeticMaker):
        def make(self, planned, clips, decoded):
            if planned.g == 1:
                hang.wait(LATER_S)
            return super().make(planned, clips, decoded)

    open_stage(server, run, 1, [("train", g) for g in range(3)])
    p = start(make_stage=lambda s: Hanging(run, s))
    p.thread.join(LATER_S)
    hang.set()
    assert isinstance(p.error, RuntimeError)
    assert "the device has not finished a batch for 1 s" in str(p.error)
    assert server.next(LATER_S).g == 0


def test_revoked_work_is_skipped(world):
    """While the first batch is being made a new generation opens: the leases in hand are dropped,
    those of the new one are served.
    """
    run, server, start = world
    gate, made = threading.Event(), []

    class Slow(ArithmeticMaker):
        def make(self, planned, clips, decoded):
            made.append((planned.plan, planned.g))
            gate.wait(LATER_S)
            return super().make(planned, clips, decoded)

    open_stage(server, run, 1, [("train", g) for g in range(4)])
    p = start(make_stage=lambda s: Slow(run, s))
    wait_for(lambda: made)
    open_stage(server, run, 2, [("train", 7)])
    wait_for(lambda: p.phases.count("ready") == 2)
    gate.set()
    assert [(p, g) for p, g, _, _ in take_all(server)] == [("train", 7)]
    assert made == [("train", 0), ("train", 7)]


def test_the_next_batch_is_packed_and_the_one_before_sent_while_the_device_computes(world):
    """The device is held in each batch until the batch behind it is packed and the one before has
    arrived: in one thread, nobody could.
    """
    run, server, start = world
    packed, in_time, at_once = [threading.Event() for _ in range(6)], [], []

    class Held(ArithmeticMaker):
        def begin(self, planned, clips, decoded):
            packed[planned.g].set()
            at_once.append(sum(e.is_set() for e in packed) - len(taken))

            def compute():
                in_time.append(packed[min(planned.g + 1, 5)].wait(LATER_S))
                wait_for(lambda: len(taken) >= planned.g)
                return self.make(planned, clips, decoded)

            return Work(compute, lambda made: made)

    taken = []
    open_stage(server, run, 1, [("train", g) for g in range(6)])
    start(make_stage=lambda s: Held(run, s))
    while (d := server.next(LATER_S)) is not None:
        taken.append(d.g)
        server.release()
    assert taken == list(range(6))
    assert in_time == [True] * 6
    assert max(at_once) <= 3, "no more than two on the device, and one on its way"


def test_other_features_are_refused_and_the_producer_says_why(world):
    run, server, start = world
    open_stage(
        server,
        run,
        1,
        [("train", 0)],
        accept=lambda ready: "its features are of another vocabulary",
    )
    p = start()
    p.thread.join(LATER_S)
    assert isinstance(p.error, BadInput)
    assert "another vocabulary" in str(p.error)


def test_without_a_trainer_it_stays_and_leaves_when_told(tmp_path):
    run, hub = make_run(tmp_path, [1.0] * 5, size="arithmetic"), LocalHub()
    p = Running(hub, run)
    wait_for(lambda: p.phases and p.phases[-1] == "idle")
    assert p.thread.is_alive()
    p.join()
    assert p.reason == "stop was asked for"


def test_it_says_blocked_while_the_trainer_holds_back_and_ends_with_the_run(world):
    run, server, start = world
    open_stage(server, run, 1, [("train", g) for g in range(100)])
    p = start(log_every_s=0.3)
    wait_for(lambda: server.ready_count() == 4)  # the window
    wait_for(lambda: p.phases[-1] == "blocked")
    for _ in range(5):
        server.next(LATER_S)
        server.release()
    wait_for(lambda: server.ready_count() == 4)
    wait_for(lambda: p.service.meter.total >= 9)
    server.close(drain_s=LATER_S)
    p.thread.join(LATER_S)
    assert p.service.meter.total == 9
    assert p.reason == "the run is over"


class Script:
    """A client with scripted events; after them it waits for ever."""

    def __init__(self, events, revoked=(), silent_s=0.0):
        self.events, self.revoked, self.trainer_silent_s = list(events), set(revoked), silent_s
        self.said, self.sent, self.waits = [], [], 0

    def poll(self, timeout_s):
        self.waits += timeout_s > 0 and not self.events
        return self.events.pop(0) if self.events else None

    def is_current(self, lease):
        return lease.lease not in self.revoked or self.events  # revoked after all have been taken

    def set_status(self, text):
        if not self.said or self.said[-1] != text:
            self.said.append(text)

    def ready(self, gen, feature_hash, probe):
        self.said.append("READY")

    def send(self, lease, arrays, notes):
        self.sent.append(lease.g)

    def bye(self):
        self.said.append("BYE")


def follow(run, script, maker=ArithmeticMaker):
    service = Service(script, lambda stage: maker(run, stage), None, lambda: script.waits >= 1)
    assert service.run() == "stop was asked for"
    return service


def lease(g, position):
    return Lease(1, "train", g, 100 + g, position)


def test_what_is_needed_soonest_is_made_first_and_what_is_revoked_not_at_all(world):
    run, _, _ = world
    script = Script(
        [Welcome(1, Offer("gpt")), lease(3, 9), lease(0, 4), lease(1, 7), lease(2, 5)],
        revoked=[101],
    )
    follow(run, script)
    assert script.sent == [0, 2, 3]
    assert script.said == ["opening stage gpt", "READY", "ready", "working", "blocked", "BYE"]


def test_it_says_what_it_compiles_and_stops_saying_so(world):
    run, _, _ = world

    class Compiling(ArithmeticMaker):
        def compiles(self, planned):
            return planned.g == 0

    script = Script([Welcome(1, Offer("gpt")), lease(0, 0), lease(1, 1)])
    follow(run, script, Compiling)
    bucket = run.plan("gpt", "train").bucket_of(0)
    assert script.said[3:5] == [f"compiling(bucket {bucket})", "working"]


@pytest.mark.parametrize(
    ("silent_s", "name", "other"), [(0.5, "blocked", "idle"), (60.0, "idle", "blocked")]
)
def test_waiting_is_blocked_with_a_trainer_and_idle_without(world, silent_s, name, other):
    run, _, _ = world
    script = Script([Welcome(1, Offer("gpt"))], silent_s=silent_s)
    service = follow(run, script)
    assert script.said[-2] == name
    line = service.meter.line(time.monotonic() + 20)
    assert f"; {other} 0 %" in line
    assert f"; {name} 0 %" not in line


def test_the_line_in_the_log_says_where_time_went(world, caplog):
    run, server, start = world
    caplog.set_level("INFO")
    open_stage(server, run, 1, [("train", g) for g in range(8)])
    start(log_every_s=0.3)
    take_all(server)

    def lines():
        return [r.message for r in caplog.records if r.message.startswith("made ")]

    wait_for(lambda: any("/s (8 batches so far" in line for line in lines()))
    assert all(" blocked " in line and " idle " in line for line in lines())
    assert all(
        any(part in line for line in lines()) for part in (" read ", " make ", " serialise ")
    )


def test_the_same_batch_is_the_same_bytes(world):
    run, _, _ = world
    a, b = (ArithmeticMaker(run, "gpt") for _ in range(2))
    for plan, g in (("train", 3), ("eval", 0)):
        assert digest(a.make(a.plan(plan, g), [], []).arrays) == digest(
            b.make(b.plan(plan, g), [], []).arrays
        )


def test_a_producer_leaves_once_no_trainer_will_come(world):
    _, server, start = world
    server.close(drain_s=0.0, stop_producers=False)
    why = []
    producer = start(over=lambda: why[0] if why else "")
    wait_for(lambda: "idle" in producer.phases)
    assert producer.thread.is_alive()
    why.append("the run is over")
    producer.thread.join(LATER_S)
    assert (producer.reason, producer.error) == ("the run is over", None)


def test_the_run_is_over_once_its_trainer_says_so_and_nobody_else_is_there(tmp_path):
    now, over = [0.0], Over(tmp_path, lambda: now[0])

    def look() -> str:
        now[0] += ASK_S
        return over()

    assert look() == "", "no trainer yet"
    trainer = StatusFile(tmp_path, "trainer", "trainer")
    trainer.update(phase="training")
    trainer.finish(143)
    assert look() == "", "it was stopped: another one may come"
    trainer.finish(0)
    for name in ("lock", "launch.lock"):
        with lock(tmp_path / name, "another"):
            assert look() == "", f"held: {name}"
    assert look() == "the run is over"
    assert over() == "", "it does not look again at once"
