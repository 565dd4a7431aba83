"""Sampling: against Coqui's own inference, against recomputing everything at each step, and what a
caller relies on.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from common.xtts import weights
from common.xtts.dims import GptDims
from common.xtts.gpt import Gpt
from common.xtts.prefixes import pack_prefixes
from common.xtts.sampling import (
    Controls,
    Generated,
    Sampler,
    SamplingOptions,
    latents_pass,
    likeliest,
    log_likelihood,
    max_codes,
    processed_scores,
    speakable,
)
from tests.support.gpt_cases import MICRO

GOLDEN = Path(__file__).parents[1] / "golden" / "sampling.npz"
CASES = ("greedy", "greedy_plain", "published", "narrow", "free")
# Room for 67 codes, and for texts beyond one padding step of 32 positions.
DIMS = dataclasses.replace(MICRO, max_audio_tokens=70, max_text_tokens=50)


class Golden:
    """What Coqui's own classes drew (tests/golden/make_sampling.py)."""

    def __init__(self):
        with np.load(GOLDEN) as file:
            self.arrays = dict(file)
        self.meta = json.loads(str(self.arrays["meta"]))
        self.dims = GptDims(**self.meta["dims"], dropout=0.0)
        self.model = Gpt(self.dims)
        self.sampler = Sampler(self.model)
        stored = {
            k[len("weight/") :]: v.astype(np.float32)
            for k, v in self.arrays.items()
            if k.startswith("weight/")
        }
        weights.load_state_dict(self.model, {**weights.state_dict(self.model), **stored})

    def options(self, case: str) -> SamplingOptions:
        o = self.meta["cases"][case]
        drawing = {k: o[k] for k in ("temperature", "top_k", "top_p") if k in o}
        return SamplingOptions(
            greedy=not o["do_sample"],
            repetition_penalty=o["repetition_penalty"],
            text_stop_input=True,
            **drawing,
        )

    def set_stop_bias(self, case: str) -> None:
        bias = self.model.mel_head.bias.numpy()
        bias[-1] = self.meta["cases"][case]["stop_bias"]
        self.model.mel_head.bias.assign(bias)

    def noise(self, case: str) -> np.ndarray | None:
        q = self.arrays[f"{case}/noise"]
        if not len(q):
            return None
        # Steps after STOP need a shape, not a value.
        return np.concatenate([q, np.ones((max_codes(self.dims) - len(q), q.shape[1]), np.float32)])


@pytest.fixture(scope="module")
def golden():
    return Golden()


@pytest.fixture(scope="module")
def model():
    """A micro model with weights larger than at birth, that draws many different codes."""
    model = Gpt(DIMS, seed=1)
    rng = np.random.default_rng(2)
    for t in model.tensors():
        t.variable.assign_add(0.3 * rng.standard_normal(t.variable.shape))
    set_stop_bias(model, -20.0)
    return model


def set_stop_bias(model, bias):
    values = model.mel_head.bias.numpy()
    values[-1] = bias
    model.mel_head.bias.assign(values)


@pytest.fixture(scope="module")
def sampler(model):
    return Sampler(model)


@pytest.fixture(scope="module")
def latents():
    return (
        np.random.default_rng(3)
        .standard_normal((3, DIMS.num_latents, DIMS.width))
        .astype(np.float32)
    )


def text(length, seed=0):
    return np.random.default_rng(seed).integers(4, DIMS.num_text_tokens, length).tolist()


# -- Coqui
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_codes_equal_coquis_with_the_same_noise(golden, case):
    """Coqui does not forbid START as a code.

    These weights do: its bias is -20, which leaves it out on both sides alike.
    """
    assert golden.model.mel_head.bias.numpy()[golden.dims.start_audio] == -20
    golden.set_stop_bias(case)
    expected = golden.arrays[f"{case}/codes"].tolist()
    made = golden.sampler.generate(
        golden.arrays["latents"],
        golden.meta["text"],
        golden.options(case),
        noise=golden.noise(case),
    )
    stop = golden.dims.stop_audio
    assert made.codes.tolist() == [c for c in expected if c != stop]
    assert made.stopped == (expected[-1] == stop)
    assert len(expected) >= 50 or made.stopped
    np.testing.assert_allclose(made.states, golden.arrays[f"{case}/states"], atol=2e-5)
    again = latents_pass(
        golden.model, golden.arrays["latents"], golden.meta["text"], expected, text_stop_input=True
    )
    np.testing.assert_allclose(again[0], golden.arrays[f"{case}/states"], atol=2e-5)


