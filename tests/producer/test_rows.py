"""Rows of the GPT batch, against the numbers of the original's example worked out by hand."""

import time

import numpy as np
import pytest

from common.data.batch import empty_batch
from common.data.buckets import Bucket
from common.xtts.dims import SIZES
from producer.batches import rows
from producer.batches.maker import BatchError

GPT = SIZES["xtts"].gpt
A = GPT.num_text_tokens  # offset of the audio ids
P = GPT.num_text_positions  # offset of the audio positions
E = 1025


def pack(row_len, text_len, tokens, codes, hidden):
    arrays = empty_batch("gpt", Bucket(len(tokens), row_len, text_len, 1), SIZES["xtts"], "float16")
    for row, (t, c, h) in enumerate(zip(tokens, codes, hidden, strict=True)):
        if t is not None:
            rows.pack_row(arrays, row, t, c, h, GPT)
    return {name: arrays[name] for name in ("ids", "positions", "text_targets", "audio_targets")}


def test_the_example_of_the_specification():
    """T=4, l=[4,2], w=[5*1024+10, 3*1024]: the original's arrays with the padding between text and
    audio taken out.
    """
    w = [5 * 1024 + 10, 3 * 1024]
    n = [rows.num_codes(x) for x in w]
    assert n == [6, 3]
    tokens = [np.array([5, 6, 7, 8]), np.array([9, 10])]
    codes = [np.arange(101, 107), np.arange(201, 204)]
    got = pack(18, 6, tokens, codes, [None, None])
    ids = [
        [261, 5, 6, 7, 8, A + 1024, *(A + np.arange(101, 107)), A + E, A + E, A + E, 0, 0, 0],
        [
            261,
            9,
            10,
            A + 1024,
            A + 201,
            A + 202,
            A + 203,
            A + E,
            A + E,
            A + E,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
        ],
    ]
    positions = [
        [0, 1, 2, 3, 4, *(P + np.arange(10)), 0, 0, 0],
        [0, 1, 2, *(P + np.arange(7)), 0, 0, 0, 0, 0, 0, 0, 0],
    ]
    text = [[5, 6, 7, 8, 0, -1], [9, 10, 0, -1, -1, -1]]
    audio = [
        [-1] * 5 + [101, 102, 103, 104, 105, 106, E, E, E, E] + [-1] * 3,
        [-1] * 3 + [201, 202, 203, E, E, E, E] + [-1] * 8,
    ]
    np.testing.assert_array_equal(got["ids"], ids)
    np.testing.assert_array_equal(got["positions"], positions)
    np.testing.assert_array_equal(got["text_targets"], text)
    np.testing.assert_array_equal(got["audio_targets"], audio)
    assert all(a.dtype == np.int32 for a in got.values())


def test_every_target_is_the_next_input_until_the_fourth_stop():
    got = pack(40, 12, [np.arange(3, 13)], [np.arange(50, 70)], [None])
    num_text, num_audio = 11, 24
    np.testing.assert_array_equal(got["text_targets"][0, :10], got["ids"][0, 1:11])
    start, end = num_text, num_text + num_audio
    np.testing.assert_array_equal(
        got["audio_targets"][0, start : end - 1] + A, got["ids"][0, start + 1 : end]
    )
    assert got["audio_targets"][0, end - 1] == E


@pytest.mark.parametrize(
    ("start", "length", "n", "hidden"),
    [
        (0, 1024, 6, (0, 1)),
        (1023, 1024, 6, (0, 1)),  # both ends floored
        (2048, 2047, 6, (2, 3)),
        (0, 6144, 6, (0, 5)),  # the whole utterance: its last code stays a target
        (0, 5 * 1024 + 10, 6, (0, 5)),
        (100, 200, 1, (0, 0)),
        (0, 1024, 1, (0, 0)),
        (5120, 1024, 6, (5, 6)),
    ],
)
def test_prompt_in_code_units(start, length, n, hidden):
    assert rows.prompt_codes(start, length, n) == hidden


def test_hidden_codes_have_no_target_in_every_row_and_inputs_keep_them():
    tokens, codes = [np.array([5])] * 2, [np.arange(10), np.arange(10)]
    plain = pack(20, 4, tokens, codes, [None, None])
    got = pack(20, 4, tokens, codes, [(2, 5), (0, 9)])
    np.testing.assert_array_equal(got["ids"], plain["ids"])
    audio = got["audio_targets"]
    np.testing.assert_array_equal(
        audio[0], [-1, -1, 0, 1, -1, -1, -1, 5, 6, 7, 8, 9, E, E, E, E, -1, -1, -1, -1]
    )
    np.testing.assert_array_equal(audio[1], [-1] * 11 + [9, E, E, E, E, -1, -1, -1, -1])


def test_no_prompt_leaves_a_row_without_a_code_target():
    for n in range(1, 9):
        for start in range(0, n * 1024, 256):
            for length in range(1, n * 1024 - start + 1, 255):
                first, end = rows.prompt_codes(start, length, n)
                assert 0 <= first <= end <= n
                assert end - first < n


def test_the_share_that_is_hidden_is_half_of_short_utterances_and_little_of_long_ones():
    audio = SIZES["xtts"].audio  # clips of 3 to 6 s
    assert rows.hidden_share(np.array([22050, 44100]), audio) == pytest.approx(0.5)
    assert rows.hidden_share(np.array([10 * 22050]), audio) == pytest.approx(0.45)
    # 4.5 s: half of it, 2.25 s, if more is requested; else what is requested, 3.75 s on average.
    assert rows.hidden_share(np.array([99225]), audio) == pytest.approx(
        (2.25 + 3.75) / 2 / 4.5, rel=0.02
    )


def test_rows_without_an_utterance_are_all_padding():
    got = pack(12, 3, [None, np.array([4])], [None, np.array([1, 2])], [None, None])
    assert not got["ids"][0].any()
    assert not got["positions"][0].any()
    assert (got["text_targets"][0] == -1).all()
    assert (got["audio_targets"][0] == -1).all()
    assert got["ids"][1].any()


def test_an_utterance_longer_than_the_bucket_is_refused():
    with pytest.raises(BatchError, match="need 11 positions"):
        pack(10, 8, [np.arange(4)], [np.array([1, 2])], [None])
    with pytest.raises(BatchError, match=r"5 of text"):
        pack(30, 4, [np.arange(4)], [np.array([1, 2])], [None])


def test_a_batch_of_32_takes_less_than_2_ms():
    tokens = [np.arange(1, 151)] * 32
    codes = [np.arange(216)] * 32
    arrays = empty_batch("gpt", Bucket(32, 400, 152, 216), SIZES["xtts"], "float16")
    times = []
    for _ in range(20):
        t = time.thread_time()
        for row in range(32):
            rows.pack_row(arrays, row, tokens[row], codes[row], (3, 60), GPT)
        times.append(time.thread_time() - t)
    assert min(times) < 2e-3
