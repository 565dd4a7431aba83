"""What a run says of its own speed: waits on the device's clock, variation by shape, GPUs, one
warning per cause.
"""

import json
import logging
import os
import re
import threading
import time

import numpy as np
import pytest

from tests.support.producer_runs import write_dvae

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from common.run import settings as config
from common.system.lifecycle import Stop
from common.system.status import StatusFile
from common.transport.client import LeaseClient
from common.transport.local import LocalHub
from common.transport.messages import Notes
from common.transport.server import LeaseServer
from producer.__main__ import decode_threads
from producer.batches.decode import DecodePool
from producer.creation.prepare import prepare_run
from producer.serve import Service
from tests.support.arithmetic_runs import arithmetic_run, settings
from tests.support.arithmetic_step import ArithmeticStep
from tests.support.corpora import make_corpus
from tests.support.pipelines import train_asleep
from trainer import session
from trainer.report.clock import Clock, Tick
from trainer.report.gpu_use import Use
from trainer.report.observe import Reminder
from trainer.report.verdict import Measured, Settings, verdict
from trainer.report.watch import FedRecord, Speed, Watch


class Ticks(Clock):
    """A clock whose ticks are given."""

    def __init__(self, *ticks):
        super().__init__()
        self._ticks.extend(Tick(*t) for t in ticks)


def fed(asked, got, bucket=0, rows=4, producer="p0", notes=Notes(), **more):  # noqa: B008 - frozen
    return FedRecord(bucket, rows, producer, asked, got, 0.001, None, notes, **more)


def watch_of(ticks, batches, per_step=1, **more) -> Watch:
    """A watch that has seen all of them."""
    watch = Watch(Settings(cores=2), Ticks(*ticks), warm_up=0, **more)
    for g, b in enumerate(batches):
        watch.fed(g, b)
    for s in range(len(ticks)):
        watch.step(s * per_step, per_step)
    return watch


# -- arithmetic of the clock -----------------------------------------------------------------------


def test_a_step_waits_for_data_only_once_the_one_before_has_finished():
    """Issued at 0, 1, 2, 3 …, each 10 long: the host waits for batch 2 until 15, the device is busy
    until 20, so nothing was lost;
    batch 4 comes at 47, when the device had been done since 40."""
    ticks = [(0, 1, 10), (1, 2, 20), (15, 16, 30), (16, 17, 40), (47, 48, 57)]
    batches = [fed(0, 0), fed(1, 1), fed(2, 15), fed(16, 16), fed(17, 47)]
    steps = watch_of(ticks, batches).steps
    assert [s.total_s for s in steps] == [10, 10, 10, 17]
    assert [s.wait_s for s in steps] == [0, 0, 0, 7]
    assert [s.busy_s for s in steps] == [10, 10, 10, 10]


def test_what_later_batches_of_a_step_are_waited_for_is_no_work():
    ticks = [(0, 1, 10), (12, 31, 40)]
    batches = [fed(0, 0), fed(0, 0), fed(1, 12), fed(14, 30)]
    (step,) = watch_of(ticks, batches, per_step=2).steps
    assert step.total_s == 30
    assert step.wait_s == (12 - 10) + (30 - 14)
    assert step.busy_s == (40 - 12) - (30 - 14)


def test_interrupted_steps_and_steps_without_a_tick_are_left_out():
    watch = Watch(
        Settings(),
        Ticks((0, 1, 10), (10, 11, 20), (20, 21, 99), (99, 100, 110), (110, 111, 120)),
        warm_up=0,
    )
    for g in range(6):
        watch.fed(g, fed(10 * g, 10 * g))
    watch.step(0, 1)
    watch.step(1, 1)
    watch.interrupted()  # a checkpoint
    watch.step(2, 1)
    watch.step(3, 1)
    assert watch.step(4, 1) is not None
    assert [s.total_s for s in watch.steps] == [10, 11, 10]
    assert watch.step(5, 1) is None  # its scalars were never read


