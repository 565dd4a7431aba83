"""What a run leaves at its end, at a stop and when it is started again: which step's samples, which
judgements, and what is said of what is missing. The networks are dictionaries here.
"""

import json
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

import common.xtts.dvae
import common.xtts.weights
import trainer.previews.samples
from common.run.sections import Samples
from common.run.stages import NETWORKS
from common.system import status
from common.system.lifecycle import Stop
from common.system.status import StatusFile
from trainer import finale, last_samples
from trainer.history import judgements
from trainer.previews import judge, sampler
from trainer.previews.sampler import SPEAKING
from trainer.report.tensorboard import EventWriter

CER = {10: 0.2, 20: 0.5}  # by step


class FakeMaker:
    """Speaks a file that names the step of its weights, and judges by `CER`."""

    def __init__(self, run, model, dvae):
        self.model = model

    def make(self, folder, step, events):
        folder.mkdir(parents=True)
        assert self.model["step"] == step, "spoken with the weights of another checkpoint"
        (folder / "synth_a.wav").write_text(str(step))
        (folder / "samples.json").write_text(json.dumps([{"name": "a", "step": step}]))
        return [1]

    def judge(self):
        cer = CER[self.model["step"]]
        ce = {"audio_ce": 3.0, "audio_ce_by_language": {"en": 3.0}}
        return ce | {"cer": cer, "wer": cer, "cer_recordings": 0.1, "wer_recordings": 0.1}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """20 steps of the GPT, checkpoints of steps 10 and 20; the sampler has judged none."""
    for step in (10, 20):
        folder = tmp_path / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text('{"best_step": null}')
    steps = [
        {"step": s, "epoch": 0, "rows": 2, "step_ms": 9.0, "wait_ms": 1.0, "audio_ce": 4.0 - s / 20}
        for s in range(1, 21)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(s) + "\n" for s in steps))
    (tmp_path / "ledger.jsonl").write_text("".join(f'{{"step": {s["step"]}}}\n' for s in steps))
    train = SimpleNamespace(best_by="cer", patience=None, max_steps=20)
    model = SimpleNamespace(size="tiny", weights=None)
    config = SimpleNamespace(train=train, model=model, samples=Samples(), sample_every=10)
    monkeypatch.setattr(trainer.previews.samples, "maker_of", FakeMaker)
    monkeypatch.setattr(common.xtts.dvae, "Dvae", lambda dims: {})
    monkeypatch.setattr(
        common.xtts.weights, "load_state_dict", lambda net, state: net.update(state)
    )
    monkeypatch.setattr(
        last_samples, "checkpoint_of", lambda run, which, verify=True: weights(run, which)
    )
    monkeypatch.setattr(last_samples, "load_file", lambda path: {"step": step_in(path)})
    return SimpleNamespace(
        path=tmp_path,
        run_id="ab",
        stages=("gpt",),
        spec={s.name: s for s in NETWORKS}.__getitem__,
        stage_folder=lambda stage: tmp_path,
        samples_events=tmp_path / "tensorboard" / "samples",
        dvae_weights=tmp_path / "dvae.safetensors",
        config=config,
        dims=SimpleNamespace(dvae=None),
    )


def weights(run, which):
    from common.run.beginning import checkpoint_of

    return checkpoint_of(run, which, verify=False)


def step_in(path):
    name = path.parent.name.partition("-")[2]
    return int(name) if name.isdigit() else None


def at_its_end(last=20, total=20):
    return SimpleNamespace(
        spec={s.name: s for s in NETWORKS}["gpt"],
        step=SimpleNamespace(model={"step": last}),
        schedule=SimpleNamespace(total_steps=total),
    )


def end(run, stage=None, stop=None):
    """Run the end; returns summary.json."""
    finale.finish(
        run, stage or at_its_end(), StatusFile(run.path, "trainer", "trainer"), stop or Stop()
    )
    return left(run)


def left(run):
    return json.loads((run.path / "summary.json").read_text())


def said_by(folder):
    """The step of the weights that spoke the samples in a folder."""
    (info,) = json.loads((folder / "samples.json").read_text())
    assert (folder / "synth_a.wav").read_text() == str(info["step"])
    return info["step"]


def folders(run):
    return sorted(p.name for p in (run.path / "samples").iterdir() if p.is_dir())


def figures(run):
    return left(run)["stages"]["gpt"]


# -- the end ---------------------------------------------------------------------------------------


