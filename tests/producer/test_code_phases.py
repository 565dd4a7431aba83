"""batching.code_phases: in training a clip's codes begin up to three mel frames before it, as if
there were so much silence.
"""

import os

import numpy as np
import pytest

from tests.support.corpora import make_corpus
from tests.support.producer_runs import STATS, make_run, tokens_of, write_dvae

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from common.run import settings as config_module
from common.system.errors import BadInput
from common.transport.wire import digest
from common.xtts.audio import prompt_slice
from common.xtts.filterbank import log_mel_numpy
from producer.batches.decode import decode
from producer.batches.gpt import GptMaker
from producer.batches.rows import prompt_codes
from producer.creation.prepare import prepare_run

AUDIO = {"cond_min_samples": 11008, "cond_max_samples": 22016, "cond_eval_samples": 16512}
MASK = 2**64 - 1


def made(gpt, plan, epochs=1):
    """(planned, made) of all batches."""
    for g in range(epochs * gpt._plans[plan].batches_per_epoch):
        planned = gpt.plan(plan, g)
        clips = gpt.clips(planned)
        yield (
            planned,
            gpt.make(
                planned, clips, [decode(c.utterance.path, c.start, c.num_samples) for c in clips]
            ),
        )


def frames_before(planned, row):
    """0 to 3: the third output of splitmix64, seeded with the row's seed, scaled."""
    x = (int(planned.row_seeds[row]) + 3 * 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return ((x ^ (x >> 31)) * 4) >> 64


def codes_of(gpt, wav):
    """From the NumPy mel of the whole, with 8 s of silence behind it."""
    n = -(-len(wav) // 1024)
    mel = (
        log_mel_numpy(
            np.concatenate([wav, np.zeros(n * 1024 - len(wav) + 8 * 22050, np.float32)]), 1024
        )
        / STATS
    )
    return gpt._dvae.codes(mel[None].astype(np.float32)).numpy()[0, :n]


def test_rows_are_those_of_the_clip_with_silence_before_it(tmp_path):
    lengths = [0.5, 0.9, 1.2, 1.5, 65 * 1024 / 22050, 2.2]
    run = make_run(
        tmp_path, lengths, num_eval=1, audio=AUDIO, batching={"code_phases": 4, "buckets": 2}
    )
    write_dvae(run)
    gpt, seen, num_codes, cached = GptMaker(run), {}, set(), 0
    for planned, batch in made(gpt, "train", epochs=6):
        cached += batch.num_cached
        for row in np.flatnonzero(planned.utterances >= 0):
            u, lead = int(planned.utterances[row]), 256 * frames_before(planned, row)
            wav, m = decode(run.manifest.utterances([u])[0].path), len(tokens_of(u)) + 1
            codes = codes_of(gpt, np.concatenate([np.zeros(lead, np.float32), wav]))
            n = len(codes)
            np.testing.assert_array_equal(batch.arrays["ids"][row, m + 1 : m + 1 + n], 256 + codes)
            start, length = prompt_slice(
                len(wav), int(planned.row_seeds[row]), run.dims.audio, training=True
            )
            targets = np.array([*codes, *[129] * 4])
            first, end = prompt_codes(start + lead, length, n)
            targets[first:end] = -1
            np.testing.assert_array_equal(
                batch.arrays["audio_targets"][row, m : m + n + 4], targets
            )
            clip = np.zeros(AUDIO["cond_max_samples"], np.float32)
            clip[:length] = wav[start : start + length]
            np.testing.assert_allclose(
                batch.arrays["cond_mel"][row],
                log_mel_numpy(clip, 2048) / STATS,
                rtol=1e-3,
                atol=1e-3,
            )
            seen.setdefault(u, set()).add(lead)
            num_codes |= {n} if u == 4 else set()
    assert cached > 0, "codes of a phase that was met before come from the cache"
    assert min(map(len, seen.values())) >= 2, "phases change from epoch to epoch"
    assert set.union(*seen.values()) == {0, 256, 512, 768}
    assert num_codes == {65, 66}, "a clip of 65 codes whole has one more where it begins late"
    for planned, batch in made(gpt, "eval"):
        u = int(planned.utterances[0])
        codes, m = (
            codes_of(gpt, decode(run.manifest.utterances([u])[0].path)),
            len(tokens_of(u)) + 1,
        )
        np.testing.assert_array_equal(
            batch.arrays["ids"][0, m + 1 : m + 1 + len(codes)], 256 + codes
        )


def test_batches_are_the_same_with_and_without_the_cache(tmp_path):
    found = []
    for name, cached in (("a", True), ("b", False)):
        sections = {
            "batching": {"code_phases": 4, "buckets": 1},
            "producers": {"cache_codes": cached},
        }
        run = make_run(tmp_path / name, [0.5, 0.9, 1.2, 1.5], audio=AUDIO, **sections)
        write_dvae(run)
        found.append([digest(batch.arrays) for _, batch in made(GptMaker(run), "train", epochs=5)])
    assert found[0] == found[1]
    assert len(set(found[0])) == len(found[0])


def tree(folder, **batching):
    make_corpus(folder / "corpus", 4, seconds=lambda i: (30 + i) * 1024 / 22050)
    return {
        "run": str(folder / "run"),
        "data": {"train": str(folder / "corpus"), "eval_fraction": 0.25, "scan_threads": 1},
        "model": {"size": "tiny"},
        "text": {"vocab_size": 60},
        "batching": {"buckets": 1, **batching},
    }


@pytest.mark.parametrize(("phases", "longest"), [(1, 33), (2, 34), (4, 34)])
def test_a_new_run_has_room_for_the_latest_beginning(tmp_path, phases, longest):
    run = prepare_run(
        config_module.parse(tree(tmp_path, code_phases=phases)),
        on_cpu=True,
        cores=1,
        out=lambda line: None,
    )
    assert [b.num_codes for b in run.plan("gpt", "train").buckets] == [longest]


def test_the_longest_clip_must_fit_where_it_begins_late(tmp_path):
    positions = config_module.parse(tree(tmp_path)).dims.gpt.max_audio_tokens - 3
    for phases, codes, fits in (
        (1, positions, True),
        (4, positions, False),
        (4, positions - 1, True),
    ):
        settings = tree(tmp_path / f"{phases}-{codes}", code_phases=phases)
        settings["data"]["max_audio_s"] = codes * 1024 / 22050
        if fits:
            prepare_run(config_module.parse(settings), on_cpu=True, cores=1, out=lambda line: None)
            continue
        with pytest.raises(BadInput, match=r"data.max_audio_s=.* but the model has positions for"):
            prepare_run(config_module.parse(settings), on_cpu=True, cores=1, out=lambda line: None)


def test_the_setting_is_part_of_what_the_run_is(tmp_path):
    """With one bucket for all, the plans are the same: neither they nor the probe tell two settings
    apart.
    """
    hashes = []
    for phases in (2, 4):
        run = prepare_run(
            config_module.parse(tree(tmp_path, code_phases=phases)),
            on_cpu=True,
            cores=1,
            out=lambda line: None,
        )
        hashes.append(run.feature_hash("dvae"))
        with pytest.raises(
            BadInput,
            match=rf"code_phases differ \(batching.code_phases: {phases} there, {6 - phases} now",
        ):
            prepare_run(
                config_module.parse(tree(tmp_path, code_phases=6 - phases)),
                on_cpu=True,
                cores=1,
                out=lambda line: None,
            )
        run.path.rename(tmp_path / f"run-{phases}")
    assert hashes[0] != hashes[1]


def test_coqui_has_no_phases(tmp_path):
    with pytest.raises(BadInput, match=r"batching.code_phases=2 \(parity has 1\)"):
        config_module.parse({**tree(tmp_path, code_phases=2), "parity": "coqui"})
