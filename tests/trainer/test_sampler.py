"""The process that speaks a run's checkpoints: which ones, what it leaves, and what it does when
they are gone, damaged or too quick.
"""

import json
import logging
import math
import shutil
import threading
from collections.abc import Callable

import numpy as np
import pytest
import soundfile
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import common.gpu.device
import launch
import tests.support.arithmetic  # noqa: F401 - registers the size
from common.gpu.choose import CPU
from common.gpu.device import DeviceInfo
from common.launcher.program import sampler_specs
from common.run import beginning, recorded_settings
from common.run import settings as config_module
from common.run.published import publish
from common.system import lock, status
from common.system.clock import since_boot
from common.system.errors import BadInput, Hopeless, Stopped
from common.system.lifecycle import Stop
from common.xtts import weights
from common.xtts.dvae import Dvae
from common.xtts.gpt import Gpt
from common.xtts.synthesize import Synthesizer
from producer.creation.prepare import prepare_run
from tests.support.corpora import make_corpus
from trainer.history.checkpoint import Checkpoints
from trainer.previews import sampler


@pytest.mark.parametrize(
    ("steps", "last", "expected"),
    [
        ([], 0, None),
        ([99], 0, None),
        ([100], 0, 100),
        ([100], 100, None),
        ([100, 150], 100, None),  # an evaluation's best in between
        ([150, 203], 100, 203),  # at or after the multiple
        ([200, 250], 100, 200),
        ([100, 200, 300], 100, 300),  # the newest that there is
        ([100, 1000], 0, 100),  # 1000 is the last step: the trainer's own
        ([100], 500, None),  # back at an older checkpoint: these steps have been heard
    ],
)
def test_which_checkpoint_is_next(steps, last, expected):
    assert sampler.next_step(steps, 100, last, 1000) == expected


def test_none_is_next_where_none_are_wanted():
    assert sampler.next_step([100, 200], 0, 0, 1000) is None


def test_no_process_where_no_samples_are_wanted(tmp_path):
    def of(**samples):
        size = samples.pop("size", "tiny")
        c = config_module.parse(
            {"model": {"size": size}, "train": {"save_every": 7}, "samples": samples}
        )
        return c.sample_every, len(sampler_specs(c, tmp_path, CPU))

    assert of() == (7, 1)
    assert of(every=3) == (3, 1)
    assert of(every=0) == (0, 0)
    assert of(count=0) == (0, 0)
    assert of(count=0, texts=["a"]) == (7, 1)
    assert of(size="arithmetic") == (0, 0)


