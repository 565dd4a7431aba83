"""The DVAE against Coqui's DiscreteVAE (golden values), and codes that depend on a clip alone."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
import tensorflow as tf

from common.xtts import weights
from common.xtts.audio import DvaeMel
from common.xtts.dims import SIZES, AudioDims, DvaeDims
from common.xtts.dvae import CodebookUse, Dvae, clip_codes, codes_of_frames

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "dvae.npz"
LENGTHS = (32, 33, 34, 35)
SMALL = DvaeDims(num_codes=16, codebook_dim=10, hidden=12, num_resblocks=2)


@pytest.fixture(scope="module")
def golden():
    return dict(np.load(GOLDEN))


@pytest.fixture(scope="module")
def coqui(golden):
    """Our network with Coqui's weights."""
    dvae = Dvae(SMALL)
    weights.load_state_dict(dvae, weights.without_prefix("state/", golden))
    return dvae


@pytest.mark.parametrize("length", LENGTHS)
def test_golden_encoder(coqui, golden, length):
    z = coqui.encode(golden[f"mel_{length}"]).numpy()
    assert z.shape == golden[f"z_{length}"].shape == (2, codes_of_frames(length), 10)
    assert np.abs(z - golden[f"z_{length}"]).max() < 1e-5 * np.abs(z).max()


@pytest.mark.parametrize("length", LENGTHS)
def test_golden_codes(coqui, golden, length):
    codes = coqui.codes(golden[f"mel_{length}"])
    assert codes.dtype == tf.int32
    assert codes.numpy().tolist() == golden[f"codes_{length}"].tolist()
    assert len(np.unique(codes)) >= 8


def test_golden_decoder(coqui, golden):
    mel = coqui.decode(golden["codes_32"]).numpy()
    assert mel.shape == (2, 32, 80)
    assert np.abs(mel - golden["decoded_32"]).max() < 1e-5 * np.abs(mel).max()
    assert np.abs(coqui(golden["mel_32"]).numpy() - mel).max() == 0


def test_golden_moving_average_update(coqui, golden):
    z = coqui.encode(golden["mel_32"])
    codes = coqui.nearest(z)
    use = coqui.codebook.use(z, codes, tf.ones_like(codes, tf.bool), (0, 0))
    new, dead = coqui.codebook.updated(use, 0.99, dead_below=0.0)
    assert not dead.numpy().any()
    for key, value in new.items():
        assert value.numpy() == pytest.approx(golden[f"updated/{key}"], rel=1e-4, abs=1e-5), key
    commitment = tf.reduce_mean((z - coqui.embed(codes)) ** 2)
    assert float(commitment) == pytest.approx(float(golden["commitment_32"]), rel=1e-5)


def test_keys_and_shapes_of_the_published_dvae():
    own = {t.key: t.torch_shape for t in Dvae(DvaeDims()).tensors()}
    assert len(own) == 56 - 3  # without the three buffers of discrete_loss
    trained = sum(int(np.prod(s)) for k, s in own.items() if not k.startswith("codebook."))
    assert trained == 51_567_184
    assert own["encoder.0.0.weight"] == (512, 80, 3)
    assert own["encoder.1.0.weight"] == (1024, 512, 3)
    assert own["encoder.3.net.4.weight"] == (1024, 1024, 1)
    assert own["encoder.5.bias"] == (512,)
    assert own["decoder.0.weight"] == (1024, 512, 1)
    assert own["decoder.5.0.conv.weight"] == (512, 1024, 3)
    assert own["decoder.6.weight"] == (80, 512, 1)
    assert own["codebook.embed"] == own["codebook.embed_avg"] == (512, 1024)
    assert own["codebook.cluster_size"] == (1024,)


def test_leftovers_of_coquis_training_are_ignored_and_other_keys_are_not(golden):
    state = weights.without_prefix("state/", golden)
    assert any(key.startswith("discrete_loss.") for key in state)
    with pytest.raises(weights.WeightsError, match=r"surplus\.weight"):
        weights.load_state_dict(Dvae(SMALL), {**state, "surplus.weight": np.zeros(1)})


def test_nearest_code_by_hand():
    dvae = Dvae(DvaeDims(num_codes=3, codebook_dim=2, hidden=4, num_resblocks=1))
    dvae.codebook.embed.assign([[0.0, 10.0, 0.0], [0.0, 0.0, 10.0]])
    assert dvae.nearest(tf.constant([[[1.0, 2.0], [7.0, 1.0], [4.0, 9.0]]])).numpy().tolist() == [
        [0, 1, 2]
    ]
    assert dvae.embed(tf.constant([[2, 1]])).numpy().tolist() == [[[0.0, 10.0], [10.0, 0.0]]]


def codebook_of(size, average):
    codebook = Dvae(DvaeDims(num_codes=3, codebook_dim=2, hidden=4, num_resblocks=1)).codebook
    codebook.cluster_size.assign(size)
    codebook.embed_avg.assign(average)
    codebook.embed.assign(np.asarray(average) / np.maximum(size, 1e-9))
    return codebook


