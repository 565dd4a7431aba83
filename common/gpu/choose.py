"""Which GPU each process gets.

The parent chooses among those listed (`listing.py`; no CUDA, no TensorFlow), and pins each child by
its environment before its interpreter starts; the child proves with a real operation that it got
the one it was given.

An index counts within the parent's CUDA_VISIBLE_DEVICES where that is set (its entries are handed
on verbatim: indices, UUIDs, MIG names), else in NVML order, which is that of the PCI bus.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from typing import Any, Protocol

from common.gpu.listing import Gpu, Listing
from common.gpu.sharing import CPU, DRIVER_MB, Device, Devices, limit, split_memory
from common.system.errors import BadInput

DEVICE = "XTTS_DEVICE"  # "gpu" or "cpu", for the child
MEMORY_LIMIT = "XTTS_GPU_MEMORY_MB"  # the child's share of the card
# Set by tests/bench/two_trainers.py: trainers on several GPUs have run for minutes alone.
TRIAL = "XTTS_TRY_SEVERAL_GPUS"
CPU_ADVICE = "ask for the CPU with --data-gpu cpu --model-gpu cpu"


class Wanted(Protocol):
    """The settings that choosing reads (`common.run.settings.Config`)."""

    devices: str
    data_gpu: str | None
    model_gpu: str | None
    gpu_memory_mb: int
    producers: Any  # .count
    trainers: Any  # .count, .here (how many are on this host)
    samples: Any  # .device

    def model_copy(self, *, update: dict[str, Any]) -> Wanted:
        """The settings with `update`."""


# -- the parent ------------------------------------------------------------------------------------


def visible_devices(listing: Listing, env: Mapping[str, str]) -> list[Device]:
    """The devices that the user's indices 0, 1, … mean: the parent's CUDA_VISIBLE_DEVICES, else the
    listing.

    As with CUDA, the entries end at the first that names nothing.
    """
    masked = env.get("CUDA_VISIBLE_DEVICES")
    if masked is None:
        return [Device("gpu", g.uuid, i, g) for i, g in enumerate(listing.gpus)]
    pci_order = env.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID") == "PCI_BUS_ID"
    devices: list[Device] = []
    for i, entry in enumerate(e.strip() for e in masked.split(",")):
        gpu = _find(entry, listing)
        if gpu is None and not (entry.startswith("MIG-") and listing.gpus):
            break
        devices.append(Device("gpu", entry, i, gpu if pci_order or not entry.isdigit() else None))
    return devices


def mask_notes(listing: Listing, env: Mapping[str, str]) -> list[str]:
    """What may surprise in CUDA_VISIBLE_DEVICES: an entry that names nothing, which hides those
    after it; and an order of numbers other than the list's.
    """
    masked = env.get("CUDA_VISIBLE_DEVICES")
    notes = []
    if masked is not None and listing.gpus:
        entries = [e.strip() for e in masked.split(",")]
        seen = len(visible_devices(listing, env))
        if seen < len(entries) and entries[seen] not in ("", "-1", "NoDevFiles"):
            behind = f", and hides {', '.join(entries[seen + 1 :])}" if entries[seen + 1 :] else ""
            notes.append(
                f"CUDA_VISIBLE_DEVICES={masked}: {entries[seen]} names no GPU of this machine,"
                f" which has {len(listing.gpus)}{behind}"
            )
    order = env.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if order != "PCI_BUS_ID" and any(e.strip().isdigit() for e in (masked or "").split(",")):
        notes.append(
            f"CUDA_DEVICE_ORDER={order}: CUDA numbers the GPUs in another order than nvidia-smi, so"
            " an index may mean another card, and two may share one; set"
            " PCI_BUS_ID, or name GPUs by UUID"
        )
    return notes


def _find(entry: str, listing: Listing) -> Gpu | None:
    """The GPU of an index or of a UUID's beginning; None: no GPU, or several."""
    if entry.isdigit():
        return listing.gpus[int(entry)] if int(entry) < len(listing.gpus) else None
    found = [
        g for g in listing.gpus if entry.startswith(("GPU-", "MIG-")) and g.uuid.startswith(entry)
    ]
    return found[0] if len(found) == 1 else None


