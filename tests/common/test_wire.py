"""Messages survive the way there and back; everything else is refused before it costs anything."""

import msgpack
import numpy as np
import pytest
import xxhash

from common.transport import wire

RUN = "0123456789abcdef" * 2


def batch() -> dict[str, np.ndarray]:
    return {
        "ids": np.arange(6, dtype=np.int32).reshape(2, 3),
        "mel": np.linspace(0, 1, 2 * 50 * 80, dtype=np.float16).reshape(2, 50, 80),
        "weights": np.array([1.0, 0.0], np.float32),
        "empty": np.zeros((0, 3), np.int16),
        "scalar": np.array(7, np.int64),
    }


def data(arrays=None) -> wire.Data:
    arrays = batch() if arrays is None else arrays
    return wire.Data(3, "train", 17, 5, wire.digest(arrays), {"rows": [1, 2], "why": None}, arrays)


def header(**changes) -> bytes:
    fields = {"v": wire.VERSION, "type": "HB", "run": RUN, "gen": 1, "status": "", "ready": False}
    return msgpack.packb({k: v for k, v in {**fields, **changes}.items() if v != "DROP"})


@pytest.mark.parametrize(
    "message",
    [
        wire.Ready(2, {"feature_hash": "ab", "capacity": 2, "nested": {"list": [1, 2.5, None, True, "é"]}}),
        wire.Welcome(2, {"stage": "gpt"}),
        wire.Refuse(2, "other vocabulary"),
        wire.Lease(2, "eval", 0, 9, 4, 30.0, {"quarantine": [3, 4]}),
        wire.Nack(2, "train", 7, 1, "file is gone"),
        wire.Revoke(2, 1),
        wire.Heartbeat(0),
        wire.Heartbeat(2, "compiling(3)", True),
        wire.Stop(2, "done"),
        wire.Bye(2),
    ],
)
def test_small_messages_make_the_round_trip_in_one_frame(message):
    frames = wire.encode(RUN, message)
    assert len(frames) == 1
    assert wire.decode(frames) == (RUN, message)


def test_data_has_one_frame_per_array_largest_last_and_keeps_field_order():
    sent = data()
    frames = wire.encode(RUN, sent)
    assert [len(f) for f in frames[1:]] == [0, 8, 8, 24, 2 * 50 * 80 * 2]
    run, got = wire.decode([memoryview(f) for f in frames])
    assert run == RUN
    assert list(got.arrays) == list(sent.arrays)
    for name, array in sent.arrays.items():
        assert got.arrays[name].dtype == array.dtype
        assert got.arrays[name].shape == array.shape
        np.testing.assert_array_equal(got.arrays[name], array)
        assert not got.arrays[name].flags.writeable
    assert (got.plan, got.g, got.lease, got.gen, got.meta) == ("train", 17, 5, 3, {"rows": [1, 2], "why": None})
    assert wire.digest(got.arrays) == sent.digest


def test_large_arrays_are_not_copied_on_either_side():
    mel = np.zeros((32, 500, 80), np.float32)
    frames = wire.encode(RUN, data({"mel": mel}))
    assert np.shares_memory(np.frombuffer(frames[1], np.uint8), mel)
    _, got = wire.decode(frames)
    assert np.shares_memory(got.arrays["mel"], mel)


def test_unaligned_frames_give_aligned_arrays():
    frames = wire.encode(RUN, data({"ids": np.arange(5, dtype=np.int32)}))
    shifted = memoryview(b"x" + bytes(frames[1]))[1:]
    _, got = wire.decode([frames[0], shifted])
    assert got.arrays["ids"].flags.aligned
    assert got.arrays["ids"].tolist() == [0, 1, 2, 3, 4]


def test_arrays_that_are_not_contiguous_travel_by_value():
    array = np.arange(12, dtype=np.int32).reshape(3, 4).T
    _, got = wire.decode(wire.encode(RUN, data({"a": array})))
    np.testing.assert_array_equal(got.arrays["a"], array)
    assert wire.digest(got.arrays) == wire.digest({"a": array}) == wire.digest({"a": array.copy()})


def test_digest_is_xxh3_128_of_names_dtypes_shapes_and_bytes_in_order():
    a, b = np.array([1, 2], np.int32), np.array([[3]], np.uint8)
    expected = xxhash.xxh3_128_hexdigest(b"a:int32:2;" + a.tobytes() + b"b:uint8:1,1;" + b.tobytes())
    assert wire.digest({"a": a, "b": b}) == expected
    different = [
        {"b": b, "a": a},
        {"c": a, "b": b},
        {"a": a.astype(np.int64), "b": b},
        {"a": a.reshape(1, 2), "b": b},
        {"a": a[::-1], "b": b},
    ]
    assert len({expected, *(wire.digest(d) for d in different)}) == 6


