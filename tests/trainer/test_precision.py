"""Precision, the single-call update, recomputation, the dry step and held snapshots: what they may and may not change."""

import dataclasses
import types

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import config as framework_config

from common.data.buckets import Bucket
from common.run import settings as config_module
from common.system.errors import Hopeless
from common.xtts import kernels, weights
from common.xtts.kernels import FAST, PLAIN, Kernels
from common.xtts.layers import Linear
from tests.support.gpt_cases import MICRO, make_batch, model_dims, without_dropout
from trainer import ahead
from trainer.step import precision, snapshot
from trainer.step.gpt import GptStep, StepOptions

SMALL = dataclasses.replace(MICRO, layers=1, cond_blocks=1)
BUCKETS = [Bucket(batch_size=2, row_len=20, text_len=7, num_codes=8), Bucket(batch_size=3, row_len=26, text_len=9, num_codes=12)]


@pytest.fixture
def deterministic():
    tf.config.experimental.enable_op_determinism()
    yield
    framework_config.disable_op_determinism()


@pytest.fixture
def tf32():
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    yield tf.config.experimental.tensor_float_32_execution_enabled
    tf.config.experimental.enable_tensor_float_32_execution(before)


def small_step(buckets=BUCKETS, **options):
    return GptStep(model_dims(SMALL), StepOptions(learning_rate=1e-2, **options), buckets)


def bits(state):
    return {f"{part}/{key}": np.asarray(array).tobytes() for part, arrays in state.items() for key, array in arrays.items()}


def gradients_of(step, batch, seed=None, jit=False):
    @tf.function(jit_compile=jit, autograph=False)
    def run():
        with kernels.use(step.kernels):
            _, losses, gradients = step._gradients({k: tf.constant(v) for k, v in batch.items()}, seed)
        return losses, gradients

    losses, gradients = run()
    return losses.numpy(), {t.key: g.numpy() for t, g in zip(step.optimizer.tensors, gradients, strict=True)}


# -- the update in one call -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("deterministic")
def test_update_is_micro_and_apply_to_the_bit():
    one, other = small_step(BUCKETS[:1]), small_step(BUCKETS[:1])
    for i in range(3):
        batch = make_batch(BUCKETS[0], seed=i)
        one.micro(0, batch, (7, i), 1.0)
        left, right = one.read(one.apply()), other.read(other.update(0, batch, (7, i)))
        # TensorFlow adds the squares up in another order in another graph; it is a report, and without clipping nothing depends on it.
        assert left.pop("grad_norm") == pytest.approx(right.pop("grad_norm"), rel=1e-6)
        assert left == right
    assert bits(one.state_dict()) == bits(other.state_dict())
    assert dict(other.trace_counts) == {"update/0": 1}
    assert other._accumulators == []  # as large as the weights, and not needed


def test_update_skips_what_is_not_finite():
    step, batch = small_step(), make_batch(BUCKETS[0])
    batch["cond_mel"][0, 3, 5] = np.nan
    before = bits(step.state_dict())
    assert not step.read(step.update(0, batch, (0, 0)))["finite"]
    assert bits(step.state_dict()) == before


# -- the dry step ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("deterministic")
def test_a_dry_run_compiles_what_training_uses_and_changes_nothing():
    dims, batch = model_dims(without_dropout(SMALL)), make_batch(BUCKETS[1])
    step = GptStep(dims, StepOptions(), BUCKETS[1:])
    step.dry_run(0, grouped=False)
    step.dry_run(0, grouped=True)
    assert bits(step.state_dict()) == bits(GptStep(dims, StepOptions(), []).state_dict())
    assert step.optimizer.t.numpy() == 0
    once = {t.key: 0.1 * g for t, g in zip(step.optimizer.tensors, gradients_of(step, batch)[1].values(), strict=True)}
    step.micro(0, batch, (0, 2), 1.0)
    step.apply()
    for t, m in zip(step.optimizer.tensors, step.optimizer.exp_avg, strict=True):  # a group begun by the dry run would show here
        np.testing.assert_allclose(m.numpy(), once[t.key], rtol=1e-3, atol=1e-6, err_msg=t.key)
    assert dict(step.trace_counts) == {"update/0": 1, "micro/0": 1, "apply": 1}


