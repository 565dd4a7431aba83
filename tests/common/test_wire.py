"""Messages survive the way there and back; everything else is refused before it costs anything."""

import msgpack
import numpy as np
import pytest
import xxhash

from common.transport import messages, wire
from common.transport.messages import Data, Lease, Notes, Offer, Refuse

RUN = "0123456789abcdef" * 2


def batch() -> dict[str, np.ndarray]:
    return {
        "ids": np.arange(6, dtype=np.int32).reshape(2, 3),
        "mel": np.linspace(0, 1, 2 * 50 * 80, dtype=np.float16).reshape(2, 50, 80),
        "weights": np.array([1.0, 0.0], np.float32),
        "empty": np.zeros((0, 3), np.int16),
        "scalar": np.array(7, np.int64),
    }


NOTES = Notes(bad=((17, "cut off"),), spent_ms={"read": 1.5, "make": 2}, clips=3, sent=1.7e9)


def data(arrays=None) -> Data:
    arrays = batch() if arrays is None else arrays
    return Data(3, "train", 17, 5, wire.digest(arrays), NOTES, arrays)


def seal(fields: dict) -> dict:
    """As a peer does that knows the protocol and means harm."""
    return {**fields, "seal": xxhash.xxh3_64_hexdigest(msgpack.packb(fields))}


def header(**changes) -> bytes:
    fields = {"v": wire.VERSION, "type": "HB", "run": RUN, "gen": 1, "status": "", "ready": False}
    return msgpack.packb(seal({k: v for k, v in {**fields, **changes}.items() if v != "DROP"}))


