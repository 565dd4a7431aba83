"""The GPUs of this machine as NVML lists them; loads neither CUDA nor TensorFlow."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """A card, or a MIG slice of one, as NVML names it."""

    index: int
    bus_id: str
    uuid: str
    name: str
    memory_mb: int = 0
    free_mb: int = 0

    def __str__(self) -> str:
        return (
            f"{self.index}  {self.bus_id}  {self.uuid}  {self.name}  {self.memory_mb} MB,"
            f" {self.free_mb} MB free"
        )


@dataclass(frozen=True)
class Listing:
    """The machine's GPUs in NVML order; `reason` says why there are none."""

    gpus: tuple[Gpu, ...] = ()
    reason: str = ""
    driver: str = ""


def list_gpus(nvml=None) -> Listing:
    """Every GPU that NVML knows, with MIG slices in place of their card.

    No driver: an empty listing with the reason.
    """
    if nvml is None:
        try:
            import pynvml as nvml
        except ImportError:
            return Listing(reason="the package nvidia-ml-py is not installed")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as e:
        return Listing(reason=f"no NVIDIA driver answers (NVML: {e})")
    try:
        gpus: list[Gpu] = []
        for i in range(nvml.nvmlDeviceGetCount()):
            card = nvml.nvmlDeviceGetHandleByIndex(i)
            gpus += [
                _describe(nvml, h, card, len(gpus) + k)
                for k, h in enumerate(_slices(nvml, card) or [card])
            ]
        cuda = nvml.nvmlSystemGetCudaDriverVersion()
        driver = (
            f"{_text(nvml.nvmlSystemGetDriverVersion())} (up to CUDA"
            f" {cuda // 1000}.{cuda % 1000 // 10})"
        )
        return Listing(tuple(gpus), "" if gpus else "the driver reports no GPU", driver)
    except nvml.NVMLError as e:
        return Listing(
            reason=f"the NVIDIA driver answers with an error (NVML: {e}); see `nvidia-smi`"
        )
    finally:
        nvml.nvmlShutdown()


def _slices(nvml, card) -> list:
    """The MIG devices of a card; [] if MIG is off or unknown."""
    try:
        if nvml.nvmlDeviceGetMigMode(card)[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            return []
        count = nvml.nvmlDeviceGetMaxMigDeviceCount(card)
    except nvml.NVMLError:
        return []
    found = []
    for i in range(count):
        try:
            found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(card, i))
        except nvml.NVMLError:  # places without a slice
            continue
    return found


def _describe(nvml, handle, card, index: int) -> Gpu:
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        total, free = memory.total >> 20, memory.free >> 20
    except nvml.NVMLError:  # unified memory: NVML does not say
        total, free = 0, 0
    bus_id = _text(nvml.nvmlDeviceGetPciInfo(card).busId)
    return Gpu(
        index,
        bus_id,
        _text(nvml.nvmlDeviceGetUUID(handle)),
        _text(nvml.nvmlDeviceGetName(handle)),
        total,
        free,
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
