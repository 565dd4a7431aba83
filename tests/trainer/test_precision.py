"""Precision, the single-call update, recomputation, the dry step and held snapshots: what they may
and may not change.
"""

import dataclasses
import threading
import types

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import config as framework_config

from common.data.buckets import Bucket
from common.run import settings as config_module
from common.system.errors import Hopeless, Stopped
from common.system.lifecycle import Stop
from common.xtts import kernels
from common.xtts.kernels import FAST, PLAIN, Kernels
from common.xtts.layers import Linear
from tests.support.gpt_cases import MICRO, make_batch, model_dims, without_dropout
from trainer import ahead
from trainer.history.schedule import Position
from trainer.step import precision, programs, snapshot
from trainer.step.gpt import GptStep, StepOptions

SMALL = dataclasses.replace(MICRO, layers=1, cond_blocks=1)
BUCKETS = [
    Bucket(batch_size=2, row_len=20, text_len=7, num_codes=8),
    Bucket(batch_size=3, row_len=26, text_len=9, num_codes=12),
]


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
    return {
        f"{part}/{key}": np.asarray(array).tobytes()
        for part, arrays in state.items()
        for key, array in arrays.items()
    }


def gradients_of(step, batch, seed=None, jit=False):
    @tf.function(jit_compile=jit, autograph=False)
    def run():
        with kernels.use(step.kernels):
            _, losses, gradients = step._gradients(
                {k: tf.constant(v) for k, v in batch.items()}, seed
            )
        return losses, gradients

    losses, gradients = run()
    return losses.numpy(), {
        t.key: g.numpy() for t, g in zip(step.optimizer.tensors, gradients, strict=True)
    }


# -- the update in one call ------------------------------------------------------------------------


@pytest.mark.usefixtures("deterministic")
def test_update_is_micro_and_apply_to_the_bit():
    one, other = small_step(BUCKETS[:1]), small_step(BUCKETS[:1])
    for i in range(3):
        batch = make_batch(BUCKETS[0], seed=i)
        one.micro(0, batch, (7, i), 1.0)
        left, right = one.read(one.apply()), other.read(other.update(0, batch, (7, i)))
        # TensorFlow adds the squares up in another order in another graph; it is a report, and
        # without clipping nothing depends on it.
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


def test_xlas_programs_compute_what_one_graph_does(monkeypatch):
    """Updates, groups and evaluations as a chain of programs, blocks one by one, against one graph
    of the same operations.
    """
    monkeypatch.setattr(programs, "BLOCKS_PER_PROGRAM", 1)
    dims = model_dims(dataclasses.replace(SMALL, layers=2))
    options = StepOptions(
        learning_rate=1e-2,
        clip_norm=0.5,
        code_dropout=0.2,
        kernels=Kernels(dropout="hash", lean=True, wide_residual=True),
    )
    one, chain = (
        GptStep(dims, dataclasses.replace(options, jit=jit), BUCKETS[:1]) for jit in (False, True)
    )
    for i in range(2):
        batch = make_batch(BUCKETS[0], seed=i)
        left, right = (
            one.read(one.update(0, batch, (7, i))),
            chain.read(chain.update(0, batch, (7, i))),
        )
        assert right == pytest.approx(left, rel=1e-4)
    bad = make_batch(BUCKETS[0])
    bad["cond_mel"][0, 3, 5] = np.nan
    before = bits(chain.state_dict())
    assert not chain.read(chain.update(0, bad, (0, 0)))["finite"]
    assert bits(chain.state_dict()) == before
    for step in (one, chain):
        step.micro(0, make_batch(BUCKETS[0], seed=5), (1, 2), 0.25)
        step.micro(0, make_batch(BUCKETS[0], seed=6), (1, 3), 0.75)
    assert chain.read(chain.apply()) == pytest.approx(one.read(one.apply()), rel=1e-4)
    left, right = ({k: float(v) for k, v in s.evaluate(0, batch).items()} for s in (one, chain))
    assert right == pytest.approx(left, rel=1e-4)
    want, got = one.state_dict(), chain.state_dict()
    for key, value in want["model"].items():
        np.testing.assert_allclose(
            got["model"][key], value, atol=5e-4, err_msg=key
        )  # Adam makes much of small gradients
    assert dict(chain.trace_counts) == {"update/0": 1, "micro/0": 1, "apply": 1, "evaluate/0": 1}
    blocks = [
        p for p in chain.programs(0, grouped=False, training=True) if p.name.startswith("1 blocks")
    ]
    assert len(blocks) == 2  # forward and backward, for both blocks


