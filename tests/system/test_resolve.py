"""Which run and which settings a command line is about, where it names no file of settings."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import launch
from common.launcher import flags, resolve
from common.run import settings as config_module
from common.system.errors import BadInput
from producer.creation.prepare import prepare_run
from tests.support.arithmetic_runs import arithmetic_run, assert_exact, settings
from tests.support.corpora import make_corpus
from tests.support.loop_runs import train

ROOT = Path(launch.__file__).parent


def args(*argv, command="train"):
    return flags.parse(launch._parser(command), list(map(str, argv)))


def test_a_run_that_exists_is_named_by_its_folder_alone(tmp_path):
    run = arithmetic_run(tmp_path)
    for argv in (
        ("--run", run.path),
        (f"run={run.path}", "--max-steps", "70"),
        ("--checkpoint-dir", run.path),
    ):
        assert resolve.settings_file(args(*argv)) == run.path / "config.yaml"
    config = resolve.config_of(args("--run", run.path, "--max-steps", "70"))
    assert config.model_copy(update={"train": run.config.train}) == run.config
    assert config.train.max_steps == 70
    assert resolve.run_dir_of(args("--run", run.path, command="stop")) == run.path
    with pytest.raises(BadInput, match="seed=2: this command only takes the run folder"):
        resolve.run_dir_of(args("--run", run.path, "seed=2", command="stop"))


def test_a_corpus_of_ones_own_is_not_trained_on_as_the_demo_is(tmp_path):
    configs = ROOT / "configs"
    assert resolve.settings_file(args()) == configs / "demo.yaml"
    assert (
        resolve.settings_file(args("--max-steps", "5", f"run={tmp_path}/new"))
        == configs / "demo.yaml"
    )
    for argv in (
        ("data.train=/data/fa", "data.language=fa"),
        ("--train-data", "/data/fa"),
        ("data={train: /data/fa}",),
    ):
        assert resolve.settings_file(args(*argv)) == configs / "ljspeech.yaml"
        begun = args(*argv, "model.weights=/w/pretrained")
        assert resolve.settings_file(begun) == configs / "finetune_xtts.yaml"
        assert resolve.config_of(begun).model.weights == "/w/pretrained"
    assert resolve.settings_file(args("--config", "mine.yaml", "data.train=/data/fa")) == Path(
        "mine.yaml"
    )


def test_a_command_about_an_existing_run_finds_the_one_that_training_would_make(
    tmp_path, monkeypatch
):
    """Also where only the settings' file names it."""
    monkeypatch.chdir(tmp_path)
    make_corpus(tmp_path / "corpus", 12, seconds=0.6)
    tree = settings(Path("runs/ljspeech"), tmp_path / "corpus")
    run = prepare_run(config_module.parse(tree), on_cpu=True, cores=2, out=lambda line: None)
    for argv in ((f"data.train={tmp_path}/corpus",), ("--train-data", f"{tmp_path}/corpus")):
        asked_for = args(*argv, command="profile")
        assert resolve.config_of(asked_for).run == "runs/ljspeech"
        config, changed = resolve.existing_run(asked_for)
        assert (config.run_dir.resolve(), changed) == (run.path.resolve(), ["data.train"])
        assert config.model.size == "arithmetic"


def test_launch_with_the_run_alone_goes_on_with_it(tmp_path):
    run = arithmetic_run(tmp_path, train__max_steps=5, dvae__max_steps=2)
    train(run)
    (tmp_path / "elsewhere").mkdir()
    command = [sys.executable, str(ROOT / "launch.py"), "--run", str(run.path), "--max-steps", "8"]
    done = subprocess.run(
        command, cwd=tmp_path / "elsewhere", capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"settings: {run.path}/config.yaml" in done.stdout
    assert "at gpt step 5" in done.stdout
    assert not list((tmp_path / "elsewhere").iterdir()), "no corpus, no run of the demo's"
    assert_exact(arithmetic_run(tmp_path, train__max_steps=8, dvae__max_steps=2))


def test_a_terminal_that_knows_ascii_alone_still_gets_the_message(tmp_path):
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, str(ROOT / "launch.py"), "status", "--run", str(tmp_path / "سلام")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=env)
    assert done.returncode == 2
    assert done.stderr.startswith("error: no process has reported in")
    assert "\\u0633\\u0644" in done.stderr