def test_a_trainer_alone_has_its_sampler(run, monkeypatch):
    programs = []
    monkeypatch.setattr(launch, "_supervise", lambda program, notes: programs.append(program) or 0)
    assert launch.main(["trainer", "--run", str(run.path)]) == 0
    assert [(p.name, p.main, p.optional, p.restarts) for p in programs[0].processes] == [
        ("trainer", True, False, 0),
        ("sampler", False, True, 0),
    ]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A tiny run of 100 steps, samples every 4, its trainer at work.

    Griffin-Lim is left out: the sound is the mel itself.
    """
    monkeypatch.setattr(
        Synthesizer, "from_mel", lambda self, mel: np.ravel(mel).astype(np.float32) / 50
    )
    monkeypatch.setattr(
        common.gpu.device, "prove_device", lambda **_: DeviceInfo("cpu", "/device:CPU:0", "CPU")
    )
    make_corpus(tmp_path / "corpus", 4, seconds=1.0)
    tree = {
        "run": str(tmp_path / "run"),
        "devices": "auto",
        "data": {"train": str(tmp_path / "corpus"), "eval_fraction": 0.25, "scan_threads": 1},
        "model": {"size": "tiny", "layers": 1},
        "text": {"vocab_size": 60},
        "train": {"max_steps": 100, "save_every": 4},
        "samples": {"count": 1},
    }
    run = prepare_run(config_module.parse(tree), on_cpu=True, cores=2)
    dvae = Dvae(run.dims.dvae)
    dvae.initialise(2)
    run.dvae_weights.parent.mkdir(exist_ok=True)
    publish(run, weights.state_dict(dvae))
    status.StatusFile(run.path, "trainer", "trainer").update(phase="training")
    return run


class Script:
    """Saves checkpoints while the sampler works: it is asked between two of them whether the
    trainer is done.
    """

    def __init__(self, run, *acts):
        self.run, self.acts, self.asked = run, list(acts), 0
        self.checkpoints = Checkpoints(run.path / "checkpoints", keep=9)
        self.gpt = Gpt(run.dims.gpt, seed=1)

    def save(self, *steps):
        for step in steps:
            self.checkpoints.save(
                step, {"model": weights.state_dict(self.gpt), "optimizer": {}}, {"best_step": None}
            )

    def __call__(self) -> bool:
        if self.asked < len(self.acts):
            self.acts[self.asked]()
        self.asked += 1
        return self.asked > len(self.acts) + 1


def spoken(run) -> list[str]:
    return sorted(p.name for p in (run.path / "samples").iterdir())


def test_checkpoints_are_spoken_as_they_come(run, caplog, monkeypatch):
    monkeypatch.setattr(sampler, "POLL_S", 0.0)
    (run.path / "samples" / ".tmp-step-00000004").mkdir(parents=True)  # of one that was killed

    def damage():
        script.save(8)
        path = script.checkpoints.path(8) / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-10])

    script = Script(run)
    script.acts = [
        lambda: None,
        lambda: script.save(3),
        lambda: script.save(4, 6),
        damage,
        lambda: script.save(20, 24, 28),
    ]
    with caplog.at_level(logging.INFO):
        sampler.PreviewProcess(run.path, Stop()).run(script)
    assert spoken(run) == ["step-00000004", "step-00000028"]
    alarms = [
        r.getMessage()
        for r in caplog.records
        if r.levelno >= logging.WARNING and r.name == "trainer.previews.sampler"
    ]
    assert len(alarms) == 2
    assert "the samples of step 8 failed" in alarms[0]
    assert "damaged" in alarms[0]
    assert "no samples between steps 8 and 28: step 8 took" in alarms[1]
    assert "1 samples of step 4" in caplog.text
    check_files(run, (4, 28))


def check_files(run, steps):
    """WAV and picture of each step, and TensorBoard's of the same tag at each."""
    events = EventAccumulator(str(run.samples_events), size_guidance={"audio": 0, "images": 0})
    events.Reload()
    for step in steps:
        folder = run.path / "samples" / f"step-{step:08d}"
        (info,) = json.loads((folder / "samples.json").read_text())
        wav, rate = soundfile.read(folder / info["synth"])
        assert (
            len(wav) == 4 * 80 * info["num_codes"] == pytest.approx(info["seconds"] * rate, abs=15)
        )  # the mel: 4 frames a code
        assert (info["recon"] is None) == (step != steps[0])  # the same through a run
        assert (folder / info["picture"]).read_bytes()[:4] == b"\x89PNG"
    tag = f"samples/{info['name']}"
    assert [e.step for e in events.Images(f"{tag}/mel")] == list(steps)
    assert [e.step for e in events.Audio(f"{tag}/synth")] == list(steps)
    assert (
        events.Audio(f"{tag}/synth")[-1].encoded_audio_string
        == (folder / info["synth"]).read_bytes()
    )


def test_a_checkpoint_that_vanishes_is_passed_over(run, caplog, monkeypatch):
    monkeypatch.setattr(sampler, "POLL_S", 0.0)
    whole = beginning.checkpoint_of

    def rotated(path, which):
        if which == "4":
            shutil.rmtree(run.path / "checkpoints" / "step-00000004")
        return whole(path, which)

    monkeypatch.setattr(beginning, "checkpoint_of", rotated)
    monkeypatch.setattr(sampler, "Networks", lambda run: pytest.fail("there was nothing to speak"))
    script = Script(run)
    script.acts = [lambda: script.save(4)]
    with caplog.at_level(logging.INFO):
        sampler.PreviewProcess(run.path, Stop()).run(script)
    assert spoken(run) == []
    assert "the checkpoint of step 4 was removed before it was read" in caplog.text
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