# -- the dry step ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("deterministic")
def test_a_dry_run_compiles_what_training_uses_and_changes_nothing():
    dims, batch = model_dims(without_dropout(SMALL)), make_batch(BUCKETS[1])
    step = GptStep(dims, StepOptions(), BUCKETS[1:])
    step.dry_run(0, grouped=False)
    step.dry_run(0, grouped=True)
    assert bits(step.state_dict()) == bits(GptStep(dims, StepOptions(), []).state_dict())
    assert step.optimizer.t.numpy() == 0
    once = {
        t.key: 0.1 * g
        for t, g in zip(step.optimizer.tensors, gradients_of(step, batch)[1].values(), strict=True)
    }
    step.micro(0, batch, (0, 2), 1.0)
    step.apply()
    for t, m in zip(
        step.optimizer.tensors, step.optimizer.exp_avg, strict=True
    ):  # a group begun by the dry run would show here
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
    schedule = types.SimpleNamespace(
        train=types.SimpleNamespace(buckets=buckets), accumulate=accumulate
    )
    return types.SimpleNamespace(step=step, schedule=schedule)


def a_stopped() -> Stop:
    stop = Stop()
    stop.request("stop", "SIGINT", 130)
    return stop


class Seen:
    """An observer that notes how far the programs are."""

    def __init__(self):
        self.programs, self.tried = [], []

    def compiling_programs(self, number, total, left_s):
        self.programs.append((number, total, left_s is not None))

    def trying(self, what):
        self.tried.append(what)


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
    stage = a_stage(step, accumulate=2)
    assert ahead.largest_bucket(stage) == 1
    with pytest.raises(
        Hopeless,
        match=r"bucket 1 \(3 rows x 26 positions\); try --batch-size 1, or train.recompute=true",
    ) as raised:
        ahead.dry_step(stage, 1)
    assert raised.value.exit_code == 3
    assert step.asked == [(1, True)]


def test_other_errors_of_the_dry_step_are_not_called_memory():
    with pytest.raises(ZeroDivisionError):
        ahead.dry_step(a_stage(Full(ZeroDivisionError())), 0)
    compiles_nothing = types.SimpleNamespace(compiles=False)
    ahead.prepare(a_stage(compiles_nothing), Position(), Seen(), Stop())


class Noting:
    """A step that notes what it is asked to compile.

    Two programs per function; "update" is shared by all buckets' training.
    """

    compiles = True
    dims, options = model_dims(SMALL), StepOptions(jit=True)

    def __init__(self, broken=()):
        self.broken, self.compiled, self.ran = broken, [], []
        self._shared = types.SimpleNamespace(
            name="update", compile=lambda: self.compiled.append("update")
        )

    def dry_run(self, bucket, grouped):
        assert f"training {bucket}" in self.compiled
        self.ran.append((bucket, grouped))

    def programs(self, bucket, grouped, training):
        name = f"{'training' if training else 'evaluation'} {bucket}"

        def compile_():
            self.compiled.append(name)
            if name in self.broken:
                raise MemoryError(name)

        own = types.SimpleNamespace(name=name, compile=compile_)
        return [self._shared, own] if training else [own]