def test_a_dead_code_restarts_from_its_candidate_and_live_ones_do_not():
    codebook = codebook_of([10.0, 10.0, 0.01], [[10.0, 20.0, 0.5], [0.0, 10.0, 0.5]])
    candidates = np.array([[7.0, 8.0, 9.0], [70.0, 80.0, 90.0]], np.float32)
    use = CodebookUse(
        tf.constant([10.0, 10.0, 0.0]),
        tf.constant([[10.0, 20.0, 0.0], [0.0, 10.0, 0.0]]),
        tf.constant(candidates),
    )
    new, dead = codebook.updated(use, 0.9, dead_below=0.1)
    assert dead.numpy().tolist() == [False, False, True]
    assert new["embed"].numpy()[:, 2].tolist() == [9.0, 90.0]
    assert new["embed"].numpy()[:, :2] == pytest.approx(
        np.array([[1.0, 2.0], [0.0, 1.0]]), abs=1e-4
    )
    assert new["cluster_size"].numpy()[2] == pytest.approx(0.25 * 20.009 / 3, rel=1e-3)


def test_an_update_without_a_valid_position_changes_no_bit():
    codebook = codebook_of([1.0, 2.0, 0.0], [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    z = tf.fill([1, 4, 2], np.float32(np.inf))
    use = codebook.use(z, tf.zeros([1, 4], tf.int32), tf.zeros([1, 4], tf.bool), (1, 2))
    new, dead = codebook.updated(use, 0.9, dead_below=0.1)
    assert not dead.numpy().any()
    for key in ("embed", "embed_avg", "cluster_size"):
        assert (new[key].numpy() == getattr(codebook, key).numpy()).all()


def test_statistics_count_valid_positions_only_and_candidates_are_distinct_ones():
    codebook = codebook_of([1.0, 1.0, 1.0], [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    z = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    valid = np.array([[True, True, False], [True, False, False]])
    codes = np.array([[2, 0, 1], [2, 1, 1]], np.int32)
    use = codebook.use(tf.constant(z), tf.constant(codes), tf.constant(valid), (3, 4))
    assert use.counts.numpy().tolist() == [1.0, 0.0, 2.0]
    assert use.sums.numpy().T.tolist() == [[2.0, 3.0], [0.0, 0.0], [0.0 + 6.0, 1.0 + 7.0]]
    assert sorted(use.candidates.numpy().T.tolist()) == [[0.0, 1.0], [2.0, 3.0], [6.0, 7.0]]
    again = codebook.use(tf.constant(z), tf.constant(codes), tf.constant(valid), (3, 4))
    assert (again.candidates.numpy() == use.candidates.numpy()).all()


def clips(lengths, padded_to):
    out = np.zeros((len(lengths), padded_to), np.float32)
    for row, (n, seed) in enumerate(lengths):
        rng = np.random.default_rng(seed)
        t = np.arange(n) / 22050
        out[row, :n] = 0.3 * np.sin(
            2 * np.pi * (150 + 60 * np.sin(3 * t)) * t
        ) + 0.05 * rng.standard_normal(n)
    return out


def data_codebook(dvae, mel):
    """Codes spread over what the encoder says of `mel`, so that they tell positions apart."""
    z = dvae.encode(mel).numpy().reshape(-1, dvae.dims.codebook_dim)
    picks = np.random.default_rng(0).choice(len(z), dvae.dims.num_codes)
    dvae.codebook.embed.assign(z[picks].T)


@pytest.mark.parametrize("resblocks", [1, 3])
def test_codes_depend_on_the_clip_alone(resblocks):
    """The same clip in two buckets, beside other clips: equal codes.

    Three resblocks see as far as the published network.
    """
    audio, dims = (
        AudioDims(),
        DvaeDims(num_codes=128, codebook_dim=32, hidden=48, num_resblocks=resblocks),
    )
    dvae, mel = Dvae(dims), DvaeMel(np.full(80, 8.0), audio)
    dvae.initialise(1)
    short, longer = 20 * 1024, 33 * 1024
    a = clips([(20 * 1024, 1), (17 * 1024 - 300, 2)], short + audio.pad_samples)
    b = clips([(33 * 1024, 3), (20 * 1024, 1), (17 * 1024 - 300, 2)], longer + audio.pad_samples)
    data_codebook(dvae, mel(a))
    codes_a, codes_b = (
        clip_codes(dvae, mel, tf.constant(a)).numpy(),
        clip_codes(dvae, mel, tf.constant(b)).numpy(),
    )
    assert codes_a.shape == (2, 20)
    assert codes_b.shape == (3, 33)
    assert codes_a[0].tolist() == codes_b[1, :20].tolist()
    assert codes_a[1, :17].tolist() == codes_b[2, :17].tolist()
    assert len(set(codes_a[0])) > 5
    # Without the silence the end of the batch shows in the last codes, at the depth of the
    # published network.
    if resblocks == 3:
        bare = [
            dvae.encode(mel(tf.constant(x))).numpy()[row, :20]
            for x, row in ((a[:, :short], 0), (b[:, :longer], 1))
        ]
        assert np.abs(bare[0] - bare[1]).max() > 1e-3


def test_clip_codes_refuses_another_length():
    dvae, mel = Dvae(SIZES["tiny"].dvae), DvaeMel(np.ones(80), AudioDims())
    for samples in (8192, 8192 + 1000):
        with pytest.raises(ValueError, match="1024"):
            clip_codes(dvae, mel, tf.zeros([1, samples]))