LATER_S = 200.0  # longer than anything takes that still happens


class FakeNetworks:
    """Speaks as long as `speaking` does, or fails."""

    error: Exception | None = None
    speaking: Callable[[], object] = staticmethod(lambda: None)

    def __init__(self, run):
        self.run = run

    def speak(self, state, step):
        self.speaking()
        if self.error is not None:
            raise self.error
        return 1


def test_failures_that_stay_end_the_process_and_others_do_not(run, monkeypatch, caplog):
    monkeypatch.setattr(sampler, "Networks", FakeNetworks)
    monkeypatch.setattr(sampler, "POLL_S", 0.0)
    script = Script(run)
    script.save(4)
    for error, ends in ((MemoryError("full"), Hopeless), (BadInput("no GPU"), BadInput)):
        monkeypatch.setattr(FakeNetworks, "error", error)
        with pytest.raises(ends):
            sampler.PreviewProcess(run.path, Stop()).run(lambda: False)
    monkeypatch.setattr(FakeNetworks, "error", OSError(28, "No space left on device"))
    sampler.PreviewProcess(run.path, Stop()).run(Script(run, lambda: None))
    assert "no samples of step 4: the disk takes nothing more ([Errno 28]" in caplog.text
    assert "Traceback" not in caplog.text


def test_a_stop_does_not_wait_for_the_speaker(run, monkeypatch):
    monkeypatch.setattr(sampler, "Networks", FakeNetworks)
    stop, may_end = Stop(), threading.Event()

    def speaking():
        stop.request("stop", "SIGTERM", 143)
        assert may_end.wait(LATER_S)

    monkeypatch.setattr(FakeNetworks, "speaking", staticmethod(speaking))
    Script(run).save(4)
    try:
        with pytest.raises(Stopped):
            sampler.PreviewProcess(run.path, stop).run(lambda: False)
        assert not may_end.is_set()
    finally:
        may_end.set()


def test_settings_that_change_are_taken_up(run, monkeypatch):
    monkeypatch.setattr(sampler, "POLL_S", 0.0)
    made = []
    monkeypatch.setattr(
        sampler, "Networks", lambda run: made.append(run.config.samples.every) or FakeNetworks(run)
    )
    script = Script(run)

    def change():
        every = run.config.samples.model_copy(update={"every": 6})
        recorded_settings.write(run.proof, run.config.model_copy(update={"samples": every}))
        script.save(10, 12)

    script.acts = [lambda: script.save(4), lambda: script.save(8), change]
    sampler.PreviewProcess(run.path, Stop()).run(script)
    assert made == [None, 6]


def test_one_at_a_time(tmp_path):
    held = lock.lock(tmp_path / "sampler.lock", "another sampler")
    asked = []
    assert sampler.take_place(tmp_path, Stop(), lambda: asked.append(1) or len(asked) > 2) is None

    def release() -> bool:
        held.release()
        return False

    mine = sampler.take_place(tmp_path, Stop(), release)
    assert lock.holder(tmp_path / "sampler.lock") is not None
    mine.release()


def test_the_trainers_word_of_an_earlier_start_does_not_count(tmp_path):
    assert not status.trainer_is_done(tmp_path, 0.0)
    file = status.StatusFile(tmp_path, "trainer", "trainer")
    assert not status.trainer_is_done(tmp_path, 0.0)
    file.update(phase=status.DONE)
    assert status.trainer_is_done(tmp_path, since_boot() - 5)
    assert not status.trainer_is_done(tmp_path, since_boot() + 5)
    file.finish(143)
    assert not status.trainer_is_done(tmp_path), "it was stopped, or died: a new one may come"
    assert math.isfinite(file.value.time)
