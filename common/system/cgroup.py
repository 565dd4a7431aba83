"""How much of the machine a container, a batch system or a systemd unit gives this process: the
limits of its control groups, version 1 or 2.

Limits of the groups above count too. Inside a container the path of a group may be the host's; then
the root of the mount is the container's own group.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_UNLIMITED = 1 << 60  # version 1 writes the largest number of pages for it


def cpu_quota(root: Path = ROOT, own: Path = OWN) -> float | None:
    """CPU time that may be used, in CPUs; None: no limit."""
    found = []
    for folder in _folders("cpu", root, own):
        of_version_1 = _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
        for words in (_words(folder / "cpu.max"), of_version_1):
            if len(words) == 2 and min(numbers := [_number(word) for word in words]) > 0:
                found.append(numbers[0] / numbers[1])
    return min(found, default=None)


def memory_limit(root: Path = ROOT, own: Path = OWN) -> int | None:
    """The memory limit in bytes; None: no limit."""
    found = []
    for folder in _folders("memory", root, own):
        for name in ("memory.max", "memory.limit_in_bytes"):
            found += [n for word in _words(folder / name) if 0 < (n := _number(word)) < _UNLIMITED]
    return min(found, default=None)


def oom_kills(root: Path = ROOT, own: Path = OWN) -> int:
    """How many processes of this group and its subgroups the kernel has killed for memory. Groups
    above are not counted: their kills may be somebody else's.
    """
    for folder in sorted(_folders("memory", root, own), key=lambda f: -len(f.parts)):
        for name in ("memory.events", "memory.oom_control"):
            words = _words(folder / name)
            if "oom_kill" in words[:-1]:
                return _number(words[words.index("oom_kill") + 1])
    return 0


def _folders(controller: str, root: Path, own: Path) -> Iterator[Path]:
    """The folders of this process's group and of those above, as far as they are visible."""
    for line in _text(own).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controller in controllers.split(","):
            tops = [root / controllers, root / controller]
        elif not controllers:
            tops = [root, root / "unified"]
        else:
            continue
        for top in tops:
            folder = top / path.lstrip("/")
            yield top
            while folder != top and top in folder.parents:
                yield folder
                folder = folder.parent


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, ValueError):
        return ""


def _words(file: Path) -> list[str]:
    return _text(file).split()


def _number(word: str) -> int:
    """The number; -1 if it is none ("max")."""
    return int(word) if word.isascii() and word.isdigit() else -1
