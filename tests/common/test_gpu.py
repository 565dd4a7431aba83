"""Choosing and pinning GPUs, over listings and NVML libraries made for the purpose."""

from __future__ import annotations

import pytest

from common.gpu import choose
from common.gpu.choose import CPU, DRIVER_MB
from common.gpu.listing import Gpu, Listing, list_gpus
from common.run import settings as config
from common.system.errors import BadInput


def cards(n: int, memory_mb: int = 24_000) -> Listing:
    return Listing(
        tuple(
            Gpu(i, f"0000:{i + 1:02x}:00.0", f"GPU-{i:08x}-aaaa", "Card", memory_mb, memory_mb)
            for i in range(n)
        ),
        driver="580.1",
    )


TRIAL = {choose.TRIAL: "1"}
NONE = Listing(reason="no NVIDIA driver answers (NVML: Driver Not Loaded)")


def settings(**values):
    count, trainers = values.pop("count", 1), values.pop("trainers", 1)
    train = {"train": {"accumulate": trainers}, "trainers": {"count": trainers}}
    return config.parse({**values, **train, "producers": {"count": count}})


def visible(devices):
    return [d.visible for d in devices.producers], devices.trainer.visible


# -- choosing --------------------------------------------------------------------------------------


def test_two_gpus_are_used_by_default_and_handed_on_as_uuids():
    d = choose.choose_gpus(settings(), cards(2), {})
    assert visible(d) == (["GPU-00000000-aaaa"], "GPU-00000001-aaaa")
    assert d.trainer.memory_mb is None
    assert str(d.trainer) == "GPU 1 (0000:02:00.0, GPU-00000001-aaaa, Card)"


def test_a_device_that_is_given_moves_the_default_of_the_other():
    assert visible(choose.choose_gpus(settings(model_gpu="0"), cards(2), {})) == (
        ["GPU-00000001-aaaa"],
        "GPU-00000000-aaaa",
    )
    assert (
        visible(choose.choose_gpus(settings(data_gpu="0,1"), cards(3), {}))[1]
        == "GPU-00000002-aaaa"
    )


def test_producers_go_round_robin_over_a_list():
    d = choose.choose_gpus(settings(data_gpu="0,2", model_gpu="1", count=3), cards(3), {})
    assert visible(d) == (["GPU-00000000-aaaa", "GPU-00000002-aaaa"], "GPU-00000001-aaaa")
    assert not d.notes
    idle = choose.choose_gpus(settings(data_gpu="0,2", model_gpu="1", count=1), cards(3), {})
    assert "GPU 2" in idle.notes[0]
    assert "stays idle" in idle.notes[0]


def test_each_trainer_gets_a_card_and_a_producer_may_share_any():
    d = choose.choose_gpus(settings(trainers=2), cards(2), TRIAL)
    assert [t.visible[:12] for t in d.trainers] == ["GPU-00000001", "GPU-00000000"]
    shared = [t.memory_mb is not None for t in d.trainers]
    assert (shared, d.producers[0].memory_mb is not None) == ([False, True], True)
    assert d.sampler == CPU
    asked = {"model_gpu": "0,2", "data_gpu": "1", "trainers": 2}
    d = choose.choose_gpus(settings(**asked), cards(3), TRIAL)
    assert [t.index for t in d.trainers] == [0, 2]
    assert not any(t.memory_mb for t in (*d.trainers, *d.producers))
    on_cpu = choose.choose_gpus(settings(model_gpu="cpu", data_gpu="cpu", trainers=3), NONE, {})
    assert on_cpu.trainers == (CPU,) * 3
    assert on_cpu.on_cpu


@pytest.mark.parametrize(
    ("cards_there", "values", "expected"),
    [
        (2, {}, "GPU-00000000-aaaa"),  # the producers'
        (1, {}, "-1"),  # the trainer's, whose memory is divided: the CPU
        (2, {"data_gpu": "cpu"}, "-1"),
        (3, {"data_gpu": "1,2", "model_gpu": "1", "count": 2}, "GPU-00000002-aaaa"),
        (3, {"samples": {"device": "2"}}, "GPU-00000002-aaaa"),
        (2, {"samples": {"device": "cpu"}}, "-1"),
    ],
)
def test_samples_are_made_where_the_trainer_is_not(cards_there, values, expected):
    d = choose.choose_gpus(settings(**values), cards(cards_there), {}).sampler
    assert d.visible == expected
    assert d.memory_mb is None


