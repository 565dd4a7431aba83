"""The plan against what arithmetic says of it: once per epoch, no history, the source's marginal
distribution.
"""

import itertools
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from common.data import buckets, stateless_random
from common.data.buckets import Bucket
from common.data.plan import Plan, PlanRows, write_plan


def lj_like(n=13100, seed=0):
    """Lengths like LJSpeech's: 1.1–10.1 s, mean 6.6 s, about 2.1 text tokens per code second of
    speech.
    """
    rng = np.random.default_rng(seed)
    seconds = np.clip(rng.normal(6.9, 2.3, n), 1.1, 10.1)
    codes = np.ceil(seconds * 22050 / 1024).astype(np.int64)
    tokens = np.clip(seconds * rng.normal(8.5, 0.9, n), 3, 200).astype(np.int64)
    return tokens, codes


def make_plan(tmp_path, n=1000, batch=8, k=4, sampling="epoch", languages=1, name="train", seed=7):
    tokens, codes = lj_like(n, 3)
    table, of = buckets.make_buckets(
        tokens, codes, num_buckets=k, batch_size=batch, positions_per_batch=None, num_latents=32
    )
    language = (
        (np.arange(n) ** 2 % 10 < languages).astype(np.int16)
        if languages > 1
        else np.zeros(n, np.int16)
    )
    write_plan(
        tmp_path,
        name,
        PlanRows(ids=np.arange(n), bucket_of=of, language=language),
        seed=seed,
        sampling=sampling,
        buckets=table,
    )
    return Plan.open(tmp_path, name), of, language


@pytest.mark.parametrize("n", [1, 2, 3, 7, 16, 17, 1000, 4097])
def test_permute_is_a_permutation_and_depends_on_its_key(n):
    a = stateless_random.permute(n, stateless_random.key(1, 2), np.arange(n))
    assert sorted(a) == list(range(n))
    if n >= 16:
        b = stateless_random.permute(n, stateless_random.key(1, 3), np.arange(n))
        assert (a != b).any()
        assert (a != np.arange(n)).any()
    assert [
        int(stateless_random.permute(n, stateless_random.key(1, 2), i)) for i in range(n)
    ] == a.tolist(), "one by one"


def test_splitmix_known_answers():
    # First outputs of SplitMix64 seeded with 1234567 (reference implementation by Vigna).
    state = 1234567
    want = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    got = [
        int(stateless_random.splitmix64(np.uint64((state + i * 0x9E3779B97F4A7C15) % 2**64)))
        for i in range(3)
    ]
    assert got == want


def test_permutation_is_close_to_uniform():
    n, keys = 20, 1500
    hits = np.zeros((n, n))
    for k in range(keys):
        hits[np.arange(n), stateless_random.permute(n, stateless_random.key(k), np.arange(n))] += 1
    chi2 = ((hits - keys / n) ** 2 / (keys / n)).sum()
    assert abs(chi2 - (n - 1) ** 2) < 6 * np.sqrt(2 * (n - 1) ** 2)


def test_every_utterance_once_per_epoch_and_reshuffled(tmp_path):
    plan, of, _ = make_plan(tmp_path)
    m = plan.batches_per_epoch
    epochs = []
    for e in range(2):
        batches = [plan.batch(g) for g in range(e * m, (e + 1) * m)]
        seen = np.concatenate([b.utterances[b.utterances >= 0] for b in batches])
        assert sorted(seen) == list(range(1000))
        for b in batches:
            assert b.epoch == e
            assert len(b.utterances) == plan.buckets[b.bucket].batch_size
            assert (of[b.utterances[b.utterances >= 0]] == b.bucket).all()
            assert b.weights.sum() == b.num_rows == plan.num_rows(b.g)
            assert plan.bucket_of(b.g) == b.bucket
        # One short batch per bucket at most.
        assert sum(b.num_rows < plan.buckets[b.bucket].batch_size for b in batches) <= len(
            plan.buckets
        )
        epochs.append(seen)
    assert (epochs[0] != epochs[1]).mean() > 0.9


