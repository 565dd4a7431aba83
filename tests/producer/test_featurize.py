"""Batches of both stages against references that share no code with them: NumPy mels, whole clips,
packing by hand.
"""

import os
import shutil

import numpy as np
import pytest

from tests.support.producer_runs import STATS, make_run, tokens_of, tone, write_dvae

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from common.data.batch import batch_spec, check_batch
from common.transport.wire import digest
from common.xtts.audio import DvaeMel, prompt_slice
from common.xtts.filterbank import log_mel_numpy
from producer.batches.crops import crop_frames, crop_samples, crop_span
from producer.batches.decode import DecodeError, decode
from producer.batches.dvae import DvaeMaker
from producer.batches.gpt import GptMaker
from producer.batches.maker import BatchError, without
from producer.batches.rows import prompt_codes

LENGTHS_S = [0.5, 0.9, 1.2, 1.5, 1.6, 1.9, 2.2, 2.4, 2.7, 3.1, 3.3]
AUDIO = {"cond_min_samples": 11008, "cond_max_samples": 22016, "cond_eval_samples": 16512}
FLOAT16 = {"rtol": 1e-3, "atol": 1e-3}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Eight training and three evaluation clips, two buckets, random DVAE weights."""
    made = make_run(tmp_path_factory.mktemp("run"), LENGTHS_S, num_eval=3, audio=AUDIO)
    write_dvae(made)
    return made


@pytest.fixture(scope="module")
def gpt(run):
    return GptMaker(run)


@pytest.fixture(scope="module")
def dvae(run):
    return DvaeMaker(run)


def decode_all(clips):
    return [decode(c.utterance.path, c.start, c.num_samples) for c in clips]


def make(maker, plan, g, skip=()):
    planned = without(maker.plan(plan, g), skip)
    clips = maker.clips(planned)
    return planned, maker.make(planned, clips, decode_all(clips))


def every_batch(maker, run, plan="train", epochs=1):
    return [
        make(maker, plan, g) for g in range(epochs * run.plan(maker.stage, plan).batches_per_epoch)
    ]


def wav_of(run, utterance):
    return decode(run.manifest.utterances([utterance])[0].path)


def reference_codes(gpt, wav):
    """Codes of one clip alone, from its NumPy mel with 8 s of silence behind it: nothing of the
    edge is left.
    """
    n = -(-len(wav) // 1024)
    padded = np.concatenate([wav, np.zeros(n * 1024 - len(wav) + 8 * 22050, np.float32)])
    mel = log_mel_numpy(padded, 1024) / STATS
    return gpt._dvae.codes(mel[None].astype(np.float32)).numpy()[0, :n]


# -- stage 2 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["train", "eval"])
def test_a_gpt_batch_row_by_row(run, gpt, plan):
    """Everything in a row, re-derived: tokens, codes of the NumPy mel, prompt, positions,
    conditioning mel.
    """
    dims, training = run.dims.gpt, plan == "train"
    for planned, made in every_batch(gpt, run, plan):
        a = made.arrays
        check_batch(
            a, batch_spec("gpt", run.plan("gpt", plan).buckets[planned.bucket], run.dims, "float16")
        )
        assert made.bad == []
        np.testing.assert_array_equal(a["weights"], planned.weights)
        for row in np.flatnonzero(planned.utterances >= 0):
            u = int(planned.utterances[row])
            tokens, wav = tokens_of(u), wav_of(run, u)
            codes = reference_codes(gpt, wav)
            n, m = len(codes), len(tokens) + 1
            start, length = prompt_slice(
                len(wav), int(planned.row_seeds[row]), run.dims.audio, training
            )
            ids = [dims.start_text, *tokens, 256 + 128, *(256 + codes), *[256 + 129] * 3]
            np.testing.assert_array_equal(a["ids"][row, : len(ids)], ids)
            assert not a["ids"][row, len(ids) :].any()
            np.testing.assert_array_equal(
                a["positions"][row, : len(ids)],
                [*range(m), *(dims.num_text_positions + np.arange(n + 4))],
            )
            targets = np.array([*codes, *[129] * 4])
            if training:
                first, end = prompt_codes(start, length, n)
                targets[first:end] = -1
            np.testing.assert_array_equal(a["audio_targets"][row, m : len(ids)], targets)
            np.testing.assert_array_equal(a["text_targets"][row, :m], [*tokens, dims.stop_text])
            clip = np.zeros(AUDIO["cond_max_samples"], np.float32)
            clip[:length] = wav[start : start + length]
            np.testing.assert_allclose(
                a["cond_mel"][row], log_mel_numpy(clip, 2048) / STATS, **FLOAT16
            )


def test_codes_vary_and_mean_something(run, gpt):
    """Else the test above proves nothing."""
    _, made = make(gpt, "train", 0)
    codes = made.arrays["audio_targets"][made.arrays["audio_targets"] >= 0]
    assert len(np.unique(codes)) > 5


def test_codes_do_not_depend_on_the_bucket(run, gpt):
    """The same clip in the short and in the long bucket's function, alone and among others."""
    audio, dims = run.dims.audio, run.dims.gpt
    short, long = run.plan("gpt", "train").buckets
    assert short.num_codes < long.num_codes
    for seconds in (0.5, 0.93, short.num_codes * 1024 / 22050):
        wav = tone(5, seconds)[: short.num_codes * 1024]
        n = -(-len(wav) // 1024)
        found = []
        for bucket, others in ((short, 0.0), (long, 0.0), (long, 0.7)):
            batch = np.zeros(
                (bucket.batch_size, bucket.num_samples + audio.pad_samples), np.float32
            )
            batch[:, : bucket.num_samples] = (
                others * tone(9, bucket.num_samples / 22050)[: bucket.num_samples]
            )
            batch[1] = 0
            batch[1, : len(wav)] = wav
            found.append(gpt._codes(batch).numpy()[1, :n])
        np.testing.assert_array_equal(found[0], found[1])
        np.testing.assert_array_equal(found[0], found[2])
    assert dims.num_audio_tokens == 130


def test_one_trace_per_bucket_over_two_epochs(run):
    shutil.rmtree(run.path / "cache", ignore_errors=True)
    maker = GptMaker(run)
    used = set()
    for g in range(2 * run.plan("gpt", "train").batches_per_epoch):
        planned = maker.plan("train", g)
        assert maker.compiles(planned) == (planned.bucket not in used)
        used.add(planned.bucket)
        make(maker, "train", g)
    make(maker, "eval", 0)
    assert len(used) == 2
    assert (
        maker.num_traces == 3
    )  # the codes of each bucket, and the conditioning mel, which has the batch's shape


def test_the_same_batch_is_the_same_bytes_in_another_maker(run, gpt, dvae):
    for one, other in ((gpt, GptMaker(run)), (dvae, DvaeMaker(run))):
        for plan in ("train", "eval"):
            assert digest(make(one, plan, 0)[1].arrays) == digest(make(other, plan, 0)[1].arrays)
        assert one.probe() == other.probe()
        assert len(one.probe()) == 32


def test_crops_change_from_epoch_to_epoch_in_training_and_never_in_evaluation(run, gpt, dvae):
    plan = run.plan("dvae", "train")
    n = plan.batches_per_epoch

    def crops(epoch):
        return {
            c.utterance.id: (c.start, c.num_samples)
            for g in range(n)
            for c in dvae.clips(dvae.plan("train", epoch * n + g))
        }

    first, second = crops(0), crops(1)
    assert first.keys() == second.keys()
    assert sum(first[u] != second[u] for u in first) > len(first) // 2
    evaluation = {c.utterance.id: c.start for c in dvae.clips(dvae.plan("eval", 0))}
    for u, start in evaluation.items():
        frames = 1 + round(LENGTHS_S[u] * 22050) // 256
        assert start == (frames - 64) // 2 * 256 - 512


def test_a_bad_clip_is_a_padding_row_that_is_named_and_the_others_do_not_change(run, gpt, dvae):
    for maker, planned_bad in ((gpt, 1), (dvae, 2)):
        planned, good = make(maker, "train", 0)
        clips = maker.clips(planned)
        decoded = decode_all(clips)
        decoded[planned_bad] = DecodeError("c.wav", "ends early")
        made = maker.make(planned, clips, decoded)
        bad = clips[planned_bad]
        assert made.bad == [(bad.utterance.id, "c.wav: ends early")]
        pad = maker._empty(planned)
        for name, array in made.arrays.items():
            np.testing.assert_array_equal(array[bad.row], pad[name][bad.row])
            keep = [r for r in range(4) if r != bad.row]
            np.testing.assert_array_equal(array[keep], good.arrays[name][keep])
        _, skipped = make(maker, "train", 0, skip=[bad.utterance.id])
        assert skipped.bad == []
        assert digest(skipped.arrays) == digest(made.arrays)


def test_a_clip_of_another_length_than_the_manifest_says_is_bad(gpt):
    planned = gpt.plan("train", 0)
    clips = gpt.clips(planned)
    decoded = decode_all(clips)
    decoded[0] = decoded[0][:-5]
    made = gpt.make(planned, clips, decoded)
    assert "the manifest says" in made.bad[0][1]
    assert made.arrays["weights"][clips[0].row] == 0


def test_a_batch_of_bad_clips_is_finite(gpt):
    planned = gpt.plan("train", 1)
    clips = gpt.clips(planned)
    made = gpt.make(planned, clips, [DecodeError("x", "empty file")] * len(clips))
    assert not made.arrays["weights"].any()
    assert all(np.isfinite(a).all() for a in made.arrays.values())


def test_an_unknown_utterance_fails_the_batch(gpt):
    planned = gpt.plan("train", 0)
    planned.utterances[0] = 10**6
    with pytest.raises(BatchError, match="plan and manifest disagree"):
        gpt.clips(planned)


def test_without_masking_every_code_is_a_target(tmp_path):
    run = make_run(
        tmp_path, [1.0, 1.5, 2.0, 2.5], audio=AUDIO, batching={"mask_prompt": False, "buckets": 1}
    )
    write_dvae(run)
    planned, made = make(GptMaker(run), "train", 0)
    samples = np.array([round(s * 22050) for s in (1.0, 1.5, 2.0, 2.5)])[planned.utterances]
    np.testing.assert_array_equal(
        (made.arrays["audio_targets"] >= 0).sum(1), -(-samples // 1024) + 4
    )


# -- stage 1 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["train", "eval"])
def test_a_dvae_crop_is_that_part_of_the_whole_clips_mel(run, dvae, plan):
    short = 0
    for planned, made in every_batch(dvae, run, plan):
        a = made.arrays
        check_batch(a, batch_spec("dvae", run.plan("dvae", plan).buckets[0], run.dims, "float16"))
        np.testing.assert_array_equal(a["weights"], planned.weights)
        for row in np.flatnonzero(planned.utterances >= 0):
            wav = wav_of(run, int(planned.utterances[row]))
            whole = log_mel_numpy(wav, 1024) / STATS
            first, n = crop_frames(
                len(wav), int(planned.row_seeds[row]), 64, run.dims.audio, plan == "train"
            )
            assert a["num_frames"][row] == n == min(64, len(whole))
            np.testing.assert_allclose(a["mel"][row, :n], whole[first : first + n], **FLOAT16)
            assert not a["mel"][row, n:].any()
            short += n < 64
    assert short == (1 if plan == "train" else 0)  # the clip of 0.5 s has 44 frames


def test_crops_at_both_ends_are_reflected_as_the_whole_clip_is(run):
    """Every first frame there is, in float32."""
    audio = run.dims.audio
    wav = tone(3, 0.5)
    whole = DvaeMel(STATS, audio)(wav[None]).numpy()[0]
    for n in (3, 17, 44):
        for first in range(len(whole) - n + 1):
            start, end = crop_span(first, n, len(wav), audio)
            seen = crop_samples(wav[start:end], (start, end), first, n, audio)
            assert len(seen) == (n + 3) * 256
            mel = DvaeMel(STATS, audio)(seen[None]).numpy()[0, 2:-2]
            np.testing.assert_allclose(mel, whole[first : first + n], rtol=1e-4, atol=1e-4)


def test_training_crops_reach_from_the_first_to_the_last_frame(run):
    audio = run.dims.audio
    firsts = {
        crop_frames(22050, seed * 0x9E3779B97F4A7C15 % 2**64, 80, audio, True)[0]
        for seed in range(500)
    }
    assert firsts == set(range(87 - 80 + 1))
    assert crop_frames(22050, 5, 80, audio, False) == (3, 80)