class Full:
    """A step that does not fit."""

    dims = model_dims(SMALL)

    def __init__(self, error):
        self.error, self.asked = error, []

    def dry_run(self, bucket, grouped):
        self.asked.append((bucket, grouped))
        raise self.error


def a_stage(step, buckets=BUCKETS, accumulate=1):
    schedule = types.SimpleNamespace(train=types.SimpleNamespace(buckets=buckets), accumulate=accumulate)
    return types.SimpleNamespace(step=step, schedule=schedule)


OBSERVER = types.SimpleNamespace(compiling=lambda *args: None)


@pytest.mark.parametrize(
    "error",
    [
        tf.errors.ResourceExhaustedError(None, None, "OOM"),
        tf.errors.InternalError(None, None, "RESOURCE_EXHAUSTED: Out of memory"),
        MemoryError(),
    ],
    ids=lambda e: type(e).__name__,
)
def test_out_of_memory_shows_before_step_1_with_advice(error):
    step = Full(error)
    with pytest.raises(Hopeless, match=r"bucket 1 \(3 rows x 26 positions\); try --batch-size 1, or train.recompute=true") as raised:
        ahead.dry_step(a_stage(step, accumulate=2), OBSERVER)
    assert raised.value.exit_code == 3
    assert step.asked == [(1, True)]


def test_other_errors_of_the_dry_step_are_not_called_memory():
    with pytest.raises(ZeroDivisionError):
        ahead.dry_step(a_stage(Full(ZeroDivisionError())), OBSERVER)
    ahead.prepare(a_stage(object()), OBSERVER)  # a step without one has nothing to prove


class Noting:
    """A step that notes what it is asked to compile."""

    dims, options = model_dims(SMALL), StepOptions(jit=True)

    def __init__(self, full=()):
        self.full, self.asked = full, []

    def dry_run(self, bucket, grouped):
        self.asked.append(("training", bucket))
        if bucket in self.full:
            raise MemoryError

    def dry_evaluate(self, bucket):
        self.asked.append(("evaluation", bucket))


def test_every_function_is_compiled_ahead_the_largest_alone_and_first(caplog):
    caplog.set_level("INFO")
    smaller = [dataclasses.replace(BUCKETS[0], row_len=n) for n in (10, 12, 14)]
    step = Noting(full=(1,))
    stage = a_stage(step, [*smaller[:2], BUCKETS[1], smaller[2]])
    stage.schedule.eval = types.SimpleNamespace(batch=lambda g: types.SimpleNamespace(bucket=[0, 3, 0][g]))
    stage.schedule.num_eval_batches = 3
    ahead.prepare(stage, OBSERVER)
    assert step.asked[0] == ("training", 2)
    assert sorted(step.asked[1:]) == [("evaluation", 0), ("evaluation", 3), ("training", 0), ("training", 1), ("training", 3)]
    assert "no memory to compile training of bucket 1 ahead" in caplog.text
    stopped = Noting()
    stage.step = stopped
    ahead.prepare(stage, OBSERVER, should_stop=lambda: True)
    assert stopped.asked == [("training", 2)]


# -- recomputation, snapshots -----------------------------------------------------------------------------------------------------------


def test_recomputed_blocks_have_the_same_gradients():
    seed, chosen = tf.constant([3, 4]), Kernels(dropout="hash")
    plain = gradients_of(small_step([], kernels=chosen), make_batch(BUCKETS[0]), seed)
    again = gradients_of(small_step([], kernels=chosen, recompute=True, jit=True), make_batch(BUCKETS[0]), seed, jit=True)
    np.testing.assert_allclose(again[0], plain[0], rtol=1e-6)
    for key, gradient in plain[1].items():
        np.testing.assert_allclose(again[1][key], gradient, atol=1e-5 * np.abs(gradient).max() + 1e-9, err_msg=key)


