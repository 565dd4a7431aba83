"""The vocoder against Coqui's HifiDecoder (golden values), and weight norm folded and unfolded."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
import tensorflow as tf

from common.xtts import weights
from common.xtts.hifigan import (
    Hifigan,
    HifiganDims,
    fold_weight_norm,
    interpolate,
    unfold_weight_norm,
)

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "hifigan.npz"
SMALL = HifiganDims(in_channels=24, speaker_dim=12, channels=32)


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN) as arrays:
        return {k: v.astype(np.float32) if v.dtype == np.float16 else v for k, v in arrays.items()}


@pytest.fixture(scope="module")
def coqui(golden):
    hifigan = Hifigan(SMALL)
    weights.load_state_dict(hifigan, fold_weight_norm(weights.without_prefix("state/", golden)))
    return hifigan


def test_golden_sound(coqui, golden):
    wav = coqui(golden["latents"], golden["speaker"]).numpy()
    assert wav.shape == golden["wav"].shape == (2, coqui.num_samples(20))
    assert np.abs(golden["wav"]).max() > 0.02
    assert np.abs(wav - golden["wav"]).max() < 1e-5


def test_golden_sound_with_a_length_known_only_when_run(coqui, golden):
    signature = [tf.TensorSpec([None, None, 24], tf.float32), tf.TensorSpec([None, 12], tf.float32)]
    wav = tf.function(coqui, input_signature=signature, autograph=False)(
        golden["latents"], golden["speaker"]
    )
    assert np.abs(wav.numpy() - golden["wav"]).max() < 1e-5


@pytest.mark.parametrize("n", [1, 53, 300])
def test_golden_interpolation(golden, n):
    got = interpolate(interpolate(golden[f"interpolate_in_{n}"], 4.0), 24000 / 22050).numpy()
    want = golden[f"interpolate_out_{n}"]
    assert got.shape == want.shape == (1, 4 * n * 160 // 147, 2)
    assert np.abs(got - want).max() < 1e-5


@pytest.mark.parametrize(
    ("num_codes", "steps"), [(1, 4), (20, 87), (53, 230), (100, 435), (608, 2647)]
)
def test_lengths_of_the_specification(num_codes, steps):
    assert Hifigan(SMALL).num_samples(num_codes) == 256 * steps


def test_keys_and_shapes_of_the_published_decoder():
    own = {t.key: t.torch_shape for t in Hifigan().tensors()}
    assert own["conv_pre.weight"] == (512, 1024, 7)
    assert own["conv_post.weight"] == (1, 32, 7)
    assert "conv_post.bias" not in own
    assert own["ups.0.weight"] == (512, 256, 16)
    assert own["ups.3.weight"] == (64, 32, 4)
    assert own["resblocks.11.convs1.2.weight"] == (32, 32, 11)
    assert own["resblocks.3.convs2.0.weight"] == (128, 128, 3)
    assert own["conds.2.weight"] == (64, 512, 1)
    unfolded = unfold_weight_norm({k: np.broadcast_to(np.float32(1), s) for k, s in own.items()})
    assert len(unfolded) == 241
    assert sum(int(np.prod(v.shape)) for v in unfolded.values()) == 17_827_808
    assert unfolded["ups.0.parametrizations.weight.original0"].shape == (512, 1, 1)


def test_weight_norm_folds_by_the_first_axis_and_back():
    v = np.array([[[3.0, 4.0]], [[0.0, 2.0]]], np.float32)  # norms 5 and 2
    g = np.array([[[10.0]], [[1.0]]], np.float32)
    want = [[[6.0, 8.0]], [[0.0, 1.0]]]
    for names in (
        ("parametrizations.weight.original0", "parametrizations.weight.original1"),
        ("weight_g", "weight_v"),
    ):
        folded = fold_weight_norm(
            {f"ups.0.{names[0]}": g, f"ups.0.{names[1]}": v, "ups.0.bias": np.ones(1)}
        )
        assert set(folded) == {"ups.0.weight", "ups.0.bias"}
        assert folded["ups.0.weight"].tolist() == want
    again = fold_weight_norm(unfold_weight_norm(folded))
    assert again["ups.0.weight"] == pytest.approx(np.array(want), rel=1e-6)
    with pytest.raises(ValueError, match="original1"):
        fold_weight_norm({"ups.0.parametrizations.weight.original0": g})