def test_the_best_is_spoken_and_the_last_lies_beside_it(run, caplog):
    judgements.add(run.path, 10, {"cer": 0.2}, "cer")
    with caplog.at_level("INFO"):
        summary = end(run)
    assert (said_by(run.path / "samples"), folders(run)) == (10, ["step-00000020"])
    assert said_by(run.path / "samples" / "step-00000020") == 20
    assert (summary["ended"], summary["last_step"], summary["samples"]["step"]) == (
        "finished",
        20,
        10,
    )
    gpt = figures(run)
    assert (gpt["best_checkpoint"], gpt["best_note"], gpt["last_judged"]) == (10, None, 20)
    assert (gpt["quality"]["cer"], gpt["quality_last"]["cer"]) == (0.2, 0.5)
    assert "samples/ is of step 10, the best; step-00000020 is of the last" in caplog.text
    assert "step 10, by cer" in caplog.text


def test_steps_of_no_folder_of_tensorboards_go_back(run):
    """TensorBoard drops what a folder holds of later steps as soon as an earlier one comes: the
    sampler judges step 15 while the trainer is at its end, and the best is step 10.
    """
    run.config.train.best_by = "audio_ce"

    def judge_of() -> dict:
        return {"audio_ce": 3.0, "audio_ce_by_language": {"en": 3.0}}

    sampler_events = EventWriter(run.samples_events)
    judge.judge_checkpoint(run, judge_of, 5, sampler_events)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            last_samples,
            "wait_for_sampler",
            lambda *_: judge.judge_checkpoint(run, judge_of, 15, sampler_events),
        )
        patched.setattr(last_samples, "best_of", lambda run: 10)
        end(run)
    sampler_events.close()
    found = {}
    for file in sorted((run.path / "tensorboard").rglob("events.*")):
        steps = [e.step for e in EventFileLoader(str(file)).Load() if e.HasField("summary")]
        found.setdefault(file.parent.name, []).extend(steps)
    assert all(steps == sorted(steps) for steps in found.values()), found
    assert {name: set(steps) for name, steps in found.items()} == {
        "samples": {5, 15},
        "samples-last": {20},
        "samples-best": {10},
    }


def test_the_last_is_the_best(run):
    judgements.add(run.path, 10, {"cer": 0.7}, "cer")
    assert end(run)["samples"]["step"] == 20
    assert (said_by(run.path / "samples"), folders(run)) == (20, [])


def test_a_best_that_cannot_be_read_leaves_the_last(run, monkeypatch, caplog):
    judgements.add(run.path, 10, {"cer": 0.2}, "cer")

    def damaged(path):
        if step_in(path) == 10:
            raise OSError("Input/output error")
        return {}

    monkeypatch.setattr(last_samples, "load_file", damaged)
    assert end(run)["samples"]["step"] == 20
    assert said_by(run.path / "samples") == 20
    assert "samples/ is of the last step, 20, not of the best: Input/output error" in caplog.text


def test_figures_that_nobody_has_are_said(run, monkeypatch, caplog):
    """By similarity, and no encoder is there: the held-out loss decides, or else the newest is."""
    run.config.train.best_by = "similarity"
    (run.path / "checkpoints/step-00000020/state.json").write_text('{"best_step": 10}')
    end(run)
    gpt = figures(run)
    assert (gpt["best_by"], gpt["best_checkpoint"]) == ("similarity", 10)
    note = "no checkpoint on disk was judged by similarity, the held-out loss decided"
    assert gpt["best_note"] == note
    assert "step 20 has no similarity, which train.best_by needs" in caplog.text
    (run.path / "checkpoints/step-00000020/state.json").write_text('{"best_step": null}')
    end(run, at_its_end(total=30))  # as if ended by patience: another end
    assert figures(run)["best_note"].endswith("the newest: the held-out loss was not measured")


# -- judgements that are being made ----------------------------------------------------------------


@contextmanager
def judging(run, step):
    """The sampler, at work on a step."""
    file = StatusFile(run.path, "sampler", "sampler")
    file.update(phase=SPEAKING, step=step)
    yield file
    file.finish(0)