@pytest.mark.parametrize("case", CASES)
def test_processors_equal_transformers(golden, case):
    history, logits, o = golden.arrays["history"], golden.arrays["logits"], golden.options(case)
    seen = np.zeros(logits.shape, bool)
    np.put_along_axis(seen, history, True, axis=1)
    scores = processed_scores(
        tf.constant(logits), tf.constant(seen), controls(o, len(logits)), o.greedy
    )
    np.testing.assert_allclose(scores, golden.arrays[f"{case}/scores"], rtol=1e-6)


def test_the_cases_cover_stop_and_limit(golden):
    ends = {int(golden.arrays[f"{case}/codes"][-1]) == golden.dims.stop_audio for case in CASES}
    assert ends == {True, False}


def test_limits_of_the_published_sizes():
    assert max_codes(GptDims()) == 602


# -- against recomputation
# --------------------------------------------------------------------------------------------------


def controls(o: SamplingOptions, rows: int = 1) -> Controls:
    return Controls(
        tf.constant(o.repetition_penalty, tf.float32),
        tf.constant(o.temperature, tf.float32),
        tf.constant(o.top_k),
        tf.constant(o.top_p, tf.float32),
        tf.fill([rows], 10**6),
        tf.zeros([rows, 2], tf.int32),
    )


def recomputed(model, latents, ids, options, num_codes):
    """Greedy codes by a full forward pass over everything so far, for each code."""
    codes, seen = [], {DIMS.start_audio, *([1] if options.fake_history else [])}
    head = [DIMS.start_text, *ids, *([DIMS.stop_text] if options.text_stop_input else [])]
    for _ in range(num_codes):
        audio = [DIMS.start_audio, *codes]
        row = [*head, *(DIMS.num_text_tokens + c for c in audio)]
        positions = [*range(len(head)), *(DIMS.num_text_positions + i for i in range(len(audio)))]
        logits = model.audio_logits(
            model.hidden(latents, tf.constant([row]), tf.constant([positions]))[0, -1]
        ).numpy()
        logits[DIMS.start_audio] = -np.inf
        for c in seen:
            logits[c] *= (
                options.repetition_penalty if logits[c] < 0 else 1 / options.repetition_penalty
            )
        codes.append(int(logits.argmax()))
        seen.add(codes[-1])
    return codes


@pytest.mark.parametrize(("length", "text_stop_input"), [(1, False), (31, False), (31, True)])
def test_cache_and_padding_change_nothing(model, sampler, latents, length, text_stop_input):
    """31 tokens and START fill the padded prefix to its last position; with the text's STOP they
    need the next size.
    """
    options = SamplingOptions(
        greedy=True, repetition_penalty=1.3, max_codes=12, text_stop_input=text_stop_input
    )
    made = sampler.generate(latents[:1], text(length), options)
    assert made.codes.tolist() == recomputed(model, latents[:1], text(length), options, 12)
    assert not made.stopped


def test_rows_of_a_batch_are_the_rows_alone(sampler, latents):
    options, texts, seeds = (
        SamplingOptions(max_codes=30),
        [text(9), text(2, 1), text(20, 2)],
        [4, 5, (6, 1)],
    )
    together = sampler.generate_batch(latents, texts, options, seeds, limits=[30, 7, 99])
    for row, limit in enumerate([30, 7, 30]):
        alone = sampler.generate(
            latents[row : row + 1],
            texts[row],
            dataclasses.replace(options, max_codes=limit),
            seeds[row],
        )
        assert together[row].codes.tolist() == alone.codes.tolist()
        assert len(alone.codes) == limit
        np.testing.assert_allclose(together[row].states, alone.states, atol=1e-5)


def test_a_stream_is_the_whole_in_pieces(model, latents):
    options = SamplingOptions(max_codes=25)
    sampler = Sampler(model)
    whole = sampler.generate(latents[:1], text(6), options, seed=8)
    parts = list(sampler.stream(latents[:1], text(6), options, seed=8, every=10))
    assert [len(p.codes) for p in parts] == [10, 20, 25]
    for part in parts:
        assert part.codes.tolist() == whole.codes[: len(part.codes)].tolist()
    np.testing.assert_allclose(parts[-1].states, whole.states, atol=1e-6)
    assert sampler.trace_counts.total() == 2  # the same two functions


# -- what callers rely on
# --------------------------------------------------------------------------------------------------


def test_one_compilation_per_size(model, latents):
    sampler = Sampler(model)
    for length, options in (
        (3, SamplingOptions()),
        (
            20,
            SamplingOptions(
                temperature=0.5, top_k=3, top_p=0.9, repetition_penalty=2.0, max_codes=40
            ),
        ),
        (31, SamplingOptions(max_codes=5)),
    ):
        sampler.generate(latents[:1], text(length), options, seed=length)
    assert dict(sampler.trace_counts) == {
        "start/1x32+67": 1,
        f"advance/1x{DIMS.num_latents + 32 + 67}": 1,
    }


