"""What the trainer asks of a stage's step, and the options that a step is built with. Loads no
TensorFlow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from common.xtts.dims import ModelDims
from common.xtts.options import GptOptions

if TYPE_CHECKING:
    import tensorflow as tf

    from common.xtts.operations import Operations

Scalars = dict[str, "tf.Tensor"]
State = dict[str, dict[str, np.ndarray]]
Snapshot = dict[str, dict[str, Any]]


class Program(Protocol):
    """Something to compile ahead of its first use."""

    name: str
    compile: Callable[[], object]


PRODUCTS = ("qkv", "attention", "up", "down")  # of a block, as in `GptBlock.projections`


@dataclass(frozen=True)
class Fp8:
    """Which products of the GPT's blocks have operands in FP8; all else is as with bfloat16.

    Args:
        products: some of `PRODUCTS`.
        dgrad: the gradient of x, too.
        wgrad: the gradient of the weight, too.
    """

    products: tuple[str, ...] = PRODUCTS
    dgrad: bool = True
    wgrad: bool = False


@dataclass(frozen=True)
class StepOptions(GptOptions):
    """Everything about the update and the network except its sizes, named as in the settings.

    Defaults are XTTS's recipe (coqui-tts, recipes/ljspeech/xtts_v2).
    """

    learning_rate: float = 5e-6
    betas: tuple[float, float] = (0.9, 0.96)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    clip_norm: float = 0.0  # 0: no clipping
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: int = 0
    total_steps: int = 0  # where the cosine ends
    final_lr_ratio: float = 0.1  # of learning_rate, at the cosine's end
    text_loss_weight: float = 0.01
    decay_latents: bool = False  # weight decay on the perceiver's latents and gamma, too
    compute_dtype: str = "float32"  # a Keras dtype policy; "mixed_bfloat16" keeps float32 weights
    operations: Operations | None = None  # None: PLAIN
    fp8: Fp8 | None = None  # needs jit
    mel_dtype: str = "float32"  # of cond_mel on arrival
    jit: bool = False  # XLA: faster on GPUs, slower than graph mode on CPUs
    init_seed: int | None = 0  # None: zeros, when weights will be loaded anyway


class Ranks(Protocol):
    """The trainers that share a group, as a step sees them."""

    rank: int
    count: int

    def meet(self, payload: bytes = b"") -> list[bytes]:
        """Every trainer has done its part of the group; what each of them says, by rank."""

    def add_up(self, gradients: Sequence[tf.Variable], losses: tf.Variable) -> None:
        """Each variable becomes its sum over all trainers, with the same bits; after `meet`, by
        all of them, in the same order. `gradients` may be empty.
        """


class Step(Protocol):
    """One stage's arithmetic. A group is any number of `micro` calls followed by one `apply`, or
    one `update`.
    """

    # whether there is something to compile and try before step 1: `dry_run`, `dry_evaluate`,
    # `programs`
    compiles: bool
    dims: ModelDims
    model: Any  # the network; None: the step has none
    options: StepOptions
    trace_counts: Mapping[
        str, int
    ]  # "micro/<bucket>", "update/<bucket>", …, "apply" -> how often traced: 1, or shapes leak

    def micro(
        self, bucket: int, batch: Mapping[str, Any], seed: tuple[int, int], scale: float
    ) -> Scalars:
        """Add `scale` × the gradient of this micro-batch's mean loss to the group. Returns at least
        `loss` (unscaled) and `finite`.
        """

    def apply(self) -> Scalars:
        """Update from the group and begin the next one. Returns at least `loss` (the scaled sum),
        `grad_norm`, `learning_rate`, and `finite`: where it is false, every bit of weights and
        optimizer state is unchanged; only the group was dropped.
        """

    def update(self, bucket: int, batch: Mapping[str, Any], seed: tuple[int, int]) -> Scalars:
        """`micro` with scale 1 and `apply`, for groups of one batch."""

    def evaluate(self, bucket: int, batch: Mapping[str, Any]) -> Scalars:
        """Sums and counts of the losses, without dropout, changing nothing."""

    def read(self, scalars: Scalars) -> dict[str, float]:
        """The values of what `apply` or `update` returned. Waits for the device."""

    def dry_run(self, bucket: int, grouped: bool) -> None:
        """Run the training function of a bucket (`micro` if `grouped`, else `update`) on rows of
        padding, and change nothing.
        """

    def dry_evaluate(self, bucket: int) -> None:
        """`dry_run` of `evaluate`."""

    def programs(self, bucket: int, grouped: bool, training: bool) -> Sequence[Program]:
        """The programs that training or evaluation on a bucket will call and XLA compiles, slowest
        first; [] if there are none.
        """

    def state_dict(self) -> State:
        """{"model": …, "optimizer": …}, NumPy copies."""

    def snapshot(self) -> Snapshot:
        """Like `state_dict`, but the values become arrays only when NumPy asks for them; they still
        are those of this moment.
        """

    def load_state_dict(self, state: State) -> None:
        """Inverse of `state_dict`; drops an unfinished group. WeightsError if a part does not fit;
        that part then stays as it was.
        """


class SharedStep(Step, Protocol):
    """A step that several trainers can make together."""

    def share(self, ranks: Ranks) -> None:
        """From now on, a group is what all trainers have added up: `apply` meets the others, and
        all make the same update.
        """

    def time_sum(self) -> tuple[int, float]:
        """Add up gradients that are zeros, at the beginning of a group and by all trainers at
        once: how many elements, and the seconds that the fastest of some sums took.
        """

    def digests(self) -> dict[str, str]:
        """Name → digest of each tensor of the weights as they are. Waits for the device."""