@pytest.mark.parametrize("dtype", ["float64", "bool", "complex64", "object", "<U3", ">i4", "datetime64[s]"])
def test_other_dtypes_do_not_travel(dtype):
    with pytest.raises(wire.WireError, match="'a': dtype"):
        wire.encode(RUN, data({"a": np.zeros(2, dtype)}))


@pytest.mark.parametrize(
    ("frame", "match"),
    [
        (b"", "msgpack"),
        (b"\x80\x04\x95", "expected a map|msgpack"),  # a pickle
        (b"\xff" * 100, "msgpack"),
        (msgpack.packb([1, 2]), "list"),
        (msgpack.packb({"v": msgpack.ExtType(4, b"x")}), "msgpack|extension"),
        (msgpack.packb({"v": msgpack.Timestamp(1)}), "msgpack|extension"),
        (header(status=float("nan")), "finite"),
        (header(status=b"bytes"), "msgpack|bytes"),
        (header(status=7), "status"),
        (header(gen=-1), "gen"),
        (header(gen=True), "gen"),
        (header(gen="DROP"), "missing or unknown"),
        (header(more=1), "missing or unknown"),
        (header(type="PICKLE"), "unknown message type"),
        (header(type=["HB"]), "unknown message type"),
        (header(run="ab"), "run id"),
        (header(run=RUN.upper()), "run id"),
        (header(status="x" * 5000), "status"),
        (header(status={"a": {"a": {"a": {"a": {"a": {"a": {"a": 1}}}}}}}), "deeper"),
        (b"\x82\xa1v\x01\xa1v\x01", "twice"),
        (b"\x81\x01\x01", "msgpack|string"),
        (b"\xdd\xff\xff\xff\xff", "msgpack"),  # an array of 4 G entries
        (b"\x91" * 5000, "msgpack"),  # 5000 lists in one another
        (msgpack.packb([[]] * 70000), "at most 65536"),
    ],
)
def test_garbage_headers_are_refused(frame, match):
    with pytest.raises(wire.WireError, match=match):
        wire.decode([frame])


def test_other_versions_are_named_and_refusals_readable_in_all():
    with pytest.raises(wire.WireError, match=f"version {wire.VERSION + 1}") as caught:
        wire.decode([header(v=wire.VERSION + 1)])
    assert (caught.value.version, caught.value.run) == (wire.VERSION + 1, RUN)
    refusal = msgpack.packb({"v": 9, "type": "REFUSE", "run": RUN, "gen": 1, "reason": "too old"})
    assert wire.decode([refusal])[1] == wire.Refuse(1, "too old")


def tampered(**changes) -> list[bytes]:
    frames = wire.encode(RUN, data({"a": np.arange(4, dtype=np.int32), "b": np.zeros(9, np.uint8)}))
    fields = msgpack.unpackb(frames[0])
    fields["arrays"][0].update(changes)
    return [msgpack.packb(fields), *frames[1:]]


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float64"},
        {"dtype": "O"},
        {"shape": [5]},
        {"shape": [-1]},
        {"shape": [2**62, 2**62]},
        {"shape": [1] * 9},
        {"shape": [4.0]},
        {"frame": 0, "name": "c", "shape": [9]},
        {"frame": 5},
        {"name": "b"},
        {"name": "a/../b"},
        {"name": 3},
        {"extra": 1},
    ],
)
def test_array_descriptions_that_do_not_fit_their_frames_are_refused(changes):
    assert wire.decode(tampered())[1].arrays["a"].tolist() == [0, 1, 2, 3]
    with pytest.raises(wire.WireError):
        wire.decode(tampered(**changes))


def test_frame_counts_are_checked():
    frames = wire.encode(RUN, data())
    for wrong in ([], frames[:-1], [*frames, b"x"], [header(), b""], [header()] * 40):
        with pytest.raises(wire.WireError):
            wire.decode(wrong)


def test_headers_over_the_limit_are_not_sent_and_long_reasons_are_cut():
    with pytest.raises(wire.WireError, match="header of"):
        wire.encode(RUN, wire.Welcome(1, {str(i): "x" * 1000 for i in range(100)}))
    assert len(wire.decode(wire.encode(RUN, wire.Nack(1, "train", 0, 1, "y" * 9999)))[1].why) == wire.MAX_TEXT


@pytest.mark.parametrize("info", [{"a": np.float32(1)}, {1: 2}, {"a": b"x"}, {"a": float("inf")}, {"a": {1, 2}}, {"a": 2**70}])
def test_only_plain_values_go_into_headers(info):
    with pytest.raises(wire.WireError):
        wire.encode(RUN, wire.Welcome(1, info))