def test_the_seed_decides(sampler, latents):
    options = SamplingOptions(
        max_codes=20, temperature=1.5, top_k=0, top_p=1.0, repetition_penalty=1.0
    )
    a, b, c, d = (
        sampler.generate(latents[:1], text(5), options, seed).codes.tolist()
        for seed in (1, 1, 2, (1, 1))
    )
    assert a == b
    assert len({tuple(a), tuple(c), tuple(d)}) == 3


def test_likelihood_is_that_of_a_full_pass_without_temperature_or_penalty(model, sampler, latents):
    options = SamplingOptions(max_codes=12, temperature=1.7, repetition_penalty=3.0)
    made = sampler.generate(latents[:1], text(5), options, seed=2)
    head, audio = [DIMS.start_text, *text(5)], [DIMS.start_audio, *made.codes]
    row = tf.constant([[*head, *(DIMS.num_text_tokens + c for c in audio)]], tf.int32)
    places = tf.constant(
        [[*range(len(head)), *(DIMS.num_text_positions + i for i in range(len(audio)))]], tf.int32
    )
    logits = model.audio_logits(model.hidden(latents[:1], row, places)).numpy()[
        0, DIMS.num_latents + len(head) :
    ]
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    targets = [*made.codes, DIMS.stop_audio][: len(made.codes) + made.stopped]
    expected = np.mean([log_p[i, c] for i, c in enumerate(targets)])
    assert log_likelihood(model, made) == pytest.approx(expected, abs=1e-4)
    nothing = Generated(np.zeros(0, np.int32), False, np.zeros((0, DIMS.width), np.float32))
    assert log_likelihood(model, nothing) == -np.inf


def test_the_best_of_several_draws_ended_by_itself_and_is_the_likeliest_of_those(
    model, sampler, latents
):
    options, seeds = (
        SamplingOptions(max_codes=20, temperature=1.5, top_k=0, top_p=1.0, repetition_penalty=1.0),
        [(4, k) for k in range(6)],
    )
    drawn = [sampler.generate(latents[:1], text(5), options, seed) for seed in seeds]
    best = sampler.generate_best(latents[:1], text(5), options, seeds)
    assert best.codes.tolist() == max(drawn, key=lambda g: log_likelihood(model, g)).codes.tolist()
    # One that was cut off is only taken where all were.
    unlikely = int(np.argmin([log_likelihood(model, g) for g in drawn]))
    ended = [
        dataclasses.replace(
            g, stopped=i == unlikely, states=np.concatenate([g.states, g.states[-1:]])
        )
        for i, g in enumerate(drawn)
    ]
    assert likeliest(model, ended) is ended[unlikely]


def test_draws_follow_the_probabilities(sampler):
    """1200 draws from one distribution: frequencies within 5 standard deviations, nothing outside
    top-k.
    """
    p = np.array([0.5, 0.3, 0.15, 0.05])
    logits = np.full((1, 18), -50.0, np.float32)
    logits[0, :4] = np.log(p)
    scores = processed_scores(
        tf.constant(logits),
        tf.zeros([1, 18], tf.bool),
        controls(SamplingOptions(temperature=1.0, top_k=3, top_p=1.0)),
        False,
    )
    noise = tf.function(
        lambda: tf.map_fn(
            lambda k: sampler._noise(tf.constant([[9, 0]]), k),
            tf.range(1200),
            fn_output_signature=tf.float32,
        )
    )
    draws = tf.argmax(scores - tf.math.log(noise()[:, 0]), -1).numpy()
    counts = np.bincount(draws, minlength=4)
    expected = p[:3] / p[:3].sum()
    assert counts[3:].sum() == 0
    assert (
        np.abs(counts[:3] / 1200 - expected) < 5 * np.sqrt(expected * (1 - expected) / 1200)
    ).all()


def test_stop_ends_a_row(model, sampler, latents):
    set_stop_bias(model, 1e4)
    try:
        made = sampler.generate(latents[:1], text(4), SamplingOptions(greedy=True))
    finally:
        set_stop_bias(model, -20.0)
    assert (made.codes.tolist(), made.stopped, made.states.shape) == ([], True, (1, DIMS.width))


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "jit"])
def born(request):
    """A model at birth, and its sampler with or without XLA."""
    model = Gpt(DIMS, seed=1)
    return model, Sampler(model, jit=request.param)


