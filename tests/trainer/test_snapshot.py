"""What a save holds on the device: values that later updates do not change, within the room that
the steps leave.
"""

import numpy as np
import pytest
import tensorflow as tf

from common.xtts.layers import Linear
from trainer.step import snapshot


@pytest.mark.parametrize("room", [1000, 25, 0])  # bytes: for both tensors, for the first, for none
def test_held_values_survive_updates_in_place(room, monkeypatch):
    """XLA writes an update into the variable's own memory, unless something else refers to it."""
    monkeypatch.setattr(snapshot.ROOM, "take", lambda num_bytes: min(room, num_bytes))
    layer = Linear(3, 2, name="l")
    layer.initialise(1)
    tensors = list(layer.tensors())

    @tf.function(jit_compile=True)
    def add_one():
        for t in tensors:
            t.variable.value.assign_add(tf.ones_like(t.variable.value))

    before = {t.key: t.variable.numpy() for t in tensors}
    held = snapshot.hold([(t.key, t, t.variable.value) for t in tensors])
    for _ in range(3):
        add_one()
    np.testing.assert_array_equal(np.asarray(held["weight"]), before["weight"].T)  # torch's layout
    np.testing.assert_array_equal(np.asarray(held["bias"]), before["bias"])
    np.testing.assert_allclose(layer.bias.numpy(), before["bias"] + 3)


class Card:
    """A GPU of 1000 MB as TensorFlow tells of it: what its memory came to at most since that was
    last forgotten.
    """

    def __init__(self, monkeypatch):
        self.peak = 0
        config = snapshot.tf.config
        monkeypatch.setattr(config, "list_physical_devices", lambda kind=None: ["GPU:0"])
        monkeypatch.setattr(config, "list_logical_devices", lambda kind=None: ["GPU:0"])
        monkeypatch.setattr(
            config,
            "get_logical_device_configuration",
            lambda gpu: [config.LogicalDeviceConfiguration(memory_limit=1000)],
        )
        monkeypatch.setattr(
            config.experimental, "get_memory_info", lambda device: {"peak": self.peak * 2**20}
        )
        monkeypatch.setattr(
            config.experimental, "reset_memory_stats", lambda device: setattr(self, "peak", 0)
        )


def test_room_is_what_the_steps_leave(monkeypatch):
    """Kernels tried while compiling, and the state held for the save before, are not what a step
    needs.
    """
    card, room = Card(monkeypatch), snapshot.Room()

    def mb(n):
        return n << 20

    card.peak = 990  # tried kernels
    room.measure(lambda: setattr(card, "peak", 600))
    assert room.take(mb(300)) == mb(300)  # 600 + 330
    card.peak = 600 + 300  # steps, while those 300 were held
    assert room.take(mb(300)) == mb(300)
    card.peak = 700 + 300
    assert room.take(mb(300)) == int(mb(300) / 1.1)
    card.peak = 700 + 273
    assert room.take(mb(300)) == pytest.approx(mb(300) / 1.1, rel=2e-3)
    card.peak = 900 + 273
    assert room.take(mb(300)) == pytest.approx(mb(100) / 1.1, rel=1e-2)
    card.peak = 1010 + 91
    assert room.take(mb(300)) == 0


def test_room_is_left_for_the_largest_step_also_when_it_seldom_comes(monkeypatch):
    """It needs 800 of 1000 MB.

    Between saves come steps that need 400, or it comes once the save has let go of what it held.
    """
    card, room = Card(monkeypatch), snapshot.Room()

    def mb(n):
        return n << 20

    room.measure(lambda: setattr(card, "peak", 800))
    card.peak = 400
    assert room.take(mb(300)) == int(mb(200) / 1.1)
    card.peak = 400 + 181
    assert room.take(mb(300)) == int(mb(200) / 1.1)
    card.peak = 800  # nothing was held then
    assert room.take(mb(300)) == int(mb(200) / 1.1)
    card.peak = 990 + 181  # a shape that was compiled late: kernels were tried
    assert room.take(mb(300)) < mb(100)
    card.peak = 800
    assert room.take(mb(300)) == int(mb(200) / 1.1), "and no more from then on"
    room.measure(lambda: setattr(card, "peak", 500))  # the next stage
    assert room.take(mb(300)) == mb(300)