def test_batches_do_not_depend_on_history_or_process(tmp_path):
    plan, _, _ = make_plan(tmp_path)
    later = plan.batch(731)
    again = Plan.open(tmp_path, "train").batch(731)
    assert (later.utterances == again.utterances).all()
    assert later.seed == again.seed
    code = (
        f"from common.data.plan import Plan; b = Plan.open({str(tmp_path)!r}, 'train').batch(731); "
        "print(b.utterances.tolist(), b.seed, b.row_seeds.tolist())"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert out == f"{later.utterances.tolist()} {later.seed} {later.row_seeds.tolist()}"


def test_seeds_differ_between_batches_rows_plans_and_runs(tmp_path):
    plan, _, _ = make_plan(tmp_path / "a")
    other, _, _ = make_plan(tmp_path / "b", seed=8)
    seeds = np.concatenate([plan.batch(g).row_seeds for g in range(200)])
    assert len(np.unique(seeds)) == len(seeds)
    assert len({plan.batch(g).seed for g in range(500)}) == 500
    assert plan.batch(0).seed != other.batch(0).seed
    assert all(0 <= v < 2**31 for g in range(50) for v in plan.batch(g).seed)


def test_steps_group_batches_and_never_cross_an_epoch(tmp_path):
    plan, _, _ = make_plan(tmp_path, n=107, batch=4)
    m, a = plan.batches_per_epoch, 5
    steps = [plan.step(s, a) for s in range(1, 3 * plan.steps_per_epoch(a) + 1)]
    covered = list(
        itertools.chain.from_iterable(range(s.first_g, s.first_g + s.count) for s in steps)
    )
    assert covered == list(range(3 * m))
    for s in steps:
        assert s.first_g // m == (s.first_g + s.count - 1) // m == s.epoch
    assert {s.count for s in steps} == {a, m % a or a}


def test_fixed_plan_is_in_order_and_ends(tmp_path):
    plan, _, _ = make_plan(tmp_path, n=50, sampling="fixed", name="eval")
    seen = np.concatenate([plan.batch(g).utterances for g in range(plan.batches_per_epoch)])
    seen = seen[seen >= 0]
    assert sorted(seen) == list(range(50))
    with pytest.raises(IndexError):
        plan.batch(plan.batches_per_epoch)


def test_balanced_has_the_recipes_marginal_distribution(tmp_path):
    n = 300
    plan, of, language = make_plan(tmp_path, n=n, batch=4, sampling="balanced", languages=2)
    share = np.bincount(language) / n
    assert share.min() < 0.35, "the corpus must be unbalanced for the test to mean anything"
    count = np.zeros(n)
    for g in range(4000):
        b = plan.batch(g)
        assert (of[b.utterances] == b.bucket).all()
        np.add.at(count, b.utterances, 1)
    per_language = np.bincount(language, weights=count) / count.sum()
    np.testing.assert_allclose(per_language, 0.5, atol=0.01)
    want = np.where(language == 0, 0.5 / (language == 0).sum(), 0.5 / (language == 1).sum())
    expected = want * count.sum()
    z = (count - expected) / np.sqrt(expected)
    assert np.abs(z).max() < 5.5
    rows = sum(plan.num_rows(g) for g in range(plan.batches_per_epoch))
    assert abs(rows - n) <= n * 0.1


def test_groups_with_shares_of_their_own_stand_for_the_languages(tmp_path):
    """Group 0: 240 utterances with 15 % of the rows, 1: none, 2: 40 with 25 %, 3: 20 with 60 %."""
    n = 300
    _, of, language = make_plan(tmp_path, n=n, sampling="balanced", languages=2)
    group = np.repeat([0, 2, 3], [240, 40, 20])
    want = np.array([0.15, 0.0, 0.25, 0.60])
    table = Plan.open(tmp_path, "train").buckets
    table = [replace(b, batch_size=8 + i) for i, b in enumerate(table)]
    rows = PlanRows(np.arange(n), of, language, shares=(group, want))
    write_plan(tmp_path, "train", rows, seed=7, sampling="balanced", buckets=table)
    plan, count = Plan.open(tmp_path, "train"), np.zeros(n)
    for g in range(3000):
        b = plan.batch(g)
        assert (of[b.utterances] == b.bucket).all()
        np.add.at(count, b.utterances, 1)
    np.testing.assert_allclose(np.bincount(group, weights=count) / count.sum(), want, atol=0.01)
    expected = (want / np.maximum(np.bincount(group), 1))[group] * count.sum()
    assert np.abs((count - expected) / np.sqrt(expected)).max() < 5.5


def test_padding_on_ljspeech_like_lengths():
    lengths = buckets.row_lengths(*lj_like())
    assert buckets.padded_share(lengths, buckets.cut(lengths, 8)) <= 0.08
    assert buckets.padded_share(lengths, buckets.cut(lengths, 12)) <= 0.05


def test_cut_is_optimal():
    lengths = np.array([3, 3, 4, 9, 10, 10, 10, 25, 26, 40])
    values = np.unique(lengths)
    for k in (1, 2, 3, 4):
        best = min(
            np.asarray(e)[np.searchsorted(e, lengths)].sum()
            for e in (sorted((*c, 40)) for c in itertools.combinations(values[:-1], k - 1))
        )
        edges = buckets.cut(lengths, k)
        assert len(edges) == k
        assert np.asarray(edges)[np.searchsorted(edges, lengths)].sum() == best


def test_few_data_means_few_buckets_and_a_token_budget_sets_rows():
    tokens, codes = lj_like(40)
    table, _ = buckets.make_buckets(
        tokens, codes, num_buckets=8, batch_size=4, positions_per_batch=None, num_latents=32
    )
    assert len(table) == 2
    table, of = buckets.make_buckets(
        *lj_like(5000), num_buckets=6, batch_size=1, positions_per_batch=4096, num_latents=32
    )
    assert len(table) == 6
    for b in table:
        assert b.batch_size * (b.row_len + 32) <= 4096 < (b.batch_size + 1) * (b.row_len + 32)
    assert isinstance(table[0], Bucket)
    assert len(of) == 5000


def test_two_million_utterances_open_fast_and_answer(tmp_path):
    n = 2_000_000
    ids = np.arange(n)
    table = [Bucket(32, 100, 50, 50), Bucket(32, 200, 100, 100)]
    of, language = (ids % 2).astype(np.int16), np.zeros(n, np.int16)
    write_plan(
        tmp_path,
        "train",
        PlanRows(ids=ids, bucket_of=of, language=language),
        seed=1,
        sampling="epoch",
        buckets=table,
    )
    plan = Plan.open(tmp_path, "train")
    assert isinstance(plan.order, np.memmap)
    b = plan.batch(plan.batches_per_epoch * 3 + 12345)
    assert b.epoch == 3
    assert (b.utterances % 2 == b.bucket).all()