def test_a_snapshot_is_of_its_moment_whatever_follows():
    step = small_step(BUCKETS[:1])
    step.update(0, make_batch(BUCKETS[0]), (0, 1))
    want, held = step.state_dict(), step.snapshot()
    step.update(0, make_batch(BUCKETS[0]), (0, 2))
    assert bits(step.state_dict()) != bits(want)
    assert bits(held) == bits(want)
    for part, arrays in want.items():
        for key, array in arrays.items():
            assert (held[part][key].shape, held[part][key].dtype, held[part][key].nbytes) == (array.shape, array.dtype, array.nbytes)


@pytest.mark.parametrize("room", [1000, 25, 0])  # bytes: for both tensors, for the first, for none
def test_held_values_survive_updates_in_place(room, monkeypatch):
    """XLA writes an update into the variable's own memory, unless somebody holds it."""
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
    """A GPU of 1000 MB as TensorFlow tells of it: what its memory came to at most since that was last forgotten."""

    def __init__(self, monkeypatch):
        self.peak = 0
        config = snapshot.tf.config
        monkeypatch.setattr(config, "list_physical_devices", lambda kind=None: ["GPU:0"])
        monkeypatch.setattr(config, "list_logical_devices", lambda kind=None: ["GPU:0"])
        monkeypatch.setattr(config, "get_logical_device_configuration", lambda gpu: [config.LogicalDeviceConfiguration(memory_limit=1000)])
        monkeypatch.setattr(config.experimental, "get_memory_info", lambda device: {"peak": self.peak * 2**20})
        monkeypatch.setattr(config.experimental, "reset_memory_stats", lambda device: setattr(self, "peak", 0))


def test_room_is_what_the_steps_leave(monkeypatch):
    """Kernels tried while compiling, and the state held for the save before, are not what a step needs."""
    card, room = Card(monkeypatch), snapshot.Room()
    mb = lambda n: n << 20  # noqa: E731
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
    """It needs 800 of 1000 MB. Between saves come steps that need 400, or it comes once the save has let go of what it held."""
    card, room = Card(monkeypatch), snapshot.Room()
    mb = lambda n: n << 20  # noqa: E731
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


# -- bfloat16 ----------------------------------------------------------------------------------------------------------------------------


def test_bfloat16_gradients_are_those_of_float32_but_for_rounding():
    """At most 2 % of a tensor's norm, with the kernels used on GPUs but for the fused attention."""
    dims, batch = model_dims(without_dropout(SMALL)), make_batch(BUCKETS[0])
    fast = dataclasses.replace(FAST, attention="plain")
    steps = [GptStep(dims, o, []) for o in (StepOptions(), StepOptions(compute_dtype="mixed_bfloat16", kernels=fast, jit=True))]
    (loss, want), (rounded, got) = (gradients_of(s, batch, jit=s.options.jit) for s in steps)
    np.testing.assert_allclose(rounded, loss, rtol=2e-3)
    for key, gradient in want.items():
        assert got[key].dtype == np.float32
        assert np.linalg.norm(got[key] - gradient) <= 0.03 * np.linalg.norm(gradient), key
    together = [np.concatenate([g[key].ravel() for key in want]) for g in (got, want)]
    assert np.linalg.norm(together[0] - together[1]) <= 0.01 * np.linalg.norm(together[1])


# -- copies of the weights -----------------------------------------------------------------------------------------------------------------


def copied_step(kept: bool, **options):
    chosen = dataclasses.replace(FAST, attention="plain", embedding_grad="matmul", weight_copies=kept)
    return small_step(BUCKETS[:1], compute_dtype="mixed_bfloat16", kernels=chosen, **options)


def copies_are_the_weights(step):
    assert len(step._copies) == sum(t.decay == "yes" for t in step.optimizer.tensors)
    for t in step.optimizer.tensors:
        if id(t.variable) in step._copies:
            np.testing.assert_array_equal(step._copies[id(t.variable)].numpy(), tf.cast(t.variable.value, tf.bfloat16).numpy(), t.key)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.slow
