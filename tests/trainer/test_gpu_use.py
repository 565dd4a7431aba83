"""How busy the cards of a run are, and which are looked at."""

import threading

from trainer.report.gpu_use import GpuUse, Use, uuid_of
from trainer.report.watch import spare

UUIDS = [f"GPU-0000000{i}-1111-2222-3333-444444444444" for i in range(3)]


class FakeNvml:
    """Three cards; utilisation 10, 20, … % and memory that grows at each question."""

    NVML_DEVICE_MIG_ENABLE = 1

    class NVMLError(Exception):
        pass

    def __init__(self):
        self.asked = 0

    def __getattr__(self, name):
        if name in ("nvmlInit", "nvmlShutdown"):
            return lambda: None
        raise AttributeError(name)

    def nvmlDeviceGetCount(self):  # noqa: N802
        return 3

    def nvmlDeviceGetHandleByIndex(self, i):  # noqa: N802
        return i

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        return UUIDS.index(uuid)

    def nvmlDeviceGetMigMode(self, card):  # noqa: N802
        raise self.NVMLError("not supported")

    def nvmlDeviceGetMemoryInfo(self, h):  # noqa: N802
        self.asked += 1
        return type(
            "M",
            (),
            {"total": 80 << 30, "free": 0, "used": (h + 1) * (1 << 30) + (self.asked << 20)},
        )

    def nvmlDeviceGetUtilizationRates(self, h):  # noqa: N802
        return type("U", (), {"gpu": 10 * (h + 1)})

    def nvmlDeviceGetPciInfo(self, h):  # noqa: N802
        return type("P", (), {"busId": f"0000:0{h}:00.0"})

    def nvmlDeviceGetUUID(self, h):  # noqa: N802
        return UUIDS[h]

    def nvmlDeviceGetName(self, h):  # noqa: N802
        return "Fake"

    def nvmlSystemGetCudaDriverVersion(self):  # noqa: N802
        return 12040

    def nvmlSystemGetDriverVersion(self):  # noqa: N802
        return "1.2"


def test_the_cards_of_both_roles_are_sampled_and_no_other():
    labels = [
        ("trainer", f"GPU {UUIDS[1]} (0000:01:00.0, Fake)"),
        ("producer", f"GPU {UUIDS[0]} (x)"),
        ("producer", "CPU"),
    ]
    use = GpuUse(lambda: labels, FakeNvml())
    try:
        found = []
        for _ in range(900):
            threading.Event().wait(0.1)
            if len(found := use.take(keep=True)) == 2:
                break
        again = use.take()
        assert [u.index for u in again] == [0, 1], "what was kept is told again"
        assert [(u.index, u.roles, u.percent) for u in found] == [
            (0, ("producer",), 10.0),
            (1, ("trainer",), 20.0),
        ]
        assert found[1].memory_mb > 2 << 10
        assert found[1].total_mb == 80 << 10
        assert str(found[1]).startswith("GPU 1 (trainer) 20 %, 2.")
    finally:
        use.close()
    assert uuid_of(labels[0][1]) == UUIDS[1]
    assert uuid_of("CPU") is None


def test_a_card_with_little_to_do_is_mentioned():
    busy, idle = (
        Use(0, ("trainer",), 97.0, 60 << 10, 80 << 10),
        Use(1, ("producer",), 6.0, 10 << 10, 80 << 10),
    )
    assert spare([busy, idle]).startswith("GPU 1 is 6 % busy making batches: 70 GB are free")
    assert spare([busy]) == ""
    assert spare([Use(0, ("trainer", "producer"), 20.0, 1, 2)]) == ""


def test_without_a_driver_there_is_nothing():
    use = GpuUse(lambda: [])
    assert use.take() == []
    use.close()
