"""A machine that gives little: no home folder, no entry in the list of users, 256 open files, a
/dev/shm of 64 MB, a working directory and a run folder that cannot be written.
"""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from common.launcher.child import ProcessSpec, Running
from common.system.errors import BadInput, RunError
from tests.support.chaos import LAUNCH, ROOT
from tests.support.corpora import make_corpus
from tests.support.tiny_runs import tiny_tree

USER = 54321  # nobody's
SMALL_SHM = "mount -t tmpfs -o size=64m none /dev/shm && "
# It may read what root may, as the interpreter can lie in root's home, and write nothing.
AS_USER = (
    f"setpriv --reuid {USER} --regid {USER} --clear-groups --inh-caps +dac_read_search"
    " --ambient-caps +dac_read_search "
)


def command(*args: str) -> list[str]:
    """`launch.py` on such a machine: as far as this one lets a test make it."""
    able = os.getuid() == 0 and all(map(shutil.which, ("unshare", "setpriv")))
    able = able and subprocess.run(["unshare", "-m", "true"], check=False).returncode == 0
    home, most = ("", SMALL_SHM) if able else ("HOME=/proc/none ", "")
    env = f"env -i PATH=/usr/bin:/bin {home}PYTHONPATH={ROOT} "
    inside = f'{most}ulimit -n 256 && cd / && exec {AS_USER if able else ""}{env}"$@"'
    return [*(["unshare", "-m"] if able else []), "sh", "-c", inside, "sh", *LAUNCH, *args]


def run(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(*args), capture_output=True, text=True, timeout=280, check=False, errors="replace"
    )


def give(folder: Path, user: int) -> None:
    if os.getuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, user, user)
            path.chmod(path.stat().st_mode & ~0o022)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(a run of the real networks with samples, what its launcher said)."""
    root = tmp_path_factory.mktemp("bare")
    for folder in (root, *root.parents):
        if folder.stat().st_uid == os.getuid():
            folder.chmod(0o755)  # pytest's folders are 0700
        if folder == Path("/tmp"):
            break
    make_corpus(root / "corpus", 14, seconds=lambda i: 0.6 + 0.05 * (i % 9))
    tree = tiny_tree(root, root / "corpus")
    tree["samples"] = {"count": 1, "every": 4}
    tree["train"]["max_steps"] = 6
    (root / "config.yaml").write_text(yaml.safe_dump(tree))
    give(root, USER)
    return root, run("--config", str(root / "config.yaml"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_v7_c40_a_run_trains_and_speaks(trained):
    root, done = trained
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "no samples" not in said
    assert "Matplotlib created" not in said
    assert list((root / "run" / "samples").rglob("*.wav"))
    assert (root / "run" / "report.html").is_file()
    assert not Path("/~").exists()


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="gives the folder away")
@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (("status", "--run", "{run}"), 0, "trainer"),
        (("scan", "data.train={corpus}"), 0, "kept"),
        (("report", "--run", "{run}"), 2, "report.html cannot be written"),
        (("trainer", "--run", "{run}"), 2, "the run folder must be writable"),
        (("producer", "--run", "{run}"), 2, "cannot be written"),
        (("--config", "{root}/config.yaml"), 2, "the run folder must be writable"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_run_folder_that_cannot_be_written_is_read_or_said(trained, args, code, says):
    root, _ = trained
    give(root, 0)
    names = {"root": root, "run": root / "run", "corpus": root / "corpus"}
    done = run(*(a.format(**names) for a in args))
    said = done.stdout + done.stderr
    assert done.returncode == code, said
    assert says in said
    assert "Traceback" not in said
    if code:
        assert len([line for line in said.splitlines() if line.startswith("error: ")]) == 1


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_a_log_that_cannot_be_written_is_bad_input_at_the_start_alone(tmp_path, monkeypatch, code):
    def refuse(self, **options):
        raise OSError(code, os.strerror(code), str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    spec = ProcessSpec("trainer", "trainer", (sys.executable,), tmp_path / "logs" / "trainer.log")
    with pytest.raises(BadInput, match="cannot start trainer: .*the run folder must be writable"):
        Running(spec, 0, 1)
    with pytest.raises(RunError) as raised:  # a disk that fails under a run
        Running(spec, 0, 2)
    assert not isinstance(raised.value, BadInput)
