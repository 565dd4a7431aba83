"""Limits of control groups, read from folders that look like the kernel's."""

import os
import types

import pytest

from common.launcher.child import ProcessSpec, Program
from common.launcher.supervise import Child, Supervisor
from common.run import settings as config
from common.system import cgroup
from common.system.cores import cores
from common.system.errors import BadInput
from producer.creation.prepare import prepare_run
from tests.support.arithmetic_runs import settings
from tests.support.corpora import make_corpus

HERE = len(os.sched_getaffinity(0))


@pytest.fixture
def machine(tmp_path):
    """(own groups, files) → where to look."""

    def write(own: str, files: dict[str, str]):
        root = tmp_path / "cgroup"
        for name, text in files.items():
            file = root / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        (tmp_path / "own").write_text(own)
        return root, tmp_path / "own"

    return write


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max 100000", HERE),
        ("50000 100000", 1),
        ("100000 100000", 1),
        ("99900000 100000", HERE),
        ("nonsense", HERE),
        ("", HERE),
        ("1 2 3", HERE),
        ("0 0", HERE),
    ],
)
def test_cores_is_the_affinity_or_a_containers_quota(machine, text, expected):
    assert cores(*machine("0::/\n", {"cpu.max": text})) == expected


def test_without_groups_there_is_no_limit(tmp_path):
    nowhere = tmp_path / "absent", tmp_path / "absent"
    assert cores(*nowhere) == HERE
    assert cgroup.memory_limit(*nowhere) is None
    assert cgroup.oom_kills(*nowhere) == 0


def test_the_least_limit_of_all_groups_above_counts(machine):
    files = {
        "a/b/cpu.max": "max 100000\n",
        "a/cpu.max": "150000 100000\n",
        "a/b/memory.max": "3000000000\n",
        "a/memory.max": "2000000000\n",
        "memory.max": "max\n",
        "other/memory.max": "1\n",
        "a/b/memory.events": "low 0\noom 3\noom_kill 2\noom_group_kill 0\n",
    }
    where = machine("0::/a/b\n", files)
    assert cgroup.cpu_quota(*where) == 1.5
    assert cgroup.memory_limit(*where) == 2_000_000_000
    assert cgroup.oom_kills(*where) == 2


def test_version_1_has_a_tree_for_each_controller(machine):
    files = {
        "cpu,cpuacct/job/cpu.cfs_quota_us": "50000\n",
        "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
        "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "memory/job/memory.limit_in_bytes": "1500000000\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n",
    }
    where = machine("4:memory:/job\n2:cpu,cpuacct:/job\n1:name=systemd:/\n0::/\n", files)
    assert cgroup.cpu_quota(*where) == 0.5
    assert cgroup.memory_limit(*where) == 1_500_000_000
    assert cgroup.oom_kills(*where) == 7


def test_in_a_container_the_mount_is_its_own(machine):
    """The path is the host's, and cannot be seen."""
    where = machine("4:memory:/docker/5e1f\n", {"memory/memory.limit_in_bytes": "1000000\n"})
    assert cgroup.memory_limit(*where) == 1_000_000


def test_a_path_does_not_lead_out_of_the_tree(machine):
    where = machine("0::/../../secret\n", {"memory.max": "5\n", "../secret/memory.max": "1\n"})
    assert cgroup.memory_limit(*where) in (None, 5)


def test_a_process_killed_for_memory_is_said_to_be(tmp_path, monkeypatch):
    kills = [0]
    monkeypatch.setattr(cgroup, "oom_kills", lambda: kills[0])
    monkeypatch.setattr(cgroup, "memory_limit", lambda: 2_000_000_000)
    said = []
    view = types.SimpleNamespace(say=said.append, failure=lambda *_: None, stopping=lambda: None)
    spec = ProcessSpec("producer-0", "producer", ("true",), tmp_path / "log")
    supervisor = Supervisor(Program(tmp_path, (spec,)), view)
    for code, killed in ((-9, 0), (-9, 1), (1, 2), (-9, 2)):
        kills[0] = killed
        supervisor._failed(Child(spec), code, 1)
    of_memory = ["this container or job has used up its 2000 MB" in line for line in said]
    assert of_memory == [False, True, False, False], said


def test_batches_take_no_more_than_half_of_a_containers_memory(tmp_path, monkeypatch):
    make_corpus(tmp_path / "corpus", 12, seconds=0.6)
    tree = config.parse(settings(tmp_path / "run", tmp_path / "corpus"))
    monkeypatch.setattr(cgroup, "memory_limit", lambda: 100)
    with pytest.raises(BadInput, match=r"over half of the 0 MB that this container or job may use"):
        prepare_run(tree, on_cpu=True, cores=2, out=lambda line: None)
    monkeypatch.setattr(cgroup, "memory_limit", lambda: None)
    prepare_run(tree, on_cpu=True, cores=2, out=lambda line: None)
