"""Kill schedules with the real networks, as small as they get, on the CPU: bit-equal weights, also
under another CPU affinity, with another number of producers, and with samples spoken meanwhile.
Half of the clips are augmented, in both stages.
"""

import json
import os
import signal

import pytest
import soundfile
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.run.folder import RunFolder
from common.system import status
from tests.support.chaos import Driver, When
from tests.support.corpora import make_corpus
from tests.support.tiny_runs import STEPS, assert_equal, result, tiny_tree
from trainer.history import judgements, ledger

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs CPU affinity")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(
        tmp_path_factory.mktemp("corpus"),
        14,
        seconds=lambda i: 0.6 + 0.03 * (i % 5),
        freq=lambda i: 200 + 40 * i,
    )


def augmented(folder, corpus, num_producers=1):
    """Settings of a run in `folder`."""
    augment = {"share": 0.5, "of": "clip"}
    return {**tiny_tree(folder, corpus, num_producers), "augment": augment}


def finish(driver):
    try:
        driver.finish()
    finally:
        driver.kill_everything()
    return RunFolder(driver.run)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, corpus):
    folder = tmp_path_factory.mktemp("undisturbed")
    driver = Driver.create(folder, augmented(folder, corpus, num_producers=2), 0, 0)
    driver.launch()
    run = finish(driver)
    return result(run), run


def test_nothing_is_traced_twice(undisturbed):
    """Over several epochs, short last batches, accumulation and evaluations."""
    _, run = undisturbed
    assert (
        run.plan("gpt", "train").batch(run.plan("gpt", "train").step(STEPS, 2).first_g).epoch >= 2
    )
    for stage in run.stages:
        records = [
            json.loads(x)
            for x in (run.stage_folder(stage) / "metrics.jsonl").read_text().splitlines()
        ]
        traces = [r["traces"] for r in records if "traces" in r][-1]
        buckets = range(len(run.plan(stage, "train").buckets))
        assert {k: n for k, n in traces.items() if k.startswith("micro")} == {
            f"micro/{b}": 1 for b in buckets
        }
        assert set(traces.values()) == {1}


@pytest.mark.timeout(900)
def test_everything_is_killed_in_turn_and_a_trainer_resumes_on_one_core(
    undisturbed, corpus, tmp_path
):
    driver = Driver.create(tmp_path, augmented(tmp_path, corpus), 0, 0)
    driver.gate.limit(1, 3)
    driver.launch()
    driver.wait_for(
        lambda: (tmp_path / "run/dvae/checkpoints/step-00000002").exists(),
        "stage 1's first checkpoint",
    )
    driver.kill_launcher()
    driver.launch()
    driver.wait_until(When(6, slack=2))
    # The trainer that the supervisor starts next inherits the launcher's affinity.
    os.sched_setaffinity(driver.launchers[-1].pid, {min(os.sched_getaffinity(0))})
    producers = driver.producers()
    driver.signal("trainer", signal.SIGKILL)

    def lines():
        return ledger.read(driver.run / "ledger.jsonl")

    driver.wait_for(
        lambda: any("resumed_from" in x for x in lines()) and "resumed_from" not in lines()[-1],
        "its successor's first step",
    )
    assert driver.producers() == producers, driver.story("a producer was restarted")
    driver.signal("producer-0", signal.SIGKILL)
    run = finish(driver)
    (resumed,) = [x["resumed_from"] for x in lines() if "resumed_from" in x]
    assert 4 <= resumed < STEPS
    assert_equal(result(run), undisturbed[0])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_samples_while_it_trains_change_nothing_and_their_process_may_be_killed(
    undisturbed, corpus, tmp_path
):
    """The trainer stands between two steps while the sampler dies and comes back; it judges."""
    samples = {"count": 1, "every": 4, "judged": 4, "recogniser": "pocketsphinx"}
    driver = Driver.create(tmp_path, {**augmented(tmp_path, corpus), "samples": samples}, 0, 0)
    driver.gate.limit(2, 6)
    driver.launch()

    def speaking():
        return (
            (s := status.read(driver.run, "sampler")) is not None
            and s.alive
            and s.phase == "speaking"
        )

    driver.wait_for(speaking, "the first checkpoint to be spoken")
    first = driver.pid("sampler")
    driver.signal("sampler", signal.SIGKILL)
    driver.wait_for(lambda: speaking() and driver.pid("sampler") != first, "another sampler")
    run = finish(driver)
    console = (tmp_path / "console.log").read_text()
    assert console.count("sampler killed by signal 9; restart 1 of 3") == 1
    assert_equal(result(run), undisturbed[0])
    judged = judgements.read(run.path)
    assert STEPS in judged
    assert all(
        {"audio_ce", "audio_ce_by_speaker", "cer", "wer"} <= f.keys() for f in judged.values()
    )
    best = json.loads((run.path / "summary.json").read_text())["samples"]["step"]
    spoken = sorted(int(p.name[5:]) for p in (run.path / "samples").glob("step-*"))
    assert [s for s in spoken if s < STEPS] in ([4], [8], [4, 8])
    (info,) = json.loads((run.path / "samples" / "samples.json").read_text())
    assert info["step"] == best
    board = {"samples": {s for s in spoken if s < STEPS}, "samples-last": {STEPS}}
    if best != STEPS:
        board["samples-best"] = {best}
    told: list[int] = []
    for name, steps in board.items():
        folder = str(run.samples_events.with_name(name))
        events = EventAccumulator(folder, size_guidance={"audio": 0}).Reload()
        assert {e.step for e in events.Audio(f"samples/{info['name']}/synth")} == steps
        if "quality/audio_ce" in events.Tags()["scalars"]:
            told += [e.step for e in events.Scalars("quality/audio_ce")]
    assert sorted(told) == sorted(judged)
    for folder in (run.path / "samples", *(run.path / "samples").glob("step-*")):
        wav, rate = soundfile.read(folder / info["synth"])
        assert (rate, len(wav) > 1000, (len(wav) + 256) % 1024) == (22050, True, 0)
    assert status.read(run.path, "sampler").exit_code == 0
