"""The speaker encoder against Coqui's ResNetSpeakerEncoder (golden values)."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
import tensorflow as tf

from common.xtts import weights
from common.xtts.speaker_encoder import SpeakerEncoder, SpeakerEncoderDims

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "speaker_encoder.npz"
SMALL = SpeakerEncoderDims(layers=(1, 2, 1, 1), filters=(8, 16, 16, 24), embedding=24)


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN) as arrays:
        return {k: v.astype(np.float32) if v.dtype == np.float16 else v for k, v in arrays.items()}


@pytest.fixture(scope="module")
def coqui(golden):
    encoder = SpeakerEncoder(SMALL)
    weights.load_state_dict(encoder, weights.without_prefix("state/", golden))
    return encoder


def test_golden_front_end(coqui, golden):
    mel = coqui.log_mel(golden["wav"]).numpy()
    assert mel.shape == golden["mel"].shape == (2, 64, 1 + 19333 // 160)
    assert (
        np.abs(mel - golden["mel"]).max() < 1e-3
    )  # unit variance; the log of near-silence magnifies rounding
    assert np.abs(mel - golden["mel"]).mean() < 1e-5


def test_golden_embedding(coqui, golden):
    embedding = coqui(golden["wav"]).numpy()
    assert np.abs(embedding - golden["embedding"]).max() < 1e-5
    assert np.linalg.norm(embedding, axis=1) == pytest.approx([1, 1], abs=1e-5)
    assert np.abs(embedding[0] - embedding[1]).max() > 0.05


def test_golden_embedding_with_a_length_known_only_when_run(coqui, golden):
    traced = tf.function(
        coqui, input_signature=[tf.TensorSpec([None, None], tf.float32)], autograph=False
    )
    assert np.abs(traced(golden["wav"]).numpy() - golden["embedding"]).max() < 1e-5


def test_constants_at_birth_are_those_of_the_checkpoint(golden):
    own = weights.state_dict(SpeakerEncoder(SMALL))
    for key in (
        "torch_spec.0.filter",
        "torch_spec.1.spectrogram.window",
        "torch_spec.1.mel_scale.fb",
    ):
        assert own[key] == pytest.approx(golden[f"state/{key}"], abs=2e-5), key


def test_state_goes_out_as_it_came_in(coqui, golden):
    state = weights.without_prefix("state/", golden)
    own = weights.state_dict(coqui)
    assert own.keys() == state.keys()
    assert all((own[k] == state[k]).all() and own[k].dtype == state[k].dtype for k in own)


def test_keys_and_shapes_of_the_published_encoder():
    own = {t.key: t for t in SpeakerEncoder().tensors()}
    shapes = {k: t.torch_shape for k, t in own.items()}
    assert len(shapes) == 295
    assert sum(int(np.prod(shapes[k])) for k, t in own.items() if t.trainable) == 8_028_492
    assert sum(int(np.prod(shapes[k])) for k, t in own.items() if not t.trainable) == 25_655
    assert shapes["layer2.0.downsample.0.weight"] == (64, 32, 1, 1)
    assert shapes["layer3.5.conv2.weight"] == (128, 128, 3, 3)
    assert shapes["layer4.0.se.fc.0.weight"] == (32, 256)
    assert shapes["attention.0.weight"] == (128, 2048, 1)
    assert shapes["fc.weight"] == (512, 4096)
    assert shapes["torch_spec.1.mel_scale.fb"] == (257, 64)