@pytest.mark.parametrize(
    "message",
    [
        messages.Ready(2, "produktör 1", 17, 2, "ab", "cd"),
        messages.Welcome(2, Offer("gpt", "0a")),
        messages.Refuse(2, "other vocabulary"),
        messages.Lease(2, "eval", 0, 9, 4, (3, 4)),
        messages.Nack(2, "train", 7, 1, "file is gone"),
        messages.Revoke(2, 2**63 - 1),
        messages.Heartbeat(0),
        messages.Heartbeat(2, "compiling(3)", True),
        messages.Alive(2),
        messages.Stop(2, "done"),
        messages.Bye(2),
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
    assert (got.plan, got.g, got.lease, got.gen, got.notes) == ("train", 17, 5, 3, NOTES)
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
    expected = xxhash.xxh3_128_hexdigest(
        b"a:int32:2;" + a.tobytes() + b"b:uint8:1,1;" + b.tobytes()
    )
    assert wire.digest({"a": a, "b": b}) == expected
    different = [
        {"b": b, "a": a},
        {"c": a, "b": b},
        {"a": a.astype(np.int64), "b": b},
        {"a": a.reshape(1, 2), "b": b},
        {"a": a[::-1], "b": b},
    ]
    assert len({expected, *(wire.digest(d) for d in different)}) == 6


@pytest.mark.parametrize(
    "dtype", ["float64", "bool", "complex64", "object", "<U3", ">i4", "datetime64[s]"]
)
def test_other_dtypes_do_not_travel(dtype):
    with pytest.raises(wire.WireError, match="'a': dtype"):
        wire.encode(RUN, data({"a": np.zeros(2, dtype)}))


@pytest.mark.parametrize(
    ("frame", "match"),
    [
        (b"", "msgpack"),
        (b"\x80\x04\x95", "expected a map|msgpack"),  # a pickle
        (b"\xff" * 100, "msgpack"),
        (msgpack.packb([1, 2]), "expected a map"),
        (msgpack.packb({"v": msgpack.ExtType(4, b"x")}), "msgpack|extension"),
        (msgpack.packb({"v": msgpack.Timestamp(1)}), "msgpack|extension"),
        (header(status=float("nan")), "valid string"),
        (header(gen=float("inf")), "valid integer"),
        (header(status=b"bytes"), "msgpack|bytes"),
        (header(status=7), "status"),
        (header(gen=-1), "gen"),
        (header(gen=True), "gen"),
        (header(gen="DROP"), "gen: Field required"),
        (header(more=1), "more: Unexpected"),
        (header(status="two\nlines"), "control characters"),
        (header(status="\x1b[2J"), "control characters"),
        (header(ready=1), "ready"),
        (header(type="PICKLE"), "unknown message type"),
        (header(type=["HB"]), "unknown message type"),
        (header(run="ab"), "run id"),
        (header(run=RUN.upper()), "run id"),
        (header(status="x" * 5000), "status"),
        (
            header(status={"a": {"a": {"a": {"a": {"a": {"a": {"a": 1}}}}}}}),
            "status: Input should be a valid string",
        ),
        (
            msgpack.packb(
                {
                    "run": RUN,
                    "v": wire.VERSION,
                    "type": "HB",
                    "gen": 1,
                    "status": "",
                    "ready": False,
                }
            ),
            "damaged",
        ),
        (header(seal="0" * 16), "damaged|seal"),
        (b"\x81\xa3run" + b"\x91" * 1000 + b"\x01", "run id"),
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
    assert wire.decode([refusal])[1] == Refuse(1, "too old")
    assert wire.decode(
        [
            msgpack.packb(
                {"v": 9, "type": "REFUSE", "run": RUN, "gen": 1, "reason": "a\nb", "more": 1}
            )
        ]
    )[1] == Refuse(1, "a?b")


def test_peers_of_the_protocol_before_are_named_and_read_our_refusal():
    """Messages as version 2 sent them, and what its decoder asked of a refusal: one frame, and
    these keys.
    """
    before = {"v": 2, "type": "HB", "run": RUN, "gen": 0, "status": "starting", "ready": False}
    with pytest.raises(
        wire.WireError, match=f"version 2, this side speaks {wire.VERSION}"
    ) as caught:
        wire.decode([msgpack.packb(before)])
    assert (caught.value.version, caught.value.run) == (2, RUN)
    [frame] = wire.encode(RUN, Refuse(1, "protocol version 2"))
    sent = msgpack.unpackb(frame)
    assert sent.keys() == {"v", "type", "run", "gen", "reason"}
    assert (sent["type"], sent["run"], sent["reason"]) == ("REFUSE", RUN, "protocol version 2")


def tampered(**changes) -> list[bytes]:
    frames = wire.encode(RUN, data({"a": np.arange(4, dtype=np.int32), "b": np.zeros(9, np.uint8)}))
    fields = msgpack.unpackb(frames[0])
    del fields["seal"]
    fields["arrays"][0].update(changes)
    return [msgpack.packb(seal(fields)), *frames[1:]]


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float64"},
        {"dtype": "O"},
        {"shape": [5]},
        {"shape": [-1]},
        {"shape": [2**62, 2**62]},
        {"shape": [2**63]},
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
        wire.encode(
            RUN,
            Data(1, "train", 0, 1, "0" * 32, Notes(bad=tuple((g, "x" * 500) for g in range(200)))),
        )
    assert (
        len(wire.decode(wire.encode(RUN, messages.Nack(1, "train", 0, 1, "y" * 9999)))[1].why)
        == messages.MAX_TEXT
    )
    sent = messages.Nack(1, "train", 0, 1, "no such file: a\udcff\n.wav")
    assert wire.decode(wire.encode(RUN, sent))[1].why == "no such file: a??.wav"


@pytest.mark.parametrize(
    "message",
    [
        messages.Ready(1, "p", np.int64(1), 1),
        messages.Ready(1, "p", 1, 0),
        messages.Ready(1, "p", 1, True),
        messages.Ready(1, "p\n", 1, 1),
        messages.Ready(1, "p", 1, 1, "a/b"),
        messages.Welcome(1, Offer(7)),
        messages.Welcome(1, {"stage": "gpt", "more": 1}),
        Lease(1, "train", 2**63, 1, 1),
        Lease(1, "train", 1, 1, 1, ("7",)),
        Data(1, "train", 1, 1, "0" * 32, Notes(bad=(3,))),
        Data(1, "train", 1, 1, "0" * 32, Notes(bad=((-1, "x"),))),
        Data(1, "train", 1, 1, "0" * 32, Notes(spent_ms={"read": float("inf")})),
        Data(1, "train", 1, 1, "0" * 32, Notes(sent="now")),
        Data(1, "train", 1, 1, "0" * 32, Notes(), {"a b": np.zeros(1, np.int32)}),
        Data(
            1, "train", 1, 1, "0" * 32, Notes(), {f"a{i}": np.zeros(1, np.int32) for i in range(33)}
        ),
    ],
)
def test_a_message_is_held_to_its_fields_before_it_is_sent(message):
    with pytest.raises(wire.WireError):
        wire.encode(RUN, message)


@pytest.mark.parametrize(
    "notes",
    [
        *(None, [], "notes", 3),
        *(
            {"bad": 3},
            {"bad": [3]},
            {"bad": [[3]]},
            {"bad": [["3", "gone"]]},
            {"bad": [[3, 4]]},
            {"bad": [[3, "gone", 1]]},
            {"bad": [[-1, ""]]},
        ),
        *(
            {"spent_ms": [1]},
            {"spent_ms": {"read": "fast"}},
            {"spent_ms": {"read": -1.0}},
            {"spent_ms": {"a b": 1.0}},
            {"spent_ms": None},
        ),
        *(
            {"sent": "now"},
            {"sent": float("nan")},
            {"cpu_ms": []},
            {"threads": 1.5},
            {"clips": None},
            {"cached": -1},
            {"without": [3]},
        ),
    ],
)
def test_notes_of_any_other_form_are_refused(notes):
    """Six kinds of them ended the trainer, which used them as they came."""
    frames = wire.encode(RUN, data())
    fields = msgpack.unpackb(frames[0])
    del fields["seal"]
    assert wire.decode([msgpack.packb(seal(fields)), *frames[1:]])[1].notes == NOTES
    fields["notes"] = notes
    with pytest.raises(wire.WireError, match="DATA: notes"):
        wire.decode([msgpack.packb(seal(fields)), *frames[1:]])


def test_a_shape_that_numpy_cannot_make_is_refused():
    """It ended the trainer's thread: `np.empty` raises ValueError for it, although it holds
    nothing.
    """
    frames = wire.encode(RUN, data({"a": np.zeros((0, 3), np.int64)}))
    fields = msgpack.unpackb(frames[0])
    del fields["seal"]
    for shape in ([0, 2**61], [2**61, 0], [0, 2**31, 2**31], [0, *[2**40] * 7], [2**62, 0, 2**62]):
        fields["arrays"][0]["shape"] = shape
        with pytest.raises(wire.WireError, match="no shape of a batch"):
            wire.decode([msgpack.packb(seal(fields)), b""])
    fields["arrays"][0]["shape"] = [0, 3]
    assert wire.decode([msgpack.packb(seal(fields)), b""])[1].arrays["a"].shape == (0, 3)


def test_a_header_that_was_damaged_on_its_way_is_not_believed():
    frames = wire.encode(RUN, data())
    for place in range(len(frames[0])):
        damaged = bytearray(frames[0])
        damaged[place] ^= 4
        with pytest.raises(wire.WireError):
            wire.decode([bytes(damaged), *frames[1:]])


def test_each_side_hears_only_what_the_other_may_say():
    for kinds, others in (
        (messages.FROM_PRODUCER, messages.FROM_TRAINER),
        (messages.FROM_TRAINER, messages.FROM_PRODUCER),
    ):
        assert not kinds.keys() & others.keys()
        frame = msgpack.packb({"v": wire.VERSION, "type": next(iter(others)), "run": RUN})
        with pytest.raises(wire.WireError, match="unknown message type"):
            wire.decode([frame], kinds)