def test_the_summary_waits_for_the_sampler(run, monkeypatch):
    with judging(run, 10) as file:
        waits = []

        def sleep(seconds):
            waits.append(seconds)
            judgements.add(run.path, 10, {"cer": 0.1}, "cer")
            file.update(phase="waiting for a checkpoint")

        monkeypatch.setattr(
            last_samples,
            "time",
            SimpleNamespace(sleep=sleep, monotonic=lambda: 0.0, perf_counter=lambda: 0.0),
        )
        summary = end(run)
    assert len(waits) == 1
    assert (summary["samples"]["step"], figures(run)["quality"]) == (10, {"cer": 0.1})


def test_a_checkpoint_that_the_sampler_has_yet_to_take_is_waited_for(run):
    """It waits between two checks of the folder."""
    with judging(run, 4) as file:
        file.update(phase="waiting for a checkpoint")
        assert last_samples._pending(run, 20) == 10
        file.update(phase=SPEAKING, step=10)
        file.update(phase="waiting for a checkpoint")  # it tried, and failed
        assert last_samples._pending(run, 20) is None
        file.update(phase=SPEAKING)
        assert last_samples._pending(run, 20) == 10
    assert last_samples._pending(run, 20) is None  # it is gone


def test_the_wait_has_a_deadline_and_ends_with_a_stop(run, monkeypatch, caplog):
    with judging(run, 10):
        monkeypatch.setattr(last_samples, "JUDGED_S", -1.0)
        last_samples.wait_for_sampler(run, 20, lambda: False)
        assert "the judgement of step 10 is left out: the sampler needs more than" in caplog.text
        monkeypatch.setattr(last_samples, "JUDGED_S", 1e9)
        last_samples.wait_for_sampler(run, 20, lambda: True)


def test_a_judgement_after_the_summary_changes_nothing(run, monkeypatch):
    monkeypatch.setattr(sampler, "schedule_of", None, raising=False)
    trainer_status, maker = (
        StatusFile(run.path, "trainer", "trainer"),
        FakeMaker(run, {"step": 10}, {}),
    )
    seen = []
    for phase, late in (
        ("training", False),
        (status.SPEAKING_LAST, False),
        (status.SUMMING_UP, True),
        (status.DONE, True),
    ):
        trainer_status.update(phase=phase)
        seen.append(sampler.is_too_late(run.path))
        assert seen[-1] == late
    events = SimpleNamespace(scalars=lambda step, values: None)
    before = (run.path / "metrics.jsonl").read_bytes()
    judge.judge_checkpoint(run, maker.judge, 10, events, lambda: sampler.is_too_late(run.path))
    assert (run.path / "metrics.jsonl").read_bytes() == before


def test_a_step_is_judged_once(run):
    scalars = []
    events = SimpleNamespace(scalars=lambda step, values: scalars.append((step, values)))
    maker = FakeMaker(run, {"step": 10}, {})
    judge.judge_checkpoint(run, maker.judge, 10, events)
    judge.judge_checkpoint(run, lambda: pytest.fail("judged twice"), 10, events)
    ((step, values),) = scalars
    assert step == 10
    assert (values["quality/cer"], values["quality/audio_ce_by_language/en"]) == (0.2, 3.0)
    assert judgements.read(run.path) == {10: maker.judge()}


# -- again -----------------------------------------------------------------------------------------


def test_a_finished_run_is_left_as_it_is(run, caplog, monkeypatch):
    end(run)
    before = {p: p.stat().st_mtime_ns for p in run.path.rglob("*") if p.is_file()}
    del before[run.path / "status" / "trainer.json"]
    with caplog.at_level("INFO"):
        end(run)
    assert "summary.json, curves.png and samples/ stay as they are" in caplog.text
    assert {p: p.stat().st_mtime_ns for p in before} == before
    spoken = []
    monkeypatch.setattr(
        last_samples, "speak", lambda run, stage, last, asked: spoken.append(last) or last
    )
    run.config.samples = Samples(count=2)  # other samples are asked for
    end(run)
    run.config.train.best_by = "audio_ce"  # another checkpoint is the best
    end(run)
    end(run)
    assert spoken == [20, 20]


@pytest.mark.parametrize("how", ["failed", "stopped"])
def test_samples_that_were_not_made_are_made_by_the_next_start(run, monkeypatch, how):
    stop, may_end, speak = Stop(), threading.Event(), last_samples.speak

    def fails(run, stage, last, asked):
        if how == "failed":
            raise MemoryError("full")
        stop.request("stop", "SIGINT", 130)
        assert may_end.wait(60)

    monkeypatch.setattr(last_samples, "speak", fails)
    try:
        summary = end(run, stop=stop)
    finally:
        may_end.set()
    assert (summary["ended"], summary["samples"]) == ("finished", None)
    monkeypatch.setattr(last_samples, "speak", speak)
    assert end(run)["samples"]["step"] == 20