@pytest.mark.parametrize(
    ("device", "words"),
    [("9", "samples.device=9: no such GPU; valid: 0 to 1"), ("0,1", "name one device")],
)
def test_a_device_for_samples_that_cannot_be_is_refused(device, words):
    with pytest.raises(BadInput, match=words):
        choose.choose_gpus(settings(samples={"device": device}), cards(2), {})


@pytest.mark.parametrize(
    ("masked", "asked", "expected"),
    [
        ("1,0", "0", "1"),
        ("GPU-00000002,0", "0", "GPU-00000002"),
        ("GPU-00000002,0", "1", "0"),
        ("2,-1,0", "0", "2"),
        (" 1 , 2 ", "1", "2"),
    ],
)
def test_indices_count_within_the_parents_mask_and_entries_go_on_verbatim(masked, asked, expected):
    d = choose.choose_gpus(
        settings(data_gpu="cpu", model_gpu=asked), cards(3), {"CUDA_VISIBLE_DEVICES": masked}
    )
    assert d.trainer.visible == expected
    assert d.trainer.index == int(asked)


def test_mask_entries_end_at_the_first_that_names_nothing():
    listing = cards(3)
    assert len(choose.visible_devices(listing, {"CUDA_VISIBLE_DEVICES": "2,9,0"})) == 1
    assert choose.visible_devices(listing, {"CUDA_VISIBLE_DEVICES": ""}) == []
    assert choose.visible_devices(listing, {"CUDA_VISIBLE_DEVICES": "-1"}) == []
    assert len(choose.visible_devices(listing, {"CUDA_VISIBLE_DEVICES": "MIG-1234,MIG-5678"})) == 2


@pytest.mark.parametrize("masked", ["0,GPU-00000000-aaaa", "GPU-00000000,0", "1,GPU-00000001"])
def test_s5_two_entries_of_one_card_share_it(masked):
    env = {"CUDA_VISIBLE_DEVICES": masked}
    d = choose.choose_gpus(settings(data_gpu="0", model_gpu="1"), cards(2), env)
    assert d.producers[0].memory_mb
    assert d.trainer.memory_mb
    assert "is shared" in d.notes[0]
    assert d.sampler is CPU
    by_default = choose.choose_gpus(
        settings(), cards(2), {"CUDA_VISIBLE_DEVICES": "0,GPU-00000000,1"}
    )
    assert visible(by_default) == (["0"], "1")
    assert by_default.trainer.memory_mb is None
    config_ = settings(data_gpu="0", model_gpu="1")
    extra = choose.choose_one(config_, None, 0, cards(2, 24_000), env)
    assert extra.memory_mb


@pytest.mark.parametrize(
    ("masked", "named"),
    [
        ("0,7", "7 names no GPU of this machine, which has 2"),
        ("1,GPU-ffff,0", "GPU-ffff names no GPU of this machine, which has 2, and hides 0"),
        ("0,x", "x names no GPU"),
        ("0,1", None),
        ("0,-1", None),
        ("", None),
    ],
)
def test_s6_an_entry_that_names_nothing_is_named(masked, named):
    notes = choose.mask_notes(cards(2), {"CUDA_VISIBLE_DEVICES": masked})
    assert (named in notes[0]) if named else notes == []


def test_s6_a_device_has_its_logical_and_its_physical_index():
    env = {"CUDA_VISIBLE_DEVICES": "5,6"}
    d = choose.choose_gpus(settings(), cards(8), env)
    assert str(d.trainer) == "GPU 1 (physical 6, 0000:07:00.0, GPU-00000006-aaaa, Card)"
    assert d.notes == ()


def test_another_device_order_is_warned_about_where_indices_are_used():
    env = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert "another order than nvidia-smi" in choose.mask_notes(cards(2), env)[0]
    by_uuid = env | {"CUDA_VISIBLE_DEVICES": "GPU-00000000,GPU-00000001"}
    assert choose.mask_notes(cards(2), by_uuid) == []


