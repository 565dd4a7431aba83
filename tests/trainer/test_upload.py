"""A batch through one buffer comes out to the bit; the loop waits for the next copy to be issued,
and for nothing longer.
"""

import os
import threading
import time

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from common.data.buckets import Bucket
from common.data.plan import PlannedBatch
from common.system.errors import Stopped
from common.transport.messages import Notes
from common.transport.server import Delivery
from trainer import feed as feeds
from trainer.feed import Feed, HostCopy, Quarantine
from trainer.step.upload import Layout, Upload


def fields(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "ids": rng.integers(-(2**31), 2**31 - 1, (3, 7), np.int32),
        "cond_mel": rng.normal(size=(3, 5, 81)).astype(np.float16),  # an odd number of 2-byte words
        "mel": rng.normal(size=(2, 3)).astype(np.float32),
        "weights": np.array([1, 0, np.nan, np.inf, -0.0], np.float32),
        "num_frames": np.array([7], np.int32),
    }


@pytest.mark.parametrize("device", [None, "/device:CPU:0"])
def test_what_arrives_is_what_was_sent(device):
    upload, issued = Upload(device), []
    for i in range(3):
        sent = fields(i)
        for a in sent.values():
            a.flags.writeable = False  # as the views of received frames are
        got, seed = upload.to_device(upload.to_host(sent, (5 + i, -7)), lambda: issued.append(1))
        assert list(got) == list(sent)
        for name, a in sent.items():
            assert got[name].dtype.as_numpy_dtype == a.dtype
            assert got[name].shape == a.shape
            assert got[name].numpy().tobytes() == a.tobytes(), name
        assert np.asarray(seed).tolist() == [5 + i, -7]
    assert len(issued) == 3
    assert upload.waits_for_steps == (device is not None)


def test_the_buffer_is_a_copy():
    upload, sent = Upload("/device:CPU:0"), fields(1)
    on_host = upload.to_host(sent, (1, 2))
    before = sent["mel"].copy()
    sent["mel"][:] = 0
    np.testing.assert_array_equal(upload.to_device(on_host, lambda: None)[0]["mel"].numpy(), before)


def test_a_batch_keeps_its_values_while_the_next_is_gathered():
    upload = Upload("/device:CPU:0")
    batches = [fields(i) for i in range(3)]
    on_host = [upload.to_host(batch, (i, i)) for i, batch in enumerate(batches)]
    for i, batch in enumerate(batches):
        got, seed = upload.to_device(on_host[i], lambda: None)
        assert all(got[name].numpy().tobytes() == a.tobytes() for name, a in batch.items())
        assert np.asarray(seed).tolist() == [i, i]


def test_fields_are_aligned_and_do_not_overlap():
    layout = Layout.of(fields(0))
    ends = 0
    for at, dtype, shape in layout.places.values():
        assert at * 4 % 16 == 0
        assert at * 4 >= ends
        ends = at * 4 + dtype.itemsize * int(np.prod(shape))
    assert ends <= 4 * layout.num_words
    assert Layout.of(fields(1)).key == layout.key


# -- the feed --------------------------------------------------------------------------------------


class Server:
    """Hands out `count` batches as fast as they are asked for, or when `more` says so."""

    def __init__(self, count: int):
        self.left, self.taken, self.more = count, 0, threading.Semaphore(count)

    def ready_count(self):
        return self.left

    def next(self, timeout_s, should_stop):
        while not self.more.acquire(timeout=0.02):
            if should_stop():
                return None
        self.left, self.taken = self.left - 1, self.taken + 1
        arrays = {"weights": np.ones(2, np.float32)}
        return Delivery(
            "train", self.taken - 1, arrays, Notes(sent=time.time()), (), "p", "d", 0.0, self.taken
        )


class SlowUpload(HostCopy):
    """A device whose copies begin when the test says so."""

    waits_for_steps = True

    def __init__(self):
        self.issued, self.ended = [], threading.Semaphore(0)

    def to_device(self, on_host, issuing):
        time.sleep(0.02)  # between having the batch and issuing its copy
        issuing()
        self.issued.append(time.perf_counter())
        self.ended.acquire()
        return on_host


def feed_of(server, upload):
    bucket = Bucket(2, 4, 2, 2)
    ids = np.array([0, 1])

    def plan(plan, g):
        return PlannedBatch(
            plan, g, 0, 0, ids, ids, np.ones(2, np.float32), np.zeros(2, np.uint64), (g, g)
        )

    assert bucket.batch_size == 2
    spec = {"weights": (np.dtype(np.float32), (2,))}
    stop = threading.Event()
    options = {"quarantine": Quarantine([]), "data_timeout_s": 90.0, "should_stop": stop.is_set}
    return (
        Feed(server, planned=lambda name, g: (plan(name, g), spec), upload=upload, **options),
        stop,
    )


LATER_S = 60.0  # instead of 50 ms: how long one waits for a copy that is never issued


def test_a_batch_is_handed_out_once_the_copy_of_the_next_is_issued(monkeypatch):
    monkeypatch.setattr(feeds, "_GATE_S", LATER_S)
    upload = SlowUpload()
    feed, stop = feed_of(Server(3), upload)
    try:
        upload.ended.release()  # the first copy may end
        fed, _ = feed.next()
        assert fed.planned.g == 0
        assert len(upload.issued) == 2, (
            "the copy of batch 1 waits only for what was issued before batch 0's step"
        )
        assert time.perf_counter() >= upload.issued[1]
    finally:
        stop.set()
        upload.ended.release(5)
        feed.close()


def test_it_waits_for_no_copy_where_no_batch_is_at_hand(monkeypatch):
    monkeypatch.setattr(feeds, "_GATE_S", LATER_S)
    upload = SlowUpload()
    feed, stop = feed_of(Server(1), upload)
    try:
        upload.ended.release()
        start = time.perf_counter()
        feed.next()
        assert time.perf_counter() - start < LATER_S / 2
        assert len(upload.issued) == 1
    finally:
        stop.set()
        with pytest.raises(Stopped):
            feed.next()
        feed.close()
