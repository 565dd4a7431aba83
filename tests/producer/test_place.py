"""Where a run may be created: not among other files, and again where a start was broken off."""

from __future__ import annotations

import errno
import shutil

import pytest

import launch
import tests.support.arithmetic  # noqa: F401 - registers the size
from common.system.errors import BadInput
from producer.creation import prepare
from tests.support.arithmetic_runs import arithmetic_run
from tests.support.corpora import make_corpus


def contents(folder):
    return {
        str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None
        for p in folder.rglob("*")
    }


@pytest.mark.parametrize(
    "name",
    ["clip.wav", "config.yaml", "plan/week.txt", "dvae/a/b/model.safetensors", "home/.a/../x.py"],
)
def test_a_run_is_not_created_among_other_files(tmp_path, name):
    run = tmp_path / "run"
    file = run / name
    for folder in (*reversed(file.parents), file.parent):
        folder.mkdir(exist_ok=True)
    file.write_text("precious")
    before = contents(run)
    top = name.partition("/")[0]
    with pytest.raises(BadInput, match=rf"{run} is no run folder .*\({top}\).*run={run}/run$"):
        arithmetic_run(tmp_path, 12)
    assert contents(run) == before


def test_the_files_are_named_and_counted(tmp_path):
    (tmp_path / "run").mkdir()
    for i in range(5):
        (tmp_path / f"run/{i}.wav").touch()
    (tmp_path / "run/link").symlink_to(tmp_path)
    with pytest.raises(BadInput, match=r"\(0\.wav, 1\.wav, 2\.wav and 3 more\)"):
        arithmetic_run(tmp_path, 12)


def test_the_folder_one_is_in_is_refused_too(tmp_path, monkeypatch, capsys):
    corpus = make_corpus(tmp_path / "corpus", 12, seconds=lambda i: 1.0)
    monkeypatch.chdir(corpus)
    before = contents(corpus)
    argv = [f"data.train={corpus}", "model.size=arithmetic", "devices=auto"]
    assert launch.main(["run=.", *argv]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {corpus} is no run folder and holds other files (")
    assert said.endswith("name another, such as run=run\n")
    assert contents(corpus) == before


def test_what_is_hidden_or_a_log_or_a_disks_own_is_in_nobodys_way(tmp_path):
    run = tmp_path / "run"
    for folder in ("lost+found", ".cache/x", "logs", "plan/empty"):
        (run / folder).mkdir(parents=True)
    for name in (".gitkeep", ".cache/x/y", "job-12.log", "nohup.out", "logs/1.err", "launch.lock"):
        (run / name).write_text("kept")
    assert arithmetic_run(tmp_path, 12).identity["run_id"]
    assert (run / "job-12.log").read_text() == (run / ".cache/x/y").read_text() == "kept"


def test_a_run_goes_on_whatever_was_put_beside_its_files(tmp_path):
    made = arithmetic_run(tmp_path, 12)
    (made.path / "notes.txt").write_text("kept")
    assert arithmetic_run(tmp_path, 12).run_id == made.run_id


def test_a_start_that_was_broken_off_while_the_files_were_moved_in_begins_again(
    tmp_path, monkeypatch
):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(prepare.config_module, "dump", full)
        with pytest.raises(BadInput, match="Make room"):
            arithmetic_run(tmp_path, 12)
    left = {p.name for p in (tmp_path / "run").iterdir()}
    assert {"manifest.sqlite", "plan"} <= left
    assert not left & {".new", "identity.json"}
    assert arithmetic_run(tmp_path, 12).identity["run_id"]


def test_a_start_that_was_killed_begins_again(tmp_path):
    """At any file: those that were made lie in `.new` or have been moved in."""
    run = tmp_path / "run"
    made = arithmetic_run(tmp_path, 12).path.rename(tmp_path / "made")
    names = ["vocab.json", "mel_stats.safetensors", "rejects.tsv", "plan", "config.yaml"]
    for count in range(len(names) + 1):
        shutil.rmtree(run, ignore_errors=True)
        (run / ".new").mkdir(parents=True)
        for name in ["manifest.sqlite", *names][:count]:
            copy = shutil.copytree if (made / name).is_dir() else shutil.copyfile
            copy(made / name, run / name)
        shutil.copytree(made / "plan", run / ".new/plan")
        assert arithmetic_run(tmp_path, 12).run_id