def choose_gpus(config: Wanted, listing: Listing, env: Mapping[str, str]) -> Devices:
    """Devices for the producers and the trainer, from `data_gpu`, `model_gpu` and `devices`.

    Raises:
        BadInput: a device does not exist; the message gives the valid range and the list.
    """
    visible = visible_devices(listing, env)
    notes = mask_notes(listing, env)
    cpu_only = config.devices == "auto" and (not visible or _is_cpu_build())
    if cpu_only and visible and None in (config.data_gpu, config.model_gpu):
        notes.append(
            "this TensorFlow is the CPU build: the GPUs stay unused (pip install"
            " 'tensorflow[and-cuda]' uses them)"
        )
    data = _asked("data_gpu", config.data_gpu, visible, listing, env)
    model = _asked("model_gpu", config.model_gpu, visible, listing, env)
    count = config.trainers.here
    if model is not None and len(model) == 1 and model[0].kind == "cpu":
        model *= count
    if model is not None:
        _check_trainers(config.model_gpu, model, count, config.trainers.count)
    if data is None:
        data = (CPU,) if cpu_only else (_default("data_gpu", visible, model or (), listing, env),)
    if model is None and cpu_only:
        model = (CPU,) * count
    if model is None:
        model = (_default("model_gpu", visible, data, listing, env),)
        model += tuple(d for d in visible if d.card != model[0].card)[: count - 1]
        if len(model) < count:
            raise BadInput(
                f"{count} trainers need {count} GPUs, one each;"
                f" {_what_there_is(visible, listing, env)}"
            )
    if len(data) > max(1, config.producers.count):
        idle = ", ".join(str(d) for d in data[max(1, config.producers.count) :])
        notes.append(
            f"data_gpu={config.data_gpu} names {len(data)} devices for {config.producers.count}"
            f" producer(s): {idle} stays idle; --num-producers {len(data)} uses all"
        )
    if config.trainers.count > 1 and model[0].kind == "gpu" and env.get(TRIAL) != "1":
        raise BadInput(
            f"--num-trainers {config.trainers.count} on GPUs has run for minutes alone, on two"
            " cards of one kind: use --num-trainers 1, or --model-gpu cpu. To try it all the same,"
            f" set {TRIAL}=1"
        )
    devices = Devices(data, model[0], tuple(notes))
    shares = []
    for trainer in model:
        devices = split_memory(replace(devices, trainer=trainer), config)
        shares.append(devices.trainer)
    devices = replace(devices, trainer=shares[0], followers=tuple(shares[1:]))
    limited = any(d.memory_mb for d in (*devices.producers, *devices.trainers))
    if limited and (growth := env.get("TF_FORCE_GPU_ALLOW_GROWTH")) is not None:
        said = (
            f"TF_FORCE_GPU_ALLOW_GROWTH={growth} is ignored where memory is limited: TensorFlow"
            " supports only one of the two"
        )
        devices = replace(devices, notes=(*devices.notes, said))
    return replace(devices, sampler=_for_samples(config, devices, visible, listing, env))


def _check_trainers(asked: str | None, model: tuple[Device, ...], count: int, total: int) -> None:
    """BadInput: not one device for each trainer of this host, `count` of `total`."""
    if len(model) > 1 and count < total:
        raise BadInput(
            f"model_gpu={asked}: with trainers.bind, this command starts one trainer, on one"
            " device; name one, and start the others by `launch.py trainer --rank N --model-gpu X`"
        )
    if len(model) > 1 and count == 1:
        raise BadInput(
            f"model_gpu={asked}: the trainer uses one device; name one, or set --num-trainers"
            f" {len(model)}"
        )
    cards = [d.card for d in model if d.kind == "gpu"]
    if len(model) != count or len(set(cards)) != len(cards) or 0 < len(cards) < count:
        raise BadInput(
            f"model_gpu={asked}: {count} trainers (--num-trainers) use {count} GPUs, one each:"
            f" name {count} different ones, as in --model-gpu {','.join(map(str, range(count)))},"
            " or cpu"
        )


def _for_samples(
    config: Wanted,
    devices: Devices,
    visible: list[Device],
    listing: Listing,
    env: Mapping[str, str],
) -> Device:
    """The device for samples: `samples.device`, else a producer's GPU; never the trainer's, which
    keeps its memory to itself.
    """
    asked = _asked("samples.device", config.samples.device, visible, listing, env)
    if asked is None:
        taken = {d.card for d in devices.trainers}
        return next((d for d in devices.producers if d.kind == "gpu" and d.card not in taken), CPU)
    if len(asked) > 1:
        raise BadInput(
            f"samples.device={config.samples.device}: one process makes the samples; name one"
            " device"
        )
    return asked[0]


def _is_cpu_build() -> bool:
    """Whether the installed TensorFlow is `tensorflow-cpu`, without importing it."""
    try:
        metadata.version("tensorflow-cpu")
    except metadata.PackageNotFoundError:
        return False
    return True


def _asked(
    key: str, value: str | None, visible: list[Device], listing: Listing, env: Mapping[str, str]
) -> tuple[Device, ...] | None:
    """Parse "0", "0,2", "cpu", a UUID or a MIG name; None: not asked."""
    if value is None:
        return None
    return tuple(_one(key, part.strip(), visible, listing, env) for part in str(value).split(","))