def test_an_index_under_another_device_order_is_not_claimed_to_be_a_known_card():
    d = choose.visible_devices(
        cards(2), {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    )
    assert d[0].visible == "0"
    assert d[0].gpu is None


@pytest.mark.parametrize(
    ("values", "listing", "env", "words"),
    [
        (
            {"data_gpu": "99"},
            cards(2),
            {},
            ["data_gpu=99: no such GPU", "valid: 0 to 1", "GPU-00000001-aaaa", "0000:01:00.0"],
        ),
        (
            {"data_gpu": "0", "model_gpu": "1"},
            cards(1),
            {},
            ["model_gpu=1: no such GPU", "valid: 0", "GPU-00000000-aaaa"],
        ),
        (
            {"model_gpu": "1"},
            cards(2),
            {"CUDA_VISIBLE_DEVICES": "1"},
            ["valid: 0", "CUDA_VISIBLE_DEVICES='1' is set"],
        ),
        (
            {},
            NONE,
            {},
            ["no GPU is visible", "Driver Not Loaded", "--data-gpu cpu --model-gpu cpu"],
        ),
        ({"data_gpu": "cpu"}, NONE, {}, ["model_gpu: no GPU is visible"]),
        ({}, cards(2), {"CUDA_VISIBLE_DEVICES": ""}, ["hides every GPU"]),
        ({"model_gpu": "first"}, cards(2), {}, ["expected an index"]),
        ({"model_gpu": "0,1"}, cards(2), {}, ["the trainer uses one device"]),
        ({"model_gpu": "0,1"}, cards(2), TRIAL, ["or set --num-trainers 2"]),
        ({"model_gpu": "0", "trainers": 2}, cards(2), TRIAL, ["as in --model-gpu 0,1"]),
        ({"model_gpu": "0,0", "trainers": 2}, cards(2), TRIAL, ["name 2 different ones"]),
        ({"model_gpu": "0,cpu", "trainers": 2}, cards(2), TRIAL, ["use 2 GPUs, one each"]),
        ({"trainers": 3}, cards(2), TRIAL, ["3 trainers need 3 GPUs", "valid: 0 to 1"]),
        ({"trainers": 2}, cards(2), {}, ["has run for minutes alone", choose.TRIAL]),
        ({"model_gpu": "GPU-ffff"}, cards(2), {}, ["no such GPU"]),
        ({"model_gpu": "GPU-0000000"}, cards(2), {}, ["several GPUs begin so"]),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(values, listing, env, words):
    with pytest.raises(BadInput) as e:
        choose.choose_gpus(settings(**values), listing, env)
    for w in words:
        assert w in str(e.value)


def test_cpu_only_when_asked_for_or_auto():
    asked = choose.choose_gpus(settings(data_gpu="cpu", model_gpu="cpu"), cards(2), {})
    assert (asked.producers, asked.trainer) == ((CPU,), CPU)
    auto = choose.choose_gpus(settings(devices="auto"), NONE, {})
    assert auto.on_cpu
    mixed = choose.choose_gpus(settings(data_gpu="cpu", model_gpu="GPU-00000001"), cards(2), {})
    assert mixed.producers == (CPU,)
    assert mixed.trainer.index == 1


def test_auto_with_the_cpu_build_leaves_gpus_alone_and_says_so(monkeypatch):
    monkeypatch.setattr(choose, "_is_cpu_build", lambda: True)
    d = choose.choose_gpus(settings(devices="auto"), cards(2), {})
    assert d.on_cpu
    assert "CPU build" in d.notes[0]
    monkeypatch.setattr(choose, "_is_cpu_build", lambda: False)
    assert not choose.choose_gpus(settings(devices="auto"), cards(2), {}).on_cpu


# -- sharing one card ------------------------------------------------------------------------------


def test_c28_one_gpu_is_shared_with_a_stated_split():
    d = choose.choose_gpus(settings(count=2), cards(1, 24_000), {})
    assert d.producers[0].memory_mb == 2000  # a sixth of the card for both
    assert d.trainer.memory_mb == 24_000 - 2 * 2000 - 3 * DRIVER_MB
    assert "is shared" in d.notes[0]
    assert "2000 MB" in d.notes[0]


def test_the_split_counts_what_is_free_and_refuses_too_little():
    full = Listing((Gpu(0, "b", "GPU-a", "Card", 12_000, 3_000),))
    with pytest.raises(BadInput, match="3000 of 12000 MB free"):
        choose.choose_gpus(settings(), full, {})
    assert (
        choose.choose_gpus(settings(), choose.without_use(full), {}).trainer.memory_mb
        == 12_000 - 2000 - 2 * DRIVER_MB
    )


def test_an_explicit_cap_holds_for_each_producer_shared_or_not():
    shared = choose.choose_gpus(settings(gpu_memory_mb=3000), cards(1), {})
    assert (shared.producers[0].memory_mb, shared.trainer.memory_mb) == (
        3000,
        24_000 - 3000 - 2 * DRIVER_MB,
    )
    apart = choose.choose_gpus(settings(gpu_memory_mb=3000), cards(2), {})
    assert (apart.producers[0].memory_mb, apart.trainer.memory_mb) == (3000, None)


def test_one_more_producer_takes_what_is_free_on_the_trainers_card():
    busy = Listing(
        (Gpu(0, "b", "GPU-a", "Card", 24_000, 2_000), Gpu(1, "c", "GPU-b", "Card", 24_000, 20_000))
    )
    asked = settings(data_gpu="1", model_gpu="0")
    assert choose.choose_one(asked, None, 0, busy, {}).visible == "GPU-b"
    assert choose.choose_one(asked, "0", 0, busy, {}).memory_mb == 800
    assert choose.choose_one(asked, "cpu", 0, busy, {}) == CPU
    with pytest.raises(BadInput, match="100 MB free"):
        choose.choose_one(
            asked, "0", 0, Listing((Gpu(0, "b", "GPU-a", "Card", 24_000, 100), busy.gpus[1])), {}
        )


# -- the child's environment -----------------------------------------------------------------------


def test_c23_environment_pins_one_card():
    two = choose.choose_gpus(settings(), cards(2), {})
    env = choose.child_env(two.trainer, {})
    assert env["CUDA_VISIBLE_DEVICES"] == "GPU-00000001-aaaa"
    assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert (env[choose.DEVICE], env[choose.MEMORY_LIMIT]) == ("gpu", None)
    assert env["OMP_NUM_THREADS"] == "1"
    assert choose.child_env(CPU, {})["CUDA_VISIBLE_DEVICES"] == "-1"
    assert choose.child_env(CPU, {"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("given", "shared", "expected"),
    [(None, False, "true"), ("false", False, "false"), ("true", True, None), (None, True, None)],
)
def test_c28_growth_is_the_default_and_a_limit_wins_over_it(given, shared, expected):
    around = {} if given is None else {"TF_FORCE_GPU_ALLOW_GROWTH": given}
    d = choose.choose_gpus(settings(), cards(1 if shared else 2), around)
    assert choose.child_env(d.trainer, around)["TF_FORCE_GPU_ALLOW_GROWTH"] == expected
    said = [
        note for note in d.notes if note.startswith(f"TF_FORCE_GPU_ALLOW_GROWTH={given} is ignored")
    ]
    assert len(said) == (given is not None and shared)


# -- NVML ------------------------------------------------------------------------------------------


class FakeNvml:
    """Two cards; the second is cut into two MIG slices of its seven places."""

    NVML_DEVICE_MIG_ENABLE = 1

    class NVMLError(Exception):
        pass

    def __init__(self, fails: str | None = None):
        self.fails = fails
        self.open = 0

    def nvmlInit(self):
        if self.fails == "init":
            raise self.NVMLError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlSystemGetDriverVersion(self):
        return b"580.159.04"

    def nvmlSystemGetCudaDriverVersion(self):
        return 13000

    def nvmlDeviceGetCount(self):
        if self.fails == "count":
            raise self.NVMLError("Unknown Error")
        return 2

    def nvmlDeviceGetHandleByIndex(self, i):
        return ("card", i)

    def nvmlDeviceGetMigMode(self, card):
        if card[1] == 0:
            raise self.NVMLError("Not Supported")
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, card):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card, i):
        if i not in (0, 3):
            raise self.NVMLError("Not Found")
        return ("slice", i)

    def nvmlDeviceGetMemoryInfo(self, handle):
        total = 80 << 30 if handle[0] == "card" else 10 << 30
        return type("M", (), {"total": total, "free": total // 2})

    def nvmlDeviceGetPciInfo(self, card):
        return type("P", (), {"busId": f"0000000{card[1]}:65:00.0".encode()})

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{handle[1]}" if handle[0] == "card" else f"MIG-{handle[1]}"

    def nvmlDeviceGetName(self, handle):
        return "Card" if handle[0] == "card" else "Card MIG 1g.10gb"


def test_nvml_lists_cards_and_mig_slices_in_place_of_their_card():
    nvml = FakeNvml()
    listing = list_gpus(nvml)
    assert [(g.index, g.uuid, g.memory_mb, g.free_mb) for g in listing.gpus] == [
        (0, "GPU-0", 81920, 40960), (1, "MIG-0", 10240, 5120), (2, "MIG-3", 10240, 5120),
    ]  # fmt: skip
    assert listing.driver == "580.159.04 (up to CUDA 13.0)"
    assert nvml.open == 0


def test_nvml_failures_become_reasons():
    assert "Driver Not Loaded" in list_gpus(FakeNvml("init")).reason
    broken = FakeNvml("count")
    assert "Unknown Error" in list_gpus(broken).reason
    assert broken.open == 0