def a_planned_stage(step):
    """Four buckets, the third the largest; the plan asks for 1, 0, an evaluation of 0 and 3, then
    2, 3.
    """
    smaller = [dataclasses.replace(BUCKETS[0], row_len=n) for n in (10, 12, 14)]
    stage = a_stage(step, [*smaller[:2], BUCKETS[1], smaller[2]])
    of = {"train": [1, 0, 2, 3], "eval": [0, 3, 0]}
    for plan in of:
        held = stage.schedule.train if plan == "train" else types.SimpleNamespace()
        held.batch = lambda g, plan=plan: types.SimpleNamespace(bucket=of[plan][g])
        setattr(stage.schedule, plan, held)
    stage.schedule.num_eval_batches = 3
    order = [
        ("train", 0),
        ("train", 1),
        ("eval", 0),
        ("eval", 1),
        ("eval", 2),
        ("train", 2),
        ("train", 3),
    ]
    stage.schedule.batches = lambda position: iter(order[position.next_g :])
    return stage


def test_the_first_steps_programs_are_compiled_before_the_others(caplog):
    caplog.set_level("INFO")
    step, seen = Noting(broken=("training 0",)), Seen()
    stage = a_planned_stage(step)
    compiled = ahead.prepare(stage, Position(), seen, Stop())
    # Before step 1: the largest, the first that the plan asks for, and what they share, once.
    assert sorted(step.compiled[:3]) == ["training 1", "training 2", "update"]
    assert seen.programs == [(1, 3, False), (2, 3, True), (3, 3, True)]
    assert step.ran[0] == (2, False)
    for function in (
        ("evaluation", 3),
        ("training", 3),
        ("training", 0),
    ):  # what failed is no reason to wait, either
        compiled.wait(*function)
    assert sorted(step.compiled[3:]) == ["evaluation 0", "evaluation 3", "training 0", "training 3"]
    assert "training of bucket 0 is not compiled ahead: training 0" in caplog.text


def test_a_step_waits_for_its_program_and_a_stop_ends_the_wait():
    step, released, stop = Noting(), threading.Event(), Stop()
    programs_of, calls = step.programs, []
    endless = types.SimpleNamespace(name="endless", compile=lambda: released.wait(60))
    step.programs = lambda bucket, grouped, training: (
        [endless] if training and bucket == 3 else programs_of(bucket, grouped, training)
    )
    step.update = lambda bucket, *rest: calls.append(bucket)
    try:
        waiting = ahead.prepare(a_planned_stage(step), Position(), Seen(), stop).watch(step)
        waiting.update(1, {}, (0, 0))
        stop.request("stop", "SIGINT", 130)
        with pytest.raises(Stopped):
            waiting.update(3, {}, (0, 0))
    finally:
        released.set()
    assert calls == [1]


def test_the_order_is_the_plans():
    stage = a_planned_stage(Noting())
    training, evaluation = (
        [("training", b) for b in (1, 0, 2, 3)],
        [
            ("evaluation", 0),
            ("evaluation", 3),
        ],
    )
    assert list(ahead.buckets_in_order(stage, Position())) == [
        *training[:2],
        *evaluation,
        *training[2:],
    ]
    resumed = Position(
        next_g=5
    )  # the evaluation's buckets and two of the training's come at some later time
    assert list(ahead.buckets_in_order(stage, resumed)) == [
        *training[2:],
        training[1],
        training[0],
        *evaluation,
    ]


def test_a_stop_does_not_wait_for_a_compilation():
    step, released = Noting(), threading.Event()
    step.programs = lambda *a, **k: [
        types.SimpleNamespace(name="endless", compile=lambda: released.wait(60))
    ]
    try:
        with pytest.raises(Stopped):
            ahead.prepare(a_planned_stage(step), Position(), Seen(), a_stopped())
    finally:
        released.set()
    assert step.ran == []


# -- recomputation, snapshots ----------------------------------------------------------------------


def test_recomputed_blocks_have_the_same_gradients():
    seed, chosen = tf.constant([3, 4]), Kernels(dropout="hash")
    plain = gradients_of(small_step([], kernels=chosen), make_batch(BUCKETS[0]), seed)
    again = gradients_of(
        small_step([], kernels=chosen, recompute=True, jit=True),
        make_batch(BUCKETS[0]),
        seed,
        jit=True,
    )
    np.testing.assert_allclose(again[0], plain[0], rtol=1e-6)
    for key, gradient in plain[1].items():
        np.testing.assert_allclose(
            again[1][key], gradient, atol=1e-5 * np.abs(gradient).max() + 1e-9, err_msg=key
        )


