"""Conditioning clips lent by other utterances of the speaker: who lends to whom, what a row then
holds, and what happens to bad files.
"""

import os
import subprocess
import sys

import numpy as np
import pytest

from tests.support.producer_runs import STATS, make_run, tokens_of, write_dvae

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from common.data import stateless_random
from common.data.buckets import Bucket
from common.data.plan import Plan, PlanRows, Prompts, write_plan
from common.run import settings
from common.system.errors import BadInput
from common.transport.wire import digest
from common.xtts.audio import prompt_slice
from common.xtts.dims import SIZES
from common.xtts.filterbank import log_mel_numpy
from producer.batches.decode import DecodeError, decode
from producer.batches.gpt import GptMaker
from producer.batches.maker import without
from tests.support.arithmetic_runs import arithmetic_run

AUDIO = {"cond_min_samples": 22016, "cond_max_samples": 44032, "cond_eval_samples": 33024}
# Speaker c has one training and one evaluation utterance, d one training utterance alone; e is only
# in the evaluation set.
SPEAKERS, NUM_EVAL = "abacabadab" + "abce", 4
LENGTHS_S = [0.6 + 0.21 * i for i in range(len(SPEAKERS))]
EVALUATION = range(len(SPEAKERS) - NUM_EVAL, len(SPEAKERS))


def two_plans(folder, speakers, num_eval=0, seed=5, rows=4):
    """Training and evaluation plan over utterances of these speakers, in two buckets."""
    of, n = np.array(speakers), len(speakers)
    plans = {}
    for name, ids in (("train", np.arange(n - num_eval)), ("eval", np.arange(n - num_eval, n))):
        lenders = ids if name == "train" else np.arange(n)
        facts = {
            "bucket_of": (ids % 2).astype(np.int16),
            "language": ids * 0,
            "speaker": of[ids],
            "pool": (lenders, of[lenders]),
        }
        sampling = "epoch" if name == "train" else "fixed"
        write_plan(
            folder,
            name,
            PlanRows(ids=ids, **facts),
            seed=seed,
            sampling=sampling,
            buckets=[Bucket(rows, 20, 9, 9), Bucket(rows, 40, 9, 29)],
        )
        plans[name] = Plan.open(folder, name)
    return plans


def pairs(plan, numbers):
    """[n, 2]: utterance and the one that lends it the clip, of all rows of these batches."""
    batches = [plan.batch(g) for g in numbers]
    for b in batches:
        np.testing.assert_array_equal(b.prompts == -1, b.utterances == -1)
    return np.concatenate(
        [np.stack([b.utterances, b.prompts], 1)[b.utterances >= 0] for b in batches]
    )


def test_training_clips_come_from_another_training_utterance_of_the_speaker(tmp_path):
    rng = np.random.default_rng(1)
    speakers = np.concatenate(
        [[9, 9, 3], rng.choice([0, 1, 2, 4, 5, 6], 60, p=[0.5, 0.2, 0.1, 0.1, 0.05, 0.05]), [7, 3]]
    )
    plan = two_plans(tmp_path, speakers, num_eval=2)["train"]
    own, prompt = pairs(plan, range(40 * plan.batches_per_epoch)).T
    assert set(own) == set(range(63))
    assert (speakers[own] == speakers[prompt]).all()
    assert (prompt < 63).all(), "training never hears the evaluation set"
    alone = np.array([(speakers[:63] == speakers[u]).sum() == 1 for u in own])
    np.testing.assert_array_equal(alone, own == 2)
    np.testing.assert_array_equal(prompt == own, alone)
    assert {tuple(p) for p in np.stack([own, prompt], 1) if p[0] < 2} == {(0, 1), (1, 0)}


