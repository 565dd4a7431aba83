"""How busy GPUs are: utilisation and memory by NVML, sampled in a thread.

On a machine without the driver there is nothing to sample.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from common.gpu.listing import list_gpus

SAMPLE_S = 0.25
LOOK_S = 5.0
_UUID = re.compile(r"(?:GPU|MIG)-[0-9a-f-]{36}")


@dataclass(frozen=True)
class Use:
    """One card over a stretch of time: mean utilisation in %, the most memory taken, and its total
    memory.
    """

    index: int
    roles: tuple[str, ...]
    percent: float
    memory_mb: int
    total_mb: int

    def __str__(self) -> str:
        return (
            f"GPU {self.index} ({', '.join(self.roles)}) {self.percent:.0f} %,"
            f" {self.memory_mb / 1024:.1f} of {self.total_mb / 1024:.0f} GB"
        )


def uuid_of(label: str) -> str | None:
    """The UUID within a device's label (`common.gpu.device.DeviceInfo.label`); None: not a GPU."""
    match = _UUID.search(label)
    return match[0] if match else None


class GpuUse:
    """Samples the cards that `labels()` names: role → device label.

    Looked up now and then, as producers come and go.

    nvml: the module to ask; None: nvidia-ml-py, where it is installed and a driver answers.
    """

    def __init__(self, labels: Callable[[], Iterable[tuple[str, str]]], nvml=None):
        self._labels, self._nvml = labels, nvml or _driver()
        self._lock = threading.Lock()
        self._samples: dict[str, list[tuple[float, int]]] = {}
        self._roles: dict[str, tuple[str, ...]] = {}
        self._facts: dict[str, tuple[object, int, int]] = {}  # UUID → handle, index, total MB
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-use", daemon=True)
        if self._nvml is not None:
            self._thread.start()

    def take(self, keep: bool = False) -> list[Use]:
        """Each card since the last call, in order of index; [] without a GPU.

        `keep`: the next call will tell of the same time, too.
        """
        with self._lock:
            samples = {uuid: list(values) for uuid, values in self._samples.items()}
            if not keep:
                self._samples = {}
            roles, facts = dict(self._roles), dict(self._facts)
        uses = []
        for uuid, values in samples.items():
            _, index, total = facts[uuid]
            percent = sum(p for p, _ in values) / len(values)
            uses.append(Use(index, roles.get(uuid, ()), percent, max(m for _, m in values), total))
        return sorted(uses, key=lambda u: u.index)

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(2.0)

    def _run(self) -> None:
        looked = float("-inf")
        while not self._closed.wait(SAMPLE_S):
            if time.monotonic() - looked > LOOK_S:
                looked = time.monotonic()
                self._look()
            self._sample()

    def _look(self) -> None:
        roles: dict[str, tuple[str, ...]] = {}
        for role, label in self._labels():
            uuid = uuid_of(label)
            if uuid is not None and role not in roles.get(uuid, ()):
                roles[uuid] = (*roles.get(uuid, ()), role)
        known = (
            {g.uuid: g for g in list_gpus(self._nvml).gpus} if set(roles) - set(self._facts) else {}
        )
        try:
            self._nvml.nvmlInit()  # again: listing shuts it down
            for uuid in set(roles) & set(known):
                handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
                self._facts[uuid] = (handle, known[uuid].index, known[uuid].memory_mb)
        except self._nvml.NVMLError:  # a card that fell off the bus: the trainer will report it
            return
        with self._lock:
            self._roles = roles

    def _sample(self) -> None:
        for uuid in list(self._roles):
            if uuid not in self._facts:
                continue
            handle = self._facts[uuid][0]
            try:
                percent = float(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
                used = self._nvml.nvmlDeviceGetMemoryInfo(handle).used >> 20
            except self._nvml.NVMLError:  # a MIG slice has no utilisation of its own
                continue
            with self._lock:
                self._samples.setdefault(uuid, []).append((percent, used))


def _driver():
    """nvidia-ml-py, initialised; None where it or the driver is not there."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml
