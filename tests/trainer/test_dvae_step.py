"""Stage 1: learns speech on a CPU, updates only in apply, and is a function of seed and data."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from common.data.buckets import Bucket
from common.xtts.dims import SIZES
from common.xtts.filterbank import log_mel_numpy, mel_stats
from tests.support import speech
from trainer.step.dvae import DvaeStep, perplexity
from trainer.step.gpt import StepOptions

TINY = SIZES["tiny"]
FRAMES = 128


@pytest.fixture(scope="module")
def mels():
    wavs = speech.clips()
    stats = mel_stats(wavs)
    return [log_mel_numpy(w, 1024) / stats for w in wavs]


def batch_of(mels, seed, rows=16, num_frames=FRAMES, padding_rows=0):
    """Random crops; clips shorter than a crop are followed by zeros, padding rows are all zeros."""
    rng = np.random.default_rng(seed)
    mel, lengths, weights = (
        np.zeros((rows, num_frames, 80), np.float32),
        np.zeros(rows, np.int32),
        np.ones(rows, np.float32),
    )
    for row in range(rows - padding_rows):
        clip = mels[rng.integers(len(mels))]
        start = rng.integers(max(1, len(clip) - num_frames + 1))
        crop = clip[start : start + num_frames]
        mel[row, : len(crop)], lengths[row] = crop, len(crop)
    weights[rows - padding_rows :] = 0
    return {"mel": mel, "num_frames": lengths, "weights": weights}


def make_step(rows=16, num_frames=FRAMES, **options):
    defaults = dict(learning_rate=2e-3, warmup_steps=10, betas=(0.9, 0.99), init_seed=0)
    return DvaeStep(
        TINY, StepOptions(**{**defaults, **options}), [Bucket(rows, num_frames, 0, num_frames // 4)]
    )


@pytest.fixture(scope="module")
def small():
    """One compiled step of 4 x 32 frames and its state at birth, shared by the tests that need no
    particular size.
    """
    step = make_step(rows=4, num_frames=32)
    return step, step.state_dict()


def flat(state):
    return {f"{part}/{k}": v for part, tensors in state.items() for k, v in tensors.items()}


def changed(before, after):
    before, after = flat(before), flat(after)
    assert before.keys() == after.keys()
    return {k for k in before if before[k].tobytes() != after[k].tobytes()}


@pytest.mark.slow
def test_learns_speech_with_most_of_its_codebook(mels):
    step = make_step()
    for s in range(150):
        step.micro(0, batch_of(mels, s), (1, s), 1.0)
        report = step.apply()
    report = step.read(report)
    assert report["recon"] < 0.3 * report["baseline"], report
    assert report["perplexity"] > 0.5 * TINY.dvae.num_codes, report
    assert report["codebook_perplexity"] > 0.5 * TINY.dvae.num_codes, report
    sums = step.evaluate(0, batch_of(mels, 999))
    recon, baseline = (float(sums[f"{k}_sum"] / sums[f"{k}_count"]) for k in ("recon", "baseline"))
    assert recon < 0.3 * baseline
    assert dict(step.trace_counts) == {"micro/0": 1, "apply": 1, "evaluate/0": 1}


def test_micro_and_evaluate_change_no_state(small, mels):
    step, birth = small
    step.load_state_dict(birth)
    batch = batch_of(mels, 1, 4, 32)
    step.micro(0, batch, (0, 1), 1.0)
    step.evaluate(0, batch)
    assert changed(birth, step.state_dict()) == set()
    step.apply()
    assert {
        "model/codebook.embed",
        "model/codebook.cluster_size",
        "model/encoder.0.0.weight",
        "optimizer/step",
    } <= changed(birth, step.state_dict())


def test_first_update_draws_the_codebook_from_the_batch(small, mels):
    step, birth = small
    step.load_state_dict(birth)
    batch = batch_of(mels, 1, 4, 32)
    z = step.model.encode(batch["mel"]).numpy().reshape(-1, TINY.dvae.codebook_dim)
    step.micro(0, batch, (0, 1), 1.0)
    assert int(step.apply()["restarted"]) == TINY.dvae.num_codes
    embed = step.model.codebook.embed.numpy().T
    nearest = np.abs(embed[:, None] - z[None]).max(-1).min(-1)
    assert nearest.max() < 1e-5


def test_a_non_finite_group_keeps_every_bit(small, mels):
    step, birth = small
    step.load_state_dict(birth)
    good, bad = batch_of(mels, 1, 4, 32), batch_of(mels, 2, 4, 32)
    step.micro(0, good, (0, 1), 1.0)
    step.apply()
    before = step.state_dict()
    bad["mel"][2, 5, 7] = np.nan
    step.micro(0, good, (0, 2), 0.5)
    assert not bool(step.micro(0, bad, (0, 3), 0.5)["finite"])
    report = step.apply()
    assert not bool(report["finite"])
    assert int(report["restarted"]) == 0
    assert changed(before, step.state_dict()) == set()
    # And nothing of it lingers: the next group is as if the bad one had not been.
    step.micro(0, good, (0, 4), 1.0)
    assert bool(step.apply()["finite"])
    after = step.state_dict()
    step.load_state_dict(before)
    step.micro(0, good, (0, 4), 1.0)
    step.apply()
    assert changed(after, step.state_dict()) == set()


def run(step, birth, mels, first, last):
    step.load_state_dict(birth)
    for s in range(first, last):
        step.micro(0, batch_of(mels, s, 4, 32), (5, s), 1.0)
        step.apply()
    return step.state_dict()


def test_resumed_training_is_bit_equal_and_the_seed_matters(small, mels):
    step, birth = small
    straight = run(step, birth, mels, 0, 6)
    assert changed(straight, run(step, run(step, birth, mels, 0, 3), mels, 3, 6)) == set()
    step.load_state_dict(birth)
    for s in range(6):
        step.micro(0, batch_of(mels, s, 4, 32), (6, s), 1.0)
        step.apply()
    assert "model/codebook.embed" in changed(straight, step.state_dict())


def test_accumulating_two_halves_is_one_whole_batch(small, mels):
    """Halves of equal weight: the same gradient and the same codebook sums, up to rounding."""
    step, birth = small
    first = batch_of(mels, 1, 4, 32)
    step.load_state_dict(birth)
    step.micro(0, first, (0, 1), 1.0)
    step.apply()
    begun = step.state_dict()
    step.micro(0, first, (0, 2), 1.0)
    one = step.read(step.apply())
    after_one = step.state_dict()
    step.load_state_dict(begun)
    for _ in range(2):
        step.micro(0, first, (0, 2), 0.5)
    two = step.read(step.apply())
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
    assert two["perplexity"] == pytest.approx(one["perplexity"], rel=1e-4)
    after_two = step.state_dict()
    assert after_two["model"]["encoder.0.0.weight"] == pytest.approx(
        after_one["model"]["encoder.0.0.weight"], abs=1e-5
    )


def test_padding_rows_and_frames_do_not_count(small, mels):
    step, birth = small
    step.load_state_dict(birth)
    batch = batch_of(mels, 3, 4, 32, padding_rows=1)
    batch["num_frames"][0] = 18
    other = {k: v.copy() for k, v in batch.items()}
    other["mel"][3] = 9.0  # row of weight 0
    other["mel"][0, 30:] = 9.0  # beyond the row's frames
    other["num_frames"][3] = 20
    a, b = (step.evaluate(0, x) for x in (batch, other))
    assert float(a["recon_count"]) == float(b["recon_count"]) == 18 + 32 + 32
    assert float(a["commitment_count"]) == 5 + 8 + 8
    assert float(a["baseline_sum"]) == pytest.approx(float(b["baseline_sum"]), rel=1e-6)
    empty = {
        "mel": np.zeros((4, 32, 80), np.float32),
        "num_frames": np.zeros(4, np.int32),
        "weights": np.zeros(4, np.float32),
    }
    report = step.micro(0, empty, (0, 1), 1.0)
    assert float(report["loss"]) == 0.0
    assert bool(step.apply()["finite"])
    assert not any("codebook" in k for k in changed(birth, step.state_dict()))


def test_baseline_is_the_error_of_the_mean_mel(small, mels):
    step, birth = small
    step.load_state_dict(birth)
    batch = batch_of(mels, 4, 4, 32)
    frames = batch["mel"].reshape(-1, 80)
    got = step.evaluate(0, batch)
    assert float(got["baseline_sum"] / got["baseline_count"]) == pytest.approx(
        ((frames - frames.mean(0)) ** 2).mean(), rel=1e-4
    )


def test_perplexity():
    assert float(perplexity(tf.constant([3.0, 3.0, 3.0, 3.0]))) == pytest.approx(4.0)
    assert float(perplexity(tf.constant([5.0, 0.0, 0.0]))) == pytest.approx(1.0)
    assert float(perplexity(tf.zeros([3]))) == pytest.approx(1.0)


def test_wrong_batches_are_refused(small, mels):
    step, _ = small
    batch = batch_of(mels, 1, 4, 32)
    with pytest.raises(ValueError, match="no field mel"):
        step.micro(0, {k: v for k, v in batch.items() if k != "mel"}, (0, 0), 1.0)
    with pytest.raises(ValueError, match="num_frames is int64"):
        step.micro(0, {**batch, "num_frames": batch["num_frames"].astype(np.int64)}, (0, 0), 1.0)
    with pytest.raises(ValueError, match="4 frames"):
        make_step(num_frames=30)
