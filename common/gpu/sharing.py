"""The devices that processes compute on, and how processes divide the memory of a shared card."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

from common.gpu.listing import Gpu
from common.system.errors import BadInput

# Per process, in addition to TensorFlow's limit: the context, libraries, programs. The child
# measures its card and lowers its limit if that needs more.
DRIVER_MB = 1200


@dataclass(frozen=True)
class Device:
    """What one process computes on.

    `visible` is its CUDA_VISIBLE_DEVICES, `index` the user's number for it.
    """

    kind: str  # "gpu" or "cpu"
    visible: str = "-1"
    index: int | None = None
    gpu: Gpu | None = None  # None where NVML cannot tell which card an entry means
    memory_mb: int | None = None  # hard limit; None: grows as needed

    @property
    def card(self) -> str:
        """Identifies the card when comparing devices: one card may have several entries in
        CUDA_VISIBLE_DEVICES.
        """
        return self.gpu.uuid if self.gpu else self.visible

    def __str__(self) -> str:
        if self.kind == "cpu":
            return "CPU"
        card = self.visible
        if self.gpu:
            physical = "" if self.gpu.index == self.index else f"physical {self.gpu.index}, "
            card = f"{physical}{self.gpu.bus_id}, {self.gpu.uuid}, {self.gpu.name}"
        limit = f", at most {self.memory_mb} MB" if self.memory_mb else ""
        return f"GPU {'' if self.index is None else self.index} ({card}{limit})"


CPU = Device("cpu")


@dataclass(frozen=True)
class Devices:
    """The devices of a run's processes; `producers` are used in turn. `notes`: lines for the user.

    `followers`: those of the second trainer, the third and so on.
    """

    producers: tuple[Device, ...]
    trainer: Device
    notes: tuple[str, ...] = ()
    sampler: Device = CPU
    followers: tuple[Device, ...] = ()

    @property
    def trainers(self) -> tuple[Device, ...]:
        """The devices of all trainers."""
        return self.trainer, *self.followers

    @property
    def on_cpu(self) -> bool:
        """True if no process uses a GPU."""
        return all(d.kind == "cpu" for d in (*self.trainers, *self.producers))


class Sharing(Protocol):
    """The settings that dividing reads."""

    gpu_memory_mb: int
    producers: Any  # .count


def split_memory(devices: Devices, config: Sharing) -> Devices:
    """Set hard limits where producers share the trainer's card, so that neither can take the
    other's memory later.

    Producers together get a sixth of what is free (or `gpu_memory_mb` each), each process DRIVER_MB
    on top, the trainer the rest.
    """
    count = max(1, config.producers.count)
    shared = [
        i
        for i in range(count)
        if devices.producers[i % len(devices.producers)].card == devices.trainer.card
    ]
    if devices.trainer.kind == "cpu" or not shared:
        if config.gpu_memory_mb and devices.producers[0].kind == "gpu":
            limited = tuple(limit(d, config.gpu_memory_mb) for d in devices.producers)
            return replace(devices, producers=limited)
        return devices
    card = devices.trainer.gpu
    if card is None or not card.memory_mb:
        note = (
            "producers and trainer share a GPU of unknown size: no memory split, both grow as"
            " needed; gpu_memory_mb caps the producers"
        )
        cap = config.gpu_memory_mb or None
        return Devices(
            tuple(limit(d, cap) for d in devices.producers),
            devices.trainer,
            (*devices.notes, note),
        )
    usable = min(card.memory_mb, card.free_mb or card.memory_mb) - DRIVER_MB * (1 + len(shared))
    cap = config.gpu_memory_mb or max(
        512, min(card.memory_mb, card.free_mb or card.memory_mb) // 6 // len(shared)
    )
    rest = usable - cap * len(shared)
    where, who = f"GPU {devices.trainer.index}", f"{len(shared)} producer(s)"
    if rest < 1024:
        raise BadInput(
            f"{where} has {card.free_mb} of {card.memory_mb} MB free: {who} of {cap} MB and the"
            f" CUDA contexts leave {rest} MB for the trainer. Free the card (nvidia-smi shows who"
            " uses it), lower gpu_memory_mb, or use --data-gpu cpu"
        )
    note = (
        f"{where} is shared: {who} get {cap} MB each, the trainer {rest} MB, and {DRIVER_MB} MB"
        " stay free for the driver's part of each (gpu_memory_mb changes it)"
    )
    producers = tuple(
        limit(d, cap) if d.card == devices.trainer.card else d for d in devices.producers
    )
    return Devices(producers, limit(devices.trainer, rest), (*devices.notes, note))


def limit(device: Device, memory_mb: int | None) -> Device:
    """`device` with a hard limit; the CPU has none."""
    return (
        device
        if device.kind == "cpu"
        else Device("gpu", device.visible, device.index, device.gpu, memory_mb)
    )