def test_steps_beside_compilations_say_nothing_of_speed_nor_do_those_still_on_the_device():
    """The loop is told of a step's call when it makes it, and reads the step two calls later."""
    watch = Watch(
        Settings(), Ticks(*[(10 * i, 10 * i + 1, 10 * i + 10) for i in range(20)]), warm_up=0
    )
    for g in range(20):
        watch.fed(g, fed(10 * g, 10 * g))
        if g < 8:
            watch.beside_compiling()
        if g >= 2:
            watch.step(g - 2, 1)
    # Of steps 0 to 7 each was made beside a compilation; those after them are said to be warm.
    assert [s.number for s in watch.steps] == list(range(10, 18))


def test_a_step_after_an_interruption_is_timed_from_its_own_start():
    """Each is 10 long and issued in 1.

    After an evaluation until 50, batch 2 is waited for until 51. Then a checkpoint is on disk,
    which held up nothing: step 3 was issued while step 2 ran."""
    watch = Watch(Settings(), Ticks((0, 1, 10), (1, 2, 20), (51, 52, 61), (53, 54, 71)), warm_up=0)
    for g, batch in enumerate([fed(0, 0), fed(1, 1), fed(50, 51), fed(53, 53)]):
        watch.fed(g, batch)
    records = []
    for g in range(4):
        if g >= 2:
            watch.interrupted()
        records.append(watch.step(g, 1))
    assert [(r.total_s, r.wait_s, r.busy_s, r.interrupted) for r in records] == [
        (10, 0, 10, True),
        (10, 0, 10, False),
        (11, 1, 10, True),
        (10, 0, 10, True),
    ]
    assert [s.total_s for s in watch.steps] == [10], (
        "only what followed a step says how fast steps follow each other"
    )


def even_ticks(durations):
    ends = np.cumsum(durations)
    return [(e - d, e - d + 0.001, e) for e, d in zip(ends, durations, strict=True)], ends


def test_variation_is_within_a_shape():
    """Shapes that take 1 and 3 seconds, each ± nothing: 0 %.

    The same with ±0.5: 50 % and 17 %; the worst is said.
    """
    shapes = [0, 1] * 20
    for jitter, expected in ((0.0, 0.0), (0.5, 0.5)):
        durations = [(1.0, 3.0)[b] + jitter * (-1) ** (i // 2) for i, b in enumerate(shapes)]
        ticks, ends = even_ticks(durations)
        starts = [0.0, *ends[:-1]]
        watch = watch_of(ticks, [fed(t, t, bucket=b) for t, b in zip(starts, shapes, strict=True)])
        speed = watch.speed()
        assert speed.variation == pytest.approx(expected, abs=0.03)
        assert sorted(speed.per_bucket) == [(0,), (1,)]
        warnings = watch.warnings(speed)
        assert len(warnings) == (jitter > 0)
        assert watch.warnings(speed) == [], "said once"


def test_variation_of_steps_whose_shapes_hardly_recur():
    """Steps of two batches of six shapes: 21 kinds, of which none comes ten times.

    All take 1 s or 3 s for a reason that is not their
    shape's, half and half: ±50 % of 2 s. Where each kind comes once, nothing is known, and nothing
    is said.
    """
    pairs = [(a, b) for a in range(6) for b in range(a, 6)]
    kinds = [pairs[0], *[p for p in pairs[:8] for _ in range(6)]]
    durations = [1.0 if i % 2 else 3.0 for i in range(len(kinds))]
    for chosen, expected in ((kinds, 0.5), ([pairs[0], *pairs[:12]], None)):
        ticks, ends = even_ticks(durations[: len(chosen)])
        starts = [0.0, *ends[:-1]]
        batches = [
            fed(t, t, bucket=b) for t, pair in zip(starts, chosen, strict=True) for b in pair
        ]
        speed = watch_of(ticks, batches, per_step=2, recent=100).speed()
        if expected is None:
            assert speed.variation is None
            assert "±" not in speed.line("3/8")
            assert "variation_percent" not in speed.record()
            continue
        assert speed.variation == pytest.approx(expected, rel=0.15)
        assert len(Watch(Settings()).warnings(speed)) == 1
        assert Watch(Settings(producers_on="cpu")).warnings(speed) == [], "on CPUs they always vary"


CARD = Use(0, ("trainer",), 90.0, 1000, 2000)


@pytest.mark.parametrize(
    ("wait", "on", "cards", "warned"),
    [(0.2, "gpu", (), 1), (0.2, "cpu", (), 0), (0.6, "cpu", (), 1), (0.2, "cpu", (CARD,), 1)],
)
def test_on_cpus_that_both_share_only_long_waits_are_warned_of(wait, on, cards, warned):
    measured = Measured(batch_s=1.0, wait_s=wait)
    speed = Speed(10, measured, verdict(measured), 1.0, 8.0, 8.0, {}, 0.1, gpus=cards)
    assert len(Watch(Settings(producers_on=on)).warnings(speed)) == warned


def test_rates_and_producers_come_from_what_they_sent():
    ticks, ends = even_ticks([0.1] * 41)
    starts = [0.0, *ends[:-1]]
    notes = Notes(
        spent_ms={"read": 1.0, "codes": 20.0, "decode": 30.0},
        threads=2,
        clips=4,
        cached=1,
        cpu_ms=8.0,
    )
    batches = [fed(t, t, producer=f"p{g % 2}", notes=notes) for g, t in enumerate(starts)]
    speed = watch_of(ticks, batches, recent=100).speed()
    assert speed.steps == 40
    assert speed.utterances_per_s == pytest.approx(40)
    assert speed.produced_per_s == pytest.approx(10)
    assert speed.cpu_s == pytest.approx(0.002)
    assert [p.name for p in speed.measured.producers] == ["p0", "p1"]
    assert speed.measured.producers[0].own_s == pytest.approx(
        0.020
    )  # its thread's 1 ms of reading is under it
    assert speed.measured.producers[0].cached == pytest.approx(0.25)
    assert speed.measured.made_per_s == pytest.approx(2 / 0.020)
    record = speed.record()
    assert all(isinstance(v, (int, float)) for v in record.values())
    assert record["p1_codes_ms"] == 20.0
    assert (
        "wait_data=0.0% step=100.0ms (±0%) utterances/s=40.0 produced/s=10.00 queue=3/8"
        " bottleneck=trainer" in speed.line("3/8")
    )


def test_steps_that_compile_are_left_out(tmp_path, monkeypatch):
    """Metrics are read two steps late; what is left out must be the step that compiled all the
    same.
    """
    watches = []

    class Compiling(ArithmeticStep):
        def update(self, bucket, batch, seed):
            if not self.trace_counts[f"update/{bucket}"]:
                threading.Event().wait(1.0)
            self.trace_counts[f"update/{bucket}"] += 1
            return super().update(bucket, batch, seed)

    monkeypatch.setattr("tests.support.arithmetic_step.ArithmeticStep", Compiling)
    monkeypatch.setattr(
        session, "Watch", lambda *a, **k: watches.append(Watch(*a, warm_up=0, **k)) or watches[-1]
    )
    run = arithmetic_run(
        tmp_path,
        train__accumulate=1,
        train__eval_every=0,
        train__save_every=1000,
        train__max_steps=20,
        dvae__max_steps=1,
    )
    train_asleep(run, {})
    plan = run.plan("gpt", "train")
    assert {plan.batch(g).bucket for g in range(18)} == {0, 1}
    assert len(watches[-1].steps) >= 10
    assert max(s.total_s for s in watches[-1].steps) < 1.0


# -- how busy the cards are ------------------------------------------------------------------------


class Metered:
    """Replaces `GpuUse`: a card as busy as the test sets it, sampled when the test says so."""

    def __init__(self):
        self.samples = []

    def take(self, keep=False):
        mean = [sum(self.samples) / len(self.samples)] if self.samples else []
        self.samples = self.samples if keep else []
        return [Use(0, ("trainer",), percent, 1, 2) for percent in mean]


def test_steps_that_compile_or_save_say_nothing_of_how_busy_a_card_is():
    card = Metered()
    ticks = [(k + 0.1, k + 0.2, k + 1.0) for k in range(12)]
    watch = Watch(Settings(cores=2), Ticks(*ticks), card, warm_up=3)
    for k in range(12):
        if k == 8:
            watch.interrupted()
        card.samples.append(0.0 if k < 3 or k == 8 else 90.0)
        watch.fed(k, fed(k, k + 0.1))
        watch.step(k, 1)
    watch.look()
    assert [u.percent for u in watch._gpus] == [90.0]
    assert card.samples == []
    watch.look()
    assert [u.percent for u in watch._gpus] == [90.0]  # nothing new: what was seen last


def test_a_profile_tells_of_its_free_steps_and_of_none_that_was_waited_for():
    card, clock = Metered(), Clock()
    watch = Watch(Settings(cores=2), clock, card)
    clock.sync_from = 4
    for busy in (90.0, 70.0):  # both looks together
        card.samples.append(busy)
        watch.look()
    assert [u.percent for u in watch._gpus] == [80.0]
    clock.updates = 4
    card.samples.append(0.0)
    watch.look()
    assert [u.percent for u in watch._gpus] == [80.0]


# -- C31: a slow producer --------------------------------------------------------------------------


def asleep(folder, caplog, slow: dict, steps: int) -> tuple[list[str], list[str], list[dict]]:
    """Lines of the log, warnings about waits, and the speeds' records of a run whose
    parts sleep.
    """
    folder.mkdir()
    options = {
        "accumulate": 1,
        "eval_every": 0,
        "save_every": 1000,
        "max_steps": steps,
        "log_every": 25,
    }
    run = arithmetic_run(
        folder, **{f"train__{k}": v for k, v in options.items()}, dvae__max_steps=1
    )
    caplog.clear()
    with caplog.at_level(logging.INFO):
        train_asleep(run, slow)
    said = [r for r in caplog.records if r.name == "trainer.report.observe"]
    lines = [r.message for r in said if r.message.startswith("step ")]
    warnings = [r.message for r in said if r.levelname == "WARNING" and "vary" not in r.message]
    records = map(json.loads, (run.path / "metrics.jsonl").read_text().splitlines())
    return lines, warnings, [r for r in records if "speed" in r]


def test_c31_a_slow_producer_is_named_once_with_the_setting(tmp_path, caplog):
    """Decoding takes 20 ms per clip, four clips on two threads: 40 ms per batch, of a step of 10.

    A busy machine makes the short sleeps longer too: then the same is tried with all of them
    longer.
    """
    for slower in (1, 2, 4):
        lines, warnings, speeds = asleep(
            tmp_path / f"x{slower}", caplog, {"decode": 20.0 * slower, "compute": 10.0 * slower}, 75
        )
        if len(warnings) == 1 and 60 < speeds[-1]["speed"]["wait_percent"] < 90:
            break
    assert len(lines) >= 3
    for part in ("wait_data=", "step=", "produced/s=", "queue=", "bottleneck=decode (decode)"):
        assert part in lines[-1], lines[-1]
    assert len(warnings) == 1, warnings
    assert warnings[0].startswith("the bottleneck is decode: the trainer waits for data ")
    assert "producers.decode_threads" in warnings[0] or "threads decode on" in warnings[0]
    assert [r["step"] for r in speeds] == [50, 75]
    assert 20 < speeds[-1]["speed"]["wait_percent"] < 90  # 75 on an idle machine
    assert speeds[-1]["bottleneck"] == warnings[0] or "decode" in speeds[-1]["bottleneck"]


def test_c31_a_fast_producer_keeps_the_trainer_busy(tmp_path, caplog):
    """Everything a producer does takes a third of the step: no wait beyond 1 %, and no warning
    about it.
    """
    for slower in (1, 2, 4):
        slow = {"decode": 4.0 * slower, "codes": 4.0 * slower, "compute": 25.0 * slower}
        _, _, speeds = asleep(tmp_path / f"x{slower}", caplog, slow, 50)
        if speeds[-1]["speed"]["wait_percent"] < 10:  # of a busy machine; the goal is 1
            break
    assert speeds[-1]["speed"]["wait_percent"] < 10
    assert (
        "the bottleneck is the trainer" in speeds[-1]["bottleneck"]
        or speeds[-1]["speed"]["wait_percent"] > 1
    )


def test_c31_decode_threads_share_the_cores(tmp_path, monkeypatch):
    monkeypatch.setattr("producer.__main__.cores", lambda: 16)
    for producers, threads in ((1, 8), (2, 8), (4, 4), (8, 2), (32, 1)):
        assert decode_threads(config.parse({"producers": {"count": producers}})) == threads
    assert decode_threads(config.parse({"producers": {"count": 4, "decode_threads": 11}})) == 11


# -- C25: a new length is no new shape -------------------------------------------------------------


def test_c25_fifty_text_lengths_make_no_more_traces_than_buckets(tmp_path, caplog):
    """50 batches of one clip each, 50 text lengths, the real networks in little: one function per
    bucket, each announced.
    """
    letters = (
        "abcdefghijklmnopqrstuvwxyz" * 3
    )  # words of one letter: no merges, so each text has a length of its own
    corpus = make_corpus(
        tmp_path / "corpus",
        52,
        seconds=lambda i: 0.7 + 0.02 * i,
        text=lambda i: " ".join(letters[: 2 + i]),
    )
    tree = settings(
        tmp_path / "run",
        corpus,
        model={"size": "tiny", "layers": 1},
        text={"vocab_size": 64},
        batching={"batch_size": 1, "buckets": 2},
        data={"train": str(corpus), "eval_fraction": 0.03},
        train={
            "max_steps": 50,
            "accumulate": 1,
            "eval_every": 0,
            "eval_at_epoch_end": False,
            "save_every": 1000,
            "log_every": 50,
        },
    )
    run = prepare_run(config.parse(tree), on_cpu=True, cores=1, out=lambda line: None)
    write_dvae(run)
    plan = run.plan("gpt", "train")
    lengths = {len(run.manifest.utterances(plan.batch(g).utterances)[0].tokens) for g in range(50)}
    assert len(lengths) == 50
    assert len(plan.buckets) == 2
    with caplog.at_level(logging.INFO):
        step = train_real(run)
    training = {
        k: n for k, n in step.trace_counts.items() if k.split("/")[0] in ("micro", "update")
    }
    assert sum(training.values()) <= len(plan.buckets), step.trace_counts
    assert all(n == 1 for n in step.trace_counts.values()), step.trace_counts
    said = [r.message for r in caplog.records if r.message.startswith("compiling ")]
    assert any(m.startswith("compiling the training step for bucket 1 of 2 ") for m in said)
    assert any(m.startswith("compiling the evaluation for bucket 2 of 2 ") for m in said)
    before = dict(step.trace_counts)
    arrays = example_of(run, step)
    for i in range(20):  # a Python number as an argument, another one each time
        float(step.micro(0, arrays, (i, 2 * i), 1.0 / (i + 1))["loss"])
    added = {k: n - before.get(k, 0) for k, n in step.trace_counts.items() if n != before.get(k, 0)}
    assert added == {"micro/0": 1}


def train_real(run):
    """Train stage 2 with the real maker and the real step in this process; the step."""
    from producer.batches.gpt import GptMaker

    hub = LocalHub()
    server = LeaseServer("", run.run_id, run.config.transport.high_water_mark, link=hub)
    client = LeaseClient(hub.endpoint, run.run_id, "producer-0", capacity=2, link=hub.link())
    done, pool = threading.Event(), DecodePool(1, 1000)
    thread = threading.Thread(
        target=Service(client, lambda stage: GptMaker(run), pool, done.is_set).run, daemon=True
    )
    thread.start()
    try:
        return session.train_stage(
            run, "gpt", server, StatusFile(run.path, "trainer", "trainer"), Stop()
        ).step
    finally:
        done.set()
        thread.join(90)
        server.close(drain_s=0.0, stop_producers=False)
        client.close()
        pool.close()


def example_of(run, step):
    from common.data.batch import empty_batch

    return empty_batch(
        "gpt", run.plan("gpt", "train").buckets[0], run.dims, run.config.transport.mel_dtype
    )


def test_c25_what_takes_long_is_said_again(caplog):
    reminder = Reminder(0.05)
    with caplog.at_level(logging.INFO):
        reminder.start("compiling update for bucket 1 of 4")
        deadline = time.monotonic() + 90
        while len(caplog.records) < 3:
            assert time.monotonic() < deadline
            threading.Event().wait(0.01)
        reminder.stop()
        while any(
            t.name == "reminder" for t in threading.enumerate()
        ):  # the one that was about to be said may still be
            assert time.monotonic() < deadline, "silent once it is done"
            threading.Event().wait(0.01)
    assert re.fullmatch(
        r"compiling update for bucket 1 of 4: \d+ s so far", caplog.records[0].message
    )
