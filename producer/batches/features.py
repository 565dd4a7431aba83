"""What the batches of both stages share: compiled functions by shape, usable clips, and the digest
of a fixed signal.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
import xxhash

from common.data.batch import empty_batch
from common.data.manifest import Utterance
from common.data.plan import PlannedBatch
from common.run.folder import RunFolder
from common.run.settings import Config
from common.xtts.operations import Operations, use
from producer.batches.augment import Change, change_of, probe_change
from producer.batches.maker import BatchError, Clip, Made, Work


def configure_tensorflow(config: Config) -> None:
    """Settings that decide the bits of the features, besides the threads; once per process, before
    a function is traced.
    """
    tf.config.experimental.enable_tensor_float_32_execution(False)
    if config.deterministic:
        tf.random.set_seed(config.seed)
        tf.config.experimental.enable_op_determinism()


def on_gpu() -> bool:
    """Whether this process computes on a GPU."""
    return bool(tf.config.list_logical_devices("GPU"))


class StageMaker(ABC):
    """What both stages share: plans, manifest, compiled functions by shape."""

    stage: str

    def __init__(self, run: RunFolder):
        config = run.config
        self.dims, self.mel_dtype = run.dims, config.transport.mel_dtype
        self.feature_hash = run.feature_hash(self.stage)
        self.num_traces = 0
        self._augment, self._manifest = config.augment, run.manifest
        self._plans = {name: run.plan(self.stage, name) for name in ("train", "eval")}
        self._jit = bool(config.jit) and on_gpu()
        self._operations = Operations(products=self._jit)
        self._functions: dict[tuple[int, ...], tf.types.experimental.ConcreteFunction] = {}

    def plan(self, name: str, g: int) -> PlannedBatch:
        """Batch `g` of plan `name`. IndexError: there is none; KeyError: no such plan."""
        return self._plans[name].batch(g)

    @abstractmethod
    def begin(
        self,
        planned: PlannedBatch,
        clips: Sequence[Clip],
        decoded: Sequence[np.ndarray | Exception],
    ) -> Work:
        """See `producer.batches.maker.Maker`."""

    def make(
        self,
        planned: PlannedBatch,
        clips: Sequence[Clip],
        decoded: Sequence[np.ndarray | Exception],
    ) -> Made:
        """The whole work, at once."""
        return self.begin(planned, clips, decoded).at_once()

    def _bucket(self, planned: PlannedBatch):
        return self._plans[planned.plan].buckets[planned.bucket]

    @abstractmethod
    def _shape(self, planned: PlannedBatch) -> tuple[int, ...]:
        """The shapes that the compiled function depends on."""

    def compiles(self, planned: PlannedBatch) -> bool:
        """True if making this batch will first compile a function."""
        return self._shape(planned) not in self._functions

    def _call(self, shape: tuple[int, ...], body, values: np.ndarray) -> np.ndarray:
        """`body` of one float32 array, through the function compiled for `shape`."""
        if shape not in self._functions:

            def traced(*args):
                self.num_traces += 1
                with use(self._operations):
                    return body(*args)

            # Concrete at once: calling many tf.functions of one source line makes TensorFlow warn
            # of retracing.
            function = tf.function(
                traced,
                input_signature=[tf.TensorSpec(values.shape)],
                jit_compile=self._jit,
                autograph=False,
            )
            self._functions[shape] = function.get_concrete_function()
        return self._functions[shape](tf.constant(values)).numpy()

    def _utterances(self, ids: np.ndarray) -> list[tuple[int, Utterance]]:
        """(row, utterance) of the rows whose id int64[B] is not padding."""
        rows = np.flatnonzero(ids >= 0)
        try:
            return list(zip(rows.tolist(), self._manifest.utterances(ids[rows]), strict=True))
        except KeyError as e:
            raise BatchError(f"plan and manifest disagree: {e.args[0]}") from e

    def _change(self, planned: PlannedBatch, row: int, utterance: int) -> Change | None:
        """What is done to a recording of a row; None: nothing, as in every evaluation."""
        if planned.plan != "train":
            return None
        return change_of(self._augment, int(planned.row_seeds[row]), utterance)

    def _probed(self, num_samples: int) -> np.ndarray:
        """float32[num_samples]: the fixed signal, changed where recordings are, so that producers
        that change it otherwise differ.
        """
        signal = probe_signal(num_samples)
        return probe_change()(signal) if self._augment.share else signal

    def _empty(self, planned: PlannedBatch) -> dict[str, np.ndarray]:
        return empty_batch(self.stage, self._bucket(planned), self.dims, self.mel_dtype)


def usable_clips(
    clips: Sequence[Clip], decoded: Sequence[np.ndarray | Exception], made: Made
) -> list[tuple[Clip, np.ndarray]]:
    """The clips of rows that lack nothing, each with the samples it should have; other rows are
    listed in `made.bad`.
    """
    usable, bad = [], {}
    for clip, samples in zip(clips, decoded, strict=True):
        expected = (
            clip.utterance.num_samples - clip.start
            if clip.num_samples is None
            else clip.num_samples
        )
        if isinstance(samples, Exception):
            bad.setdefault(clip.row, (clip.utterance.id, str(samples)))
        elif len(samples) != expected:
            reason = (
                f"{clip.utterance.path}: {len(samples)} samples, the manifest says {expected}; scan"
                " again"
            )
            bad.setdefault(clip.row, (clip.utterance.id, reason))
        else:
            usable.append((clip, samples))
    made.bad += bad.values()
    return [(clip, samples) for clip, samples in usable if clip.row not in bad]


def probe_signal(num_samples: int) -> np.ndarray:
    """float32[num_samples] within [-1, 1]: a sum of integer-phase triangle waves, so that no libm
    decides its bits.
    """
    t = np.arange(num_samples, dtype=np.int64)
    waves = [
        np.abs((t * step) % 65536 - 32768).astype(np.float32) / 16384 - 1
        for step in (601, 2311, 7919)
    ]
    return (waves[0] / 2 + waves[1] / 4 + waves[2] / 4).astype(np.float32)


def feature_digest(*tensors: tf.Tensor) -> str:
    h = xxhash.xxh3_128(tf.__version__.encode())
    for t in tensors:
        h.update(np.ascontiguousarray(t.numpy()).tobytes())
    return h.hexdigest()
