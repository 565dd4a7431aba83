"""The GPT stack: against Coqui's own class, and the properties training and decoding rely on."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from common.data.buckets import Bucket
from common.xtts import weights
from common.xtts.gpt import Gpt
from common.xtts.operations import PLAIN
from common.xtts.options import GptOptions
from tests.support.gpt_cases import MICRO, load_golden, make_batch, pack, without_dropout

L, T = MICRO.num_latents, 24
BUCKET = Bucket(batch_size=3, row_len=T, text_len=8, num_codes=10)


@pytest.fixture(scope="module")
def golden():
    return load_golden()


@pytest.fixture(scope="module")
def golden_model(golden):
    model = Gpt(golden.gpt)
    weights.load_state_dict(model, golden.weights)
    return model


@pytest.fixture(scope="module")
def model():
    """A micro model with weights larger than at birth, so that positions and attention matter."""
    return grown(Gpt(MICRO, seed=1))


def grown(model, seed=2):
    rng = np.random.default_rng(seed)
    for t in model.tensors():
        t.variable.assign_add(0.2 * rng.standard_normal(t.variable.shape))
    return model


def hidden(model, batch, seed=None, mask=None):
    latents = model.style_latents(tf.constant(batch["cond_mel"]))
    return model.hidden(
        latents, tf.constant(batch["ids"]), tf.constant(batch["positions"]), seed, mask
    ).numpy()


def test_conditioning_path_equals_coquis(golden, golden_model):
    mel = golden.batch(0)["cond_mel"]
    np.testing.assert_allclose(
        golden_model.conditioning_encoder(mel), golden.arrays["encoded"], rtol=1e-5, atol=1e-5
    )
    np.testing.assert_allclose(
        golden_model.style_latents(mel), golden.arrays["style"], rtol=1e-5, atol=1e-5
    )


def test_logits_equal_coquis_at_every_target(golden, golden_model):
    """Coqui's rows are [text padded | audio padded]; ours are contiguous.

    They agree wherever there is a target.
    """
    batch, raw = golden.batch(0), golden.part("batch0")
    states = hidden(golden_model, batch)[:, golden.gpt.num_latents :]
    text, audio = (
        golden_model.text_logits(states).numpy(),
        golden_model.audio_logits(states).numpy(),
    )
    for row, (text_length, wav_length) in enumerate(
        zip(raw["text_lengths"], raw["wav_lengths"], strict=True)
    ):
        num_text, num_audio = text_length + 1, -(-wav_length // 1024) + 4
        np.testing.assert_allclose(
            text[row, :num_text], golden.arrays["text_logits"][row, :num_text], atol=2e-5
        )
        np.testing.assert_allclose(
            audio[row, num_text : num_text + num_audio],
            golden.arrays["mel_logits"][row, :num_audio],
            atol=2e-5,
        )


def test_decoder_latents_equal_coquis(golden, golden_model):
    """The second pass of inference: text STOP is an input, the states that predicted c1..cn come
    out.
    """
    raw, g = golden.part("batch0"), golden.gpt
    text = raw["text"][0, : raw["text_lengths"][0]]
    codes = raw["codes"][0, : raw["wav_lengths"][0] // 1024]
    ids = [
        g.start_text,
        *text,
        g.stop_text,
        *(g.num_text_tokens + np.array([g.start_audio, *codes])),
    ]
    positions = [*range(len(text) + 2), *(g.num_text_positions + np.arange(len(codes) + 1))]
    states = golden_model.hidden(
        golden.arrays["style"][:1], tf.constant([ids]), tf.constant([positions])
    )
    begin = g.num_latents + len(text) + 2
    np.testing.assert_allclose(
        states[:, begin : begin + len(codes)], golden.arrays["latents"], atol=2e-5
    )


def test_a_position_sees_itself_and_what_came_before(model):
    batch = make_batch(BUCKET)
    before = hidden(model, batch)
    changed = {**batch, "ids": batch["ids"].copy()}
    changed["ids"][:, 7] = (changed["ids"][:, 7] + 1) % MICRO.num_text_tokens
    after = hidden(model, changed)
    np.testing.assert_array_equal(before[:, : L + 7], after[:, : L + 7])
    assert (np.abs(before - after)[:, L + 7 :].max(-1) > 1e-4).all()


def test_content_of_padding_changes_nothing_before_it(model):
    batch = make_batch(BUCKET, lengths=([3, 4, 5], [6, 5, 4]))
    changed = {**batch, "ids": batch["ids"].copy(), "positions": batch["positions"].copy()}
    for row, end in enumerate([4 + 10, 5 + 9, 6 + 8]):
        changed["ids"][row, end:] = 11
        changed["positions"][row, end:] = 5
    before, after = hidden(model, batch), hidden(model, changed)
    np.testing.assert_array_equal(before[:, : L + 14], after[:, : L + 14])


def masked_form(gpt, texts, codes):
    """The original's arrays: text padded to the longest, then audio padded to the longest, and a
    key mask.
    """
    text_len, audio_len = max(map(len, texts)) + 2, max(map(len, codes)) + 5
    rows, total = len(texts), text_len + audio_len
    ids = np.zeros((rows, total), np.int32)
    targets, mask = (
        np.full((rows, total), -1, np.int32),
        np.zeros((rows, gpt.num_latents + total), np.int32),
    )
    mask[:, : gpt.num_latents] = 1
    for row, (text, code) in enumerate(zip(texts, codes, strict=True)):
        num_tokens, n = len(text), len(code)
        ids[row, :text_len] = gpt.stop_text
        ids[row, : num_tokens + 1] = [gpt.start_text, *text]
        ids[row, text_len:] = gpt.num_text_tokens + gpt.stop_audio
        ids[row, text_len : text_len + n + 1] = gpt.num_text_tokens + np.array(
            [gpt.start_audio, *code]
        )
        targets[row, : num_tokens + 1] = [*text, gpt.stop_text]
        targets[row, text_len : text_len + n + 4] = [*code, *[gpt.stop_audio] * 4]
        mask[row, gpt.num_latents :][: num_tokens + 1] = 1
        mask[row, gpt.num_latents + text_len :][: n + 4] = 1
    positions = np.tile(
        [*range(text_len), *(gpt.num_text_positions + np.arange(audio_len))], (rows, 1)
    ).astype(np.int32)
    return ids, positions, targets[:, :text_len], targets[:, text_len:], mask


def mean_ce(logits, targets):
    picked = tf.gather(tf.nn.log_softmax(logits), tf.maximum(targets, 0), batch_dims=2)
    kept = tf.cast(targets >= 0, logits.dtype)
    return -tf.reduce_sum(picked * kept) / tf.reduce_sum(kept)


def test_contiguous_rows_are_the_masked_rows_of_the_original():
    """Losses and every gradient agree in float64: no key mask is needed once the padding is at the
    end.
    """
    model = grown(Gpt(MICRO, dtype="float64", seed=1))
    rng = np.random.default_rng(5)
    texts = [rng.integers(4, 20, n) for n in (6, 2, 4)]
    codes = [rng.integers(0, 16, n) for n in (3, 9, 7)]
    mel = tf.constant(rng.standard_normal((3, 12, 80)))
    variables = [t.variable.value for t in model.tensors()]

    def contiguous():
        rows = pack(MICRO, texts, codes, row_len=22, text_len=8)
        states = model.hidden(model.style_latents(mel), rows["ids"], rows["positions"])[:, L:]
        return (
            mean_ce(model.text_logits(states[:, :8]), rows["text_targets"]),
            mean_ce(model.audio_logits(states), rows["audio_targets"]),
        )

    def masked():
        ids, positions, text_targets, audio_targets, mask = masked_form(MICRO, texts, codes)
        states = model.hidden(model.style_latents(mel), ids, positions, attention_mask=mask)[:, L:]
        num_text = text_targets.shape[1]
        return (
            mean_ce(model.text_logits(states[:, :num_text]), text_targets),
            mean_ce(model.audio_logits(states[:, num_text:]), audio_targets),
        )

    results = []
    for form in (contiguous, masked):
        with tf.GradientTape() as tape:
            text, audio = form()
            loss = 0.01 * text + audio
        results.append((text.numpy(), audio.numpy(), tape.gradient(loss, variables)))
    (text_a, audio_a, grads_a), (text_b, audio_b, grads_b) = results
    assert abs(text_a - text_b) < 1e-13
    assert abs(audio_a - audio_b) < 1e-13
    for t, a, b in zip(model.tensors(), grads_a, grads_b, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12, err_msg=t.key)


def test_dropout_is_a_function_of_the_seed(model):
    batch = make_batch(BUCKET)
    plain, a, same, b = (hidden(model, batch, seed) for seed in (None, [1, 2], [1, 2], [1, 3]))
    np.testing.assert_array_equal(a, same)
    assert np.abs(a - plain).max() > 1e-2
    assert np.abs(a - b).max() > 1e-2


def test_dropout_has_the_rate_that_is_asked_for():
    batch = make_batch(BUCKET)
    model = grown(Gpt(MICRO, seed=1, options=GptOptions(dropout=0.0)))
    np.testing.assert_array_equal(hidden(model, batch, [1, 2]), hidden(model, batch))


def test_dropped_codes_are_not_seen_and_all_else_is():
    """With every code dropped, rows of other codes come to the same states; text, START, STOP and
    an evaluation are untouched.
    """
    model = grown(Gpt(MICRO, seed=1, options=GptOptions(dropout=0.0, code_dropout=0.9999999)))
    batch = make_batch(BUCKET)
    code = batch["ids"] - MICRO.num_text_tokens
    is_code = (code >= 0) & (code < MICRO.start_audio)
    others = {
        **batch,
        "ids": np.where(
            is_code, MICRO.num_text_tokens + (code + 5) % MICRO.start_audio, batch["ids"]
        ),
    }
    np.testing.assert_array_equal(hidden(model, batch, [1, 2]), hidden(model, others, [1, 2]))
    assert np.abs(hidden(model, batch) - hidden(model, others)).max() > 1e-2
    for changed in (1, batch["ids"][0].tolist().index(MICRO.num_text_tokens + MICRO.start_audio)):
        ids = batch["ids"].copy()
        ids[0, changed] = 4 + (ids[0, changed] - 3) % (MICRO.num_text_tokens - 4)
        assert (
            np.abs(hidden(model, batch, [1, 2]) - hidden(model, {**batch, "ids": ids}, [1, 2]))[
                0
            ].max()
            > 1e-2
        )


def test_the_share_of_codes_that_is_asked_for_is_dropped():
    model = Gpt(MICRO, seed=1, options=GptOptions(code_dropout=0.3))
    ids = np.full((200, 50), MICRO.num_text_tokens + 7, np.int32)
    with_place = model._embed(tf.constant(ids), tf.zeros_like(ids), tf.constant([5, 6])).numpy()
    place = model.text_positions.weight.numpy()[0]
    dropped = np.all(with_place == place, axis=-1)
    assert dropped.mean() == pytest.approx(0.3, abs=0.02)
    assert dropped.any(0).all(), "another mask in every row"
    np.testing.assert_allclose(
        with_place[~dropped],
        np.broadcast_to(place + model.mel_embedding.weight.numpy()[7], (np.sum(~dropped), 16)),
    )


def test_dropout_keeps_the_mean():
    x = PLAIN.dropout(tf.ones([200, 1000]), 0.1, tf.constant([3, 4])).numpy()
    assert set(np.unique(x)) == {np.float32(0), np.float32(1 / 0.9)}
    assert abs(x.mean() - 1) < 5e-3


def test_decoding_step_by_step_equals_the_whole_row(model):
    """Rows of different lengths in one batch: each continues at its own index, over what its
    padding left in the cache.
    """
    batch = make_batch(BUCKET, lengths=([5, 3, 4], [8, 8, 8]))
    whole = hidden(model, batch)
    latents = model.style_latents(batch["cond_mel"])
    prefix = np.array([6, 4, 5])  # START and text of each row
    states, cache = model.prefill(
        latents, batch["ids"][:, :6], batch["positions"][:, :6], cache_len=L + T
    )
    for row in range(3):
        np.testing.assert_allclose(
            states[row, : L + prefix[row]], whole[row, : L + prefix[row]], atol=1e-5
        )
    step = tf.function(model.decode_step, autograph=False)
    rows = np.arange(3)
    for k in range(8):
        at = prefix + k
        ids, positions = batch["ids"][rows, at][:, None], batch["positions"][rows, at][:, None]
        state, cache = step(
            tf.constant(ids), tf.constant(positions), cache, tf.constant(L + at, tf.int32)
        )
        np.testing.assert_allclose(state[:, 0], whole[rows, L + at], atol=1e-5)


def test_decoding_runs_inside_a_while_loop(model):
    batch = make_batch(BUCKET)
    latents = model.style_latents(batch["cond_mel"])

    @tf.function(autograph=False)
    def decode():
        _, cache = model.prefill(
            latents, batch["ids"][:, :6], batch["positions"][:, :6], cache_len=L + T
        )

        def body(k, cache, _):
            ids, positions = (
                tf.gather(batch[name], [6 + k], axis=1) for name in ("ids", "positions")
            )
            state, cache = model.decode_step(ids, positions, cache, L + 6 + k)
            return k + 1, cache, state

        return tf.while_loop(lambda k, *_: k < 5, body, (0, cache, tf.zeros([3, 1, MICRO.width])))[
            2
        ]

    np.testing.assert_allclose(decode()[:, 0], hidden(model, batch)[:, L + 10], atol=1e-5)


def test_gradient_of_lookup_adds_up_repeated_ids():
    table, ids = tf.Variable(np.arange(12.0).reshape(4, 3)), tf.constant([[1, 3], [1, 1]])
    with tf.GradientTape() as tape:
        out = PLAIN.lookup(tf.convert_to_tensor(table), ids, tf.float32)
        loss = tf.reduce_sum(out * [[[1.0], [2.0]], [[3.0], [4.0]]])
    np.testing.assert_array_equal(out[0, 1], [9, 10, 11])
    np.testing.assert_array_equal(tape.gradient(loss, table), [[0] * 3, [8] * 3, [0] * 3, [2] * 3])


def test_weights_at_birth():
    gpt = dataclasses.replace(MICRO, width=64, cond_groups=8, layers=8)
    born = {t.key: t.variable.numpy() for t in Gpt(gpt, seed=0).tensors()}
    assert abs(born["gpt.h.3.attn.c_attn.weight"].std() - 0.02) < 1e-3
    assert abs(born["gpt.h.3.mlp.c_proj.weight"].std() - 0.02 / np.sqrt(16)) < 5e-4
    assert abs(born["text_embedding.weight"].std() - 0.02) < 2e-3
    assert abs(np.abs(born["mel_head.weight"]).max() - 1 / 8) < 1e-3
    assert not born["conditioning_encoder.attn.0.proj_out.weight"].any()
    assert (born["conditioning_perceiver.norm.gamma"] == 1).all()
    again = {t.key: t.variable.numpy() for t in Gpt(gpt, seed=0).tensors()}
    assert all((again[key] == born[key]).all() for key in born)
    original = {
        t.key: t.variable.numpy()
        for t in Gpt(gpt, seed=0, options=GptOptions(parity_init=True)).tensors()
    }
    assert abs(original["text_embedding.weight"].std() - 1) < 0.1


def test_bfloat16_policy_keeps_float32_weights_and_nearly_the_same_states():
    batch = make_batch(BUCKET)
    exact, coarse = (
        Gpt(without_dropout(), dtype=dtype, seed=1) for dtype in ("float32", "mixed_bfloat16")
    )
    assert {t.variable.dtype for t in coarse.tensors()} == {"float32"}
    states = [hidden(m, batch).astype(np.float32) for m in (exact, coarse)]
    assert np.abs(states[0] - states[1]).max() < 0.15


def test_groups_must_divide_the_width():
    with pytest.raises(ValueError, match="16 channels do not divide into 5 groups"):
        Gpt(dataclasses.replace(MICRO, cond_groups=5))
