"""`launch.py finetune`: which commands it calls for a folder, with which settings, and how it goes
on where it was stopped.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import launch
from common.gpu.choose import Device
from common.gpu.listing import Gpu
from common.launcher import finetune, finetune_settings, flags, resolve
from common.launcher.finetune_settings import Found, choose
from common.system.errors import INTERRUPTED, BadInput
from producer.corpus.demo import make_demo_corpus
from producer.corpus.recordings import sort, transcribe
from producer.creation.begin import languages_of
from producer.creation.prepare import prepare_run
from tests.support.coqui_files import (
    write_imported,
)
from tests.support.corpora import make_corpus, sentence, sine, write_wav
from tests.support.unsorted import cue, unsorted

ROOT = Path(__file__).parents[2]
CPU = Device("cpu")


def card(gb: float) -> Device:
    gpu = Gpu(0, "0000:01:00.0", "GPU-1", "a card", round(gb * 1024))
    return Device("gpu", "GPU-1", 0, gpu)


def found(clips=4000, hours=6.0, median_s=7.0, characters=40) -> Found:
    return Found(clips, hours, median_s, characters)


def settings_of(chosen) -> dict[str, str]:
    pairs = [s.partition("=")[::2] for c in chosen for s in c.settings]
    assert len({k for k, _ in pairs}) == len(pairs)
    return dict(pairs)


# -- settings for a card and for the hours ---------------------------------------------------------


@pytest.mark.parametrize(
    ("gb", "shared", "rows", "recompute"),
    [
        (12, False, 28, True),  # docs/memory.md: 32 rows took 10.1 GB of 10.5, 64 took 13.9
        (16, False, 63, True),
        (24, False, 28, False),  # 32 rows took 21.1 GB of 22.5
        (24, True, 84, True),  # the producers have a sixth
        (80, False, 126, False),
    ],
)
def test_as_many_rows_as_the_card_takes_and_the_recipes_batch(gb, shared, rows, recompute):
    base, chosen = choose(found(), card(gb), shared, True, False)
    s = settings_of(chosen)
    assert base == "finetune_xtts"
    assert int(s["batching.batch_size"]) == rows
    assert ("train.recompute" in s) == recompute
    assert rows * int(s["train.accumulate"]) == 252
    assert all(c.why for c in chosen)


@pytest.mark.parametrize("clips", [1, 3, 9, 37, 400])
def test_few_clips_still_make_batches_and_evaluations(clips):
    s = settings_of(choose(found(clips, 0.05, 2.0), card(24), False, True, True)[1])
    assert 1 <= int(s["batching.batch_size"]) <= max(1, clips // 4)
    assert int(s["batching.buckets"]) >= 1
    assert s["batching.prompt"] == "speaker"
    epochs, every = int(s["train.epochs"]), int(s["train.eval_every"])
    assert epochs == 120  # 60 under half an hour, twice for a new language
    assert s["train.save_every"] == s["samples.every"] == str(every)
    assert 1 < int(s["train.patience"]) < 10  # of at least 10 looks, below: it can end the run
    assert epochs * max(1, clips // 252) // every >= 10


def test_from_nothing_the_recipe_goes_by_hours_and_device():
    for hours, device, base in (
        (2, card(24), "speech"),
        (30, card(24), "ljspeech"),
        (30, CPU, "demo"),
    ):
        named, chosen = choose(found(hours=hours), device, False, False, False)
        assert named == base
        # Its speech goes on getting clearer after the held-out loss has turned (docs/measured.md).
        assert "train.patience" not in settings_of(chosen)
    said = " ".join(finetune_settings.promise(found(hours=2.3), card(24), False, False))
    assert "25 to 27 %" in said
    assert "no folder for Coqui" in said
    assert "minutes are too few" in " ".join(
        finetune_settings.promise(found(), card(24), True, True)
    )


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("device", [CPU, card(12), card(80)], ids=str)
@pytest.mark.parametrize("hours", [0.01, 3, 50])
def test_what_is_chosen_are_settings_that_there_are(begins, device, hours):
    base, chosen = choose(found(hours=hours), device, False, begins, True)
    args = flags.parse(launch._parser("train"), [s for c in chosen for s in c.settings])
    args.config = ROOT / "configs" / f"{base}.yaml"
    resolve.config_of(args)


# -- what lies in a folder -------------------------------------------------------------------------


def test_a_folder_is_sorted_by_what_lies_beside_each_recording(tmp_path):
    for name in ("a/1.wav", "a/2.wav", "talk.wav", "nothing.wav"):
        write_wav(tmp_path / name, sine(2000, 300))
    (tmp_path / "a/1.txt").write_text("One.")
    (tmp_path / "a/2.lab").write_text("Two.")
    (tmp_path / "talk.srt").write_text(cue(1, 0, 1, "Three."))
    got = sort.sort(tmp_path)
    names = [[p.name for p in of] for of in (got.clips, got.segmented, got.bare)]
    assert (got.layout, names) == ("", [["1.wav", "2.wav"], ["talk.wav"], ["nothing.wav"]])
    (tmp_path / "a/1.json").write_text("{}")
    with pytest.raises(BadInput, match=r"1\.wav has a text beside it, and 1\.json too: .*keep one"):
        sort.sort(tmp_path)
    (tmp_path / "a/2.json").write_text("{}")
    with pytest.raises(BadInput, match=r"1\.json too \(as 1 other has\): .*keep one"):
        sort.sort(tmp_path)


def test_a_corpus_stays_one_and_what_transcribe_wrote_is_none(tmp_path):
    assert sort.sort(make_corpus(tmp_path / "lj", 2)).layout == "ljspeech"
    write_wav(tmp_path / "own/1.wav", sine(22050, 300))
    write_wav(tmp_path / "own/2.wav", sine(22050, 300))
    (tmp_path / "own/2.txt").write_text("Known already.")
    heard = []

    def recogniser(folder, device):
        return lambda wave, language: (
            heard.append(len(wave)) or "fa",
            [transcribe.Said(0.0, 1.0, "سلام", 0.9)],
        )

    args = argparse.Namespace(
        folder=str(tmp_path / "own"), model=".", language="fa", device="cpu", max_seconds=11.6,
        settings=[],
    )  # fmt: skip
    transcribe.run(args, lambda line: None, recogniser)
    assert len(heard) == 1  # 2.wav has its text
    got = sort.sort(tmp_path / "own")
    assert (got.layout, len(got.clips), len(got.segmented), len(got.bare)) == ("", 1, 1, 0)
    for folder, says in ((tmp_path / "no", "no such folder"), (tmp_path / "lj/wavs", "")):
        if says:
            with pytest.raises(BadInput, match=says):
                sort.sort(folder)
        else:
            assert len(sort.sort(folder).bare) == 2


# -- the whole, without training -------------------------------------------------------------------


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """`pretrained/` that knows English alone."""
    folder = tmp_path_factory.mktemp("weights")
    write_imported(folder, [(sentence(i, 3), "en") for i in range(8)], 60, ["en"])
    return folder / "pretrained"


@pytest.fixture
def recordings(tmp_path):
    """Three clips with a text, a long one with subtitles, and one with nothing."""
    for i in range(3):
        write_wav(tmp_path / f"rec/{i}.wav", sine(22050 + 3000 * i, 200 + 50 * i))
        (tmp_path / f"rec/{i}.txt").write_text(f"این جملهٔ {i} است")
    write_wav(tmp_path / "rec/talk.wav", sine(22050 * 4, 400))
    cues = cue(1, 0, 2, "سلام دنیا.") + cue(2, 2, 4, "شب به خیر.")
    (tmp_path / "rec/talk.srt").write_text(cues)
    write_wav(tmp_path / "rec/bare.wav", sine(22050, 600))
    return tmp_path / "rec"


class Calls:
    """launch.main, but for training, which creates the run and is interrupted."""

    def __init__(self):
        self.seen: list[list[str]] = []

    def __call__(self, argv: list[str]) -> int:
        self.seen.append(argv)
        if not argv[0].startswith("--"):
            return launch.main(argv)
        config = resolve.config_of(flags.parse(launch._parser("train"), argv))
        prepare_run(config, on_cpu=True, cores=2, out=lambda line: None)
        return INTERRUPTED


def finetuned(calls: Calls, *argv: str) -> tuple[int, str]:
    """(exit code, what was said)."""
    said: list[str] = []
    args = flags.parse(launch._parser("finetune"), list(argv))
    tools = finetune.Tools(calls, sort.sort, languages_of, transcribe.language_of)
    return finetune.run(args, said.append, tools), "\n".join(said)


def test_every_stage_is_said_and_called_and_goes_on_where_it_was_stopped(
    weights, recordings, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    asked = (str(recordings), "--weights", str(weights), "--language", "fa", "--out", "my_voice")
    first = Calls()
    code, said = finetuned(first, *asked, "train.epochs=3", "samples.count=0")
    assert code == INTERRUPTED
    assert [c[0] for c in first.seen] == ["split", "scan", "--config"]
    for call in first.seen:  # as one could type it
        assert f"$ python launch.py {shlex.join(call)}" in said
    assert "left out: 1 recording without a text" in said
    assert "4 clips can be used" in said
    assert "The language is new to these weights" in said
    assert "the same finetune command goes on there" in said
    run = resolve.recorded_settings.load(tmp_path / "runs/my_voice/config.yaml")
    assert [s.path for s in run.data.train] == [str(recordings), f"{tmp_path}/runs/my_voice-clips"]
    assert (run.train.epochs, run.text.extend.languages, run.model.weights) == (
        3, ["fa"], str(weights),
    )  # fmt: skip
    second = Calls()
    code, said = finetuned(second, *asked)
    assert code == INTERRUPTED
    assert second.seen[1:] == [["--run", "runs/my_voice"]]
    assert "goes on, with the settings chosen when it began" in said
    with pytest.raises(BadInput, match="was made of something else .*--language: fa there, en now"):
        finetuned(Calls(), *asked[:3], "--language", "en", "--out", "my_voice")


def test_a_stage_that_fails_is_the_last(recordings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calls: list[str] = []
    code, said = finetuned(
        lambda argv: calls.append(argv[0]) or 1, str(recordings), "--language", "fa", "--out", "x"
    )
    assert (code, calls) == (1, ["split"])
    assert "mend it, and the same command goes on" in said


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--language", "fa", "--out", "x"], "takes one folder of recordings, not 0"),
        (["rec", "rec2", "--language", "fa", "--out", "x"], "one folder of recordings, not 2"),
        (["rec", "--language", "fa", "--out", "x", "train.epoch=1"], "epochs"),
        (["rec", "--language", "fa", "--out", "x", "--weights", "none"], "is not there"),
        (["rec", "--out", "x"], "--language"),
        (["rec", "--language", "farsi", "--out", "x"], "did you mean fa"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_done(argv, says, recordings, monkeypatch):
    monkeypatch.chdir(recordings.parent)
    with pytest.raises(BadInput, match=says):
        finetuned(lambda a: pytest.fail(f"called {a}"), *argv)


def test_recordings_without_any_text_need_a_recogniser(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_wav(tmp_path / "rec/1.wav", sine(22050, 300))
    with pytest.raises(BadInput, match="the one recording in it has a text .*--recogniser DIR"):
        finetuned(Calls(), "rec", "--language", "fa", "--out", "x")
    calls: list[list[str]] = []
    code, _ = finetuned(
        lambda argv: calls.append(argv) or 1,
        *("rec", "--language", "fa", "--out", "x", "--recogniser", "whisper"),
    )
    assert code == 1
    assert calls == [
        ["transcribe", str(tmp_path / "rec"), "--model", "whisper", "--language", "fa"]
    ]


# -- the whole, trained, and killed twice ----------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("begins", [True, False], ids=["weights", "nothing"])
def test_forty_unsorted_recordings_become_a_voice_though_it_is_killed_twice(
    begins, weights, tmp_path
):
    """SIGKILL while the run begins, SIGINT after its first checkpoint, and then to the end."""
    make_demo_corpus(tmp_path / "demo")
    unsorted(tmp_path / "demo", tmp_path / "rec", "fa")
    length = ["train.epochs=12", "train.save_every=2"] if begins else ["train.max_steps=12"]
    length += [] if begins else ["train.save_every=4", "dvae.max_steps=8", "dvae.save_every=4"]
    argv = [
        *(sys.executable, str(ROOT / "launch.py"), "finetune", "rec", "--language", "fa"),
        *("--out", "voice", *(["--weights", str(weights)] if begins else [])),
        *(*length, "samples.count=1"),
    ]
    run = tmp_path / "runs/voice"

    def until(path: str, how: int | None) -> int:
        """Start it, wait for a file of the run, send the signal."""
        with open(tmp_path / "log", "a") as log:
            child = subprocess.Popen(argv, cwd=tmp_path, stdout=log, stderr=log)
        try:
            end = time.monotonic() + 500
            while how is not None and not list(run.glob(path)) and child.poll() is None:
                assert time.monotonic() < end, (tmp_path / "log").read_text()
                time.sleep(0.1)
            if how is not None:
                os.kill(child.pid, how)
            return child.wait(500)
        finally:
            child.kill()

    assert until("identity.json", signal.SIGKILL) == -signal.SIGKILL
    assert until("checkpoints/step-*", signal.SIGINT) == INTERRUPTED
    assert until("", None) == 0, (tmp_path / "log").read_text()
    steps = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    assert steps[-1]["step"] == 12
    assert (run / "report.html").stat().st_size > 50_000
    said = (tmp_path / "log").read_text()
    assert "synthesize --run" in said
    assert (tmp_path / "voice/model.pth").is_file() == begins
    assert ("no vocoder, so no folder for Coqui" in said) != begins