def _one(
    key: str, text: str, visible: list[Device], listing: Listing, env: Mapping[str, str]
) -> Device:
    if text.lower() == "cpu":
        return CPU
    if text.isdigit():
        if int(text) < len(visible):
            return visible[int(text)]
        raise BadInput(f"{key}={text}: no such GPU; {_what_there_is(visible, listing, env)}")
    if text.startswith(("GPU-", "MIG-")):
        found = [d for d in visible if (d.gpu.uuid if d.gpu else d.visible).startswith(text)]
        if len(found) == 1:
            return found[0]
        raise BadInput(
            f"{key}={text}: {'several GPUs begin so' if found else 'no such GPU'};"
            f" {_what_there_is(visible, listing, env)}"
        )
    raise BadInput(
        f"{key}={text}: expected an index, a list such as 0,2, a UUID (GPU-…, MIG-…) or cpu;"
        f" {_what_there_is(visible, listing, env)}"
    )


def _default(
    key: str,
    visible: list[Device],
    taken: tuple[Device, ...],
    listing: Listing,
    env: Mapping[str, str],
) -> Device:
    """The first GPU that the other role does not use; else one is shared."""
    if not visible:
        raise BadInput(f"{key}: {_what_there_is(visible, listing, env)}")
    used = {d.card for d in taken}
    return next((d for d in visible if d.card not in used), visible[0])


def _what_there_is(visible: list[Device], listing: Listing, env: Mapping[str, str]) -> str:
    masked = env.get("CUDA_VISIBLE_DEVICES")
    within = (
        ""
        if masked is None
        else f" (CUDA_VISIBLE_DEVICES={masked!r} is set: indices count within it)"
    )
    if not visible:
        why = listing.reason or "CUDA_VISIBLE_DEVICES hides every GPU"
        return f"no GPU is visible: {why}{within}. Fix that, or {CPU_ADVICE}"
    valid = "0" if len(visible) == 1 else f"0 to {len(visible) - 1}"
    lines = [f"  {d.index}: {d.gpu if d.gpu else d.visible}" for d in visible]
    return (
        f"valid: {valid}{within}, or cpu. GPUs (index: NVML index, bus id, UUID, name, memory):\n"
        + "\n".join(lines)
    )


def choose_one(
    config: Wanted, asked: str | None, number: int, listing: Listing, env: Mapping[str, str]
) -> Device:
    """The device of an added producer, the `number`th beyond the run's own, while the run may be
    using its GPUs.

    Raises:
        BadInput: no such device, or it is the trainer's card and too little memory is free.
    """
    if asked is not None and "," in asked:
        raise BadInput(f"--gpu {asked}: one producer uses one device")
    try:
        planned = choose_gpus(
            config if asked is None else config.model_copy(update={"data_gpu": asked}),
            without_use(listing),
            env,
        )
    except BadInput as e:
        raise BadInput(str(e).replace(CPU_ADVICE, "ask for the CPU with --gpu cpu")) from e
    device = planned.producers[number % len(planned.producers)]
    if device.kind == "cpu":
        return CPU
    cap = device.memory_mb or config.gpu_memory_mb or None
    free = next((g.free_mb for g in listing.gpus if device.gpu and g.uuid == device.gpu.uuid), 0)
    if device.card in {d.card for d in planned.trainers} and free:
        cap = min(cap or free, free - DRIVER_MB)
        if cap < 512:
            raise BadInput(
                f"GPU {device.index} is the trainer's and has {free} MB free, too little for"
                " another producer; use --gpu cpu or another GPU"
            )
    return limit(device, cap)


def without_use(listing: Listing) -> Listing:
    """The listing as if nothing ran: the memory in use now may be this run's own."""
    return Listing(
        tuple(replace(g, free_mb=0) for g in listing.gpus), listing.reason, listing.driver
    )


def child_env(device: Device, env: Mapping[str, str]) -> dict[str, str | None]:
    """The environment that pins one child; None removes a variable.

    Libraries that would start a thread per core get one thread: processes would take the cores from
    each other, and the number must not depend on the machine, because a BLAS's thread count changes
    bits. TensorFlow's own threads come from the run's settings.
    """
    set_: dict[str, str | None] = {
        "CUDA_VISIBLE_DEVICES": device.visible,
        "CUDA_DEVICE_ORDER": env.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
        DEVICE: device.kind,
        MEMORY_LIMIT: str(device.memory_mb) if device.memory_mb else None,
        "TF_CPP_MIN_LOG_LEVEL": env.get("TF_CPP_MIN_LOG_LEVEL", "1"),
        "PYTHONUNBUFFERED": "1",
    }
    if device.memory_mb:
        # A limit reserves its share at once; TensorFlow raises if growth is set as well. The limit
        # wins.
        set_["TF_FORCE_GPU_ALLOW_GROWTH"] = None
    elif device.kind == "gpu":
        set_["TF_FORCE_GPU_ALLOW_GROWTH"] = env.get("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    for name in (
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "MKL_NUM_THREADS",
        "NUMEXPR_NUM_THREADS",
        "NUMBA_NUM_THREADS",
    ):
        set_[name] = env.get(name, "1")
    return set_