# -- a stop ----------------------------------------------------------------------------------------


def spoken(run, step):
    FakeMaker(run, {"step": step}, {}).make(run.path / "samples" / f"step-{step:08d}", step, None)


def stopped(run, monkeypatch):
    stop = Stop(saves=True)
    stop.request("stop", "SIGINT", 130)
    # However slow this machine is: the deadline has a test of its own.
    monkeypatch.setattr(stop, "remaining_s", lambda: None)
    monkeypatch.setattr(finale, "_STOP_S", 200.0)
    finale.leave_summary(run, StatusFile(run.path, "trainer", "trainer"), stop)
    return left(run)


@pytest.mark.parametrize(
    ("steps", "of", "note"),
    [
        ((10, 20), 10, "samples/ is of step 10"),
        ((20,), 20, "samples/ is of step 20; the best, step 10, has not been spoken yet"),
        ((), None, "no samples were spoken yet"),
    ],
)
def test_a_stop_leaves_what_there_is(run, monkeypatch, caplog, steps, of, note):
    for step in steps:
        spoken(run, step)
    judgements.add(run.path, 10, {"cer": 0.2}, "cer")
    with caplog.at_level("INFO"):
        summary = stopped(run, monkeypatch)
    assert (summary["ended"], summary["last_step"]) == ("stopped", 20)
    assert summary["samples"] == (None if of is None else {"step": of})
    assert (run.path / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert figures(run)["quality"] == {"cer": 0.2}
    assert note in caplog.text
    if of is not None:
        assert said_by(run.path / "samples") == of
    assert end(run)["ended"] == "finished"  # a stopped run's summary is no finished run's
    assert status.read(run.path, "trainer").phase == status.SUMMING_UP


def test_a_stop_leaves_the_bests_samples_of_an_end_before(run, monkeypatch):
    """Of a run that goes on: the best was moved to samples/ then, other steps lie beside it."""
    judgements.add(run.path, 10, {"cer": 0.2}, "cer")
    FakeMaker(run, {"step": 10}, {}).make(run.path / "samples", 10, None)
    spoken(run, 20)
    assert stopped(run, monkeypatch)["samples"] == {"step": 10}
    assert said_by(run.path / "samples") == 10


def test_a_stop_that_has_no_time_says_what_is_left_out(run, monkeypatch, caplog):
    reached, may_end = threading.Event(), threading.Event()

    def draw(run, read, figures):
        reached.set()
        assert may_end.wait(60)

    monkeypatch.setattr(finale.summary, "draw", draw)
    stop = Stop(saves=True)
    stop.request("stop", "SIGINT", 130)
    # The time is over as soon as the summary is written.
    monkeypatch.setattr(stop, "remaining_s", lambda: reached.wait(60) and 0.0)
    try:
        finale.leave_summary(run, StatusFile(run.path, "trainer", "trainer"), stop)
    finally:
        may_end.set()
    assert "curves.png: left out; the same command goes on" in caplog.text
    assert left(run)["ended"] == "stopped"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (OSError(28, "No space left on device"), "OSError: [Errno 28] No space left"),
        (KeyError("step_ms"), "KeyError: 'step_ms'"),
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"),
    ],
)
def test_no_fault_of_a_summary_holds_up_a_stop(run, monkeypatch, caplog, fault, said):
    def write(*args):
        raise fault

    monkeypatch.setattr(finale.summary, "write", write)
    stop = Stop(saves=True)
    stop.request("stop", "SIGINT", 130)
    finale.leave_summary(run, StatusFile(run.path, "trainer", "trainer"), stop)
    assert f"the results of a stopped run are incomplete: {said}" in caplog.text
    assert "summary.json, curves.png: left out" in caplog.text


def test_a_stop_reads_the_history_once(run, monkeypatch):
    """However long a run is: its metrics are the largest file that a stop reads."""
    read, original = [], finale.summary.History.read
    monkeypatch.setattr(
        finale.summary.History, "read", lambda folder: read.append(folder) or original(folder)
    )
    assert stopped(run, monkeypatch)["last_step"] == 20
    assert read == [run.stage_folder(stage) for stage in run.stages]