def test_the_others_of_a_speaker_are_drawn_equally_often(tmp_path):
    n, times = 12, 1500
    plan = two_plans(tmp_path, [0] * n + [1] * 5)["train"]
    positions = np.repeat(np.arange(len(plan.order)), times)
    own = plan.order[positions]
    prompts = plan.prompts.draw(
        positions, own, stateless_random.draws(stateless_random.key(3), np.arange(len(own)))
    )
    hits = np.zeros((n, n))
    np.add.at(hits, (own[own < n], prompts[own < n]), 1)
    assert not np.diag(hits).any()
    assert (hits.sum(1) == times).all()
    expected = times / (n - 1)
    chi2 = ((hits - expected) ** 2 / expected)[~np.eye(n, dtype=bool)].sum()
    freedom = n * (n - 2)
    assert abs(chi2 - freedom) < 6 * np.sqrt(2 * freedom)


def test_rows_drawn_together_are_those_drawn_one_by_one():
    """By the definition: the own id left out, the k-th of the others of the speaker."""
    rng = np.random.default_rng(2)
    for num_ids in (0, 1, 40, 300):
        ids, of = np.arange(num_ids), rng.integers(0, 1 + num_ids // 8, num_ids)
        rank = np.lexsort((ids, of))
        offsets = np.searchsorted(of[rank], np.arange(60))
        own = rng.integers(0, 2 * num_ids + 1, 200)  # half are in no pool
        speakers = np.where(own < num_ids, np.r_[of, 0][np.minimum(own, num_ids)], 5)
        bits = rng.integers(0, 2**64, 200, np.uint64)
        found = Prompts(speakers, ids[rank].astype(np.int32), offsets).draw(
            np.arange(200), own, bits
        )
        for u, speaker, drawn, b in zip(own, speakers, found, bits, strict=True):
            others = [i for i in ids if of[i] == speaker and i != u]
            k = int(int(b >> np.uint64(11)) * 2.0**-53 * len(others))
            assert drawn == (others[k] if others else u)


def test_evaluation_clips_are_the_same_each_time_and_may_come_from_both_splits(tmp_path):
    plans = two_plans(tmp_path, [0] * 30 + [1] * 3 + [0] * 20 + [1] + [2] * 2 + [3], num_eval=24)
    plan, n = plans["eval"], plans["eval"].batches_per_epoch
    lent = dict(pairs(plan, range(n)).tolist())
    assert dict(pairs(plan, reversed(range(n))).tolist()) == lent
    assert set(lent) == set(range(33, 57))
    assert any(p < 30 for u, p in lent.items() if u < 53)
    assert any(p >= 33 for u, p in lent.items() if u < 53)
    assert lent[53] in (30, 31, 32)
    assert (lent[54], lent[55], lent[56]) == (55, 54, 56)


def test_prompts_do_not_depend_on_history_or_process(tmp_path):
    plan = two_plans(tmp_path, [0, 1] * 40)["train"]
    before = plan.batch(1234).prompts.tolist()
    for g in range(50):
        plan.batch(g)
    assert plan.batch(1234).prompts.tolist() == before
    code = (
        f"from common.data.plan import Plan; print(Plan.open({str(tmp_path)!r},"
        " 'train').batch(1234).prompts.tolist())"
    )
    assert subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip() == str(before)
    other = two_plans(tmp_path / "other", [0, 1] * 40, seed=6)["train"]
    assert any(
        dict(pairs(plan, [g]).tolist()) != dict(pairs(other, [g]).tolist()) for g in range(3)
    )


def test_prompts_change_no_other_draw(tmp_path):
    """Order, crops and dropout of a run are the same with both settings, so that they can be
    compared.
    """
    lent = two_plans(tmp_path / "lent", [0] * 30)["train"]
    ids = np.arange(30)
    write_plan(
        tmp_path,
        "train",
        PlanRows(ids=ids, bucket_of=(ids % 2).astype(np.int16), language=ids * 0),
        seed=5,
        sampling="epoch",
        buckets=lent.buckets,
    )
    own = Plan.open(tmp_path, "train")
    for g in range(20):
        a, b = lent.batch(g), own.batch(g)
        np.testing.assert_array_equal(a.utterances, b.utterances)
        np.testing.assert_array_equal(a.row_seeds, b.row_seeds)
        assert a.seed == b.seed
        np.testing.assert_array_equal(b.prompts, b.utterances)
        assert not (a.prompts == a.utterances)[a.utterances >= 0].any()


def test_a_lent_clip_that_is_set_aside_is_replaced_by_the_own_one(tmp_path):
    plan = two_plans(tmp_path, [0] * 16)["train"]
    b = plan.batch(0)
    lender, lost = int(b.prompts[0]), int(b.utterances[1])
    got = without(b, [lender, lost])
    for row in range(4):
        own, prompt = int(b.utterances[row]), int(b.prompts[row])
        gone = own in (lender, lost)
        assert got.utterances[row] == (-1 if gone else own)
        assert got.weights[row] == (0 if gone else 1)
        assert got.prompts[row] == (-1 if gone else own if prompt in (lender, lost) else prompt)
    np.testing.assert_array_equal(got.row_seeds, b.row_seeds)


def test_a_short_utterance_lends_all_of_itself_and_a_long_one_as_much_as_of_its_own():
    audio = SIZES["xtts"].audio
    assert prompt_slice(50_001, 5, audio, training=True, whole=True) == (0, 50_001)
    assert prompt_slice(50_001, 5, audio, training=False, whole=True) == (0, 50_001)
    for seed in range(50):
        assert prompt_slice(200_000, seed, audio, training=True, whole=True) == prompt_slice(
            200_000, seed, audio, training=True
        )
    assert prompt_slice(200_000, 5, audio, training=False, whole=True) == (0, 99_225)


# -- batches ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Ten training and four evaluation clips of five speakers."""
    folder = tmp_path_factory.mktemp("run")
    made = make_run(
        folder,
        LENGTHS_S,
        num_eval=NUM_EVAL,
        audio=AUDIO,
        speakers=SPEAKERS,
        batching={"prompt": "speaker"},
    )
    write_dvae(made)
    return made


def decode_all(clips):
    return [decode(c.utterance.path, c.start, c.num_samples) for c in clips]


def make(maker, plan, g, skip=()):
    planned = without(maker.plan(plan, g), skip)
    clips = maker.clips(planned)
    return planned, clips, maker.make(planned, clips, decode_all(clips))


def wav_of(run, u):
    return decode(run.manifest.utterances([u])[0].path)


@pytest.mark.parametrize("plan", ["train", "eval"])
def test_a_lent_clip_hides_nothing_and_an_own_one_hides_what_it_shows(run, plan):
    """Row by row: whose voice it is, which samples of it, which codes are targets."""
    maker, seen = GptMaker(run), set()
    for g in range(run.plan("gpt", plan).batches_per_epoch):
        planned, _, made = make(maker, plan, g)
        assert made.bad == []
        np.testing.assert_array_equal(made.arrays["weights"], planned.weights)
        for row in np.flatnonzero(planned.utterances >= 0):
            u, prompt = int(planned.utterances[row]), int(planned.prompts[row])
            lent = u != prompt
            assert lent == (SPEAKERS[u] in "abc" and not (plan == "train" and SPEAKERS[u] == "c"))
            assert SPEAKERS[u] == SPEAKERS[prompt]
            wav = wav_of(run, prompt)
            start, length = prompt_slice(
                len(wav), int(planned.row_seeds[row]), run.dims.audio, plan == "train", whole=lent
            )
            clip = np.zeros(AUDIO["cond_max_samples"], np.float32)
            clip[:length] = wav[start : start + length]
            np.testing.assert_allclose(
                made.arrays["cond_mel"][row],
                log_mel_numpy(clip, 2048) / STATS,
                rtol=1e-3,
                atol=1e-3,
            )
            n, first = -(-len(wav_of(run, u)) // 1024), len(tokens_of(u)) + 1
            targets = made.arrays["audio_targets"][row]
            hidden = n + 4 - (targets[first : first + n + 4] >= 0).sum()
            assert (targets >= 0).sum() == n + 4 - hidden
            if lent or plan == "eval":
                assert hidden == 0
            else:
                assert hidden == (start + length) // 1024 - start // 1024 > 0
            seen.add((lent, length < len(wav)))
    assert {lent for lent, _ in seen} == {True, False}
    assert (True, False) in seen, "a short utterance lends all of itself"


def test_batches_are_the_same_to_the_bit_with_and_without_known_codes(run):
    numbers = [("train", g) for g in range(2 * run.plan("gpt", "train").batches_per_epoch)] + [
        ("eval", 0)
    ]
    plain = GptMaker(run)
    plain._cache = None
    filling = GptMaker(run)
    expected = [digest(make(plain, *number)[2].arrays) for number in numbers]
    assert [digest(make(filling, *number)[2].arrays) for number in numbers] == expected
    known = [make(filling, *number) for number in numbers]
    assert [digest(made.arrays) for _, _, made in known] == expected
    for planned, clips, _ in known:
        assert len(clips) == planned.num_rows, "with the codes known, one clip a row is decoded"
        assert [c.utterance.id for c in clips] == planned.prompts[planned.prompts >= 0].tolist()


def test_a_lent_clip_that_cannot_be_decoded_is_named_and_does_without_its_row(run):
    maker = GptMaker(run)
    maker._cache = None
    planned, clips, good = make(maker, "train", 0)
    decoded = decode_all(clips)
    at, clip = next((i, c) for i, c in enumerate(clips) if c.row_utterance is not None)
    decoded[at] = DecodeError("v.wav", "ends early")
    made = maker.make(planned, clips, decoded)
    assert made.bad == [(int(planned.prompts[clip.row]), "v.wav: ends early")]
    assert made.arrays["weights"][clip.row] == 0
    others = [r for r in range(4) if r != clip.row]
    for name, array in made.arrays.items():
        np.testing.assert_array_equal(array[others], good.arrays[name][others])
    again, _, remade = make(maker, "train", 0, skip=[int(planned.prompts[clip.row])])
    assert again.prompts[clip.row] == again.utterances[clip.row]
    assert remade.arrays["weights"][clip.row] == 1
    assert (remade.arrays["audio_targets"][clip.row] >= 0).sum() < (
        good.arrays["audio_targets"][clip.row] >= 0
    ).sum()


def test_the_setting_is_part_of_what_the_run_is(tmp_path):
    found = {}
    for prompt in ("own", "speaker"):
        run = arithmetic_run(tmp_path, batching__prompt=prompt)
        assert (run.plan("gpt", "train").prompts is None) == (prompt == "own")
        assert run.plan("dvae", "train").prompts is None
        found[prompt] = run.identity, run.feature_hash("gpt")
        with pytest.raises(BadInput, match=rf"batching.prompt: '{prompt}' there, '\w+' now"):
            arithmetic_run(tmp_path, batching__prompt={"own": "speaker", "speaker": "own"}[prompt])
        run.path.rename(tmp_path / prompt)
    (own, own_hash), (lent, lent_hash) = found.values()
    assert (own["prompt"], lent["prompt"]) == ("own", "speaker")
    assert own["plan"]["gpt"] != lent["plan"]["gpt"]
    assert own["plan"]["dvae"] == lent["plan"]["dvae"]
    assert own_hash != lent_hash


def test_coqui_takes_the_clip_from_the_utterance_itself():
    assert settings.parse({"parity": "coqui"}).batching.prompt == "own"
    with pytest.raises(BadInput, match=r"batching.prompt=speaker \(parity has own\)"):
        settings.parse({"parity": "coqui", "batching": {"prompt": "speaker"}})