def test_copies_of_the_weights_change_no_bit_and_follow_every_update():
    """With blocks recomputed, too, where the copies have to be in force in the backward pass."""
    steps, batch, broken = [copied_step(kept, recompute=True) for kept in (False, True)], make_batch(BUCKETS[0]), make_batch(BUCKETS[0])
    broken["cond_mel"][0, 3, 5] = np.nan
    found = []
    for step in steps:
        reports = [step.read(step.update(0, batch, (0, i))) for i in range(2)]
        reports.append(step.read(step.update(0, broken, (0, 3))))
        step.micro(0, batch, (0, 4), 1.0)
        reports.append(step.read(step.apply()))
        reports.append({k: float(v) for k, v in step.evaluate(0, batch).items()})
        found.append((reports, bits(step.state_dict())))
    assert [r.get("finite") for r in found[0][0]] == [True, True, False, True, None]
    assert repr(found[0][0]) == repr(found[1][0])
    assert found[0][1] == found[1][1]
    copies_are_the_weights(steps[1])


def test_copies_of_the_weights_follow_what_is_loaded():
    step, state = copied_step(kept=True), small_step([]).state_dict()
    changed = {key: array + 1 for key, array in state["model"].items()}
    step.load_state_dict({**state, "model": changed})
    copies_are_the_weights(step)
    weights.load_state_dict(step.model, state["model"])
    step.weights_changed()
    copies_are_the_weights(step)


# -- what is chosen -----------------------------------------------------------------------------------------------------------------------


def resolved(on_cpu, **train):
    return config_module.resolve(config_module.parse({"train": train}), on_cpu, cores=2)


def test_precision_is_decided_when_the_run_is_created():
    assert (resolved(True).train.precision, resolved(True).train.attention_dropout) == ("fp32", 0.1)
    assert (resolved(False).train.precision, resolved(False).train.attention_dropout) == ("bf16", 0.0)
    without = config_module.resolve(config_module.parse({"jit": False}), False, cores=2)
    assert (without.train.precision, without.train.attention_dropout) == ("tf32", 0.1)
    asked = resolved(False, precision="tf32")
    assert (asked.train.precision, asked.train.attention_dropout) == ("tf32", 0.1)
    assert resolved(False, attention_dropout=0.2).train.attention_dropout == 0.2


def test_the_cpu_computes_plainly_and_says_so(caplog, tf32):
    caplog.set_level("INFO")
    assert precision.choose(resolved(True)) == precision.Precision("float32", PLAIN)
    assert "precision fp32, plain attention" in caplog.text
    for name in ("tf32", "fp32", "bf16"):
        precision.allow_tf32(resolved(True, precision=name))
        assert tf32() == (name != "fp32")
    assert precision.choose(resolved(True, precision="bf16")).compute_dtype == "float32"
    assert "train.precision bf16 needs a GPU and jit: fp32" in caplog.text


@pytest.fixture
def a_gpu(monkeypatch):
    """A card of some age, as far as this module can tell."""

    def put(capability, reason):
        config = types.SimpleNamespace(
            list_logical_devices=lambda kind: ["GPU:0"],
            list_physical_devices=lambda kind: ["GPU:0"],
            experimental=types.SimpleNamespace(
                get_device_details=lambda device: {"compute_capability": capability}, enable_tensor_float_32_execution=lambda on: None
            ),
        )
        monkeypatch.setattr(precision, "tf", types.SimpleNamespace(config=config))
        monkeypatch.setattr(precision, "why_not", lambda: reason)

    return put


def test_a_gpu_gets_the_fast_kernels_after_a_check(a_gpu, caplog):
    caplog.set_level("INFO")
    a_gpu((9, 0), None)
    assert precision.choose(resolved(False, precision="bf16")) == precision.Precision("mixed_bfloat16", FAST)
    assert "fused attention (cuDNN), no attention dropout" in caplog.text
    deterministic = precision.choose(resolved(False, precision="bf16").model_copy(update={"deterministic": True}))
    assert deterministic.kernels.embedding_grad == "matmul"
    a_gpu((9, 0), "cuDNN is too old")
    assert precision.choose(resolved(False, precision="bf16")).kernels == dataclasses.replace(FAST, attention="plain")
    assert "precision bf16, plain attention: cuDNN is too old" in caplog.text


def test_an_old_card_computes_in_float32_and_says_so(a_gpu, caplog):
    a_gpu((7, 5), None)
    assert precision.choose(resolved(False, precision="bf16")) == precision.Precision("float32", PLAIN)
    assert "needs compute capability 8.0, this card has 7.5: fp32" in caplog.text