@pytest.mark.parametrize("stop_bias", [0.0, 49.0])
@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(greedy=True, repetition_penalty=1.0),
        SamplingOptions(temperature=2.0, top_k=0, top_p=1.0, repetition_penalty=1.0),
        SamplingOptions(temperature=2.0, top_k=5, top_p=0.9, repetition_penalty=2.0),
        SamplingOptions(temperature=2.0, top_k=DIMS.num_audio_tokens),
    ],
    ids=["greedy", "free", "narrow", "all kept"],
)
def test_start_is_never_drawn(born, latents, options, stop_bias):
    """Although the model finds START likelier than all else: neither where codes follow, nor where
    STOP does.
    """
    model, sampler = born
    bias = np.zeros(DIMS.num_audio_tokens, np.float32)
    bias[DIMS.start_audio], bias[DIMS.stop_audio] = 50.0, stop_bias
    model.mel_head.bias.assign(bias)
    drawn = sampler.generate_batch(
        latents[:2], [text(4), text(7)], dataclasses.replace(options, max_codes=40), [1, 2]
    )
    for made in drawn:
        assert (made.codes < DIMS.start_audio).all()
        assert (made.codes >= 0).all()
        assert made.stopped or len(made.codes) == 40
        assert made.stopped or stop_bias == 0
        assert np.isfinite(log_likelihood(model, made))


def test_what_may_be_drawn_are_the_codes_and_stop():
    """Scores stay finite for all of them, whatever the processors do with the -inf of START."""
    logits = np.random.default_rng(0).standard_normal((2, DIMS.num_audio_tokens)).astype(np.float32)
    kept = speakable(tf.constant(logits), DIMS).numpy()
    others = np.arange(DIMS.num_audio_tokens) != DIMS.start_audio
    np.testing.assert_array_equal(kept[:, others], logits[:, others])
    assert (kept[:, ~others] == -np.inf).all()
    seen = tf.ones(logits.shape, tf.bool)
    for options in (
        SamplingOptions(greedy=True),
        SamplingOptions(top_k=0, top_p=1.0),
        SamplingOptions(top_k=99, top_p=1.0),
    ):
        scores = processed_scores(
            tf.constant(kept), seen, controls(options, 2), options.greedy
        ).numpy()
        assert np.isfinite(scores[:, others]).all()
        assert (scores[:, ~others] == -np.inf).all()


def test_fake_history_penalises_code_1_alone():
    """Equal scores: without the quirk the first code wins, with it code 1 does not."""
    model = Gpt(DIMS)
    bias = np.full(DIMS.num_audio_tokens, -9.0, np.float32)
    bias[[1, 2]] = [5.0, 4.0]
    model.mel_head.bias.assign(bias)
    sampler, latents = Sampler(model), np.zeros((1, DIMS.num_latents, DIMS.width), np.float32)
    first = [
        int(
            sampler.generate(
                latents, [5], SamplingOptions(greedy=True, fake_history=fake, max_codes=1)
            ).codes[0]
        )
        for fake in (True, False)
    ]
    assert first == [2, 1]


def test_prefix_has_text_stop_only_where_asked_for():
    ids, positions, lengths = pack_prefixes([[7, 8], [9]], DIMS)
    assert ids.shape == (2, 32)
    assert ids[:, :4].tolist() == [[DIMS.start_text, 7, 8, 0], [DIMS.start_text, 9, 0, 0]]
    assert (positions[0, :4].tolist(), lengths.tolist()) == ([0, 1, 2, 0], [3, 2])
    ids, positions, lengths = pack_prefixes(
        [[7, 8]], dataclasses.replace(DIMS, stop_text=2), text_stop_input=True
    )
    assert (ids[0, :4].tolist(), positions[0, :4].tolist(), lengths.tolist()) == (
        [DIMS.start_text, 7, 8, 2],
        [0, 1, 2, 3],
        [4],
    )


def test_prefix_fits_the_position_table():
    ids, positions, lengths = pack_prefixes(
        [text(DIMS.max_text_tokens - 1)], DIMS, text_stop_input=True
    )
    assert ids.shape[1] == DIMS.num_text_positions
    assert positions.max() == lengths[0] - 1 < DIMS.num_text_positions


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "no text"),
        ([[]], "0 tokens"),
        ([[5] * DIMS.max_text_tokens], r"50 tokens; the model takes 1 to 49: split"),
        ([[DIMS.num_text_tokens]], "outside the model's 20 ids"),
    ],
)
def test_texts_that_do_not_fit(texts, message):
    with pytest.raises(ValueError, match=message):
        pack_prefixes(texts, DIMS)


def test_wrong_shapes_and_options_are_named(sampler, latents):
    with pytest.raises(ValueError, match="1 texts need"):
        sampler.generate(latents, text(3), SamplingOptions())
    with pytest.raises(ValueError, match="noise is"):
        sampler.generate(latents[:1], text(3), SamplingOptions(), noise=np.ones((3, 18)))
    with pytest.raises(ValueError, match="temperature must be positive.*top_p must be in"):
        SamplingOptions(temperature=0.0, top_p=1.5)
