"""Gradients added up over all trainers by tf.distribute's collectives: NCCL between GPUs, rings
over TCP between CPUs.

TensorFlow's context of a process is made with its place among the trainers, so `Collectives` comes
before any operation. Nothing else of tf.distribute is used: variables are plain ones, outside the
strategy's scope.

Its collective server listens on all of the host's interfaces, and serves whoever connects: on a
machine in an open network, keep its ports behind a firewall (docs/trainers.md).
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence

import tensorflow as tf

from common.gpu.faults import is_of_device
from trainer.ranks.words import RankLost

log = logging.getLogger(__name__)

PACK_BYTES = 48 << 20  # gradients travel in packs of at least this size: one block's
FIRST_TIMEOUT_S = 300.0  # of the first sum, in which connections are made


def cluster(
    rank: int, addresses: Sequence[str], on_gpu: bool
) -> tf.distribute.cluster_resolver.ClusterResolver:
    """What tf.distribute has to know of the trainers."""
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": list(addresses)}),
        task_type="worker",
        task_id=rank,
        rpc_layer="grpc",
        # tf.distribute does not look: without it, sums go through host memory, by rings over TCP.
        num_accelerators={"GPU": 1} if on_gpu else {},
    )


class Collectives:
    """This process's end of the sums. The constructor waits for all trainers.

    Args:
        rank: of this trainer.
        addresses: host:port of every trainer's collective server, by rank.
        on_gpu: whether the trainers compute on GPUs.
        dtype: in which gradients travel; "float32" or "bfloat16".
        timeout_s: of a sum.
    """

    def __init__(
        self, rank: int, addresses: Sequence[str], *, on_gpu: bool, dtype: str, timeout_s: float
    ):
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "grpc_proxy"):
            os.environ.pop(name, None)  # gRPC would look for 127.0.0.1 behind it
        dist = tf.distribute
        kinds = dist.experimental.CommunicationImplementation
        kind = kinds.NCCL if on_gpu else kinds.RING
        self._options = [
            dist.experimental.CommunicationOptions(
                # One byte: no packs of its own. They would take an operation or more per tensor.
                bytes_per_pack=1,
                timeout_seconds=seconds,
                implementation=kind,
            )
            for seconds in (FIRST_TIMEOUT_S, timeout_s)
        ]
        self._strategy = dist.MultiWorkerMirroredStrategy(
            cluster(rank, addresses, on_gpu), self._options[0]
        )
        (device,) = self._strategy.extended.worker_devices
        assert on_gpu == ("GPU" in device), f"sums would be made on {device}"
        self._dtype = tf.as_dtype(dtype)
        self._functions: dict[tuple, object] = {}
        # As programs of XLA on GPUs: one kernel each, where TensorFlow has some per tensor.
        self._pack = tf.function(packed, autograph=False, jit_compile=on_gpu)
        self._unpack = tf.function(unpack, autograph=False, jit_compile=on_gpu)

    def add_up(self, gradients: Sequence[tf.Variable], losses: tf.Variable) -> None:
        """See `Ranks.add_up`. RankLost: another trainer did not take part."""
        key = id(losses), len(gradients)
        first = key not in self._functions
        if first:
            self._functions[key] = self._function(list(gradients), losses, self._options[1])
            function = self._function(list(gradients), losses, self._options[0])
        else:
            function = self._functions[key]
        try:
            function()
        except (tf.errors.OpError, RuntimeError) as e:
            if is_of_device(e):
                raise
            said = str(e).splitlines()[0][:200]
            raise RankLost(
                f"gradients could not be added up, as another trainer is gone or hangs"
                f" ({type(e).__name__}: {said}); all trainers start again"
            ) from e

    def abort(self) -> None:
        """End a sum that waits for a trainer which is gone; called in any thread."""
        from tensorflow.python.eager import context

        with contextlib.suppress(tf.errors.OpError, RuntimeError):
            context.context().abort_collective_ops(tf.errors.UNAVAILABLE, "another trainer is gone")

    def _function(self, gradients: list[tf.Variable], losses: tf.Variable, options):
        device = self._strategy.extended.worker_devices[0]
        packs = packs_of(gradients)

        def summed():
            replica = tf.distribute.get_replica_context()
            with tf.device(device):
                sent = [self._pack(self._dtype, *pack) for pack in packs]
                loss = tf.identity(losses)  # in float32 always: a pack has one dtype
            total = tf.distribute.ReduceOp.SUM
            sums = replica.all_reduce(total, sent, options) if sent else []
            return sums, replica.all_reduce(total, loss, options)

        def run():
            sums, loss = self._strategy.run(summed)
            with tf.device(device):
                for pack, flat in zip(packs, sums, strict=True):
                    self._unpack(flat, *pack)
            losses.assign(loss)

        return tf.function(run, autograph=False)


def packed(dtype: tf.DType, *variables: tf.Variable) -> tf.Tensor:
    """One tensor of all their elements, in `dtype`."""
    flat = [tf.reshape(v.read_value(), [-1]) for v in variables]
    return tf.cast(tf.concat(flat, 0), dtype)


def unpack(flat: tf.Tensor, *variables: tf.Variable) -> None:
    """Inverse of `packed`: the variables take the elements."""
    parts = tf.split(flat, [v.shape.num_elements() for v in variables])
    for variable, part in zip(variables, parts, strict=True):
        variable.assign(tf.cast(tf.reshape(part, variable.shape), variable.dtype))


def packs_of(variables: Sequence[tf.Variable]) -> list[list[tf.Variable]]:
    """The variables in their order, in packs of PACK_BYTES or a little more; the last is less."""
    packs: list[list[tf.Variable]] = []
    size = PACK_BYTES
    for variable in variables:
        if size >= PACK_BYTES:
            packs.append([])
            size = 0
        packs[-1].append(variable)
        size += variable.shape.num_elements() * variable.dtype.size
    return packs
