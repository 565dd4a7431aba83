"""A file system that has no locks: NFS without its lock service, Lustre mounted without flock."""

from __future__ import annotations

import errno
import fcntl
import os

import pytest

from common.system import lock
from common.system.errors import BadInput


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
@pytest.mark.parametrize("what", ["take", "look"])
def test_s2_a_disk_without_locks_is_one_line(tmp_path, monkeypatch, code, what):
    def refuse(fd, how):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    path = tmp_path / "lock"
    path.touch()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(BadInput, match=rf"cannot lock {path}: .*Put the run folder on a disk"):
        lock.lock(path, "w") if what == "take" else lock.holder(path)
    assert len(os.listdir("/proc/self/fd")) == before