def test_a_snapshot_is_of_its_moment_whatever_follows():
    step = small_step(BUCKETS[:1])
    step.update(0, make_batch(BUCKETS[0]), (0, 1))
    want, held = step.state_dict(), step.snapshot()
    step.update(0, make_batch(BUCKETS[0]), (0, 2))
    assert bits(step.state_dict()) != bits(want)
    assert bits(held) == bits(want)
    for part, arrays in want.items():
        for key, array in arrays.items():
            assert (held[part][key].shape, held[part][key].dtype, held[part][key].nbytes) == (
                array.shape,
                array.dtype,
                array.nbytes,
            )


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


# -- bfloat16 --------------------------------------------------------------------------------------


def test_bfloat16_gradients_are_those_of_float32_but_for_rounding():
    """At most 2 % of a tensor's norm, with the kernels used on GPUs but for the fused attention."""
    dims, batch = model_dims(without_dropout(SMALL)), make_batch(BUCKETS[0])
    fast = dataclasses.replace(FAST, attention="plain")
    steps = [
        GptStep(dims, o, [])
        for o in (
            StepOptions(),
            StepOptions(compute_dtype="mixed_bfloat16", kernels=fast, jit=True),
        )
    ]
    (loss, want), (rounded, got) = (gradients_of(s, batch, jit=s.options.jit) for s in steps)
    np.testing.assert_allclose(rounded, loss, rtol=2e-3)
    for key, gradient in want.items():
        assert got[key].dtype == np.float32
        assert np.linalg.norm(got[key] - gradient) <= 0.03 * np.linalg.norm(gradient), key
    together = [np.concatenate([g[key].ravel() for key in want]) for g in (got, want)]
    assert np.linalg.norm(together[0] - together[1]) <= 0.01 * np.linalg.norm(together[1])


# -- what is chosen --------------------------------------------------------------------------------


def resolved(on_cpu, **train):
    return config_module.resolve(config_module.parse({"train": train}), on_cpu, cores=2)


def test_precision_is_decided_when_the_run_is_created():
    assert (resolved(True).train.precision, resolved(True).train.attention_dropout) == ("fp32", 0.1)
    assert (resolved(False).train.precision, resolved(False).train.attention_dropout) == (
        "bf16",
        0.0,
    )
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
                get_device_details=lambda device: {"compute_capability": capability},
                enable_tensor_float_32_execution=lambda on: None,
            ),
        )
        monkeypatch.setattr(precision, "tf", types.SimpleNamespace(config=config))
        monkeypatch.setattr(precision, "why_not", lambda: reason)

    return put


def test_a_gpu_gets_the_fast_kernels_after_a_check(a_gpu, caplog):
    caplog.set_level("INFO")
    a_gpu((9, 0), None)
    assert precision.choose(resolved(False, precision="bf16")) == precision.Precision(
        "mixed_bfloat16", FAST
    )
    assert "fused attention (cuDNN), no attention dropout" in caplog.text
    deterministic = precision.choose(
        resolved(False, precision="bf16").model_copy(update={"deterministic": True})
    )
    assert deterministic.kernels.embedding_grad == "matmul"
    a_gpu((9, 0), "cuDNN is too old")
    assert precision.choose(resolved(False, precision="bf16")).kernels == dataclasses.replace(
        FAST, attention="plain"
    )
    assert "precision bf16, plain attention: cuDNN is too old" in caplog.text


def test_an_old_card_computes_in_float32_and_says_so(a_gpu, caplog):
    a_gpu((7, 5), None)
    assert precision.choose(resolved(False, precision="bf16")) == precision.Precision(
        "float32", PLAIN
    )
    assert "needs compute capability 8.0, this card has 7.5: fp32" in caplog.text
